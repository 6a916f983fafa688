//! Instant back end: replaces csi-provisioner, mgmt-csi and the storage infra. It creates a bound PersistentVolume as soon
//! as a management claim exists, removes mgmt-csi's finalizer from a deleted claim once it is the last one, and deletes the
//! volume as soon as it is released. This measures the guest tier alone, to compare it with drivers that have no storage tier below them.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use clap::ValueEnum;
use crds::names;
use futures::{StreamExt, TryStreamExt, pin_mut};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Client, ResourceExt};
use lab::Lab;
use serde_json::json;

/// Stopped components: mgmt-csi would report the volumes as missing, and its csi-provisioner would create them.
const STOPPED: [&str; 2] = ["mgmt-provisioner", "mgmt-csi"];
/// Label of the created volumes.
const LABEL: (&str, &str) = ("bench", "instant");

/// The component that creates the volumes of management claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// csi-provisioner, mgmt-csi and the storage infra.
    Infra,
    /// A helper that creates them at once.
    Instant,
}

/// Runs `work` with the instant back end.
pub(crate) async fn in_place_of_the_infra<T>(lab: &Lab, work: impl Future<Output = Result<T>>) -> Result<T> {
    let client = lab.management().await?;
    for component in STOPPED {
        lab.stop(component).await?;
    }
    let outcome = tokio::select! {
        outcome = work => outcome,
        outcome = async { tokio::try_join!(make(&client), let_go(&client), remove(&client)) } => {
            outcome.and_then(|_| Err(anyhow::anyhow!("it ended unexpectedly"))).context("the instant back end")
        }
    };
    // Restarted with its sidecars, which exited with it.
    lab.start("mgmt-csi").await?;
    outcome
}

async fn make(client: &Client) -> Result<()> {
    let claims: Api<PersistentVolumeClaim> = Api::all(client.clone());
    let volumes: Api<PersistentVolume> = Api::all(client.clone());
    let changes = watcher(claims, watcher::Config::default()).default_backoff().applied_objects();
    let wanted = changes.try_filter_map(async |claim| Ok(volume(&claim)));
    wanted
        .map_err(anyhow::Error::from)
        .try_for_each_concurrent(100, |volume| {
            let volumes = &volumes;
            async move {
                match volumes.create(&PostParams::default(), &volume).await {
                    // A claim is processed again until it is bound.
                    Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
                    other => other.map(drop).context("cannot create a volume"),
                }
            }
        })
        .await
}

/// The volume for an unbound claim.
fn volume(claim: &PersistentVolumeClaim) -> Option<PersistentVolume> {
    let spec = claim.spec.as_ref()?;
    let provisioner = claim.annotations().get("volume.kubernetes.io/storage-provisioner")?;
    if spec.volume_name.is_some()
        || provisioner != names::MANAGEMENT_DRIVER
        || claim.metadata.deletion_timestamp.is_some()
    {
        return None;
    }
    let (uid, size) = (claim.uid()?, spec.resources.as_ref()?.requests.as_ref()?.get("storage")?);
    let name = format!("pvc-{uid}");
    serde_json::from_value(json!({
        "metadata": {
            "name": name, "labels": BTreeMap::from([LABEL]),
            "annotations": {"pv.kubernetes.io/provisioned-by": names::MANAGEMENT_DRIVER},
        },
        "spec": {
            "capacity": {"storage": size}, "accessModes": spec.access_modes, "volumeMode": spec.volume_mode,
            "storageClassName": spec.storage_class_name, "persistentVolumeReclaimPolicy": "Delete",
            "csi": {"driver": names::MANAGEMENT_DRIVER, "volumeHandle": name},
            "claimRef": {
                "apiVersion": "v1", "kind": "PersistentVolumeClaim", "uid": uid,
                "namespace": claim.namespace(), "name": claim.name_any(),
            },
        },
    }))
    .ok()
}

/// Removes mgmt-csi's finalizer from deleted claims that have no other, like mgmt-csi. None is attached here.
async fn let_go(client: &Client) -> Result<()> {
    let claims: Api<PersistentVolumeClaim> = Api::all(client.clone());
    let changes = watcher(claims, watcher::Config::default()).default_backoff().applied_objects();
    let held = changes.try_filter_map(async |claim| Ok(is_held(&claim).then_some(claim)));
    held.map_err(anyhow::Error::from)
        .try_for_each_concurrent(100, |claim| async move {
            let own: Api<PersistentVolumeClaim> =
                Api::namespaced(client.clone(), &claim.namespace().unwrap_or_default());
            let patch = Patch::Merge(json!({"metadata": {"uid": claim.uid(), "finalizers": null}}));
            match own.patch_metadata(&claim.name_any(), &PatchParams::default(), &patch).await {
                // Gone, or replaced.
                Err(kube::Error::Api(status)) if [404, 409].contains(&status.code) => Ok(()),
                other => other.map(drop).context("cannot remove a finalizer"),
            }
        })
        .await
}

fn is_held(claim: &PersistentVolumeClaim) -> bool {
    claim.metadata.deletion_timestamp.is_some() && claim.finalizers() == [names::FINALIZER_ATTACHED]
}

async fn remove(client: &Client) -> Result<()> {
    let volumes: Api<PersistentVolume> = Api::all(client.clone());
    let own = watcher::Config::default().labels(&format!("{}={}", LABEL.0, LABEL.1));
    let changes = watcher(volumes.clone(), own).default_backoff().applied_objects();
    pin_mut!(changes);
    while let Some(volume) = changes.next().await {
        let volume = volume?;
        let phase = volume.status.as_ref().and_then(|status| status.phase.as_deref());
        if phase == Some("Released") && volume.metadata.deletion_timestamp.is_none() {
            match volumes.delete(&volume.name_any(), &DeleteParams::default()).await {
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                other => other.map(drop).context("cannot remove a volume")?,
            }
        }
    }
    Ok(())
}
