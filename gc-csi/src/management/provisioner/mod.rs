//! Provisioner: creates and deletes the management claims of guest volumes.

mod create;
mod delete;

use std::collections::BTreeMap;

use crds::names::{ClaimName, CsiName};
use csi::request::Size;
use k8s_openapi::api::core::v1::TypedLocalObjectReference;

use super::claims::Claims;
use super::classes::Classes;
use super::cluster_owner::ClusterOwner;
use super::consumers::Consumers;
use super::identity::GuestIdentity;
use super::recent_outcomes::RecentOutcomes;
use super::snapshots::{self, Snapshots};
use super::virtual_machines::VirtualMachines;
use crate::compatibility::PvRequirements;

pub(crate) use create::CreateError;
#[cfg(any(test, fuzzing))]
pub(super) use create::accessible_zones;
pub(crate) use delete::{Abandoned, DeleteError};

/// Creates and deletes claims.
#[derive(Clone, Debug)]
pub(crate) struct Provisioner {
    identity: GuestIdentity,
    claims: Claims,
    classes: Classes,
    consumers: Consumers,
    vms: VirtualMachines,
    snapshots: Option<Snapshots>,
    owner: ClusterOwner,
    /// Claims whose deletion was observed recently.
    deleted: RecentOutcomes,
}

impl Provisioner {
    pub(super) fn new(
        identity: GuestIdentity,
        (claims, classes, consumers): (Claims, Classes, Consumers),
        vms: VirtualMachines,
        snapshots: Option<Snapshots>,
        owner: ClusterOwner,
    ) -> Self {
        Self {
            identity,
            claims,
            classes,
            consumers,
            vms,
            snapshots,
            owner,
            deleted: RecentOutcomes::default(),
        }
    }
}

/// A management claim to create.
#[derive(Debug, Clone)]
pub(crate) struct NewClaim {
    /// CSI name of the volume.
    pub csi_name: CsiName,
    /// Required and maximum size.
    pub size: Size,
    /// Management StorageClass.
    pub class: String,
    /// Whether it is a raw block volume.
    pub block: bool,
    /// Access modes, as Kubernetes names them.
    pub access_modes: Vec<&'static str>,
    /// Source of the data; None for an empty volume.
    pub source: Option<Source>,
    /// Requirements of the guest PersistentVolumes of the source, if that is a volume.
    pub source_volumes: Vec<PvRequirements>,
    /// Management VolumeAttributesClass.
    pub attributes_class: Option<String>,
    /// Zones from which the volume must be reachable, in the order of preference; empty for any.
    pub zones: Vec<String>,
    /// Annotations that name the guest objects.
    pub annotations: BTreeMap<String, String>,
}

/// Source of a volume's data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Source {
    /// A management VolumeSnapshot.
    Snapshot(String),
    /// Another management claim.
    Volume(ClaimName),
}

impl Source {
    fn reference(&self) -> TypedLocalObjectReference {
        match self {
            Self::Snapshot(name) => snapshots::reference(name),
            Self::Volume(name) => TypedLocalObjectReference {
                api_group: None,
                kind: "PersistentVolumeClaim".to_owned(),
                name: name.to_string(),
            },
        }
    }
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Snapshot(name) => write!(f, "management VolumeSnapshot {name}"),
            Self::Volume(name) => write!(f, "management PersistentVolumeClaim {name}"),
        }
    }
}

/// A bound claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BoundClaim {
    /// Name of the claim, which is the volume handle.
    pub name: ClaimName,
    /// Name of its PersistentVolume.
    pub volume: String,
    /// Capacity in bytes.
    pub capacity: u64,
    /// Zones from which it is reachable; empty for all.
    pub zones: Vec<String>,
}
