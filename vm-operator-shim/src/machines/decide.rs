//! Decision for one Machine, without I/O: the `VirtualMachine` that it has, or why it has none yet.

use std::collections::BTreeMap;

use crds::names::{LABEL_CLUSTER_ID, LABEL_ZONE};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use uuid::Uuid;

use super::machine::{Machine, MachineExt, uuid};

crds::reasons! {
    /// Reasons of Events on a Machine that gets no `VirtualMachine`.
    pub enum Reason {
        /// The Cluster of the Machine has no label `nestor.dev/cluster-id`.
        ClusterIdMissing,
        /// The provider ID of the Machine does not end with the UUID of its VM.
        VmUuidUnknown,
        /// The namespace has a VirtualMachine with the name of the node that does not belong to the Machine.
        VirtualMachineExists,
    }
}

/// The `VirtualMachine` of a Machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Desired {
    /// Its name: that of the node.
    pub(super) name: String,
    /// Its labels: the cluster ID, and the zone if the Machine has a failure domain.
    pub(super) labels: BTreeMap<String, String>,
    /// UUID of the VM.
    pub(super) uuid: Uuid,
}

/// What is known of an existing `VirtualMachine`.
#[derive(Debug, Clone, Default)]
pub(super) struct Found {
    pub(super) metadata: ObjectMeta,
    pub(super) instance_uuid: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    /// Wait for a change: the Machine has no VM or no node yet, or is being deleted.
    Wait,
    /// A person must do something.
    Refuse(Reason, String),
    /// Make the VirtualMachine what it should be.
    Have(Desired),
}

/// What to do about a Machine, whose Cluster has this label.
pub(super) fn desired(machine: &Machine, cluster_id: Option<&str>) -> Step {
    let (Some(provider_id), Some(node)) = (machine.spec.provider_id.as_deref(), machine.node_name()) else {
        return Step::Wait;
    };
    if machine.metadata.deletion_timestamp.is_some() {
        return Step::Wait;
    }
    let Some(uuid) = uuid(provider_id) else {
        return Step::Refuse(Reason::VmUuidUnknown, unknown_uuid(provider_id));
    };
    let Some(cluster_id) = cluster_id.filter(|id| !id.is_empty()) else {
        return Step::Refuse(Reason::ClusterIdMissing, unlabelled(&machine.spec.cluster_name));
    };
    let labels = [(LABEL_CLUSTER_ID, Some(cluster_id)), (LABEL_ZONE, machine.zone())];
    let labels = labels.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?.to_owned())));
    Step::Have(Desired { name: node.to_owned(), labels: labels.collect(), uuid })
}

fn unknown_uuid(provider_id: &str) -> String {
    format!(
        "the provider ID {provider_id:?} does not end with the UUID of a VM, so its VirtualMachine cannot be created: create \
         it by hand, with the UUID in status.instanceUUID"
    )
}

fn unlabelled(cluster: &str) -> String {
    format!(
        "Cluster {cluster} has no label {LABEL_CLUSTER_ID}, so the guest of this Machine is unknown: set the label to the \
         guest's cluster ID"
    )
}

/// What a `VirtualMachine` lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Lacks {
    pub(super) labels: bool,
    pub(super) uuid: bool,
}

/// Compares an existing `VirtualMachine` with the desired one. Fails if it does not belong to the Machine with this UID.
pub(super) fn compare(
    found: &Found,
    desired: &Desired,
    machine_uid: &str,
) -> Result<Lacks, (Reason, String)> {
    let owners = found.metadata.owner_references.iter().flatten();
    if !owners.into_iter().any(|owner| owner.uid == machine_uid) {
        let text = format!(
            "VirtualMachine {} exists and does not belong to this Machine: if it is an earlier one of the same VM, delete it",
            desired.name
        );
        return Err((Reason::VirtualMachineExists, text));
    }
    let labels = found.metadata.labels.as_ref();
    let has = |key: &String, value: &String| labels.and_then(|labels| labels.get(key)) == Some(value);
    Ok(Lacks {
        labels: !desired.labels.iter().all(|(key, value)| has(key, value)),
        uuid: found.instance_uuid.as_deref() != Some(&desired.uuid.to_string()),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const UUID: &str = "42103d4a-9a5f-4b51-8f5c-0c9f7a4c1e11";

    fn machine() -> Machine {
        serde_json::from_value(json!({
            "apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "Machine",
            "metadata": {"name": "m", "namespace": "guest-g1", "uid": "m-uid"},
            "spec": {"clusterName": "g1", "providerID": format!("libvirt:///{UUID}"), "failureDomain": "zone-a"},
            "status": {"nodeRef": {"name": "worker-1"}},
        }))
        .unwrap()
    }

    fn vm(machine: &Machine) -> Desired {
        match desired(machine, Some("c1")) {
            Step::Have(vm) => vm,
            other => panic!("{other:?}"),
        }
    }

    fn reason(step: Step) -> Reason {
        match step {
            Step::Refuse(reason, _) => reason,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_vm_has_the_name_of_the_node_the_guest_of_the_cluster_and_the_zone_of_the_machine() {
        let vm = vm(&machine());
        assert_eq!((vm.name.as_str(), vm.uuid.to_string().as_str()), ("worker-1", UUID));
        let expected = [(LABEL_CLUSTER_ID, "c1"), (LABEL_ZONE, "zone-a")];
        assert_eq!(vm.labels, expected.map(|(key, value)| (key.to_owned(), value.to_owned())).into());
    }

    #[test]
    fn the_zone_is_where_the_provider_placed_the_vm_or_else_the_requested_one() {
        let mut machine = machine();
        machine.status.as_mut().unwrap().failure_domain = Some("zone-b".to_owned());
        assert_eq!(vm(&machine).labels[LABEL_ZONE], "zone-b");
        (machine.spec.failure_domain, machine.status.as_mut().unwrap().failure_domain) = (None, None);
        assert_eq!(vm(&machine).labels.len(), 1);
    }

    #[test]
    fn a_machine_waits_for_its_vm_and_its_node_and_gets_nothing_while_it_is_deleted() {
        let mut waiting = vec![machine(), machine(), machine()];
        waiting[0].spec.provider_id = None;
        waiting[1].status = None;
        waiting[2].metadata.deletion_timestamp =
            serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
        for machine in waiting {
            assert_eq!(desired(&machine, Some("c1")), Step::Wait);
        }
    }

    #[test]
    fn a_person_must_name_the_guest_and_the_vm() {
        assert_eq!(reason(desired(&machine(), None)), Reason::ClusterIdMissing);
        assert_eq!(reason(desired(&machine(), Some(""))), Reason::ClusterIdMissing);
        let mut machine = machine();
        machine.spec.provider_id = Some("kubevirt://worker-1".to_owned());
        assert_eq!(reason(desired(&machine, Some("c1"))), Reason::VmUuidUnknown);
    }

    #[test]
    fn only_the_machines_own_vm_is_changed() {
        let desired = vm(&machine());
        let found = |owner: &str, id: &str, uuid: Option<&str>| Found {
            metadata: serde_json::from_value(json!({
                "labels": {LABEL_CLUSTER_ID: id, LABEL_ZONE: "zone-a", "other": "x"},
                "ownerReferences": [{"apiVersion": "v", "kind": "Machine", "name": "m", "uid": owner}],
            }))
            .unwrap(),
            instance_uuid: uuid.map(str::to_owned),
        };
        let compared = |found: &Found| compare(found, &desired, "m-uid");
        assert_eq!(compared(&found("m-uid", "c1", Some(UUID))), Ok(Lacks { labels: false, uuid: false }));
        assert_eq!(compared(&found("m-uid", "c2", Some(UUID))), Ok(Lacks { labels: true, uuid: false }));
        assert_eq!(compared(&found("m-uid", "c1", None)), Ok(Lacks { labels: false, uuid: true }));
        for other in [found("other", "c1", Some(UUID)), Found::default()] {
            assert_eq!(compared(&other).unwrap_err().0, Reason::VirtualMachineExists);
        }
    }
}
