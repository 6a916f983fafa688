//! Detach: removes the disk, and deletes the attachment's row once the disk is proven gone.

use infra_api::{AttachmentId, AttachmentState, Change, EventKind};

use super::{Attachments, Progress};
use crate::audit;
use crate::catalog::{AttachmentRow, Tx};
use crate::hypervisor::DetachOutcome;
use crate::service::disks::AttachmentContext;
use crate::service::problems::Result;

impl Attachments {
    pub(super) async fn do_detach(&self, id: &AttachmentId) -> Result<Progress> {
        let key = id.clone();
        let mut found = self.core.catalog().read(move |tx| -> Result<_> { Ok(tx.attachment(&key)?) }).await?;
        if found.is_none() {
            let key = id.clone();
            found = self.core.catalog().run(move |tx| read_for_detach(tx, &key)).await?;
        }
        let Some(row) = found else { return Ok(Progress::Gone) };
        let _lock = self.core.lock_volume(&row.volume).await;
        // Without the disk, nothing would show which file of a move the VM used.
        self.moves.settle(&row.volume, true).await?;
        let key = id.clone();
        let found = self
            .core
            .catalog()
            .run(move |tx| -> Result<_> {
                let Some(row) = read_for_detach(tx, &key)? else { return Ok(None) };
                if row.state != AttachmentState::Detaching {
                    tx.set_attachment_state(&key, AttachmentState::Detaching, None)?;
                }
                Ok(Some(AttachmentContext::of(tx, row)?))
            })
            .await?;
        let Some(mut context) = found else { return Ok(Progress::Gone) };
        if context.row.state != AttachmentState::Detaching {
            self.core.emit(EventKind::Attachment, id, Change::Updated);
            context.row.state = AttachmentState::Detaching;
        }
        let why = match self.disks.detach(&context).await {
            Ok(DetachOutcome::Detached) => {
                let key = id.clone();
                self.core.catalog().run(move |tx| -> Result<_> { Ok(tx.end_attachment(&key)?) }).await?;
                audit::log_removal(format!("attachment {id}"), "its disk is proven to be detached");
                self.records.update_soon(&context.row.volume);
                self.conditions.clear_disk_lost(id);
                self.retries.forget(id);
                self.core.emit(EventKind::Attachment, id, Change::Deleted);
                tracing::info!(attachment = %id, volume = %context.row.volume, node = %context.row.node, "detached");
                return Ok(Progress::Gone);
            }
            Ok(DetachOutcome::StillAttached(why)) => Ok(why),
            Err(failure) => Err(failure),
        };
        let message = match &why {
            Ok(why) => why.clone(),
            Err(failure) => failure.0.detail.clone(),
        };
        if context.row.message.as_ref() != Some(&message) {
            tracing::warn!(attachment = %id, volume = %context.row.volume, node = %context.row.node, %message, "cannot detach yet");
            self.set_state(id, AttachmentState::Detaching, Some(message.clone())).await?;
        }
        context.row.message = Some(message);
        why.map(|_| Progress::InProgress(context.to_attachment()))
    }
}

/// Reads an attachment for its detach. If there is none, its ID is recorded as ended all the same, because a late
/// attach request may still arrive.
fn read_for_detach(tx: &Tx<'_>, id: &AttachmentId) -> Result<Option<AttachmentRow>> {
    let row = tx.attachment(id)?;
    if row.is_none() {
        tx.end_attachment(id)?;
    }
    Ok(row)
}
