//! Reconciler of one `VolumeAttachment`: executes the steps of [`decide`]. Nothing else in mgmt-csi writes
//! `VolumeAttachment`s.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crds::names::FINALIZER_DETACH;
use crds::{AttachReason, VolumeAttachment, VolumeAttachmentStatus};
use infra_api::{Attachment, AttachmentId, AttachmentSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::{Api, Client, ResourceExt};
use kube_kit::client::chain;
use kube_kit::events::{Events, GroupedWarning};
use kube_kit::fair::{FairLimiter, Permit};
use kube_kit::informer::{Informer, Key};
use kube_kit::mutation_cache::MutationCache;
use kube_kit::partial::PersistentVolumeClaim;
use kube_kit::queue::NextAction;
use serde_json::json;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::decide::{Inputs, Observed, Step, decide, decide_gone};
use super::fence::OutOfService;
use super::holders::in_use;
use super::limiter::{Operation, Slot, VmLimiter};
use super::metrics::Metrics;
use super::traces::continue_trace;
use super::tracker::{SETTLE, Tracker};
use crate::cluster::{self, Volumes};
use crate::event_reason::EventReason;
use crate::infra::{
    AttachError, DetachError, Indeterminate, Message, ReadError, StorageInfra, attachment_id, has_same_name,
};
use crate::ownership::vm_guests::VmGuests;
use crate::repair::is_same_disk;
use crate::volume_attachment::failure::Failure;
use crate::volume_attachment::resolve::{claim_key, resolve};
use crate::volume_attachment::{
    self, describe_vm, has_finalizer, is_attached, reference, uid_test, vm_reference,
};

/// Timeout of one call to the storage infra. The operation continues there; the next call returns its result.
const WAIT: Duration = Duration::from_secs(30);
/// Deadline of waits that end only by an event.
const FAR: Duration = Duration::from_secs(24 * 60 * 60);

/// Why a reconcile must be retried.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReconcileError {
    /// Attach or detach failed.
    #[error(transparent)]
    Failure(#[from] Failure),
    /// The read from the API server failed.
    #[error("failed to read the VolumeAttachment: {0}")]
    Read(String),
    /// The write to the API server failed.
    #[error("failed to {what}: {reason}")]
    Write { what: &'static str, reason: String },
}

/// Shared state of all reconciles.
pub(super) struct Reconciler {
    pub(super) client: Client,
    pub(super) infra: Arc<dyn StorageInfra>,
    pub(super) attachments: Arc<MutationCache<VolumeAttachment>>,
    pub(super) claims: Informer<PersistentVolumeClaim>,
    pub(super) volumes: Volumes,
    pub(super) tracker: Arc<Tracker>,
    pub(super) limiter: VmLimiter,
    /// Limits concurrent requests to the API server; calls to the storage infra do not count.
    pub(super) requests: FairLimiter,
    pub(super) out_of_service: OutOfService,
    pub(super) guests: VmGuests,
    pub(super) events: Events,
    pub(super) metrics: Metrics,
    pub(super) stop: CancellationToken,
}

impl Reconciler {
    /// Reconciles one VolumeAttachment. Many of these futures wait at the same time, so large, short-lived parts are boxed.
    pub(super) async fn reconcile(&self, key: &Key) -> Result<NextAction, ReconcileError> {
        let Some((uid, node)) = self.attachments.get(key).and_then(|attachment| {
            Some((attachment.metadata.uid.clone()?, attachment.spec.node_uuid.to_ascii_lowercase()))
        }) else {
            return Ok(NextAction::AwaitChange);
        };
        let id = attachment_id(key, &uid);
        let mut observed = Observed::Unknown;
        let mut slot: Option<Slot> = None;
        loop {
            // Read before each step: the object can be deleted, or replaced, during a call to the storage infra.
            let attachment =
                self.attachments.get(key).filter(|attachment| attachment.metadata.uid.as_ref() == Some(&uid));
            let Some(attachment) = attachment else {
                // `clean_up` acquires a slot of its own; holding this one meanwhile could deadlock.
                drop(slot);
                return Box::pin(self.clean_up(key, &id, &node, &observed)).await;
            };
            let step = decide(&self.inputs(key, &attachment, observed.clone()), &now());
            let operation = operation_of(&step);
            if operation != slot.as_ref().map(Slot::operation) {
                slot = None;
                if let Some(operation) = operation {
                    tokio::select! {
                        biased;
                        () = self.stop.cancelled() => return Ok(NextAction::AwaitChange),
                        permit = self.limiter.acquire(&key.namespace, &node, operation) => slot = Some(permit),
                        // Gives up the place in the queue.
                        () = self.wait_until_deleted(key, &uid), if operation == Operation::Attach => {}
                    }
                    // The object may have changed meanwhile.
                    continue;
                }
            }
            let still_exists = match step {
                Step::Attach { spec, replaces } => {
                    continue_trace(&attachment, &self.out_of_service);
                    observed = Observed::AttachSent;
                    let started = Instant::now();
                    let answer = tokio::select! {
                        () = self.stop.cancelled() => return Ok(NextAction::AwaitChange),
                        // The storage infra accepts the following detach even during an attach.
                        () = self.wait_until_deleted(key, &uid) => continue,
                        answer = self.infra.attach(&id, &spec, replaces.as_ref(), WAIT) => answer,
                    };
                    self.metrics.observe("attach", answer.is_ok(), started);
                    observed = match answer {
                        Ok(disk) => Observed::Attached(disk),
                        Err(AttachError::Conflict(text)) if is_attached(&attachment) => {
                            Box::pin(self.attach_as_before(&id, &spec, text)).await
                        }
                        Err(AttachError::IdDeleted(_)) => Observed::IdDeleted,
                        Err(AttachError::InUse { message, nodes }) => {
                            let same = match replaces {
                                None => Box::pin(self.find_same_disk(key, &uid, &spec)).await,
                                Some(_) => None,
                            };
                            let failed = || {
                                let message = in_use(message, &self.holders(&attachment, &nodes));
                                Observed::Failed(AttachError::InUse { message, nodes }.into())
                            };
                            same.map_or_else(failed, |other| Observed::SameName(other.id))
                        }
                        Err(error) => Observed::Failed(error.into()),
                    };
                    true
                }
                Step::Detach => {
                    continue_trace(&attachment, &self.out_of_service);
                    observed = Box::pin(self.detach_from_vm(&attachment, &id)).await;
                    !self.stop.is_cancelled()
                }
                Step::DetachPredecessor(predecessor) => {
                    tracing::warn!(attachment = %key, %predecessor, "detaching the disk of a predecessor");
                    observed = match Box::pin(self.detach_from_vm(&attachment, &predecessor)).await {
                        Observed::Detached => Observed::Unknown,
                        failed => failed,
                    };
                    !self.stop.is_cancelled()
                }
                Step::FindSameName => {
                    // Without a valid node UUID, nothing was ever attached.
                    let found = match attachment.spec.node_uuid.parse() {
                        Ok(node) => self.find_same_name(key, &uid, node).await,
                        Err(_) => Ok(None),
                    };
                    observed = match found {
                        Ok(Some(other)) => Observed::SameName(other.id),
                        Ok(None) => Observed::NoneAttached,
                        Err(error) => {
                            let message = error.message().clone();
                            Observed::Failed(DetachError(Indeterminate::Failed(message)).into())
                        }
                    };
                    true
                }
                Step::ConfirmPredecessor(other) => {
                    observed = Observed::Predecessor(other);
                    Box::pin(self.confirm_current(key, &attachment, &uid)).await?
                }
                Step::WriteStatus(status) => {
                    let written = Box::pin(self.write_status(key, &attachment, &status)).await?;
                    if written {
                        self.emit_event(
                            &attachment,
                            attachment.metadata.deletion_timestamp.is_some(),
                            &status,
                        );
                    }
                    written
                }
                Step::AddFinalizer => Box::pin(self.add_finalizer(key, &attachment)).await?,
                Step::Recreate => Box::pin(self.recreate(key, &attachment)).await?,
                Step::RemoveFinalizer => {
                    Box::pin(self.remove_finalizer(key, &attachment)).await?;
                    return Ok(NextAction::AwaitChange);
                }
                Step::AwaitCaches => return Ok(NextAction::RequeueAfter(SETTLE)),
                Step::Done => return Ok(NextAction::AwaitChange),
                Step::Retry(failure) => return Err(failure.into()),
            };
            if self.stop.is_cancelled() {
                return Ok(NextAction::AwaitChange);
            }
            if !still_exists {
                drop(slot);
                return Box::pin(self.clean_up(key, &id, &node, &observed)).await;
            }
        }
    }

    /// Attaches a disk in the mode in which it is attached already. Its volume may be shared in another mode since.
    async fn attach_as_before(
        &self,
        id: &AttachmentId,
        spec: &AttachmentSpec,
        conflict: Message,
    ) -> Observed {
        let deadline = tokio::time::Instant::now() + WAIT;
        let listed = self.infra.list_attachments(Some(spec.node), deadline).await.unwrap_or_default();
        let before = listed.iter().find(|one| one.id == *id).map(Attachment::spec);
        let answer = match before.filter(|before| is_same_disk(before, spec)) {
            Some(before) => self.infra.attach(id, &before, None, WAIT).await,
            None => Err(AttachError::Conflict(conflict)),
        };
        answer.map_or_else(|error| Observed::Failed(error.into()), Observed::Attached)
    }

    /// Cleans up after a VolumeAttachment that no longer exists.
    async fn clean_up(
        &self,
        key: &Key,
        id: &AttachmentId,
        node: &str,
        observed: &Observed,
    ) -> Result<NextAction, ReconcileError> {
        if decide_gone(observed) == Step::Detach {
            let _slot = tokio::select! {
                () = self.stop.cancelled() => return Ok(NextAction::AwaitChange),
                slot = self.limiter.acquire(&key.namespace, node, Operation::Detach) => slot,
            };
            tracing::warn!(attachment = %key, %id, "the VolumeAttachment is gone; detaching its disk");
            // If this fails, the repair loop finds the dangling attachment later.
            if let Observed::Failed(failure) = self.detach(id, false).await {
                tracing::warn!(attachment = %key, %id, "{failure}");
            }
        }
        Ok(NextAction::AwaitChange)
    }

    /// Detaches an attachment ID from the VM of a VolumeAttachment, by force if that VM is out of service.
    async fn detach_from_vm(&self, attachment: &VolumeAttachment, id: &AttachmentId) -> Observed {
        if !self.out_of_service.has_vm_of(attachment) {
            tokio::select! {
                answer = self.detach(id, false) => return answer,
                // The call with fencing joins the one in progress.
                () = self.out_of_service.wait_for_vm_of(attachment) => {}
            }
        }
        tracing::warn!(attachment = %id, vm = describe_vm(attachment), "the VM is out of service; detaching its disk by force");
        self.detach(id, true).await
    }

    /// Detaches an attachment ID; `Observed::Unknown` if the process is stopping.
    async fn detach(&self, id: &AttachmentId, fence: bool) -> Observed {
        let started = Instant::now();
        let answer = tokio::select! {
            () = self.stop.cancelled() => return Observed::Unknown,
            answer = self.infra.detach(id, fence, WAIT) => answer,
        };
        self.metrics.observe("detach", answer.is_ok(), started);
        match answer {
            Ok(()) => Observed::Detached,
            Err(error) => Observed::Failed(error.into()),
        }
    }

    /// The attachment of another VolumeAttachment of the same name for this VM.
    async fn find_same_name(
        &self,
        key: &Key,
        uid: &str,
        node: Uuid,
    ) -> Result<Option<Attachment>, ReadError> {
        let deadline = tokio::time::Instant::now() + WAIT;
        let found = self.infra.list_attachments(Some(node), deadline).await?;
        Ok(found.into_iter().find(|other| has_same_name(&other.id, key, uid)))
    }

    /// The attachment of the same disk, if another VolumeAttachment of the same name has it.
    async fn find_same_disk(&self, key: &Key, uid: &str, spec: &AttachmentSpec) -> Option<Attachment> {
        let found = self.find_same_name(key, uid, spec.node).await;
        found.ok().flatten().filter(|other| other.spec() == *spec)
    }

    /// Waits until an API request for the VolumeAttachment may start.
    async fn api_permit(&self, attachment: &VolumeAttachment) -> Permit {
        self.requests.acquire(&volume_attachment::vm_key(attachment)).await
    }

    /// Whether the API server, not the cache, returns this VolumeAttachment.
    async fn confirm_current(
        &self,
        key: &Key,
        attachment: &VolumeAttachment,
        uid: &str,
    ) -> Result<bool, ReconcileError> {
        let _permit = self.api_permit(attachment).await;
        let found =
            self.api(key).get_opt(&key.name).await.map_err(|error| ReconcileError::Read(chain(&error)))?;
        let Some(attachment) = found.filter(|attachment| attachment.metadata.uid.as_deref() == Some(uid))
        else {
            return Ok(false);
        };
        self.store(Ok(attachment), "read the VolumeAttachment")
    }

    /// Waits until the VolumeAttachment is terminating, gone or replaced.
    async fn wait_until_deleted(&self, key: &Key, uid: &str) {
        let is_deleted = |attachment: Option<&Arc<VolumeAttachment>>| {
            let is_current = attachment.is_some_and(|attachment| {
                attachment.metadata.deletion_timestamp.is_none()
                    && attachment.metadata.uid.as_deref() == Some(uid)
            });
            (!is_current).then_some(())
        };
        let deadline = tokio::time::Instant::now() + FAR;
        self.attachments.informer().wait_for(key, deadline, is_deleted).await;
    }

    fn inputs(&self, key: &Key, attachment: &VolumeAttachment, observed: Observed) -> Inputs {
        let status = attachment.status.clone().unwrap_or_default();
        Inputs {
            deleting: attachment.metadata.deletion_timestamp.is_some(),
            has_finalizer: has_finalizer(attachment),
            generation: attachment.metadata.generation.unwrap_or_default(),
            desired: resolve(attachment, &self.claims, &self.volumes, &self.guests),
            is_new: attachment.status.is_none() && self.tracker.is_new(key),
            status,
            observed,
        }
    }

    /// Replaces the whole status, so that no field of an older one remains.
    async fn write_status(
        &self,
        key: &Key,
        attachment: &VolumeAttachment,
        status: &VolumeAttachmentStatus,
    ) -> Result<bool, ReconcileError> {
        let _permit = self.api_permit(attachment).await;
        self.tracker.expect_event(key, Some(status.clone()));
        let patch =
            json_patch(json!([uid_test(attachment), {"op": "add", "path": "/status", "value": status}]));
        let written = self.api(key).patch_status(&key.name, &PatchParams::default(), &patch).await;
        let taken = self.store(written, "write the status");
        if matches!(taken, Ok(true)) {
            tracing::info!(
                attachment = %key,
                node = attachment.spec.node_uuid,
                disk = status.disk_uuid,
                error = status.error.as_ref().map(|error| error.reason.as_str()),
                "wrote the status"
            );
        } else {
            self.tracker.expect_event(key, None);
        }
        taken
    }

    async fn add_finalizer(&self, key: &Key, attachment: &VolumeAttachment) -> Result<bool, ReconcileError> {
        let add = match attachment.metadata.finalizers.as_deref().unwrap_or_default() {
            [] => json!({"op": "add", "path": "/metadata/finalizers", "value": [FINALIZER_DETACH]}),
            _ => json!({"op": "add", "path": "/metadata/finalizers/-", "value": FINALIZER_DETACH}),
        };
        let patch = json_patch(json!([uid_test(attachment), add]));
        let _permit = self.api_permit(attachment).await;
        let written = self.api(key).patch(&key.name, &PatchParams::default(), &patch).await;
        self.store(written, "add the finalizer")
    }

    async fn remove_finalizer(&self, key: &Key, attachment: &VolumeAttachment) -> Result<(), ReconcileError> {
        let finalizers = attachment.metadata.finalizers.as_deref().unwrap_or_default();
        let Some(at) = finalizers.iter().position(|one| one == FINALIZER_DETACH) else { return Ok(()) };
        let path = format!("/metadata/finalizers/{at}");
        let patch = json_patch(json!([
            uid_test(attachment),
            {"op": "test", "path": path, "value": FINALIZER_DETACH},
            {"op": "remove", "path": path},
        ]));
        let _permit = self.api_permit(attachment).await;
        let written = self.api(key).patch(&key.name, &PatchParams::default(), &patch).await;
        // Finalizers of others keep the object.
        let is_over = written.as_ref().is_ok_and(|remaining| {
            remaining.metadata.deletion_timestamp.is_some() && remaining.finalizers().is_empty()
        });
        self.store(written, "remove the finalizer")?;
        if is_over {
            self.attachments.deleted(attachment.clone());
        }
        tracing::info!(attachment = %key, node = attachment.spec.node_uuid, "detached");
        Ok(())
    }

    /// Deletes a VolumeAttachment whose attachment ID was deleted in the storage infra; its disk is not attached.
    async fn recreate(&self, key: &Key, attachment: &VolumeAttachment) -> Result<bool, ReconcileError> {
        tracing::warn!(attachment = %key, "the storage infra has deleted this attachment ID; deleting the VolumeAttachment, so that the VM Operator recreates it");
        let preconditions = Preconditions { uid: attachment.metadata.uid.clone(), resource_version: None };
        let deletion = DeleteParams::default().preconditions(preconditions);
        let _permit = self.api_permit(attachment).await;
        match self.api(key).delete(&key.name, &deletion).await {
            Ok(remaining) => remaining
                .left()
                .map_or(Ok(false), |attachment| self.store(Ok(attachment), "delete the VolumeAttachment")),
            Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => Ok(false),
            Err(error) => {
                Err(ReconcileError::Write { what: "delete the VolumeAttachment", reason: chain(&error) })
            }
        }
    }

    /// Stores the response of a write in the mutation cache. False if the object is gone.
    fn store(
        &self,
        written: kube::Result<VolumeAttachment>,
        what: &'static str,
    ) -> Result<bool, ReconcileError> {
        match written {
            Ok(mut attachment) => {
                volume_attachment::trim(&mut attachment);
                self.attachments.changed(attachment);
                Ok(true)
            }
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(false),
            Err(error) => Err(ReconcileError::Write { what, reason: chain(&error) }),
        }
    }

    /// Emits an event for a failure: on the claim, or else on the VolumeAttachment; on the VM if many of its disks fail for
    /// the same cause.
    fn emit_event(&self, attachment: &VolumeAttachment, deleting: bool, status: &VolumeAttachmentStatus) {
        // A successful attach emits no event: the status reports it, and the four API writes per attach are the limit.
        let Some(error) = &status.error else { return };
        let vm = describe_vm(attachment);
        let (action, reason, note) = match deleting {
            true => {
                let note = format!("failed to detach the disk from {vm}: {}", error.message);
                ("Detach", EventReason::VolumeDetachFailed, note)
            }
            false => {
                let note = format!("failed to attach the disk to {vm}: {}: {}", error.reason, error.message);
                ("Attach", EventReason::VolumeAttachFailed, note)
            }
        };
        let claim = self.claims.get(&claim_key(attachment));
        // The claim may be another guest's, whom this does not concern.
        let is_refused = error.reason == AttachReason::NotShared.as_str();
        let claim = claim.filter(|claim| !is_refused && !self.is_foreign(attachment, claim));
        let about = claim.map_or_else(|| reference(attachment), |claim| cluster::reference(&claim));
        let Some(group) = vm_reference(attachment) else {
            return self.events.warning(about, action, reason.as_str(), note);
        };
        let (cause, name) = (error.reason.clone(), attachment.spec.volume_name.to_string());
        let reason = reason.as_str();
        self.events.grouped_warning(action, reason, GroupedWarning { group, cause, about, name, note });
    }

    fn api(&self, key: &Key) -> Api<VolumeAttachment> {
        Api::namespaced(self.client.clone(), &key.namespace)
    }
}

/// Kind of call that a step makes.
fn operation_of(step: &Step) -> Option<Operation> {
    match step {
        Step::Attach { .. } => Some(Operation::Attach),
        Step::Detach | Step::DetachPredecessor(_) => Some(Operation::Detach),
        _ => None,
    }
}

fn json_patch(operations: serde_json::Value) -> Patch<()> {
    Patch::Json(serde_json::from_value(operations).expect("the operations above are a JSON patch"))
}

/// The current time in whole seconds, as Kubernetes stores it, so that a written time compares equal when read back.
fn now() -> Time {
    let now = Timestamp::now();
    Time(Timestamp::from_second(now.as_second()).unwrap_or(now))
}

#[cfg(test)]
mod tests;
