//! ownerReferences from a guest's claims and snapshots to its Cluster object (Cluster API). With `--on-guest-deletion
//! Delete`, Kubernetes' garbage collection deletes them together with that object, even if gc-csi no longer runs.
//! Everything else stays.
//!
//! Safeguards against data loss: gc-csi sets the reference only on objects that this guest created and that no other
//! guest is recorded to use. It reads the Cluster object immediately before each write, because the garbage collector
//! treats a missing owner as deleted.

use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::sync::Arc;

use crds::names::{self, ClusterId};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{ApiResource, DynamicObject, Patch, PatchParams};
use kube::core::GroupVersionKind;
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt};
use kube_kit::api_versions;
use kube_kit::health::Health;
use kube_kit::informer::Informer;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::snapshots::VolumeSnapshot;
use super::{ApiError, GuestIdentity, Management};

/// Flags for the deletion of the guest cluster.
#[derive(Debug, Clone, clap::Args)]
pub struct GuestDeletion {
    /// What happens to the claims and snapshots that this guest created when its Cluster object (cluster.x-k8s.io) in
    /// the management namespace is deleted.
    #[arg(long, value_enum, default_value_t = Policy::Retain)]
    on_guest_deletion: Policy,
    /// Name of this guest's Cluster object. Default: the one with the label nestor.dev/cluster-id=<ID>, or whose UID is
    /// the cluster ID.
    #[arg(long, value_name = "NAME", value_parser = object_name)]
    cluster_object: Option<String>,
}

/// What happens to the guest's objects when the guest is deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Policy {
    /// They stay, labelled with the guest's ID.
    #[value(name = "Retain")]
    Retain,
    /// They are deleted with the guest's Cluster object.
    #[value(name = "Delete")]
    Delete,
}

fn object_name(text: &str) -> Result<String, String> {
    match super::is_object_name(text) {
        true => Ok(text.to_owned()),
        false => Err("not an object name: use lower-case letters, digits, '-' and '.'".to_owned()),
    }
}

/// An object that this guest created, or all of them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum OwnedObject {
    /// A claim, by name.
    Claim(String),
    /// A VolumeSnapshot, by name.
    Snapshot(String),
    /// All claims and snapshots.
    All,
}

impl Display for OwnedObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Claim(name) => write!(f, "PersistentVolumeClaim {name}"),
            Self::Snapshot(name) => write!(f, "VolumeSnapshot {name}"),
            Self::All => f.write_str("objects of this guest"),
        }
    }
}

/// What happens to an object when the guest is deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeletionOutcome {
    /// As the policy says; also for objects that are not this guest's.
    AsConfigured,
    /// It stays although the policy is Delete: the Cluster object is missing, or another guest uses the object.
    OutlivesGuest,
}

/// An ownerReference could not be updated.
#[derive(Debug, thiserror::Error)]
#[error("failed to set the ownerReference on management {object}: {source}")]
pub(crate) struct OwnerRefError {
    object: OwnedObject,
    source: ApiError,
}

/// The guest's Cluster object, watched if the policy is Delete.
#[derive(Debug, Clone)]
pub(crate) struct ClusterOwner {
    policy: Policy,
    clusters: Option<Clusters>,
}

#[derive(Debug, Clone)]
struct Clusters {
    api: Api<DynamicObject>,
    resource: ApiResource,
    watched: Informer<DynamicObject>,
    name: Option<String>,
    guest: ClusterId,
}

impl ClusterOwner {
    /// Watches the guest's Cluster object if the policy is Delete; calls `changed` when it is created, changed or
    /// deleted. Checks once whether the management cluster serves Cluster objects. Returns None when stopped.
    pub(crate) async fn start(
        client: &Client,
        identity: &GuestIdentity,
        flags: GuestDeletion,
        ready: &Health,
        stop: &CancellationToken,
        changed: impl Fn() + Send + Sync + 'static,
    ) -> Option<Self> {
        let GuestDeletion { on_guest_deletion: policy, cluster_object: name } = flags;
        if policy == Policy::Retain {
            return Some(Self { policy, clusters: None });
        }
        // The API server lists the newest version first.
        let newest = |served: &[String]| Some(served.first().cloned());
        let check = ready.check("version of Cluster", "not checked yet");
        let version =
            api_versions::wait_for_version(client, names::CLUSTER_GROUP, newest, &check, stop).await?;
        let Some(version) = version else {
            tracing::warn!(
                "--on-guest-deletion Delete has no effect: the management cluster serves no {}. Install Cluster API \
                 and restart gc-csi's controller",
                names::CLUSTER_GROUP
            );
            return Some(Self { policy, clusters: None });
        };
        let kind = GroupVersionKind::gvk(names::CLUSTER_GROUP, &version, "Cluster");
        let resource = ApiResource::from_gvk(&kind);
        let only = name.as_ref().map(|name| format!("metadata.name={name}"));
        let config = only.map(|only| watcher::Config::default().fields(&only)).unwrap_or_default();
        let watched = Api::namespaced_with(client.clone(), &identity.namespace, &resource);
        let watched = Informer::builder("Cluster objects", watched)
            .config(config)
            .trim(|cluster: &mut DynamicObject| {
                cluster.metadata.annotations = None;
                cluster.data = Value::Null;
            })
            .on_change(move |_| changed())
            // No CSI call depends on this watch, so it does not count for readiness.
            .start(Health::default().check("watch of Cluster objects", ""), stop.clone());
        let api = Api::namespaced_with(client.clone(), &identity.namespace, &resource);
        let clusters = Clusters { api, resource, watched, name, guest: identity.cluster.clone() };
        Some(Self { policy, clusters: Some(clusters) })
    }

    /// Waits for the first list of Cluster objects.
    async fn synced(&self) {
        if let Some(clusters) = &self.clusters {
            clusters.watched.synced().await;
        }
    }

    /// The desired ownerReference, from the informer's cache.
    fn cached(&self) -> Option<OwnerReference> {
        self.clusters.as_ref()?.cached()
    }

    /// The desired ownerReference, read from the API server: an object whose owner does not exist would be deleted.
    pub(super) async fn read(&self) -> Result<Option<OwnerReference>, ApiError> {
        let Some(clusters) = &self.clusters else { return Ok(None) };
        let Some(cached) = clusters.cached() else { return Ok(None) };
        let found = clusters.api.get_opt(&cached.name).await?;
        Ok(found.filter(|found| clusters.matches_guest(found)).map(|found| clusters.reference(&found)))
    }
}

impl Clusters {
    fn cached(&self) -> Option<OwnerReference> {
        let all = self.watched.list();
        let labelled = all.iter().filter(|cluster| self.is_labelled(cluster)).count();
        let mut matching = all.iter().filter(|cluster| self.matches_guest(cluster));
        let found = match labelled {
            // Two labelled Cluster objects are ambiguous.
            2.. => None,
            1 => matching.find(|cluster| self.is_labelled(cluster)),
            0 => matching.next(),
        };
        found.map(|cluster| self.reference(cluster))
    }

    /// Whether a Cluster object can belong to this guest.
    fn matches_guest(&self, cluster: &DynamicObject) -> bool {
        match &self.name {
            Some(name) => cluster.metadata.name.as_ref() == Some(name),
            None => self.is_labelled(cluster) || cluster.metadata.uid.as_deref() == Some(self.guest.as_str()),
        }
    }

    fn is_labelled(&self, cluster: &DynamicObject) -> bool {
        self.name.is_none()
            && cluster.labels().get(names::LABEL_CLUSTER_ID).map(String::as_str) == Some(self.guest.as_str())
    }

    fn reference(&self, cluster: &DynamicObject) -> OwnerReference {
        OwnerReference {
            api_version: self.resource.api_version.clone(),
            kind: self.resource.kind.clone(),
            name: cluster.name_any(),
            uid: cluster.uid().unwrap_or_default(),
            // The Cluster object's deletion does not wait for volumes; volumes wait for the VMs.
            block_owner_deletion: Some(false),
            controller: None,
        }
    }
}

impl Management {
    /// Logs a warning once if the policy is Delete and the guest has no Cluster object.
    pub(crate) async fn warn_missing_owner(&self) {
        self.cluster_owner.synced().await;
        if self.cluster_owner.policy == Policy::Delete && self.cluster_owner.cached().is_none() {
            tracing::warn!(
                namespace = self.identity.namespace,
                "--on-guest-deletion Delete has no effect while this guest has no Cluster object: name it with \
                 --cluster-object, or label it {}={}",
                names::LABEL_CLUSTER_ID,
                self.identity.cluster
            );
        }
    }

    /// All claims and snapshots that may need an ownerReference.
    pub(crate) fn owned_objects(&self) -> Vec<OwnedObject> {
        let claims = self.claims.list().into_iter().map(|claim| OwnedObject::Claim(claim.name_any()));
        let snapshots = self.snapshots.iter().flat_map(|snapshots| snapshots.informer.list());
        claims.chain(snapshots.map(|snapshot| OwnedObject::Snapshot(snapshot.name_any()))).collect()
    }

    /// Metadata of an object that this guest creates: label, annotations and ownerReference.
    pub(super) async fn new_metadata(
        &self,
        name: &str,
        mut annotations: BTreeMap<String, String>,
    ) -> ObjectMeta {
        let guest = self.identity.cluster.to_string();
        annotations.insert(names::ANNOTATION_MADE_BY.to_owned(), guest.clone());
        // Without an answer, the object is created without the reference, and the reconciler adds it later.
        let owner = self.cluster_owner.read().await.ok().flatten();
        if let Some(owner) = &owner {
            annotations.insert(names::ANNOTATION_DELETED_WITH.to_owned(), owner.uid.clone());
        }
        ObjectMeta {
            name: Some(name.to_owned()),
            labels: Some([(names::LABEL_CLUSTER_ID.to_owned(), guest)].into()),
            annotations: Some(annotations),
            owner_references: owner.map(|owner| vec![owner]),
            ..ObjectMeta::default()
        }
    }

    /// Updates the ownerReference of an object, with at most one request, guarded by its resourceVersion.
    pub(crate) async fn reconcile_owner_ref(
        &self,
        object: &OwnedObject,
    ) -> Result<DeletionOutcome, OwnerRefError> {
        let Some((metadata, needs_owner)) = self.owner_candidate(object) else {
            return Ok(DeletionOutcome::AsConfigured);
        };
        let cached = if needs_owner { self.cluster_owner.cached() } else { None };
        let desired = match (self.cluster_owner.policy, needs_owner, &cached) {
            (Policy::Delete, true, Some(owner)) => DesiredOwner::Cluster(owner),
            // Keeps the present reference: the Cluster object may be missing only temporarily.
            (Policy::Delete, true, None) => DesiredOwner::Unchanged,
            _ => DesiredOwner::None,
        };
        let outcome = match (self.cluster_owner.policy, &desired) {
            (Policy::Retain, _) | (_, DesiredOwner::Cluster(_)) => DeletionOutcome::AsConfigured,
            _ => DeletionOutcome::OutlivesGuest,
        };
        let failed = |source: ApiError| OwnerRefError { object: object.clone(), source };
        let Some(patch) = metadata_patch(&metadata, &desired) else { return Ok(outcome) };
        if let DesiredOwner::Cluster(owner) = desired
            && self.cluster_owner.read().await.map_err(failed)?.as_ref() != Some(owner)
        {
            // The watch triggers another reconcile.
            return Ok(DeletionOutcome::OutlivesGuest);
        }
        self.patch_metadata(object, patch).await.map_err(failed)?;
        tracing::info!(object = %object, owner = cached.map(|owner| owner.name), "updated the ownerReference");
        Ok(outcome)
    }

    /// Removes the owning guest's reference from a claim that this guest uses, so that the claim outlives that guest.
    /// This does not depend on the owning guest's gc-csi.
    pub(super) async fn remove_owner_ref(&self, name: &str, metadata: &ObjectMeta) -> Result<(), ApiError> {
        match metadata_patch(metadata, &DesiredOwner::None) {
            Some(patch) => self.patch_metadata(&OwnedObject::Claim(name.to_owned()), patch).await,
            None => Ok(()),
        }
    }

    /// Metadata of an object of this guest that is not being deleted, and whether it should have an ownerReference:
    /// this guest created it and no other guest uses it.
    fn owner_candidate(&self, object: &OwnedObject) -> Option<(ObjectMeta, bool)> {
        let (metadata, is_used) = match object {
            OwnedObject::Claim(name) => {
                let claim = self.claim(name)?;
                (claim.metadata.clone(), !self.other_consumers(&claim).is_empty())
            }
            OwnedObject::Snapshot(name) => (self.own_snapshot(name)?.metadata.clone(), false),
            OwnedObject::All => return None,
        };
        let is_created_here =
            annotation(&metadata, names::ANNOTATION_MADE_BY) == Some(self.identity.cluster.as_str());
        metadata.deletion_timestamp.is_none().then_some((metadata, is_created_here && !is_used))
    }

    fn own_snapshot(&self, name: &str) -> Option<Arc<VolumeSnapshot>> {
        let snapshot = self.snapshots.as_ref()?.informer.get(&self.key(name))?;
        self.owns_snapshot(&snapshot).then_some(snapshot)
    }

    async fn patch_metadata(&self, object: &OwnedObject, metadata: Value) -> Result<(), ApiError> {
        let (parameters, patch) = (PatchParams::default(), Patch::Merge(json!({"metadata": metadata})));
        let answer = match (object, &self.snapshots) {
            (OwnedObject::Claim(name), _) => self.claims_api.patch(name, &parameters, &patch).await.map(drop),
            (OwnedObject::Snapshot(name), Some(snapshots)) => {
                snapshots.api.patch(name, &parameters, &patch).await.map(drop)
            }
            _ => return Ok(()),
        };
        match answer.map_err(ApiError::from) {
            Err(ApiError::NotFound(_)) => Ok(()),
            answer => answer,
        }
    }
}

/// The owner that an object should have.
#[derive(Debug)]
enum DesiredOwner<'a> {
    None,
    Cluster(&'a OwnerReference),
    Unchanged,
}

/// The merge patch for an object's metadata, or None if nothing changes. It touches only the reference that gc-csi set,
/// and is guarded by UID and resourceVersion.
fn metadata_patch(metadata: &ObjectMeta, desired: &DesiredOwner<'_>) -> Option<Value> {
    let ours = annotation(metadata, names::ANNOTATION_DELETED_WITH);
    let there = metadata.owner_references.as_deref().unwrap_or_default();
    let mut owners: Vec<&OwnerReference> =
        there.iter().filter(|owner| Some(owner.uid.as_str()) != ours).collect();
    let uid_annotation = match desired {
        DesiredOwner::Unchanged => return None,
        DesiredOwner::None => None,
        // Another controller set the same reference.
        DesiredOwner::Cluster(owner) if owners.iter().any(|other| other.uid == owner.uid) => None,
        DesiredOwner::Cluster(owner) => {
            owners.push(owner);
            Some(owner.uid.as_str())
        }
    };
    let is_there = owners.len() == there.len() && owners.iter().all(|owner| there.contains(owner));
    if is_there && uid_annotation == ours {
        return None;
    }
    Some(json!({
        "uid": metadata.uid,
        "resourceVersion": metadata.resource_version,
        "ownerReferences": owners,
        "annotations": {names::ANNOTATION_DELETED_WITH: uid_annotation},
    }))
}

fn annotation<'a>(metadata: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(uid: &str) -> OwnerReference {
        OwnerReference { uid: uid.to_owned(), name: "guest".to_owned(), ..OwnerReference::default() }
    }

    fn metadata_with(ours: Option<&str>, owners: &[&str]) -> ObjectMeta {
        ObjectMeta {
            annotations: ours.map(|uid| [(names::ANNOTATION_DELETED_WITH.to_owned(), uid.to_owned())].into()),
            owner_references: Some(owners.iter().map(|uid| owner(uid)).collect()),
            resource_version: Some("7".to_owned()),
            ..ObjectMeta::default()
        }
    }

    /// The owners after a patch, and which of them gc-csi set.
    fn after(patch: Option<Value>) -> Option<(Vec<String>, Value)> {
        let patch = patch?;
        assert_eq!(patch["resourceVersion"], "7", "guarded by the resourceVersion");
        let owners = patch["ownerReferences"].as_array().unwrap();
        let uids = owners.iter().map(|owner| owner["uid"].as_str().unwrap().to_owned()).collect();
        Some((uids, patch["annotations"][names::ANNOTATION_DELETED_WITH].clone()))
    }

    #[test]
    fn only_the_reference_set_by_gc_csi_is_added_and_removed() {
        let (cluster, list) =
            (owner("c"), |uids: &[&str]| uids.iter().map(|uid| (*uid).to_owned()).collect());
        let own = DesiredOwner::Cluster(&cluster);
        assert_eq!(
            after(metadata_patch(&metadata_with(None, &["x"]), &own)),
            Some((list(&["x", "c"]), json!("c")))
        );
        assert_eq!(after(metadata_patch(&metadata_with(Some("c"), &["x", "c"]), &own)), None);
        assert_eq!(
            after(metadata_patch(&metadata_with(Some("c"), &["x", "c"]), &DesiredOwner::None)),
            Some((list(&["x"]), Value::Null))
        );
        assert_eq!(
            after(metadata_patch(&metadata_with(None, &["x", "c"]), &DesiredOwner::None)),
            None,
            "set by another controller"
        );
        assert_eq!(
            after(metadata_patch(&metadata_with(None, &["x", "c"]), &own)),
            None,
            "set by another controller"
        );
        assert_eq!(
            after(metadata_patch(&metadata_with(Some("c"), &["x", "c"]), &DesiredOwner::Unchanged)),
            None
        );
    }

    #[test]
    fn the_reference_to_a_recreated_cluster_object_replaces_the_old_one() {
        let cluster = owner("new");
        assert_eq!(
            after(metadata_patch(&metadata_with(Some("old"), &["old"]), &DesiredOwner::Cluster(&cluster))),
            Some((vec!["new".to_owned()], json!("new")))
        );
        let mut renamed = metadata_with(Some("new"), &["new"]);
        renamed.owner_references =
            Some(vec![OwnerReference { api_version: "v1".to_owned(), ..owner("new") }]);
        assert!(
            metadata_patch(&renamed, &DesiredOwner::Cluster(&cluster)).is_some(),
            "another version is served now"
        );
        let lost = metadata_with(Some("new"), &[]);
        assert!(
            metadata_patch(&lost, &DesiredOwner::Cluster(&cluster)).is_some(),
            "the reference was removed"
        );
    }
}
