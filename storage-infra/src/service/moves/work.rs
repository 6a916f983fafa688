//! Carries a move on, step by step, until it is complete or has to wait. Each step reads the catalog and the observed state
//! again under the volume's lock, so the same code continues a move after a crash.

use std::sync::Arc;

use infra_api::{Change, EventKind, MovePhase, VolumeId};

use super::Moves;
use super::state::State;
use crate::audit;
use crate::catalog::Tx;
use crate::engine::Object;
use crate::service::problems::{Failure, Result};

impl Moves {
    /// Carries a move on until it is complete or has to wait, and records what it waits for.
    pub(super) async fn carry(self: &Arc<Self>, id: &VolumeId) {
        let result = self.take_steps(id).await;
        self.copies.set_mirrored(id, None);
        let Err(failure) = result else { return };
        if let Err(error) = self.report(id, &failure).await {
            tracing::warn!(volume = %id, %failure, %error, "cannot record why a move waits");
        }
    }

    async fn report(&self, id: &VolumeId, failure: &Failure) -> Result<()> {
        let (name, message) = (id.clone(), failure.0.detail.clone());
        let set = move |tx: &Tx<'_>| -> Result<_> { Ok(tx.set_move_message(&name, Some(&message))?) };
        if self.core.catalog().run(set).await? {
            tracing::warn!(volume = %id, %failure, "a move waits; will retry");
            self.core.metrics().move_delayed();
            self.core.emit(EventKind::Volume, id, Change::Updated);
        }
        Ok(())
    }

    async fn take_steps(self: &Arc<Self>, id: &VolumeId) -> Result<()> {
        while !self.stop.is_cancelled() {
            let Some(state) = self.state(id).await? else { return Ok(()) };
            match state.phase() {
                MovePhase::Removing => self.finish(id).await?,
                MovePhase::Switching => self.conclude_again(id).await?,
                _ if state.moving.cancelled => self.undo(id).await?,
                MovePhase::Mirroring => self.follow(id).await?,
                MovePhase::Waiting | MovePhase::Copying if state.attachments.is_empty() => {
                    self.copy(id).await?;
                }
                MovePhase::Waiting | MovePhase::Copying => self.begin_mirror(id).await?,
            }
        }
        Ok(())
    }

    /// Sets the step of a move that still is at another.
    pub(super) async fn set_phase(&self, id: &VolumeId, from: MovePhase, to: MovePhase) -> Result<bool> {
        let name = id.clone();
        let set = move |tx: &Tx<'_>| -> Result<_> {
            let is_there = tx.volume_move(&name)?.is_some_and(|row| row.phase == from);
            if is_there {
                tx.set_move_phase(&name, to)?;
            }
            Ok(is_there)
        };
        let is_set = self.core.catalog().run(set).await?;
        self.core.emit(EventKind::Volume, id, Change::Updated);
        Ok(is_set)
    }

    /// Undoes a move that was cancelled: the volume stays where it is.
    async fn undo(&self, id: &VolumeId) -> Result<()> {
        let _lock = self.core.lock_volume(id).await;
        let Some(state) = self.state(id).await? else { return Ok(()) };
        if !state.moving.cancelled || matches!(state.phase(), MovePhase::Switching | MovePhase::Removing) {
            return Ok(());
        }
        self.end_mirror(&state).await?;
        self.discard_other(&state).await?;
        let (name, pool, reserved) = (id.clone(), state.other.name.clone(), state.moving.reserved);
        self.capacity.record_removal(&pool, reserved);
        self.core.catalog().run(move |tx| -> Result<_> { Ok(tx.delete_move(&name)?) }).await?;
        tracing::info!(volume = %id, to = %pool, "the move was cancelled");
        self.core.emit(EventKind::Volume, id, Change::Updated);
        Ok(())
    }

    /// Completes a move whose new file has the data: its record says so, the VM runs again, and the old file is removed.
    async fn finish(&self, id: &VolumeId) -> Result<()> {
        let _lock = self.core.lock_volume(id).await;
        let Some(state) = self.state(id).await? else { return Ok(()) };
        if state.phase() != MovePhase::Removing {
            return Ok(());
        }
        self.make_final(&state).await?;
        let cleared = self.files.clear(&state.other, state.object(), state.volume.disk_uuid).await?;
        self.files.remove(&state.other, cleared, state.moving.reserved).await?;
        let name = id.clone();
        self.core.catalog().run(move |tx| -> Result<_> { Ok(tx.delete_move(&name)?) }).await?;
        audit::log_removal(Object::Volume(id.clone()), "its old file: it was moved to another pool");
        tracing::info!(volume = %id, from = %state.other.name, to = %state.pool.name, "moved");
        self.core.metrics().move_completed();
        self.records.update_soon(id);
        self.core.emit(EventKind::Volume, id, Change::Updated);
        Ok(())
    }

    /// Writes the record of the new file, before its VM may write to it, and lets the VM run.
    pub(super) async fn make_final(&self, state: &State) -> Result<()> {
        let id = &state.volume.id;
        self.records.update(id).await?;
        self.unpause(state).await
    }
}
