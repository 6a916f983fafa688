//! What is known about a move.

use std::path::{Path, PathBuf};

use infra_api::{Access, EngineKind, MovePhase, ObjectKind, Problem, ProblemCode, VolumeId};

use super::Moves;
use crate::catalog::{AttachmentRow, Hold, MoveRow, PoolRow, Tx, VolumeRow};
use crate::engine::{Engine, Object, Record};
use crate::hypervisor::DiskSource;
use crate::service::disks::AttachmentContext;
use crate::service::lookups::{self, node_refs, pool_of};
use crate::service::problems::{Failure, Result};
use crate::service::records::PendingRecord;

/// A move with its volume, both pools, and the attachments of the volume.
pub(super) struct State {
    pub(super) volume: VolumeRow,
    pub(super) moving: MoveRow,
    /// The pool that has the data.
    pub(super) pool: PoolRow,
    /// The pool of the other file.
    pub(super) other: PoolRow,
    pub(super) attachments: Vec<AttachmentRow>,
    /// The only attachment, if there is one.
    pub(super) attached: Option<AttachmentContext>,
    hold: Option<Hold>,
}

impl State {
    /// `None` if the volume is not being moved.
    pub(super) fn of(tx: &Tx<'_>, id: &VolumeId) -> Result<Option<Self>> {
        let (Some(moving), Some(volume)) = (tx.volume_move(id)?, tx.volume(id)?) else { return Ok(None) };
        let attachments = tx.attachments(None, Some(id))?;
        let attached = match attachments.as_slice() {
            [only] => Some(AttachmentContext::of(tx, only.clone())?),
            _ => None,
        };
        let (pool, other) = (pool_of(tx, &volume)?, lookups::pool(tx, &moving.pool)?);
        let hold = tx.suspended_hold(id)?;
        Ok(Some(Self { volume, moving, pool, other, attachments, attached, hold }))
    }

    pub(super) fn object(&self) -> Object {
        Object::Volume(self.volume.id.clone())
    }

    pub(super) fn phase(&self) -> MovePhase {
        self.moving.phase
    }

    /// Fails while the volume or one of the pools is suspended.
    pub(super) fn refuse_suspended(&self) -> Result<()> {
        if let Some(hold) = &self.hold {
            return Err(self.wait(format!("the volume {} {hold}", self.volume.id)));
        }
        match &self.other.suspension {
            Some(suspension) => Err(self.wait(format!(
                "the pool {} is suspended since {}: {}; resume it",
                self.other.name, suspension.since, suspension.reason
            ))),
            None => Ok(()),
        }
    }

    /// Whether the volume is a file before and after the move.
    pub(super) fn has_only_files(&self) -> bool {
        [&self.pool, &self.other].iter().all(|pool| pool.spec.engine == EngineKind::File)
    }

    /// What the move waits for.
    pub(super) fn wait(&self, why: impl Into<String>) -> Failure {
        waits(&self.volume.id, why)
    }
}

/// What the move of a volume waits for.
pub(super) fn waits(id: &VolumeId, why: impl Into<String>) -> Failure {
    Problem::new(ProblemCode::Unavailable, why.into()).about(ObjectKind::Volume, id).into()
}

/// The attachment whose disk is exchanged. Fails if the VMs that have the volume cannot change to another file together.
pub(super) fn only_writer<'a>(
    tx: &Tx<'_>,
    id: &VolumeId,
    attachments: &'a [AttachmentRow],
) -> Result<Option<&'a AttachmentRow>> {
    let only = match attachments {
        [] => return Ok(None),
        [only] if only.access == Access::SingleNode && !only.read_only => return Ok(Some(only)),
        all => all,
    };
    let nodes = node_refs(tx, only)?;
    let names: Vec<String> = nodes.iter().map(ToString::to_string).collect();
    let detail = format!(
        "the volume {id} is attached to {} ({} attachments, {}); an attached volume is moved only if one VM has it, as its only \
         writer: several VMs cannot change to another file together, and QEMU does not copy a read-only disk. Detach it first",
        names.join(", "),
        only.len(),
        only[0].access
    );
    Err(Problem::new(ProblemCode::InUse, detail).about(ObjectKind::Volume, id).used_by(nodes).into())
}

impl Moves {
    /// Reads a move.
    pub(super) async fn state(&self, id: &VolumeId) -> Result<Option<State>> {
        let id = id.clone();
        self.core.catalog().read(move |tx| State::of(tx, &id)).await
    }

    /// The file of the volume in a pool. Does no I/O.
    pub(super) fn source(&self, pool: &PoolRow, id: &VolumeId) -> DiskSource {
        self.engines.of(pool).source(id)
    }

    pub(super) fn path(&self, pool: &PoolRow, id: &VolumeId) -> Result<PathBuf> {
        let source = self.source(pool, id);
        source.file().map(Path::to_owned).map_err(|why| Failure::new(ProblemCode::Invalid, why))
    }

    /// The record of the other file until the catalog names its pool.
    pub(super) async fn unfinished_record(&self, id: &VolumeId) -> Result<Record> {
        let name = id.clone();
        let record = move |tx: &Tx<'_>| -> Result<_> {
            let pending = PendingRecord::of_any(tx, &name)?;
            let missing = || Failure::not_found(ObjectKind::Volume, &name);
            pending.map(|one| one.unfinished_move()).ok_or_else(missing)
        };
        self.core.catalog().read(record).await
    }

    /// Removes the other file, which has no data that counts. Refused if a VM or process uses it.
    pub(super) async fn discard_other(&self, state: &State) -> Result<()> {
        let cleared = self.files.clear(&state.other, state.object(), state.volume.disk_uuid).await?;
        if cleared.was_empty() {
            return Ok(());
        }
        let remove = move |engine: &dyn Engine| Ok(engine.remove(&cleared)?);
        self.engines.run::<_, Failure, _>(&state.other, remove).await
    }
}
