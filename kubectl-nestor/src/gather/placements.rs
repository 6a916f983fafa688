//! Nodes that have, had or need the volume, with the objects of each attach.

use std::collections::BTreeSet;

use crds::{VirtualMachine, VolumeAttachment, names};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::CSINode;
use kube::ResourceExt;
use kube::api::ListParams;
use kube::core::ApiResource;
use sha2::{Digest, Sha256};

use super::guest::claims_of;
use super::read::{self, get, unseen};
use super::snapshot::{Object, Placement, Snapshot, found};
use crate::clusters::{Cluster, Clusters};
use crate::error::Error;
use crate::subject::{Kind, Subject};

/// Condition of a guest claim whose message names the VMs that have the disk.
pub const CONDITION_ATTACHED: &str = "nestor.dev/Attached";

/// Number of VMs that are searched for an entry.
const MOST_VMS: u32 = 500;

/// Finds the nodes, and reads the objects of each.
pub async fn gather(clusters: &Clusters, subject: &Subject, snapshot: &mut Snapshot) -> Result<(), Error> {
    if snapshot.pod_without_claim {
        return Ok(());
    }
    let resource = match &clusters.management {
        Some(cluster) => read::vm_resource(&cluster.client).await.map(Some),
        None => Ok(None),
    };
    let resource = resource.unwrap_or_else(|reason| {
        snapshot.vms_unknown = Some(reason);
        None
    });
    find(clusters, subject, snapshot, resource.as_ref()).await?;
    let claim = snapshot.management_claim.as_ref().map(|claim| claim.name.clone());
    let driver = driver(snapshot);
    let placements = std::mem::take(&mut snapshot.placements);
    let reads = placements
        .into_iter()
        .map(|placement| fill(clusters, resource.as_ref(), claim.as_deref(), &driver, placement));
    snapshot.placements = futures::future::try_join_all(reads).await?;
    Ok(())
}

/// Driver name of the guest's volume: an earlier name is possible.
fn driver(snapshot: &Snapshot) -> String {
    let csi = found(&snapshot.guest_volume).and_then(|volume| volume.spec.as_ref()?.csi.as_ref());
    csi.map_or_else(|| names::GUEST_DRIVER.to_owned(), |csi| csi.driver.clone())
}

async fn find(
    clusters: &Clusters,
    subject: &Subject,
    snapshot: &mut Snapshot,
    resource: Option<&ApiResource>,
) -> Result<(), Error> {
    for (node, pod) in pods(clusters, subject, snapshot).await? {
        snapshot.users.push(pod);
        add(snapshot, &node, true);
    }
    let hinted = found(&snapshot.guest_claim).map(vms_in_condition).unwrap_or_default();
    hinted.iter().for_each(|vm| add(snapshot, vm, false));
    if let (true, Some(cluster)) = (snapshot.placements.is_empty(), &clusters.management) {
        for vm in search(cluster, resource, snapshot).await? {
            add(snapshot, &vm, false);
        }
    }
    Ok(())
}

/// Adds a node once.
fn add(snapshot: &mut Snapshot, node: &str, is_used: bool) {
    if node.is_empty() {
        return;
    }
    match snapshot.placements.iter_mut().find(|known| known.node_name == node) {
        Some(known) => known.is_used |= is_used,
        None => {
            snapshot.placements.push(Placement { node_name: node.to_owned(), is_used, ..Default::default() });
        }
    }
}

/// Node and name of each pod that uses the claim and has not ended: the subject, or those of the claim's namespace.
async fn pods(
    clusters: &Clusters,
    subject: &Subject,
    snapshot: &Snapshot,
) -> Result<Vec<(String, String)>, Error> {
    if subject.kind == Kind::Pod {
        return Ok(found(&snapshot.pod).map(scheduled).into_iter().collect());
    }
    let (Some(guest), Some(claim)) = (&clusters.guest, &snapshot.guest_claim) else { return Ok(Vec::new()) };
    let namespace = claim.namespace.as_deref().unwrap_or(&guest.namespace);
    let api: kube::Api<Pod> = kube::Api::namespaced(guest.client.clone(), namespace);
    let running = ListParams::default().fields("status.phase!=Succeeded,status.phase!=Failed");
    match api.list(&running).await {
        Ok(list) => {
            Ok(list.iter().filter(|pod| claims_of(pod).contains(&claim.name)).map(scheduled).collect())
        }
        Err(error) if read::is_answer(&error) => Ok(Vec::new()),
        Err(error) => Err(Error::request("guest", "pods", &error)),
    }
}

/// Node and name of a pod; the node is empty before it is scheduled.
fn scheduled(pod: &Pod) -> (String, String) {
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default();
    (node, pod.name_any())
}

/// Names after "VirtualMachine" in the condition that gc-csi writes.
fn vms_in_condition(claim: &PersistentVolumeClaim) -> BTreeSet<String> {
    let conditions = claim.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let messages =
        conditions.filter(|one| one.type_ == CONDITION_ATTACHED).filter_map(|one| one.message.as_deref());
    let mut names = BTreeSet::new();
    for message in messages {
        for after in message.split("VirtualMachine ").skip(1) {
            let list = after.split([':', ';', '(', '"']).next().unwrap_or_default();
            let words = list.split(", ").filter_map(|part| part.split_whitespace().next());
            names.extend(words.map(|word| word.trim_end_matches([',', '.']).to_owned()));
        }
    }
    names
}

/// VMs that have the disk of the claim, for a claim whose node no pod and no condition names.
async fn search(
    cluster: &Cluster,
    resource: Option<&ApiResource>,
    snapshot: &mut Snapshot,
) -> Result<Vec<String>, Error> {
    let Some(claim) = snapshot.management_claim.as_ref().map(|claim| claim.name.clone()) else {
        return Ok(Vec::new());
    };
    match (owners(cluster, &claim).await?, resource) {
        (Some(vms), _) if !vms.is_empty() || !needs_entries(snapshot) => Ok(vms),
        (_, Some(resource)) => with_entry(cluster, resource, &claim, snapshot).await,
        (vms, None) => Ok(vms.unwrap_or_default()),
    }
}

/// VMs that own a VolumeAttachment of the claim; None if the API server cannot select these, because it has an earlier
/// definition of them, or refuses to list them.
async fn owners(cluster: &Cluster, claim: &str) -> Result<Option<Vec<String>>, Error> {
    let selected = ListParams::default().fields(&format!("spec.volumeName={claim}"));
    match cluster.namespaced::<VolumeAttachment>().list(&selected).await {
        Ok(list) => Ok(Some(list.iter().filter_map(vm_of).map(str::to_owned).collect())),
        Err(error) if read::is_answer(&error) => Ok(None),
        Err(error) => Err(Error::request("management", "VolumeAttachments", &error)),
    }
}

/// The VM that owns a VolumeAttachment.
pub fn vm_of(attachment: &VolumeAttachment) -> Option<&str> {
    let owner = attachment.owner_references().iter().find(|owner| owner.kind == "VirtualMachine");
    owner.map(|owner| owner.name.as_str())
}

/// Whether an entry without a VolumeAttachment matters: the guest would show an attach in progress, but is not connected, or the
/// claim stays although it was deleted.
fn needs_entries(snapshot: &Snapshot) -> bool {
    let claim = found(&snapshot.management_claim);
    !snapshot.sees_guest || claim.is_some_and(|claim| claim.metadata.deletion_timestamp.is_some())
}

/// VMs with an entry for the claim, among the first ones. They need not have a label of their guest.
async fn with_entry(
    cluster: &Cluster,
    resource: &ApiResource,
    claim: &str,
    snapshot: &mut Snapshot,
) -> Result<Vec<String>, Error> {
    match read::vms(cluster, resource).list(&ListParams::default().limit(MOST_VMS)).await {
        Ok(list) => {
            if list.metadata.continue_.as_ref().is_some_and(|token| !token.is_empty()) {
                snapshot.vms_unknown =
                    Some(format!("only {MOST_VMS} of them were searched for an entry of the claim"));
            }
            Ok(list.iter().filter(|vm| has_disk(vm, claim)).map(ResourceExt::name_any).collect())
        }
        Err(error) if read::is_answer(&error) => Ok(Vec::new()),
        Err(error) => Err(Error::request("management", "VirtualMachines", &error)),
    }
}

/// Whether a VM has or had the disk of a claim.
pub fn has_disk(vm: &VirtualMachine, claim: &str) -> bool {
    let entry = names::volume_entry(claim);
    let mut requested = vm.spec.volumes.iter().filter_map(|entry| entry.persistent_volume_claim.as_ref());
    let mut shown = vm.status.iter().flat_map(|status| &status.volumes);
    requested.any(|source| source.claim_name.as_str() == claim)
        || shown.any(|disk| names::entry_candidates(&disk.name).any(|name| name == entry))
}

/// Reads the objects of one node.
async fn fill(
    clusters: &Clusters,
    resource: Option<&ApiResource>,
    claim: Option<&str>,
    driver: &str,
    mut placement: Placement,
) -> Result<Placement, Error> {
    if let Some(guest) = &clusters.guest {
        fill_guest(guest, claim, driver, &mut placement).await?;
    }
    if placement.vm_name.is_empty() {
        placement.vm_name = node_id(&placement, driver).unwrap_or_else(|| placement.node_name.clone());
    }
    match (&clusters.management, claim) {
        (Some(cluster), Some(claim)) => fill_management(cluster, resource, claim, &mut placement).await?,
        (None, _) => placement.vm = Some(unseen(None, &placement.vm_name)),
        (Some(_), None) => {}
    }
    Ok(placement)
}

async fn fill_guest(
    guest: &Cluster,
    claim: Option<&str>,
    driver: &str,
    placement: &mut Placement,
) -> Result<(), Error> {
    let name = placement.node_name.clone();
    let attachment = async {
        match (&placement.guest_attachment, claim) {
            (None, Some(handle)) => {
                get(guest, guest.all(), None, &attachment_name(handle, driver, &name)).await.map(Some)
            }
            (known, _) => Ok(known.clone()),
        }
    };
    let (node, csi_node, attachment) = futures::try_join!(
        get(guest, guest.all(), None, &name),
        get(guest, guest.all(), None, &name),
        attachment
    )?;
    (placement.node, placement.csi_node, placement.guest_attachment) =
        (Some(node), Some(csi_node), attachment);
    Ok(())
}

/// Name that Kubernetes gives to the VolumeAttachment of a handle on a node.
fn attachment_name(handle: &str, driver: &str, node: &str) -> String {
    let mut hasher = Sha256::new();
    [handle, driver, node].iter().for_each(|part| hasher.update(part));
    format!("csi-{:x}", hasher.finalize())
}

/// Node ID that the driver registered.
fn node_id(placement: &Placement, driver: &str) -> Option<String> {
    let csi_node: &CSINode = found(&placement.csi_node)?;
    csi_node.spec.drivers.iter().find(|one| one.name == driver).map(|one| one.node_id.clone())
}

async fn fill_management(
    cluster: &Cluster,
    resource: Option<&ApiResource>,
    claim: &str,
    placement: &mut Placement,
) -> Result<(), Error> {
    let namespace = Some(cluster.namespace.as_str());
    let vm = async {
        match resource {
            Some(resource) => {
                get(cluster, read::vms(cluster, resource), namespace, &placement.vm_name).await.map(Some)
            }
            None => Ok(None),
        }
    };
    let attachment = async {
        let name = names::volume_attachment(&(&placement.vm_name).into(), &claim.into());
        match &placement.attachment {
            Some(known) => Ok(known.clone()),
            None => get(cluster, cluster.namespaced(), namespace, &name).await,
        }
    };
    let (vm, attachment): (Option<Object<VirtualMachine>>, _) = futures::try_join!(vm, attachment)?;
    (placement.vm, placement.attachment) = (vm, Some(attachment));
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_condition_names_the_vms() {
        let named = |message: &str| {
            let claim = json!({"metadata": {"name": "a"}, "status": {"conditions": [
                {"type": CONDITION_ATTACHED, "status": "True", "message": message}]}});
            let claim: PersistentVolumeClaim = serde_json::from_value(claim).unwrap();
            vms_in_condition(&claim).into_iter().collect::<Vec<_>>()
        };
        assert_eq!(named("attached to VirtualMachine vm-1, vm-2"), ["vm-1", "vm-2"]);
        assert_eq!(
            named(
                "VirtualMachine vm-2: attach failed: VolumeInUse: it is attached to VirtualMachine vm-1 \
                 (uuid)"
            ),
            ["vm-1", "vm-2"]
        );
        assert!(named("not attached to any VirtualMachine").is_empty());
    }

    #[test]
    fn entries_without_a_volume_attachment_matter_without_the_guest_and_for_a_deleted_claim() {
        let with_claim = |sees_guest, metadata: serde_json::Value| {
            let claim = serde_json::from_value(json!({"metadata": metadata})).unwrap();
            let lookup = super::super::snapshot::Lookup::Found(Box::new(claim));
            let claim = Object { namespace: None, name: "c".to_owned(), lookup };
            needs_entries(&Snapshot { sees_guest, management_claim: Some(claim), ..Default::default() })
        };
        assert!(!with_claim(true, json!({})));
        assert!(with_claim(false, json!({})));
        assert!(with_claim(true, json!({"deletionTimestamp": "2026-01-01T00:00:00Z"})));
    }

    #[test]
    fn an_attachment_has_the_name_that_kubernetes_computes() {
        let name = attachment_name("handle", "driver", "node");
        assert_eq!(name.len(), 4 + 64);
        assert_ne!(name, attachment_name("handle", "driver", "other"));
    }
}
