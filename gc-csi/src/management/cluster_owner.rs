//! Cluster object (Cluster API) of the guest, the owner of the guest's claims and snapshots. With `--on-guest-deletion
//! Delete`, Kubernetes' garbage collection deletes them together with that object, even if gc-csi no longer runs.
//! Everything else stays.
//!
//! Safeguards against data loss: gc-csi sets the reference only on objects that this guest created and that no other
//! guest is recorded to use. It reads the Cluster object immediately before each write, because the garbage collector
//! treats a missing owner as deleted.

use std::collections::BTreeMap;

use crds::names::{self, ClusterId};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{ApiResource, DynamicObject};
use kube::core::GroupVersionKind;
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt};
use kube_kit::api_versions;
use kube_kit::health::Health;
use kube_kit::informer::Informer;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::error::ApiError;
use super::identity::GuestIdentity;
use super::objects::is_object_name;

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
pub(super) enum Policy {
    /// They stay, labelled with the guest's ID.
    #[value(name = "Retain")]
    Retain,
    /// They are deleted with the guest's Cluster object.
    #[value(name = "Delete")]
    Delete,
}

fn object_name(text: &str) -> Result<String, String> {
    match is_object_name(text) {
        true => Ok(text.to_owned()),
        false => Err("not an object name: use lower-case letters, digits, '-' and '.'".to_owned()),
    }
}

/// The guest's Cluster object, watched if the policy is Delete.
#[derive(Debug, Clone)]
pub(crate) struct ClusterOwner {
    policy: Policy,
    guest: ClusterId,
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
        let guest = identity.cluster.clone();
        if policy == Policy::Retain {
            return Some(Self { policy, guest, clusters: None });
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
            return Some(Self { policy, guest, clusters: None });
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
        let clusters = Clusters { api, resource, watched, name, guest: guest.clone() };
        Some(Self { policy, guest, clusters: Some(clusters) })
    }

    /// Waits for the first list of Cluster objects.
    pub(super) async fn synced(&self) {
        if let Some(clusters) = &self.clusters {
            clusters.watched.synced().await;
        }
    }

    /// The desired ownerReference, from the informer's cache.
    pub(super) fn cached(&self) -> Option<OwnerReference> {
        self.clusters.as_ref()?.cached()
    }

    /// The desired ownerReference, read from the API server: an object whose owner does not exist would be deleted.
    pub(super) async fn read(&self) -> Result<Option<OwnerReference>, ApiError> {
        let Some(clusters) = &self.clusters else { return Ok(None) };
        let Some(cached) = clusters.cached() else { return Ok(None) };
        let found = clusters.api.get_opt(&cached.name).await?;
        Ok(found.filter(|found| clusters.matches_guest(found)).map(|found| clusters.reference(&found)))
    }

    /// What happens to the guest's objects when the guest is deleted.
    pub(super) fn policy(&self) -> Policy {
        self.policy
    }

    /// Metadata of an object that this guest creates: label, annotations and ownerReference.
    pub(super) async fn new_metadata(
        &self,
        name: &str,
        mut annotations: BTreeMap<String, String>,
    ) -> ObjectMeta {
        let guest = self.guest.to_string();
        annotations.insert(names::ANNOTATION_MADE_BY.to_owned(), guest.clone());
        // Without an answer, the object is created without the reference, and the reconciler adds it later.
        let owner = self.read().await.ok().flatten();
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

/// The owner that an object should have.
#[derive(Debug)]
pub(super) enum DesiredOwner<'a> {
    None,
    Cluster(&'a OwnerReference),
    Unchanged,
}

/// The merge patch for an object's metadata, or None if nothing changes. It touches only the reference that gc-csi set,
/// and is guarded by UID and resourceVersion.
pub(super) fn metadata_patch(metadata: &ObjectMeta, desired: &DesiredOwner<'_>) -> Option<Value> {
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

/// The merge patch for the metadata of an object that must not have a reference that gc-csi set, or None if it has none.
pub(super) fn removal_patch(metadata: &ObjectMeta) -> Option<Value> {
    metadata_patch(metadata, &DesiredOwner::None)
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
