//! Repair loop: compares the attachments of the storage infra with the VolumeAttachments and repairs differences. A disk
//! that a VolumeAttachment reports as attached and the storage infra lost is attached again; a dangling attachment, which has
//! no VolumeAttachment, is detached if nothing can need it.
//!
//! Events of the storage infra trigger checks of single objects; everything is compared periodically. A full comparison takes
//! one call to the storage infra and linear time, and no API server request while nothing differs.

mod judge;
mod metrics;
pub mod orphans;
mod power;
mod strays;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crds::VolumeAttachment;
use infra_api::{
    Attachment, AttachmentId, AttachmentSpec, AttachmentState, Change, Event, EventKind, VolumeId,
};
use kube::Client;
use kube_kit::duration;
use kube_kit::events::Events;
use kube_kit::index::Index;
use kube_kit::informer::{Informer, Key};
use kube_kit::latest::Latest;
use kube_kit::lean::PersistentVolumeClaim;
use kube_kit::queue::{Next, Queue, Retry};
use prometheus_client::registry::Registry;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::attach::target::target_of;
use crate::cluster::{self, Volumes};
use crate::infra::{DetachError, Named, News, ReadError, StorageInfra, is_namesake, order_of};
use judge::id_of;
use metrics::{LOST_ATTACHMENT, Metrics};

/// Timeout of one call to the storage infra.
const ANSWER: Duration = Duration::from_secs(30);
/// Maximum number of concurrent checks. A VM that does not release a disk blocks one of them.
const LOOKS_AT_ONCE: usize = 16;

/// Flags of the repair loop.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Grace period before a disk without a VolumeAttachment is detached.
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = duration::parse)]
    repair_grace: Duration,
    /// Interval between full comparisons of the storage infra with the VolumeAttachments. Events of the storage infra are
    /// handled at once.
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = duration::parse)]
    repair_interval: Duration,
    #[command(flatten)]
    clocks: ClockArgs,
}

/// Flags about clock skew.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct ClockArgs {
    /// Maximum clock skew between the API server and the storage infra. Timestamps of the two that are closer than this
    /// count as unordered, and then nothing is detached or removed.
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration::parse)]
    max_clock_skew: Duration,
}

/// What to check.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Look {
    Everything,
    /// An attachment that was changed or deleted.
    Attachment(AttachmentId),
    /// A volume that may be unhealthy.
    Volume(VolumeId),
    /// A node whose VM state may have changed.
    Node(Uuid),
}

impl fmt::Display for Look {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Everything => f.write_str("all attachments of the storage infra"),
            Self::Attachment(id) => write!(f, "attachment {id} of the storage infra"),
            Self::Volume(id) => write!(f, "volume {id} of the storage infra"),
            Self::Node(uuid) => write!(f, "node {uuid} of the storage infra"),
        }
    }
}

/// Why a check must be retried.
#[derive(Debug, thiserror::Error)]
enum Failed {
    #[error("failed to compare it with the VolumeAttachments: {0}")]
    Read(#[from] ReadError),
    #[error("failed to compare it with the VolumeAttachments: {0}")]
    Cluster(String),
    #[error("failed to detach it: {0}")]
    Detach(#[from] DetachError),
}

/// Caches of the management cluster, and the queue of the attach controller.
pub(crate) struct Known {
    pub(crate) client: Client,
    pub(crate) infra: Arc<dyn StorageInfra>,
    pub(crate) orders: Arc<Latest<VolumeAttachment>>,
    /// VolumeAttachments by claim.
    pub(crate) by_claim: Arc<Index>,
    pub(crate) claims: Informer<PersistentVolumeClaim>,
    pub(crate) volumes: Volumes,
    pub(crate) events: Events,
    pub(crate) carry_out: Queue<Key>,
}

/// The repair loop, not started yet.
#[derive(Debug)]
pub struct Repair {
    options: Options,
    metrics: Metrics,
    looks: Queue<Look>,
    /// Dangling attachments: since when each was observed, and the last note reported about it.
    strays: Mutex<HashMap<AttachmentId, (Instant, Option<String>)>>,
    states: power::States,
}

impl Repair {
    /// Registers the metrics.
    pub fn new(registry: &mut Registry, options: Options) -> Self {
        let metrics = Metrics::register(registry);
        Self {
            options,
            metrics,
            looks: Queue::default(),
            strays: Mutex::default(),
            states: Default::default(),
        }
    }

    /// Handler for storage infra events.
    pub fn news(&self) -> impl Fn(News<'_>) + Send + Sync + use<> {
        let looks = self.looks.clone();
        move |news| match news {
            News::Everything => looks.push(Look::Everything),
            News::One(Event {
                kind: EventKind::Attachment,
                id,
                change: Change::Updated | Change::Deleted,
            }) => {
                if let Ok(id) = AttachmentId::new(id.as_str()) {
                    looks.push(Look::Attachment(id));
                }
            }
            News::One(Event { kind: EventKind::Volume, id, change: Change::Updated }) => {
                if let Ok(id) = VolumeId::new(id.as_str()) {
                    looks.push(Look::Volume(id));
                }
            }
            News::One(Event { kind: EventKind::Node, id, change: Change::Updated }) => {
                if let Ok(uuid) = id.parse() {
                    looks.push(Look::Node(uuid));
                }
            }
            News::One(_) => {}
        }
    }

    /// Runs until `stop`. The caches must be synced.
    pub(crate) async fn run(&self, known: &Known, stop: CancellationToken) {
        // A new leader did not observe what happened before: grace periods start again.
        self.strays.lock().unwrap_or_else(PoisonError::into_inner).clear();
        let looker = self.looks.worker();
        self.looks.push(Look::Everything);
        let work = |look| async move {
            match look {
                Look::Everything => self.sweep(known).await,
                Look::Attachment(id) => self.look_at_attachment(known, &id).await,
                Look::Volume(id) => self.look_at_volume(known, &id).await,
                Look::Node(uuid) => self.look_at_node(known, uuid).await,
            }
        };
        looker.run(LOOKS_AT_ONCE, Retry::default(), stop, work).await;
    }

    /// Checks an attachment that was changed or deleted. Usually its VolumeAttachment is not attached yet, or is terminating.
    async fn look_at_attachment(&self, known: &Known, id: &AttachmentId) -> Result<Next, Failed> {
        let Some(order) = known.order(id).filter(|order| counts_on(order)) else { return Ok(Next::Wait) };
        let node = order.spec.node_uuid.parse().ok();
        let there = known.infra.list_attachments(node, Instant::now() + ANSWER).await?;
        if let Some(attachment) = there.iter().find(|attachment| attachment.id == *id) {
            known.compare(&order, attachment);
            return Ok(Next::Wait);
        }
        let (key, uid) = (Key::of(&*order), order.metadata.uid.as_deref().unwrap_or_default());
        if there.iter().any(|attachment| is_namesake(&attachment.id, &key, uid)) {
            // Not lost: it belongs to a predecessor of the same name, as after a restore, and is taken over.
            known.carry_out.push(key);
        } else {
            self.lost(known, &order);
        }
        Ok(Next::Wait)
    }

    /// Checks a volume that changed: if it is unhealthy, its VolumeAttachments are reconciled again, which reports a lost disk.
    async fn look_at_volume(&self, known: &Known, id: &VolumeId) -> Result<Next, Failed> {
        let orders = known.orders_of(id);
        if orders.is_empty() {
            return Ok(Next::Wait);
        }
        let volume = known.infra.get_volume(id, Instant::now() + ANSWER).await?;
        if volume.is_some_and(|volume| !volume.condition.healthy) {
            for order in orders {
                known.carry_out.push(Key::of(&*order));
            }
        }
        Ok(Next::Wait)
    }

    /// Reports a lost attachment and requeues its VolumeAttachment.
    fn lost(&self, known: &Known, order: &VolumeAttachment) {
        let key = Key::of(order);
        let note = format!(
            "the storage infra lost the attachment of this volume to node {}, although VolumeAttachment {key} is attached; \
             attaching it again, see the status of the VolumeAttachment; pods that used the volume may have to be restarted",
            order.spec.node_uuid
        );
        tracing::warn!(attachment = %key, "{note}");
        known.tell(&Key::new(key.namespace.clone(), order.spec.volume_name.clone()), "AttachmentLost", note);
        self.metrics.repaired(LOST_ATTACHMENT);
        known.carry_out.push(key);
    }
}

impl Known {
    /// The VolumeAttachment of this attachment ID.
    fn order(&self, id: &AttachmentId) -> Option<Arc<VolumeAttachment>> {
        let is_its = |order: &VolumeAttachment| id_of(order) == *id;
        let key = match order_of(id)? {
            Named::Order(key) => key,
            // The name is too long for an ID, so search all.
            Named::Hash => Key::of(&*self.orders.informer().find(is_its)?),
        };
        self.orders.get(&key).filter(|order| is_its(order))
    }

    /// The attached VolumeAttachments of a volume.
    fn orders_of(&self, id: &VolumeId) -> Vec<Arc<VolumeAttachment>> {
        let claims =
            self.volumes.of_handle(id.as_str()).into_iter().filter_map(|one| cluster::claim_of(&one.spec));
        let orders = claims.flat_map(|claim| self.by_claim.members(&claim));
        orders.filter_map(|order| self.orders.get(&order)).filter(|order| counts_on(order)).collect()
    }

    /// Requeues a VolumeAttachment whose attachment in the storage infra differs from it.
    fn compare(&self, order: &VolumeAttachment, attachment: &Attachment) {
        let wanted = target_of(order, &self.claims, &self.volumes).ok();
        if !is_as_told(order, attachment, wanted.as_ref()) {
            self.carry_out.push(Key::of(order));
        }
    }

    /// Emits a warning event on a claim, if it exists.
    fn tell(&self, claim: &Key, reason: &str, note: String) {
        if let Some(claim) = self.claims.get(claim) {
            self.events.warning(cluster::reference(&claim), "Repair", reason, note);
        }
    }
}

/// Whether an attachment in the storage infra matches the status of its VolumeAttachment, and the desired attachment if that
/// can be resolved.
fn is_as_told(order: &VolumeAttachment, attachment: &Attachment, wanted: Option<&AttachmentSpec>) -> bool {
    let told = order.status.as_ref().and_then(|status| status.disk_uuid.as_deref());
    attachment.state == AttachmentState::Attached
        // A message means that a running VM lost the disk and it could not be attached again.
        && attachment.message.is_none()
        && told == Some(attachment.disk_uuid.to_string().as_str())
        && wanted.is_none_or(|wanted| *wanted == attachment.spec())
}

/// Whether a VolumeAttachment is attached and not terminating.
fn counts_on(order: &VolumeAttachment) -> bool {
    order.status.as_ref().is_some_and(|status| status.attached) && order.metadata.deletion_timestamp.is_none()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_attachment_matches_if_state_disk_uuid_and_desired_spec_are_equal() {
        const DISK: &str = "6f9c1b2a-0d3e-4f5a-8b7c-1234567890ab";
        let attachment = |state: &str, message: Option<&str>| -> Attachment {
            serde_json::from_value(json!({
                "id": "a", "volume": "v", "node": DISK, "readOnly": false, "access": "single-node", "state": state,
                "diskUuid": DISK, "message": message, "createdAt": "2026-01-01T00:00:00Z",
            }))
            .unwrap()
        };
        let order = |disk: Option<&str>| -> VolumeAttachment {
            serde_json::from_value(json!({
                "metadata": {"name": "a"}, "spec": {"nodeUUID": DISK, "volumeName": "data"},
                "status": {"attached": true, "diskUUID": disk},
            }))
            .unwrap()
        };
        let there = attachment("attached", None);
        assert!(is_as_told(&order(Some(DISK)), &there, None));
        assert!(is_as_told(&order(Some(DISK)), &there, Some(&there.spec())));
        let otherwise = AttachmentSpec { read_only: true, ..there.spec() };
        assert!(!is_as_told(&order(Some(DISK)), &there, Some(&otherwise)));
        assert!(!is_as_told(
            &order(Some(DISK)),
            &attachment("attached", Some("failed to attach it again")),
            None
        ));
        assert!(!is_as_told(&order(Some(DISK)), &attachment("attaching", None), None));
        assert!(!is_as_told(&order(Some("another")), &there, None));
        assert!(!is_as_told(&order(None), &there, None));
    }
}
