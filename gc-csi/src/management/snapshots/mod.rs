//! Guest snapshots as VolumeSnapshots in the management cluster, where it serves them.

mod create;
mod delete;

use std::sync::Arc;

use crds::names;
use k8s_openapi::api::core::v1::TypedLocalObjectReference;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{ApiResource, DynamicObject};
use kube::core::{GroupVersionKind, Object};
use kube::{Api, Client};
use kube_kit::health::Health;
use kube_kit::informer::Informer;
use kube_kit::quantity;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::sharing::Relation;
use super::{ChangeHandler, Management, retain_keys};

pub use create::{NewSnapshot, SnapshotError};
pub use delete::{AbandonedSnapshot, DeleteSnapshotError};

/// The API group of snapshots.
pub const GROUP: &str = "snapshot.storage.k8s.io";
/// The group with the version that is spoken here.
pub const GROUP_VERSION: &str = "snapshot.storage.k8s.io/v1";
/// The resource whose presence says that the cluster serves snapshots.
pub const RESOURCE: &str = "volumesnapshots";

/// A snapshot: the fields of `VolumeSnapshot` that are read or written here.
pub type VolumeSnapshot = Object<SnapshotSpec, SnapshotStatus>;

/// What is wanted of a snapshot.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotSpec {
    /// What it is taken of.
    #[serde(default)]
    pub source: SnapshotSource,
    /// Its class.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_snapshot_class_name: Option<String>,
}

/// What a snapshot is taken of; one that was there before its object names content instead.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotSource {
    /// The claim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent_volume_claim_name: Option<String>,
}

/// What was seen of a snapshot.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotStatus {
    /// When it was cut.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub creation_time: Option<Time>,
    /// Whether a volume can be made from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_to_use: Option<bool>,
    /// The least size of a volume made from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore_size: Option<Quantity>,
    /// The latest failure, which stays until the snapshot is ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<SnapshotFailure>,
}

/// Why a snapshot is not ready.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
pub struct SnapshotFailure {
    /// In the words of the tier that failed.
    #[serde(default)]
    pub message: Option<String>,
}

/// Snapshots and their classes, watched.
#[derive(Clone, Debug)]
pub(super) struct Snapshots {
    resource: ApiResource,
    pub(super) api: Api<VolumeSnapshot>,
    pub(super) informer: Informer<VolumeSnapshot>,
    classes: Informer<DynamicObject>,
}

impl Snapshots {
    pub(super) fn start(
        client: &Client,
        namespace: &str,
        ready: &Health,
        stop: &CancellationToken,
        changed: ChangeHandler<VolumeSnapshot>,
    ) -> Self {
        let kind = |kind: &str| ApiResource::from_gvk(&GroupVersionKind::gvk(GROUP, "v1", kind));
        let resource = kind("VolumeSnapshot");
        let informer = Informer::builder(
            "management VolumeSnapshots",
            Api::namespaced_with(client.clone(), namespace, &resource),
        )
        .trim(trim)
        .on_change(changed)
        .start(ready.check("management-snapshots", "not read yet"), stop.clone());
        let classes = Informer::builder(
            "management VolumeSnapshotClasses",
            Api::all_with(client.clone(), &kind("VolumeSnapshotClass")),
        )
        // Only whether there is one of a name is asked.
        .trim(|class: &mut DynamicObject| class.data = serde_json::Value::Null)
        .start(ready.check("management-snapshot-classes", "not read yet"), stop.clone());
        let api = Api::namespaced_with(client.clone(), namespace, &resource);
        Self { resource, api, informer, classes }
    }

    pub(super) fn is_synced(&self) -> bool {
        self.informer.is_synced() && self.classes.is_synced()
    }
}

impl Management {
    /// Whether the management cluster has snapshots.
    pub fn has_snapshots(&self) -> bool {
        self.snapshots.is_some()
    }

    /// The snapshots that this guest may read: its own, and those that are shared with it.
    pub fn usable_snapshots(&self) -> Vec<Arc<VolumeSnapshot>> {
        let all = self.snapshots.as_ref().map(|snapshots| snapshots.informer.list()).unwrap_or_default();
        all.into_iter().filter(|one| self.may_read(one)).collect()
    }

    /// The snapshot of this name that this guest may read.
    pub fn usable_snapshot(&self, name: &str) -> Option<Arc<VolumeSnapshot>> {
        self.snapshots.as_ref()?.informer.get(&self.key(name)).filter(|one| self.may_read(one))
    }

    /// Waits until a snapshot that this guest may read is seen; None when it does not come.
    pub(super) async fn wait_for_snapshot(
        &self,
        name: &str,
        deadline: Instant,
    ) -> Option<Arc<VolumeSnapshot>> {
        let usable = |found: Option<&Arc<VolumeSnapshot>>| found.filter(|one| self.may_read(one)).cloned();
        self.snapshots.as_ref()?.informer.wait_for(&self.key(name), deadline, usable).await
    }

    fn may_read(&self, snapshot: &VolumeSnapshot) -> bool {
        self.relation_of(snapshot.metadata.labels.as_ref()).is_some()
    }

    pub(super) fn owns_snapshot(&self, snapshot: &VolumeSnapshot) -> bool {
        self.relation_of(snapshot.metadata.labels.as_ref()) == Some(Relation::Own)
    }
}

/// The claim that a snapshot was taken of; empty where its object does not say.
pub fn source_claim(snapshot: &VolumeSnapshot) -> &str {
    snapshot.spec.source.persistent_volume_claim_name.as_deref().unwrap_or_default()
}

/// Whether a volume can be made from a snapshot.
pub fn is_ready(snapshot: &VolumeSnapshot) -> bool {
    snapshot.status.as_ref().and_then(|status| status.ready_to_use) == Some(true)
}

/// The least size of a volume made from a snapshot, in bytes.
pub fn restore_size(snapshot: &VolumeSnapshot) -> Option<u64> {
    quantity::value(snapshot.status.as_ref()?.restore_size.as_ref()?)
}

/// Whether the content of a snapshot is fixed, though it may still be copied. The time is written when the storage
/// has said so, and not before.
fn is_cut(snapshot: &VolumeSnapshot) -> bool {
    snapshot.status.as_ref().is_some_and(|status| status.creation_time.is_some())
}

/// Keeps identity, owners and whose it is, besides what its type has.
fn trim(snapshot: &mut VolumeSnapshot) {
    snapshot.types = None;
    retain_keys(&mut snapshot.metadata.annotations, |key| {
        [names::ANNOTATION_MADE_BY, names::ANNOTATION_DELETED_WITH].contains(&key)
    });
    retain_keys(&mut snapshot.metadata.labels, |key| {
        key == names::LABEL_CLUSTER_ID || key.starts_with(names::LABEL_SHARE_PREFIX)
    });
}

/// A snapshot as the source of a claim.
pub(super) fn reference(name: &str) -> TypedLocalObjectReference {
    TypedLocalObjectReference {
        api_group: Some(GROUP.to_owned()),
        kind: "VolumeSnapshot".to_owned(),
        name: name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_as_external_snapshotter_writes_it_is_read() {
        let snapshot: VolumeSnapshot = serde_json::from_value(serde_json::json!({
            "apiVersion": GROUP_VERSION, "kind": "VolumeSnapshot",
            "metadata": {"name": "snap-1", "namespace": "guest-1"},
            "spec": {"source": {"persistentVolumeClaimName": "pvc-1"}, "volumeSnapshotClassName": "nestor"},
            "status": {
                "boundVolumeSnapshotContentName": "snapcontent-1", "creationTime": "2026-11-21T12:00:00Z",
                "readyToUse": false, "restoreSize": "1Gi", "error": {"message": "no room", "time": null},
            },
        }))
        .unwrap();
        assert_eq!(source_claim(&snapshot), "pvc-1");
        assert_eq!(restore_size(&snapshot), Some(1 << 30));
        assert!(is_cut(&snapshot) && !is_ready(&snapshot));
    }
}
