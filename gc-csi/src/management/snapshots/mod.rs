//! Management snapshots: guest snapshots as VolumeSnapshots in the management cluster.

mod create;
mod delete;

use std::sync::Arc;

use crds::names;
use k8s_openapi::api::core::v1::TypedLocalObjectReference;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{ApiResource, DynamicObject, Patch, PatchParams};
use kube::core::{GroupVersionKind, Object};
use kube::{Api, Client, ResourceExt};
use kube_kit::health::Health;
use kube_kit::informer::Informer;
use kube_kit::quantity;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::claims::Claims;
use super::cluster_owner::ClusterOwner;
use super::error::ApiError;
use super::identity::{GuestIdentity, Relation};
use super::objects::{ChangeHandler, retain_keys};

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

/// Snapshots of the guest's namespace, and their classes.
#[derive(Clone, Debug)]
pub(crate) struct Snapshots {
    identity: GuestIdentity,
    resource: ApiResource,
    api: Api<VolumeSnapshot>,
    informer: Informer<VolumeSnapshot>,
    classes: Informer<DynamicObject>,
    claims: Claims,
    owner: ClusterOwner,
}

impl Snapshots {
    /// Watches snapshots and their classes. Snapshots are taken of `claims` and belong to `owner`.
    pub(super) fn start(
        client: &Client,
        identity: GuestIdentity,
        (claims, owner): (Claims, ClusterOwner),
        ready: &Health,
        stop: &CancellationToken,
        changed: ChangeHandler<VolumeSnapshot>,
    ) -> Self {
        let kind = |kind: &str| ApiResource::from_gvk(&GroupVersionKind::gvk(GROUP, "v1", kind));
        let resource = kind("VolumeSnapshot");
        let api = Api::namespaced_with(client.clone(), &identity.namespace, &resource);
        let informer = Informer::builder("management VolumeSnapshots", api.clone())
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
        Self { identity, resource, api, informer, classes, claims, owner }
    }

    pub(super) fn is_synced(&self) -> bool {
        self.informer.is_synced() && self.classes.is_synced()
    }

    /// Names of all snapshots in this guest's namespace.
    pub(super) fn names(&self) -> Vec<String> {
        self.informer.list().iter().map(|snapshot| snapshot.name_any()).collect()
    }

    /// The snapshots that this guest owns or that are shared with it.
    pub(crate) fn list_usable(&self) -> Vec<Arc<VolumeSnapshot>> {
        self.informer.list().into_iter().filter(|one| self.relation(one).is_some()).collect()
    }

    /// The snapshot of this name, if this guest owns it or it is shared with it.
    pub(crate) fn usable(&self, name: &str) -> Option<Arc<VolumeSnapshot>> {
        self.get(name).filter(|one| self.relation(one).is_some())
    }

    /// The snapshot of this name, if this guest owns it.
    pub(super) fn own(&self, name: &str) -> Option<Arc<VolumeSnapshot>> {
        self.get(name).filter(|one| self.relation(one) == Some(Relation::Own))
    }

    /// Waits until the cache shows a snapshot that this guest may use; None if it does not appear.
    pub(super) async fn wait_for(&self, name: &str, deadline: Instant) -> Option<Arc<VolumeSnapshot>> {
        let usable =
            |found: Option<&Arc<VolumeSnapshot>>| found.filter(|one| self.relation(one).is_some()).cloned();
        self.informer.wait_for(&self.identity.key(name), deadline, usable).await
    }

    /// Sends a merge patch.
    pub(super) async fn patch(&self, name: &str, patch: Value) -> Result<VolumeSnapshot, ApiError> {
        Ok(self.api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await?)
    }

    fn get(&self, name: &str) -> Option<Arc<VolumeSnapshot>> {
        self.informer.get(&self.identity.key(name))
    }

    /// Relation of a snapshot to this guest; None if the guest may not use it.
    fn relation(&self, snapshot: &VolumeSnapshot) -> Option<Relation> {
        self.identity.relation(snapshot.metadata.labels.as_ref())
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
