//! Management cluster client: the only module that talks to the management cluster. Reads come from shared informers.
//!
//! Each store has its own fields, and uses other stores only through their methods. In the order of their dependencies:
//!
//! - [`Classes`], [`Claims`], [`VirtualMachines`], [`Capacities`]: informers and single requests.
//! - [`ClusterOwner`]: the guest's Cluster object, the owner of what the guest creates.
//! - [`Consumers`]: records of this guest on claims that are shared with it.
//! - [`Snapshots`]: creates and deletes snapshots of claims.
//! - [`Provisioner`]: creates and deletes claims.
//! - [`VolumeEntries`]: attaches and detaches disks.
//! - [`OwnerRefs`]: ownerReferences of claims and snapshots.

pub(crate) mod capacity;
pub(crate) mod claims;
mod classes;
mod cluster_owner;
pub(crate) mod consumers;
mod error;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod holders;
mod identity;
pub(crate) mod inventory;
mod kubevirt;
mod objects;
mod owner_refs;
pub(crate) mod provisioner;
mod recent_outcomes;
mod served_apis;
pub(crate) mod snapshots;
mod traces;
mod virtual_machines;
pub(crate) mod volume_entries;
mod warnings;

use kube::Client;
use kube_kit::health::Health;
use kube_kit::partial::PersistentVolumeClaim;
use tokio_util::sync::CancellationToken;

use capacity::Capacities;
use claims::Claims;
use classes::Classes;
use consumers::Consumers;
use objects::ChangeHandler;
use provisioner::Provisioner;
use snapshots::{Snapshots, VolumeSnapshot};
use volume_entries::VolumeEntries;

use crate::vm_operator::VmOperator;
use crate::vm_volumes::Vm;

pub(crate) use cluster_owner::{ClusterOwner, GuestDeletion};
pub(crate) use error::ApiError;
pub(crate) use holders::TakeError;
pub(crate) use identity::{GuestIdentity, Relation};
pub(crate) use objects::{is_object_name, retain_keys};
pub(crate) use owner_refs::{DeletionOutcome, OwnedObject, OwnerRefs};
pub(crate) use served_apis::{OptionalApis, ServedApis};
pub(crate) use virtual_machines::{ServedVmApi, VirtualMachines};

/// Handlers of changes, called on the informer's task.
pub(crate) struct ChangeHandlers {
    /// A VM changed.
    pub(crate) vm_changed: ChangeHandler<Vm>,
    /// A claim changed.
    pub(crate) claim_changed: ChangeHandler<PersistentVolumeClaim>,
    /// A snapshot changed.
    pub(crate) snapshot_changed: ChangeHandler<VolumeSnapshot>,
}

/// The stores of the management cluster, limited to one guest.
#[derive(Clone, Debug)]
pub(crate) struct Management {
    /// Claims.
    pub(crate) claims: Claims,
    /// Classes of claims.
    pub(crate) classes: Classes,
    /// VirtualMachines.
    pub(crate) vms: VirtualMachines,
    /// Records of this guest on shared claims.
    pub(crate) consumers: Consumers,
    /// Creates and deletes claims.
    pub(crate) provisioner: Provisioner,
    /// Attaches and detaches disks.
    pub(crate) entries: VolumeEntries,
    /// Snapshots, if they are served.
    pub(crate) snapshots: Option<Snapshots>,
    /// Published capacities, if they are watched.
    pub(crate) capacities: Option<Capacities>,
    /// ownerReferences of claims and snapshots.
    pub(crate) owner_refs: OwnerRefs,
    /// The VM Operator of the management cluster.
    pub(crate) vm_operator: VmOperator,
}

impl Management {
    /// Starts the informers.
    pub(crate) fn start(
        client: &Client,
        identity: GuestIdentity,
        ServedApis { vm_api, vm_operator, optional }: ServedApis<'_>,
        owner: ClusterOwner,
        ready: &Health,
        stop: &CancellationToken,
        handlers: ChangeHandlers,
    ) -> Self {
        let ChangeHandlers { vm_changed, claim_changed, snapshot_changed } = handlers;
        let namespace = identity.namespace.as_str();
        let classes = Classes::start(client, optional.attributes_classes, ready, stop);
        let vms = VirtualMachines::start(client, &identity, vm_api, ready, stop, vm_changed);
        let claims = Claims::start(client, identity.clone(), vms.vm_api(), ready, stop, claim_changed);
        let consumers = Consumers::new(identity.clone(), claims.clone());
        let snapshots = optional.snapshots.then(|| {
            let of = (claims.clone(), owner.clone());
            Snapshots::start(client, identity.clone(), of, ready, stop, snapshot_changed)
        });
        let capacities = optional
            .capacity_namespace
            .as_ref()
            .map(|published| Capacities::start(client, namespace, published, ready, stop));
        let provisioner = Provisioner::new(
            identity.clone(),
            (claims.clone(), classes.clone(), consumers.clone()),
            vms.clone(),
            snapshots.clone(),
            owner.clone(),
        );
        let of = || (claims.clone(), consumers.clone());
        let stores = (claims.clone(), classes.clone(), consumers.clone());
        let entries = VolumeEntries::new(identity.clone(), vms.clone(), stores, vm_operator);
        let owner_refs = OwnerRefs::new(identity.clone(), of(), snapshots.clone(), owner);
        Self {
            claims,
            classes,
            vms,
            consumers,
            provisioner,
            entries,
            snapshots,
            capacities,
            owner_refs,
            vm_operator,
        }
    }

    /// The watch error while claims or VMs can't be watched, so that caches may be stale; None while connected.
    pub(crate) fn watch_error(&self) -> Option<String> {
        self.vms.watch_error().or_else(|| self.claims.watch_error())
    }

    /// Waits for the first list of claims, VMs and classes.
    pub(crate) async fn synced(&self) {
        self.claims.synced().await;
        self.vms.synced().await;
        self.classes.synced().await;
    }

    /// Whether all informers are synced; no call is answered before.
    pub(crate) fn is_synced(&self) -> bool {
        self.claims.is_synced()
            && self.vms.is_synced()
            && self.classes.is_synced()
            && self.snapshots.as_ref().is_none_or(Snapshots::is_synced)
            && self.capacities.as_ref().is_none_or(Capacities::is_synced)
    }
}
