//! Snapshot of one volume: the objects of both clusters that belong to it, as they were read.

use std::collections::BTreeMap;

use crds::{VirtualMachine, VolumeAttachment};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSINode, StorageClass, VolumeAttachment as GuestAttachment};

use crate::clusters::Tier;

/// Result of one read.
#[derive(Debug, Clone)]
pub enum Lookup<T> {
    /// It exists.
    Found(Box<T>),
    /// It does not exist.
    Missing,
    /// It could not be read, for this reason.
    Refused(String),
    /// Its cluster is not connected.
    Unseen,
}

/// An object that the volume refers to, and what was read of it.
#[derive(Debug, Clone)]
pub struct Object<T> {
    /// Its namespace; None for cluster-scoped objects.
    pub namespace: Option<String>,
    /// Its name.
    pub name: String,
    /// What was read.
    pub lookup: Lookup<T>,
}

impl<T> Object<T> {
    /// The object, if it exists and could be read.
    pub fn found(&self) -> Option<&T> {
        match &self.lookup {
            Lookup::Found(object) => Some(object),
            _ => None,
        }
    }

    /// Whether it certainly does not exist.
    pub fn is_missing(&self) -> bool {
        matches!(self.lookup, Lookup::Missing)
    }
}

/// The object inside an optional reference.
pub fn found<T>(object: &Option<Object<T>>) -> Option<&T> {
    object.as_ref().and_then(Object::found)
}

/// An event about an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// Reason in CamelCase.
    pub reason: String,
    /// Message.
    pub message: String,
    /// Whether it is a warning.
    pub is_warning: bool,
    /// When it was last seen.
    pub last: Option<Timestamp>,
}

/// An object that events are about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct About {
    /// Its cluster.
    pub tier: Tier,
    /// Its kind.
    pub kind: &'static str,
    /// Its namespace.
    pub namespace: Option<String>,
    /// Its name.
    pub name: String,
}

/// A node that has, had or needs the volume.
#[derive(Debug, Clone, Default)]
pub struct Placement {
    /// Name of the Node in the guest.
    pub node_name: String,
    /// Name of the VirtualMachine: the node ID.
    pub vm_name: String,
    /// A pod on this node uses the claim.
    pub is_used: bool,
    /// Node of the guest.
    pub node: Option<Object<Node>>,
    /// CSINode of the guest.
    pub csi_node: Option<Object<CSINode>>,
    /// The guest's storage.k8s.io/VolumeAttachment.
    pub guest_attachment: Option<Object<GuestAttachment>>,
    /// VirtualMachine.
    pub vm: Option<Object<VirtualMachine>>,
    /// VolumeAttachment of nestor.dev.
    pub attachment: Option<Object<VolumeAttachment>>,
}

/// Everything that was read about one volume.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// When it was read.
    pub now: Timestamp,
    /// Whether the guest cluster is connected.
    pub sees_guest: bool,
    /// Whether the management cluster is connected.
    pub sees_management: bool,
    /// The pod that the trace started from.
    pub pod: Option<Object<Pod>>,
    /// The pod of the trace uses no claim.
    pub pod_without_claim: bool,
    /// Claims of the pod that are not traced: a trace follows its first one.
    pub other_claims: Vec<String>,
    /// Claim in the guest.
    pub guest_claim: Option<Object<PersistentVolumeClaim>>,
    /// StorageClass of that claim, while it is not bound.
    pub guest_class: Option<Object<StorageClass>>,
    /// PersistentVolume in the guest.
    pub guest_volume: Option<Object<PersistentVolume>>,
    /// Claim in the management cluster.
    pub management_claim: Option<Object<PersistentVolumeClaim>>,
    /// Whether its name was computed from the cluster ID, because there is no PersistentVolume yet.
    pub computed_name: bool,
    /// StorageClass in the management cluster, while the claim is not bound.
    pub management_class: Option<Object<StorageClass>>,
    /// PersistentVolume in the management cluster.
    pub management_volume: Option<Object<PersistentVolume>>,
    /// Nodes, those of the pods first.
    pub placements: Vec<Placement>,
    /// Names of the pods that use the claim.
    pub users: Vec<String>,
    /// Why the VirtualMachines could not be read.
    pub vms_unknown: Option<String>,
    /// Events of objects that are not healthy.
    pub events: BTreeMap<About, Vec<Event>>,
}

impl Snapshot {
    /// The newest warning about an object.
    pub fn warning(&self, about: &About) -> Option<&Event> {
        let events = self.events.get(about)?;
        events.iter().filter(|event| event.is_warning).max_by_key(|event| event.last)
    }
}
