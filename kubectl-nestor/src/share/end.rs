//! `unshare`: removes the claim of a sibling and then the sibling. It also works after the owner's claim was deleted, because the
//! volume stays until the last share ends.

use std::time::Duration;

use crds::VolumeAttachment;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::api::{DeleteParams, ListParams, Preconditions};
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, ResourceExt};
use kube_kit::client::chain;
use kube_kit::informer::Key;

use super::guests::{self, Guest};
use super::objects::{claim_of, sibling_of};
use super::{MANAGEMENT, labels, named, read_claim, read_volume};
use crate::cli::UnshareArgs;
use crate::clusters::{Cluster, Clusters};
use crate::error::Error;
use crate::render::print;

/// Time limit for the deletion of the claim, which mgmt-csi confirms. Less than the time limit for a response, for the watch.
const PATIENCE: Duration = Duration::from_secs(20);

/// Runs `unshare`.
pub async fn run(clusters: &Clusters, args: &UnshareArgs) -> Result<bool, Error> {
    let cluster = clusters.management_for("unshare")?;
    let source = Key::new(cluster.namespace.clone(), args.claim.clone());
    let (guest, sibling) = find(cluster, &source, args).await?;
    let is_ended = match sibling {
        Some(sibling) => end(cluster, &guest, &sibling).await.map(|()| true)?,
        None => remove_rest(cluster, &source, &guest).await?,
    };
    let text = match is_ended {
        true => format!(
            "The volume of PersistentVolumeClaim {source} is no longer shared with guest {}.\n",
            guest.id
        ),
        false => {
            format!("The volume of PersistentVolumeClaim {source} is not shared with guest {}.\n", guest.id)
        }
    };
    print(&text).map(|()| true)
}

/// The guest, and its sibling of the claim. A guest that no longer exists is found by its ID alone.
async fn find(
    cluster: &Cluster,
    source: &Key,
    args: &UnshareArgs,
) -> Result<(Guest, Option<PersistentVolume>), Error> {
    if let Some(sibling) = read_sibling(cluster, source, &args.with).await? {
        let namespace = claim_of(&sibling).map(|(claim, _)| claim.namespace).unwrap_or_default();
        return Ok((Guest { id: args.with.clone(), namespace }, Some(sibling)));
    }
    let guest = guests::find(cluster, &args.with, args.to_namespace.as_deref()).await?;
    let sibling = read_sibling(cluster, source, &guest.id).await?;
    Ok((guest, sibling))
}

async fn read_sibling(
    cluster: &Cluster,
    source: &Key,
    guest: &str,
) -> Result<Option<PersistentVolume>, Error> {
    let name = crds::names::sibling(&source.namespace, &source.name, guest);
    Ok(read_volume(cluster, &name).await?.filter(|volume| sibling_of(volume).is_some()))
}

/// Deletes the claim first, and the sibling when the claim is gone: a claim without a PersistentVolume would not be held until its
/// disk is detached.
async fn end(cluster: &Cluster, guest: &Guest, sibling: &PersistentVolume) -> Result<(), Error> {
    if let Some((claim, _)) = claim_of(sibling) {
        delete_claim(cluster, guest, &claim, &sibling.name_any()).await?;
    }
    let name = sibling.name_any();
    match cluster.all::<PersistentVolume>().delete(&name, &only(sibling.metadata.uid.clone())).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
        Err(error) => Err(Error::change("delete", named::<PersistentVolume>(&name), &error)),
    }
}

/// What is left of a share without a sibling: a claim that lost it, or the labels of a share in one namespace.
async fn remove_rest(cluster: &Cluster, source: &Key, guest: &Guest) -> Result<bool, Error> {
    if guest.namespace == source.namespace {
        return labels::unshare(cluster, source, guest).await;
    }
    let name = crds::names::sibling(&source.namespace, &source.name, &guest.id);
    let claim = Key::new(guest.namespace.clone(), name.clone());
    delete_claim(cluster, guest, &claim, &name).await
}

/// Deletes the claim of a sibling and waits until it is gone; false if it does not exist. Refuses while its disk is attached.
async fn delete_claim(cluster: &Cluster, guest: &Guest, key: &Key, volume: &str) -> Result<bool, Error> {
    let claim = read_claim(cluster, key).await?;
    let is_bound = |claim: &PersistentVolumeClaim| {
        claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()) == Some(volume)
    };
    let Some(claim) = claim.filter(is_bound) else { return Ok(false) };
    refuse_if_attached(cluster, guest, key).await?;
    let claims = cluster.claims_of(&key.namespace);
    match claims.delete(&key.name, &only(claim.metadata.uid.clone())).await {
        Ok(_) => {}
        Err(kube::Error::Api(status)) if status.is_not_found() => return Ok(true),
        Err(error) => return Err(Error::change("delete", named::<PersistentVolumeClaim>(key), &error)),
    }
    await_deletion(claims, key, &claim.uid().unwrap_or_default()).await.map(|()| true)
}

async fn await_deletion(claims: Api<PersistentVolumeClaim>, key: &Key, uid: &str) -> Result<(), Error> {
    let gone = await_condition(claims, &key.name, conditions::is_deleted(uid));
    match tokio::time::timeout(PATIENCE, gone).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(Error::Request {
            cluster: MANAGEMENT,
            what: named::<PersistentVolumeClaim>(key),
            reason: chain(&error),
        }),
        Err(_) => Err(Error::Refused(format!(
            "PersistentVolumeClaim {key} is being deleted, but its disk may still be attached: see its events and whether mgmt-csi \
             runs, then repeat the command"
        ))),
    }
}

async fn refuse_if_attached(cluster: &Cluster, guest: &Guest, claim: &Key) -> Result<(), Error> {
    let api: Api<VolumeAttachment> = Api::namespaced(cluster.client.clone(), &claim.namespace);
    let of_claim = ListParams::default().fields(&format!("spec.volumeName={}", claim.name));
    let found = api.list(&of_claim).await;
    let found = found.map_err(|error| {
        Error::request(MANAGEMENT, format!("VolumeAttachments of PersistentVolumeClaim {claim}"), &error)
    })?;
    let is_attached = |one: &&VolumeAttachment| one.status.as_ref().is_some_and(|status| status.attached);
    let Some(attachment) = found.items.iter().find(is_attached) else { return Ok(()) };
    let vm = attachment.metadata.owner_references.iter().flatten().map(|owner| owner.name.as_str()).next();
    Err(Error::Refused(format!(
        "PersistentVolumeClaim {claim} is attached to VirtualMachine {}: delete the pods of guest {} that use it, then repeat the \
         command",
        vm.unwrap_or(&attachment.spec.node_uuid),
        guest.id
    )))
}

/// Deletes only the object with this UID.
fn only(uid: Option<String>) -> DeleteParams {
    DeleteParams::default().preconditions(Preconditions { uid, resource_version: None })
}
