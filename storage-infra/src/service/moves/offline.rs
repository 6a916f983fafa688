//! Moves of detached volumes: the file or image is copied, by reflink within a filesystem, and the catalog changes only if
//! nobody could write meanwhile. An attach is not delayed: it takes the volume where it is, and the copy is made again.

use std::time::Duration;

use infra_api::{MovePhase, VolumeId};

use super::Moves;
use super::state::State;
use crate::catalog::Tx;
use crate::engine::{Engine, EngineError, Method, Object, SourceFile};
use crate::service::files::Origin;
use crate::service::problems::{Failure, Result};

/// Interval between checks whether a running copy is still needed.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);

impl Moves {
    /// Copies the file of a detached volume, and makes the copy the volume's file.
    pub(super) async fn copy(&self, id: &VolumeId) -> Result<()> {
        self.unexpected_disks.refuse(id, None).await?;
        let Some((state, modified)) = self.begin_copy(id).await? else { return Ok(()) };
        let record = self.unfinished_record(id).await?;
        let method = self.method(&state).await?;
        let origin = Origin::Object { pool: Box::new(state.pool.clone()), object: state.object(), method };
        let (bytes, rate) = (state.volume.capacity, state.moving.rate);
        let copied = tokio::select! {
            copied = self.copies.copy_at_rate(&state.other, origin, bytes, record, rate) => copied?,
            never = self.cancel_when_useless(id) => match never {},
        };
        if copied {
            self.end_copy(id, modified).await?;
        }
        Ok(())
    }

    /// Writes the intent. `None` if the volume is attached, or the move was cancelled.
    async fn begin_copy(&self, id: &VolumeId) -> Result<Option<(State, i128)>> {
        let _lock = self.core.lock_volume(id).await;
        let Some(state) = self.state(id).await? else { return Ok(None) };
        if !matches!(state.phase(), MovePhase::Waiting | MovePhase::Copying) {
            return Ok(None);
        }
        state.refuse_suspended()?;
        let modified = self.modified(&state).await?;
        self.discard_other(&state).await?;
        let name = id.clone();
        let begin = move |tx: &Tx<'_>| -> Result<_> {
            let Some(now) = State::of(tx, &name)? else { return Ok(false) };
            refuse_readers(tx, &now)?;
            let is_free = now.attachments.is_empty() && !now.moving.cancelled;
            if is_free {
                tx.set_move_phase(&name, MovePhase::Copying)?;
            }
            Ok(is_free)
        };
        let begun = self.core.catalog().run(begin).await?;
        Ok(begun.then_some((state, modified)))
    }

    /// Time of the last change of the file, which nobody may have open.
    async fn modified(&self, state: &State) -> Result<i128> {
        let (object, size) = (state.object(), state.volume.capacity);
        let read = move |engine: &dyn Engine| match engine.files(&object)?.open {
            Some(holder) => Err(EngineError::InUse(format!(
                "the file of {object} is in use by {holder}, without an attachment; stop that first"
            ))),
            None => SourceFile::open(&engine.locate(&object)?, size)?.modified(),
        };
        Ok(self.engines.run::<_, EngineError, _>(&state.pool, read).await?)
    }

    /// By reflink if both pools are on one filesystem. An image is never cloned: the clone would keep the data in the old pool.
    async fn method(&self, state: &State) -> Result<Method> {
        if !state.has_only_files() {
            return Ok(Method::Copy);
        }
        let inspect = |pool| self.engines.run::<_, Failure, _>(pool, |engine| Ok(engine.inspect()?));
        let (from, to) = (inspect(&state.pool).await?, inspect(&state.other).await?);
        let shares = from.reflink && from.filesystem == to.filesystem;
        Ok(if shares { Method::Reflink } else { Method::Copy })
    }

    /// Cancels a running copy when the volume is attached or the move is cancelled, and applies a new rate.
    async fn cancel_when_useless(&self, id: &VolumeId) -> std::convert::Infallible {
        let object = Object::Volume(id.clone());
        loop {
            tokio::time::sleep(CHECK_INTERVAL).await;
            match self.state(id).await {
                Ok(Some(state)) if state.phase() == MovePhase::Copying && !state.moving.cancelled => {
                    self.copies.set_rate(&object, state.moving.rate);
                }
                Ok(_) => self.copies.cancel(&object),
                Err(failure) => tracing::debug!(volume = %id, %failure, "cannot read the move"),
            }
        }
    }

    /// Makes the copy the volume's file, unless somebody may have written to the volume meanwhile.
    async fn end_copy(&self, id: &VolumeId, modified: i128) -> Result<()> {
        let _lock = self.core.lock_volume(id).await;
        let Some(state) = self.state(id).await? else { return Ok(()) };
        if self.modified(&state).await? != modified {
            self.set_phase(id, MovePhase::Copying, MovePhase::Waiting).await?;
            return Err(
                state.wait("the file was changed by a program other than this server; it is copied again")
            );
        }
        let name = id.clone();
        let switch = move |tx: &Tx<'_>| -> Result<_> {
            let Some(now) = State::of(tx, &name)? else { return Ok(()) };
            if now.phase() != MovePhase::Copying || !now.attachments.is_empty() || now.moving.cancelled {
                return Ok(());
            }
            now.refuse_suspended()?;
            refuse_readers(tx, &now)?;
            Ok(tx.switch_pool(&now.moving, &now.pool.name)?)
        };
        self.core.catalog().run(switch).await
    }
}

/// Fails while something is made from the volume's old file.
pub(super) fn refuse_readers(tx: &Tx<'_>, state: &State) -> Result<()> {
    let readers = tx.readers_of(&state.volume.id)?;
    if readers.is_empty() {
        return Ok(());
    }
    Err(state
        .wait(format!("its data is being copied to {}; the move goes on after that", readers.join(", "))))
}
