//! Disks in VMs: attach, detach, size, limits and presence.

mod comparison;
mod context;
mod proof;
mod users;

use std::sync::Arc;

use infra_api::{AttachmentState, EngineKind, ObjectKind, Problem, ProblemCode};
use uuid::Uuid;

use super::core::Core;
use super::hypervisors::Hypervisors;
use super::lookups::pool_of;
use super::pools::Engines;
use super::power::PowerStates;
use super::problems::{Failure, Result};
use super::reach;
use super::records::Records;
use crate::catalog::{AttachmentRow, Blank, Tx};
use crate::engine::{Engine, Expected, Object};
use crate::hypervisor::{AttachedDisk, DetachOutcome, Disk, Hypervisor, HypervisorError, Power, Presence};
use crate::random;
use crate::safety::Check;
use context::describe;

pub(super) use comparison::Comparison;
pub(super) use context::AttachmentContext;
pub(super) use proof::OffProof;

/// The disks of volumes in VMs.
pub(super) struct Disks {
    core: Arc<Core>,
    engines: Arc<Engines>,
    hypervisors: Arc<Hypervisors>,
    power: Arc<PowerStates>,
    records: Arc<Records>,
    comparison: Arc<Comparison>,
}

/// Failure of an attach, by the state of the disk.
pub(super) enum AttachError {
    /// The disk is confirmed not attached.
    NotAttached(Failure),
    /// The disk may be attached.
    Unknown(Failure),
}

impl Disks {
    pub(super) fn new(
        core: Arc<Core>,
        engines: Arc<Engines>,
        hypervisors: Arc<Hypervisors>,
        power: Arc<PowerStates>,
        records: Arc<Records>,
        comparison: Arc<Comparison>,
    ) -> Self {
        Self { core, engines, hypervisors, power, records, comparison }
    }

    /// Attaches a disk, after the volume's on-disk record lists the node as holder.
    pub(super) async fn attach(
        &self,
        context: &mut AttachmentContext,
        is_new: bool,
    ) -> Result<(), AttachError> {
        if let Err(failure) = self.verify_file(context).await {
            // An existing attachment may have been attached before.
            return Err(if is_new {
                AttachError::NotAttached(failure)
            } else {
                AttachError::Unknown(failure)
            });
        }
        let source = self.engines.of(&context.pool).source(&context.volume.id);
        let hypervisor = self.hypervisors.get(&context.node.spec.hypervisor).map_err(AttachError::Unknown)?;
        if let Some(refused) = self.unreached(context) {
            let disk = context.disk(source);
            return self.keep_only_if_attached(context, &*hypervisor, &disk, refused, is_new).await;
        }
        self.record_holder(context, is_new).await?;
        self.refuse_other_users(context, &source, is_new).await?;
        if context.row.blank == Blank::Undecided {
            context.row.blank = self.attest(context).await.map_err(AttachError::Unknown)?;
        }
        let disk = context.disk(source);
        let error = match hypervisor.attach(context.row.node, &disk).await {
            Ok(found) => return self.refuse_altered(context, &found).await,
            Err(error) => error,
        };
        let not_attached = match &error {
            // An earlier attach may have succeeded before the VM was migrated or saved.
            HypervisorError::NotRunning(_) => {
                is_new || matches!(self.prove_detached(context, &disk).await, Ok(DetachOutcome::Detached))
            }
            HypervisorError::Refused(_) | HypervisorError::Full(_) | HypervisorError::Unsupported(_) => true,
            HypervisorError::NotActive(_)
            | HypervisorError::Migrated(_)
            | HypervisorError::Unreachable(_)
            | HypervisorError::Altered(_)
            | HypervisorError::Uncertain(_) => false,
        };
        let failure = describe(error, context);
        Err(if not_attached { AttachError::NotAttached(failure) } else { AttachError::Unknown(failure) })
    }

    /// Fails if a disk that is being attached is in the VM otherwise than it should be. What is attached stays, and the volume
    /// is abnormal.
    async fn refuse_altered(
        &self,
        context: &AttachmentContext,
        found: &AttachedDisk,
    ) -> Result<(), AttachError> {
        let altered = self.comparison.observed(context, found).await.map_err(AttachError::Unknown)?;
        match altered {
            Some(altered) if context.row.state != AttachmentState::Attached => {
                let problem = Problem::new(ProblemCode::InUse, altered.message);
                Err(AttachError::Unknown(problem.about(ObjectKind::Volume, &context.volume.id).into()))
            }
            _ => Ok(()),
        }
    }

    /// The refusal if the host of the node does not reach the pool.
    fn unreached(&self, context: &AttachmentContext) -> Option<Failure> {
        let volume = &context.volume.id;
        let why = reach::unreached(self.core.hosts(), volume, &context.pool, &context.node)?;
        Some(reach::problem(volume, why).into())
    }

    /// Attaches nothing on a host that does not reach the pool. A disk that the VM has stays.
    async fn keep_only_if_attached(
        &self,
        context: &AttachmentContext,
        hypervisor: &dyn Hypervisor,
        disk: &Disk,
        refused: Failure,
        is_new: bool,
    ) -> Result<(), AttachError> {
        if is_new {
            return Err(AttachError::NotAttached(refused));
        }
        let presence = hypervisor.presence(context.row.node, std::slice::from_ref(disk)).await;
        match presence.map_err(|error| AttachError::Unknown(describe(error, context)))? {
            Presence { disks, .. } if disks.contains_key(&disk.uuid) => Ok(()),
            _ => Err(AttachError::Unknown(refused)),
        }
    }

    /// Fails if the volume's file is missing, is not the one that it should be, or may not have what a VM wrote last.
    async fn verify_file(&self, context: &AttachmentContext) -> Result<()> {
        let id = context.volume.id.clone();
        let recorded = self.core.catalog().read(move |tx| -> Result<_> { Ok(tx.is_recorded(&id)?) }).await?;
        let (identity, bytes) = (context.volume.disk_uuid, context.volume.capacity);
        let expected = Expected { identity, bytes, recorded };
        let object = Object::Volume(context.volume.id.clone());
        let is_file = context.pool.spec.engine == EngineKind::File;
        let verify = move |engine: &dyn Engine| {
            engine.verify(&object, expected)?;
            // What Ceph has are images without layers of files.
            if is_file {
                engine.locate(&object)?;
            }
            Ok(())
        };
        self.engines.run::<_, Failure, _>(&context.pool, verify).await
    }

    /// Decides whether the disk is blank, by the record that was just written: once it is attached, the node may
    /// write to it. A copied volume is never blank.
    async fn attest(&self, context: &AttachmentContext) -> Result<Blank> {
        let (id, volume) = (context.row.id.clone(), context.volume.id.clone());
        let decide = move |tx: &Tx<'_>| -> Result<Blank> {
            let is_blank = tx.volume(&volume)?.is_some_and(|row| !row.written && row.spec.source.is_none());
            let blank = if is_blank { Blank::Attested(random::uuid()) } else { Blank::No };
            tx.set_attachment_blank(&id, blank)?;
            Ok(blank)
        };
        self.core.catalog().run(decide).await
    }

    /// Updates the volume's on-disk record with this node as holder, before the disk is attached.
    async fn record_holder(&self, context: &AttachmentContext, is_new: bool) -> Result<(), AttachError> {
        let recorded = if context.row.read_only {
            // Several readers are safe: they do not wait for a filesystem that blocks writes.
            let known = self.records.refuse_stale_catalog(&context.volume.id).await;
            known.inspect(|()| self.records.update_soon(&context.volume.id))
        } else {
            self.records.update(&context.volume.id).await
        };
        match recorded {
            Ok(()) => Ok(()),
            // An existing attachment may have been attached already, unknown to the catalog.
            Err(failure) if is_new && failure.code() == ProblemCode::InUse => {
                Err(AttachError::NotAttached(failure))
            }
            Err(failure) => Err(AttachError::Unknown(failure)),
        }
    }

    /// Detaches a disk, and proves that it is detached.
    pub(super) async fn detach(&self, context: &AttachmentContext) -> Result<DetachOutcome> {
        self.comparison.compare_if_altered(&context.row).await?;
        let disk = context.disk(self.engines.of(&context.pool).source(&context.volume.id));
        match self.request_detach(context, &disk).await? {
            DetachOutcome::Detached => self.prove_detached(context, &disk).await,
            still_attached if Check::ProofOfDetach.applies() => Ok(still_attached),
            _ => Ok(DetachOutcome::Detached),
        }
    }

    /// Cuts off the storage clients that have the volume of an attachment open. Does nothing if it has another attachment.
    /// The VM must be off.
    pub(super) async fn cut_off(&self, row: &AttachmentRow) -> Result<Vec<String>> {
        self.refuse_served_elsewhere(row).await?;
        let row = row.clone();
        let volume = row.volume.clone();
        let read = move |tx: &Tx<'_>| -> Result<_> {
            let is_only = tx.attachments(None, Some(&row.volume))?.len() == 1;
            Ok((AttachmentContext::of(tx, row)?.pool, is_only))
        };
        let (pool, is_only) = self.core.catalog().read(read).await?;
        if !is_only {
            return Ok(Vec::new());
        }
        self.engines.run::<_, Failure, _>(&pool, move |engine| Ok(engine.cut_off(&volume)?)).await
    }

    /// Requests the detach, unless another server serves the pool: that server's catalog is authoritative.
    async fn request_detach(&self, context: &AttachmentContext, disk: &Disk) -> Result<DetachOutcome> {
        self.refuse_served_elsewhere(&context.row).await?;
        let hypervisor = self.hypervisors.get(&context.node.spec.hypervisor)?;
        match hypervisor.detach(context.row.node, disk).await {
            Err(HypervisorError::Altered(found)) => {
                let altered = self.comparison.observed(context, &found).await?;
                let why = altered.map_or_else(|| "it is being changed".to_owned(), |altered| altered.message);
                Ok(DetachOutcome::StillAttached(format!("the disk stays attached: {why}")))
            }
            outcome => outcome.map_err(|error| describe(error, context)),
        }
    }

    /// Fails if another server serves the volume's pool: that server's catalog is authoritative.
    pub(super) async fn refuse_served_elsewhere(&self, row: &AttachmentRow) -> Result<()> {
        let volume = row.volume.clone();
        let pool = move |tx: &Tx<'_>| -> Result<_> {
            let row = tx.volume(&volume)?.ok_or_else(|| Failure::not_found(ObjectKind::Volume, &volume))?;
            pool_of(tx, &row)
        };
        let pool = self.core.catalog().read(pool).await?;
        let Some(why) = self.engines.of(&pool).other_server() else { return Ok(()) };
        let detail = format!("the disk of volume {} stays attached: {why}", row.volume);
        Err(Problem::new(ProblemCode::Unavailable, detail).about(ObjectKind::Pool, &pool.name).into())
    }

    /// Resizes an attached disk in its VM.
    pub(super) async fn resize(&self, row: &AttachmentRow, bytes: u64) -> Result<()> {
        let Some((hypervisor, context, disk)) = self.reach(row).await? else { return Ok(()) };
        disk_update_result(hypervisor.resize(context.row.node, &disk, bytes).await, &context)
    }

    /// Applies the I/O limits of an attached disk in its VM.
    pub(super) async fn throttle(&self, row: &AttachmentRow) -> Result<()> {
        let Some((hypervisor, context, disk)) = self.reach(row).await? else { return Ok(()) };
        disk_update_result(hypervisor.throttle(context.row.node, &disk).await, &context)
    }

    async fn reach(
        &self,
        row: &AttachmentRow,
    ) -> Result<Option<(Arc<dyn Hypervisor>, AttachmentContext, Disk)>> {
        let key = row.id.clone();
        let context = self
            .core
            .catalog()
            .read(move |tx| -> Result<_> {
                tx.attachment(&key)?.map(|row| AttachmentContext::of(tx, row)).transpose()
            })
            .await?;
        let Some(context) = context else { return Ok(None) };
        let disk = context.disk(self.engines.of(&context.pool).source(&context.volume.id));
        Ok(Some((self.hypervisors.get(&context.node.spec.hypervisor)?, context, disk)))
    }

    /// Attachments of a node in state attached whose disks its running VM does not have, and the node's name.
    pub(super) async fn missing(
        &self,
        node: Uuid,
        rows: Vec<AttachmentRow>,
    ) -> Result<(String, Vec<AttachmentRow>)> {
        let row = self.power.node_row(node).await?;
        let contexts = self
            .core
            .catalog()
            .read(move |tx| -> Result<Vec<AttachmentContext>> {
                rows.into_iter().map(|row| AttachmentContext::of(tx, row)).collect()
            })
            .await?;
        let disks: Vec<Disk> =
            contexts.iter().map(|one| one.disk(self.engines.of(&one.pool).source(&one.volume.id))).collect();
        let presence = self.hypervisors.get(&row.spec.hypervisor)?.presence(node, &disks).await?;
        if !matches!(presence.facts.power, Power::Running { .. }) {
            return Ok((row.spec.name, Vec::new()));
        }
        let gone = |context: &AttachmentContext| !presence.disks.contains_key(&context.volume.disk_uuid);
        Ok((row.spec.name, contexts.into_iter().filter(gone).map(|context| context.row).collect()))
    }
}

/// Result of an update of an attached disk. An absent disk is not an error: it gets the current values when it is
/// attached.
fn disk_update_result(result: Result<(), HypervisorError>, context: &AttachmentContext) -> Result<()> {
    match result {
        Ok(()) | Err(HypervisorError::NotRunning(_) | HypervisorError::Refused(_)) => Ok(()),
        Err(error) => Err(describe(error, context)),
    }
}
