//! Unplugs a disk, and forgets the attachment once the disk is seen to be gone.

use infra_api::{AttachmentId, AttachmentState, Change, EventKind};

use super::{Parts, Progress, describe};
use crate::audit;
use crate::catalog::{AttachmentRow, Tx};
use crate::hypervisor::{Disk, Unplugged};
use crate::service::{Result, Service, seconds};

impl Service {
    pub(super) async fn do_detach(&self, id: &AttachmentId) -> Result<Progress> {
        let key = id.clone();
        let mut found = self.0.catalog.read(move |tx| -> Result<_> { Ok(tx.attachment(&key)?) }).await?;
        if found.is_none() {
            let key = id.clone();
            found = self.0.catalog.run(move |tx| leaving(tx, &key)).await?;
        }
        let Some(row) = found else { return Ok(Progress::Gone) };
        let _lock = self.0.locks.lock(row.volume.as_str()).await;
        let key = id.clone();
        let found = self
            .0
            .catalog
            .run(move |tx| -> Result<_> {
                let Some(row) = leaving(tx, &key)? else { return Ok(None) };
                if row.state != AttachmentState::Detaching {
                    tx.set_attachment_state(&key, AttachmentState::Detaching, None)?;
                }
                Ok(Some(Parts::of(tx, row)?))
            })
            .await?;
        let Some(mut parts) = found else { return Ok(Progress::Gone) };
        if parts.row.state != AttachmentState::Detaching {
            self.emit(EventKind::Attachment, id, Change::Updated);
            parts.row.state = AttachmentState::Detaching;
        }
        let disk = parts.disk(self.engine_of(&parts.pool).source(&parts.volume.id));
        let unplugged = self.unplug(&parts, &disk).await;
        let unplugged = match unplugged {
            Ok(Unplugged::Gone) => self.prove_unplugged(&parts, &disk).await,
            other => other,
        };
        let why = match unplugged {
            Ok(Unplugged::Gone) => {
                let key = id.clone();
                self.0
                    .catalog
                    .run(move |tx| -> Result<_> { Ok(tx.end_attachment(&key, seconds())?) })
                    .await?;
                audit::forgot(format!("attachment {id}"), "its disk is proven to be unplugged");
                self.note_soon(&parts.row.volume);
                self.disk_is_not_lost(id);
                self.0.retries.forget(id);
                self.emit(EventKind::Attachment, id, Change::Deleted);
                tracing::info!(attachment = %id, volume = %parts.row.volume, node = %parts.row.node, "detached");
                return Ok(Progress::Gone);
            }
            Ok(Unplugged::StillThere(why)) => Ok(why),
            Err(failure) => Err(failure),
        };
        let message = match &why {
            Ok(why) => why.clone(),
            Err(failure) => failure.0.detail.clone(),
        };
        if parts.row.message.as_ref() != Some(&message) {
            tracing::warn!(attachment = %id, volume = %parts.row.volume, node = %parts.row.node, %message, "not detached");
            self.set_state(id, AttachmentState::Detaching, Some(message.clone())).await?;
        }
        parts.row.message = Some(message);
        why.map(|_| Progress::UnderWay(parts.to_attachment()))
    }

    /// Unplugs a disk, unless another server has its pool: then that one's catalog counts.
    async fn unplug(&self, parts: &Parts, disk: &Disk) -> Result<Unplugged> {
        self.refuse_served_elsewhere(&parts.row).await?;
        let hypervisor = self.hypervisor(&parts.node.spec.hypervisor)?;
        hypervisor.unplug(parts.row.node, disk).await.map_err(|error| describe(error, parts))
    }
}

/// An attachment that is told to go. Where there is none its id is over all the same: it may still be asked for, by who
/// doesn't know that yet.
fn leaving(tx: &Tx<'_>, id: &AttachmentId) -> Result<Option<AttachmentRow>> {
    let row = tx.attachment(id)?;
    if row.is_none() {
        tx.end_attachment(id, seconds())?;
    }
    Ok(row)
}
