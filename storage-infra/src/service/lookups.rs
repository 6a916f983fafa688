//! Lookups in the catalog that fail with a problem if an object does not exist or is not ready.

use infra_api::{
    EngineKind, MovePhase, NodeRef, ObjectKind, PoolName, Problem, ProblemCode, SnapshotId, VolumeId,
    VolumeState,
};

use super::problems::{Failure, Result};
use crate::catalog::{AttachmentRow, MoveRow, PoolRow, SnapshotRow, Tx, VolumeRow};
use crate::engine::RbdLocation;
use crate::hypervisor::DiskLocation;
use crate::safety::Check;
use crate::scope::Scope;

/// A pool.
pub(super) fn pool(tx: &Tx<'_>, name: &PoolName) -> Result<PoolRow> {
    tx.pool(name)?.ok_or_else(|| Failure::not_found(ObjectKind::Pool, name))
}

/// The pool of a volume.
pub(super) fn pool_of(tx: &Tx<'_>, volume: &VolumeRow) -> Result<PoolRow> {
    pool(tx, &volume.pool)
}

/// A volume that exists for the client.
pub(super) fn volume_in(tx: &Tx<'_>, scope: &Scope, id: &VolumeId) -> Result<VolumeRow> {
    let row = tx.volume(id)?.filter(|row| scope.includes(&row.owner));
    row.ok_or_else(|| Failure::not_found(ObjectKind::Volume, id))
}

/// A snapshot that exists for the client.
pub(super) fn snapshot_in(tx: &Tx<'_>, scope: &Scope, id: &SnapshotId) -> Result<SnapshotRow> {
    let row = tx.snapshot(id)?.filter(|row| scope.includes(&row.owner));
    row.ok_or_else(|| Failure::not_found(ObjectKind::Snapshot, id))
}

/// A volume in state ready.
pub(super) fn ready_volume(tx: &Tx<'_>, id: &VolumeId) -> Result<VolumeRow> {
    ready_volume_in(tx, &Scope::All, id)
}

/// A volume in state ready that exists for the client.
pub(super) fn ready_volume_in(tx: &Tx<'_>, scope: &Scope, id: &VolumeId) -> Result<VolumeRow> {
    let row = volume_in(tx, scope, id)?;
    match row.state {
        VolumeState::Ready => refuse_held(tx, id, true).map(|()| row),
        VolumeState::Creating => {
            let detail = format!("the volume {id} is not ready yet; retry later");
            Err(Problem::new(ProblemCode::Unavailable, detail).about(ObjectKind::Volume, id).into())
        }
        VolumeState::Deleting => {
            let detail = format!("the volume {id} is being deleted");
            Err(Problem::new(ProblemCode::NotFound, detail).about(ObjectKind::Volume, id).into())
        }
    }
}

/// Fails while another operation holds a volume against reading it, or against changing it.
pub(super) fn refuse_held(tx: &Tx<'_>, id: &VolumeId, reads_only: bool) -> Result<()> {
    match tx.hold(id)? {
        Some(hold) if !(reads_only && hold.allows_reading()) => {
            let detail = format!("the volume {id} {hold}");
            let code = hold.code(if reads_only { ProblemCode::Unavailable } else { ProblemCode::InUse });
            Err(Problem::new(code, detail).about(ObjectKind::Volume, id).into())
        }
        _ => Ok(()),
    }
}

/// Fails while a VM may change to the other file of a move: until that is known, its disk is neither attached nor detached.
pub(super) fn refuse_switching(tx: &Tx<'_>, id: &VolumeId) -> Result<()> {
    match tx.volume_move(id)? {
        Some(MoveRow { phase: MovePhase::Switching, pool, message, .. }) if Check::Switching.applies() => {
            let why = message.unwrap_or_else(|| "retry".to_owned());
            let detail = format!("the VM of volume {id} is changing to its file in the pool {pool}: {why}");
            Err(Problem::new(ProblemCode::Unavailable, detail).about(ObjectKind::Volume, id).into())
        }
        _ => Ok(()),
    }
}

/// Fails if there are attachments of a volume; `detail` says what follows, with the names of their nodes.
pub(super) fn refuse_attached(
    tx: &Tx<'_>,
    id: &VolumeId,
    attachments: &[AttachmentRow],
    detail: impl FnOnce(&str) -> String,
) -> Result<()> {
    if attachments.is_empty() {
        return Ok(());
    }
    let nodes = node_refs(tx, attachments)?;
    let names: Vec<String> = nodes.iter().map(ToString::to_string).collect();
    let problem = Problem::new(ProblemCode::InUse, detail(&names.join(", ")));
    Err(problem.about(ObjectKind::Volume, id).used_by(nodes).into())
}

/// Fails while a node may write to a volume.
pub(super) fn refuse_writers(tx: &Tx<'_>, id: &VolumeId, detail: impl FnOnce(&str) -> String) -> Result<()> {
    let mut writers = tx.attachments(None, Some(id))?;
    writers.retain(|attachment| !attachment.read_only);
    refuse_attached(tx, id, &writers, detail)
}

/// References to the nodes of these attachments, with names.
pub(super) fn node_refs(tx: &Tx<'_>, attachments: &[AttachmentRow]) -> Result<Vec<NodeRef>> {
    let name = |uuid| Ok::<_, Failure>(tx.node(uuid)?.map(|node| node.spec.name).unwrap_or_default());
    attachments.iter().map(|a| Ok(NodeRef { uuid: a.node, name: name(a.node)? })).collect()
}

/// The volume to which a file or an image in a pool belongs by its name.
pub(super) fn volume_at(pool: &PoolRow, location: &DiskLocation) -> Option<VolumeId> {
    let name = match (pool.spec.engine, location) {
        (EngineKind::File, DiskLocation::File(path)) => {
            path.strip_prefix(&pool.spec.path).ok()?.to_str()?.strip_suffix(".raw")?.to_owned()
        }
        (EngineKind::Rbd, DiskLocation::Rbd(image)) => {
            pool.spec.path.parse::<RbdLocation>().ok()?.name_of(image)?.to_owned()
        }
        _ => return None,
    };
    VolumeId::new(name).ok()
}
