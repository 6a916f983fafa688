//! Carries a move on, step by step, until it is complete or has to wait. Each step is decided by the catalog and the observed state,
//! read again under the volume's lock, so the same code continues a move after a crash.

use std::sync::Arc;
use std::time::Duration;

use infra_api::{Change, EventKind, MovePhase, ObjectKind, Problem, ProblemCode, VolumeId};
use tokio::sync::OwnedSemaphorePermit;

use super::Moves;
use super::decide::{Seen, Step, Wait, decide};
use super::look::Look;
use super::state::{State, only_writer};
use crate::audit;
use crate::catalog::{Side, Tx};
use crate::engine::Object;
use crate::safety::Check;
use crate::service::problems::{Failure, Result};

/// Interval between looks at a copy.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// More steps than lead from any state to one where nothing is running for a move.
const MAX_STEPS: usize = 16;

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
        // What went wrong, if the move has to begin again for it.
        let mut failed = None;
        let mut rate = None;
        let mut permit = None;
        while !self.stop.is_cancelled() {
            let Some(state) = self.state(id).await? else {
                self.forget(id);
                return Ok(());
            };
            if !self.may_copy(state.phase(), &mut permit).await {
                return Ok(());
            }
            let look = self.look(&state).await?;
            let step = decide(&self.facts(&state, &look).await?);
            if step != Step::Wait(Wait::Choice) {
                self.memory().undecided.remove(id);
            }
            match step {
                Step::Follow => {
                    self.follow(&state, &look, &mut rate).await?;
                    self.sleep(POLL_INTERVAL).await;
                }
                Step::Copy => self.copy(id).await?,
                Step::Compare => {
                    self.mark_unknown(id).await?;
                    self.compare(&state, look.seen).await?;
                }
                Step::BeginMirror | Step::Switch if failed.is_some() => {
                    return failed.take().map_or(Ok(()), Err);
                }
                step => {
                    let _lock = self.core.lock_volume(id).await;
                    if let Err(failure) = self.take_step(id, step).await {
                        // What the VM has open now decides; it must not stay paused until the next attempt.
                        if !matches!(step, Step::BeginMirror | Step::Switch) {
                            return Err(failure);
                        }
                        if failed.replace(failure).is_some() || !self.is_unsettled(id).await? {
                            return failed.take().map_or(Ok(()), Err);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Only so many volumes are copied at a time. What is under way goes on beyond that.
    async fn may_copy(&self, phase: MovePhase, permit: &mut Option<OwnedSemaphorePermit>) -> bool {
        if permit.is_some() {
            return true;
        }
        if !matches!(phase, MovePhase::Waiting | MovePhase::Copying) {
            *permit = self.permits.clone().try_acquire_owned().ok();
            return true;
        }
        tokio::select! {
            () = self.stop.cancelled() => false,
            acquired = self.permits.clone().acquire_owned() => {
                *permit = acquired.ok();
                permit.is_some()
            }
        }
    }

    async fn is_unsettled(&self, id: &VolumeId) -> Result<bool> {
        let state = self.state(id).await?;
        Ok(state.is_some_and(|now| matches!(now.phase(), MovePhase::Mirroring | MovePhase::Switching)))
    }

    /// Takes a step if it still is the next. The caller has the volume's lock.
    async fn take_step(&self, id: &VolumeId, expected: Step) -> Result<()> {
        let Some(state) = self.state(id).await? else { return Ok(()) };
        let look = self.look(&state).await?;
        let step = decide(&self.facts(&state, &look).await?);
        if step != expected {
            return Ok(());
        }
        self.act(&state, &look, step).await
    }

    async fn act(&self, state: &State, look: &Look, step: Step) -> Result<()> {
        let id = &state.volume.id;
        match step {
            // They lock for themselves, or need no lock.
            Step::Copy | Step::Compare | Step::Follow => Ok(()),
            Step::BeginMirror => self.begin_mirror(state).await,
            Step::Switch => self.switch(state, look).await,
            Step::FollowAgain => {
                self.set_phase(id, MovePhase::Switching, MovePhase::Mirroring).await.map(drop)
            }
            Step::TakeNew => self.take_new(state, matches!(look.seen, Seen::New(_))).await,
            Step::KeepOld => self.keep_old(id).await,
            Step::EndMirror => self.end_mirror(state).await,
            Step::Undo => self.undo(state).await,
            Step::SetAside => {
                self.set_aside(state).await?;
                self.end(state, "the move was ended: an operator chose the old file").await
            }
            Step::Unpause => self.unpause(state).await,
            Step::Finish => self.finish(state).await,
            Step::Wait(wait) => Err(self.waits(state, look, wait).await),
        }
    }

    /// Settles a move as far as that is possible at once, for an operation that attaches or detaches the disk. Fails if it is not
    /// known which file the VM used. The caller has the volume's lock.
    pub(in crate::service) async fn settle(&self, id: &VolumeId, ends_copy: bool) -> Result<()> {
        if !Check::Settled.applies() {
            return Ok(());
        }
        for _ in 0..MAX_STEPS {
            let Some(state) = self.state(id).await? else { return Ok(()) };
            if !matches!(state.phase(), MovePhase::Mirroring | MovePhase::Switching) {
                return Ok(());
            }
            let look = self.look(&state).await?;
            match decide(&self.facts(&state, &look).await?) {
                Step::Follow | Step::Switch | Step::FollowAgain if ends_copy => {
                    self.end_mirror(&state).await?;
                }
                Step::Follow | Step::Switch => return Ok(()),
                Step::Compare => {
                    self.core.moves().notify_one();
                    return Err(state.wait(format!(
                        "it is not known yet which of its two files the VM of volume {id} used: they are being compared; retry"
                    )));
                }
                step => self.act(&state, &look, step).await?,
            }
        }
        Err(Problem::new(ProblemCode::Unavailable, format!("the move of volume {id} changes; retry"))
            .about(ObjectKind::Volume, id)
            .into())
    }

    /// What a move waits for.
    async fn waits(&self, state: &State, look: &Look, wait: Wait) -> Failure {
        let id = &state.volume.id;
        match wait {
            Wait::Choice => {
                self.memory().undecided.insert(id.clone());
                if let Err(failure) = self.mark_unknown(id).await {
                    return failure;
                }
                self.undecided(state)
            }
            Wait::Disk | Wait::Proof if state.attachments.len() > 1 => {
                let (name, rows) = (id.clone(), state.attachments.clone());
                let refused =
                    self.core.catalog().read(move |tx| only_writer(tx, &name, &rows).map(drop)).await;
                refused.err().unwrap_or_else(|| state.wait(&*look.why))
            }
            Wait::Ending | Wait::Foreign | Wait::Proof | Wait::Disk => state.wait(&*look.why),
        }
    }

    fn undecided(&self, state: &State) -> Failure {
        let id = &state.volume.id;
        let paths = [&state.pool, &state.other].map(|pool| self.source(pool, id).location());
        let [old, new] = paths;
        let (from, to) = (&state.pool.name, &state.other.name);
        state.wait(format!(
            "it is not known which file the VM used last: the copy of its disk could be finished while nobody looked, and {old} and \
             {new} differ. The volume is not used until you choose; compare both, then run storage-infra volume move {id} --choose \
             {to} if the VM ran on the new file, or --choose {from} if it did not. The other file is kept in its pool as {id}.{}",
            super::choose::KEPT
        ))
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

    /// Nothing uses the volume while it is not known which file counts.
    async fn mark_unknown(&self, id: &VolumeId) -> Result<()> {
        self.set_phase(id, MovePhase::Mirroring, MovePhase::Switching).await.map(drop)
    }

    /// Undoes a move that was cancelled: the volume stays where it is.
    async fn undo(&self, state: &State) -> Result<()> {
        self.discard_other(state).await?;
        self.end(state, "the move was cancelled").await
    }

    async fn end(&self, state: &State, why: &str) -> Result<()> {
        let id = &state.volume.id;
        let (name, pool, reserved) = (id.clone(), state.other.name.clone(), state.moving.reserved);
        self.capacity.record_removal(&pool, reserved);
        self.core.catalog().run(move |tx| -> Result<_> { Ok(tx.delete_move(&name)?) }).await?;
        self.forget(id);
        tracing::info!(volume = %id, to = %pool, "{why}");
        self.core.emit(EventKind::Volume, id, Change::Updated);
        Ok(())
    }

    /// Completes a move whose new file has the data: its record says so, the VM runs again, and the old file is removed.
    async fn finish(&self, state: &State) -> Result<()> {
        let id = &state.volume.id;
        self.make_final(state).await?;
        if state.moving.chosen == Some(Side::New) {
            self.set_aside(state).await?;
            self.capacity.record_removal(&state.other.name, state.moving.reserved);
        } else {
            let cleared = self.files.clear(&state.other, state.object(), state.volume.disk_uuid).await?;
            self.files.remove(&state.other, cleared, state.moving.reserved).await?;
            audit::log_removal(Object::Volume(id.clone()), "its old file: it was moved to another pool");
        }
        let name = id.clone();
        self.core.catalog().run(move |tx| -> Result<_> { Ok(tx.delete_move(&name)?) }).await?;
        self.forget(id);
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
