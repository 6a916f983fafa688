//! Reconciler of one claim: writes the [`changes`].

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crds::names::ANNOTATION_RECLAIM_POLICY;
use infra_api::VolumeId;
use k8s_openapi::api::core::v1::PersistentVolumeClaimCondition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use kube_kit::client::chain;
use kube_kit::events::Events;
use kube_kit::informer::Key;
use kube_kit::partial::{PersistentVolume, PersistentVolumeClaim};
use kube_kit::queue::{NextAction, Queue};
use serde_json::json;
use tokio::sync::Semaphore;

use super::bindings::Bindings;
use super::conditions::{Condition, Conditions, Refresh};
use super::decide::{changes, is_kept};
use super::protection::protection;
use super::waiting::Waiting;
use crate::cluster::{self, reference, trim_claim};
use crate::event_reason::EventReason;
use crate::infra::StorageInfra;
use crate::volume_attachment::Attachments;

/// Delay before a retry after a conflict: the cache lags behind the write of another client.
pub(super) const CACHE_LAG: Duration = Duration::from_millis(300);

/// A request failed.
#[derive(Debug, thiserror::Error)]
#[error("failed to {what} of the claim: {reason}")]
pub(super) struct RequestError {
    pub(super) what: &'static str,
    pub(super) reason: String,
}

/// Shared state of all reconciles.
pub(super) struct Reconciler {
    pub(super) client: Client,
    pub(super) infra: Arc<dyn StorageInfra>,
    pub(super) bindings: Bindings,
    pub(super) conditions: Conditions,
    pub(super) refreshes: Queue<Refresh>,
    pub(super) events: Events,
    pub(super) waiting: Waiting,
    /// None if the cluster has no VirtualMachines.
    pub(super) attachments: Option<Attachments>,
    /// Limits requests to the API server.
    pub(super) requests: Semaphore,
    /// Limits calls to the storage infra.
    pub(super) infra_calls: Semaphore,
}

impl Reconciler {
    /// Reconciles one claim.
    pub(super) async fn reconcile(&self, key: &Key) -> Result<NextAction, RequestError> {
        let Some(claim) = self.bindings.claims.get(key) else {
            self.waiting.remove(key);
            return Ok(NextAction::AwaitChange);
        };
        let volume = cluster::volume_name(&claim).and_then(|name| self.bindings.volumes.get(name));
        let protection = protection(&claim, volume.as_deref());
        if let Some(next) = self.protect(key, &claim, protection).await? {
            return Ok(next);
        }
        let Some(volume) = volume.filter(|_| !cluster::is_terminating(&claim)) else {
            return Ok(NextAction::AwaitChange);
        };
        let handle = cluster::handle(&volume.spec);
        let condition = handle.map_or(Condition::Unknown, |handle| self.conditions.of(handle));
        let changes = changes(&claim, &volume, &condition, &now());
        if let Some(labels) = &changes.record {
            return self.record(&volume, labels).await;
        }
        if !changes.labels.is_empty() {
            return self.label(key, &claim, &changes.labels).await;
        }
        if let Some(next) = self.write_sharing(key, &claim, &volume).await? {
            return Ok(next);
        }
        if let Some(policy) = changes.reclaim_policy
            // gc-csi sets it in advance, by the class; the claim may have been bound to another driver's volume since.
            && (handle.is_some() || policy.is_none())
            && (policy.is_some() || !self.is_kept(&volume).await?)
        {
            return self.annotate(key, &claim, policy).await;
        }
        let (Some(condition), Some(Ok(id))) = (changes.healthy, handle.map(VolumeId::new)) else {
            return Ok(NextAction::AwaitChange);
        };
        // The claim's condition may be newer than this replica's cache: another replica may have received the event first.
        // Without this check, two replicas would revert each other's writes.
        let is_current = {
            let _permit = self.infra_calls.acquire().await;
            self.conditions.is_current(&*self.infra, &id, &self.bindings).await
        };
        match is_current {
            Ok(true) => self.write_condition(key, &claim, &condition).await,
            Ok(false) => {
                self.refreshes.push(Refresh::One(id));
                Ok(NextAction::RequeueAfter(CACHE_LAG))
            }
            Err(error) => {
                Err(RequestError { what: "read the condition of the volume", reason: error.to_string() })
            }
        }
    }

    /// Whether the reclaim policy is Retain, read from the API server. The cache of volumes may lag behind a write of another
    /// replica to the claim, and the guest may delete a claim as soon as the annotation is removed.
    async fn is_kept(&self, volume: &PersistentVolume) -> Result<bool, RequestError> {
        let name = volume.metadata.name.as_deref().unwrap_or_default();
        Ok(self.read_volume(name).await?.is_some_and(|volume| is_kept(&volume)))
    }

    /// A PersistentVolume as the API server returns it now; None if it does not exist.
    pub(super) async fn read_volume(&self, name: &str) -> Result<Option<PersistentVolume>, RequestError> {
        let _permit = self.requests.acquire().await;
        let found = Api::<PersistentVolume>::all(self.client.clone()).get_opt(name).await;
        found.map_err(|error| RequestError { what: "read the volume", reason: chain(&error) })
    }

    /// Writes the record of whose a volume is to its PersistentVolume.
    async fn record(
        &self,
        volume: &PersistentVolume,
        labels: &BTreeMap<String, String>,
    ) -> Result<NextAction, RequestError> {
        let name = volume.metadata.name.as_deref().unwrap_or_default();
        let mut patch = json!({"metadata": same_object(&volume.metadata)});
        patch["metadata"]["labels"] = json!(labels);
        let _permit = self.requests.acquire().await;
        let api = Api::<PersistentVolume>::all(self.client.clone());
        match api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await {
            Ok(_) => {
                tracing::info!(volume = name, "recorded the guest of the volume by the labels of its claim");
                Ok(NextAction::AwaitChange)
            }
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(NextAction::AwaitChange),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(NextAction::RequeueAfter(CACHE_LAG)),
            Err(error) => Err(RequestError { what: "record the volume", reason: chain(&error) }),
        }
    }

    /// Copies labels of the volume to its claim.
    async fn label(
        &self,
        key: &Key,
        claim: &PersistentVolumeClaim,
        labels: &BTreeMap<String, String>,
    ) -> Result<NextAction, RequestError> {
        let mut patch = json!({"metadata": same_object(&claim.metadata)});
        patch["metadata"]["labels"] = json!(labels);
        let written = self.patch(key, patch).await;
        self.store(written, "write the labels", || {
            tracing::info!(claim = %key, "copied the labels of the volume to the claim");
        })
    }

    async fn annotate(
        &self,
        key: &Key,
        claim: &PersistentVolumeClaim,
        policy: Option<&str>,
    ) -> Result<NextAction, RequestError> {
        let mut patch = json!({"metadata": same_object(&claim.metadata)});
        patch["metadata"]["annotations"] = json!({ANNOTATION_RECLAIM_POLICY: policy});
        let written = self.patch(key, patch).await;
        self.store(written, "write the reclaim policy", || {
            let policy = policy.unwrap_or("Delete");
            tracing::info!(claim = %key, policy, "annotated the claim with the reclaim policy of its volume");
        })
    }

    async fn write_condition(
        &self,
        key: &Key,
        claim: &PersistentVolumeClaim,
        condition: &PersistentVolumeClaimCondition,
    ) -> Result<NextAction, RequestError> {
        // A strategic merge patch merges conditions by their key, the type.
        let patch = json!({"metadata": same_object(&claim.metadata), "status": {"conditions": [condition]}});
        let written = self.patch_status(key, patch).await;
        self.store(written, "write the condition", || {
            let message = condition.message.as_deref().unwrap_or_default();
            let note = format!("the storage infra reports: {message}");
            if condition.status == "False" {
                tracing::warn!(claim = %key, message, "the volume is unhealthy");
                let reason = EventReason::VolumeConditionAbnormal.as_str();
                self.events.warning(reference(claim), "Watch", reason, note);
            } else {
                tracing::info!(claim = %key, "the volume is healthy again");
                let reason = EventReason::VolumeConditionNormal.as_str();
                self.events.normal(reference(claim), "Watch", reason, note);
            }
        })
    }

    /// Stores the response of a write in the mutation cache. Returns when to reconcile again.
    pub(super) fn store(
        &self,
        written: kube::Result<PersistentVolumeClaim>,
        what: &'static str,
        done: impl FnOnce(),
    ) -> Result<NextAction, RequestError> {
        match written {
            Ok(mut claim) => {
                trim_claim(&mut claim);
                self.bindings.claims.changed(claim);
                done();
                // There may be another change to write.
                Ok(NextAction::RequeueAfter(Duration::ZERO))
            }
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(NextAction::AwaitChange),
            // A conflict: another client wrote first, perhaps another replica the same change.
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(NextAction::RequeueAfter(CACHE_LAG)),
            Err(error) => Err(RequestError { what, reason: chain(&error) }),
        }
    }

    /// Sends a strategic merge patch, which merges finalizers by their value.
    pub(super) async fn patch(
        &self,
        key: &Key,
        patch: serde_json::Value,
    ) -> kube::Result<PersistentVolumeClaim> {
        let _permit = self.requests.acquire().await;
        self.api(key).patch(&key.name, &PatchParams::default(), &Patch::Strategic(patch)).await
    }

    /// The same for the status.
    pub(super) async fn patch_status(
        &self,
        key: &Key,
        patch: serde_json::Value,
    ) -> kube::Result<PersistentVolumeClaim> {
        let _permit = self.requests.acquire().await;
        self.api(key).patch_status(&key.name, &PatchParams::default(), &Patch::Strategic(patch)).await
    }

    fn api(&self, key: &Key) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), &key.namespace)
    }
}

/// Patch metadata that fails if the object was replaced or changed since the read.
pub(super) fn same_object(metadata: &ObjectMeta) -> serde_json::Value {
    json!({"uid": metadata.uid, "resourceVersion": metadata.resource_version})
}

/// The current time in whole seconds, as Kubernetes stores it, so that a written time compares equal when read back.
fn now() -> Time {
    let now = Timestamp::now();
    Time(Timestamp::from_second(now.as_second()).unwrap_or(now))
}
