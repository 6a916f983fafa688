//! Repair loop: compares the attachments of the storage infra with the VolumeAttachments and repairs differences. A disk
//! that a VolumeAttachment reports as attached and the storage infra lost is attached again; a dangling attachment, which has
//! no VolumeAttachment, is detached if nothing can need it.
//!
//! Events of the storage infra trigger checks of single objects; everything is compared periodically. A full comparison takes
//! one call to the storage infra and linear time, and no API server request while nothing differs.

mod dangling;
mod decide;
mod metrics;
pub mod orphans;
mod power;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crds::VolumeAttachment;
use infra_api::{
    Attachment, AttachmentId, AttachmentSpec, AttachmentState, Change, Event, EventKind, NodeState, VolumeId,
};
use kube_kit::informer::Key;
use kube_kit::queue::{NextAction, Queue, Retry};
use process_kit::duration;
use prometheus_client::registry::Registry;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::cluster;
use crate::event_reason::EventReason;
use crate::infra::{DetachError, InfraEvent, ParsedId, ReadError, has_same_name, parse_attachment_id};
use crate::volume_attachment::resolve::resolve;
use crate::volume_attachment::{Shared, vm_reference};
use decide::id_of;
use metrics::{LOST_ATTACHMENT, Metrics};

/// Timeout of one call to the storage infra.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of concurrent checks. A VM that does not release a disk blocks one of them.
const CONCURRENT_CHECKS: usize = 16;

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
enum Check {
    All,
    /// An attachment that was changed or deleted.
    Attachment(AttachmentId),
    /// A volume that may be unhealthy.
    Volume(VolumeId),
    /// A node whose VM state may have changed.
    Node(Uuid),
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all attachments of the storage infra"),
            Self::Attachment(id) => write!(f, "attachment {id} of the storage infra"),
            Self::Volume(id) => write!(f, "volume {id} of the storage infra"),
            Self::Node(uuid) => write!(f, "node {uuid} of the storage infra"),
        }
    }
}

/// Why a check must be retried.
#[derive(Debug, thiserror::Error)]
enum CheckError {
    #[error("failed to compare it with the VolumeAttachments: {0}")]
    Read(#[from] ReadError),
    #[error("failed to compare it with the VolumeAttachments: {0}")]
    Cluster(String),
    #[error("failed to detach it: {0}")]
    Detach(#[from] DetachError),
}

/// The repair loop, not started yet.
#[derive(Debug)]
pub struct Repair {
    options: Options,
    metrics: Metrics,
    checks: Queue<Check>,
    /// Dangling attachments: since when each was observed, and the last note reported about it.
    dangling: Mutex<HashMap<AttachmentId, (Instant, Option<String>)>>,
    states: power::States,
}

impl Repair {
    /// Registers the metrics.
    pub fn new(registry: &mut Registry, options: Options) -> Self {
        let metrics = Metrics::register(registry);
        Self {
            options,
            metrics,
            checks: Queue::default(),
            dangling: Mutex::default(),
            states: Default::default(),
        }
    }

    /// Handler for storage infra events.
    pub fn on_infra_event(&self) -> impl Fn(InfraEvent<'_>) + Send + Sync + use<> {
        let checks = self.checks.clone();
        move |event| match event {
            InfraEvent::Resync => checks.push(Check::All),
            InfraEvent::Object(Event {
                kind: EventKind::Attachment,
                id,
                change: Change::Updated | Change::Deleted,
            }) => {
                if let Ok(id) = AttachmentId::new(id.as_str()) {
                    checks.push(Check::Attachment(id));
                }
            }
            InfraEvent::Object(Event { kind: EventKind::Volume, id, change: Change::Updated }) => {
                if let Ok(id) = VolumeId::new(id.as_str()) {
                    checks.push(Check::Volume(id));
                }
            }
            InfraEvent::Object(Event { kind: EventKind::Node, id, change: Change::Updated }) => {
                if let Ok(uuid) = id.parse() {
                    checks.push(Check::Node(uuid));
                }
            }
            InfraEvent::Object(_) => {}
        }
    }

    /// Runs until `stop`. The caches must be synced.
    pub(crate) async fn run(&self, shared: &Shared, stop: CancellationToken) {
        // A new leader did not observe what happened before: grace periods start again.
        self.dangling.lock().unwrap_or_else(PoisonError::into_inner).clear();
        let worker = self.checks.worker("repair");
        self.checks.push(Check::All);
        let work = |check| async move {
            match check {
                Check::All => self.compare_all(shared).await,
                Check::Attachment(id) => self.check_attachment(shared, &id).await,
                Check::Volume(id) => self.check_volume(shared, &id).await,
                Check::Node(uuid) => self.check_node(shared, uuid).await,
            }
        };
        worker.run(CONCURRENT_CHECKS, Retry::default(), stop, work).await;
    }

    /// Checks an attachment that was changed or deleted. Usually its VolumeAttachment is not attached yet, or is terminating.
    async fn check_attachment(&self, shared: &Shared, id: &AttachmentId) -> Result<NextAction, CheckError> {
        let Some(attachment) = shared.attachment(id).filter(|attachment| is_expected(attachment)) else {
            return Ok(NextAction::AwaitChange);
        };
        let node = attachment.spec.node_uuid.parse().ok();
        let listed = shared.clients.infra.list_attachments(node, Instant::now() + TIMEOUT).await?;
        if let Some(infra_attachment) = listed.iter().find(|infra_attachment| infra_attachment.id == *id) {
            shared.requeue_if_different(&attachment, infra_attachment);
            return Ok(NextAction::AwaitChange);
        }
        let (key, uid) = (Key::of(&*attachment), attachment.metadata.uid.as_deref().unwrap_or_default());
        if listed.iter().any(|infra_attachment| has_same_name(&infra_attachment.id, &key, uid)) {
            // Not lost: it belongs to a predecessor of the same name, as after a restore, and is taken over.
            shared.attachments.queue.push(key);
        } else {
            self.report_lost(shared, &attachment);
        }
        Ok(NextAction::AwaitChange)
    }

    /// Checks a volume that changed: if it is unhealthy, its VolumeAttachments are reconciled again, which reports a lost disk.
    async fn check_volume(&self, shared: &Shared, id: &VolumeId) -> Result<NextAction, CheckError> {
        let attachments = shared.attachments_of(id);
        if attachments.is_empty() {
            return Ok(NextAction::AwaitChange);
        }
        let volume = shared.clients.infra.get_volume(id, Instant::now() + TIMEOUT).await?;
        if volume.is_some_and(|volume| !volume.condition.healthy) {
            for attachment in attachments {
                shared.attachments.queue.push(Key::of(&*attachment));
            }
        }
        Ok(NextAction::AwaitChange)
    }

    /// Reports the state of a node that changed, if its VM has disks of this driver.
    async fn check_node(&self, shared: &Shared, node: Uuid) -> Result<NextAction, CheckError> {
        let text = node.to_string();
        let Some(attachment) = shared.attachments.objects.informer().find(|one| one.spec.node_uuid == text)
        else {
            return Ok(NextAction::AwaitChange);
        };
        let (Some(vm), Some(found)) =
            (vm_reference(&attachment), shared.clients.infra.get_node(node, Instant::now() + TIMEOUT).await?)
        else {
            return Ok(NextAction::AwaitChange);
        };
        if self.states.should_report(node, found.state) {
            let (reason, text) = power::report(&found);
            tracing::info!(%node, "{text}");
            let note = text.guest().to_owned();
            match found.state {
                NodeState::Running => shared.clients.events.normal(vm, "Watch", reason.as_str(), note),
                _ => shared.clients.events.warning(vm, "Watch", reason.as_str(), note),
            }
        }
        Ok(NextAction::AwaitChange)
    }

    /// Reports a lost attachment and requeues its VolumeAttachment.
    fn report_lost(&self, shared: &Shared, attachment: &VolumeAttachment) {
        let key = Key::of(attachment);
        let note = String::from(
            "the storage infra lost the attachment of this volume, although a VolumeAttachment is attached; attaching it again, \
             see the status of the VolumeAttachment; pods that used the volume may have to be restarted",
        );
        tracing::warn!(attachment = %key, node = attachment.spec.node_uuid, "{note}");
        shared.warn_claim(
            &Key::new(key.namespace.clone(), attachment.spec.volume_name.clone()),
            EventReason::AttachmentLost,
            note,
        );
        self.metrics.repaired(LOST_ATTACHMENT);
        shared.attachments.queue.push(key);
    }
}

impl Shared {
    /// The VolumeAttachment of this attachment ID.
    fn attachment(&self, id: &AttachmentId) -> Option<Arc<VolumeAttachment>> {
        let is_its = |attachment: &VolumeAttachment| id_of(attachment) == *id;
        let key = match parse_attachment_id(id)? {
            ParsedId::Name(key) => key,
            // The name is too long for an ID, so search all.
            ParsedId::Hashed => Key::of(&*self.attachments.objects.informer().find(is_its)?),
        };
        self.attachments.objects.get(&key).filter(|attachment| is_its(attachment))
    }

    /// The attached VolumeAttachments of a volume.
    fn attachments_of(&self, id: &VolumeId) -> Vec<Arc<VolumeAttachment>> {
        let claims = self.volumes.of_volume(id).into_iter().filter_map(|one| cluster::claim_of(&one.spec));
        let attachments = claims.flat_map(|claim| self.attachments.by_claim.members(&claim));
        attachments
            .filter_map(|attachment| self.attachments.objects.get(&attachment))
            .filter(|attachment| is_expected(attachment))
            .collect()
    }

    /// Requeues a VolumeAttachment whose attachment in the storage infra differs from it.
    fn requeue_if_different(&self, attachment: &VolumeAttachment, infra_attachment: &Attachment) {
        let desired = resolve(attachment, &self.claims, &self.volumes, &self.guests).ok();
        if !matches(attachment, infra_attachment, desired.as_ref()) {
            self.attachments.queue.push(Key::of(attachment));
        }
    }

    /// Emits a warning event on a claim, if it exists.
    fn warn_claim(&self, claim: &Key, reason: EventReason, note: String) {
        if let Some(claim) = self.claims.get(claim) {
            self.clients.events.warning(cluster::reference(&claim), "Repair", reason.as_str(), note);
        }
    }
}

/// Whether an attachment in the storage infra matches the status of its VolumeAttachment, and the desired attachment if that
/// can be resolved.
fn matches(
    attachment: &VolumeAttachment,
    infra_attachment: &Attachment,
    desired: Option<&AttachmentSpec>,
) -> bool {
    let reported = attachment.status.as_ref().and_then(|status| status.disk_uuid.as_deref());
    infra_attachment.state == AttachmentState::Attached
        // A message means that a running VM lost the disk and it could not be attached again.
        && infra_attachment.message.is_none()
        && reported == Some(infra_attachment.disk_uuid.to_string().as_str())
        && desired.is_none_or(|desired| is_same_disk(desired, &infra_attachment.spec()))
}

/// Whether two attachments are of the same volume and node. A disk stays read-only or writable as it was plugged, also if its
/// volume is shared differently since.
pub(crate) fn is_same_disk(one: &AttachmentSpec, other: &AttachmentSpec) -> bool {
    (&one.volume, one.node) == (&other.volume, other.node)
}

/// Whether a VolumeAttachment is attached and not terminating.
fn is_expected(attachment: &VolumeAttachment) -> bool {
    attachment.status.as_ref().is_some_and(|status| status.attached)
        && attachment.metadata.deletion_timestamp.is_none()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_attachment_matches_if_state_disk_uuid_and_desired_spec_are_equal() {
        const DISK: &str = "6f9c1b2a-0d3e-4f5a-8b7c-1234567890ab";
        let infra_attachment = |state: &str, message: Option<&str>| -> Attachment {
            serde_json::from_value(json!({
                "id": "a", "volume": "v", "node": DISK, "readOnly": false, "access": "single-node", "state": state,
                "diskUuid": DISK, "message": message, "createdAt": "2026-01-01T00:00:00Z",
            }))
            .unwrap()
        };
        let attachment = |disk: Option<&str>| -> VolumeAttachment {
            serde_json::from_value(json!({
                "metadata": {"name": "a"}, "spec": {"nodeUUID": DISK, "volumeName": "data"},
                "status": {"attached": true, "diskUUID": disk},
            }))
            .unwrap()
        };
        let listed = infra_attachment("attached", None);
        assert!(matches(&attachment(Some(DISK)), &listed, None));
        assert!(matches(&attachment(Some(DISK)), &listed, Some(&listed.spec())));
        let shared_otherwise = AttachmentSpec { read_only: true, ..listed.spec() };
        assert!(matches(&attachment(Some(DISK)), &listed, Some(&shared_otherwise)));
        let otherwise = AttachmentSpec { volume: VolumeId::new("another").unwrap(), ..listed.spec() };
        assert!(!matches(&attachment(Some(DISK)), &listed, Some(&otherwise)));
        assert!(!matches(
            &attachment(Some(DISK)),
            &infra_attachment("attached", Some("failed to attach it again")),
            None
        ));
        assert!(!matches(&attachment(Some(DISK)), &infra_attachment("attaching", None), None));
        assert!(!matches(&attachment(Some("another")), &listed, None));
        assert!(!matches(&attachment(None), &listed, None));
    }
}
