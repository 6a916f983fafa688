//! Attachments: one disk of one volume in one VM, with at most one writer.
//!
//! An attachment's row is written before the disk is attached and deleted after it is detached. While the row exists,
//! no other single-node attachment of the volume is admitted; so the row is deleted only when the hypervisor's live
//! state shows that the disk is gone.
//!
//! IDs are not reused: a late request must not recreate an attachment that was deleted meanwhile. Ended IDs are
//! remembered for [`ENDED_ID_RETENTION`].

pub mod admission;
mod attach;
mod detach;
mod fencing;
mod operations;
mod retries;
mod unexpected_disks;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use infra_api::{
    Attachment, AttachmentId, AttachmentSpec, AttachmentState, Change, EventKind, ObjectKind, Problem,
    ProblemCode, VolumeId,
};
use uuid::Uuid;

use super::conditions::Conditions;
use super::core::Core;
use super::disks::{AttachmentContext, Disks};
use super::moves::Moves;
use super::power::PowerStates;
use super::problems::Result;
use super::records::Records;
use operations::{Kind, Operation, Trigger};

pub use fencing::Fencing;
pub(super) use retries::Retries;
pub use unexpected_disks::UnexpectedDisks;

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

/// What attachments use.
pub(super) struct Uses {
    pub(super) core: Arc<Core>,
    pub(super) disks: Arc<Disks>,
    pub(super) power: Arc<PowerStates>,
    pub(super) records: Arc<Records>,
    pub(super) conditions: Arc<Conditions>,
    pub(super) unexpected_disks: Arc<UnexpectedDisks>,
    pub(super) moves: Arc<Moves>,
    pub(super) retries: Arc<Retries>,
}

/// The attachments.
pub struct Attachments {
    core: Arc<Core>,
    disks: Arc<Disks>,
    power: Arc<PowerStates>,
    records: Arc<Records>,
    conditions: Arc<Conditions>,
    unexpected_disks: Arc<UnexpectedDisks>,
    moves: Arc<Moves>,
    retries: Arc<Retries>,
    /// The last operation on each attachment that has one.
    operations: Mutex<HashMap<AttachmentId, Operation>>,
}

impl Attachments {
    pub(super) fn new(uses: Uses) -> Self {
        let Uses { core, disks, power, records, conditions, unexpected_disks, moves, retries } = uses;
        let operations = Mutex::default();
        Self { core, disks, power, records, conditions, unexpected_disks, moves, retries, operations }
    }

    /// One attachment. Waits for a running operation at most `wait`.
    pub async fn get(&self, id: &AttachmentId, wait: Duration) -> Result<Progress> {
        if let Some(operation) = self.operation(id) {
            // The row shows the outcome.
            let _ = tokio::time::timeout(wait, operation.work).await;
        }
        self.progress(id).await
    }

    /// All attachments, or those of a node, a volume, or both.
    pub async fn list(&self, node: Option<Uuid>, volume: Option<VolumeId>) -> Result<Vec<Attachment>> {
        self.core
            .catalog()
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
        self.core
            .catalog()
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
        self: &Arc<Self>,
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
    pub async fn detach(self: &Arc<Self>, id: AttachmentId, wait: Duration) -> Result<Progress> {
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
        self.core
            .catalog()
            .run(move |tx| -> Result<_> { Ok(tx.set_attachment_state(&key, state, message.as_deref())?) })
            .await?;
        self.core.emit(EventKind::Attachment, id, Change::Updated);
        Ok(())
    }
}
