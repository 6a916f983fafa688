//! Reconciler of one `VolumeAttachment`: executes the steps of [`decide`]. Nothing else in mgmt-csi writes
//! `VolumeAttachment`s.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crds::names::FINALIZER_DETACH;
use crds::{VolumeAttachment, VolumeAttachmentStatus};
use infra_api::{Attachment, AttachmentId};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::{Api, Client, ResourceExt};
use kube_kit::client::chain;
use kube_kit::events::{Alike, Events};
use kube_kit::fair::{Gate, Permit};
use kube_kit::informer::{Informer, Key};
use kube_kit::latest::Latest;
use kube_kit::lean::PersistentVolumeClaim;
use kube_kit::queue::Next;
use serde_json::json;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::decide::{Infra, Step, View, decide, decide_gone};
use super::failure::Failure;
use super::fence::Lost;
use super::memory::{Memories, SETTLE};
use super::metrics::Metrics;
use super::order::{self, is_held, machine, machine_reference, reference, same_object};
use super::target::{claim_key, target_of};
use super::turns::{Turn, Turns, Work};
use crate::cluster::{self, Volumes};
use crate::infra::{AttachError, DetachError, ReadError, StorageInfra, Trouble, attachment_id, is_namesake};

/// Timeout of one call to the storage infra. The operation continues there; the next call returns its result.
const WAIT: Duration = Duration::from_secs(30);
/// Deadline of waits that end only by an event.
const FAR: Duration = Duration::from_secs(24 * 60 * 60);

/// Why a reconcile must be retried.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unfinished {
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
    pub(super) orders: Arc<Latest<VolumeAttachment>>,
    pub(super) claims: Informer<PersistentVolumeClaim>,
    pub(super) volumes: Volumes,
    pub(super) memories: Arc<Memories>,
    pub(super) turns: Turns,
    /// Limits concurrent requests to the API server; calls to the storage infra do not count.
    pub(super) requests: Gate,
    pub(super) lost: Lost,
    pub(super) events: Events,
    pub(super) metrics: Metrics,
    pub(super) stop: CancellationToken,
}

impl Reconciler {
    /// Reconciles one VolumeAttachment. Many of these futures wait at the same time, so large, short-lived parts are boxed.
    pub(super) async fn reconcile(&self, key: &Key) -> Result<Next, Unfinished> {
        let Some((uid, machine)) = self
            .orders
            .get(key)
            .and_then(|order| Some((order.metadata.uid.clone()?, order.spec.node_uuid.to_ascii_lowercase())))
        else {
            return Ok(Next::Wait);
        };
        let id = attachment_id(key, &uid);
        let mut learned = Infra::Unasked;
        let mut turn: Option<Turn> = None;
        loop {
            // Read before each step: the object can be deleted, or replaced, during a call to the storage infra.
            let order = self.orders.get(key).filter(|order| order.metadata.uid.as_ref() == Some(&uid));
            let Some(order) = order else {
                // `gone` acquires a slot of its own; holding this one meanwhile could deadlock.
                drop(turn);
                return Box::pin(self.gone(key, &id, &machine, &learned)).await;
            };
            let step = decide(&self.view(key, &order, learned.clone()), &now());
            let work = work_of(&step);
            if work != turn.as_ref().map(Turn::work) {
                turn = None;
                if let Some(work) = work {
                    tokio::select! {
                        biased;
                        () = self.stop.cancelled() => return Ok(Next::Wait),
                        taken = self.turns.take(&key.namespace, &machine, work) => turn = Some(taken),
                        // Gives up the place in the queue.
                        () = self.deleted(key, &uid), if work == Work::Plug => {}
                    }
                    // The object may have changed meanwhile.
                    continue;
                }
            }
            let still_there = match step {
                Step::Plug { spec, replaces } => {
                    learned = Infra::Asked;
                    let started = Instant::now();
                    let answer = tokio::select! {
                        () = self.stop.cancelled() => return Ok(Next::Wait),
                        // The storage infra accepts the following detach even during an attach.
                        () = self.deleted(key, &uid) => continue,
                        answer = self.infra.attach(&id, &spec, replaces.as_ref(), WAIT) => answer,
                    };
                    self.metrics.observe("attach", answer.is_ok(), started);
                    learned = match answer {
                        Ok(disk) => Infra::Plugged(disk),
                        Err(AttachError::Ended(_)) => Infra::Ended,
                        Err(AttachError::InUse(text)) if replaces.is_none() => {
                            let namesake = self.namesake(key, &uid, spec.node).await;
                            let same = namesake.ok().flatten().filter(|other| other.spec() == spec);
                            let failed = || Infra::Failed(AttachError::InUse(text).into());
                            same.map_or_else(failed, |other| Infra::Namesake(other.id))
                        }
                        Err(error) => Infra::Failed(error.into()),
                    };
                    true
                }
                Step::Unplug => {
                    learned = Box::pin(self.unplug_of(&order, &id)).await;
                    !self.stop.is_cancelled()
                }
                Step::UnplugEarlier(earlier) => {
                    tracing::warn!(attachment = %key, %earlier, "detaching the disk of a predecessor");
                    learned = match Box::pin(self.unplug_of(&order, &earlier)).await {
                        Infra::Unplugged => Infra::Unasked,
                        failed => failed,
                    };
                    !self.stop.is_cancelled()
                }
                Step::Look => {
                    // Without a valid node UUID, nothing was ever attached.
                    let found = match order.spec.node_uuid.parse() {
                        Ok(node) => self.namesake(key, &uid, node).await,
                        Err(_) => Ok(None),
                    };
                    learned = match found {
                        Ok(Some(other)) => Infra::Namesake(other.id),
                        Ok(None) => Infra::Clear,
                        Err(error) => Infra::Failed(DetachError(Trouble::Failed(error.to_string())).into()),
                    };
                    true
                }
                Step::Confirm(other) => {
                    learned = Infra::Over(other);
                    Box::pin(self.confirm(key, &order, &uid)).await?
                }
                Step::Report(status) => {
                    let there = Box::pin(self.answer(key, &order, &status)).await?;
                    if there {
                        self.tell(&order, order.metadata.deletion_timestamp.is_some(), &status);
                    }
                    there
                }
                Step::Hold => Box::pin(self.hold(key, &order)).await?,
                Step::Renew => Box::pin(self.renew(key, &order)).await?,
                Step::Release => {
                    Box::pin(self.release(key, &order)).await?;
                    return Ok(Next::Wait);
                }
                Step::Settle => return Ok(Next::After(SETTLE)),
                Step::Done => return Ok(Next::Wait),
                Step::Retry(failure) => return Err(failure.into()),
            };
            if self.stop.is_cancelled() {
                return Ok(Next::Wait);
            }
            if !still_there {
                drop(turn);
                return Box::pin(self.gone(key, &id, &machine, &learned)).await;
            }
        }
    }

    /// Cleans up after a VolumeAttachment that no longer exists.
    async fn gone(
        &self,
        key: &Key,
        id: &AttachmentId,
        machine: &str,
        learned: &Infra,
    ) -> Result<Next, Unfinished> {
        if decide_gone(learned) == Step::Unplug {
            let _turn = tokio::select! {
                () = self.stop.cancelled() => return Ok(Next::Wait),
                turn = self.turns.take(&key.namespace, machine, Work::Unplug) => turn,
            };
            tracing::warn!(attachment = %key, %id, "the VolumeAttachment is gone; detaching its disk");
            // If this fails, the repair loop finds the dangling attachment later.
            if let Infra::Failed(failure) = self.detach(id, false).await {
                tracing::warn!(attachment = %key, %id, "{failure}");
            }
        }
        Ok(Next::Wait)
    }

    /// Detaches an attachment ID from the VM of a VolumeAttachment, by force if that VM is out of service.
    async fn unplug_of(&self, order: &VolumeAttachment, id: &AttachmentId) -> Infra {
        if !self.lost.has_machine_of(order) {
            tokio::select! {
                answer = self.detach(id, false) => return answer,
                // The call with fencing joins the one in progress.
                () = self.lost.gets_machine_of(order) => {}
            }
        }
        tracing::warn!(attachment = %id, machine = machine(order), "the VM is out of service; detaching its disk by force");
        self.detach(id, true).await
    }

    /// Detaches an attachment ID; `Infra::Unasked` if the process is stopping.
    async fn detach(&self, id: &AttachmentId, fence: bool) -> Infra {
        let started = Instant::now();
        let answer = tokio::select! {
            () = self.stop.cancelled() => return Infra::Unasked,
            answer = self.infra.detach(id, fence, WAIT) => answer,
        };
        self.metrics.observe("detach", answer.is_ok(), started);
        match answer {
            Ok(()) => Infra::Unplugged,
            Err(error) => Infra::Failed(error.into()),
        }
    }

    /// The attachment of another VolumeAttachment of the same name for this VM.
    async fn namesake(&self, key: &Key, uid: &str, node: Uuid) -> Result<Option<Attachment>, ReadError> {
        let deadline = tokio::time::Instant::now() + WAIT;
        let found = self.infra.list_attachments(Some(node), deadline).await?;
        Ok(found.into_iter().find(|other| is_namesake(&other.id, key, uid)))
    }

    /// Waits until an API request for the VolumeAttachment may start.
    async fn place(&self, order: &VolumeAttachment) -> Permit {
        self.requests.enter(&order::lane(order)).await
    }

    /// Whether the API server, not the cache, returns this VolumeAttachment.
    async fn confirm(&self, key: &Key, order: &VolumeAttachment, uid: &str) -> Result<bool, Unfinished> {
        let _place = self.place(order).await;
        let found =
            self.api(key).get_opt(&key.name).await.map_err(|error| Unfinished::Read(chain(&error)))?;
        let Some(order) = found.filter(|order| order.metadata.uid.as_deref() == Some(uid)) else {
            return Ok(false);
        };
        self.take(Ok(order), "read the VolumeAttachment")
    }

    /// Waits until the VolumeAttachment is terminating, gone or replaced.
    async fn deleted(&self, key: &Key, uid: &str) {
        let is_deleted = |order: Option<&Arc<VolumeAttachment>>| {
            let wanted = order.is_some_and(|order| {
                order.metadata.deletion_timestamp.is_none() && order.metadata.uid.as_deref() == Some(uid)
            });
            (!wanted).then_some(())
        };
        let far = tokio::time::Instant::now() + FAR;
        self.orders.informer().wait_for(key, far, is_deleted).await;
    }

    fn view(&self, key: &Key, order: &VolumeAttachment, infra: Infra) -> View {
        let status = order.status.clone().unwrap_or_default();
        View {
            deleting: order.metadata.deletion_timestamp.is_some(),
            held: is_held(order),
            generation: order.metadata.generation.unwrap_or_default(),
            target: target_of(order, &self.claims, &self.volumes),
            fresh: order.status.is_none() && self.memories.is_fresh(key),
            status,
            infra,
        }
    }

    /// Replaces the whole status, so that no field of an older one remains.
    async fn answer(
        &self,
        key: &Key,
        order: &VolumeAttachment,
        status: &VolumeAttachmentStatus,
    ) -> Result<bool, Unfinished> {
        let _place = self.place(order).await;
        self.memories.answering(key, Some(status.clone()));
        let patch =
            json_patch(json!([same_object(order), {"op": "add", "path": "/status", "value": status}]));
        let written = self.api(key).patch_status(&key.name, &PatchParams::default(), &patch).await;
        let taken = self.take(written, "write the status");
        if matches!(taken, Ok(true)) {
            tracing::info!(
                attachment = %key,
                node = order.spec.node_uuid,
                disk = status.disk_uuid,
                error = status.error.as_ref().map(|error| error.reason.as_str()),
                "wrote the status"
            );
        } else {
            self.memories.answering(key, None);
        }
        taken
    }

    async fn hold(&self, key: &Key, order: &VolumeAttachment) -> Result<bool, Unfinished> {
        let add = match order.metadata.finalizers.as_deref().unwrap_or_default() {
            [] => json!({"op": "add", "path": "/metadata/finalizers", "value": [FINALIZER_DETACH]}),
            _ => json!({"op": "add", "path": "/metadata/finalizers/-", "value": FINALIZER_DETACH}),
        };
        let patch = json_patch(json!([same_object(order), add]));
        let _place = self.place(order).await;
        let written = self.api(key).patch(&key.name, &PatchParams::default(), &patch).await;
        self.take(written, "add the finalizer")
    }

    async fn release(&self, key: &Key, order: &VolumeAttachment) -> Result<(), Unfinished> {
        let finalizers = order.metadata.finalizers.as_deref().unwrap_or_default();
        let Some(at) = finalizers.iter().position(|one| one == FINALIZER_DETACH) else { return Ok(()) };
        let path = format!("/metadata/finalizers/{at}");
        let patch = json_patch(json!([
            same_object(order),
            {"op": "test", "path": path, "value": FINALIZER_DETACH},
            {"op": "remove", "path": path},
        ]));
        let _place = self.place(order).await;
        let written = self.api(key).patch(&key.name, &PatchParams::default(), &patch).await;
        // Finalizers of others keep the object.
        let is_over = written
            .as_ref()
            .is_ok_and(|left| left.metadata.deletion_timestamp.is_some() && left.finalizers().is_empty());
        self.take(written, "remove the finalizer")?;
        if is_over {
            self.orders.ended(order.clone());
        }
        tracing::info!(attachment = %key, node = order.spec.node_uuid, "detached");
        Ok(())
    }

    /// Deletes a VolumeAttachment whose attachment ID was deleted in the storage infra; its disk is not attached.
    async fn renew(&self, key: &Key, order: &VolumeAttachment) -> Result<bool, Unfinished> {
        tracing::warn!(attachment = %key, "the storage infra has deleted this attachment ID; deleting the VolumeAttachment, so that the VM Operator recreates it");
        let preconditions = Preconditions { uid: order.metadata.uid.clone(), resource_version: None };
        let deletion = DeleteParams::default().preconditions(preconditions);
        let _place = self.place(order).await;
        match self.api(key).delete(&key.name, &deletion).await {
            Ok(left) => {
                left.left().map_or(Ok(false), |order| self.take(Ok(order), "delete the VolumeAttachment"))
            }
            Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => Ok(false),
            Err(error) => {
                Err(Unfinished::Write { what: "delete the VolumeAttachment", reason: chain(&error) })
            }
        }
    }

    /// Stores the response of a write in the mutation cache. False if the object is gone.
    fn take(&self, written: kube::Result<VolumeAttachment>, what: &'static str) -> Result<bool, Unfinished> {
        match written {
            Ok(mut order) => {
                order::trim(&mut order);
                self.orders.changed(order);
                Ok(true)
            }
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(false),
            Err(error) => Err(Unfinished::Write { what, reason: chain(&error) }),
        }
    }

    /// Emits an event for a failure: on the claim, or else on the VolumeAttachment; on the VM if many of its disks fail for
    /// the same cause.
    fn tell(&self, order: &VolumeAttachment, deleting: bool, status: &VolumeAttachmentStatus) {
        // A successful attach emits no event: the status reports it, and the four API writes per attach are the limit.
        let Some(error) = &status.error else { return };
        let machine = machine(order);
        let (action, reason, note) = match deleting {
            true => {
                let note = format!("failed to detach the disk from {machine}: {}", error.message);
                ("Detach", "VolumeDetachFailed", note)
            }
            false => {
                let note =
                    format!("failed to attach the disk to {machine}: {}: {}", error.reason, error.message);
                ("Attach", "VolumeAttachFailed", note)
            }
        };
        let claim = self.claims.get(&claim_key(order));
        let about = claim.map_or_else(|| reference(order), |claim| cluster::reference(&claim));
        let Some(group) = machine_reference(order) else {
            return self.events.warning(about, action, reason, note);
        };
        let (cause, name) = (error.reason.clone(), order.spec.volume_name.clone());
        self.events.warning_of(action, reason, Alike { group, cause, about, name, note });
    }

    fn api(&self, key: &Key) -> Api<VolumeAttachment> {
        Api::namespaced(self.client.clone(), &key.namespace)
    }
}

/// Kind of call that a step makes.
fn work_of(step: &Step) -> Option<Work> {
    match step {
        Step::Plug { .. } => Some(Work::Plug),
        Step::Unplug | Step::UnplugEarlier(_) => Some(Work::Unplug),
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
