//! Fencing of VMs that are out of service: whether a disk may be detached by force, because the guest node has the
//! out-of-service taint and `--fence` allows it.

use std::sync::Arc;

use crds::names::{self, ANNOTATION_OUT_OF_SERVICE};
use crds::{VirtualMachine, VolumeAttachment};
use kube_kit::informer::Informer;
use tokio::time::{Duration, Instant};

use crate::virtual_machines::{is_owner, owner_key};

/// Action on a VM that is out of service and does not release a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Fence {
    /// Power the VM off.
    PowerOff,
    /// Wait until the VM releases the disk or is powered off.
    Never,
}

/// The VMs, some of which are out of service; empty if fencing is disabled.
#[derive(Debug, Clone)]
pub(super) struct OutOfService(Option<Informer<VirtualMachine>>);

impl OutOfService {
    /// Fencing is disabled.
    pub(super) fn disabled() -> Self {
        Self(None)
    }

    /// Fencing is enabled for these VMs.
    pub(super) fn of(vms: Informer<VirtualMachine>) -> Self {
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
        let (vms, owner) = self.0.as_ref().zip(owner_key(attachment))?;
        vms.get(&owner)
    }

    /// Waits until the VM of a VolumeAttachment is out of service; never returns if that does not happen.
    pub(super) async fn wait_for_vm_of(&self, attachment: &VolumeAttachment) {
        if let Some((vms, owner)) = self.0.as_ref().zip(owner_key(attachment)) {
            let far = Instant::now() + Duration::from_secs(24 * 60 * 60);
            let annotated = |vm: Option<&Arc<VirtualMachine>>| {
                owner_is_out_of_service(attachment, vm.map(|vm| &**vm)).then_some(())
            };
            if vms.wait_for(&owner, far, annotated).await.is_some() {
                return;
            }
        }
        std::future::pending::<()>().await;
    }
}

/// Whether this VM is the owner of the VolumeAttachment, by UID, and is out of service.
fn owner_is_out_of_service(attachment: &VolumeAttachment, vm: Option<&VirtualMachine>) -> bool {
    vm.is_some_and(|vm| is_owner(vm, attachment) && is_out_of_service(vm))
}

pub(super) fn is_out_of_service(vm: &VirtualMachine) -> bool {
    let annotations = vm.metadata.annotations.as_ref();
    annotations.is_some_and(|annotations| annotations.contains_key(ANNOTATION_OUT_OF_SERVICE))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::virtual_machines::trim;

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
