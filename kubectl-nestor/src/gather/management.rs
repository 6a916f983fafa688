//! Objects of the management cluster: claim, class and PersistentVolume.

use crds::{VolumeAttachment, names};
use k8s_openapi::api::core::v1::{Namespace, PersistentVolume, PersistentVolumeClaim};
use kube::ResourceExt;

use super::placements::vm_of;
use super::read::{get, unseen};
use super::snapshot::{Lookup, Object, Placement, Snapshot, found};
use crate::clusters::{Cluster, Clusters};
use crate::error::Error;
use crate::subject::{Kind, Subject};

/// Reads the subject in the management cluster: a claim, PersistentVolume or VolumeAttachment there.
pub async fn start(clusters: &Clusters, subject: &Subject, snapshot: &mut Snapshot) -> Result<(), Error> {
    let cluster = clusters.management_for("trace")?;
    let claim = match subject.kind {
        Kind::Claim | Kind::Pod => Some(subject.name.clone()),
        Kind::Volume => claim_of_volume(cluster, &subject.name).await?,
        Kind::Attachment => claim_of_attachment(cluster, &subject.name, snapshot).await?,
    };
    let claim = match claim {
        Some(name) => Some(get_claim(cluster, &name).await?),
        None => None,
    };
    // A VolumeAttachment whose claim is gone is a subject of its own.
    let is_known = claim.as_ref().is_some_and(|claim| !claim.is_missing()) || !snapshot.placements.is_empty();
    if !is_known {
        let place = format!(" in any connected cluster (management namespace {})", cluster.namespace);
        return Err(Error::NoSubject(subject.to_string(), place));
    }
    snapshot.management_claim = claim;
    Ok(())
}

async fn get_claim(cluster: &Cluster, name: &str) -> Result<Object<PersistentVolumeClaim>, Error> {
    get(cluster, cluster.namespaced(), Some(&cluster.namespace), name).await
}

async fn claim_of_volume(cluster: &Cluster, name: &str) -> Result<Option<String>, Error> {
    let volume: Object<PersistentVolume> = get(cluster, cluster.all(), None, name).await?;
    let reference = volume.found().and_then(|volume| volume.spec.as_ref()?.claim_ref.clone());
    Ok(reference.and_then(|reference| reference.name))
}

/// The claim of a VolumeAttachment, which becomes a placement on the VM that owns it.
async fn claim_of_attachment(
    cluster: &Cluster,
    name: &str,
    snapshot: &mut Snapshot,
) -> Result<Option<String>, Error> {
    let attachment: Object<VolumeAttachment> =
        get(cluster, cluster.namespaced(), Some(&cluster.namespace), name).await?;
    let Some(found) = attachment.found() else { return Ok(None) };
    let claim = found.spec.volume_name.clone();
    let vm = vm_of(found).unwrap_or_default().to_owned();
    snapshot.placements.push(Placement {
        node_name: vm.clone(),
        vm_name: vm,
        attachment: Some(attachment),
        ..Default::default()
    });
    Ok(Some(claim.into()))
}

/// Reads the management claim of the guest's objects, with its class or PersistentVolume.
pub async fn follow_down(clusters: &Clusters, snapshot: &mut Snapshot) -> Result<(), Error> {
    if snapshot.management_claim.is_none() {
        snapshot.management_claim = claim(clusters, snapshot).await?;
    }
    let (Some(cluster), Some(claim)) = (&clusters.management, found(&snapshot.management_claim)) else {
        return Ok(());
    };
    let spec = claim.spec.clone().unwrap_or_default();
    if let Some(volume) = spec.volume_name.filter(|name| !name.is_empty()) {
        snapshot.management_volume = Some(get(cluster, cluster.all(), None, &volume).await?);
    } else if let Some(class) = spec.storage_class_name {
        snapshot.management_class = Some(get(cluster, cluster.all(), None, &class).await?);
    }
    Ok(())
}

/// The management claim: named by the volume handle, or else computed from the UID of the pending guest claim.
async fn claim(
    clusters: &Clusters,
    snapshot: &mut Snapshot,
) -> Result<Option<Object<PersistentVolumeClaim>>, Error> {
    let handle = found(&snapshot.guest_volume)
        .and_then(|volume| volume.spec.as_ref()?.csi.as_ref())
        .map(|csi| csi.volume_handle.clone());
    let name = match handle {
        Some(handle) => Some(handle),
        None => computed(clusters, snapshot).await?,
    };
    let Some(name) = name else { return Ok(None) };
    match &clusters.management {
        Some(cluster) => get_claim(cluster, &name).await.map(Some),
        None => Ok(Some(unseen(None, &name))),
    }
}

/// Name of the management claim that gc-csi creates for a guest claim that is not bound.
async fn computed(clusters: &Clusters, snapshot: &mut Snapshot) -> Result<Option<String>, Error> {
    let is_ours = found(&snapshot.guest_class).is_some_and(|class| class.provisioner == names::GUEST_DRIVER);
    let uid = found(&snapshot.guest_claim).and_then(ResourceExt::uid);
    let (Some(uid), Some(guest), true) = (uid, &clusters.guest, is_ours) else { return Ok(None) };
    let Some(id) = cluster_id(clusters, guest).await? else { return Ok(None) };
    snapshot.computed_name = true;
    Ok(Some(names::management_pvc(&clusters.volume_prefix, &id, &format!("pvc-{uid}"))))
}

/// Cluster ID of the guest: configured, or else the UID of its namespace kube-system.
pub async fn cluster_id(clusters: &Clusters, guest: &Cluster) -> Result<Option<String>, Error> {
    if let Some(id) = &clusters.cluster_id {
        return Ok(Some(id.clone()));
    }
    let namespace: Object<Namespace> = get(guest, guest.all(), None, "kube-system").await?;
    Ok(match namespace.lookup {
        Lookup::Found(namespace) => namespace.uid(),
        _ => None,
    })
}
