//! Attachments: one disk of one volume in one virtual machine, and one writer at most.
//!
//! An attachment's row comes before the plug and goes after the unplug. While there is a row, no other single-node
//! attachment of the volume can be made; so a row goes only when a hypervisor's live state is free of the disk.

use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use infra_api::{
    Attachment, AttachmentId, AttachmentSpec, AttachmentState, Change, EventKind, Problem, ProblemCode,
    VolumeId, What,
};
use uuid::Uuid;

use super::admission::admit;
use super::pools::pool_of;
use super::{Failure, Result, Service};
use crate::catalog::{AttachmentRow, NodeRow, PoolRow, Tx, VolumeRow};
use crate::engine::DiskSource;
use crate::hypervisor::{Disk, HypervisorError, Unplugged};

type Work = Shared<BoxFuture<'static, Result<Progress>>>;

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

/// Work on an attachment that somebody may join.
#[derive(Clone)]
pub(super) struct Operation {
    number: u64,
    kind: Kind,
    work: Work,
}

/// What work on an attachment is for.
#[derive(Clone)]
enum Kind {
    /// A caller wants this attachment.
    Attach(AttachmentSpec),
    /// The catalog wants it.
    Resume,
    /// It is to go.
    Detach,
}

/// Who wants the attachment.
enum Wanted {
    /// A caller: make it, where it is not there.
    ByCaller(AttachmentSpec),
    /// Start-up or repair: only where its row is still there and was not told to go.
    ByCatalog,
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
        Disk { uuid: self.volume.disk_uuid, source, read_only: self.row.read_only }
    }

    fn to_attachment(&self) -> Attachment {
        to_attachment(self.row.clone(), self.volume.disk_uuid)
    }
}

fn to_attachment(row: AttachmentRow, disk_uuid: Uuid) -> Attachment {
    Attachment {
        id: row.id,
        volume: row.volume,
        node: row.node,
        read_only: row.read_only,
        access: row.access,
        state: row.state,
        disk_uuid,
        message: row.message,
        created_at: row.created_at,
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
            .run(move |tx| -> Result<_> {
                tx.attachments(node, volume.as_ref())?
                    .into_iter()
                    .map(|row| Ok(Parts::of(tx, row)?.to_attachment()))
                    .collect()
            })
            .await
    }

    async fn progress(&self, id: &AttachmentId) -> Result<Progress> {
        let id = id.clone();
        self.0
            .catalog
            .run(move |tx| -> Result<_> {
                let Some(row) = tx.attachment(&id)? else { return Ok(Progress::Gone) };
                let attachment = Parts::of(tx, row)?.to_attachment();
                Ok(match attachment.state {
                    AttachmentState::Attached => Progress::Plugged(attachment),
                    AttachmentState::Attaching | AttachmentState::Detaching => Progress::UnderWay(attachment),
                })
            })
            .await
    }

    /// Plugs a volume into a node. Waits at most so long; the work goes on.
    pub async fn attach(&self, id: AttachmentId, spec: AttachmentSpec, wait: Duration) -> Result<Progress> {
        let work = match self.operation(&id) {
            Some(Operation { kind: Kind::Attach(under_way), work, .. }) if under_way == spec => work,
            Some(Operation { kind: Kind::Detach, .. }) => {
                let detail = format!("the attachment {id} is being detached; repeat when it is gone");
                return Err(Problem::new(ProblemCode::Unavailable, detail)
                    .about(What::Attachment, id)
                    .into());
            }
            // Another wish under the same id comes after the one under way, and is judged by what that left.
            _ => self.start_attach(id.clone(), Wanted::ByCaller(spec)),
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

    async fn within(&self, wait: Duration, work: Work, id: &AttachmentId) -> Result<Progress> {
        match tokio::time::timeout(wait, work).await {
            Ok(result) => result,
            Err(_) => self.progress(id).await,
        }
    }

    fn operation(&self, id: &AttachmentId) -> Option<Operation> {
        self.lock_operations().get(id).cloned()
    }

    fn lock_operations(
        &self,
    ) -> std::sync::MutexGuard<'_, std::collections::HashMap<AttachmentId, Operation>> {
        self.0.operations.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Registers work under an attachment's id, after the work that is registered there now.
    fn start<F>(&self, id: AttachmentId, kind: Kind, work: F) -> Work
    where
        F: Future<Output = Result<Progress>> + Send + 'static,
    {
        static NUMBER: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let mut operations = self.lock_operations();
        let before = operations.get(&id).map(|operation| operation.work.clone());
        let (service, key) = (self.clone(), id.clone());
        let task = self.0.tasks.spawn(async move {
            if let Some(before) = before {
                let _ = before.await;
            }
            let result = work.await;
            let mut operations = service.lock_operations();
            if operations.get(&key).is_some_and(|operation| operation.number == number) {
                operations.remove(&key);
            }
            result
        });
        let broke = |error| Failure::new(ProblemCode::Internal, format!("the work broke off: {error}"));
        let work = async move { task.await.unwrap_or_else(|error| Err(broke(error))) }.boxed().shared();
        operations.insert(id, Operation { number, kind, work: work.clone() });
        work
    }

    fn start_attach(&self, id: AttachmentId, wanted: Wanted) -> Work {
        let kind = match &wanted {
            Wanted::ByCaller(spec) => Kind::Attach(spec.clone()),
            Wanted::ByCatalog => Kind::Resume,
        };
        let (service, key) = (self.clone(), id.clone());
        self.start(id, kind, async move { service.do_attach(&key, wanted).await })
    }

    fn start_detach(&self, id: AttachmentId) -> Work {
        let (service, key) = (self.clone(), id.clone());
        self.start(id, Kind::Detach, async move { service.do_detach(&key).await })
    }

    /// Finishes or repairs what the catalog says about an attachment, unless someone is at it.
    pub(super) async fn resume(&self, row: &AttachmentRow) {
        if self.operation(&row.id).is_some() {
            return;
        }
        let work = match row.state {
            AttachmentState::Attaching | AttachmentState::Attached => {
                self.start_attach(row.id.clone(), Wanted::ByCatalog)
            }
            AttachmentState::Detaching => self.start_detach(row.id.clone()),
        };
        if let Err(failure) = work.await {
            tracing::warn!(attachment = %row.id, volume = %row.volume, node = %row.node, %failure, "not finished; will be tried again");
        }
    }

    async fn do_attach(&self, id: &AttachmentId, wanted: Wanted) -> Result<Progress> {
        // Admitted before the lock is had: whoever cannot have the volume is told so at once, and does not wait for
        // what is done to it. From here on the row keeps others out.
        let key = id.clone();
        let admitted = self
            .0
            .catalog
            .run(move |tx| -> Result<_> {
                Ok(match wanted {
                    Wanted::ByCaller(spec) => Some(admit(tx, &key, &spec)?),
                    Wanted::ByCatalog => tx.attachment(&key)?.map(|row| (row, false)),
                })
            })
            .await?;
        let Some((row, created)) = admitted else { return Ok(Progress::Gone) };
        if created {
            self.emit(EventKind::Attachment, id, Change::Created);
        }
        let _lock = self.0.locks.lock(row.volume.as_str()).await;
        let key = id.clone();
        let current = self
            .0
            .catalog
            .run(move |tx| -> Result<_> { tx.attachment(&key)?.map(|row| Parts::of(tx, row)).transpose() })
            .await?;
        let Some(mut parts) = current else { return Ok(Progress::Gone) };
        if parts.row.state == AttachmentState::Detaching {
            return Ok(Progress::UnderWay(parts.to_attachment()));
        }
        match self.plug(&parts).await {
            Ok(()) => {
                if parts.row.state != AttachmentState::Attached || parts.row.message.is_some() {
                    self.set_state(id, AttachmentState::Attached, None).await?;
                    tracing::info!(attachment = %id, volume = %parts.row.volume, node = %parts.row.node, "attached");
                }
                parts.row.state = AttachmentState::Attached;
                parts.row.message = None;
                Ok(Progress::Plugged(parts.to_attachment()))
            }
            Err(PlugError::NotPlugged(failure)) if parts.row.state == AttachmentState::Attaching => {
                // Nothing is plugged, so nothing is left behind.
                let key = id.clone();
                self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.delete_attachment(&key)?) }).await?;
                self.emit(EventKind::Attachment, id, Change::Deleted);
                Err(failure)
            }
            Err(PlugError::NotPlugged(failure) | PlugError::Unknown(failure)) => {
                if parts.row.message.as_ref() != Some(&failure.0.detail) {
                    self.set_state(id, parts.row.state, Some(failure.0.detail.clone())).await?;
                }
                Err(failure)
            }
        }
    }

    async fn plug(&self, parts: &Parts) -> Result<(), PlugError> {
        let name = parts.volume.id.clone();
        let source = self
            .engine::<_, Failure, _>(self.engine_of(&parts.pool), move |engine| Ok(engine.locate(&name)?))
            .await
            .map_err(PlugError::Unknown)?;
        let hypervisor = self.hypervisor(&parts.node.spec.hypervisor).map_err(PlugError::Unknown)?;
        hypervisor.plug(parts.row.node, &parts.disk(source)).await.map_err(|error| {
            let nothing = matches!(error, HypervisorError::NotRunning(_) | HypervisorError::Refused(_));
            let failure = describe(error, parts);
            if nothing { PlugError::NotPlugged(failure) } else { PlugError::Unknown(failure) }
        })
    }

    async fn do_detach(&self, id: &AttachmentId) -> Result<Progress> {
        let Some(row) = self.row(id).await? else { return Ok(Progress::Gone) };
        let _lock = self.0.locks.lock(row.volume.as_str()).await;
        let key = id.clone();
        let found = self
            .0
            .catalog
            .run(move |tx| -> Result<_> {
                let Some(row) = tx.attachment(&key)? else { return Ok(None) };
                if row.state != AttachmentState::Detaching {
                    tx.set_attachment_state(&key, AttachmentState::Detaching, None)?;
                }
                Ok(Some(Parts::of(tx, row)?))
            })
            .await?;
        let Some(mut parts) = found else { return Ok(Progress::Gone) };
        if parts.row.state != AttachmentState::Detaching {
            self.emit(EventKind::Attachment, id, Change::Updated);
            parts.row.state = AttachmentState::Detaching;
        }
        let source = self.engine_of(&parts.pool).source(&parts.volume.id);
        let unplugged = match self.hypervisor(&parts.node.spec.hypervisor) {
            Ok(hypervisor) => hypervisor
                .unplug(parts.row.node, &parts.disk(source))
                .await
                .map_err(|error| describe(error, &parts)),
            Err(failure) => Err(failure),
        };
        let why = match unplugged {
            Ok(Unplugged::Gone) => {
                let key = id.clone();
                self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.delete_attachment(&key)?) }).await?;
                self.emit(EventKind::Attachment, id, Change::Deleted);
                tracing::info!(attachment = %id, volume = %parts.row.volume, node = %parts.row.node, "detached");
                return Ok(Progress::Gone);
            }
            Ok(Unplugged::StillThere(why)) => Ok(why),
            Err(failure) => Err(failure),
        };
        let message = match &why {
            Ok(why) => why.clone(),
            Err(failure) => failure.0.detail.clone(),
        };
        if parts.row.message.as_ref() != Some(&message) {
            tracing::warn!(attachment = %id, volume = %parts.row.volume, node = %parts.row.node, %message, "not detached");
            self.set_state(id, AttachmentState::Detaching, Some(message.clone())).await?;
        }
        parts.row.message = Some(message);
        why.map(|_| Progress::UnderWay(parts.to_attachment()))
    }

    /// Tells a virtual machine that its disk has grown. Fine where the disk turns out not to be plugged: whoever
    /// plugs it next sees the new size.
    pub(super) async fn resize_plugged(&self, row: &AttachmentRow, bytes: u64) -> Result<()> {
        let key = row.id.clone();
        let parts = self
            .0
            .catalog
            .run(move |tx| -> Result<_> { tx.attachment(&key)?.map(|row| Parts::of(tx, row)).transpose() })
            .await?;
        let Some(parts) = parts else { return Ok(()) };
        let source = self.engine_of(&parts.pool).source(&parts.volume.id);
        let hypervisor = self.hypervisor(&parts.node.spec.hypervisor)?;
        match hypervisor.resize(parts.row.node, &parts.disk(source), bytes).await {
            Ok(()) | Err(HypervisorError::NotRunning(_) | HypervisorError::Refused(_)) => Ok(()),
            Err(error) => Err(describe(error, &parts)),
        }
    }

    /// The attachments of a node that the catalog calls attached and whose disks its running machine does not have.
    pub(super) async fn missing(&self, node: Uuid, rows: Vec<AttachmentRow>) -> Result<Vec<AttachmentRow>> {
        let row = self.node_row(node).await?;
        let parts = self
            .0
            .catalog
            .run(move |tx| -> Result<Vec<Parts>> { rows.into_iter().map(|row| Parts::of(tx, row)).collect() })
            .await?;
        let disks: Vec<Disk> =
            parts.iter().map(|p| p.disk(self.engine_of(&p.pool).source(&p.volume.id))).collect();
        let presence = self.hypervisor(&row.spec.hypervisor)?.presence(node, &disks).await?;
        if presence.state != infra_api::NodeState::Running {
            return Ok(Vec::new());
        }
        let gone = |parts: &Parts| !presence.disks.contains(&parts.volume.disk_uuid);
        Ok(parts.into_iter().filter(gone).map(|parts| parts.row).collect())
    }

    async fn row(&self, id: &AttachmentId) -> Result<Option<AttachmentRow>> {
        let id = id.clone();
        self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.attachment(&id)?) }).await
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

/// Why a plug did not end well, by what it leaves.
enum PlugError {
    /// The disk is not in the virtual machine, confirmed.
    NotPlugged(Failure),
    /// The disk may be there.
    Unknown(Failure),
}

/// Says which volume and node a hypervisor's error was about.
fn describe(error: HypervisorError, parts: &Parts) -> Failure {
    let mut failure = Failure::from(error);
    let (what, id) = match failure.code() {
        ProblemCode::NodeNotRunning => (What::Node, parts.row.node.to_string()),
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
