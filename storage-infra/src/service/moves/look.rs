//! What is seen of a move: what its VM has open, who has the files open, and whether both files have the same data.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use infra_api::{MovePhase, VolumeId};

use super::Moves;
use super::compare::{Stamp, compare};
use super::decide::{Content, Facts, Job, Seen};
use super::state::State;
use crate::catalog::PoolRow;
use crate::engine::{Engine, EngineError};
use crate::hypervisor::{
    DetachOutcome, Disk, DiskLocation, Hypervisor, Mirror, MirrorState, MirroredDisk, PauseReason, Power,
};
use crate::service::disks::AttachmentContext;
use crate::service::problems::Result;
use crate::service::transfers::blocking;

/// The VM that has a volume, with its disk.
pub(super) struct Vm<'a> {
    pub(super) hypervisor: Arc<dyn Hypervisor>,
    pub(super) context: &'a AttachmentContext,
    pub(super) disk: Disk,
}

impl Vm<'_> {
    pub(super) fn name(&self) -> &str {
        &self.context.node.spec.name
    }
}

/// What was seen.
pub(super) struct Look {
    pub(super) seen: Seen,
    /// The disk, if a VM has it.
    pub(super) found: Option<MirroredDisk>,
    /// What is not proven, or what is in the way.
    pub(super) why: String,
}

impl Look {
    fn without_disk(seen: Seen) -> Self {
        Self { seen, found: None, why: String::new() }
    }

    fn unknown(why: impl Into<String>) -> Self {
        Self { seen: Seen::Unknown, found: None, why: why.into() }
    }

    /// Why the VM stands still by the will of somebody else than this server.
    pub(super) fn is_paused_by_others(&self) -> bool {
        let found = self.found.as_ref();
        found.is_none_or(|found| {
            let is_running = found.power == Power::Running { executing: true };
            !is_running && found.paused != Some(PauseReason::IoError)
        })
    }
}

/// Files that were compared, as they were then.
pub(super) struct Compared {
    old: Option<Stamp>,
    new: Option<Stamp>,
    content: Content,
}

/// What this server remembers of moves until their files or VMs change. All of it can be found again.
#[derive(Default)]
pub(super) struct Memory {
    /// The copy that was last seen running.
    pub(super) looks: HashMap<VolumeId, Job>,
    compared: HashMap<VolumeId, Compared>,
    /// Moves that wait for the choice of an operator.
    pub(super) undecided: HashSet<VolumeId>,
}

fn job(mirror: &Mirror, new: &DiskLocation) -> Job {
    match mirror.state {
        _ if mirror.to != *new => Job::Foreign,
        MirrorState::Copying => Job::Copying,
        MirrorState::Ready => Job::Ready,
        MirrorState::Pivoting => Job::Pivoting,
        MirrorState::Aborting => Job::Aborting,
    }
}

/// What a disk that is there shows.
fn seen(source: &DiskLocation, mirror: Option<&Mirror>, old: &DiskLocation, new: &DiskLocation) -> Seen {
    let job = mirror.map(|mirror| job(mirror, new));
    match source {
        source if source == new => Seen::New(job),
        source if source == old => Seen::Old(job),
        _ => Seen::Foreign,
    }
}

impl Moves {
    /// The VM of the only attachment.
    pub(super) fn vm<'a>(&self, state: &State, context: &'a AttachmentContext) -> Result<Vm<'a>> {
        let hypervisor = self.hypervisors.get(&context.node.spec.hypervisor)?;
        let disk = context.disk(self.source(&state.pool, &state.volume.id));
        Ok(Vm { hypervisor, context, disk })
    }

    /// Looks at the VM that has the volume attached.
    pub(super) async fn look(&self, state: &State) -> Result<Look> {
        if state.phase() == MovePhase::Removing {
            return Ok(Look::without_disk(Seen::Detached));
        }
        let is_settled = matches!(state.phase(), MovePhase::Waiting | MovePhase::Copying);
        let Some(context) = &state.attached else {
            return Ok(match state.attachments.len() {
                0 if is_settled => Look::without_disk(Seen::Detached),
                0 => self.look_at_files(state, Seen::Detached).await?,
                _ => Look::unknown("several VMs have the volume"),
            });
        };
        let vm = self.vm(state, context)?;
        let found = vm.hypervisor.mirrored(context.row.node, &vm.disk).await?;
        let new = self.source(&state.other, &state.volume.id).location();
        let Some(source) = &found.source else {
            let why = format!(
                "the VM {} is {} and does not have the disk; the move goes on when it has the disk again, or when the volume is \
                 detached",
                vm.name(),
                found.power.state()
            );
            if is_settled {
                return Ok(Look { seen: Seen::Gone, found: Some(found), why });
            }
            return match self.disks.prove_detached(context, &vm.disk).await? {
                DetachOutcome::Detached => self.look_at_files(state, Seen::Gone).await,
                DetachOutcome::StillAttached(why) => Ok(Look::unknown(format!(
                    "it is not known which file the VM {} has as its disk: {why}",
                    vm.name()
                ))),
            };
        };
        let old = vm.disk.source.location();
        let seen = seen(source, found.mirror.as_ref(), &old, &new);
        let why = match &found.mirror {
            Some(mirror) if mirror.to != new || matches!(seen, Seen::New(_) | Seen::Foreign) => format!(
                "somebody else copies the disk of the VM {} from {source} to {}; end that copy",
                vm.name(),
                mirror.to
            ),
            Some(mirror) => {
                format!("the copy of the disk of the VM {} to {} is ending", vm.name(), mirror.to)
            }
            None => {
                format!("the VM {} has {source} open as the disk of volume {}", vm.name(), state.volume.id)
            }
        };
        self.remember(&state.volume.id, seen);
        Ok(Look { seen, found: Some(found), why })
    }

    /// Remembers the copy that is seen running, for the case that the VM ends.
    fn remember(&self, id: &VolumeId, seen: Seen) {
        let looks = &mut self.memory().looks;
        match seen {
            Seen::Old(Some(job @ (Job::Copying | Job::Ready))) => drop(looks.insert(id.clone(), job)),
            // The next decision is about the end of that copy.
            Seen::Old(None) => {}
            _ => drop(looks.remove(id)),
        }
    }

    /// Checks that nobody has one of the files open, and that no layer over one of them may have what the VM wrote last.
    async fn look_at_files(&self, state: &State, seen: Seen) -> Result<Look> {
        for pool in [&state.pool, &state.other] {
            if let Some(holder) = self.holder(state, pool).await? {
                return Ok(Look::unknown(format!(
                    "{holder} has the file of volume {} in the pool {} open; end it",
                    state.volume.id, pool.name
                )));
            }
            let object = state.object();
            let locate = move |engine: &dyn Engine| engine.locate(&object);
            match self.engines.run::<_, EngineError, _>(pool, locate).await {
                Ok(_) | Err(EngineError::Missing(_)) => {}
                Err(EngineError::InUse(why)) => return Ok(Look::unknown(why)),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Look::without_disk(seen))
    }

    async fn holder(
        &self,
        state: &State,
        pool: &PoolRow,
    ) -> Result<Option<crate::engine::image_lock::Holder>> {
        let object = state.object();
        let files = move |engine: &dyn Engine| engine.files(&object);
        Ok(self.engines.run::<_, EngineError, _>(pool, files).await?.open)
    }

    /// What is known about a move.
    pub(super) async fn facts(&self, state: &State, look: &Look) -> Result<Facts> {
        let id = &state.volume.id;
        let last = self.memory().looks.get(id).copied();
        Ok(Facts {
            phase: state.phase(),
            cancelled: state.moving.cancelled,
            is_paused: state.moving.paused.is_some(),
            note: state.moving.note,
            chosen: state.moving.chosen,
            seen: look.seen,
            last,
            content: self.known_content(state).await?,
        })
    }

    /// What an earlier comparison showed, if the files are as they were then.
    async fn known_content(&self, state: &State) -> Result<Content> {
        let id = &state.volume.id;
        let Some((old, new, content)) =
            self.memory().compared.get(id).map(|one| (one.old, one.new, one.content))
        else {
            return Ok(Content::Unknown);
        };
        let (old_path, new_path) = (self.path(&state.pool, id)?, self.path(&state.other, id)?);
        let now = blocking(move || {
            let old = if old.is_some() { Stamp::of(&old_path)? } else { None };
            Ok((old, Stamp::of(&new_path)?))
        });
        Ok(if now.await? == (old, new) { content } else { Content::Unknown })
    }

    /// Compares both files. Nothing is locked meanwhile: who uses the result checks that the files are as they were.
    pub(super) async fn compare(&self, state: &State, seen: Seen) -> Result<()> {
        let id = &state.volume.id;
        let is_written = matches!(seen, Seen::Old(_));
        let (old, new) = (self.path(&state.pool, id)?, self.path(&state.other, id)?);
        let stop = self.stop.clone();
        tracing::info!(volume = %id, old = %old.display(), new = %new.display(), "comparing both files of a move");
        let work = move || {
            let stamps = (if is_written { None } else { Stamp::of(&old)? }, Stamp::of(&new)?);
            let content = compare(&old, &new, is_written, &stop)?;
            Ok(Compared { old: stamps.0, new: stamps.1, content })
        };
        let compared = blocking(work).await?;
        tracing::info!(volume = %id, content = ?compared.content, "compared both files of a move");
        self.memory().compared.insert(id.clone(), compared);
        Ok(())
    }

    /// Forgets what was seen of a move.
    pub(super) fn forget(&self, id: &VolumeId) {
        let mut memory = self.memory();
        memory.looks.remove(id);
        memory.compared.remove(id);
        memory.undecided.remove(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_disk_shows_which_file_it_has_and_which_job_runs() {
        let [old, new, other] = ["/old", "/new", "/other"].map(|path| DiskLocation::File(path.into()));
        let mirror = |to: &DiskLocation, state| Mirror { to: to.clone(), state, progress: None };
        let of = |source, mirror: Option<Mirror>| seen(source, mirror.as_ref(), &old, &new);
        assert_eq!(of(&old, None), Seen::Old(None));
        assert_eq!(of(&new, None), Seen::New(None));
        assert_eq!(of(&other, None), Seen::Foreign);
        for (state, job) in [
            (MirrorState::Copying, Job::Copying),
            (MirrorState::Ready, Job::Ready),
            (MirrorState::Pivoting, Job::Pivoting),
            (MirrorState::Aborting, Job::Aborting),
        ] {
            assert_eq!(of(&old, Some(mirror(&new, state))), Seen::Old(Some(job)));
        }
        assert_eq!(of(&old, Some(mirror(&other, MirrorState::Ready))), Seen::Old(Some(Job::Foreign)));
        assert_eq!(of(&new, Some(mirror(&old, MirrorState::Ready))), Seen::New(Some(Job::Foreign)));
    }
}
