//! A share of guests that have one namespace: labels of the PersistentVolume and of its claim, because both guests can use the
//! same claim.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use kube_kit::informer::Key;
use serde_json::{Value, json};

use super::guests::Guest;
use super::objects::{Share, guest_volume, share_label};
use super::output::show;
use super::{named, read_claim, read_volume};
use crate::cli::ShareArgs;
use crate::clusters::Cluster;
use crate::error::Error;
use crate::render::{manifest, print};

/// Labels the volume, and prints the guest's PersistentVolume.
pub(super) async fn share(
    cluster: &Cluster,
    source: &Key,
    share: &Share,
    args: &ShareArgs,
) -> Result<bool, Error> {
    let (name, labels) = (share.owner.name_any(), json!(share.label()));
    if args.name.is_some() {
        let why = "both guests use the same claim, because they have one namespace";
        return Err(Error::Refused(format!(
            "--name is not possible for PersistentVolumeClaim {source}: {why}"
        )));
    }
    if args.dry_run {
        let metadata = json!({"name": name, "labels": labels});
        let volume = json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": metadata});
        return print(&manifest(args.output, &volume)?).map(|()| true);
    }
    write(cluster, source, &name, &labels).await?;
    let head = format!(
        "The volume of PersistentVolumeClaim {source} is shared with guest {} ({}). Both guests have one namespace, where each can \
         read the claims of the other.\n",
        share.guest.id,
        share.mode()
    );
    show(args.output, &head, &guest_volume(&source.name, &share.owner, share.is_read_only)).map(|()| true)
}

/// Removes the labels; false if there are none.
pub(super) async fn unshare(cluster: &Cluster, source: &Key, guest: &Guest) -> Result<bool, Error> {
    let Some(claim) = read_claim(cluster, source).await? else { return Ok(false) };
    let name = claim.spec.as_ref().and_then(|spec| spec.volume_name.clone());
    let Some(name) = name.filter(|name| !name.is_empty()) else { return Ok(false) };
    let Some(volume) = read_volume(cluster, &name).await? else { return Ok(false) };
    let key = share_label(&guest.id);
    let is_shared = volume.labels().contains_key(&key) || claim.labels().contains_key(&key);
    if is_shared {
        write(cluster, source, &name, &json!({key: null})).await?;
    }
    Ok(is_shared)
}

/// Writes labels to the PersistentVolume and then to its claim, which mgmt-csi would not remove there.
async fn write(cluster: &Cluster, claim: &Key, volume: &str, labels: &Value) -> Result<(), Error> {
    let (params, patch) = (PatchParams::default(), Patch::Merge(json!({"metadata": {"labels": labels}})));
    let written = cluster.all::<PersistentVolume>().patch(volume, &params, &patch).await;
    written.map_err(|error| Error::change("label", named::<PersistentVolume>(&volume), &error))?;
    let written = cluster.claims_of(&claim.namespace).patch(&claim.name, &params, &patch).await;
    written.map_err(|error| Error::change("label", named::<PersistentVolumeClaim>(claim), &error))?;
    Ok(())
}
