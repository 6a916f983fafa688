//! Attachments: one disk of one volume in one virtual machine, and one writer at most.
//!
//! An attachment's row comes before the plug and goes after the unplug. While there is a row, no other single-node
//! attachment of the volume can be made; so a row goes only when a hypervisor's live state is free of the disk.
//!
//! An id is used once: who asks for an attachment can be so late that it was told to go meanwhile, and must not bring
//! it back. That an id is over is remembered for [`REMEMBERED`].

mod live;
mod operations;
mod plugging;
mod proof;
mod retries;
mod unplugging;

use std::time::Duration;

use infra_api::{
    Access, Attachment, AttachmentId, AttachmentSpec, AttachmentState, Change, EventKind, Problem,
    ProblemCode, VolumeId, What,
};
use uuid::Uuid;

use super::pools::pool_of;
use super::{Failure, Result, Service};
use crate::catalog::{AttachmentRow, NodeRow, PoolRow, Tx, VolumeRow};
use crate::engine::DiskSource;
use crate::hypervisor::{Disk, HypervisorError};
use operations::{Kind, Wanted};

pub(super) use operations::Operation;
pub(super) use retries::Retries;

/// How long an id that is over is refused: far longer than any request is under way, or its sender paused.
pub(super) const REMEMBERED: Duration = Duration::from_secs(24 * 60 * 60);

/// How far an attachment came within the time that was given.
#[derive(Debug, Clone)]
pub enum Progress {
    /// The disk is in the virtual machine.
    Plugged(Attachment),
    /// The work goes on, or must be asked for again.
    UnderWay(Attachment),
    /// There is no such attachment, and no such disk in the virtual machine.
    Gone,
}

/// Everything that an attachment is about.
struct Parts {
    row: AttachmentRow,
    volume: VolumeRow,
    pool: PoolRow,
    node: NodeRow,
}

impl Parts {
    fn of(tx: &Tx<'_>, row: AttachmentRow) -> Result<Self> {
        let volume = tx.volume(&row.volume)?.ok_or_else(|| Failure::not_found(What::Volume, &row.volume))?;
        let node = tx.node(row.node)?.ok_or_else(|| Failure::not_found(What::Node, row.node))?;
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
    /// One attachment. Waits for work under way at most so long.
    pub async fn attachment(&self, id: &AttachmentId, wait: Duration) -> Result<Progress> {
        if let Some(operation) = self.operation(id) {
            // However it ends: the row tells.
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
                    .map(|row| Ok(Parts::of(tx, row)?.to_attachment()))
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
                let attachment = Parts::of(tx, row)?.to_attachment();
                Ok(match attachment.state {
                    AttachmentState::Attached => Progress::Plugged(attachment),
                    AttachmentState::Attaching | AttachmentState::Detaching => Progress::UnderWay(attachment),
                })
            })
            .await
    }

    /// Plugs a volume into a node, or takes over the disk of the attachment that it replaces. Waits at most so long; the
    /// work goes on.
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
                let detail =
                    format!("the attachment {id} is being detached, and won't come back under this id");
                return Err(Problem::new(ProblemCode::Unavailable, detail)
                    .about(What::Attachment, id)
                    .into());
            }
            // Another wish under the same id comes after the one under way, and is judged by what that left.
            _ => self.start_attach(id.clone(), Wanted::ByCaller(spec, replaces)),
        };
        match self.within(wait, work, &id).await? {
            Progress::Gone => {
                let detail = format!("the attachment {id} waits for other work on its volume; repeat");
                Err(Problem::new(ProblemCode::Unavailable, detail).about(What::Attachment, id).into())
            }
            progress => Ok(progress),
        }
    }

    /// Unplugs a disk. Waits at most so long; the work goes on.
    pub async fn detach(&self, id: AttachmentId, wait: Duration) -> Result<Progress> {
        let work = match self.operation(&id) {
            Some(Operation { kind: Kind::Detach, work, .. }) => work,
            _ => self.start_detach(id.clone()),
        };
        self.within(wait, work, &id).await
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

/// Says which volume and node a hypervisor's error was about.
fn describe(error: HypervisorError, parts: &Parts) -> Failure {
    let mut failure = Failure::from(error);
    let (what, id) = match failure.code() {
        ProblemCode::NodeNotRunning | ProblemCode::TooManyDisks => (What::Node, parts.row.node.to_string()),
        _ => (What::Attachment, parts.row.id.to_string()),
    };
    failure.0.detail = format!(
        "volume {} on node {} ({}): {}",
        parts.volume.id, parts.node.spec.name, parts.row.node, failure.0.detail
    );
    failure.0.what = Some(what);
    failure.0.id = Some(id);
    failure
}
