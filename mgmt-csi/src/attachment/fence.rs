//! Fencing of VMs that are out of service: whether a disk may be detached by force, because the guest node has the
//! out-of-service taint and `--fence` allows it.

use std::sync::Arc;

use crds::names::{self, ANNOTATION_OUT_OF_SERVICE, ANNOTATION_TRACE_PREFIX};
use crds::{VirtualMachine, VolumeAttachment, virtual_machine_resource};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::{Api, Client};
use kube_kit::health::Check;
use kube_kit::informer::{Informer, Key};
use kube_kit::partial::identity;
use tokio::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

use crate::volume_attachment::vm_owner;

/// Action on a VM that is out of service and does not release a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Fence {
    /// Power the VM off.
    PowerOff,
    /// Wait until the VM releases the disk or is powered off.
    Never,
}

/// The VMs that are out of service; empty if fencing is disabled.
#[derive(Debug, Clone)]
pub(super) struct OutOfService(Option<Informer<VirtualMachine>>);

impl OutOfService {
    /// Fencing is disabled.
    pub(super) fn disabled() -> Self {
        Self(None)
    }

    /// Watches the VirtualMachines; calls `changed` with the key of each that goes out of service.
    pub(super) fn watch(
        client: &Client,
        version: &str,
        check: Check,
        stop: &CancellationToken,
        changed: impl Fn(&Key) + Send + Sync + 'static,
    ) -> Self {
        let api = Api::all_with(client.clone(), &virtual_machine_resource(version));
        let vms = Informer::builder(format!("VirtualMachines ({version})"), api)
            .trim(trim)
            .on_change(move |change| {
                let annotated =
                    |vm: Option<&Arc<VirtualMachine>>| vm.is_some_and(|one| is_out_of_service(one));
                if annotated(change.new) && !annotated(change.old) {
                    changed(change.key);
                }
            })
            .start(check, stop.clone());
        Self(Some(vms))
    }

    /// Whether the VM of a VolumeAttachment is out of service.
    pub(super) fn has_vm_of(&self, attachment: &VolumeAttachment) -> bool {
        owner_is_out_of_service(attachment, self.vm_of(attachment).as_deref())
    }

    /// Trace context of the last change of the VM's entry for a VolumeAttachment; None without the watch.
    pub(super) fn trace_context(&self, attachment: &VolumeAttachment) -> Option<String> {
        let annotations = self.vm_of(attachment)?.metadata.annotations.clone()?;
        annotations.get(&names::trace_annotation(&attachment.spec.volume_name.entry())).cloned()
    }

    fn vm_of(&self, attachment: &VolumeAttachment) -> Option<Arc<VirtualMachine>> {
        let (vms, owner) = self.0.as_ref().zip(vm_owner(attachment))?;
        vms.get(&key(attachment, owner))
    }

    /// Waits until the VM of a VolumeAttachment is out of service; never returns if that does not happen.
    pub(super) async fn wait_for_vm_of(&self, attachment: &VolumeAttachment) {
        if let Some((vms, owner)) = self.0.as_ref().zip(vm_owner(attachment)) {
            let far = Instant::now() + Duration::from_secs(24 * 60 * 60);
            let annotated = |vm: Option<&Arc<VirtualMachine>>| {
                owner_is_out_of_service(attachment, vm.map(|vm| &**vm)).then_some(())
            };
            if vms.wait_for(&key(attachment, owner), far, annotated).await.is_some() {
                return;
            }
        }
        std::future::pending::<()>().await;
    }
}

fn key(attachment: &VolumeAttachment, owner: &OwnerReference) -> Key {
    Key::new(attachment.metadata.namespace.clone().unwrap_or_default(), owner.name.clone())
}

/// Whether this VM is the owner of the VolumeAttachment, by UID, and is out of service.
fn owner_is_out_of_service(attachment: &VolumeAttachment, vm: Option<&VirtualMachine>) -> bool {
    let owner = vm_owner(attachment).map(|owner| &owner.uid);
    vm.is_some_and(|vm| owner == vm.metadata.uid.as_ref() && is_out_of_service(vm))
}

fn is_out_of_service(vm: &VirtualMachine) -> bool {
    let annotations = vm.metadata.annotations.as_ref();
    annotations.is_some_and(|annotations| annotations.contains_key(ANNOTATION_OUT_OF_SERVICE))
}

/// Drops all fields but the identity, the out-of-service annotation and the trace contexts.
fn trim(vm: &mut VirtualMachine) {
    vm.types = None;
    let annotations = vm.metadata.annotations.take().map(|mut all| {
        all.retain(|key, _| key == ANNOTATION_OUT_OF_SERVICE || key.starts_with(ANNOTATION_TRACE_PREFIX));
        all
    });
    vm.metadata =
        ObjectMeta { annotations: annotations.filter(|kept| !kept.is_empty()), ..identity(&mut vm.metadata) };
    vm.spec.volumes = Vec::new();
    vm.status = None;
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn vm(uid: &str, annotations: serde_json::Value) -> VirtualMachine {
        serde_json::from_value(json!({
            "apiVersion": "vmoperator.vmware.com/v1alpha5", "kind": "VirtualMachine", "spec": {},
            "metadata": {"name": "vm", "namespace": "guest", "uid": uid, "annotations": annotations},
        }))
        .unwrap()
    }

    fn attachment() -> VolumeAttachment {
        let owner = json!({
            "apiVersion": "vmoperator.vmware.com/v1alpha5", "kind": "VirtualMachine", "name": "vm", "uid": "u1",
        });
        serde_json::from_value(json!({
            "metadata": {"name": "vm-1", "namespace": "guest", "ownerReferences": [owner]},
            "spec": {"nodeUUID": "u", "volumeName": "data"},
        }))
        .unwrap()
    }

    #[test]
    fn only_the_owning_vm_is_out_of_service_and_only_if_fencing_is_enabled() {
        let annotated = json!({ANNOTATION_OUT_OF_SERVICE: "n1"});
        let out_of_service = |vms: Vec<VirtualMachine>| OutOfService(Some(Informer::fixed(vms)));
        assert!(out_of_service(vec![vm("u1", annotated.clone())]).has_vm_of(&attachment()));
        assert!(!out_of_service(vec![vm("u1", json!({"other": "x"}))]).has_vm_of(&attachment()));
        assert!(!out_of_service(vec![vm("u2", annotated.clone())]).has_vm_of(&attachment()));
        assert!(!out_of_service(Vec::new()).has_vm_of(&attachment()));
        assert!(!OutOfService::disabled().has_vm_of(&attachment()));
        let mut kept = vm("u1", json!({ANNOTATION_OUT_OF_SERVICE: "n1", "other": "x"}));
        trim(&mut kept);
        assert!(out_of_service(vec![kept]).has_vm_of(&attachment()));
        let ownerless = VolumeAttachment { metadata: Default::default(), ..attachment() };
        assert!(!out_of_service(vec![vm("u1", annotated)]).has_vm_of(&ownerless));
    }
}
