//! Does the steps of [`decide`] for one order: the only place that writes to `VolumeAttachment`s.

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

/// How long one pass waits for the infra. It goes on by itself; the next pass picks the result up.
const WAIT: Duration = Duration::from_secs(30);
/// Longer than anything that is waited for.
const FAR: Duration = Duration::from_secs(24 * 60 * 60);

/// Why a pass ended early.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unfinished {
    /// The order can't be carried out now.
    #[error(transparent)]
    Failure(#[from] Failure),
    /// The API server didn't answer.
    #[error("cannot read the order: {0}")]
    Read(String),
    /// The API server didn't take a write.
    #[error("cannot write {what}: {reason}")]
    Write { what: &'static str, reason: String },
}

/// Carries orders out.
pub(super) struct Reconciler {
    pub(super) client: Client,
    pub(super) infra: Arc<dyn StorageInfra>,
    pub(super) orders: Arc<Latest<VolumeAttachment>>,
    pub(super) claims: Informer<PersistentVolumeClaim>,
    pub(super) volumes: Volumes,
    pub(super) memories: Arc<Memories>,
    pub(super) turns: Turns,
    /// Bounds the requests to the API server and shares them out; nothing that waits for the infra.
    pub(super) requests: Gate,
    pub(super) lost: Lost,
    pub(super) events: Events,
    pub(super) metrics: Metrics,
    pub(super) stop: CancellationToken,
}

impl Reconciler {
    /// One pass over one order. Many may wait in it, so what is large and short is kept in a box of its own.
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
            // Read anew before each step: the order can be deleted while the infra works, and even be replaced.
            let order = self.orders.get(key).filter(|order| order.metadata.uid.as_ref() == Some(&uid));
            let Some(order) = order else {
                // What is left takes a turn of its own: with this one held, all who hold one could wait for the next.
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
                        // Leaves the line.
                        () = self.deleted(key, &uid), if work == Work::Plug => {}
                    }
                    // That can have taken long.
                    continue;
                }
            }
            let still_there = match step {
                Step::Plug { spec, replaces } => {
                    learned = Infra::Asked;
                    let started = Instant::now();
                    let answer = tokio::select! {
                        () = self.stop.cancelled() => return Ok(Next::Wait),
                        // The infra takes the detach that follows even while it is still plugging.
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
                    tracing::warn!(attachment = %key, %earlier, "unplugging the disk of an earlier order");
                    learned = match Box::pin(self.unplug_of(&order, &earlier)).await {
                        Infra::Unplugged => Infra::Unasked,
                        failed => failed,
                    };
                    !self.stop.is_cancelled()
                }
                Step::Look => {
                    // An order without a machine's UUID was never more than refused.
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

    /// Ends a pass whose order is gone.
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
            tracing::warn!(attachment = %key, %id, "the order is gone; unplugging what was asked for it");
            // If it fails: what is left over is found later.
            if let Infra::Failed(failure) = self.detach(id, false).await {
                tracing::warn!(attachment = %key, %id, "{failure}");
            }
        }
        Ok(Next::Wait)
    }

    /// Unplugs under an id from an order's machine, by force where that is said to be lost.
    async fn unplug_of(&self, order: &VolumeAttachment, id: &AttachmentId) -> Infra {
        if !self.lost.has_machine_of(order) {
            tokio::select! {
                answer = self.detach(id, false) => return answer,
                // A call that says so joins the one under way.
                () = self.lost.gets_machine_of(order) => {}
            }
        }
        tracing::warn!(attachment = %id, machine = machine(order), "the machine is said to be lost: its disk is taken by force where it is kept");
        self.detach(id, true).await
    }

    /// Unplugs under an id; `Infra::Unasked` when the process is to stop.
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

    /// What another order of the same name has in the machine.
    async fn namesake(&self, key: &Key, uid: &str, node: Uuid) -> Result<Option<Attachment>, ReadError> {
        let deadline = tokio::time::Instant::now() + WAIT;
        let found = self.infra.list_attachments(Some(node), deadline).await?;
        Ok(found.into_iter().find(|other| is_namesake(&other.id, key, uid)))
    }

    /// Waits until a request about an order may be made.
    async fn place(&self, order: &VolumeAttachment) -> Permit {
        self.requests.enter(&order::lane(order)).await
    }

    /// Whether the API server itself says that the order is there.
    async fn confirm(&self, key: &Key, order: &VolumeAttachment, uid: &str) -> Result<bool, Unfinished> {
        let _place = self.place(order).await;
        let found =
            self.api(key).get_opt(&key.name).await.map_err(|error| Unfinished::Read(chain(&error)))?;
        let Some(order) = found.filter(|order| order.metadata.uid.as_deref() == Some(uid)) else {
            return Ok(false);
        };
        self.take(Ok(order), "nothing")
    }

    /// Waits until the order is being deleted, or gone, or another one.
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

    /// Writes the whole status at once, so that nothing of an older one stays behind.
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
        let taken = self.take(written, "the status");
        if matches!(taken, Ok(true)) {
            tracing::info!(
                attachment = %key,
                node = order.spec.node_uuid,
                disk = status.disk_uuid,
                error = status.error.as_ref().map(|error| error.reason.as_str()),
                "answered"
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
        self.take(written, "the finalizer")
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
        // Finalizers of others keep it.
        let is_over = written
            .as_ref()
            .is_ok_and(|left| left.metadata.deletion_timestamp.is_some() && left.finalizers().is_empty());
        self.take(written, "the finalizer away")?;
        if is_over {
            self.orders.ended(order.clone());
        }
        tracing::info!(attachment = %key, node = order.spec.node_uuid, "detached");
        Ok(())
    }

    /// Deletes an order that can't be carried out any more; its disk is not in the machine.
    async fn renew(&self, key: &Key, order: &VolumeAttachment) -> Result<bool, Unfinished> {
        tracing::warn!(attachment = %key, "the storage infra has ended this attachment; deleting the order, so that it is made anew");
        let preconditions = Preconditions { uid: order.metadata.uid.clone(), resource_version: None };
        let deletion = DeleteParams::default().preconditions(preconditions);
        let _place = self.place(order).await;
        match self.api(key).delete(&key.name, &deletion).await {
            Ok(left) => left.left().map_or(Ok(false), |order| self.take(Ok(order), "the deletion")),
            Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => Ok(false),
            Err(error) => Err(Unfinished::Write { what: "the deletion", reason: chain(&error) }),
        }
    }

    /// Keeps what a write answered. False when the order is gone, and needs nothing more.
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

    /// An event where the people who wait for the disk look: on the claim, or else on the order; where many of one machine
    /// fail alike, on the machine.
    fn tell(&self, order: &VolumeAttachment, deleting: bool, status: &VolumeAttachmentStatus) {
        // An attach that went well is told by the status alone: it costs the management API four writes, and no event.
        let Some(error) = &status.error else { return };
        let machine = machine(order);
        let (action, reason, note) = match deleting {
            true => {
                let note = format!("cannot unplug the disk from {machine}: {}", error.message);
                ("Detach", "VolumeDetachFailed", note)
            }
            false => {
                let note =
                    format!("cannot plug the disk into {machine}: {}: {}", error.reason, error.message);
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

/// What turn a step needs.
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

/// Now, in the whole seconds that Kubernetes keeps, so that a time written compares equal to the time read.
fn now() -> Time {
    let now = Timestamp::now();
    Time(Timestamp::from_second(now.as_second()).unwrap_or(now))
}

#[cfg(test)]
mod tests;
