//! Does the steps of [`decide`] for one order: the only place that writes to `VolumeAttachment`s.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crds::names::FINALIZER_DETACH;
use crds::{VolumeAttachment, VolumeAttachmentStatus};
use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, Resource};
use kube_kit::client::chain;
use kube_kit::events::Events;
use kube_kit::informer::{Change, Informer, Key};
use kube_kit::latest::Latest;
use kube_kit::queue::Next;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::decide::{Infra, Step, View, decide};
use super::failure::Failure;
use super::metrics::Metrics;
use super::target::{claim_key, target, volume_name};
use crate::infra::{StorageInfra, attachment_id};

/// How long one pass waits for the infra. It goes on by itself; the next pass picks the result up.
const WAIT: Duration = Duration::from_secs(30);
/// How long the watches of claims and volumes may be behind that of orders.
const SETTLE: Duration = Duration::from_millis(300);
/// How often a plugged disk is looked at again, at most: it may have been unplugged behind our back.
const LOOK_AGAIN: Duration = Duration::from_secs(600);

/// Why a pass ended early.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unfinished {
    /// The order can't be carried out now.
    #[error(transparent)]
    Failure(#[from] Failure),
    /// The API server didn't take a write.
    #[error("cannot write {what}: {reason}")]
    Write { what: &'static str, reason: String },
}

/// What this process remembers of each order.
#[derive(Debug)]
struct Memory {
    first_seen: Instant,
    /// The answer that it wrote or is writing. Its echo in the watch is no news.
    answer: Option<VolumeAttachmentStatus>,
}

/// The memories of all orders.
#[derive(Debug, Default)]
pub(super) struct Memories(Mutex<HashMap<Key, Memory>>);

impl Memories {
    /// Whether a change asks for a look at the order.
    pub(super) fn is_news(&self, change: &Change<'_, VolumeAttachment>) -> bool {
        let (old, new) = match (change.old, change.new) {
            (_, None) => {
                self.all().remove(change.key);
                return false;
            }
            (None, Some(_)) => {
                self.all().insert(change.key.clone(), Memory { first_seen: Instant::now(), answer: None });
                return true;
            }
            (Some(old), Some(new)) => (old, new),
        };
        let (before, now) = (old.meta(), new.meta());
        if before.uid != now.uid
            || before.generation != now.generation
            || before.deletion_timestamp != now.deletion_timestamp
            || (is_held(old) && !is_held(new))
        {
            return true;
        }
        let answer = self.all().get(change.key).and_then(|memory| memory.answer.clone());
        old.status != new.status && new.status != answer
    }

    fn is_fresh(&self, key: &Key) -> bool {
        self.all().get(key).is_some_and(|memory| memory.first_seen.elapsed() < SETTLE)
    }

    fn answering(&self, key: &Key, answer: Option<VolumeAttachmentStatus>) {
        if let Some(memory) = self.all().get_mut(key) {
            memory.answer = answer;
        }
    }

    fn all(&self) -> MutexGuard<'_, HashMap<Key, Memory>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Carries orders out.
pub(super) struct Reconciler {
    pub(super) client: Client,
    pub(super) infra: Arc<dyn StorageInfra>,
    pub(super) orders: Arc<Latest<VolumeAttachment>>,
    pub(super) claims: Informer<PersistentVolumeClaim>,
    pub(super) volumes: Informer<PersistentVolume>,
    pub(super) memories: Arc<Memories>,
    pub(super) events: Events,
    pub(super) metrics: Metrics,
    pub(super) stop: CancellationToken,
}

impl Reconciler {
    /// One pass over one order.
    pub(super) async fn reconcile(&self, key: &Key) -> Result<Next, Unfinished> {
        let id = attachment_id(key);
        let mut infra = Infra::Unasked;
        loop {
            // Read anew before each step: the order can be deleted while the infra works.
            let Some(order) = self.orders.get(key) else { return Ok(Next::Wait) };
            let view = self.view(key, &order, infra.clone());
            let still_there = match decide(&view, &now()) {
                Step::Plug(spec) => {
                    let started = Instant::now();
                    let answer = tokio::select! {
                        () = self.stop.cancelled() => return Ok(Next::Wait),
                        // The infra takes the detach that follows even while it is still plugging.
                        () = self.deleted(key) => continue,
                        answer = self.infra.attach(&id, &spec, WAIT) => answer,
                    };
                    self.metrics.observe("attach", answer.is_ok(), started);
                    infra = match answer {
                        Ok(disk_uuid) => Infra::Plugged(disk_uuid.to_string()),
                        Err(error) => Infra::Failed(error.into()),
                    };
                    true
                }
                Step::Unplug => {
                    let started = Instant::now();
                    let answer = tokio::select! {
                        () = self.stop.cancelled() => return Ok(Next::Wait),
                        answer = self.infra.detach(&id, WAIT) => answer,
                    };
                    self.metrics.observe("detach", answer.is_ok(), started);
                    infra = match answer {
                        Ok(()) => Infra::Unplugged,
                        Err(error) => Infra::Failed(error.into()),
                    };
                    true
                }
                Step::Report(status) => {
                    let there = self.answer(key, &order, &status).await?;
                    if there {
                        self.tell(&order, view.deleting, &status);
                    }
                    there
                }
                Step::Hold => self.hold(key, &order).await?,
                Step::Release => {
                    // The answer to the write that ends an object has no newer version than the object had,
                    // so the copy at hand can't tell that it is done.
                    self.release(key, &order).await?;
                    return Ok(Next::Wait);
                }
                Step::Settle => return Ok(Next::After(SETTLE)),
                Step::Done if view.status.attached && !view.deleting => {
                    return Ok(Next::After(LOOK_AGAIN.mul_f64(0.5 + fastrand::f64() / 2.0)));
                }
                Step::Done => return Ok(Next::Wait),
                Step::Retry(failure) => return Err(failure.into()),
            };
            if !still_there {
                return Ok(Next::Wait);
            }
        }
    }

    /// Waits until the order is being deleted, or gone.
    async fn deleted(&self, key: &Key) {
        let is_deleted = |order: Option<&Arc<VolumeAttachment>>| {
            order.is_none_or(|order| order.metadata.deletion_timestamp.is_some()).then_some(())
        };
        let beyond_the_call = tokio::time::Instant::now() + 2 * WAIT;
        self.orders.informer().wait_for(key, beyond_the_call, is_deleted).await;
    }

    fn view(&self, key: &Key, order: &VolumeAttachment, infra: Infra) -> View {
        let status = order.status.clone().unwrap_or_default();
        let claim_key = claim_key(order);
        let claim = self.claims.get(&claim_key);
        let volume =
            claim.as_deref().and_then(volume_name).and_then(|name| self.volumes.get(&Key::cluster(name)));
        View {
            deleting: order.metadata.deletion_timestamp.is_some(),
            held: is_held(order),
            generation: order.metadata.generation.unwrap_or_default(),
            target: target(&order.spec, &claim_key, claim.as_deref(), volume.as_deref(), status.attached),
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
        let written = self.api(key).patch(&key.name, &PatchParams::default(), &patch).await;
        self.take(written, "the finalizer")
    }

    async fn release(&self, key: &Key, order: &VolumeAttachment) -> Result<bool, Unfinished> {
        let finalizers = order.metadata.finalizers.as_deref().unwrap_or_default();
        let Some(at) = finalizers.iter().position(|one| one == FINALIZER_DETACH) else { return Ok(false) };
        let path = format!("/metadata/finalizers/{at}");
        let patch = json_patch(json!([
            same_object(order),
            {"op": "test", "path": path, "value": FINALIZER_DETACH},
            {"op": "remove", "path": path},
        ]));
        let written = self.api(key).patch(&key.name, &PatchParams::default(), &patch).await;
        let taken = self.take(written, "the finalizer away")?;
        tracing::info!(attachment = %key, node = order.spec.node_uuid, "detached");
        Ok(taken)
    }

    /// Keeps what a write answered. False when the order is gone, and needs nothing more.
    fn take(&self, written: kube::Result<VolumeAttachment>, what: &'static str) -> Result<bool, Unfinished> {
        match written {
            Ok(mut order) => {
                order.metadata.managed_fields = None;
                self.orders.changed(order);
                Ok(true)
            }
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(false),
            Err(error) => Err(Unfinished::Write { what, reason: chain(&error) }),
        }
    }

    /// An event where the people who wait for the disk look: on the claim, or else on the order.
    fn tell(&self, order: &VolumeAttachment, deleting: bool, status: &VolumeAttachmentStatus) {
        let machine = machine(order);
        let about = self.claims.get(&claim_key(order)).map_or_else(
            || ObjectReference {
                api_version: Some(VolumeAttachment::api_version(&()).into_owned()),
                kind: Some(VolumeAttachment::kind(&()).into_owned()),
                ..reference(order)
            },
            |claim| ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("PersistentVolumeClaim".to_owned()),
                ..reference(&*claim)
            },
        );
        match &status.error {
            Some(error) if deleting => {
                let note = format!("cannot unplug the disk from {machine}: {}", error.message);
                self.events.warning(about, "Detach", "VolumeDetachFailed", note);
            }
            Some(error) => {
                let note =
                    format!("cannot plug the disk into {machine}: {}: {}", error.reason, error.message);
                self.events.warning(about, "Attach", "VolumeAttachFailed", note);
            }
            // Told by the status alone: an attach costs the management API four writes, and no event.
            None => {}
        }
    }

    fn api(&self, key: &Key) -> Api<VolumeAttachment> {
        Api::namespaced(self.client.clone(), &key.namespace)
    }
}

fn is_held(order: &VolumeAttachment) -> bool {
    order.metadata.finalizers.as_deref().unwrap_or_default().iter().any(|one| one == FINALIZER_DETACH)
}

/// The machine in the words of people, who know its name, and of the infra, which knows its UUID.
fn machine(order: &VolumeAttachment) -> String {
    let owners = order.metadata.owner_references.as_deref().unwrap_or_default();
    match owners.iter().find(|owner| owner.kind == "VirtualMachine") {
        Some(owner) => format!("VirtualMachine {} ({})", owner.name, order.spec.node_uuid),
        None => format!("machine {}", order.spec.node_uuid),
    }
}

fn reference<K: Resource>(object: &K) -> ObjectReference {
    let meta = object.meta();
    ObjectReference {
        name: meta.name.clone(),
        namespace: meta.namespace.clone(),
        uid: meta.uid.clone(),
        resource_version: meta.resource_version.clone(),
        ..Default::default()
    }
}

/// Makes a patch fail when the name stands for another object by now.
fn same_object(order: &VolumeAttachment) -> serde_json::Value {
    json!({"op": "test", "path": "/metadata/uid", "value": order.metadata.uid})
}

fn json_patch(operations: serde_json::Value) -> Patch<()> {
    Patch::Json(serde_json::from_value(operations).expect("the operations above are a JSON patch"))
}

/// Now, in the whole seconds that Kubernetes keeps, so that a time written compares equal to the time read.
fn now() -> Time {
    let now = Timestamp::now();
    Time(Timestamp::from_second(now.as_second()).unwrap_or(now))
}
