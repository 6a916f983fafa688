//! Moves of attached volumes: the hypervisor copies the disk while the VM writes. Then the VM is paused, changes to the new
//! file, and runs again once the catalog and the new file's record are durable.
//!
//! Any hand can finish the copy, and resume the VM. So what the VM has open decides, and without such a VM what is durably
//! known and both files; see [`super::decide`].

use infra_api::{AttachmentState, Change, EventKind, MovePhase, VolumeId};

use super::Moves;
use super::decide::Job;
use super::look::{Look, Vm};
use super::offline::refuse_readers;
use super::state::{State, only_writer};
use crate::catalog::{MoveNote, Tx};
use crate::engine::{Engine, EngineError};
use crate::hypervisor::{HypervisorError, PauseReason};
use crate::service::problems::{Failure, Result};
use crate::service::reach::unreached;

impl Moves {
    /// Starts the copy of the disk into an empty file in the other pool. The caller has the volume's lock, and has seen that the
    /// VM has the old file and no copy runs.
    pub(super) async fn begin_mirror(&self, state: &State) -> Result<()> {
        let id = &state.volume.id;
        state.refuse_suspended()?;
        if !state.has_only_files() {
            return Err(state.wait(format!(
                "the volume {id} is attached; to and from pools of the engine rbd it is moved while it is detached, and the move \
                 goes on then"
            )));
        }
        let rows = state.attachments.clone();
        let name = id.clone();
        self.core.catalog().read(move |tx| only_writer(tx, &name, &rows).map(drop)).await?;
        let attached = state.attached.as_ref().filter(|one| one.row.state == AttachmentState::Attached);
        let context =
            attached.ok_or_else(|| state.wait(format!("the volume {id} is being attached or detached")))?;
        let vm = self.vm(state, context)?;
        if !vm.hypervisor.can_mirror() {
            return Err(state.wait(format!(
                "the volume {id} is attached to {}, whose hypervisor {} cannot exchange the file of an attached disk; the move \
                 goes on when it is detached",
                vm.name(),
                context.node.spec.hypervisor
            )));
        }
        if let Some(why) = unreached(self.core.hosts(), id, &state.other, &context.node) {
            return Err(state.wait(why));
        }
        self.discard_other(state).await?;
        self.create_other(state).await?;
        self.set_phase(id, state.phase(), MovePhase::Mirroring).await?;
        let to = self.source(&state.other, id);
        let node = context.row.node;
        tracing::info!(volume = %id, to = %state.other.name, node = %node, "the copy of the attached disk starts");
        let started = vm.hypervisor.start_mirror(node, &vm.disk, &to, state.moving.rate).await;
        started.map_err(|error| state.wait(format!("the VM {} cannot copy the disk: {error}", vm.name())))?;
        self.memory().looks.insert(id.clone(), Job::Copying);
        Ok(())
    }

    async fn create_other(&self, state: &State) -> Result<()> {
        let record = self.unfinished_record(&state.volume.id).await?;
        let cleared = self.files.clear(&state.other, state.object(), state.volume.disk_uuid).await?;
        let bytes = state.volume.capacity;
        let create = move |engine: &dyn Engine| engine.create(&cleared, bytes, &record);
        Ok(self.engines.run::<_, EngineError, _>(&state.other, create).await?)
    }

    /// Shows the progress of a copy, and applies a new rate.
    pub(super) async fn follow(
        &self,
        state: &State,
        look: &Look,
        rate: &mut Option<Option<u64>>,
    ) -> Result<()> {
        let id = &state.volume.id;
        let progress = look.found.as_ref().and_then(|found| found.mirror.as_ref()?.progress);
        self.copies.set_mirrored(id, progress.map(|(done, _)| done.min(state.volume.capacity)));
        let Some(context) = &state.attached else { return Ok(()) };
        if rate.replace(state.moving.rate) != Some(state.moving.rate) {
            let vm = self.vm(state, context)?;
            let set = vm.hypervisor.set_mirror_rate(context.row.node, &vm.disk, state.moving.rate);
            if let Err(error) = set.await {
                // The copy has ended, which the next look shows.
                tracing::debug!(volume = %id, %error, "cannot set the rate of a copy");
            }
        }
        Ok(())
    }

    /// Pauses the VM and lets it change to the new file. The caller has the volume's lock; what the VM has open then decides.
    pub(super) async fn switch(&self, state: &State, look: &Look) -> Result<()> {
        let id = &state.volume.id;
        let Some(context) = &state.attached else { return Ok(()) };
        let vm = self.vm(state, context)?;
        if look.is_paused_by_others() {
            return Err(state.wait(format!(
                "all data is copied, and the VM {} is paused by somebody else; the move goes on when it runs",
                vm.name()
            )));
        }
        let node = context.row.node;
        let _paused = self.switches.lock(node).await;
        let name = id.clone();
        let begin = move |tx: &Tx<'_>| -> Result<_> {
            let Some(now) = State::of(tx, &name)? else { return Ok(false) };
            if now.phase() != MovePhase::Mirroring || now.moving.cancelled {
                return Ok(false);
            }
            now.refuse_suspended()?;
            refuse_readers(tx, &now)?;
            tx.set_move_phase(&name, MovePhase::Switching)?;
            tx.set_move_note(&name, MoveNote::PivotAsked)?;
            tx.set_move_paused(&name, Some(node))?;
            Ok(true)
        };
        if !self.core.catalog().run(begin).await? {
            return Ok(());
        }
        let switched = self.pause_and_pivot(&vm, look).await;
        switched.map_err(|error| {
            tracing::warn!(volume = %id, %node, %error, "the VM did not change to the new file");
            state.wait(format!("the VM {} did not change to the new file: {error}", vm.name()))
        })
    }

    /// A VM that a failed disk has paused stands still already; it repeats the failed request after the change.
    async fn pause_and_pivot(&self, vm: &Vm<'_>, look: &Look) -> Result<(), HypervisorError> {
        let node = vm.context.row.node;
        let has_failed = look.found.as_ref().and_then(|found| found.paused) == Some(PauseReason::IoError);
        if !has_failed {
            vm.hypervisor.pause(node).await?;
        }
        vm.hypervisor.pivot(node, &vm.disk).await
    }

    /// Makes the new file the volume's. Its data is durable before the catalog says so, and the VM runs after both.
    pub(super) async fn take_new(&self, state: &State, is_used: bool) -> Result<()> {
        let id = &state.volume.id;
        let name = id.clone();
        // From here on it is known that the new file has everything, whatever becomes of the VM.
        let note = move |tx: &Tx<'_>| -> Result<_> {
            tx.set_move_phase(&name, MovePhase::Switching)?;
            if is_used {
                tx.set_move_note(&name, MoveNote::Used)?;
            }
            Ok(())
        };
        self.core.catalog().run(note).await?;
        let record = self.unfinished_record(id).await?;
        // Syncs the file, too.
        let sync = move |engine: &dyn Engine| engine.write_record(&record);
        self.engines.run::<_, EngineError, _>(&state.other, sync).await?;
        let name = id.clone();
        let switch = move |tx: &Tx<'_>| -> Result<_> {
            let Some(now) = State::of(tx, &name)? else { return Ok(()) };
            Ok(tx.switch_pool(&now.moving, &now.pool.name)?)
        };
        self.core.catalog().run(switch).await?;
        self.forget(id);
        self.core.emit(EventKind::Volume, id, Change::Updated);
        let Some(state) = self.state(id).await? else { return Ok(()) };
        self.make_final(&state).await
    }

    /// Lets a move begin again: the new file was no VM's source.
    pub(super) async fn keep_old(&self, id: &VolumeId) -> Result<()> {
        let name = id.clone();
        self.core.catalog().run(move |tx| -> Result<_> { Ok(tx.settle_move(&name)?) }).await?;
        self.forget(id);
        self.core.emit(EventKind::Volume, id, Change::Updated);
        Ok(())
    }

    /// Lets the VM run that was paused for a switch, unless it is paused for a suspension too.
    pub(super) async fn unpause(&self, state: &State) -> Result<()> {
        let Some(node) = state.moving.paused else { return Ok(()) };
        let read =
            move |tx: &Tx<'_>| -> Result<_> { Ok((tx.node(node)?, tx.paused_nodes()?.contains(&node))) };
        let (row, is_suspended) = self.core.catalog().read(read).await?;
        if let Some(row) = row.filter(|_| !is_suspended) {
            self.hypervisors.get(&row.spec.hypervisor)?.unpause(node).await?;
        }
        let name = state.volume.id.clone();
        self.core.catalog().run(move |tx| -> Result<_> { Ok(tx.set_move_paused(&name, None)?) }).await
    }

    /// Ends the copy of the disk. The note comes first: afterwards the VM shows only that none runs.
    pub(super) async fn end_mirror(&self, state: &State) -> Result<()> {
        let Some(context) = &state.attached else { return Ok(()) };
        let vm = self.vm(state, context)?;
        if !matches!(state.phase(), MovePhase::Waiting | MovePhase::Copying) {
            let name = state.volume.id.clone();
            let note = move |tx: &Tx<'_>| -> Result<_> { Ok(tx.set_move_note(&name, MoveNote::AbortAsked)?) };
            self.core.catalog().run(note).await?;
        }
        vm.hypervisor.cancel_mirror(context.row.node, &vm.disk).await.map_err(Failure::from)
    }
}
