//! What becomes of a guest's claims and snapshots when the guest itself is deleted. They go with the guest's Cluster
//! object (Cluster API) where the platform team chose so: an ownerReference to it lets Kubernetes' garbage collection
//! remove them, also when no gc-csi runs any more. Everything else stays.
//!
//! What keeps data: only what this guest made is owned; never what another guest is recorded to use; and an owner is
//! named only by a UID that was read just before, since an owner that does not exist counts as deleted.

use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::sync::Arc;

use crds::names::{self, ClusterId};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{ApiResource, DynamicObject, Patch, PatchParams};
use kube::core::GroupVersionKind;
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt};
use kube_kit::health::Health;
use kube_kit::informer::Informer;
use kube_kit::versions;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::snapshots::VolumeSnapshot;
use super::{ApiError, GuestIdentity, Management};

/// Flags that say what a guest leaves behind.
#[derive(Debug, Clone, clap::Args)]
pub struct GuestDeletion {
    /// What becomes of the claims and snapshots that this guest made, when its Cluster object (cluster.x-k8s.io) in the
    /// management namespace is deleted.
    #[arg(long, value_enum, default_value_t = Policy::Retain)]
    on_guest_deletion: Policy,
    /// Name of this guest's Cluster object; without it, the one that is labelled nestor.dev/cluster-id=<ID>, or whose UID
    /// is the cluster ID.
    #[arg(long, value_name = "NAME", value_parser = object_name)]
    cluster_object: Option<String>,
}

/// What becomes of what a guest leaves behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Policy {
    /// It stays, labelled with the guest's ID.
    #[value(name = "Retain")]
    Retain,
    /// It is deleted with the guest's Cluster object.
    #[value(name = "Delete")]
    Delete,
}

fn object_name(text: &str) -> Result<String, String> {
    match super::is_object_name(text) {
        true => Ok(text.to_owned()),
        false => Err("not the name of an object: lower-case letters, digits, '-' and '.'".to_owned()),
    }
}

/// Something that this guest made, or all of it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum OwnedObject {
    /// A claim, by name.
    Claim(String),
    /// A VolumeSnapshot, by name.
    Snapshot(String),
    /// All there is.
    All,
}

impl Display for OwnedObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Claim(name) => write!(f, "PersistentVolumeClaim {name}"),
            Self::Snapshot(name) => write!(f, "VolumeSnapshot {name}"),
            Self::All => f.write_str("all that this guest made"),
        }
    }
}

/// What will become of an object when the guest is deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeletionOutcome {
    /// What the policy says, or it is nothing of this guest's.
    AsConfigured,
    /// It stays, though it should go: there is no Cluster object, or another guest uses it.
    OutlivesGuest,
}

/// Why an object does not have the owner that it should.
#[derive(Debug, thiserror::Error)]
#[error("cannot write on management {object} with which Cluster object it is deleted: {source}")]
pub(crate) struct OwnerRefError {
    object: OwnedObject,
    source: ApiError,
}

/// The guest's Cluster object, watched where the policy needs it.
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
    /// Watches the guest's Cluster object where it is needed; `changed` is called when it comes, changes or goes. None
    /// when `stop` came first. Whether the management cluster has Cluster objects at all is asked once.
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
        // The API server names the newest version first.
        let newest = |served: &[String]| Some(served.first().cloned());
        let check = ready.check("cluster-objects", "not asked yet");
        let version = versions::served(client, names::CLUSTER_GROUP, newest, &check, stop).await?;
        let Some(version) = version else {
            tracing::warn!(
                "--on-guest-deletion Delete keeps everything: the management cluster serves no {}. Install Cluster API, \
                 and start gc-csi's controller again",
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
            // No volume waits for it: while it can't be watched, nobody is held up, and nothing is owned anew.
            .start(Health::default().check("cluster-objects", ""), stop.clone());
        let api = Api::namespaced_with(client.clone(), &identity.namespace, &resource);
        let clusters = Clusters { api, resource, watched, name, guest: identity.cluster.clone() };
        Some(Self { policy, clusters: Some(clusters) })
    }

    /// Waits until the Cluster object was looked for once.
    async fn synced(&self) {
        if let Some(clusters) = &self.clusters {
            clusters.watched.synced().await;
        }
    }

    /// The reference that objects should have, as far as the watch shows.
    fn cached(&self) -> Option<OwnerReference> {
        self.clusters.as_ref()?.cached()
    }

    /// The reference that objects should have, read anew: an object that names an owner which is gone is deleted.
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
            // Labels are given by people, to the wrong one at times.
            2.. => None,
            1 => matching.find(|cluster| self.is_labelled(cluster)),
            0 => matching.next(),
        };
        found.map(|cluster| self.reference(cluster))
    }

    /// Whether a Cluster object can be this guest's.
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
            // The Cluster object never waits for volumes: they wait for its VMs.
            block_owner_deletion: Some(false),
            controller: None,
        }
    }
}

impl Management {
    /// Looks for the guest's Cluster object once, and says so where there is none that should be.
    pub(crate) async fn warn_missing_owner(&self) {
        self.cluster_owner.synced().await;
        if self.cluster_owner.policy == Policy::Delete && self.cluster_owner.cached().is_none() {
            tracing::warn!(
                namespace = self.identity.namespace,
                "--on-guest-deletion Delete keeps everything while this guest has no Cluster object: name it with \
                 --cluster-object, or label it {}={}",
                names::LABEL_CLUSTER_ID,
                self.identity.cluster
            );
        }
    }

    /// Names of everything that may have to be owned.
    pub(crate) fn owned_objects(&self) -> Vec<OwnedObject> {
        let claims = self.claims.list().into_iter().map(|claim| OwnedObject::Claim(claim.name_any()));
        let snapshots = self.snapshots.iter().flat_map(|snapshots| snapshots.informer.list());
        claims.chain(snapshots.map(|snapshot| OwnedObject::Snapshot(snapshot.name_any()))).collect()
    }

    /// The metadata of an object that this guest is about to make: whose it is, and with what it is deleted.
    pub(super) async fn new_metadata(
        &self,
        name: &str,
        mut annotations: BTreeMap<String, String>,
    ) -> ObjectMeta {
        let guest = self.identity.cluster.to_string();
        annotations.insert(names::ANNOTATION_MADE_BY.to_owned(), guest.clone());
        // Without an answer it is made without, and owned as soon as there is one.
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

    /// Gives an object the owner that it should have, in one request if any is needed; only as it was seen.
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
            // It is deleted with the Cluster object that was there, or is not found for a while.
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
            // The watch will tell.
            return Ok(DeletionOutcome::OutlivesGuest);
        }
        self.patch_metadata(object, patch).await.map_err(failed)?;
        tracing::info!(object = %object, owner = cached.map(|owner| owner.name), "changed with what it is deleted");
        Ok(outcome)
    }

    /// Keeps a claim from being deleted with the guest that owns it, since this guest uses it: that guest's gc-csi may not
    /// run any more.
    pub(super) async fn remove_owner_ref(&self, name: &str, metadata: &ObjectMeta) -> Result<(), ApiError> {
        match metadata_patch(metadata, &DesiredOwner::None) {
            Some(patch) => self.patch_metadata(&OwnedObject::Claim(name.to_owned()), patch).await,
            None => Ok(()),
        }
    }

    /// What is known of an object of this guest's that stays, and whether it should have an owner: this guest made it, and
    /// no other uses it.
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

/// Which Cluster object an object should be deleted with.
#[derive(Debug)]
enum DesiredOwner<'a> {
    None,
    Cluster(&'a OwnerReference),
    Unchanged,
}

/// What a merge patch must say of an object's metadata, or None when all is as it should be. Only the reference that is
/// ours is touched, and only while nobody changed the object.
fn metadata_patch(metadata: &ObjectMeta, desired: &DesiredOwner<'_>) -> Option<Value> {
    let ours = annotation(metadata, names::ANNOTATION_DELETED_WITH);
    let there = metadata.owner_references.as_deref().unwrap_or_default();
    let mut owners: Vec<&OwnerReference> =
        there.iter().filter(|owner| Some(owner.uid.as_str()) != ours).collect();
    let uid_annotation = match desired {
        DesiredOwner::Unchanged => return None,
        DesiredOwner::None => None,
        // Somebody else's reference does the same.
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

    /// The owners that a patch leaves, and which of them is ours.
    fn after(patch: Option<Value>) -> Option<(Vec<String>, Value)> {
        let patch = patch?;
        assert_eq!(patch["resourceVersion"], "7", "it is only for the object as it was seen");
        let owners = patch["ownerReferences"].as_array().unwrap();
        let uids = owners.iter().map(|owner| owner["uid"].as_str().unwrap().to_owned()).collect();
        Some((uids, patch["annotations"][names::ANNOTATION_DELETED_WITH].clone()))
    }

    #[test]
    fn only_our_own_reference_comes_and_goes() {
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
            "it is somebody else's"
        );
        assert_eq!(
            after(metadata_patch(&metadata_with(None, &["x", "c"]), &own)),
            None,
            "it is somebody else's"
        );
        assert_eq!(
            after(metadata_patch(&metadata_with(Some("c"), &["x", "c"]), &DesiredOwner::Unchanged)),
            None
        );
    }

    #[test]
    fn a_cluster_object_that_was_made_anew_takes_the_place_of_the_old_one() {
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
            "another version is served by now"
        );
        let lost = metadata_with(Some("new"), &[]);
        assert!(metadata_patch(&lost, &DesiredOwner::Cluster(&cluster)).is_some(), "somebody took it off");
    }
}
