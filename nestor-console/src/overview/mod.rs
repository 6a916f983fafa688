//! The content of the page: rows of guests, VMs' disks and volumes, made from the watched objects. Pure: no I/O.

mod disks;
mod filter;
mod guests;
mod volumes;
mod warnings;

use std::collections::HashMap;
use std::sync::Arc;

use crds::names::LABEL_CLUSTER_ID;
use crds::{VirtualMachine, VolumeAttachment};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube_kit::informer::Key;
use kube_kit::partial::{PersistentVolume, PersistentVolumeClaim};

pub use disks::{DiskRow, waiting_entries};
pub use filter::{Filter, Page, Row};
pub use guests::GuestRow;
pub use volumes::VolumeRow;
pub use warnings::Warnings;

use crate::decide::State;
use crate::first_seen::FirstSeen;

/// What the page is made from.
#[derive(Debug, Default)]
pub struct Inputs {
    /// VirtualMachines.
    pub vms: Vec<Arc<VirtualMachine>>,
    /// VolumeAttachments.
    pub attachments: Vec<Arc<VolumeAttachment>>,
    /// Claims.
    pub claims: Vec<Arc<PersistentVolumeClaim>>,
    /// PersistentVolumes.
    pub volumes: Vec<Arc<PersistentVolume>>,
    /// Warnings about these objects.
    pub warnings: Warnings,
    /// When entries were first seen to wait.
    pub first_seen: Arc<FirstSeen>,
}

/// When a page is made, and from when on a wait is late.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    /// Now.
    pub now: Timestamp,
    /// Longest wait that is not late.
    pub late_after: SignedDuration,
}

/// All rows, the ones that need attention first.
#[derive(Debug, Default)]
pub struct Overview {
    /// Guests.
    pub guests: Vec<GuestRow>,
    /// Disks of all VMs; those of one VM are next to each other.
    pub disks: Vec<DiskRow>,
    /// Volumes.
    pub volumes: Vec<VolumeRow>,
    /// Number of VMs.
    pub vms: usize,
}

impl Overview {
    /// Makes all rows.
    pub fn of(inputs: &Inputs, clock: Clock) -> Self {
        let known = Known::of(inputs);
        let disks = disks::rows(inputs, &known, clock);
        let volumes = volumes::rows(inputs, &known, clock);
        let guests = guests::rows(inputs, &known, &disks, &volumes);
        Self { guests, disks, volumes, vms: inputs.vms.len() }
    }

    /// Number of disks and volumes in a state.
    pub fn count(&self, state: State) -> usize {
        let disks = self.disks.iter().filter(|row| row.verdict.state == state).count();
        disks + self.volumes.iter().filter(|row| row.verdict.state == state).count()
    }

    /// Number of disks that are attached.
    pub fn attached(&self) -> usize {
        self.disks.iter().filter(|row| row.is_attached).count()
    }
}

/// Objects by their names.
struct Known<'a> {
    /// VMs by their namespace and their UUID in the storage infra.
    vms: HashMap<Key, &'a VirtualMachine>,
    claims: HashMap<Key, &'a PersistentVolumeClaim>,
    volumes: HashMap<&'a str, &'a PersistentVolume>,
}

impl<'a> Known<'a> {
    fn of(inputs: &'a Inputs) -> Self {
        let by_uuid = |vm: &'a Arc<VirtualMachine>| {
            let uuid = crds::node_uuid(vm.status.as_ref()?)?;
            Some((Key::new(vm.metadata.namespace.clone()?, uuid), &**vm))
        };
        Self {
            vms: inputs.vms.iter().filter_map(by_uuid).collect(),
            claims: inputs.claims.iter().map(|claim| (Key::of(&**claim), &**claim)).collect(),
            volumes: inputs.volumes.iter().map(|volume| (name(&volume.metadata), &**volume)).collect(),
        }
    }

    /// The VM of a VolumeAttachment.
    fn vm_of(&self, attachment: &VolumeAttachment) -> Option<&'a VirtualMachine> {
        let uuid = attachment.spec.node_uuid.to_ascii_lowercase();
        self.vms.get(&Key::new(namespace(&attachment.metadata), uuid)).copied()
    }
}

fn name(meta: &ObjectMeta) -> &str {
    meta.name.as_deref().unwrap_or_default()
}

fn namespace(meta: &ObjectMeta) -> &str {
    meta.namespace.as_deref().unwrap_or_default()
}

/// The guest that an object belongs to.
fn guest(meta: &ObjectMeta) -> Option<&String> {
    meta.labels.as_ref()?.get(LABEL_CLUSTER_ID)
}

#[cfg(test)]
mod tests;
