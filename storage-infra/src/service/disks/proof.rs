//! Proof of detachment after the hypervisor reported a disk as detached. An attachment's row is deleted only with
//! this proof.

use std::time::Duration;

use infra_api::{AttachmentState, NodeState};
use tokio::time::Instant;
use uuid::Uuid;

use super::Disks;
use super::context::{AttachmentContext, describe};
use crate::catalog::{AttachmentRow, Tx};
use crate::engine::image_lock::{Holder, holder};
use crate::engine::{Engine, EngineError, Object};
use crate::hypervisor::DiskSource;
use crate::hypervisor::libvirt::LIBVIRT;
use crate::hypervisor::{DetachOutcome, Disk, Power};
use crate::service::power::{DiskOfPool, has_no_disks};
use crate::service::problems::Result;

/// Time for QEMU to close the image of a detached disk.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);
/// Timeout for the pool's filesystem to report image locks.
const QUERY_TIMEOUT: Duration = Duration::from_secs(5);

/// What is proven about a VM that its hypervisor reports as off or gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::service) enum OffProof {
    /// It does not run.
    Proven,
    /// It is off by all other evidence, but no image could show a QEMU that libvirt has lost.
    NoImage,
    /// It may run.
    NotProven,
}

/// An attachment of a node that may be off.
struct NodeAttachment {
    context: AttachmentContext,
    /// Whether the volume has no other attachment.
    is_only: bool,
}

impl NodeAttachment {
    fn of(tx: &Tx<'_>, row: AttachmentRow) -> Result<Self> {
        let is_only = tx.attachments(None, Some(&row.volume))?.len() == 1;
        Ok(Self { context: AttachmentContext::of(tx, row)?, is_only })
    }
}

impl Disks {
    /// Whether a disk that its hypervisor reports as detached is free. libvirt may have lost track of a running QEMU
    /// and report its VM as off; or the VM is saved or runs elsewhere.
    pub(in crate::service) async fn prove_detached(
        &self,
        context: &AttachmentContext,
        disk: &Disk,
    ) -> Result<DetachOutcome> {
        let hypervisor = self.hypervisors.get(&context.node.spec.hypervisor)?;
        if hypervisor.kind() != LIBVIRT {
            return Ok(DetachOutcome::Detached);
        }
        let presence = hypervisor
            .presence(context.row.node, std::slice::from_ref(disk))
            .await
            .map_err(|error| describe(error, context))?;
        if presence.disks.contains_key(&disk.uuid) {
            let why = format!("the VM {} has the disk {} again", context.node.spec.name, disk.uuid);
            return Ok(DetachOutcome::StillAttached(why));
        }
        let of = DiskOfPool { disk, pool: &context.pool };
        match self.power.prove_off(&context.node, &presence.facts, Some(of)).await? {
            DetachOutcome::Detached => self.prove_closed(context, disk, presence.facts.power).await,
            still_holding => Ok(still_holding),
        }
    }

    /// Whether a VM is off: by the evidence that frees disks, and by the images of the volumes that are attached to it alone.
    pub(in crate::service) async fn prove_vm_off(&self, node: Uuid) -> Result<OffProof> {
        let row = self.power.node_row(node).await?;
        let hypervisor = self.hypervisors.get(&row.spec.hypervisor)?;
        if hypervisor.kind() != LIBVIRT {
            return Ok(OffProof::NotProven);
        }
        let attachments = self.attachments_of(node).await?;
        let disks: Vec<Disk> = attachments.iter().map(|one| self.disk_of(&one.context)).collect();
        let presence = hypervisor.presence(node, &disks).await?;
        let (state, _) = self.power.node_state(&row, &presence.facts).await?;
        let is_off = has_no_disks(state)
            && presence.disks.is_empty()
            && self.power.prove_off(&row, &presence.facts, None).await? == DetachOutcome::Detached;
        match is_off {
            true => Ok(self.prove_by_images(&attachments).await),
            false => Ok(OffProof::NotProven),
        }
    }

    /// The attachments of a node whose disks it may have.
    async fn attachments_of(&self, node: Uuid) -> Result<Vec<NodeAttachment>> {
        self.core
            .catalog()
            .read(move |tx| -> Result<_> {
                let rows = tx.attachments(Some(node), None)?.into_iter();
                let confirmed = rows.filter(|row| row.state != AttachmentState::Attaching);
                confirmed.map(|row| NodeAttachment::of(tx, row)).collect()
            })
            .await
    }

    /// What the images of volumes that only this VM has say about a VM that is off by all other evidence.
    async fn prove_by_images(&self, attachments: &[NodeAttachment]) -> OffProof {
        let mut proof = OffProof::NoImage;
        for one in attachments.iter().filter(|one| one.is_only) {
            if !matches!(self.locked_by(&one.context, &self.disk_of(&one.context)).await, Ok(None)) {
                return OffProof::NotProven;
            }
            proof = OffProof::Proven;
        }
        proof
    }

    fn disk_of(&self, context: &AttachmentContext) -> Disk {
        context.disk(self.engines.of(&context.pool).source(&context.volume.id))
    }

    /// Whether no QEMU has the disk's image open. Other attachments of a shared volume have it legitimately.
    async fn prove_closed(
        &self,
        context: &AttachmentContext,
        disk: &Disk,
        power: Power,
    ) -> Result<DetachOutcome> {
        let volume = context.volume.id.clone();
        let rows = self
            .core
            .catalog()
            .read(move |tx| -> Result<_> { Ok(tx.attachments(None, Some(&volume))?) })
            .await?;
        if rows.iter().any(|row| row.id != context.row.id) {
            return Ok(DetachOutcome::Detached);
        }
        let lock = self.still_open(context, disk).await;
        let name = &context.node.spec.name;
        Ok(match lock {
            Ok(None) => DetachOutcome::Detached,
            Ok(Some(holder)) => DetachOutcome::StillAttached(format!(
                "the VM {name} is {} without the disk {} according to its hypervisor, but {holder} has it open; this may be a QEMU \
                 process that libvirt lost: end it once you are certain that it is not needed",
                power.state(),
                disk.uuid
            )),
            // A running QEMU has confirmed itself that it closed the disk.
            Err(_) if power.state() == NodeState::Running => DetachOutcome::Detached,
            Err(why) => DetachOutcome::StillAttached(format!(
                "the VM {name} is {}, but cannot check whether a process still has the disk {} open: {why}",
                power.state(),
                disk.uuid
            )),
        })
    }

    /// The process that holds the image of a detached disk after the time to close it.
    async fn still_open(&self, context: &AttachmentContext, disk: &Disk) -> Result<Option<Holder>, String> {
        let (start, mut pause) = (Instant::now(), Duration::from_millis(5));
        loop {
            match self.locked_by(context, disk).await? {
                Some(found) if start.elapsed() > CLOSE_TIMEOUT => return Ok(Some(found)),
                Some(_) => tokio::time::sleep(pause).await,
                None => return Ok(None),
            }
            pause = (pause * 2).min(Duration::from_millis(200));
        }
    }

    async fn locked_by(&self, context: &AttachmentContext, disk: &Disk) -> Result<Option<Holder>, String> {
        let (source, object) = (disk.source.clone(), Object::Volume(context.volume.id.clone()));
        let query = move |engine: &dyn Engine| {
            let DiskSource::File(path) = source else { return Ok(engine.files(&object)?.open) };
            // If the pool is not mounted, the image is not there either.
            engine.inspect()?;
            let what = || format!("check who has {} open", path.display());
            holder(&path).map_err(|source| EngineError::Io { what: what(), source })
        };
        let query = self.engines.run::<_, EngineError, _>(&context.pool, query);
        let found = match tokio::time::timeout(QUERY_TIMEOUT, query).await {
            Ok(found) => found.map_err(|error| error.to_string())?,
            Err(_) => {
                return Err(format!("{} does not answer within {QUERY_TIMEOUT:?}", context.pool.spec.path));
            }
        };
        // A loop device of this host does not belong to a VM.
        Ok(found.filter(|holder| matches!(holder, Holder::Locked(_) | Holder::Watching(_))))
    }
}
