//! What is known about an attachment: its row with its volume, pool and node.

use infra_api::{Access, Attachment, ObjectKind, ProblemCode};

use crate::catalog::{AttachmentRow, NodeRow, PoolRow, Tx, VolumeRow};
use crate::hypervisor::{Disk, DiskSource, HypervisorError};
use crate::service::lookups::pool_of;
use crate::service::problems::{Failure, Result};

/// An attachment's row with its volume, pool and node.
pub(in crate::service) struct AttachmentContext {
    pub(in crate::service) row: AttachmentRow,
    pub(in crate::service) volume: VolumeRow,
    pub(in crate::service) pool: PoolRow,
    pub(in crate::service) node: NodeRow,
}

impl AttachmentContext {
    pub(in crate::service) fn of(tx: &Tx<'_>, row: AttachmentRow) -> Result<Self> {
        let volume =
            tx.volume(&row.volume)?.ok_or_else(|| Failure::not_found(ObjectKind::Volume, &row.volume))?;
        let node = tx.node(row.node)?.ok_or_else(|| Failure::not_found(ObjectKind::Node, row.node))?;
        Ok(Self { pool: pool_of(tx, &volume)?, row, volume, node })
    }

    pub(in crate::service) fn disk(&self, source: DiskSource) -> Disk {
        Disk {
            uuid: self.volume.disk_uuid,
            source,
            read_only: self.row.read_only,
            shared: self.row.access != Access::SingleNode,
            qos: self.volume.qos,
            on_full: self.pool.spec.on_full,
            options: self.volume.spec.disk,
        }
    }

    pub(in crate::service) fn to_attachment(&self) -> Attachment {
        let row = self.row.clone();
        Attachment {
            format_token: row.spec().is_sole_writer().then_some(self.volume.format_token),
            blank_attestation: row.blank.attestation(),
            id: row.id,
            volume: row.volume,
            node: row.node,
            read_only: row.read_only,
            access: row.access,
            state: row.state,
            disk_uuid: self.volume.disk_uuid,
            message: row.message,
            created_at: row.created_at,
        }
    }
}

/// Adds the volume and the node to a hypervisor's error.
pub(in crate::service) fn describe(error: HypervisorError, context: &AttachmentContext) -> Failure {
    let mut failure = Failure::from(error);
    let (what, id) = match failure.code() {
        ProblemCode::NodeNotRunning | ProblemCode::TooManyDisks => {
            (ObjectKind::Node, context.row.node.to_string())
        }
        _ => (ObjectKind::Attachment, context.row.id.to_string()),
    };
    failure.0.detail = format!(
        "volume {} on node {} ({}): {}",
        context.volume.id, context.node.spec.name, context.row.node, failure.0.detail
    );
    failure.0.what = Some(what);
    failure.0.id = Some(id);
    failure
}
