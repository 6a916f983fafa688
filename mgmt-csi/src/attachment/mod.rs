//! Attach controller: reconciles `VolumeAttachment`s by attaching and detaching disks through the storage infra, and writes
//! their status.

pub mod decide;
pub mod fence;
mod holders;
mod limiter;
mod metrics;
mod reconcile;
mod status;
mod traces;
mod tracker;

use std::collections::BTreeSet;
use std::sync::Arc;

use crds::{VirtualMachine, VolumeAttachment};
use infra_api::{Change as InfraChange, Event, EventKind};
use kube::Api;
use kube::core::ApiResource;
use kube_kit::fair::{FairLimiter, Limits};
use kube_kit::health::Health;
use kube_kit::index::Index;
use kube_kit::informer::{Change, Informer, Key};
use kube_kit::mutation_cache::MutationCache;
use kube_kit::partial::{PersistentVolume, PersistentVolumeClaim};
use kube_kit::queue::{Queue, Retry};
use prometheus_client::registry::Registry;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::clients::Clients;
use crate::cluster::{self, Cluster, Volumes};
use crate::infra::InfraEvent;
use crate::nodes;
use crate::ownership;
use crate::ownership::vm_guests::VmGuests;
use crate::virtual_machines::{self, is_owner};
use crate::volume_attachment::resolve::claim_key;
use crate::volume_attachment::{
    self, Attachments, Shared, holds_terminating_claim, is_attached, is_reconciled,
};
use fence::{Fence, OutOfService, is_out_of_service};
use limiter::VmLimiter;
use metrics::Metrics;
use reconcile::Reconciler;
use tracker::Tracker;

/// The controller, not started yet.
#[derive(Debug)]
pub struct AttachController {
    metrics: Metrics,
    concurrent_requests: usize,
    fence: Fence,
    tracker: Arc<Tracker>,
    queue: Queue<Key>,
    by_claim: Arc<Index>,
    ownership: ownership::OwnershipArgs,
    /// Requests a comparison of the record of VMs' guests.
    guest_records: Queue<Key>,
}

/// The controller, with its watches started.
pub struct RunningAttachController {
    reconciler: Arc<Reconciler>,
    by_claim: Arc<Index>,
    queue: Queue<Key>,
    guest_records: Queue<Key>,
    vm_resource: ApiResource,
}

impl std::fmt::Debug for RunningAttachController {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RunningAttachController").finish_non_exhaustive()
    }
}

impl AttachController {
    /// Registers the metrics. `concurrent_requests` is the maximum number of concurrent API requests for VolumeAttachments.
    pub fn new(
        registry: &mut Registry,
        concurrent_requests: usize,
        fence: Fence,
        ownership: ownership::OwnershipArgs,
    ) -> Self {
        Self {
            metrics: Metrics::register(registry),
            concurrent_requests,
            fence,
            tracker: Arc::default(),
            queue: Queue::default(),
            by_claim: Arc::default(),
            ownership,
            guest_records: Queue::default(),
        }
    }

    /// Handler for storage infra events: retries failed detaches as soon as the storage infra deletes the attachment.
    pub fn on_infra_event(&self) -> impl Fn(InfraEvent<'_>) + Send + Sync + use<> {
        let (tracker, queue) = (self.tracker.clone(), self.queue.clone());
        move |event| {
            if let InfraEvent::Object(Event {
                kind: EventKind::Attachment,
                change: InfraChange::Deleted,
                id,
                ..
            }) = event
            {
                tracker.failed_detaches(id).into_iter().for_each(|key| queue.push(key));
            }
        }
    }

    /// Reconciles a VolumeAttachment whenever its claim or its claim's volume changes.
    pub fn watch(&self, cluster: Cluster) -> Cluster {
        let requeue = requeue_by_claim(&self.by_claim, &self.queue);
        let cluster = cluster.on_claim(move |change: &Change<'_, PersistentVolumeClaim>| {
            let bound = |claim: &Arc<PersistentVolumeClaim>| {
                let metadata = (claim.metadata.uid.clone(), claim.metadata.labels.clone());
                (metadata, claim.spec.clone(), claim.status.phase.clone())
            };
            if change.old.map(bound) != change.new.map(bound) {
                requeue(change.key);
            }
        });
        let requeue = requeue_by_claim(&self.by_claim, &self.queue);
        cluster.on_volume(move |change: &Change<'_, PersistentVolume>| {
            if change.old.map(ownership_and_binding) == change.new.map(ownership_and_binding) {
                return;
            }
            for claim in
                [change.old, change.new].into_iter().flatten().filter_map(|v| cluster::claim_of(&v.spec))
            {
                requeue(&claim);
            }
        })
    }

    /// Starts the watches, which run until `stop`, and adds a check for each to `ready`. Calls `on_release` with a claim
    /// when a VolumeAttachment no longer holds it, and `on_vm` with each change of a VM. None if `stop` came first.
    pub(crate) async fn start(
        self,
        clients: Clients,
        (claims, volumes): (Informer<PersistentVolumeClaim>, Volumes),
        (on_release, on_vm): (
            impl Fn(&Key) + Send + Sync + 'static,
            impl Fn(&Change<'_, VirtualMachine>) + Send + Sync + 'static,
        ),
        ready: &Health,
        stop: CancellationToken,
    ) -> Option<RunningAttachController> {
        let Clients { cluster: client, infra, events } = clients;
        let Self { metrics, concurrent_requests, fence, tracker, queue, by_claim, ownership, guest_records } =
            self;

        let builder = Informer::builder("VolumeAttachments", Api::all(client.clone()));
        let attachments = Arc::new(MutationCache::new(builder.informer()));
        let handler = {
            let (attachments, tracker) = (attachments.clone(), tracker.clone());
            let (by_claim, queue) = (by_claim.clone(), queue.clone());
            let (claims, volumes) = (claims.clone(), volumes.clone());
            move |change: &Change<'_, VolumeAttachment>| {
                by_claim.put(change.key, change.new.map(|attachment| claim_key(attachment)));
                attachments.observe(change);
                if tracker.needs_reconcile(change) {
                    queue.push(change.key.clone());
                }
                if let Some(claim) = released_claim(change) {
                    on_release(&claim);
                }
                // Another VM may be waiting for the disk that was detached.
                if let (Some(gone), None) = (change.old, change.new) {
                    let sharing = sharing(claim_key(gone), &claims, &volumes);
                    for waiting in sharing.flat_map(|claim| by_claim.members(&claim)) {
                        if attachments.get(&waiting).is_some_and(|attachment| !is_attached(&attachment)) {
                            queue.push(waiting);
                        }
                    }
                }
            }
        };
        let check = ready.check("volume-attachments", "not started yet");
        let queue_on_reconnect = queue.clone();
        builder
            .trim(volume_attachment::trim)
            .on_change(handler)
            .on_reconnect(move || queue_on_reconnect.retry_now())
            .start(check, stop.clone());

        let (builder, vm_resource) = virtual_machines::builder(&client, ready, &stop).await?;
        let (vms, watched) = (builder.informer(), watch_vms(&attachments, &queue, &guest_records));
        let check = ready.check("virtual-machines", "not started yet");
        builder.on_change(watched).on_change(on_vm).start(check, stop.clone());
        let out_of_service = match fence {
            Fence::Never => OutOfService::disabled(),
            Fence::PowerOff => OutOfService::of(vms.clone()),
        };
        let guests = VmGuests::by_label(vms, ownership.unlabelled_vms);
        let guests = match &ownership.vm_record_namespace {
            Some(namespace) => {
                let changed = requeue_by_vm_uids(&attachments, &queue);
                guests.recorded(&client, namespace, &guest_records, (ready, &stop), changed)
            }
            None => guests,
        };

        let reconciler = Arc::new(Reconciler {
            events,
            client,
            infra,
            attachments,
            claims,
            volumes,
            tracker,
            limiter: VmLimiter::default(),
            requests: FairLimiter::new(requests(concurrent_requests)),
            out_of_service,
            guests,
            metrics,
            stop,
        });
        Some(RunningAttachController { reconciler, by_claim, queue, guest_records, vm_resource })
    }
}

impl RunningAttachController {
    /// The state that the repair loop shares with this controller.
    pub(crate) fn shared(&self) -> Shared {
        let reconciler = &*self.reconciler;
        let (cluster, infra) = (reconciler.client.clone(), reconciler.infra.clone());
        Shared {
            clients: Clients { cluster, infra, events: reconciler.events.clone() },
            attachments: self.attachments(),
            claims: reconciler.claims.clone(),
            volumes: reconciler.volumes.clone(),
            guests: reconciler.guests.clone(),
        }
    }

    /// The VolumeAttachments, which hold their claims.
    pub(crate) fn attachments(&self) -> Attachments {
        Attachments {
            objects: self.reconciler.attachments.clone(),
            by_claim: self.by_claim.clone(),
            queue: self.queue.clone(),
        }
    }

    /// What the registration of nodes shares with this controller.
    pub(crate) fn nodes(&self) -> nodes::Context {
        let (vms, resource) = (self.reconciler.guests.vms().clone(), self.vm_resource.clone());
        nodes::Context { vms, resource, shared: self.shared() }
    }

    /// Records the guests of new VMs until the process is stopped. Only the leader runs this.
    pub async fn record_guests(&self) {
        let Reconciler { guests, events, stop, .. } = &*self.reconciler;
        guests.run(&self.guest_records, events, stop.clone()).await;
    }

    /// Reconciles VolumeAttachments until the process is stopped. Those in backoff are retried as soon as `infra_back` is
    /// notified. `alongside` runs once the caches are synced, and is dropped when the last reconcile ends.
    pub async fn run(&self, infra_back: &Notify, alongside: impl Future<Output = ()>) {
        let Reconciler { attachments, claims, volumes, guests, stop, .. } = &*self.reconciler;
        // Unsynced caches would report existing claims as missing.
        tokio::select! {
            () = stop.cancelled() => return,
            _ = async { tokio::join!(attachments.informer().synced(), claims.synced(), volumes.informer().synced(), guests.synced()) } => {}
        }
        let worker = self.queue.worker("volume-attachments");
        let all = attachments.informer().list();
        tracing::info!(attachments = all.len(), "reconciling VolumeAttachments");
        // Reconciled ones are compared with the storage infra's list, in one call.
        for attachment in all.iter().filter(|attachment| !is_reconciled(attachment)) {
            self.queue.push(Key::of(&**attachment));
        }
        let requeue = requeue_unreconciled(attachments, &self.queue, infra_back);
        // No limit on workers: the limiter per VM bounds the calls to the storage infra, so that a VM that hangs does not
        // block others.
        let vm_key = |key: &Key| {
            attachments
                .get(key)
                .map_or_else(|| key.clone(), |attachment| volume_attachment::vm_key(&attachment))
        };
        let work = worker.run_fair(usize::MAX, Retry::default(), stop.clone(), vm_key, |key| {
            let reconciler = self.reconciler.clone();
            async move { reconciler.reconcile(&key).await }
        });
        // On `stop`, the reconciles in progress are awaited and the rest is dropped.
        tokio::select! {
            () = work => {}
            _ = async { tokio::join!(requeue, alongside) } => {}
        }
    }
}

/// Limits of concurrent API requests: in total, per namespace and per VM.
fn requests(concurrent_requests: usize) -> Limits {
    Limits {
        total: concurrent_requests,
        namespace: concurrent_requests.div_ceil(2),
        object: concurrent_requests.div_ceil(16),
    }
}

/// Requeues every unreconciled VolumeAttachment each time the storage infra is reachable again.
async fn requeue_unreconciled(
    attachments: &MutationCache<VolumeAttachment>,
    queue: &Queue<Key>,
    infra_back: &Notify,
) {
    loop {
        infra_back.notified().await;
        for attachment in attachments.informer().list() {
            if attachment.metadata.deletion_timestamp.is_some() || !is_attached(&attachment) {
                queue.push(Key::of(&*attachment));
            }
        }
    }
}

/// Returns a handler of changes of VMs: requeues the terminating VolumeAttachments of a VM that goes out of service, and those
/// not attached of a VM whose label changes, which may have to be recorded first.
fn watch_vms(
    attachments: &Arc<MutationCache<VolumeAttachment>>,
    queue: &Queue<Key>,
    guest_records: &Queue<Key>,
) -> impl Fn(&Change<'_, VirtualMachine>) + Send + Sync + use<> {
    let (attachments, queue, guest_records) = (attachments.clone(), queue.clone(), guest_records.clone());
    move |change| {
        let label = |vm: Option<&Arc<VirtualMachine>>| {
            vm.and_then(|vm| virtual_machines::label(vm).map(str::to_owned))
        };
        let has_new_label = change.old.is_none() || label(change.old) != label(change.new);
        if has_new_label || change.new.is_none() {
            guest_records.push(Key::cluster(ownership::vm_guests::CONFIG_MAP));
        }
        let Some(vm) = change.new else { return };
        let is_fenced = is_out_of_service(vm) && !change.old.is_some_and(|old| is_out_of_service(old));
        if !has_new_label && !is_fenced {
            return;
        }
        requeue(&attachments, &queue, |attachment| {
            is_owner(vm, attachment)
                && match attachment.metadata.deletion_timestamp.is_some() {
                    true => is_fenced,
                    false => has_new_label && !is_attached(attachment),
                }
        });
    }
}

/// Returns a handler that requeues the VolumeAttachments that are not attached, of the VMs with these UIDs.
fn requeue_by_vm_uids(
    attachments: &Arc<MutationCache<VolumeAttachment>>,
    queue: &Queue<Key>,
) -> impl Fn(&BTreeSet<&str>) + Send + Sync + use<> {
    let (attachments, queue) = (attachments.clone(), queue.clone());
    move |uids| {
        requeue(&attachments, &queue, |attachment| {
            volume_attachment::vm_owner(attachment).is_some_and(|owner| uids.contains(&*owner.uid))
                && !is_attached(attachment)
        });
    }
}

/// The claim that a VolumeAttachment no longer holds after a change.
fn released_claim(change: &Change<'_, VolumeAttachment>) -> Option<Key> {
    let old = change.old.filter(|old| holds_terminating_claim(old))?;
    (!change.new.is_some_and(|new| holds_terminating_claim(new))).then(|| claim_key(old))
}

fn requeue(
    attachments: &MutationCache<VolumeAttachment>,
    queue: &Queue<Key>,
    picks: impl Fn(&VolumeAttachment) -> bool,
) {
    for attachment in attachments.informer().list().iter().filter(|attachment| picks(attachment)) {
        queue.push(Key::of(&**attachment));
    }
}

/// What of a volume decides on its attachments.
fn ownership_and_binding(volume: &Arc<PersistentVolume>) -> impl PartialEq + use<'_> {
    (&volume.metadata.labels, &volume.spec.csi, &volume.spec.claim_ref)
}

/// The claims of the volume of a claim: itself, and those that share the volume.
fn sharing(
    claim: Key,
    claims: &Informer<PersistentVolumeClaim>,
    volumes: &Volumes,
) -> impl Iterator<Item = Key> {
    let volume = claims.get(&claim).and_then(|claim| volumes.get(cluster::volume_name(&claim)?));
    let all = volume.map(|volume| volumes.sharing(&volume.spec)).unwrap_or_default();
    let others = all.into_iter().filter_map(|one| cluster::claim_of(&one.spec));
    std::iter::once(claim).chain(others)
}

/// Returns a handler that requeues the VolumeAttachments of a claim.
fn requeue_by_claim(by_claim: &Arc<Index>, queue: &Queue<Key>) -> impl Fn(&Key) + Send + Sync + use<> {
    let (by_claim, queue) = (by_claim.clone(), queue.clone());
    move |claim| {
        for attachment in by_claim.members(claim) {
            queue.push(attachment);
        }
    }
}
