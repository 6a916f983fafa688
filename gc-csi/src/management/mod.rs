//! The only room that talks to the management cluster. Everything is read from shared informers; the
//! writes are claims made, changed and deleted ([`claims`]), snapshots taken and deleted ([`snapshots`]), and disks put
//! into and taken out of `VirtualMachine.spec.volumes` ([`disks`]).

mod behind;
pub mod capacity;
pub mod claims;
pub mod commit;
pub mod consumers;
pub mod disks;
mod entries;
mod gather;
pub(crate) mod inventory;
mod lost;
pub(crate) mod metadata;
mod optional;
pub(crate) mod orphans;
mod owner;
mod recent;
pub mod sharing;
pub mod snapshots;
mod warnings;

use std::collections::BTreeMap;
use std::sync::Arc;

use crds::VirtualMachine;
use crds::names::{self, ClusterId};
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttributesClass};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Api, Client};
use kube_kit::client::chain;
use kube_kit::health::Health;
use kube_kit::index::Index;
use kube_kit::informer::{Change, Informer, Key};
use kube_kit::lean::PersistentVolumeClaim;
use tokio_util::sync::CancellationToken;

use capacity::Capacities;
use commit::Committer;
pub use optional::Optional;
pub(crate) use owner::{Fate, GuestDeletion, Made, Owner};
use recent::Recent;
use snapshots::{Snapshots, VolumeSnapshot};
use warnings::Warnings;

use crate::vm_operator::VmOperator;

/// Where this guest lives in the management cluster, and how its objects are named.
#[derive(Debug, Clone)]
pub struct Home {
    /// The guest's namespace.
    pub namespace: String,
    /// The guest's identity, on the label of everything it owns.
    pub cluster: ClusterId,
    /// First part of the names of its claims.
    pub prefix: String,
}

/// What the management cluster serves of what not every cluster does.
pub(crate) struct Served<'a> {
    /// The version of `VirtualMachine`.
    pub(crate) machines: &'a str,
    /// Who carries out what is asked of machines.
    pub(crate) vm_operator: VmOperator,
    /// What may not be served at all.
    pub(crate) optional: &'a Optional,
}

/// Who is told of every change that a watch shows, on the watch's own task.
pub(crate) struct Listeners {
    /// Of a machine.
    pub(crate) machine_changed: Listener<VirtualMachine>,
    /// Of a claim.
    pub(crate) claim_changed: Listener<PersistentVolumeClaim>,
    /// Of a snapshot.
    pub(crate) snapshot_changed: Listener<VolumeSnapshot>,
}

type Listener<K> = Box<dyn Fn(&Change<'_, K>) + Send + Sync>;

/// The management cluster, as one guest sees it.
#[derive(Clone, Debug)]
pub struct Management {
    home: Home,
    claims_api: Api<PersistentVolumeClaim>,
    claims: Informer<PersistentVolumeClaim>,
    classes: Informer<StorageClass>,
    machines_api: Api<VirtualMachine>,
    machines: Informer<VirtualMachine>,
    machines_by_disk: Arc<Index>,
    warnings: Warnings,
    committer: Committer,
    vm_operator: VmOperator,
    /// Claims that are gone.
    recent: Recent,
    /// Disks that left a machine.
    left: Recent,
    /// Disks that came into a machine.
    arrived: Recent,
    owner: Owner,
    snapshots: Option<Snapshots>,
    attributes_classes: Option<Informer<VolumeAttributesClass>>,
    capacities: Option<Capacities>,
}

/// Why a request to the management API failed, as far as a caller must know.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ApiError {
    /// A quota of the namespace is used up.
    #[error("{0}")]
    Quota(String),
    /// The guest may not do this: RBAC, admission, or credentials.
    #[error("the management cluster refused: {0}")]
    Forbidden(String),
    /// The object is not valid to the API server or an admission check.
    #[error("the management cluster refused the object as invalid: {0}")]
    Invalid(String),
    /// Somebody changed the object in between.
    #[error("the object was changed by somebody else: {0}")]
    Conflict(String),
    /// There is no such object.
    #[error("not found in the management cluster: {0}")]
    NotFound(String),
    /// There is such an object already.
    #[error("exists in the management cluster: {0}")]
    Exists(String),
    /// No answer, or an answer that says to come back: the request may or may not have been carried out.
    #[error("the management API did not answer: {0}")]
    Unavailable(String),
}

impl From<kube::Error> for ApiError {
    fn from(error: kube::Error) -> Self {
        let kube::Error::Api(status) = &error else {
            return Self::Unavailable(chain(&error));
        };
        let message = chain(&error);
        match (status.code, status.reason.as_str()) {
            (403, _) if message.contains("exceeded quota") => Self::Quota(message),
            (401 | 403, _) => Self::Forbidden(message),
            (404, _) => Self::NotFound(message),
            (409, "AlreadyExists") => Self::Exists(message),
            (409, _) => Self::Conflict(message),
            (400 | 413 | 422, _) => Self::Invalid(message),
            _ => Self::Unavailable(message),
        }
    }
}

impl Management {
    /// Starts the informers.
    pub(crate) fn start(
        client: &Client,
        home: Home,
        Served { machines: version, vm_operator, optional }: Served<'_>,
        owner: Owner,
        ready: &Health,
        stop: &CancellationToken,
        listeners: Listeners,
    ) -> Self {
        let namespace = home.namespace.as_str();
        let unread = "not read yet";
        let resource = crds::virtual_machine_resource(version);

        let claims = Informer::builder(
            "management PersistentVolumeClaims",
            Api::namespaced(client.clone(), namespace),
        )
        .trim(trim_claim)
        .on_change(listeners.claim_changed)
        .start(ready.check("management-claims", unread), stop.clone());
        let classes = Informer::builder("management StorageClasses", Api::all(client.clone()))
            .trim(|class: &mut StorageClass| {
                class.metadata.annotations = None;
                if let Some(parameters) = &mut class.parameters {
                    parameters.retain(|key, _| key == names::PARAMETER_SHAREABLE);
                }
            })
            .start(ready.check("management-classes", unread), stop.clone());
        let machines_by_disk = Arc::new(Index::default());
        let index = machines_by_disk.clone();
        let machines =
            Informer::builder("VirtualMachines", Api::namespaced_with(client.clone(), namespace, &resource))
                .trim(trim_machine)
                .on_change(move |change| {
                    index
                        .put(change.key, change.new.into_iter().flat_map(|machine| disks::names_in(machine)));
                })
                .on_change(listeners.machine_changed)
                .start(ready.check("virtual-machines", unread), stop.clone());
        let warnings = Warnings::start(
            client,
            namespace,
            claims.clone(),
            ready.check("management-events", unread),
            stop,
        );

        let snapshots = optional
            .snapshots
            .then(|| Snapshots::start(client, namespace, ready, stop, listeners.snapshot_changed));
        let attributes_classes = optional.attributes_classes.then(|| {
            Informer::builder("management VolumeAttributesClasses", Api::all(client.clone()))
                .trim(|class: &mut VolumeAttributesClass| {
                    class.metadata.annotations = None;
                    class.parameters = None;
                })
                .start(ready.check("management-attributes-classes", unread), stop.clone())
        });
        let capacities = optional
            .capacity_namespace
            .as_ref()
            .map(|published| Capacities::start(client, namespace, published, ready, stop));

        let machines_api: Api<VirtualMachine> = Api::namespaced_with(client.clone(), namespace, &resource);
        Self {
            claims_api: Api::namespaced(client.clone(), namespace),
            committer: Committer::new(machines_api.clone(), machines.clone(), namespace),
            vm_operator,
            recent: Recent::default(),
            left: Recent::default(),
            arrived: Recent::default(),
            home,
            claims,
            classes,
            machines_api,
            machines,
            machines_by_disk,
            warnings,
            owner,
            snapshots,
            attributes_classes,
            capacities,
        }
    }

    /// Why what is known of this guest's claims and machines may be behind: the link is down. None while it is up.
    pub(crate) fn trouble(&self) -> Option<String> {
        self.machines.trouble().or_else(|| self.claims.trouble())
    }

    /// The machine of this name.
    pub(crate) fn machine(&self, name: &str) -> Option<Arc<VirtualMachine>> {
        self.machines.get(&self.key(name))
    }

    /// Who carries out what is asked of machines.
    pub(crate) fn vm_operator(&self) -> VmOperator {
        self.vm_operator
    }

    /// The name of an object of this guest's namespace, for people.
    pub(crate) fn full_name(&self, name: &str) -> String {
        self.key(name).to_string()
    }

    /// Waits until everything was read once.
    pub(crate) async fn synced(&self) {
        self.claims.synced().await;
        self.machines.synced().await;
        self.classes.synced().await;
    }

    /// Whether everything was read once; no call is answered before.
    pub fn is_synced(&self) -> bool {
        self.claims.is_synced()
            && self.machines.is_synced()
            && self.classes.is_synced()
            && self.snapshots.as_ref().is_none_or(Snapshots::is_synced)
            && self.attributes_classes.as_ref().is_none_or(Informer::is_synced)
            && self.capacities.as_ref().is_none_or(Capacities::is_synced)
    }

    fn key(&self, name: &str) -> Key {
        Key::new(self.home.namespace.clone(), name)
    }
}

/// Whether an object can have this name: a DNS subdomain (RFC 1123), as the API server demands.
pub(crate) fn is_object_name(name: &str) -> bool {
    let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    name.len() <= 253
        && name.split('.').all(|label| {
            !label.is_empty() && label.chars().all(legal) && !label.starts_with('-') && !label.ends_with('-')
        })
}

/// What holds an object that is on its way out, with words before it; nothing where that can't be seen.
fn held_by(metadata: Option<&ObjectMeta>) -> String {
    let finalizers = metadata.and_then(|metadata| metadata.finalizers.as_ref());
    let held = finalizers.filter(|finalizers| !finalizers.is_empty());
    held.map(|finalizers| format!(": held by finalizers {}", finalizers.join(", "))).unwrap_or_default()
}

/// Keeps of labels or annotations what is read. A map that has become empty would still take up half a KiB.
pub(crate) fn keep(map: &mut Option<BTreeMap<String, String>>, is_read: impl Fn(&str) -> bool) {
    if let Some(map) = map {
        map.retain(|key, _| is_read(key));
    }
    map.take_if(|map| map.is_empty());
}

/// Keeps identity, owners, sizes, classes and phase, and the conditions that somebody here reads.
fn trim_claim(claim: &mut PersistentVolumeClaim) {
    keep(&mut claim.metadata.annotations, |key| {
        key.starts_with("nestor.dev/") || key.starts_with(names::ANNOTATION_CONSUMER_PREFIX)
    });
    let read = [names::CONDITION_HEALTHY, claims::CONDITION_RESIZE_FAILED, claims::CONDITION_MODIFY_FAILED];
    claim.status.conditions.retain(|condition| read.contains(&condition.type_.as_str()));
    claim.status.conditions.shrink_to_fit();
}

/// Keeps identity, its guest, whether its node is said to be lost, and disks: all of them, since a change names an entry by its place
/// in the list.
fn trim_machine(machine: &mut VirtualMachine) {
    // That there are others stays known: a JSON Patch that adds the first one is another.
    let has_annotations = machine.metadata.annotations.as_ref().is_some_and(|all| !all.is_empty());
    let read = [names::ANNOTATION_OUT_OF_SERVICE, names::ANNOTATION_VOLUMES_CONFIRMED];
    keep(&mut machine.metadata.annotations, |key| read.contains(&key));
    if has_annotations {
        machine.metadata.annotations.get_or_insert_default();
    }
    keep(&mut machine.metadata.labels, |key| key == names::LABEL_CLUSTER_ID);
    machine.metadata.finalizers = None;
    machine.metadata.owner_references = None;
    machine.spec.volumes.shrink_to_fit();
    if let Some(status) = &mut machine.status {
        status.volumes.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_claim_keeps_what_is_read_of_it_and_no_empty_maps() {
        let trimmed = |annotations: Value| {
            let mut claim: PersistentVolumeClaim = serde_json::from_value(json!({
                "metadata": {"name": "c", "annotations": annotations, "finalizers": ["f"], "labels": {"team": "a"}},
                "status": {"conditions": [
                    {"type": "FileSystemResizePending", "status": "True"},
                    {"type": names::CONDITION_HEALTHY, "status": "False"},
                ]},
            }))
            .unwrap();
            trim_claim(&mut claim);
            claim
        };
        let kept = trimmed(json!({"nestor.dev/guest-pv": "a", "consumer.nestor.dev/g": "b", "other": "c"}));
        let annotations = kept.metadata.annotations.unwrap_or_default();
        assert_eq!(
            annotations.into_keys().collect::<Vec<_>>(),
            ["consumer.nestor.dev/g", "nestor.dev/guest-pv"]
        );
        assert_eq!(kept.metadata.labels.unwrap_or_default()["team"], "a");
        assert_eq!(kept.metadata.finalizers.unwrap_or_default(), ["f"]);
        let conditions: Vec<_> = kept.status.conditions.iter().map(|one| one.type_.as_str()).collect();
        assert_eq!(conditions, [names::CONDITION_HEALTHY]);
        assert_eq!(trimmed(json!({"other": "c"})).metadata.annotations, None);
    }

    #[test]
    fn a_name_that_could_lead_elsewhere_in_a_url_is_no_object() {
        for good in ["vm-1", "a", "a.b-c.9"] {
            assert!(is_object_name(good), "{good}");
        }
        for bad in ["", ".", "..", "a/b", "../a", "a b", "A", "a?x", "a%2f", "-a", "a.", &"a".repeat(254)] {
            assert!(!is_object_name(bad), "{bad}");
        }
    }
}
