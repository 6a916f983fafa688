//! Attachments: one disk of one volume in one VM, with at most one writer.
//!
//! An attachment's row is written before the disk is attached and deleted after it is detached. While the row exists,
//! no other single-node attachment of the volume is admitted; so the row is deleted only when the hypervisor's live
//! state shows that the disk is gone.
//!
//! IDs are not reused: a late request must not recreate an attachment that was deleted meanwhile. Ended IDs are
//! remembered for [`ENDED_ID_RETENTION`].

mod attach;
mod detach;
mod live;
mod operations;
mod proof;
mod retries;

use std::time::Duration;

use infra_api::{
    Access, Attachment, AttachmentId, AttachmentSpec, AttachmentState, Change, EventKind, ObjectKind,
    Problem, ProblemCode, VolumeId,
};
use uuid::Uuid;

use super::pools::pool_of;
use super::{Failure, Result, Service};
use crate::catalog::{AttachmentRow, NodeRow, PoolRow, Tx, VolumeRow};
use crate::hypervisor::DiskSource;
use crate::hypervisor::{Disk, HypervisorError};
use operations::{Kind, Trigger};

pub(super) use operations::Operation;
pub(super) use retries::Retries;

/// How long ended IDs are refused: far longer than any request or paused client can be late.
pub(super) const ENDED_ID_RETENTION: Duration = Duration::from_secs(24 * 60 * 60);

/// State of an attachment after the given wait.
#[derive(Debug, Clone)]
pub enum Progress {
    /// The disk is attached to the VM.
    Attached(Attachment),
    /// The operation is still running, or must be requested again.
    InProgress(Attachment),
    /// The attachment does not exist, and its disk is not in the VM.
    Gone,
}

/// An attachment's row with its volume, pool and node.
struct AttachmentContext {
    row: AttachmentRow,
    volume: VolumeRow,
    pool: PoolRow,
    node: NodeRow,
}

impl AttachmentContext {
    fn of(tx: &Tx<'_>, row: AttachmentRow) -> Result<Self> {
        let volume =
            tx.volume(&row.volume)?.ok_or_else(|| Failure::not_found(ObjectKind::Volume, &row.volume))?;
        let node = tx.node(row.node)?.ok_or_else(|| Failure::not_found(ObjectKind::Node, row.node))?;
        Ok(Self { pool: pool_of(tx, &volume)?, row, volume, node })
    }

    fn disk(&self, source: DiskSource) -> Disk {
        Disk {
            uuid: self.volume.disk_uuid,
            source,
            read_only: self.row.read_only,
            shared: self.row.access != Access::SingleNode,
            qos: self.volume.qos,
            on_full: self.pool.spec.on_full,
        }
    }

    fn to_attachment(&self) -> Attachment {
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

impl Service {
    /// One attachment. Waits for a running operation at most `wait`.
    pub async fn attachment(&self, id: &AttachmentId, wait: Duration) -> Result<Progress> {
        if let Some(operation) = self.operation(id) {
            // The row shows the outcome.
            let _ = tokio::time::timeout(wait, operation.work).await;
        }
        self.progress(id).await
    }

    /// All attachments, or those of a node, a volume, or both.
    pub async fn attachments(&self, node: Option<Uuid>, volume: Option<VolumeId>) -> Result<Vec<Attachment>> {
        self.0
            .catalog
            .read(move |tx| -> Result<_> {
                tx.attachments(node, volume.as_ref())?
                    .into_iter()
                    .map(|row| Ok(AttachmentContext::of(tx, row)?.to_attachment()))
                    .collect()
            })
            .await
    }

    pub(super) async fn progress(&self, id: &AttachmentId) -> Result<Progress> {
        let id = id.clone();
        self.0
            .catalog
            .read(move |tx| -> Result<_> {
                let Some(row) = tx.attachment(&id)? else { return Ok(Progress::Gone) };
                let attachment = AttachmentContext::of(tx, row)?.to_attachment();
                Ok(match attachment.state {
                    AttachmentState::Attached => Progress::Attached(attachment),
                    AttachmentState::Attaching | AttachmentState::Detaching => {
                        Progress::InProgress(attachment)
                    }
                })
            })
            .await
    }

    /// Attaches a volume to a node, or takes over the disk of the attachment that it replaces. Waits at most `wait`;
    /// the operation continues.
    pub async fn attach(
        &self,
        id: AttachmentId,
        spec: AttachmentSpec,
        replaces: Option<AttachmentId>,
        wait: Duration,
    ) -> Result<Progress> {
        let work = match self.operation(&id) {
            Some(Operation { kind: Kind::Attach(under_way), work, .. }) if under_way == spec => work,
            Some(Operation { kind: Kind::Detach, .. }) => {
                let detail = format!("the attachment {id} is being detached; its ID is not reused");
                return Err(Problem::new(ProblemCode::Unavailable, detail)
                    .about(ObjectKind::Attachment, id)
                    .into());
            }
            // Another spec with the same ID is decided after the running operation.
            _ => self.start_attach(id.clone(), Trigger::Request(spec, replaces)),
        };
        match self.await_operation(wait, work, &id).await? {
            Progress::Gone => {
                let detail = format!("the attachment {id} waits for other operations on its volume; retry");
                Err(Problem::new(ProblemCode::Unavailable, detail).about(ObjectKind::Attachment, id).into())
            }
            progress => Ok(progress),
        }
    }

    /// Detaches a disk. Waits at most `wait`; the operation continues.
    pub async fn detach(&self, id: AttachmentId, wait: Duration) -> Result<Progress> {
        let work = match self.operation(&id) {
            Some(Operation { kind: Kind::Detach, work, .. }) => work,
            _ => self.start_detach(id.clone()),
        };
        self.await_operation(wait, work, &id).await
    }

    async fn set_state(
        &self,
        id: &AttachmentId,
        state: AttachmentState,
        message: Option<String>,
    ) -> Result<()> {
        let key = id.clone();
        self.0
            .catalog
            .run(move |tx| -> Result<_> { Ok(tx.set_attachment_state(&key, state, message.as_deref())?) })
            .await?;
        self.emit(EventKind::Attachment, id, Change::Updated);
        Ok(())
    }
}

/// Adds the volume and the node to a hypervisor's error.
fn describe(error: HypervisorError, context: &AttachmentContext) -> Failure {
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
