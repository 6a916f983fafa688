//! VirtualMachines of this guest's namespace: the informer, an index by disk, and requests for single VMs. What the
//! entries of a VM mean is decided in [`crate::vm_volumes`], and their changes are made by
//! [`super::volume_entries`].

use std::collections::HashMap;
use std::sync::Arc;

use crds::names::{self, ANNOTATION_OUT_OF_SERVICE, ClaimName, VmName};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use kube_kit::health::Health;
use kube_kit::index::Index;
use kube_kit::informer::{Change, Informer, Key};
use kube_kit::mutation_cache::catch_up;
use process_kit::text::one_line;
use serde::Serialize;
use serde_json::json;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::error::ApiError;
use super::identity::GuestIdentity;
use super::kubevirt::KubeVirt;
use super::objects::{ChangeHandler, is_object_name, retain_keys};
use crate::vm_volumes::holder::Holder;
use crate::vm_volumes::{self, Revision, Vm, VmApi};

/// Names of the VMs that each entry's disk is attached to.
pub(super) type AttachedVms = HashMap<String, Vec<VmName>>;

/// API and informer of VirtualMachines.
#[derive(Clone, Debug)]
pub(crate) struct VirtualMachines {
    namespace: String,
    /// This guest.
    guest: String,
    objects: Objects,
    informer: Informer<Vm>,
    by_disk: Arc<Index>,
}

/// Objects of VMs, by VM API.
#[derive(Clone, Debug)]
enum Objects {
    /// The VM is one object, of which the informer is.
    VmOperator(Box<Api<Vm>>),
    /// The VM is computed from several objects.
    KubeVirt(Box<KubeVirt>),
}

/// The VM API of a management cluster, with its version where several are supported.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ServedVmApi {
    /// `vmoperator.vmware.com` in this version.
    VmOperator(&'static str),
    /// `kubevirt.io`.
    KubeVirt,
}

impl VirtualMachines {
    /// Watches the VMs of the guest's namespace.
    pub(super) fn start(
        client: &Client,
        identity: &GuestIdentity,
        served: ServedVmApi,
        ready: &Health,
        stop: &CancellationToken,
        changed: ChangeHandler<Vm>,
    ) -> Self {
        let namespace = identity.namespace.clone();
        let by_disk = Arc::new(Index::default());
        let index = by_disk.clone();
        let indexed = move |change: &Change<'_, Vm>| {
            index.put(change.key, change.new.into_iter().flat_map(|vm| index_keys(vm)));
        };
        let (objects, informer) = match served {
            ServedVmApi::VmOperator(version) => {
                let resource = crds::virtual_machine_resource(version);
                let api: Api<Vm> = Api::namespaced_with(client.clone(), &namespace, &resource);
                let informer = Informer::builder("VirtualMachines", api.clone())
                    .trim(trim)
                    .on_change(indexed)
                    .on_change(changed)
                    .start(ready.check("watch of VirtualMachines", "not synced yet"), stop.clone());
                (Objects::VmOperator(Box::new(api)), informer)
            }
            ServedVmApi::KubeVirt => {
                let handlers = vec![Box::new(indexed) as ChangeHandler<Vm>, changed];
                let kubevirt = KubeVirt::start(client, &namespace, ready, stop, handlers, is_read);
                let informer = kubevirt.views().clone();
                (Objects::KubeVirt(Box::new(kubevirt)), informer)
            }
        };
        Self { namespace, guest: identity.cluster.to_string(), objects, informer, by_disk }
    }

    /// VMs of a fixed informer, without an index.
    #[cfg(test)]
    pub(super) fn fixed(namespace: &str, api: Api<Vm>, vm: Vm) -> Self {
        Self {
            namespace: namespace.to_owned(),
            guest: "guest".to_owned(),
            objects: Objects::VmOperator(Box::new(api)),
            informer: Informer::fixed([vm]),
            by_disk: Arc::default(),
        }
    }

    /// The API that VMs are changed through.
    pub(crate) fn vm_api(&self) -> VmApi {
        match self.objects {
            Objects::VmOperator(_) => VmApi::VmOperator,
            Objects::KubeVirt(_) => VmApi::KubeVirt,
        }
    }

    /// Waits for the first list.
    pub(super) async fn synced(&self) {
        match &self.objects {
            Objects::VmOperator(_) => self.informer.synced().await,
            Objects::KubeVirt(kubevirt) => kubevirt.synced().await,
        }
    }

    pub(super) fn is_synced(&self) -> bool {
        match &self.objects {
            Objects::VmOperator(_) => self.informer.is_synced(),
            Objects::KubeVirt(kubevirt) => kubevirt.is_synced(),
        }
    }

    /// The watch error while VMs can't be watched; None while connected.
    pub(super) fn watch_error(&self) -> Option<String> {
        match &self.objects {
            Objects::VmOperator(_) => self.informer.watch_error(),
            Objects::KubeVirt(kubevirt) => kubevirt.watch_error(),
        }
    }

    /// Namespaced name of a VM, for messages.
    pub(crate) fn full_name(&self, name: &VmName) -> String {
        self.key(name).to_string()
    }

    /// Whether a VM is another guest's.
    pub(crate) fn is_other_guests(&self, vm: &Vm) -> bool {
        vm_volumes::is_other_guests(vm, &self.guest)
    }

    /// A VM in messages, which do not name those of other guests.
    pub(super) fn describe(&self, name: &VmName) -> String {
        match self.get(name).is_some_and(|vm| self.is_other_guests(&vm)) {
            true => "a VirtualMachine of another guest".to_owned(),
            false => format!("VirtualMachine {name}"),
        }
    }

    /// Names of all VMs.
    pub(crate) fn names(&self) -> Vec<VmName> {
        self.informer.list().iter().filter_map(|vm| name_of(vm)).collect()
    }

    /// The VM of this name, from the cache.
    pub(crate) fn get(&self, name: &VmName) -> Option<Arc<Vm>> {
        self.informer.get(&self.key(name))
    }

    /// VMs whose spec or status names the claim or its entry, ordered by name.
    pub(crate) fn referencing(&self, claim: &ClaimName) -> Vec<Arc<Vm>> {
        let keys = [claim.clone().into(), claim.entry()].map(Key::cluster);
        let mut vms: Vec<Key> = keys.iter().flat_map(|key| self.by_disk.members(key)).collect();
        vms.sort_unstable();
        vms.dedup();
        vms.iter().filter_map(|key| self.informer.get(key)).collect()
    }

    /// Names of the VMs that have the claim in their spec, or its disk attached.
    pub(crate) fn using(&self, claim: &ClaimName) -> Vec<VmName> {
        let entry = claim.entry();
        let mut found: Vec<VmName> = self
            .referencing(claim)
            .iter()
            .filter(|vm| vm_volumes::uses_claim(vm, claim, &entry))
            .filter_map(|vm| name_of(vm))
            .collect();
        found.sort_unstable();
        found
    }

    /// Names of the VMs that the claim's disk is attached to.
    pub(super) fn attached_to(&self, claim: &ClaimName) -> Vec<VmName> {
        let entry = claim.entry();
        let vms = self.referencing(claim);
        let attached = vms.iter().filter(|vm| vm_volumes::is_attached(vm, &entry));
        attached.filter_map(|vm| name_of(vm)).collect()
    }

    /// What VMs of this guest report as wrong with the claim's disk.
    pub(crate) fn disk_failure(&self, claim: &ClaimName) -> Option<String> {
        match self.vm_api() {
            VmApi::VmOperator => None,
            VmApi::KubeVirt => {
                vm_volumes::disk_failures(&self.referencing(claim), &claim.entry(), &self.guest)
            }
        }
    }

    /// Names of the VMs that each entry's disk is attached to.
    pub(super) fn attached_by_entry(&self) -> AttachedVms {
        let mut attached = AttachedVms::new();
        for vm in self.informer.list() {
            let disks = vm.status.iter().flat_map(|status| &status.volumes);
            let names =
                disks.filter(|disk| disk.attached).flat_map(|disk| names::entry_candidates(&disk.name));
            for entry in names {
                attached.entry(entry.to_owned()).or_default().extend(name_of(&vm));
            }
        }
        attached
    }

    /// The error that a VM reports for an entry, as the end of a message; empty without one.
    pub(super) fn last_error(&self, name: &VmName, entry: &str) -> String {
        let vm = self.get(name).filter(|vm| !self.is_other_guests(vm));
        let error = vm.and_then(|vm| vm_volumes::reported_error(&vm, entry));
        error.map(|error| format!(": {}", one_line(&error))).unwrap_or_default()
    }

    /// Waits until `check` returns a value for the cached VM, at most until `deadline`.
    pub(super) async fn wait_for<T>(
        &self,
        name: &VmName,
        deadline: Instant,
        check: impl FnMut(Option<&Arc<Vm>>) -> Option<T>,
    ) -> Option<T> {
        self.informer.wait_for(&self.key(name), deadline, check).await
    }

    /// Waits until `check` returns a value for a state that is proven to be the result of a change, at most until `deadline`.
    pub(super) async fn wait_for_result<T>(
        &self,
        name: &VmName,
        since: &Revision,
        deadline: Instant,
        check: impl FnMut(Option<&Arc<Vm>>) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        match &self.objects {
            // Entries and their status are in one object.
            Objects::VmOperator(_) => Ok(self.wait_for(name, deadline, check).await),
            Objects::KubeVirt(kubevirt) => {
                kubevirt.wait_for_result(&self.key(name), since, deadline, check).await
            }
        }
    }

    /// Whether the VM that holds a volume is proven off.
    pub(super) async fn is_proven_off(&self, holder: &Holder) -> Result<bool, ApiError> {
        match &self.objects {
            Objects::VmOperator(_) => Ok(false),
            Objects::KubeVirt(kubevirt) => kubevirt.is_proven_off(holder).await,
        }
    }

    /// Whether nothing runs under the name of a VM, where gc-csi can prove it: with KubeVirt.
    pub(crate) async fn is_off(&self, name: &VmName) -> Result<bool, ApiError> {
        match &self.objects {
            Objects::KubeVirt(kubevirt) if is_object_name(name) => kubevirt.is_off(name).await,
            Objects::KubeVirt(_) | Objects::VmOperator(_) => Ok(false),
        }
    }

    /// The VM as the API server returns it now; None if it does not exist.
    pub(super) async fn read(&self, name: &VmName) -> Result<Option<Vm>, ApiError> {
        // The guest chooses this name, and it becomes part of a URL: no object can have an invalid name.
        if !is_object_name(name) {
            return Ok(None);
        }
        match &self.objects {
            Objects::VmOperator(api) => Ok(api.get_opt(name).await?),
            Objects::KubeVirt(kubevirt) => kubevirt.read(name).await,
        }
    }

    /// The VM as the API server returns it now; fails if it does not exist.
    pub(super) async fn read_existing(&self, name: &VmName) -> Result<Vm, ApiError> {
        match &self.objects {
            Objects::VmOperator(api) => Ok(api.get(name).await?),
            Objects::KubeVirt(kubevirt) => {
                let missing = || ApiError::NotFound(format!("VirtualMachine {name}"));
                kubevirt.read(name).await?.ok_or_else(missing)
            }
        }
    }

    /// Sends a patch.
    pub(super) async fn patch<P: Serialize + std::fmt::Debug>(
        &self,
        name: &VmName,
        patch: &Patch<P>,
    ) -> Result<Vm, ApiError> {
        match &self.objects {
            Objects::VmOperator(api) => Ok(api.patch(name, &PatchParams::default(), patch).await?),
            Objects::KubeVirt(kubevirt) => kubevirt.patch(&self.key(name), patch).await,
        }
    }

    /// Waits until the cache is as new as the VM in the API server; false if it is still older at the deadline.
    pub(super) async fn catch_up(&self, name: &VmName, deadline: Instant) -> Result<bool, ApiError> {
        // The guest chooses this name, and it becomes part of a URL: no object can have an invalid name.
        if !is_object_name(name) {
            return Ok(true);
        }
        match &self.objects {
            Objects::VmOperator(api) => {
                let live = api.get_opt(name).await?;
                Ok(catch_up(&self.informer, &self.key(name), live.as_ref(), deadline).await)
            }
            Objects::KubeVirt(kubevirt) => kubevirt.catch_up(&self.key(name), deadline).await,
        }
    }

    /// Sets the out-of-service annotation to the UID of the Node, or removes it. Succeeds if the VM does not exist.
    pub(crate) async fn set_out_of_service(&self, vm: &Vm, node: Option<&str>) -> Result<(), ApiError> {
        // With the UID, the API server refuses the patch if the VM was replaced by one of the same name.
        let metadata = json!({"uid": vm.metadata.uid, "annotations": {ANNOTATION_OUT_OF_SERVICE: node}});
        match self.patch(&VmName::new(vm.name_any()), &Patch::Merge(json!({"metadata": metadata}))).await {
            Ok(_) | Err(ApiError::NotFound(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn key(&self, name: &VmName) -> Key {
        Key::new(self.namespace.clone(), name.as_str())
    }
}

fn name_of(vm: &Vm) -> Option<VmName> {
    vm.metadata.name.clone().map(VmName::new)
}

/// Index keys of a VM: the claims in its spec and the entries in its status.
fn index_keys(vm: &Vm) -> Vec<Key> {
    let claims = vm.spec.volumes.iter().filter_map(|volume| volume.persistent_volume_claim.as_ref());
    let entries = vm.status.iter().flat_map(|status| &status.volumes);
    let claims = claims.map(|source| source.claim_name.as_str());
    claims.chain(entries.flat_map(|disk| names::entry_candidates(&disk.name))).map(Key::cluster).collect()
}

/// Whether gc-csi reads an annotation of VMs.
fn is_read(key: &str) -> bool {
    let read =
        [names::ANNOTATION_OUT_OF_SERVICE, names::ANNOTATION_PROVEN_OFF, names::ANNOTATION_VOLUMES_CONFIRMED];
    read.contains(&key) || key.starts_with(names::ANNOTATION_TRACE_PREFIX)
}

/// Keeps identity, the guest's label, our annotations and all volumes, since a PATCH names an entry by its index.
fn trim(vm: &mut Vm) {
    // An empty map shows that there are annotations: a JSON Patch that adds the first one differs.
    let has_annotations = vm.metadata.annotations.as_ref().is_some_and(|all| !all.is_empty());
    retain_keys(&mut vm.metadata.annotations, is_read);
    if has_annotations {
        vm.metadata.annotations.get_or_insert_default();
    }
    retain_keys(&mut vm.metadata.labels, |key| key == names::LABEL_CLUSTER_ID);
    vm.metadata.finalizers = None;
    vm.metadata.owner_references = None;
    vm.spec.volumes.shrink_to_fit();
    if let Some(status) = &mut vm.status {
        status.volumes.shrink_to_fit();
    }
}
