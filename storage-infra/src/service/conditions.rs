//! Known errors of pools, volumes and disks, from which the conditions of volumes follow. Everything else is healthy.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use infra_api::{AttachmentId, Change, Condition, ConditionCause, EventKind, NodeRef, PoolName, VolumeId};
use uuid::Uuid;

use super::core::Core;
use crate::catalog::AttachmentRow;

/// Known errors; changes are published as events of the volumes.
pub(super) struct Conditions {
    core: Arc<Core>,
    known: Mutex<KnownErrors>,
}

#[derive(Default)]
struct KnownErrors {
    pools: HashMap<PoolName, String>,
    volumes: HashMap<VolumeId, DataError>,
    /// Disks that disappeared from a running VM.
    lost: HashMap<AttachmentId, (VolumeId, String)>,
    unexpected_disks: Vec<(VolumeId, UnexpectedDisk)>,
    /// By hypervisor: volumes that got no space, so that their VM is paused.
    paused: HashMap<String, HashMap<VolumeId, String>>,
    /// By hypervisor: volumes whose data is a disk in the persistent definition of a VM.
    defined: HashMap<String, HashMap<VolumeId, String>>,
}

/// Why a volume's data is not available.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DataError {
    /// The pool or the volume's file.
    pub(super) cause: ConditionCause,
    pub(super) message: String,
}

/// A disk of a volume in a VM without an attachment of that volume to that node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct UnexpectedDisk {
    pub(super) hypervisor: String,
    /// The VM, as named by its hypervisor.
    pub(super) node: NodeRef,
    /// State and action taken, for the volume's condition.
    pub(super) message: String,
}

/// Pools and volumes whose error differs from the last check.
pub(super) struct ChangedErrors {
    pub(super) pools: Vec<PoolName>,
    pub(super) volumes: Vec<VolumeId>,
}

/// Keys whose error differs between two maps.
fn changed<K: Hash + Eq + Clone, E: PartialEq>(before: &HashMap<K, E>, now: &HashMap<K, E>) -> Vec<K> {
    let differs = |key: &&K| before.get(*key) != now.get(*key);
    before
        .keys()
        .chain(now.keys().filter(|key| !before.contains_key(*key)))
        .filter(differs)
        .cloned()
        .collect()
}

impl Conditions {
    pub(super) fn new(core: Arc<Core>) -> Self {
        Self { core, known: Mutex::default() }
    }

    fn known(&self) -> MutexGuard<'_, KnownErrors> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pools that are known to be unhealthy.
    pub(super) fn unhealthy_pools(&self) -> HashSet<PoolName> {
        self.known().pools.keys().cloned().collect()
    }

    /// The known error of a pool.
    pub(super) fn pool_error(&self, pool: &PoolName) -> Option<String> {
        self.known().pools.get(pool).cloned()
    }

    /// These volumes as far as their file or pool has a known error, with the error.
    pub(super) fn volume_errors(&self, volumes: Vec<VolumeId>) -> Vec<(VolumeId, DataError)> {
        let known = self.known();
        volumes.into_iter().filter_map(|id| known.volumes.get(&id).cloned().map(|why| (id, why))).collect()
    }

    /// A volume's condition: whether its data is available.
    pub(super) fn of(&self, id: &VolumeId) -> Condition {
        let errors = self.known();
        let data = errors.volumes.get(id).map(|error| (error.cause, &error.message));
        let paused = || Some((ConditionCause::Paused, errors.paused.values().find_map(|all| all.get(id))?));
        let lost = || {
            let (_, message) = errors.lost.values().find(|(volume, _)| volume == id)?;
            Some((ConditionCause::DiskLost, message))
        };
        let unexpected = || {
            let (_, one) = errors.unexpected_disks.iter().find(|(of, _)| of == id)?;
            Some((ConditionCause::UnexpectedDisk, &one.message))
        };
        let defined =
            || Some((ConditionCause::Altered, errors.defined.values().find_map(|all| all.get(id))?));
        let found = data.or_else(paused).or_else(lost).or_else(unexpected).or_else(defined);
        let (cause, message) = found.map(|(cause, message)| (cause, message.clone())).unzip();
        Condition { healthy: message.is_none(), cause, message }
    }

    /// Records that a disk disappeared from a running VM. False if that is known.
    pub(super) fn set_disk_lost(&self, row: &AttachmentRow, node: &NodeRef) -> bool {
        let message = format!("the disk of volume {} disappeared from the running VM {node}", row.volume);
        let error = (row.volume.clone(), message);
        let before = self.known().lost.insert(row.id.clone(), error.clone());
        let is_new = before.as_ref() != Some(&error);
        if is_new {
            self.core.emit(EventKind::Volume, &row.volume, Change::Updated);
        }
        is_new
    }

    /// Clears the record of a disappeared disk.
    pub(super) fn clear_disk_lost(&self, id: &AttachmentId) {
        let before = self.known().lost.remove(id);
        if let Some((volume, _)) = before {
            self.core.emit(EventKind::Volume, volume, Change::Updated);
        }
    }

    /// Sets the volumes that got no space in VMs of this hypervisor.
    pub(super) fn set_paused_volumes(&self, hypervisor: &str, volumes: HashMap<VolumeId, String>) {
        let before = self.known().paused.insert(hypervisor.to_owned(), volumes.clone()).unwrap_or_default();
        for volume in changed(&before, &volumes) {
            log_volume(&volume, volumes.get(&volume).map(String::as_str));
            self.core.emit(EventKind::Volume, volume, Change::Updated);
        }
    }

    /// Sets the volumes whose data is a disk in the persistent definition of a VM of this hypervisor.
    pub(super) fn set_defined(&self, hypervisor: &str, volumes: HashMap<VolumeId, String>) {
        let before = self.known().defined.insert(hypervisor.to_owned(), volumes.clone()).unwrap_or_default();
        for volume in changed(&before, &volumes) {
            log_volume(&volume, volumes.get(&volume).map(String::as_str));
            self.core.emit(EventKind::Volume, volume, Change::Updated);
        }
    }

    /// Replaces the errors of pools and of volumes' data. The caller publishes the changes.
    pub(super) fn replace(
        &self,
        pools: HashMap<PoolName, String>,
        volumes: HashMap<VolumeId, DataError>,
    ) -> ChangedErrors {
        let mut errors = self.known();
        let changed_pools = changed(&errors.pools, &pools);
        let changed_volumes = changed(&errors.volumes, &volumes);
        for pool in &changed_pools {
            match pools.get(pool) {
                Some(why) => tracing::error!(%pool, %why, "the pool is not healthy"),
                None => tracing::info!(%pool, "the pool is healthy again"),
            }
        }
        // The pool's message covers all its volumes.
        for volume in changed_volumes.iter().filter(|_| changed_pools.is_empty()) {
            log_volume(volume, volumes.get(volume).map(|error| error.message.as_str()));
        }
        errors.pools = pools;
        errors.volumes = volumes;
        ChangedErrors { pools: changed_pools, volumes: changed_volumes }
    }

    /// Replaces the known unexpected disks of a hypervisor.
    pub(super) fn set_unexpected_disks(&self, hypervisor: &str, found: Vec<(VolumeId, UnexpectedDisk)>) {
        let mut errors = self.known();
        let of_it = |one: &(VolumeId, UnexpectedDisk)| one.1.hypervisor == hypervisor;
        let before: Vec<_> = errors.unexpected_disks.iter().filter(|one| of_it(one)).cloned().collect();
        errors.unexpected_disks.retain(|one| !of_it(one));
        errors.unexpected_disks.extend(found.iter().cloned());
        self.core.metrics().set_unexpected_disks(hypervisor, found.len());
        drop(errors);
        for (volume, one) in found.iter().filter(|one| !before.contains(one)) {
            tracing::error!(%volume, "{}", one.message);
            self.core.emit(EventKind::Volume, volume, Change::Updated);
        }
        for (volume, one) in before.iter().filter(|one| !found.contains(one)) {
            tracing::info!(%volume, node = %one.node, hypervisor, "the unexpected disk is gone");
            self.core.emit(EventKind::Volume, volume, Change::Updated);
        }
    }

    /// A known unexpected disk of a volume in another VM than this one.
    pub(super) fn unexpected_disk(&self, volume: &VolumeId, to: Option<Uuid>) -> Option<UnexpectedDisk> {
        let elsewhere = |one: &&(VolumeId, UnexpectedDisk)| one.0 == *volume && Some(one.1.node.uuid) != to;
        self.known().unexpected_disks.iter().find(elsewhere).map(|(_, one)| one.clone())
    }
}

fn log_volume(volume: &VolumeId, error: Option<&str>) {
    match error {
        Some(why) => tracing::error!(%volume, %why, "the volume is abnormal"),
        None => tracing::info!(%volume, "the volume is normal again"),
    }
}
