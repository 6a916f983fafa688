//! Keeps on every bound claim what the guest can't see otherwise: whether its volume is kept when the claim goes,
//! and whether the volume is well. In the normal life of a volume that is nothing, and costs no write.

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

/// How many requests about claims are made to the API server at once.
const PARALLEL: usize = 8;

/// For how many claims the infra is asked at once whether their volume is as is to be told.
const ASKING: usize = 32;

/// The reconciler, registered but not started.
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

    /// Looks at a claim again whenever it is bound otherwise, or what is kept on it changes.
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

    /// Looks at the volume of a pair that was bound before it was first seen, as after the cluster's state was put back:
    /// the infra, which says nothing of it now, may have lost it long ago.
    fn look_at_restored(&self) -> impl Fn(&PersistentVolume) + Send + Sync + use<> {
        let (bound, conditions, looks) = (self.bound.clone(), self.conditions.clone(), self.looks.clone());
        move |volume| {
            // The first look at everything is to come.
            let known = |handle: &&str| conditions.of(handle) != Condition::Unknown;
            let id = cluster::handle(&volume.spec).filter(known).map(VolumeId::new);
            if let Some(Ok(id)) = id
                && bound.claim_of(volume).is_some()
            {
                looks.push(Look::One(id));
            }
        }
    }

    /// Takes the infra's news.
    pub fn news(&self) -> impl Fn(News<'_>) + Send + Sync + use<> {
        conditions::news(self.looks.clone(), self.conditions.clone(), self.bound.clone())
    }

    /// Reads how the volumes are, until `stop`: what every replica does, and writes nothing. It is done before the
    /// infra's first news.
    pub async fn read(&self, infra: Arc<dyn StorageInfra>, stop: CancellationToken) {
        let looker = self.looks.worker();
        if !self.synced(&stop).await {
            return;
        }
        // One at a time, so that what is read later is also kept later.
        let look = |look| {
            let (conditions, infra, bound, queue) = (&self.conditions, &infra, &self.bound, &self.queue);
            async move { conditions.look(&**infra, look, bound, queue).await }
        };
        looker.run(1, Retry::default(), stop, look).await;
    }

    /// Keeps claims until `stop`.
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
        // What waits for the infra takes no place from what doesn't.
        let keep = worker.run(usize::MAX, Retry::default(), stop, |key| {
            let reconciler = &reconciler;
            async move { reconciler.reconcile(&key).await }
        });
        keep.await;
    }

    /// A claim must not be taken for one without a volume because the volumes were not read yet. False when `stop` came
    /// first.
    async fn synced(&self, stop: &CancellationToken) -> bool {
        let (claims, volumes) = (self.bound.claims.informer(), self.bound.volumes.informer());
        tokio::select! {
            () = stop.cancelled() => false,
            _ = async { tokio::join!(claims.synced(), volumes.synced()) } => true,
        }
    }
}
