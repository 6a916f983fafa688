//! Zone labels of guest Nodes, from their VMs. The scheduler and volume placement use them. An existing label is never
//! overwritten.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use crds::names::LABEL_ZONE;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use kube_kit::client::chain;
use kube_kit::events::Events;
use kube_kit::health::Check;
use kube_kit::informer::{Informer, Key};
use kube_kit::partial::Node;
use kube_kit::queue::NextAction;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::out_of_service;
use super::taints::is_out_of_service;
use crate::events::Event;
use crate::guest::reference;
use crate::management::VirtualMachines;
use crate::vm_volumes::Vm;
use crds::names::VmName;

/// Labels guest Nodes with their zones.
pub(super) struct Zones {
    api: Api<Node>,
    nodes: Informer<Node>,
    vms: VirtualMachines,
    events: Events,
    reported: Mutex<HashMap<VmName, String>>,
}

/// Action for a Node.
#[derive(Debug, PartialEq, Eq)]
enum Action {
    None,
    Label,
    /// The label names another zone.
    Report,
}

/// The zone of a VM.
pub(super) fn zone_of(vm: &Vm) -> Option<&str> {
    vm.status.as_ref()?.zone.as_deref().filter(|zone| !zone.is_empty())
}

impl Zones {
    /// Starts the informer of Nodes; calls `changed` for each Node that is created or deleted, or whose zone or
    /// out-of-service taint changes, and `ready_changed` for each whose readiness or out-of-service taint changes.
    pub(super) fn start(
        client: &Client,
        vms: VirtualMachines,
        events: Events,
        check: Check,
        stop: &CancellationToken,
        changed: impl Fn(&VmName) + Send + Sync + 'static,
        ready_changed: impl Fn(&VmName) + Send + Sync + 'static,
    ) -> Self {
        let nodes = Informer::builder("guest Nodes", Api::all(client.clone()))
            .trim(trim)
            .on_change(move |change| {
                let read = |node: Option<&Arc<Node>>| {
                    node.map(|node| (zone_label(node).map(str::to_owned), out_of_service::is_tainted(node)))
                };
                if read(change.old) != read(change.new) {
                    changed(&VmName::new(&change.key.name));
                }
            })
            .on_change(move |change| {
                let read = |node: &Arc<Node>| (node.ready.clone(), node.taints.clone());
                if change.old.map(read) != change.new.map(read) {
                    ready_changed(&VmName::new(&change.key.name));
                }
            })
            .start(check, stop.clone());
        Self { api: Api::all(client.clone()), nodes, vms, events, reported: Mutex::default() }
    }

    /// Waits for the first list.
    pub(super) async fn synced(&self) {
        self.nodes.synced().await;
    }

    /// Names of all Nodes.
    pub(super) fn names(&self) -> Vec<VmName> {
        self.nodes.list().iter().filter_map(|node| node.metadata.name.clone().map(VmName::new)).collect()
    }

    /// The Node of this name, with its out-of-service taints only.
    pub(super) fn node(&self, name: &VmName) -> Option<Arc<Node>> {
        self.nodes.get(&Key::cluster(name.as_str()))
    }

    /// Whether the guest has a Node of this name.
    pub(super) fn is_node(&self, name: &VmName) -> bool {
        self.node(name).is_some()
    }

    /// Whether the guest has a Node of this name, read from the API server.
    pub(super) async fn is_node_live(&self, name: &VmName) -> Result<bool, String> {
        let read = self.api.get_metadata_opt(name).await;
        let node = read.map_err(|error| format!("failed to read guest Node {name}: {}", chain(&error)))?;
        Ok(node.is_some())
    }

    /// Reference for events about a Node.
    pub(super) fn reference_to(&self, name: &VmName) -> ObjectReference {
        let node = self.node(name);
        node.map_or_else(
            || ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Node".to_owned()),
                name: Some(name.to_string()),
                ..ObjectReference::default()
            },
            |node| reference(&*node),
        )
    }

    /// Updates the zone label of one Node, and the out-of-service annotation of its VM.
    pub(super) async fn reconcile(&self, name: &VmName) -> Result<NextAction, String> {
        if let Some(node) = self.node(name) {
            out_of_service::reconcile(&self.vms, &node).await?;
        }
        let vm = self.vms.get(name);
        let (Some(node), Some(zone)) = (self.node(name), vm.as_deref().and_then(zone_of)) else {
            self.forget(name);
            return Ok(NextAction::AwaitChange);
        };
        match decide(zone_label(&node), zone) {
            Action::None => self.forget(name),
            Action::Label => {
                self.forget(name);
                self.label(&node, zone).await?;
            }
            Action::Report => {
                let note = format!(
                    "label {LABEL_ZONE} of Node {name} is {:?}, but VirtualMachine {} runs in zone {zone:?}: volumes \
                     are placed by the label; correct it, or remove it so that gc-csi sets it",
                    zone_label(&node).unwrap_or_default(),
                    self.vms.full_name(name),
                );
                if self.is_new_note(name, &note) {
                    tracing::warn!("{note}");
                    Event::ZoneMismatch.report(&self.events, reference(&*node), note);
                }
            }
        }
        Ok(NextAction::AwaitChange)
    }

    async fn label(&self, node: &Node, zone: &str) -> Result<(), String> {
        let name = node.metadata.name.as_deref().unwrap_or_default();
        // With the resourceVersion, the API server refuses the patch if the Node has a label by now.
        let guard = json!({"uid": node.metadata.uid, "resourceVersion": node.metadata.resource_version});
        let mut metadata = guard;
        metadata["labels"] = json!({LABEL_ZONE: zone});
        let patch = Patch::Merge(json!({"metadata": metadata}));
        match self.api.patch_metadata(name, &PatchParams::default(), &patch).await {
            Ok(_) => {
                tracing::info!(node = name, zone, "labelled the Node with the zone of its VirtualMachine");
                Ok(())
            }
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            Err(error) => {
                Err(format!("failed to label guest Node {name} with zone {zone}: {}", chain(&error)))
            }
        }
    }

    fn is_new_note(&self, node: &VmName, note: &str) -> bool {
        let mut reported = self.reported.lock().unwrap_or_else(PoisonError::into_inner);
        reported.insert(node.to_owned(), note.to_owned()).as_deref() != Some(note)
    }

    fn forget(&self, node: &VmName) {
        self.reported.lock().unwrap_or_else(PoisonError::into_inner).remove(node);
    }
}

fn decide(label: Option<&str>, zone: &str) -> Action {
    match label {
        None => Action::Label,
        Some(label) if label == zone => Action::None,
        Some(_) => Action::Report,
    }
}

fn zone_label(node: &Node) -> Option<&str> {
    node.metadata.labels.as_ref()?.get(LABEL_ZONE).map(String::as_str)
}

/// Keeps identity, zone label, readiness, UUID and out-of-service taints.
fn trim(node: &mut Node) {
    node.metadata.annotations = None;
    node.metadata.finalizers = None;
    node.metadata.owner_references = None;
    if let Some(labels) = &mut node.metadata.labels {
        labels.retain(|key, _| key == LABEL_ZONE);
    }
    node.taints.retain(is_out_of_service);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_existing_label_is_never_overwritten() {
        assert_eq!(decide(None, "a"), Action::Label);
        assert_eq!(decide(Some("a"), "a"), Action::None);
        assert_eq!(decide(Some("b"), "a"), Action::Report);
        assert_eq!(decide(Some(""), "a"), Action::Report);
    }
}
