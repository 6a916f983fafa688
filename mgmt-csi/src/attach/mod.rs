//! Carries out `VolumeAttachment`s: plugs and unplugs disks through the infra and writes what came of it.

pub mod decide;
pub mod failure;
mod metrics;
mod reconcile;
mod status;
mod target;

use std::sync::Arc;

use crds::VolumeAttachment;
use k8s_openapi::api::core::v1::{
    PersistentVolume, PersistentVolumeClaim, PersistentVolumeClaimSpec, PersistentVolumeClaimStatus,
    PersistentVolumeSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Api, Client};
use kube_kit::events::Events;
use kube_kit::health::Health;
use kube_kit::index::Index;
use kube_kit::informer::{Change, Informer, Key};
use kube_kit::latest::Latest;
use kube_kit::queue::{Queue, Retry, queue};
use prometheus_client::registry::Registry;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::infra::StorageInfra;
use metrics::Metrics;
use reconcile::{Memories, Reconciler};

/// The reconciler, registered but not started.
#[derive(Debug)]
pub struct Attach {
    metrics: Metrics,
    parallel: usize,
}

impl Attach {
    /// Registers the metrics. `parallel` orders are worked on at once.
    pub fn new(registry: &mut Registry, parallel: usize) -> Self {
        Self { metrics: Metrics::register(registry), parallel }
    }

    /// Runs until `stop`. `ready` gets a check for each watch. Orders that wait to be tried again are looked
    /// at as soon as `infra_back` is notified.
    pub async fn run(
        self,
        client: Client,
        infra: Arc<dyn StorageInfra>,
        infra_back: &Notify,
        ready: &Health,
        stop: CancellationToken,
    ) {
        let (queue, worker) = queue::<Key>();
        let by_claim = Arc::new(Index::default());
        let memories = Arc::new(Memories::default());
        let check = |what: &str| ready.check(format!("watch of {what}"), "not started yet");

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
                // A disk that left one machine may be what another waits for.
                if let (Some(gone), None) = (change.old, change.new) {
                    for waiting in by_claim.members(&target::claim_key(gone)) {
                        if orders.get(&waiting).is_some_and(|order| !is_attached(&order)) {
                            queue.push(waiting);
                        }
                    }
                }
            }
        };
        builder.on_change(handler).start(check("VolumeAttachments"), stop.clone());

        let told = tell_orders_of_claim(&by_claim, &queue);
        let claims = Informer::builder("PersistentVolumeClaims", Api::all(client.clone()))
            .trim(trim_claim)
            .on_change(move |change: &Change<'_, PersistentVolumeClaim>| {
                let bound = |claim: &Arc<PersistentVolumeClaim>| {
                    (claim.metadata.uid.clone(), claim.spec.clone(), claim.status.clone())
                };
                if change.old.map(bound) != change.new.map(bound) {
                    told(change.key);
                }
            })
            .start(check("PersistentVolumeClaims"), stop.clone());

        let told = tell_orders_of_claim(&by_claim, &queue);
        let volumes = Informer::builder("PersistentVolumes", Api::all(client.clone()))
            .trim(trim_volume)
            .on_change(move |change: &Change<'_, PersistentVolume>| {
                if change.old.map(|volume| &volume.spec) == change.new.map(|volume| &volume.spec) {
                    return;
                }
                for claim in
                    [change.old, change.new].into_iter().flatten().filter_map(|v| target::claim_of(v))
                {
                    told(&claim);
                }
            })
            .start(check("PersistentVolumes"), stop.clone());

        // An order must not be called claimless because the claims were not read yet.
        tokio::select! {
            () = stop.cancelled() => return,
            _ = async { tokio::join!(orders.informer().synced(), claims.synced(), volumes.synced()) } => {}
        }
        tracing::info!(attachments = orders.informer().len(), "carrying out VolumeAttachments");
        let look_again = push_unfinished(orders.clone(), queue, infra_back);
        let reconciler = Arc::new(Reconciler {
            events: Events::new(client.clone(), "mgmt-csi"),
            client,
            infra,
            orders,
            claims,
            volumes,
            memories,
            metrics: self.metrics,
            stop: stop.clone(),
        });
        let work = worker.run(self.parallel, Retry::default(), stop, |key| {
            let reconciler = reconciler.clone();
            async move { reconciler.reconcile(&key).await }
        });
        tokio::select! {
            () = work => {}
            () = look_again => {}
        }
    }
}

/// Asks for a look at every order that is not carried out, each time the infra is back.
async fn push_unfinished(orders: Arc<Latest<VolumeAttachment>>, queue: Queue<Key>, infra_back: &Notify) {
    loop {
        infra_back.notified().await;
        for order in orders.informer().list() {
            if !is_attached(&order) || order.metadata.deletion_timestamp.is_some() {
                queue.push(Key::of(&*order));
            }
        }
    }
}

fn is_attached(order: &VolumeAttachment) -> bool {
    order.status.as_ref().is_some_and(|status| status.attached)
}

fn tell_orders_of_claim(by_claim: &Arc<Index>, queue: &Queue<Key>) -> impl Fn(&Key) + Send + Sync + use<> {
    let (by_claim, queue) = (by_claim.clone(), queue.clone());
    move |claim| {
        for order in by_claim.members(claim) {
            queue.push(order);
        }
    }
}

fn trim_claim(claim: &mut PersistentVolumeClaim) {
    claim.metadata = trim_meta(&mut claim.metadata);
    claim.spec = claim.spec.take().map(|spec| PersistentVolumeClaimSpec {
        volume_name: spec.volume_name,
        access_modes: spec.access_modes,
        ..Default::default()
    });
    claim.status = claim
        .status
        .take()
        .map(|status| PersistentVolumeClaimStatus { phase: status.phase, ..Default::default() });
}

fn trim_volume(volume: &mut PersistentVolume) {
    volume.metadata = trim_meta(&mut volume.metadata);
    volume.spec = volume.spec.take().map(|spec| PersistentVolumeSpec {
        csi: spec.csi.map(|mut csi| {
            csi.volume_attributes = None;
            csi
        }),
        claim_ref: spec.claim_ref.map(|mut claim| {
            claim.resource_version = None;
            claim
        }),
        ..Default::default()
    });
    volume.status = None;
}

fn trim_meta(meta: &mut ObjectMeta) -> ObjectMeta {
    ObjectMeta {
        name: meta.name.take(),
        namespace: meta.namespace.take(),
        uid: meta.uid.take(),
        resource_version: meta.resource_version.take(),
        deletion_timestamp: meta.deletion_timestamp.take(),
        ..Default::default()
    }
}
