//! Snapshots in both tiers and in the storage infra.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result};
use crds::names;
use csi::{Status, proto};
use infra_api::Snapshot;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, PostParams};
use kube::{Client, ResourceExt};
use serde_json::{Value, json};
use tonic::Code;

use crate::{PATIENCE, Scenario, eventually, guest, unique};

/// A kind of `snapshot.storage.k8s.io/v1`.
fn kind(kind: &str) -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk("snapshot.storage.k8s.io", "v1", kind))
}

/// VolumeSnapshots in a namespace of a cluster.
fn snapshots(client: &Client, namespace: &str) -> Api<DynamicObject> {
    Api::namespaced_with(client.clone(), namespace, &kind("VolumeSnapshot"))
}

/// VolumeSnapshotContents of a cluster.
fn contents(client: &Client) -> Api<DynamicObject> {
    Api::all_with(client.clone(), &kind("VolumeSnapshotContent"))
}

fn class(name: &str, driver: &str, parameters: &Value) -> Result<DynamicObject> {
    Ok(serde_json::from_value(json!({
        "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotClass",
        "metadata": {"name": name}, "driver": driver, "parameters": parameters, "deletionPolicy": "Delete",
    }))?)
}

/// Spec fields of a claim that restores a snapshot.
pub fn from_snapshot(name: &str) -> Value {
    json!({"dataSource": {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": name}})
}

/// Spec fields of a claim that clones another one.
pub fn from_claim(name: &str) -> Value {
    json!({"dataSource": {"kind": "PersistentVolumeClaim", "name": name}})
}

impl Scenario {
    /// VolumeSnapshots in the scenario's namespace of the guest.
    pub fn guest_snapshots(&self) -> Api<DynamicObject> {
        snapshots(&self.guest, &self.name)
    }

    /// VolumeSnapshotContents of the guest.
    pub fn guest_contents(&self) -> Api<DynamicObject> {
        contents(&self.guest)
    }

    /// VolumeSnapshots in the guest's namespace of the management cluster.
    pub fn snapshots(&self) -> Api<DynamicObject> {
        snapshots(&self.management, &self.namespace)
    }

    /// VolumeSnapshotContents of the management cluster.
    pub fn contents(&self) -> Api<DynamicObject> {
        contents(&self.management)
    }

    /// VolumeSnapshotClasses of the guest.
    pub(crate) fn guest_snapshot_classes(&self) -> Api<DynamicObject> {
        Api::all_with(self.guest.clone(), &kind("VolumeSnapshotClass"))
    }

    /// VolumeSnapshotClasses of the management cluster.
    pub(crate) fn snapshot_classes(&self) -> Api<DynamicObject> {
        Api::all_with(self.management.clone(), &kind("VolumeSnapshotClass"))
    }

    /// Creates a VolumeSnapshotClass for the scenario in the guest, with these parameters.
    pub async fn snapshot_class(&self, parameters: &[(&str, &str)]) -> Result<String> {
        let name = self.new_snapshot_class();
        let parameters: BTreeMap<_, _> = parameters.iter().copied().collect();
        let class = class(&name, names::GUEST_DRIVER, &json!(parameters))?;
        self.guest_snapshot_classes().create(&PostParams::default(), &class).await?;
        Ok(name)
    }

    /// Creates a VolumeSnapshotClass in the management cluster with the name of the scenario's class in the guest.
    pub async fn management_snapshot_class(&self, name: &str) -> Result<()> {
        let class = class(name, names::MANAGEMENT_DRIVER, &json!({}))?;
        self.snapshot_classes().create(&PostParams::default(), &class).await?;
        Ok(())
    }

    /// Creates a snapshot of a management claim with these labels, as the platform team would, and waits until it is
    /// ready.
    pub async fn management_snapshot(&self, labels: &[(&str, &str)], claim: &str) -> Result<String> {
        let name = self.new_management_snapshot(labels, claim).await?;
        self.management_snapshot_ready(&name).await?;
        Ok(name)
    }

    /// The same without the wait.
    pub async fn new_management_snapshot(&self, labels: &[(&str, &str)], claim: &str) -> Result<String> {
        let name = self.own_snapshot(unique(&self.name));
        let labels: BTreeMap<_, _> = labels.iter().copied().collect();
        let source = json!({"persistentVolumeClaimName": claim});
        let snapshot = serde_json::from_value(json!({
            "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot",
            "metadata": {"name": name, "labels": labels},
            "spec": {"volumeSnapshotClassName": "nestor", "source": source},
        }))?;
        self.snapshots().create(&PostParams::default(), &snapshot).await?;
        Ok(name)
    }

    /// Waits until a management snapshot is ready.
    pub async fn management_snapshot_ready(&self, name: &str) -> Result<()> {
        eventually(&format!("management snapshot {name} ready"), PATIENCE, || async {
            let status = self.snapshots().get(name).await?.data["status"].clone();
            Ok(if status["readyToUse"] == true { Ok(()) } else { Err(status.to_string()) })
        })
        .await
    }

    /// Creates a snapshot with a CSI call, repeated while the management tier retries; the snapshot is added to the
    /// cleanup.
    pub async fn csi_snapshot(&self, csi_name: &str, volume: &str) -> Result<proto::Snapshot, Status> {
        self.own_snapshot(names::management_snapshot(&self.cluster_id, csi_name));
        let outcome = eventually(&format!("a final status of snapshot {csi_name}"), PATIENCE, || async {
            match self.driver.snapshot(csi_name, volume, "nestor").await {
                // For example when the claim is not bound yet in snapshot-controller's cache.
                Err(trying) if trying.code() == Code::Unavailable => Ok(Err(trying.to_string())),
                outcome => Ok(Ok(outcome)),
            }
        })
        .await;
        outcome.unwrap_or_else(|error| Err(Status::unavailable(format!("{error:#}"))))
    }

    /// Creates a VolumeSnapshotContent for a management snapshot, and a VolumeSnapshot that is bound to it. Returns the
    /// content's name.
    pub async fn static_snapshot(&self, name: &str, handle: &str, deletion_policy: &str) -> Result<String> {
        let content_name = unique(&self.name);
        let content: DynamicObject = serde_json::from_value(json!({
            "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent",
            "metadata": {"name": content_name, "labels": {"test": self.name}},
            "spec": {
                "driver": names::GUEST_DRIVER, "deletionPolicy": deletion_policy,
                "source": {"snapshotHandle": handle},
                "volumeSnapshotRef": {"name": name, "namespace": self.name},
            },
        }))?;
        self.guest_contents().create(&PostParams::default(), &content).await?;
        self.snapshot_of(name, "nestor", json!({"volumeSnapshotContentName": content_name})).await?;
        Ok(content_name)
    }

    /// Waits until a guest snapshot reports an error that contains all of `texts`; returns the error.
    pub async fn snapshot_failure(&self, name: &str, texts: &[&str]) -> Result<String> {
        eventually(&format!("guest snapshot {name} fails with {texts:?}"), PATIENCE, || async {
            let status = self.guest_snapshots().get(name).await?.data["status"].clone();
            anyhow::ensure!(status["readyToUse"] != true, "guest snapshot {name} is ready");
            let message = status["error"]["message"]
                .as_str()
                .filter(|message| texts.iter().all(|text| message.contains(text)));
            Ok(message.map(str::to_owned).ok_or_else(|| status.to_string()))
        })
        .await
    }

    /// Creates a guest claim from a snapshot.
    pub async fn restore(&self, name: &str, snapshot: &str, size: &str) -> Result<PersistentVolumeClaim> {
        self.claim_with(name, "nestor", size, from_snapshot(snapshot)).await
    }

    /// Creates a guest claim as a clone of another one.
    pub async fn clone_of(&self, name: &str, source: &str, size: &str) -> Result<PersistentVolumeClaim> {
        self.claim_with(name, "nestor", size, from_claim(source)).await
    }

    /// Waits until a guest claim is bound; returns its handle and the file with its data.
    pub async fn bound_file(&self, claim: &str) -> Result<(String, PathBuf)> {
        let handle = guest::handle(&self.bound(claim).await?.1)?;
        let file = self.file_of(&self.infra_volume(&handle).await?).await?;
        Ok((handle, file))
    }

    /// Creates a snapshot of a guest claim with the class `nestor`.
    pub async fn snapshot(&self, name: &str, claim: &str) -> Result<()> {
        self.snapshot_of(name, "nestor", json!({"persistentVolumeClaimName": claim})).await
    }

    /// Creates a VolumeSnapshot of any source in the guest.
    pub async fn snapshot_of(&self, name: &str, class: &str, source: Value) -> Result<()> {
        let snapshot: DynamicObject = serde_json::from_value(json!({
            "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot",
            "metadata": {"name": name},
            "spec": {"volumeSnapshotClassName": class, "source": source},
        }))?;
        self.guest_snapshots().create(&PostParams::default(), &snapshot).await?;
        Ok(())
    }

    /// Waits until a guest snapshot is ready; returns its handle: the name of the management VolumeSnapshot.
    pub async fn snapshot_ready(&self, name: &str) -> Result<String> {
        let snapshots = self.guest_snapshots();
        let content = eventually(&format!("guest snapshot {name} ready"), PATIENCE, || async {
            let snapshot = snapshots.get(name).await?;
            let status = &snapshot.data["status"];
            let content = status["boundVolumeSnapshotContentName"].as_str();
            Ok(match content.filter(|_| status["readyToUse"] == true) {
                Some(content) => Ok(content.to_owned()),
                None => Err(format!("{status}; {:?}", self.events_of("VolumeSnapshot", name).await?)),
            })
        })
        .await?;
        let content = self.guest_contents().get(&content).await?;
        let handle = content.data["status"]["snapshotHandle"].as_str();
        Ok(handle.context("a ready content has no handle")?.to_owned())
    }

    /// Waits until a guest snapshot is gone.
    pub async fn snapshot_gone(&self, name: &str) -> Result<()> {
        eventually(&format!("guest snapshot {name} gone"), PATIENCE, || async {
            let left = self.guest_snapshots().get_opt(name).await?;
            Ok(left.map_or(Ok(()), |snapshot| Err(snapshot.data["status"].to_string())))
        })
        .await
    }

    /// The storage infra's snapshot behind a management VolumeSnapshot.
    pub async fn infra_snapshot(&self, handle: &str) -> Result<Snapshot> {
        let snapshot = self.snapshots().get(handle).await?;
        let content = snapshot.data["status"]["boundVolumeSnapshotContentName"].as_str();
        let content = self.contents().get(content.context("the management snapshot has no content")?).await?;
        let id = content.data["status"]["snapshotHandle"].as_str().context("the content has no handle")?;
        let found = self.infra.get_snapshot(&infra_api::SnapshotId::new(id)?).await?;
        found.with_context(|| format!("the storage infra has no snapshot {id}"))
    }

    /// The management snapshots that were created for this scenario's namespace, each with what keeps it.
    pub(crate) async fn own_snapshots(&self) -> Result<Vec<String>> {
        let list = self.snapshots().list(&Default::default()).await?;
        let mut own = Vec::new();
        for snapshot in list.iter().filter(|one| self.is_own_snapshot(one)) {
            let name = snapshot.data["status"]["boundVolumeSnapshotContentName"].as_str();
            let content = match name {
                Some(name) => self.contents().get_opt(name).await?,
                None => None,
            };
            own.push([Some(snapshot), content.as_ref()].into_iter().flatten().map(state).collect::<String>());
        }
        Ok(own)
    }
}

/// Name and state of a snapshot or its content, on one line.
fn state(object: &DynamicObject) -> String {
    let metadata = json!({
        "deleted": object.metadata.deletion_timestamp, "finalizers": object.metadata.finalizers,
        "annotations": object.metadata.annotations, "status": object.data["status"],
    });
    format!("{} {metadata} ", object.name_any())
}
