//! Claim controller: shows guests on their claims what they cannot read otherwise, the reclaim policy `Retain` of the volume
//! as an annotation and an unhealthy volume as a condition. A healthy volume with policy `Delete` needs no write.

mod bound;
mod conditions;
mod decide;
mod reconcile;

use std::sync::Arc;

use infra_api::VolumeId;
use kube::Client;
use kube_kit::events::Events;
use kube_kit::informer::{Change, Key};
use kube_kit::latest::Latest;
use kube_kit::lean::{PersistentVolume, PersistentVolumeClaim};
use kube_kit::queue::{Queue, Retry};
use prometheus_client::registry::Registry;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::cluster::{self, Cluster};
use crate::infra::{News, StorageInfra};
use bound::Bound;
use conditions::{Condition, Conditions, Look};
use decide::told_of;
use reconcile::Reconciler;

/// Maximum number of concurrent API requests.
const PARALLEL: usize = 8;

/// Maximum number of concurrent reads of volume conditions before a write.
const ASKING: usize = 32;

/// The controller, not started yet.
pub struct Keeper {
    conditions: Conditions,
    bound: Bound,
    queue: Queue<Key>,
    looks: Queue<Look>,
}

impl std::fmt::Debug for Keeper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keeper").finish_non_exhaustive()
    }
}

impl Keeper {
    /// Registers the metric.
    pub fn new(registry: &mut Registry, cluster: &Cluster) -> Self {
        Self {
            conditions: Conditions::register(registry),
            bound: Bound { claims: Arc::new(Latest::new(cluster.claims())), volumes: cluster.volumes() },
            queue: Queue::default(),
            looks: Queue::default(),
        }
    }

    /// Reconciles a claim whenever its binding, annotation or condition changes.
    pub fn watch(&self, cluster: Cluster) -> Cluster {
        let (bound, queue, look) = (self.bound.clone(), self.queue.clone(), self.look_at_restored());
        let cluster = cluster.on_claim(move |change: &Change<'_, PersistentVolumeClaim>| {
            bound.claims.seen(change);
            let Some(new) = change.new else { return };
            if change.old.is_none()
                && let Some(volume) = cluster::volume_name(new)
                && let Some(volume) = bound.volumes.get(volume)
            {
                look(&volume);
            }
            let read = |claim: &PersistentVolumeClaim| {
                (claim.metadata.uid.clone(), cluster::volume_name(claim).map(str::to_owned), told_of(claim))
            };
            if change.old.is_none_or(|old| read(old) != read(new)) {
                queue.push(change.key.clone());
            }
        });
        let (conditions, queue, look) =
            (self.conditions.clone(), self.queue.clone(), self.look_at_restored());
        cluster.on_volume(move |change: &Change<'_, PersistentVolume>| {
            if let (Some(old), None) = (change.old, change.new)
                && let Some(handle) = cluster::handle(&old.spec)
            {
                conditions.forget(handle);
            }
            if let Some(new) = change.new
                && change.old.is_none_or(|old| old.spec != new.spec)
                && let Some(claim) = cluster::claim_of(&new.spec)
            {
                if change.old.is_none() {
                    look(new);
                }
                queue.push(claim);
            }
        })
    }

    /// Returns a handler that reads the condition of a volume that was already bound when first observed, as after a restore
    /// of the cluster: the storage infra may have lost it long ago and emits no event for it now.
    fn look_at_restored(&self) -> impl Fn(&PersistentVolume) + Send + Sync + use<> {
        let (bound, conditions, looks) = (self.bound.clone(), self.conditions.clone(), self.looks.clone());
        move |volume| {
            // Before the first list, which covers it.
            let known = |handle: &&str| conditions.of(handle) != Condition::Unknown;
            let id = cluster::handle(&volume.spec).filter(known).map(VolumeId::new);
            if let Some(Ok(id)) = id
                && bound.claim_of(volume).is_some()
            {
                looks.push(Look::One(id));
            }
        }
    }

    /// Handler for storage infra events.
    pub fn news(&self) -> impl Fn(News<'_>) + Send + Sync + use<> {
        conditions::news(self.looks.clone(), self.conditions.clone(), self.bound.clone())
    }

    /// Reads volume conditions until `stop`. Every replica runs this; it writes nothing. It starts before the first event of
    /// the storage infra.
    pub async fn read(&self, infra: Arc<dyn StorageInfra>, stop: CancellationToken) {
        let looker = self.looks.worker();
        if !self.synced(&stop).await {
            return;
        }
        // One at a time, so that an older read never overwrites a newer one.
        let look = |look| {
            let (conditions, infra, bound, queue) = (&self.conditions, &infra, &self.bound, &self.queue);
            async move { conditions.look(&**infra, look, bound, queue).await }
        };
        looker.run(1, Retry::default(), stop, look).await;
    }

    /// Reconciles claims until `stop`. Only the leader runs this.
    pub async fn keep(&self, client: Client, infra: Arc<dyn StorageInfra>, stop: CancellationToken) {
        if !self.synced(&stop).await {
            return;
        }
        let reconciler = Reconciler {
            events: Events::new(client.clone(), "mgmt-csi"),
            client,
            infra,
            bound: self.bound.clone(),
            conditions: self.conditions.clone(),
            looks: self.looks.clone(),
            requests: Semaphore::new(PARALLEL),
            asking: Semaphore::new(ASKING),
        };
        let worker = self.queue.worker();
        for claim in self.bound.claims.informer().list() {
            self.queue.push(Key::of(&*claim));
        }
        // No limit on workers: those that wait for the storage infra must not block the others.
        let keep = worker.run(usize::MAX, Retry::default(), stop, |key| {
            let reconciler = &reconciler;
            async move { reconciler.reconcile(&key).await }
        });
        keep.await;
    }

    /// Waits until the caches are synced, since unsynced ones would show claims without volumes. False if `stop` came first.
    async fn synced(&self, stop: &CancellationToken) -> bool {
        let (claims, volumes) = (self.bound.claims.informer(), self.bound.volumes.informer());
        tokio::select! {
            () = stop.cancelled() => false,
            _ = async { tokio::join!(claims.synced(), volumes.synced()) } => true,
        }
    }
}
