//! Holds what the infra has against what is ordered, and puts right what differs: a disk that an order counts on and the
//! infra lost is plugged again, and one that nothing orders is unplugged where nobody can want it.
//!
//! The infra's events ask for the looks; besides, everything is compared now and then. That takes one call to the infra
//! and time in proportion to what there is, and asks nothing of the API server while nothing differs.

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
use kube_kit::events::Events;
use kube_kit::index::Index;
use kube_kit::informer::{Informer, Key};
use kube_kit::latest::Latest;
use kube_kit::lean::PersistentVolumeClaim;
use kube_kit::queue::{Next, Queue, Retry};
use process_kit::duration;
use prometheus_client::registry::Registry;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::attach::target::target_of;
use crate::cluster::{self, Volumes};
use crate::infra::{DetachError, Named, News, ReadError, StorageInfra, is_namesake, order_of};
use judge::id_of;
use metrics::{LOST_ATTACHMENT, Metrics};

/// How long the infra may take for one answer.
const ANSWER: Duration = Duration::from_secs(30);
/// How many looks go on at once: a machine that does not let go of a disk holds up one of them.
const LOOKS_AT_ONCE: usize = 16;

/// Flags of the comparison.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// How long a disk must be plugged that nothing orders before it is unplugged.
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = duration::parse)]
    repair_grace: Duration,
    /// How often everything in the storage infra is compared with what is ordered. What its events tell is looked at at
    /// once.
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = duration::parse)]
    repair_interval: Duration,
    #[command(flatten)]
    clocks: ClockArgs,
}

/// Flags about the clocks of others.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct ClockArgs {
    /// By how much the clocks of the API server and of the storage infra may differ. What came first of an object of each
    /// is told only where more than this lies between them; else nothing is detached or removed.
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration::parse)]
    max_clock_skew: Duration,
}

/// What is to be compared.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Look {
    Everything,
    /// An attachment that changed, or is gone.
    Attachment(AttachmentId),
    /// A volume that may not be well.
    Volume(VolumeId),
    /// A node whose VM may be in another state.
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

/// Why a comparison must be repeated.
#[derive(Debug, thiserror::Error)]
enum Failed {
    #[error("cannot compare it with what is ordered: {0}")]
    Read(#[from] ReadError),
    #[error("cannot compare it with what is ordered: {0}")]
    Cluster(String),
    #[error("cannot unplug it: {0}")]
    Detach(#[from] DetachError),
}

/// The cluster's side of the comparison, and by whom orders are carried out.
pub(crate) struct Known {
    pub(crate) client: Client,
    pub(crate) infra: Arc<dyn StorageInfra>,
    pub(crate) orders: Arc<Latest<VolumeAttachment>>,
    /// The orders of each claim.
    pub(crate) by_claim: Arc<Index>,
    pub(crate) claims: Informer<PersistentVolumeClaim>,
    pub(crate) volumes: Volumes,
    pub(crate) events: Events,
    pub(crate) carry_out: Queue<Key>,
}

/// The comparison, registered but not started.
#[derive(Debug)]
pub struct Repair {
    options: Options,
    metrics: Metrics,
    looks: Queue<Look>,
    /// Since when each attachment was seen without an order, and what was told of it.
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

    /// What is to be told of the infra's news.
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

    /// Compares until `stop`; the cluster was read by now.
    pub(crate) async fn run(&self, known: &Known, stop: CancellationToken) {
        // Whoever leads again has not seen what went on meanwhile: the grace of each begins anew.
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

    /// An attachment that the infra says has changed, or is gone. Mostly, its order is still to be answered, or going too.
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
            // Not lost: it is there for another order of this name, as after a restore, and is taken over.
            known.carry_out.push(key);
        } else {
            self.lost(known, &order);
        }
        Ok(Next::Wait)
    }

    /// A volume that changed: where a machine lost its disk, its order is carried out again, which tells how that goes.
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

    /// Tells of a lost attachment, and has the order carried out again.
    fn lost(&self, known: &Known, order: &VolumeAttachment) {
        let key = Key::of(order);
        let note = format!(
            "the storage infra has lost the attachment of this volume to machine {}, which VolumeAttachment {key} says is \
             there: it is to be attached again, and the VolumeAttachment's status says how that went; what used it \
             meanwhile may have to be restarted",
            order.spec.node_uuid
        );
        tracing::warn!(attachment = %key, "{note}");
        known.tell(&Key::new(key.namespace.clone(), order.spec.volume_name.clone()), "AttachmentLost", note);
        self.metrics.repaired(LOST_ATTACHMENT);
        known.carry_out.push(key);
    }
}

impl Known {
    /// The order that is carried out under this id.
    fn order(&self, id: &AttachmentId) -> Option<Arc<VolumeAttachment>> {
        let is_its = |order: &VolumeAttachment| id_of(order) == *id;
        let key = match order_of(id)? {
            Named::Order(key) => key,
            // A name that is too long for an id, and so none of ours: that of any order may be it.
            Named::Hash => Key::of(&*self.orders.informer().find(is_its)?),
        };
        self.orders.get(&key).filter(|order| is_its(order))
    }

    /// The orders that say the disk of a volume is plugged.
    fn orders_of(&self, id: &VolumeId) -> Vec<Arc<VolumeAttachment>> {
        let claims =
            self.volumes.of_handle(id.as_str()).into_iter().filter_map(|one| cluster::claim_of(&one.spec));
        let orders = claims.flat_map(|claim| self.by_claim.members(&claim));
        orders.filter_map(|order| self.orders.get(&order)).filter(|order| counts_on(order)).collect()
    }

    /// Has an order carried out again that the infra's attachment is not right for: the infra's own word on it comes
    /// with that.
    fn compare(&self, order: &VolumeAttachment, attachment: &Attachment) {
        let wanted = target_of(order, &self.claims, &self.volumes).ok();
        if !is_as_told(order, attachment, wanted.as_ref()) {
            self.carry_out.push(Key::of(order));
        }
    }

    /// A warning on a claim, where it is there.
    fn tell(&self, claim: &Key, reason: &str, note: String) {
        if let Some(claim) = self.claims.get(claim) {
            self.events.warning(cluster::reference(&claim), "Repair", reason, note);
        }
    }
}

/// Whether the infra has an order's disk as the order says, and as it is wanted where that can be told.
fn is_as_told(order: &VolumeAttachment, attachment: &Attachment, wanted: Option<&AttachmentSpec>) -> bool {
    let told = order.status.as_ref().and_then(|status| status.disk_uuid.as_deref());
    attachment.state == AttachmentState::Attached
        // A running machine may have lost the disk, and not taken it again.
        && attachment.message.is_none()
        && told == Some(attachment.disk_uuid.to_string().as_str())
        && wanted.is_none_or(|wanted| *wanted == attachment.spec())
}

/// Whether an order says that its disk is plugged, and is there to stay.
fn counts_on(order: &VolumeAttachment) -> bool {
    order.status.as_ref().is_some_and(|status| status.attached) && order.metadata.deletion_timestamp.is_none()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_disk_is_as_told_when_it_is_there_as_wanted_under_the_uuid_that_was_told() {
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
        assert!(!is_as_told(&order(Some(DISK)), &attachment("attached", Some("cannot plug it again")), None));
        assert!(!is_as_told(&order(Some(DISK)), &attachment("attaching", None), None));
        assert!(!is_as_told(&order(Some("another")), &there, None));
        assert!(!is_as_told(&order(None), &there, None));
    }
}
