//! Writes what [`changes`] says to one claim.

use std::sync::Arc;
use std::time::Duration;

use crds::names::ANNOTATION_RECLAIM_POLICY;
use infra_api::VolumeId;
use k8s_openapi::api::core::v1::PersistentVolumeClaimCondition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use kube_kit::client::chain;
use kube_kit::events::Events;
use kube_kit::informer::Key;
use kube_kit::lean::{PersistentVolume, PersistentVolumeClaim};
use kube_kit::queue::{Next, Queue};
use serde_json::json;
use tokio::sync::Semaphore;

use super::bound::Bound;
use super::conditions::{Condition, Conditions, Look};
use super::decide::{ABNORMAL, NORMAL, changes, is_kept};
use crate::cluster::{self, reference, trim_claim};
use crate::infra::StorageInfra;

/// How long the watch may be behind a write that was in the way.
const BEHIND: Duration = Duration::from_millis(300);

/// The API server didn't do it.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what} of the claim: {reason}")]
pub(super) struct Failed {
    what: &'static str,
    reason: String,
}

/// Keeps claims.
pub(super) struct Reconciler {
    pub(super) client: Client,
    pub(super) infra: Arc<dyn StorageInfra>,
    pub(super) bound: Bound,
    pub(super) conditions: Conditions,
    pub(super) looks: Queue<Look>,
    pub(super) events: Events,
    /// Bounds the requests to the API server.
    pub(super) requests: Semaphore,
    /// Bounds those to the infra.
    pub(super) asking: Semaphore,
}

impl Reconciler {
    /// One pass over one claim.
    pub(super) async fn reconcile(&self, key: &Key) -> Result<Next, Failed> {
        let Some(claim) =
            self.bound.claims.get(key).filter(|claim| claim.metadata.deletion_timestamp.is_none())
        else {
            return Ok(Next::Wait);
        };
        let volume = cluster::volume_name(&claim).and_then(|name| self.bound.volumes.get(name));
        let Some(volume) = volume else { return Ok(Next::Wait) };
        let handle = cluster::handle(&volume.spec);
        let condition = handle.map_or(Condition::Unknown, |handle| self.conditions.of(handle));
        let changes = changes(&claim, &volume, &condition, &now());
        if let Some(policy) = changes.reclaim_policy
            // gc-csi wrote it in advance, by the class, and the claim may have found another driver's volume since.
            && (handle.is_some() || policy.is_none())
            && (policy.is_some() || !self.is_kept(&volume).await?)
        {
            return self.annotate(key, &claim, policy).await;
        }
        let (Some(condition), Some(Ok(id))) = (changes.healthy, handle.map(VolumeId::new)) else {
            return Ok(Next::Wait);
        };
        // What the claim says may be the newer word, of another replica that the infra's event reached first, or of
        // one whose stream of events is not broken; each would take back what the other wrote.
        let is_so = {
            let _place = self.asking.acquire().await;
            self.conditions.is_so(&*self.infra, &id, &self.bound).await
        };
        match is_so {
            Ok(true) => self.tell(key, &claim, &condition).await,
            Ok(false) => {
                self.looks.push(Look::One(id));
                Ok(Next::After(BEHIND))
            }
            Err(error) => Err(Failed { what: "read the condition of the volume", reason: error.to_string() }),
        }
    }

    /// Whether the volume is to be kept by what the API server says now. The watch of volumes may be behind that of
    /// claims, on which another replica wrote, and a claim without the annotation may be deleted by its guest at once.
    async fn is_kept(&self, volume: &PersistentVolume) -> Result<bool, Failed> {
        let name = volume.metadata.name.as_deref().unwrap_or_default();
        let _place = self.requests.acquire().await;
        let read = Api::<PersistentVolume>::all(self.client.clone()).get_opt(name).await;
        match read {
            Ok(volume) => Ok(volume.is_some_and(|volume| is_kept(&volume))),
            Err(error) => Err(Failed { what: "read the volume", reason: chain(&error) }),
        }
    }

    async fn annotate(
        &self,
        key: &Key,
        claim: &PersistentVolumeClaim,
        policy: Option<&str>,
    ) -> Result<Next, Failed> {
        let mut patch = json!({"metadata": same_object(claim)});
        patch["metadata"]["annotations"] = json!({ANNOTATION_RECLAIM_POLICY: policy});
        let _place = self.requests.acquire().await;
        let written = self.api(key).patch(&key.name, &PatchParams::default(), &Patch::Merge(patch)).await;
        self.take(written, "write the reclaim policy", || {
            let policy = policy.unwrap_or("Delete");
            tracing::info!(claim = %key, policy, "told the claim its volume's reclaim policy");
        })
    }

    async fn tell(
        &self,
        key: &Key,
        claim: &PersistentVolumeClaim,
        condition: &PersistentVolumeClaimCondition,
    ) -> Result<Next, Failed> {
        // Of a strategic patch the API server takes list entries by their key, which is the type here.
        let patch = json!({"metadata": same_object(claim), "status": {"conditions": [condition]}});
        let _place = self.requests.acquire().await;
        let written =
            self.api(key).patch_status(&key.name, &PatchParams::default(), &Patch::Strategic(patch)).await;
        self.take(written, "write the condition", || {
            let message = condition.message.as_deref().unwrap_or_default();
            let note = format!("the storage infra says: {message}");
            if condition.status == "False" {
                tracing::warn!(claim = %key, message, "the volume is not well");
                self.events.warning(reference(claim), "Watch", ABNORMAL, note);
            } else {
                tracing::info!(claim = %key, "the volume is well again");
                self.events.normal(reference(claim), "Watch", NORMAL, note);
            }
        })
    }

    /// Keeps what a write answered, and says when to look again.
    fn take(
        &self,
        written: kube::Result<PersistentVolumeClaim>,
        what: &'static str,
        done: impl FnOnce(),
    ) -> Result<Next, Failed> {
        match written {
            Ok(mut claim) => {
                trim_claim(&mut claim);
                self.bound.claims.changed(claim);
                done();
                // There may be more to write, on what was answered.
                Ok(Next::After(Duration::ZERO))
            }
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(Next::Wait),
            // Somebody was faster, such as another replica with the very same.
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(Next::After(BEHIND)),
            Err(error) => Err(Failed { what, reason: chain(&error) }),
        }
    }

    fn api(&self, key: &Key) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), &key.namespace)
    }
}

/// Makes a patch fail when the claim is another by now, or not as it was.
fn same_object(claim: &PersistentVolumeClaim) -> serde_json::Value {
    json!({"uid": claim.metadata.uid, "resourceVersion": claim.metadata.resource_version})
}

/// Now, in the whole seconds that Kubernetes keeps, so that a time written compares equal to the time read.
fn now() -> Time {
    let now = Timestamp::now();
    Time(Timestamp::from_second(now.as_second()).unwrap_or(now))
}
