//! Writes to VirtualMachines: their status, and the record of the proof that they are off.

use crds::VirtualMachine;
use crds::names::ANNOTATION_PROVEN_OFF;
use infra_api::Node;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{Patch, PatchParams};
use kube_kit::client::chain;
use kube_kit::informer::Key;
use serde_json::{Value, json};

use super::proof::{self, Change};
use super::status::{self, StatusWriter};
use super::{CheckError, Context};

/// Updates the status by what the hypervisor reports.
pub(super) async fn status(
    context: &Context,
    vm: &VirtualMachine,
    node: &Node,
    writer: StatusWriter,
) -> Result<(), CheckError> {
    let Some(changes) = status::patch(vm.status.as_ref(), node, writer) else { return Ok(()) };
    let key = Key::of(vm);
    let patch = Patch::Merge(json!({"metadata": {"uid": vm.metadata.uid}, "status": changes}));
    let written = api(context, &key).patch_status(&key.name, &PatchParams::default(), &patch).await;
    if outcome("the status", &key, written)? {
        tracing::info!(vm = %key, status = %json!(changes), "wrote the status");
    }
    Ok(())
}

/// Updates the record of the proof that a VM is off.
pub(super) async fn proof(
    context: &Context,
    vm: &VirtualMachine,
    proven_off: bool,
) -> Result<(), CheckError> {
    let (now, recorded) = (Timestamp::now(), proof::recorded(vm));
    let value = match proof::change(recorded, proven_off, now) {
        Change::None => return Ok(()),
        Change::Write => json!(now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()),
        Change::Remove => Value::Null,
    };
    let key = Key::of(vm);
    // With the UID, the API server refuses the patch if the VM was replaced by one of the same name.
    let metadata = json!({"uid": vm.metadata.uid, "annotations": {ANNOTATION_PROVEN_OFF: value}});
    let patch = Patch::Merge(json!({"metadata": metadata}));
    let written = api(context, &key).patch(&key.name, &PatchParams::default(), &patch).await;
    let is_written = outcome("the annotation nestor.dev/proven-off", &key, written)?;
    if is_written && recorded.is_some() != proven_off {
        tracing::info!(vm = %key, proven_off, "recorded whether the storage infra has proven the VM off");
    }
    Ok(())
}

fn api(context: &Context, key: &Key) -> Api<VirtualMachine> {
    Api::namespaced_with(context.shared.clients.cluster.clone(), &key.namespace, &context.resource)
}

/// Whether it was written. A VM that was deleted, or created again, is not: the watch shows it.
fn outcome(what: &'static str, key: &Key, written: kube::Result<VirtualMachine>) -> Result<bool, CheckError> {
    match written {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => Ok(false),
        Err(error) => Err(CheckError::Write(what, key.clone(), chain(&error))),
    }
}
