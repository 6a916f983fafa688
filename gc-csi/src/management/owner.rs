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
use super::{ApiError, Home, Management};

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
pub(crate) enum Made {
    /// A claim, by name.
    Claim(String),
    /// A VolumeSnapshot, by name.
    Snapshot(String),
    /// All there is.
    All,
}

impl Display for Made {
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
pub(crate) enum Fate {
    /// What the policy says, or it is nothing of this guest's.
    AsChosen,
    /// It stays, though it should go: there is no Cluster object, or another guest uses it.
    Outlives,
}

/// Why an object does not have the owner that it should.
#[derive(Debug, thiserror::Error)]
#[error("cannot write on management {what} with which Cluster object it is deleted: {source}")]
pub(crate) struct OwnerError {
    what: Made,
    source: ApiError,
}

/// The guest's Cluster object, watched where the policy needs it.
#[derive(Debug, Clone)]
pub(crate) struct Owner {
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

impl Owner {
    /// Watches the guest's Cluster object where it is needed; `changed` is called when it comes, changes or goes. None
    /// when `stop` came first. Whether the management cluster has Cluster objects at all is asked once.
    pub(crate) async fn start(
        client: &Client,
        home: &Home,
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
        let watched = Api::namespaced_with(client.clone(), &home.namespace, &resource);
        let watched = Informer::builder("Cluster objects", watched)
            .config(config)
            .trim(|cluster: &mut DynamicObject| {
                cluster.metadata.annotations = None;
                cluster.data = Value::Null;
            })
            .on_change(move |_| changed())
            // No volume waits for it: while it can't be watched, nobody is held up, and nothing is owned anew.
            .start(Health::default().check("cluster-objects", ""), stop.clone());
        let api = Api::namespaced_with(client.clone(), &home.namespace, &resource);
        let clusters = Clusters { api, resource, watched, name, guest: home.cluster.clone() };
        Some(Self { policy, clusters: Some(clusters) })
    }

    /// Waits until the Cluster object was looked for once.
    async fn synced(&self) {
        if let Some(clusters) = &self.clusters {
            clusters.watched.synced().await;
        }
    }

    /// The reference that objects should have, as far as the watch shows.
    fn seen(&self) -> Option<OwnerReference> {
        self.clusters.as_ref()?.seen()
    }

    /// The reference that objects should have, read anew: an object that names an owner which is gone is deleted.
    pub(super) async fn read(&self) -> Result<Option<OwnerReference>, ApiError> {
        let Some(clusters) = &self.clusters else { return Ok(None) };
        let Some(seen) = clusters.seen() else { return Ok(None) };
        let found = clusters.api.get_opt(&seen.name).await?;
        Ok(found.filter(|found| clusters.is_guests(found)).map(|found| clusters.reference(&found)))
    }
}

impl Clusters {
    fn seen(&self) -> Option<OwnerReference> {
        let all = self.watched.list();
        let labelled = all.iter().filter(|cluster| self.is_labelled(cluster)).count();
        let mut guests = all.iter().filter(|cluster| self.is_guests(cluster));
        let found = match labelled {
            // Labels are given by people, to the wrong one at times.
            2.. => None,
            1 => guests.find(|cluster| self.is_labelled(cluster)),
            0 => guests.next(),
        };
        found.map(|cluster| self.reference(cluster))
    }

    /// Whether a Cluster object can be this guest's.
    fn is_guests(&self, cluster: &DynamicObject) -> bool {
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
            // The Cluster object never waits for volumes: they wait for its machines.
            block_owner_deletion: Some(false),
            controller: None,
        }
    }
}

impl Management {
    /// Looks for the guest's Cluster object once, and says so where there is none that should be.
    pub(crate) async fn tell_missing_owner(&self) {
        self.owner.synced().await;
        if self.owner.policy == Policy::Delete && self.owner.seen().is_none() {
            tracing::warn!(
                namespace = self.home.namespace,
                "--on-guest-deletion Delete keeps everything while this guest has no Cluster object: name it with \
                 --cluster-object, or label it {}={}",
                names::LABEL_CLUSTER_ID,
                self.home.cluster
            );
        }
    }

    /// Names of everything that may have to be owned.
    pub(crate) fn all_made(&self) -> Vec<Made> {
        let claims = self.claims.list().into_iter().map(|claim| Made::Claim(claim.name_any()));
        let snapshots = self.snapshots.iter().flat_map(|snapshots| snapshots.watched.list());
        claims.chain(snapshots.map(|snapshot| Made::Snapshot(snapshot.name_any()))).collect()
    }

    /// The metadata of an object that this guest is about to make: whose it is, and with what it is deleted.
    pub(super) async fn new_metadata(
        &self,
        name: &str,
        mut annotations: BTreeMap<String, String>,
    ) -> ObjectMeta {
        let guest = self.home.cluster.to_string();
        annotations.insert(names::ANNOTATION_MADE_BY.to_owned(), guest.clone());
        // Without an answer it is made without, and owned as soon as there is one.
        let owner = self.owner.read().await.ok().flatten();
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
    pub(crate) async fn keep_owner(&self, made: &Made) -> Result<Fate, OwnerError> {
        let Some((metadata, wants_owner)) = self.ownable(made) else { return Ok(Fate::AsChosen) };
        let seen = if wants_owner { self.owner.seen() } else { None };
        let wanted = match (self.owner.policy, wants_owner, &seen) {
            (Policy::Delete, true, Some(owner)) => Wanted::Cluster(owner),
            // It is deleted with the Cluster object that was there, or is not found for a while.
            (Policy::Delete, true, None) => Wanted::AsItIs,
            _ => Wanted::Nobody,
        };
        let fate = match (self.owner.policy, &wanted) {
            (Policy::Retain, _) | (_, Wanted::Cluster(_)) => Fate::AsChosen,
            _ => Fate::Outlives,
        };
        let failed = |source: ApiError| OwnerError { what: made.clone(), source };
        let Some(patch) = patch(&metadata, &wanted) else { return Ok(fate) };
        if let Wanted::Cluster(owner) = wanted
            && self.owner.read().await.map_err(failed)?.as_ref() != Some(owner)
        {
            // The watch will tell.
            return Ok(Fate::Outlives);
        }
        self.patch_metadata(made, patch).await.map_err(failed)?;
        tracing::info!(object = %made, owner = seen.map(|owner| owner.name), "changed with what it is deleted");
        Ok(fate)
    }

    /// Keeps a claim from being deleted with the guest that owns it, since this guest uses it: that guest's gc-csi may not
    /// run any more.
    pub(super) async fn disown(&self, name: &str, metadata: &ObjectMeta) -> Result<(), ApiError> {
        match patch(metadata, &Wanted::Nobody) {
            Some(patch) => self.patch_metadata(&Made::Claim(name.to_owned()), patch).await,
            None => Ok(()),
        }
    }

    /// What is known of an object of this guest's that stays, and whether it should have an owner: this guest made it, and
    /// no other uses it.
    fn ownable(&self, made: &Made) -> Option<(ObjectMeta, bool)> {
        let (metadata, is_used) = match made {
            Made::Claim(name) => {
                let claim = self.claim(name)?;
                (claim.metadata.clone(), !self.other_consumers(&claim).is_empty())
            }
            Made::Snapshot(name) => (self.own_snapshot(name)?.metadata.clone(), false),
            Made::All => return None,
        };
        let is_made = annotation(&metadata, names::ANNOTATION_MADE_BY) == Some(self.home.cluster.as_str());
        metadata.deletion_timestamp.is_none().then_some((metadata, is_made && !is_used))
    }

    fn own_snapshot(&self, name: &str) -> Option<Arc<VolumeSnapshot>> {
        let snapshot = self.snapshots.as_ref()?.watched.get(&self.key(name))?;
        self.owns_snapshot(&snapshot).then_some(snapshot)
    }

    async fn patch_metadata(&self, made: &Made, metadata: Value) -> Result<(), ApiError> {
        let (parameters, patch) = (PatchParams::default(), Patch::Merge(json!({"metadata": metadata})));
        let answer = match (made, &self.snapshots) {
            (Made::Claim(name), _) => self.claims_api.patch(name, &parameters, &patch).await.map(drop),
            (Made::Snapshot(name), Some(snapshots)) => {
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
enum Wanted<'a> {
    Nobody,
    Cluster(&'a OwnerReference),
    AsItIs,
}

/// What a merge patch must say of an object's metadata, or None when all is as it should be. Only the reference that is
/// ours is touched, and only while nobody changed the object.
fn patch(metadata: &ObjectMeta, wanted: &Wanted<'_>) -> Option<Value> {
    let ours = annotation(metadata, names::ANNOTATION_DELETED_WITH);
    let there = metadata.owner_references.as_deref().unwrap_or_default();
    let mut owners: Vec<&OwnerReference> =
        there.iter().filter(|owner| Some(owner.uid.as_str()) != ours).collect();
    let mark = match wanted {
        Wanted::AsItIs => return None,
        Wanted::Nobody => None,
        // Somebody else's reference does the same.
        Wanted::Cluster(owner) if owners.iter().any(|other| other.uid == owner.uid) => None,
        Wanted::Cluster(owner) => {
            owners.push(owner);
            Some(owner.uid.as_str())
        }
    };
    let is_there = owners.len() == there.len() && owners.iter().all(|owner| there.contains(owner));
    if is_there && mark == ours {
        return None;
    }
    Some(json!({
        "uid": metadata.uid,
        "resourceVersion": metadata.resource_version,
        "ownerReferences": owners,
        "annotations": {names::ANNOTATION_DELETED_WITH: mark},
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

    fn object(ours: Option<&str>, owners: &[&str]) -> ObjectMeta {
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
        let own = Wanted::Cluster(&cluster);
        assert_eq!(after(patch(&object(None, &["x"]), &own)), Some((list(&["x", "c"]), json!("c"))));
        assert_eq!(after(patch(&object(Some("c"), &["x", "c"]), &own)), None);
        assert_eq!(
            after(patch(&object(Some("c"), &["x", "c"]), &Wanted::Nobody)),
            Some((list(&["x"]), Value::Null))
        );
        assert_eq!(after(patch(&object(None, &["x", "c"]), &Wanted::Nobody)), None, "it is somebody else's");
        assert_eq!(after(patch(&object(None, &["x", "c"]), &own)), None, "it is somebody else's");
        assert_eq!(after(patch(&object(Some("c"), &["x", "c"]), &Wanted::AsItIs)), None);
    }

    #[test]
    fn a_cluster_object_that_was_made_anew_takes_the_place_of_the_old_one() {
        let cluster = owner("new");
        assert_eq!(
            after(patch(&object(Some("old"), &["old"]), &Wanted::Cluster(&cluster))),
            Some((vec!["new".to_owned()], json!("new")))
        );
        let mut renamed = object(Some("new"), &["new"]);
        renamed.owner_references =
            Some(vec![OwnerReference { api_version: "v1".to_owned(), ..owner("new") }]);
        assert!(patch(&renamed, &Wanted::Cluster(&cluster)).is_some(), "another version is served by now");
        let lost = object(Some("new"), &[]);
        assert!(patch(&lost, &Wanted::Cluster(&cluster)).is_some(), "somebody took it off");
    }
}
