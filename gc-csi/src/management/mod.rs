//! Management cluster client: the only module that talks to the management cluster. Reads come from shared informers.
//! Writes create, change and delete claims ([`claims`]) and snapshots ([`snapshots`]), and add and remove volume
//! entries of VirtualMachines ([`volume_entries`]).

mod batcher;
pub mod capacity;
pub mod claims;
pub mod commit;
pub mod consumers;
pub(crate) mod inventory;
pub(crate) mod metadata;
mod optional_apis;
pub(crate) mod orphans;
mod out_of_service;
mod own_entries;
mod owner_refs;
mod recent_outcomes;
pub mod sharing;
pub mod snapshots;
mod stale_cache;
pub mod volume_entries;
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
use kube_kit::partial::PersistentVolumeClaim;
use tokio_util::sync::CancellationToken;

use capacity::Capacities;
use commit::Committer;
pub use optional_apis::OptionalApis;
pub(crate) use owner_refs::{ClusterOwner, DeletionOutcome, GuestDeletion, OwnedObject};
use recent_outcomes::RecentOutcomes;
use snapshots::{Snapshots, VolumeSnapshot};
use warnings::Warnings;

use crate::vm_operator::VmOperator;

/// Identity of this guest in the management cluster.
#[derive(Debug, Clone)]
pub struct GuestIdentity {
    /// Namespace of the guest.
    pub namespace: String,
    /// ID of the guest, in the label of everything it owns.
    pub cluster: ClusterId,
    /// Name prefix of its claims.
    pub prefix: String,
}

/// APIs that differ between management clusters.
pub(crate) struct ServedApis<'a> {
    /// Version of `VirtualMachine`.
    pub(crate) vm_version: &'a str,
    /// The VM Operator.
    pub(crate) vm_operator: VmOperator,
    /// APIs that may be missing.
    pub(crate) optional: &'a OptionalApis,
}

/// Handlers of changes, called on the informer's task.
pub(crate) struct ChangeHandlers {
    /// A VM changed.
    pub(crate) vm_changed: ChangeHandler<VirtualMachine>,
    /// A claim changed.
    pub(crate) claim_changed: ChangeHandler<PersistentVolumeClaim>,
    /// A snapshot changed.
    pub(crate) snapshot_changed: ChangeHandler<VolumeSnapshot>,
}

type ChangeHandler<K> = Box<dyn Fn(&Change<'_, K>) + Send + Sync>;

/// Client of the management cluster, limited to one guest.
#[derive(Clone, Debug)]
pub struct Management {
    identity: GuestIdentity,
    claims_api: Api<PersistentVolumeClaim>,
    claims: Informer<PersistentVolumeClaim>,
    classes: Informer<StorageClass>,
    vms_api: Api<VirtualMachine>,
    vms: Informer<VirtualMachine>,
    vms_by_disk: Arc<Index>,
    warnings: Warnings,
    committer: Committer,
    vm_operator: VmOperator,
    /// Claims whose deletion was observed recently.
    deleted_claims: RecentOutcomes,
    /// Disks whose detach was observed recently.
    detached_disks: RecentOutcomes,
    /// Disks whose attach was observed recently.
    attached_disks: RecentOutcomes,
    cluster_owner: ClusterOwner,
    snapshots: Option<Snapshots>,
    attributes_classes: Option<Informer<VolumeAttributesClass>>,
    capacities: Option<Capacities>,
}

/// Error of a management API request, as far as callers distinguish it.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ApiError {
    /// A quota of the namespace is exceeded.
    #[error("{0}")]
    Quota(String),
    /// Forbidden by RBAC or admission, or invalid credentials.
    #[error("the management cluster refused: {0}")]
    Forbidden(String),
    /// Invalid for the API server or an admission check.
    #[error("the management cluster refused the object as invalid: {0}")]
    Invalid(String),
    /// The object was changed concurrently.
    #[error("the object was changed concurrently: {0}")]
    Conflict(String),
    /// The object does not exist.
    #[error("not found in the management cluster: {0}")]
    NotFound(String),
    /// The object already exists.
    #[error("already exists in the management cluster: {0}")]
    Exists(String),
    /// No answer, or a retryable one: the request may or may not have been carried out.
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
        identity: GuestIdentity,
        ServedApis { vm_version: version, vm_operator, optional }: ServedApis<'_>,
        cluster_owner: ClusterOwner,
        ready: &Health,
        stop: &CancellationToken,
        handlers: ChangeHandlers,
    ) -> Self {
        let namespace = identity.namespace.as_str();
        let not_synced = "not synced yet";
        let resource = crds::virtual_machine_resource(version);

        let claims = Informer::builder(
            "management PersistentVolumeClaims",
            Api::namespaced(client.clone(), namespace),
        )
        .trim(trim_claim)
        .on_change(handlers.claim_changed)
        .start(ready.check("watch of management PersistentVolumeClaims", not_synced), stop.clone());
        let classes = Informer::builder("management StorageClasses", Api::all(client.clone()))
            .trim(|class: &mut StorageClass| {
                class.metadata.annotations = None;
                if let Some(parameters) = &mut class.parameters {
                    parameters.retain(|key, _| key == names::PARAMETER_SHAREABLE);
                }
            })
            .start(ready.check("watch of management StorageClasses", not_synced), stop.clone());
        let vms_by_disk = Arc::new(Index::default());
        let index = vms_by_disk.clone();
        let vms =
            Informer::builder("VirtualMachines", Api::namespaced_with(client.clone(), namespace, &resource))
                .trim(trim_vm)
                .on_change(move |change| {
                    index.put(
                        change.key,
                        change.new.into_iter().flat_map(|vm| volume_entries::index_keys(vm)),
                    );
                })
                .on_change(handlers.vm_changed)
                .start(ready.check("watch of VirtualMachines", not_synced), stop.clone());
        let warnings = Warnings::start(
            client,
            namespace,
            claims.clone(),
            ready.check("watch of warnings about management claims", not_synced),
            stop,
        );

        let snapshots = optional
            .snapshots
            .then(|| Snapshots::start(client, namespace, ready, stop, handlers.snapshot_changed));
        let attributes_classes = optional.attributes_classes.then(|| {
            Informer::builder("management VolumeAttributesClasses", Api::all(client.clone()))
                .trim(|class: &mut VolumeAttributesClass| {
                    class.metadata.annotations = None;
                    class.parameters = None;
                })
                .start(ready.check("watch of management VolumeAttributesClasses", not_synced), stop.clone())
        });
        let capacities = optional
            .capacity_namespace
            .as_ref()
            .map(|published| Capacities::start(client, namespace, published, ready, stop));

        let vms_api: Api<VirtualMachine> = Api::namespaced_with(client.clone(), namespace, &resource);
        Self {
            claims_api: Api::namespaced(client.clone(), namespace),
            committer: Committer::new(vms_api.clone(), vms.clone(), namespace),
            vm_operator,
            deleted_claims: RecentOutcomes::default(),
            detached_disks: RecentOutcomes::default(),
            attached_disks: RecentOutcomes::default(),
            identity,
            claims,
            classes,
            vms_api,
            vms,
            vms_by_disk,
            warnings,
            cluster_owner,
            snapshots,
            attributes_classes,
            capacities,
        }
    }

    /// The watch error while claims or VMs can't be watched, so that caches may be stale; None while connected.
    pub(crate) fn watch_error(&self) -> Option<String> {
        self.vms.watch_error().or_else(|| self.claims.watch_error())
    }

    /// The VM of this name, from the cache.
    pub(crate) fn vm(&self, name: &str) -> Option<Arc<VirtualMachine>> {
        self.vms.get(&self.key(name))
    }

    /// The VM Operator of the management cluster.
    pub(crate) fn vm_operator(&self) -> VmOperator {
        self.vm_operator
    }

    /// Namespaced name of an object of this guest, for messages.
    pub(crate) fn full_name(&self, name: &str) -> String {
        self.key(name).to_string()
    }

    /// Waits for the first list of claims, VMs and classes.
    pub(crate) async fn synced(&self) {
        self.claims.synced().await;
        self.vms.synced().await;
        self.classes.synced().await;
    }

    /// Whether all informers are synced; no call is answered before.
    pub fn is_synced(&self) -> bool {
        self.claims.is_synced()
            && self.vms.is_synced()
            && self.classes.is_synced()
            && self.snapshots.as_ref().is_none_or(Snapshots::is_synced)
            && self.attributes_classes.as_ref().is_none_or(Informer::is_synced)
            && self.capacities.as_ref().is_none_or(Capacities::is_synced)
    }

    fn key(&self, name: &str) -> Key {
        Key::new(self.identity.namespace.clone(), name)
    }
}

/// Whether this is a valid object name: a DNS subdomain (RFC 1123).
pub(crate) fn is_object_name(name: &str) -> bool {
    let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    name.len() <= 253
        && name.split('.').all(|label| {
            !label.is_empty() && label.chars().all(legal) && !label.starts_with('-') && !label.ends_with('-')
        })
}

/// Text about the finalizers of an object that is being deleted; empty if unknown.
fn blocking_finalizers(metadata: Option<&ObjectMeta>) -> String {
    let finalizers = metadata.and_then(|metadata| metadata.finalizers.as_ref());
    let held = finalizers.filter(|finalizers| !finalizers.is_empty());
    held.map(|finalizers| format!(": held by finalizers {}", finalizers.join(", "))).unwrap_or_default()
}

/// Removes all other labels or annotations. An empty map would still take half a KiB.
pub(crate) fn retain_keys(map: &mut Option<BTreeMap<String, String>>, is_read: impl Fn(&str) -> bool) {
    if let Some(map) = map {
        map.retain(|key, _| is_read(key));
    }
    map.take_if(|map| map.is_empty());
}

/// Keeps identity, owners, sizes, classes, phase and the conditions that gc-csi reads.
fn trim_claim(claim: &mut PersistentVolumeClaim) {
    retain_keys(&mut claim.metadata.annotations, |key| {
        key.starts_with("nestor.dev/") || key.starts_with(names::ANNOTATION_CONSUMER_PREFIX)
    });
    let read = [names::CONDITION_HEALTHY, claims::CONDITION_RESIZE_FAILED, claims::CONDITION_MODIFY_FAILED];
    claim.status.conditions.retain(|condition| read.contains(&condition.type_.as_str()));
    claim.status.conditions.shrink_to_fit();
}

/// Keeps identity, the guest's label, the out-of-service annotation and all volumes, since a PATCH names an entry by
/// its index.
fn trim_vm(vm: &mut VirtualMachine) {
    // An empty map shows that there are annotations: a JSON Patch that adds the first one differs.
    let has_annotations = vm.metadata.annotations.as_ref().is_some_and(|all| !all.is_empty());
    let read = [names::ANNOTATION_OUT_OF_SERVICE, names::ANNOTATION_VOLUMES_CONFIRMED];
    retain_keys(&mut vm.metadata.annotations, |key| read.contains(&key));
    if has_annotations {
        vm.metadata.annotations.get_or_insert_default();
    }
    retain_keys(&mut vm.metadata.labels, |key| key == names::LABEL_CLUSTER_ID);
    vm.metadata.finalizers = None;
    vm.metadata.owner_references = None;
    vm.spec.volumes.shrink_to_fit();
    if let Some(status) = &mut vm.status {
        status.volumes.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn trimming_a_claim_keeps_only_what_is_read() {
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
    fn names_that_could_change_a_url_are_no_object_names() {
        for good in ["vm-1", "a", "a.b-c.9"] {
            assert!(is_object_name(good), "{good}");
        }
        for bad in ["", ".", "..", "a/b", "../a", "a b", "A", "a?x", "a%2f", "-a", "a.", &"a".repeat(254)] {
            assert!(!is_object_name(bad), "{bad}");
        }
    }
}
