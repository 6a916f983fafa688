//! Fencing of VMs that are out of service: whether a disk may be detached by force, because the guest node has the
//! out-of-service taint and `--fence` allows it.

use std::sync::Arc;

use crds::names::ANNOTATION_OUT_OF_SERVICE;
use crds::{VirtualMachine, VolumeAttachment, virtual_machine_resource};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::{Api, Client};
use kube_kit::health::Check;
use kube_kit::informer::{Informer, Key};
use tokio::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

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
pub(super) struct Lost(Option<Informer<VirtualMachine>>);

impl Lost {
    /// Fencing is disabled.
    pub(super) fn none() -> Self {
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
        let machines = Informer::builder(format!("VirtualMachines ({version})"), api)
            .trim(trim)
            .on_change(move |change| {
                let said = |machine: Option<&Arc<VirtualMachine>>| machine.is_some_and(|one| is_said(one));
                if said(change.new) && !said(change.old) {
                    changed(change.key);
                }
            })
            .start(check, stop.clone());
        Self(Some(machines))
    }

    /// Whether the VM of a VolumeAttachment is out of service.
    pub(super) fn has_machine_of(&self, order: &VolumeAttachment) -> bool {
        let machine = self
            .0
            .as_ref()
            .zip(machine_of(order))
            .and_then(|(machines, owner)| machines.get(&key(order, owner)));
        is_lost(order, machine.as_deref())
    }

    /// Waits until the VM of a VolumeAttachment is out of service; never returns if that does not happen.
    pub(super) async fn gets_machine_of(&self, order: &VolumeAttachment) {
        if let Some((machines, owner)) = self.0.as_ref().zip(machine_of(order)) {
            let far = Instant::now() + Duration::from_secs(24 * 60 * 60);
            let said = |machine: Option<&Arc<VirtualMachine>>| {
                is_lost(order, machine.map(|machine| &**machine)).then_some(())
            };
            if machines.wait_for(&key(order, owner), far, said).await.is_some() {
                return;
            }
        }
        std::future::pending::<()>().await;
    }
}

/// The ownerReference to the VirtualMachine of a VolumeAttachment.
pub(crate) fn machine_of(order: &VolumeAttachment) -> Option<&OwnerReference> {
    let owners = order.metadata.owner_references.as_deref().unwrap_or_default();
    owners.iter().find(|owner| owner.kind == "VirtualMachine")
}

fn key(order: &VolumeAttachment, owner: &OwnerReference) -> Key {
    Key::new(order.metadata.namespace.clone().unwrap_or_default(), owner.name.clone())
}

/// Whether this VM is the owner of the VolumeAttachment, by UID, and is out of service.
fn is_lost(order: &VolumeAttachment, machine: Option<&VirtualMachine>) -> bool {
    let owner = machine_of(order).map(|owner| &owner.uid);
    machine.is_some_and(|machine| owner == machine.metadata.uid.as_ref() && is_said(machine))
}

fn is_said(machine: &VirtualMachine) -> bool {
    let annotations = machine.metadata.annotations.as_ref();
    annotations.is_some_and(|annotations| annotations.contains_key(ANNOTATION_OUT_OF_SERVICE))
}

/// Drops all fields but the identity and the out-of-service annotation.
fn trim(machine: &mut VirtualMachine) {
    let mut meta = std::mem::take(&mut machine.metadata);
    machine.types = None;
    machine.metadata = ObjectMeta {
        name: meta.name,
        namespace: meta.namespace,
        uid: meta.uid,
        resource_version: meta.resource_version,
        annotations: meta
            .annotations
            .as_mut()
            .and_then(|annotations| annotations.remove_entry(ANNOTATION_OUT_OF_SERVICE))
            .map(|said| [said].into()),
        ..Default::default()
    };
    machine.spec.volumes = Vec::new();
    machine.status = None;
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn machine(uid: &str, annotations: serde_json::Value) -> VirtualMachine {
        serde_json::from_value(json!({
            "apiVersion": "vmoperator.vmware.com/v1alpha5", "kind": "VirtualMachine", "spec": {},
            "metadata": {"name": "vm", "namespace": "guest", "uid": uid, "annotations": annotations},
        }))
        .unwrap()
    }

    fn order() -> VolumeAttachment {
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
        let said = json!({ANNOTATION_OUT_OF_SERVICE: "n1"});
        let lost = |machines: Vec<VirtualMachine>| Lost(Some(Informer::fixed(machines)));
        assert!(lost(vec![machine("u1", said.clone())]).has_machine_of(&order()));
        assert!(!lost(vec![machine("u1", json!({"other": "x"}))]).has_machine_of(&order()));
        assert!(!lost(vec![machine("u2", said.clone())]).has_machine_of(&order()));
        assert!(!lost(Vec::new()).has_machine_of(&order()));
        assert!(!Lost::none().has_machine_of(&order()));
        let mut kept = machine("u1", json!({ANNOTATION_OUT_OF_SERVICE: "n1", "other": "x"}));
        trim(&mut kept);
        assert!(lost(vec![kept]).has_machine_of(&order()));
        let ownerless = VolumeAttachment { metadata: Default::default(), ..order() };
        assert!(!lost(vec![machine("u1", said)]).has_machine_of(&ownerless));
    }
}
