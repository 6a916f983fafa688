//! `orphans`: objects without a counterpart, as far as the objects of the clusters show it. The storage infra is not asked;
//! `mgmt-csi orphans` does that.

use std::collections::{BTreeMap, BTreeSet};

use crds::{VirtualMachine, VolumeAttachment, names};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::ResourceExt;
use serde::Serialize;

use super::{List, Row, read, show};
use crate::cli::Format;
use crate::clusters::{Clusters, Tier};
use crate::error::Error;

const HEAD: [&str; 5] = ["CLUSTER", "KIND", "NAME", "REASON", "ACTION"];

/// An object without a counterpart.
#[derive(Debug, PartialEq, Serialize)]
struct Orphan {
    cluster: Tier,
    kind: &'static str,
    name: String,
    reason: String,
    action: &'static str,
}

impl Row for Orphan {
    fn cells(&self) -> Vec<String> {
        let texts = [self.cluster.name(), self.kind, &self.name, &self.reason, self.action];
        texts.map(str::to_owned).to_vec()
    }
}

/// Everything that is compared. What is not connected is None.
#[derive(Default)]
struct Inventory {
    guest_volumes: Option<Vec<PersistentVolume>>,
    claims: Option<BTreeMap<String, PersistentVolumeClaim>>,
    attachments: Vec<VolumeAttachment>,
    machines: Vec<VirtualMachine>,
    cluster_id: Option<String>,
}

/// Lists orphans. Returns whether there are none.
pub async fn run(clusters: &Clusters, output: Format) -> Result<bool, Error> {
    let inventory = inventory(clusters).await?;
    let rows = find(&inventory);
    let mut unseen =
        vec!["volumes, snapshots and attachments of the storage infra: `mgmt-csi orphans`".to_owned()];
    if inventory.guest_volumes.is_none() {
        unseen.push("the guest's objects: only claims that gc-csi marked as orphaned are listed".to_owned());
    }
    if inventory.claims.is_none() {
        unseen.push("the management cluster: without it, nothing can be compared".to_owned());
    }
    show(output, &List { head: &HEAD, narrow: 5, unseen }, &rows)?;
    Ok(rows.is_empty())
}

async fn inventory(clusters: &Clusters) -> Result<Inventory, Error> {
    // Claims first: a volume that is created meanwhile has its claim before its PersistentVolume.
    let mut inventory = Inventory { claims: read::claims(clusters).await?, ..Default::default() };
    inventory.cluster_id.clone_from(&clusters.cluster_id);
    if let Some(cluster) = &clusters.management {
        inventory.attachments = read::attachments(cluster).await?;
        inventory.machines = read::machines(cluster).await?;
    }
    if let Some(guest) = &clusters.guest {
        inventory.guest_volumes = Some(read::guest_volumes(guest).await?);
        if inventory.cluster_id.is_none() {
            inventory.cluster_id = crate::gather::cluster_id(clusters, guest).await?;
        }
    }
    Ok(inventory)
}

/// Compares both tiers.
fn find(inventory: &Inventory) -> Vec<Orphan> {
    let mut found = marked_claims(inventory);
    found.extend(unnamed_claims(inventory));
    found.extend(volumes_without_claim(inventory));
    found.extend(attachments_without_entry(inventory));
    found
}

/// Claims that gc-csi marked.
fn marked_claims(inventory: &Inventory) -> Vec<Orphan> {
    let marked = |claim: &PersistentVolumeClaim| {
        let since = claim.annotations().get(names::ANNOTATION_ORPHANED_SINCE)?.clone();
        let reason = claim.annotations().get(names::ANNOTATION_ORPHANED_REASON).cloned().unwrap_or_default();
        Some(format!("{reason}: marked by gc-csi at {since}"))
    };
    let claims = inventory.claims.iter().flatten();
    claims.filter_map(|(name, claim)| Some(orphaned_claim(name, marked(claim)?))).collect()
}

fn orphaned_claim(name: &str, reason: String) -> Orphan {
    Orphan {
        cluster: Tier::Management,
        kind: "PersistentVolumeClaim",
        name: name.to_owned(),
        reason,
        action: "recreate the guest's PersistentVolume, or delete the claim (docs/guides/repair.md)",
    }
}

/// Bound claims of this guest that no PersistentVolume of the guest names and that gc-csi has not marked (yet).
fn unnamed_claims(inventory: &Inventory) -> Vec<Orphan> {
    let Some(volumes) = &inventory.guest_volumes else { return Vec::new() };
    let named: BTreeSet<&str> = volumes.iter().filter_map(read::handle).collect();
    let is_orphan = |(name, claim): &(&String, &PersistentVolumeClaim)| {
        let is_marked = [names::ANNOTATION_ORPHANED_SINCE, names::ANNOTATION_RETAINED_SINCE]
            .iter()
            .any(|mark| claim.annotations().contains_key(*mark));
        let owner = claim.labels().get(names::LABEL_CLUSTER_ID);
        let was_used = claim.annotations().contains_key(names::ANNOTATION_GUEST_PV);
        owner.is_some()
            && owner == inventory.cluster_id.as_ref()
            && was_used
            && !is_marked
            && crate::diagnose::claims::phase(claim) == "Bound"
            && !named.contains(name.as_str())
    };
    let claims = inventory.claims.iter().flatten();
    let reason = "no PersistentVolume of the guest names it; gc-csi has not marked it yet";
    claims.filter(is_orphan).map(|(name, _)| orphaned_claim(name, reason.to_owned())).collect()
}

/// PersistentVolumes of the guest whose management claim is gone.
fn volumes_without_claim(inventory: &Inventory) -> Vec<Orphan> {
    let (Some(volumes), Some(claims)) = (&inventory.guest_volumes, &inventory.claims) else {
        return Vec::new();
    };
    let is_orphan = |volume: &&PersistentVolume| {
        let is_leaving = volume.metadata.deletion_timestamp.is_some();
        !is_leaving && read::handle(volume).is_some_and(|handle| !claims.contains_key(handle))
    };
    let orphan = |volume: &PersistentVolume| Orphan {
        cluster: Tier::Guest,
        kind: "PersistentVolume",
        name: volume.name_any(),
        reason: format!("management claim {} does not exist", read::handle(volume).unwrap_or_default()),
        action: "restore the management claim, or delete the PersistentVolume",
    };
    volumes.iter().filter(is_orphan).map(orphan).collect()
}

/// VolumeAttachments that no entry of a VM's `spec.volumes` requests.
fn attachments_without_entry(inventory: &Inventory) -> Vec<Orphan> {
    let requested: BTreeSet<String> = inventory
        .machines
        .iter()
        .flat_map(|vm| vm.spec.volumes.iter().map(move |entry| (vm, entry)))
        .filter_map(|(vm, entry)| Some((vm.name_any(), &entry.persistent_volume_claim.as_ref()?.claim_name)))
        .map(|(vm, claim)| names::volume_attachment(&vm.into(), claim))
        .collect();
    let is_orphan = |one: &&VolumeAttachment| {
        one.metadata.deletion_timestamp.is_none() && !requested.contains(&one.name_any())
    };
    let orphan = |one: &VolumeAttachment| Orphan {
        cluster: Tier::Management,
        kind: "VolumeAttachment",
        name: one.name_any(),
        reason: format!("no entry of spec.volumes requests claim {}", one.spec.volume_name),
        action: "check that the VM Operator (or vm-operator-shim) runs: it deletes the object",
    };
    inventory.attachments.iter().filter(is_orphan).map(orphan).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn claim(annotations: &serde_json::Value) -> PersistentVolumeClaim {
        serde_json::from_value(json!({"metadata": {"name": "a", "annotations": annotations,
            "labels": {"nestor.dev/cluster-id": "g"}}, "status": {"phase": "Bound"}}))
        .unwrap()
    }

    fn volume(handle: &str) -> PersistentVolume {
        let csi = json!({"driver": names::GUEST_DRIVER, "volumeHandle": handle});
        serde_json::from_value(json!({"metadata": {"name": format!("pv-{handle}")}, "spec": {"csi": csi}}))
            .unwrap()
    }

    fn machine(claim: &str) -> VirtualMachine {
        serde_json::from_value(
            json!({"apiVersion": "a/b", "kind": "VirtualMachine", "metadata": {"name": "vm"},
            "spec": {"volumes": [{"name": "e", "persistentVolumeClaim": {"claimName": claim}}]}}),
        )
        .unwrap()
    }

    fn attachment(claim: &str) -> VolumeAttachment {
        let name = names::volume_attachment(&"vm".into(), &claim.into());
        serde_json::from_value(
            json!({"metadata": {"name": name}, "spec": {"nodeUUID": "n", "volumeName": claim}}),
        )
        .unwrap()
    }

    fn kinds(inventory: &Inventory) -> Vec<(&'static str, String)> {
        find(inventory).into_iter().map(|orphan| (orphan.kind, orphan.name)).collect()
    }

    #[test]
    fn objects_with_a_counterpart_are_no_orphans() {
        let inventory = Inventory {
            guest_volumes: Some(vec![volume("a")]),
            claims: Some([("a".to_owned(), claim(&json!({"nestor.dev/guest-pv": "pv-a"})))].into()),
            attachments: vec![attachment("a")],
            machines: vec![machine("a")],
            cluster_id: Some("g".into()),
        };
        assert!(kinds(&inventory).is_empty());
    }

    #[test]
    fn each_object_without_a_counterpart_is_listed() {
        let used = json!({"nestor.dev/guest-pv": "pv-a"});
        let marked = json!({"nestor.dev/guest-pv": "pv-b", "nestor.dev/orphaned-since": "t"});
        let inventory = Inventory {
            guest_volumes: Some(vec![volume("c")]),
            claims: Some([("a".to_owned(), claim(&used)), ("b".to_owned(), claim(&marked))].into()),
            attachments: vec![attachment("a")],
            machines: vec![machine("b")],
            cluster_id: Some("g".into()),
        };
        let found = kinds(&inventory);
        assert_eq!(found[0], ("PersistentVolumeClaim", "b".to_owned()));
        assert_eq!(found[1], ("PersistentVolumeClaim", "a".to_owned()));
        assert_eq!(found[2], ("PersistentVolume", "pv-c".to_owned()));
        assert_eq!(found[3].0, "VolumeAttachment");
    }

    #[test]
    fn claims_of_other_guests_and_retained_ones_are_no_orphans() {
        let retained = json!({"nestor.dev/guest-pv": "p", "nestor.dev/retained-since": "t"});
        let mut inventory = Inventory {
            guest_volumes: Some(Vec::new()),
            claims: Some([("a".to_owned(), claim(&retained))].into()),
            cluster_id: Some("g".into()),
            ..Default::default()
        };
        assert!(kinds(&inventory).is_empty());
        inventory.claims = Some([("a".to_owned(), claim(&json!({"nestor.dev/guest-pv": "p"})))].into());
        inventory.cluster_id = Some("other".into());
        assert!(kinds(&inventory).is_empty());
    }
}
