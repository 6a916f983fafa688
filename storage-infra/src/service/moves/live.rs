//! Moves of attached volumes: the hypervisor copies the disk while the VM writes. Then the VM is paused, changes to the new
//! file, and runs again once the catalog and the new file's record are durable.
//!
//! While it is paused it writes nothing, and all its writes are in both files. So after a crash in between, a VM that still has
//! the disk tells which file it uses, and without such a VM the old file has everything.

use std::sync::Arc;
use std::time::Duration;

use infra_api::{AttachmentState, Change, EventKind, MovePhase, VolumeId};

use super::Moves;
use super::compare::is_equal;
use super::offline::refuse_readers;
use super::state::{State, only_writer};
use crate::catalog::Tx;
use crate::engine::{Engine, EngineError};
use crate::hypervisor::{DetachOutcome, Disk, Hypervisor, HypervisorError, MirroredDisk, Power};
use crate::service::disks::AttachmentContext;
use crate::service::problems::{Failure, Result};
use crate::service::reach::unreached;
use crate::service::transfers::blocking;

/// Interval between reads of the progress of a copy.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// The VM that has a volume, with its disk.
struct Vm<'a> {
    hypervisor: Arc<dyn Hypervisor>,
    context: &'a AttachmentContext,
    disk: Disk,
}

impl Vm<'_> {
    async fn mirrored(&self) -> Result<MirroredDisk> {
        Ok(self.hypervisor.mirrored(self.context.row.node, &self.disk).await?)
    }

    fn name(&self) -> &str {
        &self.context.node.spec.name
    }
}

impl Moves {
    /// The VM that has the volume attached. Fails if it is not the only one, or is not attached yet.
    fn vm<'a>(&self, state: &'a State) -> Result<Vm<'a>> {
        let attached = state.attached.as_ref().filter(|one| one.row.state == AttachmentState::Attached);
        let context = attached.ok_or_else(|| {
            state.wait(format!("the volume {} is being attached or detached", state.volume.id))
        })?;
        let hypervisor = self.hypervisors.get(&context.node.spec.hypervisor)?;
        let disk = context.disk(self.source(&state.pool, &state.volume.id));
        Ok(Vm { hypervisor, context, disk })
    }

    /// Starts the copy of the disk into an empty file in the other pool.
    pub(super) async fn begin_mirror(&self, id: &VolumeId) -> Result<()> {
        let _lock = self.core.lock_volume(id).await;
        let Some(state) = self.state(id).await? else { return Ok(()) };
        if state.attachments.is_empty() || state.phase() != MovePhase::Waiting {
            return self.set_phase(id, MovePhase::Copying, MovePhase::Waiting).await.map(drop);
        }
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
        let vm = self.vm(&state)?;
        if let Some(why) = unreached(self.core.hosts(), id, &state.other, &vm.context.node) {
            return Err(state.wait(why));
        }
        self.refuse_without_disk(&state, &vm).await?;
        let node = vm.context.row.node;
        vm.hypervisor.cancel_mirror(node, &vm.disk).await?;
        self.discard_other(&state).await?;
        self.create_other(&state).await?;
        self.set_phase(id, MovePhase::Waiting, MovePhase::Mirroring).await?;
        let to = self.source(&state.other, id);
        tracing::info!(volume = %id, to = %state.other.name, node = %node, "the copy of the attached disk starts");
        if let Err(error) = vm.hypervisor.start_mirror(node, &vm.disk, &to, state.moving.rate).await {
            self.set_phase(id, MovePhase::Mirroring, MovePhase::Waiting).await?;
            return Err(state.wait(format!("the VM {} cannot copy the disk: {error}", vm.name())));
        }
        Ok(())
    }

    /// Fails unless the running VM has the volume's file open.
    async fn refuse_without_disk(&self, state: &State, vm: &Vm<'_>) -> Result<()> {
        let now = vm.mirrored().await?;
        match &now.source {
            Some(source) if *source == vm.disk.source.location() => Ok(()),
            Some(source) => Err(state.wait(format!(
                "the VM {} has {source:?} open as the disk of volume {}, and the catalog says {:?}",
                vm.name(),
                state.volume.id,
                vm.disk.source
            ))),
            None => Err(state.wait(format!(
                "the VM {} is {} and does not have the disk; the move goes on when it has the disk again, or when the volume is \
                 detached",
                vm.name(),
                now.power.state()
            ))),
        }
    }

    async fn create_other(&self, state: &State) -> Result<()> {
        let record = self.unfinished_record(&state.volume.id).await?;
        let cleared = self.files.clear(&state.other, state.object(), state.volume.disk_uuid).await?;
        let bytes = state.volume.capacity;
        let create = move |engine: &dyn Engine| engine.create(&cleared, bytes, &record);
        Ok(self.engines.run::<_, EngineError, _>(&state.other, create).await?)
    }

    /// Follows a copy until it is ready, and then exchanges the file.
    pub(super) async fn follow(&self, id: &VolumeId) -> Result<()> {
        let mut rate = None;
        while !self.stop.is_cancelled() {
            let Some(state) = self.state(id).await? else { return Ok(()) };
            if state.phase() != MovePhase::Mirroring || state.moving.cancelled {
                return Ok(());
            }
            let Ok(vm) = self.vm(&state) else { return self.restart(&state, None).await };
            let now = vm.mirrored().await?;
            let to = self.source(&state.other, id).location();
            let Some(mirror) = now.mirror.filter(|mirror| mirror.to == to) else {
                return self.restart(&state, Some(vm.name())).await;
            };
            self.copies.set_mirrored(id, mirror.progress.map(|(done, _)| done.min(state.volume.capacity)));
            if mirror.ready {
                return self.switch(id).await;
            }
            if rate.replace(state.moving.rate) != Some(state.moving.rate) {
                let set = vm.hypervisor.set_mirror_rate(vm.context.row.node, &vm.disk, state.moving.rate);
                if let Err(error) = set.await {
                    // The copy has ended, which the next look shows.
                    tracing::debug!(volume = %id, %error, "cannot set the rate of a copy");
                }
            }
            self.sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Begins again after a copy ended early. A detach under way ends first.
    async fn restart(&self, state: &State, vm: Option<&str>) -> Result<()> {
        let id = &state.volume.id;
        let _lock = self.core.lock_volume(id).await;
        self.set_phase(id, MovePhase::Mirroring, MovePhase::Waiting).await?;
        let Some(now) = self.state(id).await? else { return Ok(()) };
        match vm {
            Some(vm) if now.attached.is_some() => Err(now.wait(format!(
                "the copy of the disk in the VM {vm} ended early: the VM was restarted, or a write to the pool {} failed; the copy \
                 begins again",
                now.other.name
            ))),
            _ => Ok(()),
        }
    }

    /// Pauses the VM, lets it change to the new file, and makes that the volume's file.
    async fn switch(&self, id: &VolumeId) -> Result<()> {
        let _lock = self.core.lock_volume(id).await;
        let Some(state) = self.state(id).await? else { return Ok(()) };
        if state.phase() != MovePhase::Mirroring {
            return Ok(());
        }
        let vm = self.vm(&state)?;
        let node = vm.context.row.node;
        let _paused = self.switches.lock(node).await;
        if vm.mirrored().await?.power != (Power::Running { executing: true }) {
            return Err(state.wait(format!(
                "all data is copied, and the VM {} is paused by somebody else; the move goes on when it runs",
                vm.name()
            )));
        }
        let name = id.clone();
        let begin = move |tx: &Tx<'_>| -> Result<_> {
            let Some(now) = State::of(tx, &name)? else { return Ok(false) };
            if now.phase() != MovePhase::Mirroring || now.moving.cancelled {
                return Ok(false);
            }
            now.refuse_suspended()?;
            refuse_readers(tx, &now)?;
            tx.set_move_phase(&name, MovePhase::Switching)?;
            tx.set_move_paused(&name, Some(node))?;
            Ok(true)
        };
        if !self.core.catalog().run(begin).await? {
            return Ok(());
        }
        let switched = self.pause_and_pivot(&vm).await;
        if let Err(error) = &switched {
            tracing::warn!(volume = %id, %node, %error, "the VM did not change to the new file");
        }
        let Some(state) = self.state(id).await? else { return Ok(()) };
        self.conclude(&state).await?;
        switched.map_err(|error| state.wait(format!("the VM did not change to the new file: {error}")))
    }

    async fn pause_and_pivot(&self, vm: &Vm<'_>) -> Result<(), HypervisorError> {
        let node = vm.context.row.node;
        vm.hypervisor.pause(node).await?;
        vm.hypervisor.pivot(node, &vm.disk).await
    }

    /// Concludes a switch that a crash or an error interrupted.
    pub(super) async fn conclude_again(&self, id: &VolumeId) -> Result<()> {
        let _lock = self.core.lock_volume(id).await;
        match self.state(id).await? {
            Some(state) if state.phase() == MovePhase::Switching => self.conclude(&state).await,
            _ => Ok(()),
        }
    }

    /// Decides by what the VM has open which file is the volume's. The caller has the volume's lock.
    async fn conclude(&self, state: &State) -> Result<()> {
        let Some(vm) = state.attached.as_ref().map(|_| self.vm(state)).transpose()? else {
            return self.keep_old(state).await;
        };
        let now = vm.mirrored().await?;
        let new = self.source(&state.other, &state.volume.id).location();
        let old = vm.disk.source.location();
        match now.source {
            Some(source) if source == new && now.mirror.is_none() => self.take_new(state).await,
            Some(source) if source == old => {
                let next = if now.mirror.is_some() { MovePhase::Mirroring } else { MovePhase::Waiting };
                self.set_phase(&state.volume.id, MovePhase::Switching, next).await?;
                self.unpause(state).await
            }
            Some(source) => Err(state.wait(format!("the VM {} has {source:?} open as the disk", vm.name()))),
            None => {
                self.refuse_with_disk(state, &vm).await?;
                self.keep_old(state).await
            }
        }
    }

    /// Makes the new file the volume's. Its data is durable before the catalog says so, and the VM runs after both.
    async fn take_new(&self, state: &State) -> Result<()> {
        let record = self.unfinished_record(&state.volume.id).await?;
        // Syncs the file, too.
        let sync = move |engine: &dyn Engine| engine.write_record(&record);
        self.engines.run::<_, EngineError, _>(&state.other, sync).await?;
        let name = state.volume.id.clone();
        let switch = move |tx: &Tx<'_>| -> Result<_> {
            let Some(now) = State::of(tx, &name)? else { return Ok(()) };
            Ok(tx.switch_pool(&now.moving, &now.pool.name)?)
        };
        self.core.catalog().run(switch).await?;
        self.core.emit(EventKind::Volume, &state.volume.id, Change::Updated);
        let Some(state) = self.state(&state.volume.id).await? else { return Ok(()) };
        self.make_final(&state).await
    }

    /// Fails unless it is proven that a VM whose live state does not have the disk does not write to it either.
    async fn refuse_with_disk(&self, state: &State, vm: &Vm<'_>) -> Result<()> {
        match self.disks.prove_detached(vm.context, &vm.disk).await? {
            DetachOutcome::Detached => Ok(()),
            DetachOutcome::StillAttached(why) => Err(state.wait(format!(
                "the VM {} stopped while it changed to the new file, and is not proven to be off: {why}",
                vm.name()
            ))),
        }
    }

    /// Keeps the old file after the VM stopped during the switch: it was paused, so both files must be equal.
    async fn keep_old(&self, state: &State) -> Result<()> {
        let id = &state.volume.id;
        let object = state.object();
        let files = move |engine: &dyn Engine| engine.files(&object);
        if let Some(holder) = self.engines.run::<_, EngineError, _>(&state.other, files).await?.open {
            return Err(state.wait(format!("{holder} has the new file of volume {id} open; end it")));
        }
        let (old, new) = (self.path(&state.pool, id)?, self.path(&state.other, id)?);
        let paths = format!("{} and {}", old.display(), new.display());
        if !state.moving.cancelled && !blocking(move || is_equal(&old, &new)).await? {
            return Err(state.wait(format!(
                "the VM stopped while it was changing to the new file, and {paths} differ: somebody resumed it while it was \
                 paused for that. Compare them; to keep the first, cancel the move with storage-infra volume move {id} --cancel"
            )));
        }
        let name = id.clone();
        let give_up = move |tx: &Tx<'_>| -> Result<_> {
            tx.set_move_phase(&name, MovePhase::Waiting)?;
            Ok(tx.set_move_paused(&name, None)?)
        };
        self.core.catalog().run(give_up).await
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

    /// Ends the copy of the disk, if one is running.
    pub(super) async fn end_mirror(&self, state: &State) -> Result<()> {
        if !state.has_only_files() {
            return Ok(());
        }
        let Ok(vm) = self.vm(state) else { return Ok(()) };
        vm.hypervisor.cancel_mirror(vm.context.row.node, &vm.disk).await.map_err(Failure::from)
    }
}
