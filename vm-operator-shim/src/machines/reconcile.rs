//! Reconciler of one Machine: creates its `VirtualMachine`, and keeps labels and UUID. Kubernetes' garbage collector deletes
//! the `VirtualMachine` with the Machine, its owner.

use crds::names::LABEL_CLUSTER_ID;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::api::{DynamicObject, Patch, PatchParams, PostParams};
use kube::core::ApiResource;
use kube::{Api, Client, ResourceExt};
use kube_kit::client::chain;
use kube_kit::events::Events;
use kube_kit::informer::{Informer, Key};
use kube_kit::queue::NextAction;
use serde_json::{Value, json};

use super::decide::{Desired, Found, Reason, Step, compare, desired};
use super::machine::{Machine, MachineExt};
use crate::reconcile::Metrics;
use crate::vm::Vm;

/// Why a reconcile must be retried.
#[derive(Debug, thiserror::Error)]
#[error("failed to {action} VirtualMachine {name}: {why}")]
pub(crate) struct MachineError {
    action: &'static str,
    name: String,
    why: String,
}

pub(super) struct Reconciler {
    pub(super) client: Client,
    pub(super) events: Events,
    pub(super) resource: ApiResource,
    pub(super) vms: ApiResource,
    pub(super) machines: Informer<Machine>,
    pub(super) clusters: Informer<DynamicObject>,
    pub(super) metrics: Metrics,
}

impl Reconciler {
    pub(super) async fn reconcile(&self, key: &Key) -> Result<NextAction, MachineError> {
        let Some(machine) = self.machines.get(key) else { return Ok(NextAction::AwaitChange) };
        let cluster = self.clusters.get(&machine.cluster());
        let cluster_id = cluster.as_ref().and_then(|cluster| cluster.labels().get(LABEL_CLUSTER_ID));
        match desired(&machine, cluster_id.map(String::as_str)) {
            Step::Wait => {}
            Step::Refuse(reason, text) => self.refuse(&machine, reason, text),
            Step::Have(vm) => self.have(&machine, &vm).await?,
        }
        Ok(NextAction::AwaitChange)
    }

    fn refuse(&self, machine: &Machine, reason: Reason, text: String) {
        self.events.warning_once(self.reference(machine), "CreateVirtualMachine", reason.as_str(), text);
    }

    fn reference(&self, machine: &Machine) -> ObjectReference {
        ObjectReference {
            api_version: Some(self.resource.api_version.clone()),
            kind: Some(self.resource.kind.clone()),
            name: machine.metadata.name.clone(),
            namespace: machine.metadata.namespace.clone(),
            uid: machine.metadata.uid.clone(),
            ..Default::default()
        }
    }

    async fn have(&self, machine: &Machine, desired: &Desired) -> Result<(), MachineError> {
        let namespace = machine.metadata.namespace.as_deref().unwrap_or_default();
        let api = Api::<Vm>::namespaced_with(self.client.clone(), namespace, &self.vms);
        let error = |action| {
            move |error: kube::Error| MachineError { action, name: desired.name.clone(), why: chain(&error) }
        };
        let found = match api.get_opt(&desired.name).await.map_err(error("read"))? {
            Some(vm) => vm,
            None => self.create(&api, machine, desired).await.map_err(error("create"))?,
        };
        let uid = machine.metadata.uid.as_deref().unwrap_or_default();
        let instance_uuid = found.status.and_then(|status| status.instance_uuid);
        match compare(&Found { metadata: found.metadata, instance_uuid }, desired, uid) {
            Err((reason, text)) => self.refuse(machine, reason, text),
            Ok(lacks) => {
                if lacks.labels {
                    self.set_labels(&api, desired).await.map_err(error("label"))?;
                }
                if lacks.uuid {
                    self.set_uuid(&api, desired).await.map_err(error("write the status of"))?;
                }
            }
        }
        Ok(())
    }

    async fn create(&self, api: &Api<Vm>, machine: &Machine, desired: &Desired) -> kube::Result<Vm> {
        let vm = object(&self.vms.api_version, machine, &self.resource, desired);
        let vm = serde_json::from_value(vm).map_err(kube::Error::SerdeError)?;
        let made = api.create(&PostParams::default(), &vm).await;
        self.metrics.count("create-vm", made.is_ok());
        if made.is_ok() {
            tracing::info!(vm = desired.name, machine = machine.name_any(), uuid = %desired.uuid, "created");
        }
        made
    }

    async fn set_labels(&self, api: &Api<Vm>, desired: &Desired) -> kube::Result<()> {
        let patch = json!({"metadata": {"labels": desired.labels}});
        let outcome = api.patch(&desired.name, &PatchParams::default(), &Patch::Merge(patch)).await;
        self.metrics.count("label-vm", outcome.is_ok());
        outcome.map(drop)
    }

    async fn set_uuid(&self, api: &Api<Vm>, desired: &Desired) -> kube::Result<()> {
        let patch = json!({"status": {"instanceUUID": desired.uuid}});
        let outcome = api.patch_status(&desired.name, &PatchParams::default(), &Patch::Merge(patch)).await;
        self.metrics.count("status-vm", outcome.is_ok());
        outcome.map(drop)
    }
}

/// The `VirtualMachine` of a Machine. The owner does not block its own deletion until the VM is gone: Cluster API deletes the
/// VM first.
fn object(api_version: &str, machine: &Machine, resource: &ApiResource, desired: &Desired) -> Value {
    json!({
        "apiVersion": api_version, "kind": "VirtualMachine", "spec": {},
        "metadata": {
            "name": desired.name, "labels": desired.labels,
            "ownerReferences": [{
                "apiVersion": resource.api_version, "kind": resource.kind, "name": machine.metadata.name,
                "uid": machine.metadata.uid, "controller": true,
            }],
        },
    })
}
