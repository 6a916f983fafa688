//! Finalizer of one claim: writes what [`protection`] decides. Nothing but mgmt-csi removes it. The patches name only this
//! finalizer, so that they never conflict with those of the other controllers that have one on the claim.

use std::time::Duration;

use crds::names::FINALIZER_ATTACHED;
use infra_api::{Attachment, VolumeId};
use kube_kit::informer::Key;
use kube_kit::partial::PersistentVolumeClaim;
use kube_kit::queue::NextAction;
use serde_json::json;
use tokio::time::Instant;

use super::protection::{Protection, is_held, protection};
use super::reconcile::{CACHE_LAG, Reconciler, RequestError, same_object};
use crate::cluster::{self, reference};
use crate::event_reason::EventReason;
use crate::infra::ReadError;
use crate::volume_attachment::{Attachments, holds_terminating_claim, is_attached};

/// Timeout of one call to the storage infra.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Interval between checks of an attachment without a VolumeAttachment. Its detach is an event, which may be lost.
const RECHECK: Duration = Duration::from_secs(60);

/// Why a claim that is being deleted stays.
const ATTACHED: &str = "the claim is being deleted, but its disk is still attached to a VM: until the disk is detached, the claim \
                        stays and counts in the quotas of its namespace";

impl Reconciler {
    /// Does what `protection` says; None if there is nothing to do.
    pub(super) async fn protect(
        &self,
        key: &Key,
        claim: &PersistentVolumeClaim,
        protection: Protection,
    ) -> Result<Option<NextAction>, RequestError> {
        Ok(Some(match protection {
            Protection::Keep => return Ok(None),
            Protection::Add => self.add_finalizer(key, claim).await?,
            Protection::Remove => self.remove_finalizer(key, claim).await?,
            Protection::RemoveIfDetached(id) => self.release(key, claim, &id).await?,
            Protection::ReadVolume(name) => self.release_as_bound(key, claim, &name).await?,
        }))
    }

    /// Releases a claim according to its PersistentVolume from the API server.
    async fn release_as_bound(
        &self,
        key: &Key,
        claim: &PersistentVolumeClaim,
        volume: &str,
    ) -> Result<NextAction, RequestError> {
        let volume = self.read_volume(volume).await?;
        match protection(claim, volume.as_ref()) {
            Protection::RemoveIfDetached(id) => self.release(key, claim, &id).await,
            _ => self.remove_finalizer(key, claim).await,
        }
    }

    /// Releases a claim if the disk of its volume is detached.
    ///
    /// The attach controller starts no attach once the same cache of claims shows the deletion. It is therefore enough to
    /// look for attaches that started before: first for their VolumeAttachments, then in the storage infra.
    async fn release(
        &self,
        key: &Key,
        claim: &PersistentVolumeClaim,
        id: &VolumeId,
    ) -> Result<NextAction, RequestError> {
        let shown = self.bindings.claims.informer().get(key);
        if !shown.is_some_and(|shown| cluster::is_terminating(&shown)) {
            return Ok(NextAction::RequeueAfter(CACHE_LAG));
        }
        self.waiting.add(key);
        if self.has_holder(key) {
            self.report_attached(key, claim);
            return Ok(NextAction::AwaitChange);
        }
        match self.attachments_of(id).await {
            Ok(found) if is_held(&found, &key.namespace, &self.bindings.namespaces_of(id)) => {
                self.report_attached(key, claim);
                Ok(NextAction::RequeueAfter(RECHECK))
            }
            Ok(_) => self.remove_finalizer(key, claim).await,
            Err(error) => {
                self.report_unknown(key, claim, &error);
                Err(RequestError { what: "read the attachments", reason: error.to_string() })
            }
        }
    }

    /// Whether a VolumeAttachment holds the claim. The attach controller answers those that are not attached yet.
    fn has_holder(&self, claim: &Key) -> bool {
        let Some(Attachments { objects, by_claim, queue }) = &self.attachments else { return false };
        let attachments = by_claim.members(claim).into_iter().filter_map(|key| objects.get(&key));
        let holders: Vec<_> = attachments.filter(|attachment| holds_terminating_claim(attachment)).collect();
        for attachment in holders.iter().filter(|attachment| !is_attached(attachment)) {
            queue.push(Key::of(&**attachment));
        }
        !holders.is_empty()
    }

    async fn attachments_of(&self, id: &VolumeId) -> Result<Vec<Attachment>, ReadError> {
        let _permit = self.infra_calls.acquire().await;
        self.infra.attachments_of(id, Instant::now() + TIMEOUT).await
    }

    fn report_attached(&self, key: &Key, claim: &PersistentVolumeClaim) {
        if self.waiting.should_report(key, ATTACHED) {
            tracing::info!(claim = %key, "{ATTACHED}");
            let reason = EventReason::WaitForDetach.as_str();
            self.events.normal(reference(claim), "Delete", reason, ATTACHED.to_owned());
        }
    }

    fn report_unknown(&self, key: &Key, claim: &PersistentVolumeClaim, error: &ReadError) {
        let note = format!(
            "the claim is being deleted, but stays until the storage infra answers whether its disk is attached to a VM: {}",
            error.message().guest()
        );
        if self.waiting.should_report(key, &note) {
            let reason = EventReason::DetachCheckFailed.as_str();
            self.events.warning(reference(claim), "Delete", reason, note);
        }
    }

    /// Adds the finalizer. The resourceVersion excludes that the claim is being deleted, when the API server refuses it.
    async fn add_finalizer(
        &self,
        key: &Key,
        claim: &PersistentVolumeClaim,
    ) -> Result<NextAction, RequestError> {
        let mut patch = json!({"metadata": same_object(&claim.metadata)});
        patch["metadata"]["finalizers"] = json!([FINALIZER_ATTACHED]);
        let written = self.patch(key, patch).await;
        self.store(written, "add the finalizer", || {
            tracing::info!(claim = %key, "added the finalizer to the claim");
        })
    }

    /// Removes the finalizer. Other changes of the claim do not matter: a disk can no longer be attached. It waits until
    /// kube-controller-manager has removed its own: that replaces the object, so a patch meanwhile would make it a conflict,
    /// which kube-controller-manager retries only after 100 ms.
    async fn remove_finalizer(
        &self,
        key: &Key,
        claim: &PersistentVolumeClaim,
    ) -> Result<NextAction, RequestError> {
        if self.bindings.claims.get(key).is_some_and(|shown| cluster::has_pvc_protection(&shown)) {
            return Ok(NextAction::AwaitChange);
        }
        let patch = json!({"metadata": {
            "uid": claim.metadata.uid,
            "$deleteFromPrimitiveList/finalizers": [FINALIZER_ATTACHED],
        }});
        let written = self.patch(key, patch).await;
        let is_over = written.as_ref().is_ok_and(is_deleted);
        let next = self.store(written, "remove the finalizer", || {
            self.waiting.remove(key);
            tracing::info!(claim = %key, "released the claim that is being deleted: its disk is not attached");
        });
        if is_over {
            self.bindings.claims.deleted(claim.clone());
        }
        next
    }
}

/// Whether the response to the removal of a finalizer shows that the object is gone.
fn is_deleted(claim: &PersistentVolumeClaim) -> bool {
    cluster::is_terminating(claim) && claim.metadata.finalizers.as_deref().unwrap_or_default().is_empty()
}
