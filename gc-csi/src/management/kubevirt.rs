//! VMs of KubeVirt: informers of VirtualMachines and of their instances, and the VMs that the rules see, computed from both. What the
//! objects mean is decided in [`crate::vm_volumes::kubevirt`].

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, Patch, PatchParams};
use kube::core::PartialObjectMeta;
use kube::{Api, Client};
use kube_kit::health::Health;
use kube_kit::informer::{Derived, Handler, Informer, Key};
use kube_kit::mutation_cache::catch_up;
use kube_kit::resource_version;
use serde::Serialize;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::error::ApiError;
use super::objects::retain_keys;
use crate::vm_volumes::holder::Holder;
use crate::vm_volumes::kubevirt::{self, Instance, Launcher, Standing, VirtualMachine};
use crate::vm_volumes::{Revision, Vm};

/// Labels and annotations of KubeVirt's pods.
const LAUNCHERS: &str = "kubevirt.io=virt-launcher";
const CREATED_BY: &str = "kubevirt.io/created-by";
const DOMAIN: &str = "kubevirt.io/domain";

/// How often pods of a VM without an instance are read while a detach waits for their end.
const PODS_INTERVAL: Duration = Duration::from_secs(5);

/// Objects of KubeVirt in the guest's namespace.
#[derive(Debug, Clone)]
pub(super) struct KubeVirt {
    vm_api: Api<VirtualMachine>,
    instance_api: Api<Instance>,
    pod_api: Api<Pod>,
    vms: Informer<VirtualMachine>,
    instances: Informer<Instance>,
    views: Arc<Derived<Vm>>,
}

impl KubeVirt {
    /// Watches VirtualMachines and their instances.
    pub(super) fn start(
        client: &Client,
        namespace: &str,
        ready: &Health,
        stop: &CancellationToken,
        handlers: Vec<Handler<Vm>>,
        is_read: impl Fn(&str) -> bool + Send + Sync + 'static,
    ) -> Self {
        let vm_api: Api<VirtualMachine> =
            Api::namespaced_with(client.clone(), namespace, &kubevirt::virtual_machines());
        let instance_api: Api<Instance> =
            Api::namespaced_with(client.clone(), namespace, &kubevirt::instances());
        let views = Arc::new(Derived::new(handlers, is_same));
        let vms = Informer::builder("VirtualMachines", vm_api.clone()).trim(move |vm| {
            let has_annotations = vm.metadata.annotations.as_ref().is_some_and(|all| !all.is_empty());
            retain_keys(&mut vm.metadata.annotations, &is_read);
            if has_annotations {
                vm.metadata.annotations.get_or_insert_default();
            }
        });
        let instances = Informer::builder("VirtualMachineInstances", instance_api.clone()).trim(|one| {
            one.metadata.annotations = None;
            one.metadata.labels = None;
        });
        let (vm_store, instance_store) = (vms.informer(), instances.informer());
        let update = {
            let (vms, instances, views) = (vm_store, instance_store, views.clone());
            move |key: &Key| views.update(key, || view(vms.get(key), instances.get(key)))
        };
        let updating = update.clone();
        let vms = vms
            .on_change(move |change| update(change.key))
            .start(ready.check("watch of VirtualMachines", "not synced yet"), stop.clone());
        let instances = instances
            .on_change(move |change| updating(change.key))
            .start(ready.check("watch of VirtualMachineInstances", "not synced yet"), stop.clone());
        let pod_api = Api::namespaced(client.clone(), namespace);
        Self { vm_api, instance_api, pod_api, vms, instances, views }
    }

    /// The VMs as the rules see them.
    pub(super) fn views(&self) -> &Informer<Vm> {
        self.views.informer()
    }

    pub(super) async fn synced(&self) {
        self.vms.synced().await;
        self.instances.synced().await;
    }

    pub(super) fn is_synced(&self) -> bool {
        self.vms.is_synced() && self.instances.is_synced()
    }

    pub(super) fn watch_error(&self) -> Option<String> {
        self.vms.watch_error().or_else(|| self.instances.watch_error())
    }

    /// The VM as the API server returns it now, and then its instance.
    pub(super) async fn read(&self, name: &str) -> Result<Option<Vm>, ApiError> {
        let vm = self.vm_api.get_opt(name).await?;
        let instance = self.instance_api.get_opt(name).await?;
        Ok(vm.map(|vm| kubevirt::view(&vm, instance.as_ref())))
    }

    /// Sends a patch of a VM. Its answer has no instance: that of the cache stands in.
    pub(super) async fn patch<P: Serialize + std::fmt::Debug>(
        &self,
        key: &Key,
        patch: &Patch<P>,
    ) -> Result<Vm, ApiError> {
        let vm = self.vm_api.patch(&key.name, &PatchParams::default(), patch).await?;
        Ok(kubevirt::view(&vm, self.instances.get(key).as_deref()))
    }

    /// Waits until the caches are as new as the API server's objects; false if they are still older at the deadline.
    pub(super) async fn catch_up(&self, key: &Key, deadline: Instant) -> Result<bool, ApiError> {
        let vm = self.vm_api.get_opt(&key.name).await?;
        let instance = self.instance_api.get_opt(&key.name).await?;
        Ok(catch_up(&self.vms, key, vm.as_ref(), deadline).await
            && catch_up(&self.instances, key, instance.as_ref(), deadline).await)
    }

    /// Waits until `check` returns a value for a state that is proven to be the result of a change. Usually the caches prove it;
    /// otherwise the objects are read.
    pub(super) async fn wait_for_result<T>(
        &self,
        key: &Key,
        since: &Revision,
        deadline: Instant,
        mut check: impl FnMut(Option<&Arc<Vm>>) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let mut handled_at = None;
        loop {
            let waiting = self.views().wait_for(key, deadline, |vm| {
                let standing = self.standing(key, since, &mut handled_at)?;
                Some((standing, check(vm)?))
            });
            let Some((standing, outcome)) = waiting.await else { return Ok(None) };
            let is_proven = match (standing, self.instances.get(key), handled_at) {
                (Standing::Handled, Some(instance), Some(at)) => kubevirt::is_after(&instance, at),
                _ => false,
            };
            if is_proven {
                return Ok(Some(outcome));
            }
            if let Some(outcome) = self.read_result(key, since, &mut check).await? {
                return Ok(Some(outcome));
            }
            // The caches are older than what was read, or pods of the VM are left, which are not watched.
            if !self.catch_up(key, deadline).await? || !self.wait_for_change(key, deadline).await {
                return Ok(None);
            }
        }
    }

    /// What the caches prove about a change, if anything; and since which version of the VM it is known to be handled.
    fn standing(&self, key: &Key, since: &Revision, handled_at: &mut Option<u64>) -> Option<Standing> {
        let (vm, instance) = (self.vms.get(key), self.instances.get(key));
        let standing = kubevirt::standing(vm.as_deref(), instance.as_deref(), since);
        if standing == Standing::Handled && handled_at.is_none() {
            *handled_at = vm.and_then(|vm| resource_version::of(&*vm));
        }
        (standing != Standing::Open).then_some(standing)
    }

    /// The result of a change that the API server's present objects prove.
    async fn read_result<T>(
        &self,
        key: &Key,
        since: &Revision,
        check: &mut impl FnMut(Option<&Arc<Vm>>) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let vm = self.vm_api.get_opt(&key.name).await?;
        let instance = self.instance_api.get_opt(&key.name).await?;
        let is_proven = match kubevirt::standing(vm.as_ref(), instance.as_ref(), since) {
            Standing::Open => false,
            Standing::Handled | Standing::Ended => true,
            Standing::NoInstance => self.launchers(&key.name).await?.is_empty(),
        };
        let seen = vm.map(|vm| Arc::new(kubevirt::view(&vm, instance.as_ref())));
        Ok(if is_proven { check(seen.as_ref()) } else { None })
    }

    /// Waits until the VM or its instance changes, or for the next look at the pods.
    async fn wait_for_change(&self, key: &Key, deadline: Instant) -> bool {
        let versions = || {
            let vm = self.vms.get(key).and_then(|vm| vm.metadata.resource_version.clone());
            (vm, self.instances.get(key).and_then(|one| one.metadata.resource_version.clone()))
        };
        let before = versions();
        let until = deadline.min(Instant::now() + PODS_INTERVAL);
        let changed = self.views().wait_for(key, until, |_| (versions() != before).then_some(()));
        changed.await.is_some() || Instant::now() < deadline
    }

    /// Whether the VM of a holder is proven off, read from the API server.
    pub(super) async fn is_proven_off(&self, holder: &Holder) -> Result<bool, ApiError> {
        let instance = self.instance_api.get_opt(&holder.vm).await?;
        let launchers = self.launchers(&holder.vm).await?;
        Ok(kubevirt::is_proven_off(holder, instance.as_ref(), &launchers))
    }

    /// Whether nothing runs under the name of a VM, read from the API server.
    pub(super) async fn is_off(&self, name: &str) -> Result<bool, ApiError> {
        let instance = self.instance_api.get_opt(name).await?;
        Ok(kubevirt::is_off(instance.as_ref(), &self.launchers(name).await?))
    }

    /// The pods in which instances of a VM run, read from the API server.
    async fn launchers(&self, vm_name: &str) -> Result<Vec<Launcher>, ApiError> {
        let pods = self.pod_api.list_metadata(&ListParams::default().labels(LAUNCHERS)).await?;
        Ok(pods.items.iter().filter_map(launcher).filter(|pod| pod.vm_name == vm_name).collect())
    }
}

fn view(vm: Option<Arc<VirtualMachine>>, instance: Option<Arc<Instance>>) -> Option<Vm> {
    Some(kubevirt::view(&*vm?, instance.as_deref()))
}

fn is_same(old: &Vm, new: &Vm) -> bool {
    old.metadata == new.metadata && old.spec == new.spec && old.status == new.status
}

fn launcher(pod: &PartialObjectMeta<Pod>) -> Option<Launcher> {
    let text = |map: &Option<BTreeMap<String, String>>, key: &str| map.as_ref()?.get(key).cloned();
    let vm_name = text(&pod.metadata.annotations, DOMAIN)?;
    let instance_uid = text(&pod.metadata.labels, CREATED_BY).unwrap_or_default();
    Some(Launcher { vm_name, instance_uid })
}
