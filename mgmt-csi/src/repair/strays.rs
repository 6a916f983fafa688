//! The comparison of everything, and what is done about disks that nothing orders.

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
use kube_kit::informer::Key;
use kube_kit::lean::PersistentVolume;
use kube_kit::queue::Next;
use process_kit::duration;
use tokio::time::Instant;

use super::judge::{Facts, Verdict, id_of, judge};
use super::metrics::STRAY_ATTACHMENT;
use super::{ANSWER, Failed, Known, Repair, counts_on};
use crate::attach::order::is_carried_out;
use crate::cluster;

/// How long the infra may take to unplug a disk; it goes on by itself.
const UNPLUG: Duration = Duration::from_secs(30);

/// How many strays are looked at at once.
const STRAYS_AT_ONCE: usize = 8;

/// How soon all is counted again after a disk was unplugged.
const SETTLE: Duration = Duration::from_secs(1);

/// What became of a stray.
enum Done {
    Unplugged,
    Nothing,
}

type Strays = HashMap<AttachmentId, (Instant, Option<String>)>;

impl Repair {
    /// Compares all attachments of the infra with all orders.
    pub(super) async fn sweep(&self, known: &Known) -> Result<Next, Failed> {
        // Before the attachments are read: an order that says so by now has its attachment by then.
        let orders = known.orders.informer().list();
        let attachments = known.infra.list_attachments(None, Instant::now() + ANSWER).await?;
        let there: HashMap<&AttachmentId, &Attachment> =
            attachments.iter().map(|attachment| (&attachment.id, attachment)).collect();
        for order in &orders {
            // Mostly they are being carried out; one whose change was not told would wait for ever.
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
        // One that can't be looked at, or does not leave, doesn't keep the others from it.
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

    /// How long each stray is still given.
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
                    "volume {} was plugged into machine {} though no VolumeAttachment and no VirtualMachine had asked \
                     for it for {}: it was unplugged",
                    stray.volume,
                    stray.node,
                    duration::show(self.options.repair_grace)
                );
                (Done::Unplugged, "StrayAttachmentRemoved", note)
            }
            Verdict::Leave(reason, why) => {
                let note = format!(
                    "volume {} is plugged into machine {} and no VolumeAttachment is there for it; it was left alone: \
                     {reason}: {why}",
                    stray.volume, stray.node
                );
                (Done::Nothing, "StrayAttachment", note)
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

/// The claim of a stray's volume, as its PersistentVolume says now, and when that was made.
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

/// The orders of a namespace; none where there is no namespace.
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

/// The machines of a namespace; None where the cluster has no such objects.
async fn machines_now(client: &Client, namespace: &str) -> Result<Option<Vec<VirtualMachine>>, Failed> {
    if namespace.is_empty() {
        return Ok(None);
    }
    machines(client, Some(namespace)).await.map_err(Failed::Cluster)
}

/// The machines of a namespace, or all; None where the cluster has no such objects.
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
