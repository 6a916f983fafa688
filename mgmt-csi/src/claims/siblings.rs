//! Claims of a volume that guests of several namespaces share: writes what [`sharing`] decides.

use kube::Api;
use kube::api::{Patch, PatchParams};
use kube_kit::client::chain;
use kube_kit::informer::Key;
use kube_kit::partial::{PersistentVolume, PersistentVolumeClaim};
use kube_kit::quantity;
use kube_kit::queue::NextAction;
use serde_json::json;

use super::reconcile::{CACHE_LAG, Reconciler, RequestError, same_object};
use super::sharing::{Sharing, sharing};

impl Reconciler {
    /// Writes the next change of a claim and its PersistentVolume; None if there is none.
    pub(super) async fn write_sharing(
        &self,
        key: &Key,
        claim: &PersistentVolumeClaim,
        volume: &PersistentVolume,
    ) -> Result<Option<NextAction>, RequestError> {
        let all = self.bindings.volumes.sharing(&volume.spec);
        match sharing(claim, volume, &all) {
            Sharing { volume_capacity: Some(bytes), .. } => self.grow_volume(volume, bytes).await.map(Some),
            Sharing { claim_capacity: Some(bytes), .. } => self.grow_claim(key, claim, bytes).await.map(Some),
            Sharing { annotations, .. } if annotations.is_empty() => Ok(None),
            Sharing { annotations, .. } => {
                let mut patch = json!({"metadata": same_object(&claim.metadata)});
                patch["metadata"]["annotations"] = json!(annotations);
                let written = self.patch(key, patch).await;
                let stored = self.store(written, "write who shares the volume", || {
                    tracing::info!(claim = %key, "annotated the claim with the guests that share its volume");
                });
                stored.map(Some)
            }
        }
    }

    /// The change of the PersistentVolume queues the claim again.
    async fn grow_volume(&self, volume: &PersistentVolume, bytes: u64) -> Result<NextAction, RequestError> {
        let name = volume.metadata.name.as_deref().unwrap_or_default();
        let capacity = json!({"storage": quantity::of(bytes)});
        let patch = json!({"metadata": same_object(&volume.metadata), "spec": {"capacity": capacity}});
        let _permit = self.requests.acquire().await;
        let api = Api::<PersistentVolume>::all(self.client.clone());
        match api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await {
            Ok(_) => {
                tracing::info!(volume = name, bytes, "the volume was expanded by its owner");
                Ok(NextAction::AwaitChange)
            }
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(NextAction::AwaitChange),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(NextAction::RequeueAfter(CACHE_LAG)),
            Err(error) => Err(RequestError { what: "write the size of the volume", reason: chain(&error) }),
        }
    }

    /// Kubernetes copies the capacity of a PersistentVolume to its claim only when it binds them.
    async fn grow_claim(
        &self,
        key: &Key,
        claim: &PersistentVolumeClaim,
        bytes: u64,
    ) -> Result<NextAction, RequestError> {
        let capacity = json!({"storage": quantity::of(bytes)});
        let patch = json!({"metadata": same_object(&claim.metadata), "status": {"capacity": capacity}});
        let written = self.patch_status(key, patch).await;
        self.store(written, "write the size", || {
            tracing::info!(claim = %key, bytes, "the volume of the claim was expanded by its owner");
        })
    }
}
