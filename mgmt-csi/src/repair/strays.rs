//! Full comparison with the storage infra, and the handling of dangling attachments.

use std::collections::HashMap;
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use crds::{VirtualMachine, VolumeAttachment, newest_virtual_machine_version, virtual_machine_resource};
use futures::StreamExt;
use infra_api::{Attachment, AttachmentId};
use k8s_openapi::jiff::Timestamp;
use kube::api::ListParams;
use kube::{Api, Client};
use kube_kit::client::chain;
use kube_kit::duration;
use kube_kit::informer::Key;
use kube_kit::lean::PersistentVolume;
use kube_kit::queue::Next;
use tokio::time::Instant;

use super::judge::{Facts, Verdict, id_of, judge};
use super::metrics::STRAY_ATTACHMENT;
use super::{ANSWER, Failed, Known, Repair, counts_on};
use crate::attach::order::is_carried_out;
use crate::cluster;

/// Timeout of a detach call. The detach continues in the storage infra.
const UNPLUG: Duration = Duration::from_secs(30);

/// Maximum number of dangling attachments that are handled at the same time.
const STRAYS_AT_ONCE: usize = 8;

/// Delay of the next full comparison after a detach.
const SETTLE: Duration = Duration::from_secs(1);

/// Result of handling a dangling attachment.
enum Done {
    Unplugged,
    Nothing,
}

type Strays = HashMap<AttachmentId, (Instant, Option<String>)>;

impl Repair {
    /// Compares all attachments of the storage infra with all VolumeAttachments.
    pub(super) async fn sweep(&self, known: &Known) -> Result<Next, Failed> {
        // Listed before the attachments: a VolumeAttachment that is attached now has its attachment in the later list.
        let orders = known.orders.informer().list();
        let attachments = known.infra.list_attachments(None, Instant::now() + ANSWER).await?;
        let there: HashMap<&AttachmentId, &Attachment> =
            attachments.iter().map(|attachment| (&attachment.id, attachment)).collect();
        for order in &orders {
            // Usually it is being reconciled already; this covers a lost event.
            if !is_carried_out(order) {
                known.carry_out.push(Key::of(&**order));
            }
            if !counts_on(order) {
                continue;
            }
            let id = id_of(order);
            match there.get(&id) {
                None => drop(self.look_at_attachment(known, &id).await?),
                Some(attachment) => known.compare(order, attachment),
            }
        }

        let strays: Vec<&Attachment> =
            attachments.iter().filter(|attachment| known.order(&attachment.id).is_none()).collect();
        self.metrics.strays(strays.len());
        let due = self.due(&strays);
        let mut next = self.options.repair_interval;
        let mut over = Vec::new();
        for (stray, left) in strays.into_iter().zip(due) {
            if left.is_zero() {
                over.push(stray);
            } else {
                next = next.min(left);
            }
        }
        // One that cannot be checked or detached does not block the others.
        let looks = over.into_iter().map(|stray| self.look_at_stray(known, stray));
        let mut looks = futures::stream::iter(looks).buffer_unordered(STRAYS_AT_ONCE);
        let mut failed = None;
        while let Some(look) = looks.next().await {
            match look {
                Ok(Done::Unplugged) => next = next.min(SETTLE),
                Ok(Done::Nothing) => {}
                Err(error) => failed = Some(error),
            }
        }
        failed.map_or(Ok(Next::After(next)), Err)
    }

    /// Remaining grace period of each dangling attachment.
    fn due(&self, strays: &[&Attachment]) -> Vec<Duration> {
        let mut seen = self.seen();
        seen.retain(|id, _| strays.iter().any(|stray| stray.id == *id));
        let left = |stray: &&Attachment| {
            let (since, _) = seen.entry(stray.id.clone()).or_insert_with(|| (Instant::now(), None));
            self.options.repair_grace.saturating_sub(since.elapsed())
        };
        strays.iter().map(left).collect()
    }

    async fn look_at_stray(&self, known: &Known, stray: &Attachment) -> Result<Done, Failed> {
        let (claim, made) = claim_now(known, stray).await?.unzip();
        let namespace = claim.as_ref().map_or("", |claim| claim.namespace.as_str());
        let orders = orders_now(&known.client, namespace).await?;
        let machines = machines_now(&known.client, namespace).await?;
        let verdict = judge(&Facts {
            attachment: stray,
            claim: claim.as_ref(),
            volume_made: made.flatten(),
            clock_skew: self.options.clocks.max_clock_skew,
            orders: &orders,
            machines: machines.as_deref(),
        });
        let (done, reason, note) = match verdict {
            Verdict::Ordered => return Ok(Done::Nothing),
            Verdict::Detach => {
                known.infra.detach(&stray.id, false, UNPLUG).await?;
                self.metrics.repaired(STRAY_ATTACHMENT);
                let note = format!(
                    "detached volume {} from node {}: no VolumeAttachment and no VirtualMachine had requested it for {}",
                    stray.volume,
                    stray.node,
                    duration::show(self.options.repair_grace)
                );
                (Done::Unplugged, "DanglingAttachmentRemoved", note)
            }
            Verdict::Leave(reason, why) => {
                let note = format!(
                    "volume {} is attached to node {} without a VolumeAttachment; it was left alone: {reason}: {why}",
                    stray.volume, stray.node
                );
                (Done::Nothing, "DanglingAttachment", note)
            }
        };
        if self.is_news(&stray.id, &note) {
            tracing::warn!(attachment = %stray.id, "{note}");
            if let Some(claim) = &claim {
                known.tell(claim, reason, note);
            }
        }
        Ok(done)
    }

    fn is_news(&self, id: &AttachmentId, note: &str) -> bool {
        let mut seen = self.seen();
        let (_, told) = seen.entry(id.clone()).or_insert_with(|| (Instant::now(), None));
        told.replace(note.to_owned()).as_deref() != Some(note)
    }

    fn seen(&self) -> MutexGuard<'_, Strays> {
        self.strays.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The claim and the creation time of the PersistentVolume of a dangling attachment, read from the API server.
async fn claim_now(known: &Known, stray: &Attachment) -> Result<Option<(Key, Option<Timestamp>)>, Failed> {
    let handle = Some(stray.volume.as_str());
    let Some(seen) = known.volumes.of_handle(stray.volume.as_str()).into_iter().next() else {
        return Ok(None);
    };
    let name = seen.metadata.name.as_deref().unwrap_or_default();
    let read = Api::<PersistentVolume>::all(known.client.clone()).get_opt(name).await;
    let volume =
        read.map_err(|error| Failed::Cluster(format!("PersistentVolume {name}: {}", chain(&error))))?;
    let volume = volume.filter(|volume| cluster::handle(&volume.spec) == handle);
    let made = |volume: &PersistentVolume| volume.metadata.creation_timestamp.as_ref().map(|time| time.0);
    Ok(volume.and_then(|volume| Some((cluster::claim_of(&volume.spec)?, made(&volume)))))
}

/// The VolumeAttachments of a namespace, read from the API server; none for an empty namespace.
async fn orders_now(client: &Client, namespace: &str) -> Result<Vec<VolumeAttachment>, Failed> {
    if namespace.is_empty() {
        return Ok(Vec::new());
    }
    let api: Api<VolumeAttachment> = Api::namespaced(client.clone(), namespace);
    let list = api.list(&ListParams::default()).await;
    let list = list
        .map_err(|error| Failed::Cluster(format!("VolumeAttachments of {namespace}: {}", chain(&error))))?;
    Ok(list.items)
}

/// The VirtualMachines of a namespace, read from the API server; None if the cluster does not serve them.
async fn machines_now(client: &Client, namespace: &str) -> Result<Option<Vec<VirtualMachine>>, Failed> {
    if namespace.is_empty() {
        return Ok(None);
    }
    machines(client, Some(namespace)).await.map_err(Failed::Cluster)
}

/// The VirtualMachines of a namespace, or all; None if the cluster does not serve them.
pub(super) async fn machines(
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
