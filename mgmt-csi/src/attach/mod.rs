//! Attach controller: reconciles `VolumeAttachment`s by attaching and detaching disks through the storage infra, and writes
//! their status.

pub mod decide;
pub mod failure;
pub mod fence;
mod memory;
mod metrics;
pub(crate) mod order;
mod reconcile;
mod status;
pub(crate) mod target;
mod turns;

use std::sync::Arc;

use crds::{VIRTUAL_MACHINE_GROUP, VolumeAttachment, newest_virtual_machine_version};
use infra_api::{Change as InfraChange, Event, EventKind};
use kube::{Api, Client};
use kube_kit::events::Events;
use kube_kit::fair::{Gate, Limits};
use kube_kit::health::Health;
use kube_kit::index::Index;
use kube_kit::informer::{Change, Informer, Key};
use kube_kit::latest::Latest;
use kube_kit::lean::{PersistentVolume, PersistentVolumeClaim};
use kube_kit::queue::{Queue, Retry};
use kube_kit::versions;
use prometheus_client::registry::Registry;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::cluster::{self, Cluster, Volumes};
use crate::infra::{News, StorageInfra};
use crate::repair::{self, Known, Repair};
use fence::{Fence, Lost, machine_of};
use memory::Memories;
use metrics::Metrics;
use order::{is_attached, is_carried_out};
use reconcile::Reconciler;
use turns::Turns;

/// The controller, not started yet.
#[derive(Debug)]
pub struct Attach {
    repair: Repair,
    metrics: Metrics,
    parallel: usize,
    fence: Fence,
    memories: Arc<Memories>,
    queue: Queue<Key>,
    by_claim: Arc<Index>,
}

/// The controller, with its watches started.
pub struct Orders {
    repair: Repair,
    reconciler: Arc<Reconciler>,
    by_claim: Arc<Index>,
    queue: Queue<Key>,
}

impl std::fmt::Debug for Orders {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Orders").finish_non_exhaustive()
    }
}

impl Attach {
    /// Registers the metrics. `parallel` is the maximum number of concurrent API requests for VolumeAttachments.
    pub fn new(registry: &mut Registry, parallel: usize, fence: Fence, repair: repair::Options) -> Self {
        Self {
            repair: Repair::new(registry, repair),
            metrics: Metrics::register(registry),
            parallel,
            fence,
            memories: Arc::default(),
            queue: Queue::default(),
            by_claim: Arc::default(),
        }
    }

    /// Handler for storage infra events: retries failed detaches as soon as the storage infra deletes the attachment.
    pub fn news(&self) -> impl Fn(News<'_>) + Send + Sync + use<> {
        let (memories, queue, repair) = (self.memories.clone(), self.queue.clone(), self.repair.news());
        move |news| {
            repair(news);
            if let News::One(Event {
                kind: EventKind::Attachment, change: InfraChange::Deleted, id, ..
            }) = news
            {
                memories.stuck(id).into_iter().for_each(|stuck| queue.push(stuck));
            }
        }
    }

    /// Reconciles a VolumeAttachment whenever its claim or its claim's volume changes.
    pub fn watch(&self, cluster: Cluster) -> Cluster {
        let told = tell_orders_of_claim(&self.by_claim, &self.queue);
        let cluster = cluster.on_claim(move |change: &Change<'_, PersistentVolumeClaim>| {
            let bound = |claim: &Arc<PersistentVolumeClaim>| {
                (claim.metadata.uid.clone(), claim.spec.clone(), claim.status.phase.clone())
            };
            if change.old.map(bound) != change.new.map(bound) {
                told(change.key);
            }
        });
        let told = tell_orders_of_claim(&self.by_claim, &self.queue);
        cluster.on_volume(move |change: &Change<'_, PersistentVolume>| {
            if change.old.map(|volume| &volume.spec) == change.new.map(|volume| &volume.spec) {
                return;
            }
            for claim in
                [change.old, change.new].into_iter().flatten().filter_map(|v| cluster::claim_of(&v.spec))
            {
                told(&claim);
            }
        })
    }

    /// Starts the watches, which run until `stop`, and adds a check for each to `ready`. None if `stop` came first.
    pub async fn start(
        self,
        client: Client,
        (claims, volumes): (Informer<PersistentVolumeClaim>, Volumes),
        infra: Arc<dyn StorageInfra>,
        ready: &Health,
        stop: CancellationToken,
    ) -> Option<Orders> {
        let Self { repair, metrics, parallel, fence, memories, queue, by_claim } = self;

        let builder = Informer::builder("VolumeAttachments", Api::all(client.clone()));
        let orders = Arc::new(Latest::new(builder.informer()));
        let handler = {
            let (orders, memories) = (orders.clone(), memories.clone());
            let (by_claim, queue) = (by_claim.clone(), queue.clone());
            move |change: &Change<'_, VolumeAttachment>| {
                by_claim.put(change.key, change.new.map(|order| target::claim_key(order)));
                orders.seen(change);
                if memories.is_news(change) {
                    queue.push(change.key.clone());
                }
                // Another VM may be waiting for the disk that was detached.
                if let (Some(gone), None) = (change.old, change.new) {
                    for waiting in by_claim.members(&target::claim_key(gone)) {
                        if orders.get(&waiting).is_some_and(|order| !is_attached(&order)) {
                            queue.push(waiting);
                        }
                    }
                }
            }
        };
        let check = ready.check("watch of VolumeAttachments", "not started yet");
        let back = queue.clone();
        builder
            .trim(order::trim)
            .on_change(handler)
            .on_return(move || back.hurry())
            .start(check, stop.clone());

        let lost = match fence {
            Fence::Never => Lost::none(),
            Fence::PowerOff => {
                let asked = ready.check("version of VirtualMachine", "not checked yet");
                let newest = newest_virtual_machine_version;
                let version = versions::served(&client, VIRTUAL_MACHINE_GROUP, newest, &asked, &stop);
                let version = version.await?;
                let check = ready.check("watch of VirtualMachines", "not started yet");
                Lost::watch(&client, version, check, &stop, tell_orders_of_machine(&orders, &queue))
            }
        };

        let reconciler = Arc::new(Reconciler {
            events: Events::new(client.clone(), "mgmt-csi"),
            client,
            infra,
            orders,
            claims,
            volumes,
            memories,
            turns: Turns::default(),
            requests: Gate::new(requests(parallel)),
            lost,
            metrics,
            stop,
        });
        Some(Orders { repair, reconciler, by_claim, queue })
    }
}

impl Orders {
    /// Reconciles VolumeAttachments until the process is stopped. Those in backoff are retried as soon as `infra_back` is
    /// notified. `alongside` runs once the caches are synced, and is dropped when the last reconcile ends.
    pub async fn run(&self, infra_back: &Notify) {
        let Reconciler { orders, claims, volumes, stop, .. } = &*self.reconciler;
        // Unsynced caches would report existing claims as missing.
        tokio::select! {
            () = stop.cancelled() => return,
            _ = async { tokio::join!(orders.informer().synced(), claims.synced(), volumes.informer().synced()) } => {}
        }
        let worker = self.queue.worker();
        let all = orders.informer().list();
        tracing::info!(attachments = all.len(), "reconciling VolumeAttachments");
        // Reconciled ones are compared with the storage infra's list, in one call.
        for order in all.iter().filter(|order| !is_carried_out(order)) {
            self.queue.push(Key::of(&**order));
        }
        let look_again = push_unfinished(orders, &self.queue, infra_back);
        // No limit on workers: the limiter per VM bounds the calls to the storage infra, so that a VM that hangs does not
        // block others.
        let lane = |key: &Key| orders.get(key).map_or_else(|| key.clone(), |order| order::lane(&order));
        let work = worker.run_fair(usize::MAX, Retry::default(), stop.clone(), lane, |key| {
            let reconciler = self.reconciler.clone();
            async move { reconciler.reconcile(&key).await }
        });
        let known = Known {
            client: self.reconciler.client.clone(),
            infra: self.reconciler.infra.clone(),
            orders: orders.clone(),
            by_claim: self.by_claim.clone(),
            claims: claims.clone(),
            volumes: volumes.clone(),
            events: self.reconciler.events.clone(),
            carry_out: self.queue.clone(),
        };
        // On `stop`, the reconciles in progress are awaited and the rest is dropped.
        tokio::select! {
            () = work => {}
            _ = async { tokio::join!(look_again, self.repair.run(&known, stop.clone())) } => {}
        }
    }
}

/// Limits of concurrent API requests: in total, per namespace and per VM.
fn requests(parallel: usize) -> Limits {
    Limits { total: parallel, namespace: parallel.div_ceil(2), object: parallel.div_ceil(16) }
}

/// Requeues every unreconciled VolumeAttachment each time the storage infra is reachable again.
async fn push_unfinished(orders: &Latest<VolumeAttachment>, queue: &Queue<Key>, infra_back: &Notify) {
    loop {
        infra_back.notified().await;
        for order in orders.informer().list() {
            if order.metadata.deletion_timestamp.is_some() || !is_attached(&order) {
                queue.push(Key::of(&*order));
            }
        }
    }
}

/// Returns a handler that requeues the terminating VolumeAttachments of a VM.
fn tell_orders_of_machine(
    orders: &Arc<Latest<VolumeAttachment>>,
    queue: &Queue<Key>,
) -> impl Fn(&Key) + Send + Sync + use<> {
    let (orders, queue) = (orders.clone(), queue.clone());
    move |machine| {
        for order in orders.informer().list() {
            if order.metadata.deletion_timestamp.is_some()
                && order.metadata.namespace.as_ref() == Some(&machine.namespace)
                && machine_of(&order).is_some_and(|owner| owner.name == machine.name)
            {
                queue.push(Key::of(&*order));
            }
        }
    }
}

fn tell_orders_of_claim(by_claim: &Arc<Index>, queue: &Queue<Key>) -> impl Fn(&Key) + Send + Sync + use<> {
    let (by_claim, queue) = (by_claim.clone(), queue.clone());
    move |claim| {
        for order in by_claim.members(claim) {
            queue.push(order);
        }
    }
}
