//! Objects of the guest cluster: from the subject to its claim, class and PersistentVolume.

use std::collections::BTreeMap;

use crds::names;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttachment};

use super::read::{get, unseen};
use super::snapshot::{Object, Snapshot, found};
use crate::clusters::{Cluster, Clusters};
use crate::error::Error;
use crate::subject::{Kind, Subject};

/// Reads the subject in the guest, and from there its claim and volume. Returns false if the guest does not have it, and
/// the management cluster may.
pub async fn start(clusters: &Clusters, subject: &Subject, snapshot: &mut Snapshot) -> Result<bool, Error> {
    let Some(guest) = &clusters.guest else { return without_guest(subject) };
    match subject.kind {
        Kind::Pod => from_pod(guest, &subject.name, snapshot).await?,
        Kind::Claim => from_claim(guest, &subject.name, snapshot).await?,
        Kind::Volume => from_volume(guest, &subject.name, snapshot).await?,
        Kind::Attachment => from_attachment(guest, &subject.name, snapshot).await?,
    }
    let is_known =
        snapshot.pod.is_some() || snapshot.guest_claim.is_some() || snapshot.guest_volume.is_some();
    if !is_known && clusters.management.is_none() {
        let place = format!(" in the guest cluster (namespace {})", guest.namespace);
        return Err(Error::NoSubject(subject.to_string(), place));
    }
    Ok(is_known)
}

fn without_guest(subject: &Subject) -> Result<bool, Error> {
    match subject.kind {
        Kind::Pod => Err(Error::NotConnected("trace pod/NAME", "guest")),
        _ => Ok(false),
    }
}

async fn from_pod(guest: &Cluster, name: &str, snapshot: &mut Snapshot) -> Result<(), Error> {
    let pod: Object<Pod> = get(guest, guest.namespaced(), Some(&guest.namespace), name).await?;
    if pod.is_missing() {
        let place = format!(" in the guest cluster (namespace {})", guest.namespace);
        return Err(Error::NoSubject(format!("pod/{name}"), place));
    }
    let mut claims = pod.found().map(claims_of).unwrap_or_default().into_iter();
    let claim = claims.next();
    snapshot.other_claims = claims.collect();
    snapshot.pod_without_claim = claim.is_none();
    snapshot.pod = Some(pod);
    match claim {
        Some(claim) => read_claim(guest, &claim, snapshot).await,
        None => Ok(()),
    }
}

/// Names of the claims that a pod uses, generic ephemeral volumes included.
pub fn claims_of(pod: &Pod) -> Vec<String> {
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let pod_name = pod.metadata.name.as_deref().unwrap_or_default();
    volumes
        .filter_map(|volume| match (&volume.persistent_volume_claim, &volume.ephemeral) {
            (Some(claim), _) => Some(claim.claim_name.clone()),
            (None, Some(_)) => Some(format!("{pod_name}-{}", volume.name)),
            (None, None) => None,
        })
        .collect()
}

async fn from_claim(guest: &Cluster, name: &str, snapshot: &mut Snapshot) -> Result<(), Error> {
    read_claim(guest, name, snapshot).await?;
    if snapshot.guest_claim.as_ref().is_some_and(Object::is_missing) {
        snapshot.guest_claim = None;
    }
    Ok(())
}

/// Reads a claim with its volume, or else with its class.
async fn read_claim(guest: &Cluster, name: &str, snapshot: &mut Snapshot) -> Result<(), Error> {
    let claim: Object<PersistentVolumeClaim> =
        get(guest, guest.namespaced(), Some(&guest.namespace), name).await?;
    let spec = claim.found().and_then(|claim| claim.spec.as_ref());
    let volume = spec.and_then(|spec| spec.volume_name.clone()).filter(|name| !name.is_empty());
    let class = spec.and_then(|spec| spec.storage_class_name.clone()).filter(|name| !name.is_empty());
    snapshot.guest_claim = Some(claim);
    match (volume, class) {
        (Some(volume), _) => snapshot.guest_volume = Some(get(guest, guest.all(), None, &volume).await?),
        (None, Some(class)) => {
            snapshot.guest_class = Some(get::<StorageClass>(guest, guest.all(), None, &class).await?);
        }
        (None, None) => {}
    }
    Ok(())
}

async fn from_volume(guest: &Cluster, name: &str, snapshot: &mut Snapshot) -> Result<(), Error> {
    let volume: Object<PersistentVolume> = get(guest, guest.all(), None, name).await?;
    if volume.is_missing() {
        return Ok(());
    }
    snapshot.guest_claim = claim_of(guest, volume.found()).await?;
    snapshot.guest_volume = Some(volume);
    Ok(())
}

/// The claim that a volume is bound to.
async fn claim_of(
    guest: &Cluster,
    volume: Option<&PersistentVolume>,
) -> Result<Option<Object<PersistentVolumeClaim>>, Error> {
    let reference = volume.and_then(|volume| volume.spec.as_ref()?.claim_ref.clone()).unwrap_or_default();
    let (Some(namespace), Some(name)) = (reference.namespace, reference.name) else { return Ok(None) };
    let api = kube::Api::namespaced(guest.client.clone(), &namespace);
    get(guest, api, Some(&namespace), &name).await.map(Some)
}

async fn from_attachment(guest: &Cluster, name: &str, snapshot: &mut Snapshot) -> Result<(), Error> {
    let attachment: Object<VolumeAttachment> = get(guest, guest.all(), None, name).await?;
    let Some(found) = attachment.found() else { return Ok(()) };
    let node = found.spec.node_name.clone();
    let volume = found.spec.source.persistent_volume_name.clone().unwrap_or_default();
    snapshot.placements.push(super::snapshot::Placement {
        node_name: node,
        guest_attachment: Some(attachment),
        ..Default::default()
    });
    from_volume(guest, &volume, snapshot).await?;
    // A deleted volume whose attachment is left.
    if snapshot.guest_volume.is_none() {
        snapshot.guest_volume =
            Some(Object { namespace: None, name: volume, lookup: super::snapshot::Lookup::Missing });
    }
    Ok(())
}

/// From a management claim up to the guest's objects that its annotations name.
pub async fn follow_up(clusters: &Clusters, snapshot: &mut Snapshot) -> Result<(), Error> {
    let Some(claim) = found(&snapshot.management_claim) else { return Ok(()) };
    let annotations = claim.metadata.annotations.clone().unwrap_or_default();
    let volume = annotations.get(names::ANNOTATION_GUEST_PV).cloned().or_else(|| consumer(&annotations));
    let named = annotations
        .get(names::ANNOTATION_GUEST_NAMESPACE)
        .cloned()
        .zip(annotations.get(names::ANNOTATION_GUEST_PVC).cloned());
    let Some(guest) = &clusters.guest else {
        snapshot.guest_claim = named.map(|(namespace, name)| unseen(Some(&namespace), &name));
        snapshot.guest_volume = volume.map(|name| unseen(None, &name));
        return Ok(());
    };
    if let Some((namespace, name)) = named {
        let api = kube::Api::namespaced(guest.client.clone(), &namespace);
        snapshot.guest_claim = Some(get(guest, api, Some(&namespace), &name).await?);
    }
    if let Some(name) = volume {
        snapshot.guest_volume = Some(get(guest, guest.all(), None, &name).await?);
    }
    Ok(())
}

/// PersistentVolume that the only consumer of a shared claim recorded.
fn consumer(annotations: &BTreeMap<String, String>) -> Option<String> {
    let mut records =
        annotations.iter().filter(|(key, _)| key.starts_with(names::ANNOTATION_CONSUMER_PREFIX));
    let (Some((_, record)), None) = (records.next(), records.next()) else { return None };
    let record: serde_json::Value = serde_json::from_str(record).ok()?;
    record["pv"].as_str().map(str::to_owned)
}
