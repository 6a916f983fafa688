//! Deletion of volumes: intent, clearance and removal.

use std::sync::Arc;

use infra_api::{Change, EventKind, ProblemCode, VolumeId, VolumeState};

use super::Volumes;
use crate::audit;
use crate::catalog::{Origin, Tx, VolumeRow};
use crate::engine::{Clearance, Object};
use crate::service::lookups::{pool_of, refuse_attached, refuse_held};
use crate::service::problems::{Failure, Result};

impl Volumes {
    /// Deletes a volume and its bytes. False if it did not exist.
    pub async fn delete(self: &Arc<Self>, id: VolumeId) -> Result<bool> {
        let volumes = self.clone();
        self.core
            .run_to_completion(async move {
                volumes.unexpected_disks.refuse(&id, None).await?;
                volumes.end_move(&id).await?;
                // Checked before taking the volume's lock, which a slow detach may hold.
                let name = id.clone();
                let copying = volumes
                    .core
                    .catalog()
                    .read(move |tx| -> Result<_> {
                        refuse_used(tx, &name)?;
                        let row = tx.volume(&name)?;
                        let copied = |row: VolumeRow| row.copying || row.origin == Origin::Imported;
                        Ok(row.is_some_and(|row| row.state == VolumeState::Creating && copied(row)))
                    })
                    .await?;
                if copying {
                    // The copy is cancelled, and its waiting request must not restart it.
                    volumes.mark_deleting(&id).await?;
                }
                volumes.copies.cancel(&Object::Volume(id.clone()));
                volumes.copies.receivers().end(&id).await;
                let _lock = volumes.core.lock_volume(&id).await;
                let cleared = volumes.clear_for_deletion(&id).await?;
                if !volumes.mark_deleting(&id).await? {
                    return Ok(false);
                }
                volumes.finish_delete(&id, cleared).await?;
                Ok(true)
            })
            .await
    }

    /// Requests the end of the move of a volume that is to be deleted: the deletion is refused until then, and repeated.
    async fn end_move(&self, id: &VolumeId) -> Result<()> {
        let name = id.clone();
        let is_moving = move |tx: &Tx<'_>| -> Result<_> {
            Ok(tx.volume_move(&name)?.is_some() && tx.attachments(None, Some(&name))?.is_empty())
        };
        if self.core.catalog().read(is_moving).await? {
            let name = id.clone();
            self.core.catalog().run(move |tx| -> Result<_> { Ok(tx.cancel_move(&name)?) }).await?;
            self.core.moves().notify_one();
        }
        Ok(())
    }

    /// Checks whether a volume's bytes may be removed, before the deletion starts: a refused deletion changes
    /// nothing. None if the check is impossible now; the deletion then starts and checks again.
    async fn clear_for_deletion(&self, id: &VolumeId) -> Result<Option<Clearance>> {
        let name = id.clone();
        let found = self
            .core
            .catalog()
            .read(move |tx| -> Result<_> {
                refuse_used(tx, &name)?;
                let Some(row) = tx.volume(&name)? else { return Ok(None) };
                Ok(Some((pool_of(tx, &row)?, row)))
            })
            .await?;
        let Some((pool, row)) = found else { return Ok(None) };
        match self.files.clear_volume(&pool, &row).await {
            Ok(cleared) => Ok(Some(cleared)),
            Err(failure) if failure.code().may_have_taken_effect() => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// Writes the intent to delete. Refused while the volume is attached, exported or released.
    async fn mark_deleting(&self, id: &VolumeId) -> Result<bool> {
        let id = id.clone();
        self.core
            .catalog()
            .run(move |tx| -> Result<_> {
                if tx.volume(&id)?.is_none() {
                    return Ok(false);
                }
                refuse_used(tx, &id)?;
                tx.set_volume_state(&id, VolumeState::Deleting)?;
                Ok(true)
            })
            .await
    }

    /// Removes the bytes of a volume in state deleting without attachments, after the clearance check.
    pub(in crate::service) async fn finish_delete(
        &self,
        id: &VolumeId,
        cleared: Option<Clearance>,
    ) -> Result<()> {
        let name = id.clone();
        let found = self
            .core
            .catalog()
            .read(move |tx| -> Result<_> {
                let Some(row) = tx.volume(&name)? else { return Ok(None) };
                // Checked again right before the removal: this is the only place that removes volumes.
                refuse_held(tx, &name, false)?;
                if row.state != VolumeState::Deleting || !tx.attachments(None, Some(&name))?.is_empty() {
                    let detail = format!("the volume {name} is {} and must not be removed", row.state);
                    return Err(Failure::new(ProblemCode::Internal, detail));
                }
                Ok(Some((pool_of(tx, &row)?, row)))
            })
            .await?;
        let Some((pool, row)) = found else { return Ok(()) };
        let size = row.size();
        let cleared = match cleared {
            Some(cleared) => cleared,
            None => self.files.clear_volume(&pool, &row).await?,
        };
        self.files.remove(&pool, cleared, size).await?;
        let name = id.clone();
        self.core.catalog().run(move |tx| -> Result<_> { Ok(tx.delete_volume(&name)?) }).await?;
        audit::log_removal(Object::Volume(id.clone()), "it was deleted");
        self.core.emit(EventKind::Volume, id, Change::Deleted);
        Ok(())
    }
}

/// Refuses while an attachment exists, or another operation holds the volume.
pub(super) fn refuse_used(tx: &Tx<'_>, id: &VolumeId) -> Result<()> {
    let attachments = tx.attachments(None, Some(id))?;
    refuse_attached(tx, id, &attachments, |nodes| {
        format!("the volume {id} is attached to {nodes}; detach it first")
    })?;
    refuse_held(tx, id, false)
}
