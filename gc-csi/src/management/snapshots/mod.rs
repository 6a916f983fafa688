//! Management snapshots: guest snapshots as VolumeSnapshots in the management cluster.

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

/// API group of snapshots.
pub const GROUP: &str = "snapshot.storage.k8s.io";
/// API group and version.
pub const GROUP_VERSION: &str = "snapshot.storage.k8s.io/v1";
/// Resource whose presence shows that snapshots are served.
pub const RESOURCE: &str = "volumesnapshots";

/// A VolumeSnapshot, with the fields that are read or written here.
pub type VolumeSnapshot = Object<SnapshotSpec, SnapshotStatus>;

/// Spec of a snapshot.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotSpec {
    /// Source of the snapshot.
    #[serde(default)]
    pub source: SnapshotSource,
    /// VolumeSnapshotClass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_snapshot_class_name: Option<String>,
}

/// Source of a snapshot; pre-provisioned snapshots name a content instead.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotSource {
    /// Name of the claim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent_volume_claim_name: Option<String>,
}

/// Status of a snapshot.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotStatus {
    /// When the snapshot was cut.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub creation_time: Option<Time>,
    /// Whether a volume can be created from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_to_use: Option<bool>,
    /// Minimum size of a volume created from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore_size: Option<Quantity>,
    /// The latest error; stays until the snapshot is ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<SnapshotFailure>,
}

/// Error in the status of a snapshot.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
pub struct SnapshotFailure {
    /// The message of the component that failed.
    #[serde(default)]
    pub message: Option<String>,
}

/// Informers of snapshots and their classes.
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
        .start(ready.check("watch of management VolumeSnapshots", "not synced yet"), stop.clone());
        let classes = Informer::builder(
            "management VolumeSnapshotClasses",
            Api::all_with(client.clone(), &kind("VolumeSnapshotClass")),
        )
        // Only the existence of a class is read.
        .trim(|class: &mut DynamicObject| class.data = serde_json::Value::Null)
        .start(ready.check("watch of management VolumeSnapshotClasses", "not synced yet"), stop.clone());
        let api = Api::namespaced_with(client.clone(), namespace, &resource);
        Self { resource, api, informer, classes }
    }

    pub(super) fn is_synced(&self) -> bool {
        self.informer.is_synced() && self.classes.is_synced()
    }
}

impl Management {
    /// Whether the management cluster serves snapshots.
    pub fn has_snapshots(&self) -> bool {
        self.snapshots.is_some()
    }

    /// The snapshots that this guest owns or that are shared with it.
    pub fn usable_snapshots(&self) -> Vec<Arc<VolumeSnapshot>> {
        let all = self.snapshots.as_ref().map(|snapshots| snapshots.informer.list()).unwrap_or_default();
        all.into_iter().filter(|one| self.may_read(one)).collect()
    }

    /// The snapshot of this name, if this guest owns it or it is shared with it.
    pub fn usable_snapshot(&self, name: &str) -> Option<Arc<VolumeSnapshot>> {
        self.snapshots.as_ref()?.informer.get(&self.key(name)).filter(|one| self.may_read(one))
    }

    /// Waits until the cache shows a snapshot that this guest may read; None if it does not appear.
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

/// The claim that a snapshot was taken of; empty if unknown.
pub fn source_claim(snapshot: &VolumeSnapshot) -> &str {
    snapshot.spec.source.persistent_volume_claim_name.as_deref().unwrap_or_default()
}

/// Whether a volume can be created from a snapshot.
pub fn is_ready(snapshot: &VolumeSnapshot) -> bool {
    snapshot.status.as_ref().and_then(|status| status.ready_to_use) == Some(true)
}

/// Minimum size of a volume created from a snapshot, in bytes.
pub fn restore_size(snapshot: &VolumeSnapshot) -> Option<u64> {
    quantity::value(snapshot.status.as_ref()?.restore_size.as_ref()?)
}

/// Whether the snapshot's data is fixed, although it may still be copied. The creation time is set only after the
/// storage has reported it.
fn is_cut(snapshot: &VolumeSnapshot) -> bool {
    snapshot.status.as_ref().is_some_and(|status| status.creation_time.is_some())
}

/// Keeps identity, owners, and the labels and annotations that are read.
fn trim(snapshot: &mut VolumeSnapshot) {
    snapshot.types = None;
    retain_keys(&mut snapshot.metadata.annotations, |key| {
        [names::ANNOTATION_MADE_BY, names::ANNOTATION_DELETED_WITH].contains(&key)
    });
    retain_keys(&mut snapshot.metadata.labels, |key| {
        key == names::LABEL_CLUSTER_ID || key.starts_with(names::LABEL_SHARE_PREFIX)
    });
}

/// Reference to a snapshot as the source of a claim.
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
    fn a_snapshot_of_external_snapshotter_can_be_read() {
        let snapshot: VolumeSnapshot = serde_json::from_value(serde_json::json!({
            "apiVersion": GROUP_VERSION, "kind": "VolumeSnapshot",
            "metadata": {"name": "snap-1", "namespace": "guest-1"},
            "spec": {"source": {"persistentVolumeClaimName": "pvc-1"}, "volumeSnapshotClassName": "nestor"},
            "status": {
                "boundVolumeSnapshotContentName": "snapcontent-1", "creationTime": "2026-11-21T12:00:00Z",
                "readyToUse": false, "restoreSize": "1Gi", "error": {"message": "no space", "time": null},
            },
        }))
        .unwrap();
        assert_eq!(source_claim(&snapshot), "pvc-1");
        assert_eq!(restore_size(&snapshot), Some(1 << 30));
        assert!(is_cut(&snapshot) && !is_ready(&snapshot));
    }
}
