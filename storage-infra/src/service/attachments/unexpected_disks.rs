//! Unexpected disks: disks of our volumes in VMs without an attachment. They appear when a VM resumes from a saved
//! state that was declared discarded, or when a late request reaches a hypervisor. They are searched periodically,
//! reported, and detached if they are proven to be ours and unused. Until then the volume cannot be attached
//! elsewhere.

use std::sync::Arc;
use std::time::Duration;

use infra_api::{NodeRef, ObjectKind, Problem, ProblemCode, VolumeId, VolumeState};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::catalog::{NodeRow, PoolRow, Tx, VolumeRow};
use crate::engine::{Object, Record};
use crate::hypervisor::{
    AttachedDisk, Described, DetachOutcome, Disk, DiskLocation, DiskSource, Hypervisor, HypervisorError, wwn,
};
use crate::service::conditions::{Conditions, UnexpectedDisk};
use crate::service::core::Core;
use crate::service::disks::Comparison;
use crate::service::hypervisors::Hypervisors;
use crate::service::lookups::{pool_of, volume_at};
use crate::service::pools::{Engines, RevisionCheck};
use crate::service::power::has_no_disks;
use crate::service::problems::Result;
use crate::service::records::PendingRecord;

/// Interval between comparisons of attached disks with attachments.
const INTERVAL: Duration = Duration::from_secs(15);
/// Least interval, also when events come all the time.
const MIN_INTERVAL: Duration = Duration::from_millis(500);
/// Interval while there are unexpected disks.
const RETRY_INTERVAL: Duration = Duration::from_secs(3);

/// An attached disk that may be unexpected, with the matching catalog rows.
struct Found {
    plugged: AttachedDisk,
    volume: VolumeRow,
    pool: PoolRow,
    node: Option<NodeRow>,
}

impl Found {
    /// None if it is not a volume's file, or has an attachment.
    fn of(tx: &Tx<'_>, pools: &[PoolRow], plugged: &AttachedDisk) -> Result<Option<Self>> {
        let job = plugged.job.iter().map(|job| &job.to);
        let data: Vec<&DiskLocation> = plugged.layers.iter().chain(job).collect();
        let volume_of = |pool: &PoolRow| data.iter().find_map(|data| volume_at(pool, data));
        let Some(id) = pools.iter().find_map(volume_of) else { return Ok(None) };
        let Some(volume) = tx.volume(&id)? else { return Ok(None) };
        let pool = pool_of(tx, &volume)?;
        let other = volume_of(&pool).as_ref() != Some(&id);
        if other || !tx.attachments(Some(plugged.node), Some(&id))?.is_empty() {
            return Ok(None);
        }
        Ok(Some(Self { plugged: plugged.clone(), volume, pool, node: tx.node(plugged.node)? }))
    }

    fn disk(&self, source: DiskSource) -> Disk {
        let read_only = self.plugged.read_only;
        let (uuid, qos, on_full) = (self.volume.disk_uuid, self.volume.qos, self.pool.spec.on_full);
        let options = self.volume.spec.disk;
        Disk { uuid, source, read_only, shared: false, qos, on_full, options }
    }

    /// Why the disk is not proven to be ours and unused; None if it is. `is_recorded_holder`: the volume's on-disk
    /// record lists the VM as holder.
    fn reason_not_ours(
        &self,
        hypervisor: &str,
        record: Option<&Record>,
        is_recorded_holder: bool,
    ) -> Option<String> {
        let is_node = self.node.as_ref().is_some_and(|node| node.spec.hypervisor == hypervisor);
        let is_disk = self.plugged.wwn == Some(wwn(self.volume.disk_uuid));
        let is_volume = record.is_some_and(|record| record.identity() == self.volume.disk_uuid);
        let why = match (is_node, is_disk, is_volume, is_recorded_holder) {
            (false, ..) => "the VM is not registered as a node of that hypervisor",
            (_, false, ..) => {
                "its serial is not that of the volume's disk, so it was attached by someone else"
            }
            (_, _, false, _) => "the file's record does not say that it belongs to this volume",
            (.., true) => {
                "the file's record lists the VM as a holder: the catalog may be older than the pool; in that case rebuild it with \
                 `storage-infra recover`"
            }
            (true, true, true, false) => return None,
        };
        Some(why.to_owned())
    }

    fn node_ref(&self) -> NodeRef {
        let name = self.node.as_ref().map_or(&self.plugged.name, |node| &node.spec.name);
        NodeRef { uuid: self.plugged.node, name: name.clone() }
    }
}

/// Searches for unexpected disks.
pub struct UnexpectedDisks {
    core: Arc<Core>,
    engines: Arc<Engines>,
    revisions: Arc<RevisionCheck>,
    hypervisors: Arc<Hypervisors>,
    conditions: Arc<Conditions>,
    comparison: Arc<Comparison>,
}

impl UnexpectedDisks {
    pub(in crate::service) fn new(
        core: Arc<Core>,
        engines: Arc<Engines>,
        revisions: Arc<RevisionCheck>,
        hypervisors: Arc<Hypervisors>,
        conditions: Arc<Conditions>,
        comparison: Arc<Comparison>,
    ) -> Self {
        Self { core, engines, revisions, hypervisors, conditions, comparison }
    }

    /// Searches for unexpected disks until stopped, with one loop per hypervisor, because one may stall.
    pub async fn run_search(self: Arc<Self>, stop: CancellationToken) {
        self.hypervisors.for_each(&stop, |name| self.search(name, &stop)).await;
    }

    async fn search(&self, hypervisor: &str, stop: &CancellationToken) {
        loop {
            let search = self.find(hypervisor);
            let result = tokio::select! { () = stop.cancelled() => return, result = search => result };
            let pause = match result {
                Ok(0) => INTERVAL,
                Ok(_) => RETRY_INTERVAL,
                Err(failure) => {
                    tracing::debug!(hypervisor, %failure, "cannot compare attached disks with attachments");
                    INTERVAL
                }
            };
            let triggered = async {
                // Many events come together.
                tokio::time::sleep(MIN_INTERVAL).await;
                self.hypervisors.search_is_triggered(hypervisor).await;
            };
            tokio::select! {
                () = stop.cancelled() => return,
                () = triggered => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Compares once, and returns the number of unexpected disks.
    async fn find(&self, hypervisor: &str) -> Result<usize> {
        let own = self.hypervisors.get(hypervisor)?;
        let plugged = Arc::new(own.attached_disks().await?);
        if let Err(failure) = self.comparison.compare_all(hypervisor, &plugged).await {
            tracing::debug!(hypervisor, %failure, "cannot compare the disks of VMs with their attachments");
        }
        let read = move |tx: &Tx<'_>| -> Result<Vec<Found>> {
            let pools = tx.pools()?;
            let found = plugged.iter().filter_map(|one| Found::of(tx, &pools, one).transpose());
            found.collect()
        };
        let mut all = Vec::new();
        for found in self.core.catalog().read(read).await? {
            if let Some(unexpected) = self.confirm(hypervisor, &*own, found).await? {
                all.push(unexpected);
            }
        }
        let count = all.len();
        self.conditions.set_unexpected_disks(hypervisor, all);
        Ok(count)
    }

    /// Checks a finding again under the volume's lock, which excludes attach and detach, and detaches the disk if it
    /// is proven to be ours.
    async fn confirm(
        &self,
        hypervisor: &str,
        own: &dyn Hypervisor,
        found: Found,
    ) -> Result<Option<(VolumeId, UnexpectedDisk)>> {
        let _lock = self.core.lock_volume(&found.volume.id).await;
        let plugged = found.plugged;
        let again = move |tx: &Tx<'_>| Found::of(tx, &tx.pools()?, &plugged);
        let Some(found) = self.core.catalog().read(again).await? else { return Ok(None) };
        let disk = found.disk(self.engines.of(&found.pool).source(&found.volume.id));
        let is_ours = found.plugged.wwn.as_ref() == Some(&disk.wwn());
        let presence = own.presence(found.plugged.node, std::slice::from_ref(&disk)).await?;
        let has_left = is_ours && !presence.disks.contains_key(&disk.uuid);
        if has_left || has_no_disks(presence.facts.power.state()) {
            return Ok(None);
        }
        let record = self.record_of(&found).await?;
        let is_recorded_holder = self.is_recorded_holder(record.as_ref(), &found).await?;
        let node = found.node_ref();
        let what = format!(
            "the VM {node} on hypervisor {hypervisor} has the disk of volume {} without an attachment",
            found.volume.id
        );
        let unexpected = |done: String| {
            let message = format!("{what}: {done}");
            Some((
                found.volume.id.clone(),
                UnexpectedDisk { hypervisor: hypervisor.to_owned(), node: node.clone(), message },
            ))
        };
        if let Some(why) = found.reason_not_ours(hypervisor, record.as_ref(), is_recorded_holder) {
            return Ok(unexpected(format!("it was not detached, because {why}; detach it manually")));
        }
        tracing::warn!(volume = %found.volume.id, %node, hypervisor, "{what}: detaching it");
        Ok(match own.detach(found.plugged.node, &disk).await {
            Err(HypervisorError::Altered(plugged)) => {
                let differences = plugged.differences(&disk, None);
                let why = Described { disk: &plugged, differences: &differences };
                unexpected(format!("it was not detached, because {why}"))
            }
            Err(error) => return Err(error.into()),
            Ok(DetachOutcome::Detached) => {
                self.core.metrics().unexpected_disk_detached();
                unexpected("it was detached".into())
            }
            Ok(DetachOutcome::StillAttached(why)) => {
                unexpected(format!("the detach was requested and has not completed: {why}"))
            }
        })
    }

    async fn record_of(&self, found: &Found) -> Result<Option<Record>> {
        if found.volume.state != VolumeState::Ready {
            return Ok(None);
        }
        let object = Object::Volume(found.volume.id.clone());
        self.engines.run(&found.pool, move |engine| Ok(engine.read_record(&object)?)).await
    }

    /// Whether a volume's record lists the node as a holder whose attachment did not end, or the record may be newer
    /// than the catalog.
    async fn is_recorded_holder(&self, record: Option<&Record>, found: &Found) -> Result<bool> {
        let Some(Record::Volume(record)) = record else { return Ok(false) };
        self.revisions.compare(&found.pool).await?;
        let here = record.holders.iter().filter(|one| one.uuid == found.plugged.node);
        let ids: Vec<_> = here.map(|one| one.id.clone()).collect();
        let (volume, revision) = (found.volume.id.clone(), record.revision);
        let check = move |tx: &Tx<'_>| -> Result<bool> {
            for id in &ids {
                if !tx.is_attachment_ended_or_refused(id)? {
                    return Ok(true);
                }
            }
            // A reader may be missing from the record.
            let is_stale = PendingRecord::of_any(tx, &volume)?.is_some_and(|due| due.is_newer(revision));
            Ok(ids.is_empty() && is_stale)
        };
        self.core.catalog().read(check).await
    }

    /// Refuses a volume that has an unexpected disk in another VM, and, unless it is to be attached, compares the disks that it
    /// should have: [`crate::catalog::Hold::Altered`] then refuses it. The caller must not hold a volume's lock.
    pub(in crate::service) async fn refuse(&self, volume: &VolumeId, to: Option<Uuid>) -> Result<()> {
        if to.is_none() {
            self.comparison.check(volume).await?;
        }
        if let Some(one) = self.conditions.unexpected_disk(volume, to)
            && let Err(failure) = self.find(&one.hypervisor).await
        {
            tracing::debug!(hypervisor = one.hypervisor, %failure, "cannot check the hypervisor's disks; using the last known state");
        }
        let Some(one) = self.conditions.unexpected_disk(volume, to) else { return Ok(()) };
        let problem = Problem::new(ProblemCode::InUse, one.message).about(ObjectKind::Volume, volume);
        Err(problem.used_by(vec![one.node]).into())
    }
}

#[cfg(test)]
mod tests {
    use infra_api::{EngineKind, Labels, NodeSpec, PoolName, PoolSpec, Qos, VolumeSpec};

    use super::*;
    use crate::service::records::volume_record;

    fn found() -> Found {
        let spec = VolumeSpec::of_size(1);
        let disk_uuid = Uuid::from_u128(7);
        let volume = VolumeRow {
            id: VolumeId::new("v").unwrap(),
            pool: PoolName::new("p").unwrap(),
            capacity: 1,
            grow_to: None,
            disk_uuid,
            state: VolumeState::Ready,
            spec,
            created_at: String::new(),
            family: disk_uuid,
            copying: false,
            qos: Qos::default(),
            qos_due: false,
            format_token: infra_api::FormatToken::random(),
            written: false,
            owner: Default::default(),
            origin: crate::catalog::Origin::Created,
        };
        let (engine, path) = (EngineKind::File, "/pool".to_owned());
        let on_full = infra_api::OnFull::default();
        let spec = PoolSpec {
            engine,
            path,
            labels: Labels::new(),
            cordoned: false,
            on_full,
            hosts: infra_api::PoolHosts::default(),
        };
        let pool = PoolRow {
            name: PoolName::new("p").unwrap(),
            uuid: Uuid::from_u128(1),
            spec,
            marked: true,
            suspension: None,
        };
        let node = Uuid::from_u128(9);
        let spec =
            NodeSpec { name: "vm".into(), hypervisor: "here".into(), zone: None, labels: Labels::new() };
        let data = DiskLocation::File("/pool/v.raw".into());
        let plugged = AttachedDisk { wwn: Some(wwn(disk_uuid)), ..AttachedDisk::of(node, data) };
        Found { plugged, volume, pool, node: Some(NodeRow { uuid: node, spec }) }
    }

    #[test]
    fn only_a_disk_that_is_proven_ours_and_unused_is_detached() {
        let ours = volume_record(&found().volume, 0, Vec::new());
        assert_eq!(found().reason_not_ours("here", Some(&ours), false), None);
        let why = |found: Found, record: Option<&Record>, is_recorded_holder| {
            found.reason_not_ours("here", record, is_recorded_holder).unwrap()
        };
        assert!(why(Found { node: None, ..found() }, Some(&ours), false).contains("not registered"));
        assert!(found().reason_not_ours("there", Some(&ours), false).unwrap().contains("not registered"));
        let plugged = AttachedDisk { wwn: None, ..found().plugged };
        assert!(why(Found { plugged, ..found() }, Some(&ours), false).contains("serial"));
        assert!(why(found(), None, false).contains("does not say"));
        let other = VolumeRow { disk_uuid: Uuid::from_u128(8), ..found().volume };
        assert!(why(found(), Some(&volume_record(&other, 0, Vec::new())), false).contains("does not say"));
        assert!(why(found(), Some(&ours), true).contains("older than the pool"));
    }

    #[test]
    fn a_file_belongs_to_a_volume_by_directory_and_name() {
        let pool = found().pool;
        let volume = |path: &str| volume_at(&pool, &DiskLocation::File(path.into())).map(|id| id.to_string());
        assert_eq!(volume("/pool/v.raw").as_deref(), Some("v"));
        for other in ["/pool/v.snap", "/pools/v.raw", "/pool/deeper/v.raw", "/pool/.raw", "v.raw"] {
            assert_eq!(volume(other), None, "{other}");
        }
    }
}
