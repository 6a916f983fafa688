//! Full comparison with the storage infra, and the handling of dangling attachments.

use std::collections::HashMap;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use crds::{VirtualMachine, VolumeAttachment, newest_virtual_machine_version, virtual_machine_resource};
use futures::StreamExt;
use futures::future::try_join_all;
use infra_api::{Attachment, AttachmentId};
use kube::api::ListParams;
use kube::{Api, Client};
use kube_kit::client::chain;
use kube_kit::informer::Key;
use kube_kit::partial::PersistentVolume;
use kube_kit::queue::NextAction;
use process_kit::duration;
use tokio::time::Instant;

use super::decide::{ClaimedVolume, Decision, Inputs, LeaveReason, decide, id_of};
use super::metrics::DANGLING_ATTACHMENT;
use super::{CheckError, Repair, TIMEOUT, is_expected};
use crate::cluster;
use crate::event_reason::EventReason;
use crate::infra::{Message, is_host_attachment, namespace_of};
use crate::volume_attachment::{Shared, is_reconciled};

/// Timeout of a detach call. The detach continues in the storage infra.
const DETACH_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum number of dangling attachments that are handled at the same time.
const CONCURRENT_DANGLING: usize = 8;

/// Delay of the next full comparison after a detach.
const SETTLE: Duration = Duration::from_secs(1);

/// Result of handling a dangling attachment.
enum Done {
    Detached,
    Nothing,
}

type Dangling = HashMap<AttachmentId, (Instant, Option<String>)>;

impl Repair {
    /// Compares all attachments of the storage infra with all VolumeAttachments.
    pub(super) async fn compare_all(&self, shared: &Shared) -> Result<NextAction, CheckError> {
        // Listed before the attachments: a VolumeAttachment that is attached now has its attachment in the later list.
        let attachments = shared.attachments.objects.informer().list();
        let infra_attachments = shared.clients.infra.list_attachments(None, Instant::now() + TIMEOUT).await?;
        let listed: HashMap<&AttachmentId, &Attachment> = infra_attachments
            .iter()
            .map(|infra_attachment| (&infra_attachment.id, infra_attachment))
            .collect();
        for attachment in &attachments {
            // Usually it is being reconciled already; this covers a lost event.
            if !is_reconciled(attachment) {
                shared.attachments.queue.push(Key::of(&**attachment));
            }
            if !is_expected(attachment) {
                continue;
            }
            let id = id_of(attachment);
            match listed.get(&id) {
                None => drop(self.check_attachment(shared, &id).await?),
                Some(infra_attachment) => shared.requeue_if_different(attachment, infra_attachment),
            }
        }

        let dangling: Vec<&Attachment> = infra_attachments
            .iter()
            .filter(|infra_attachment| {
                // Those of hosts end by ControllerUnpublishVolume.
                !is_host_attachment(&infra_attachment.id) && shared.attachment(&infra_attachment.id).is_none()
            })
            .collect();
        self.metrics.set_dangling(dangling.len());
        let due = self.due(&dangling);
        let mut next = self.options.repair_interval;
        let mut expired = Vec::new();
        for (found, left) in dangling.into_iter().zip(due) {
            if left.is_zero() {
                expired.push(found);
            } else {
                next = next.min(left);
            }
        }
        // One that cannot be checked or detached does not block the others.
        let checks = expired.into_iter().map(|found| self.handle_dangling(shared, found));
        let mut checks = futures::stream::iter(checks).buffer_unordered(CONCURRENT_DANGLING);
        let mut failed = None;
        while let Some(result) = checks.next().await {
            match result {
                Ok(Done::Detached) => next = next.min(SETTLE),
                Ok(Done::Nothing) => {}
                Err(error) => failed = Some(error),
            }
        }
        failed.map_or(Ok(NextAction::RequeueAfter(next)), Err)
    }

    /// Remaining grace period of each dangling attachment.
    fn due(&self, dangling: &[&Attachment]) -> Vec<Duration> {
        let mut observed = self.observed();
        observed.retain(|id, _| dangling.iter().any(|found| found.id == *id));
        let left = |found: &&Attachment| {
            let (since, _) = observed.entry(found.id.clone()).or_insert_with(|| (Instant::now(), None));
            self.options.repair_grace.saturating_sub(since.elapsed())
        };
        dangling.iter().map(left).collect()
    }

    async fn handle_dangling(&self, shared: &Shared, found: &Attachment) -> Result<Done, CheckError> {
        let volumes = read_volumes(shared, found).await?;
        let claim = claim_of(found, &volumes);
        let namespace = claim.map_or("", |claim| claim.namespace.as_str());
        let attachments = read_attachments(&shared.clients.cluster, namespace).await?;
        let vms = read_vms(&shared.clients.cluster, namespace).await?;
        let decision = decide(&Inputs {
            infra_attachment: found,
            volumes: &volumes,
            clock_skew: self.options.clocks.max_clock_skew,
            attachments: &attachments,
            vms: vms.as_deref(),
        });
        let (done, reason, what) = match decision {
            Decision::HasAttachment => return Ok(Done::Nothing),
            Decision::Detach => {
                shared.clients.infra.detach(&found.id, false, DETACH_TIMEOUT).await?;
                self.metrics.repaired(DANGLING_ATTACHMENT);
                (
                    Done::Detached,
                    EventReason::DanglingAttachmentRemoved,
                    detached(found, self.options.repair_grace),
                )
            }
            Decision::Leave(reason, why) => {
                (Done::Nothing, EventReason::DanglingAttachment, left_alone(found, reason, &why))
            }
        };
        if self.should_report(&found.id, &what.to_string()) {
            tracing::warn!(attachment = %found.id, "{what}");
            if let Some(claim) = claim {
                shared.warn_claim(claim, reason, what.guest().to_owned());
            }
        }
        Ok(done)
    }

    fn should_report(&self, id: &AttachmentId, note: &str) -> bool {
        let mut observed = self.observed();
        let (_, last_note) = observed.entry(id.clone()).or_insert_with(|| (Instant::now(), None));
        last_note.replace(note.to_owned()).as_deref() != Some(note)
    }

    fn observed(&self) -> MutexGuard<'_, Dangling> {
        self.dangling.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A dangling attachment was detached. Its VM may be another guest's.
fn detached(found: &Attachment, grace: Duration) -> Message {
    let why =
        format!("no VolumeAttachment and no VirtualMachine had requested it for {}", duration::show(grace));
    Message::new(
        format!("detached volume {} from node {}: {why}", found.volume, found.node),
        format!("detached the disk from a VM: {why}"),
    )
}

/// A dangling attachment was left alone.
fn left_alone(found: &Attachment, reason: LeaveReason, why: &str) -> Message {
    const WHAT: &str = "without a VolumeAttachment; it was left alone";
    Message::new(
        format!("volume {} is attached to node {} {WHAT}: {reason}: {why}", found.volume, found.node),
        format!(
            "the disk is attached to a VM {WHAT}: {reason}; the log of mgmt-csi has the details for the platform team"
        ),
    )
}

/// The PersistentVolumes of a dangling attachment that have a claim, read from the API server.
async fn read_volumes(shared: &Shared, found: &Attachment) -> Result<Vec<ClaimedVolume>, CheckError> {
    let observed = shared.volumes.of_volume(&found.volume).into_iter();
    let reads = observed.map(|observed| read_volume(&shared.clients.cluster, found, observed));
    Ok(try_join_all(reads).await?.into_iter().flatten().collect())
}

async fn read_volume(
    client: &Client,
    found: &Attachment,
    observed: Arc<PersistentVolume>,
) -> Result<Option<ClaimedVolume>, CheckError> {
    let name = observed.metadata.name.as_deref().unwrap_or_default();
    let read = Api::<PersistentVolume>::all(client.clone()).get_opt(name).await;
    let volume =
        read.map_err(|error| CheckError::Cluster(format!("PersistentVolume {name}: {}", chain(&error))))?;
    let is_of = |volume: &PersistentVolume| cluster::handle(&volume.spec) == Some(found.volume.as_str());
    Ok(volume.filter(is_of).and_then(|volume| {
        let created = volume.metadata.creation_timestamp.as_ref().map(|time| time.0);
        Some(ClaimedVolume { claim: cluster::claim_of(&volume.spec)?, created })
    }))
}

/// The claim that a dangling attachment concerns: the one in its namespace. An attachment that mgmt-csi did not create has no
/// namespace; then the first.
fn claim_of<'a>(found: &Attachment, volumes: &'a [ClaimedVolume]) -> Option<&'a Key> {
    let namespace = namespace_of(&found.id);
    let mut claims = volumes.iter().map(|volume| &volume.claim);
    claims.find(|claim| namespace.is_none_or(|namespace| claim.namespace == namespace))
}

/// The VolumeAttachments of a namespace, read from the API server; none for an empty namespace.
async fn read_attachments(client: &Client, namespace: &str) -> Result<Vec<VolumeAttachment>, CheckError> {
    if namespace.is_empty() {
        return Ok(Vec::new());
    }
    let api: Api<VolumeAttachment> = Api::namespaced(client.clone(), namespace);
    let list = api.list(&ListParams::default()).await;
    let list = list.map_err(|error| {
        CheckError::Cluster(format!("VolumeAttachments of {namespace}: {}", chain(&error)))
    })?;
    Ok(list.items)
}

/// The VirtualMachines of a namespace, read from the API server; None if the cluster does not serve them.
async fn read_vms(client: &Client, namespace: &str) -> Result<Option<Vec<VirtualMachine>>, CheckError> {
    if namespace.is_empty() {
        return Ok(None);
    }
    list_vms(client, Some(namespace)).await.map_err(CheckError::Cluster)
}

/// The VirtualMachines of a namespace, or all; None if the cluster does not serve them.
pub(super) async fn list_vms(
    client: &Client,
    namespace: Option<&str>,
) -> Result<Option<Vec<VirtualMachine>>, String> {
    let fail = |error: kube::Error| format!("VirtualMachines: {}", chain(&error));
    let groups = client.list_api_groups().await.map_err(fail)?;
    let group = groups.groups.into_iter().find(|group| group.name == crds::VIRTUAL_MACHINE_GROUP);
    let served: Vec<String> =
        group.into_iter().flat_map(|group| group.versions).map(|version| version.version).collect();
    let Some(version) = newest_virtual_machine_version(&served) else { return Ok(None) };
    let resource = virtual_machine_resource(version);
    let api: Api<VirtualMachine> = match namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
        None => Api::all_with(client.clone(), &resource),
    };
    Ok(Some(api.list(&ListParams::default()).await.map_err(fail)?.items))
}
