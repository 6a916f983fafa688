//! Detach: removes the disk, and deletes the attachment's row once the disk is proven gone.

use infra_api::{AttachmentId, AttachmentState, Change, EventKind};

use super::{AttachmentContext, Progress, describe};
use crate::audit;
use crate::catalog::{AttachmentRow, Tx};
use crate::hypervisor::{DetachOutcome, Disk};
use crate::service::{Result, Service, seconds};

impl Service {
    pub(super) async fn do_detach(&self, id: &AttachmentId) -> Result<Progress> {
        let key = id.clone();
        let mut found = self.0.catalog.read(move |tx| -> Result<_> { Ok(tx.attachment(&key)?) }).await?;
        if found.is_none() {
            let key = id.clone();
            found = self.0.catalog.run(move |tx| read_for_detach(tx, &key)).await?;
        }
        let Some(row) = found else { return Ok(Progress::Gone) };
        let _lock = self.0.locks.lock(row.volume.as_str()).await;
        let key = id.clone();
        let found = self
            .0
            .catalog
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
            self.emit(EventKind::Attachment, id, Change::Updated);
            context.row.state = AttachmentState::Detaching;
        }
        let disk = context.disk(self.engine_of(&context.pool).source(&context.volume.id));
        let result = self.detach_disk(&context, &disk).await;
        let result = match result {
            Ok(DetachOutcome::Detached) => self.prove_detached(&context, &disk).await,
            other => other,
        };
        let why = match result {
            Ok(DetachOutcome::Detached) => {
                let key = id.clone();
                self.0
                    .catalog
                    .run(move |tx| -> Result<_> { Ok(tx.end_attachment(&key, seconds())?) })
                    .await?;
                audit::log_removal(format!("attachment {id}"), "its disk is proven to be detached");
                self.update_record_soon(&context.row.volume);
                self.clear_disk_lost(id);
                self.0.retries.forget(id);
                self.emit(EventKind::Attachment, id, Change::Deleted);
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

    /// Detaches a disk, unless another server serves its pool: that server's catalog is authoritative.
    async fn detach_disk(&self, context: &AttachmentContext, disk: &Disk) -> Result<DetachOutcome> {
        self.refuse_served_elsewhere(&context.row).await?;
        let hypervisor = self.hypervisor(&context.node.spec.hypervisor)?;
        hypervisor.detach(context.row.node, disk).await.map_err(|error| describe(error, context))
    }
}

/// Reads an attachment for its detach. If there is none, its ID is recorded as ended all the same, because a late
/// attach request may still arrive.
fn read_for_detach(tx: &Tx<'_>, id: &AttachmentId) -> Result<Option<AttachmentRow>> {
    let row = tx.attachment(id)?;
    if row.is_none() {
        tx.end_attachment(id, seconds())?;
    }
    Ok(row)
}
