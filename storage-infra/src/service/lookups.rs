//! Lookups in the catalog that fail with a problem if an object does not exist or is not ready.

use infra_api::{NodeRef, ObjectKind, PoolName, Problem, ProblemCode, VolumeId, VolumeState};

use super::problems::{Failure, Result};
use crate::catalog::{AttachmentRow, PoolRow, Tx, VolumeRow};

/// A pool.
pub(super) fn pool(tx: &Tx<'_>, name: &PoolName) -> Result<PoolRow> {
    tx.pool(name)?.ok_or_else(|| Failure::not_found(ObjectKind::Pool, name))
}

/// The pool of a volume.
pub(super) fn pool_of(tx: &Tx<'_>, volume: &VolumeRow) -> Result<PoolRow> {
    pool(tx, &volume.pool)
}

/// A volume in state ready.
pub(super) fn ready_volume(tx: &Tx<'_>, id: &VolumeId) -> Result<VolumeRow> {
    let row = tx.volume(id)?.ok_or_else(|| Failure::not_found(ObjectKind::Volume, id))?;
    match row.state {
        VolumeState::Ready => Ok(row),
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

/// References to the nodes of these attachments, with names.
pub(super) fn node_refs(tx: &Tx<'_>, attachments: &[AttachmentRow]) -> Result<Vec<NodeRef>> {
    let name = |uuid| Ok::<_, Failure>(tx.node(uuid)?.map(|node| node.spec.name).unwrap_or_default());
    attachments.iter().map(|a| Ok(NodeRef { uuid: a.node, name: name(a.node)? })).collect()
}
