//! Claim controller: shows guests on their claims what they cannot read otherwise, the reclaim policy `Retain` of the volume
//! as an annotation, an unhealthy volume as a condition, and the labels of the PersistentVolume that say which guests may use
//! it, and which guests of other namespaces share it. A healthy volume with policy `Delete` that is not shared needs no write. A
//! volume without a record of whose it is gets one. A finalizer keeps a claim, which counts in quotas, until its disk is detached.

mod bindings;
mod conditions;
mod decide;
mod protection;
mod reconcile;
mod release;
mod sharing;
mod siblings;
mod waiting;

use std::sync::Arc;

use infra_api::VolumeId;
use kube_kit::informer::{Change, Key};
use kube_kit::mutation_cache::MutationCache;
use kube_kit::partial::{PersistentVolume, PersistentVolumeClaim};
use kube_kit::queue::{Queue, Retry};
use prometheus_client::registry::Registry;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::clients::Clients;
use crate::cluster::{self, Cluster};
use crate::infra::{InfraEvent, StorageInfra};
use crate::volume_attachment::Attachments;
use bindings::Bindings;
use conditions::{Condition, Conditions, Refresh};
use decide::reported;
use reconcile::Reconciler;
use sharing::shown;
use waiting::Waiting;

/// Maximum number of concurrent API requests.
const CONCURRENT_REQUESTS: usize = 8;

/// Maximum number of concurrent reads of volume conditions before a write.
const CONCURRENT_INFRA_CALLS: usize = 32;

/// The controller, not started yet.
pub struct ClaimController {
    conditions: Conditions,
    bindings: Bindings,
    queue: Queue<Key>,
    refreshes: Queue<Refresh>,
    waiting: Waiting,
}

impl std::fmt::Debug for ClaimController {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keeper").finish_non_exhaustive()
    }
}

impl ClaimController {
    /// Registers the metric.
    pub fn new(registry: &mut Registry, cluster: &Cluster) -> Self {
        Self {
            conditions: Conditions::register(registry),
            bindings: Bindings {
                claims: Arc::new(MutationCache::new(cluster.claims())),
                volumes: cluster.volumes(),
            },
            queue: Queue::default(),
            refreshes: Queue::default(),
            waiting: Waiting::default(),
        }
    }

    /// Reconciles a claim whenever its binding, annotation, condition or finalizer changes, and when it is deleted.
    pub fn watch(&self, cluster: Cluster) -> Cluster {
        let (bindings, queue, refresh) = (self.bindings.clone(), self.queue.clone(), self.refresh_restored());
        let waiting = self.waiting.clone();
        let cluster = cluster.on_claim(move |change: &Change<'_, PersistentVolumeClaim>| {
            bindings.claims.observe(change);
            if !change.new.is_some_and(|new| cluster::is_terminating(new)) {
                waiting.remove(change.key);
            }
            let Some(new) = change.new else { return };
            if change.old.is_none()
                && let Some(volume) = cluster::volume_name(new)
                && let Some(volume) = bindings.volumes.get(volume)
            {
                refresh(&volume);
            }
            let relevant = |claim: &PersistentVolumeClaim| {
                let metadata = (claim.metadata.uid.clone(), claim.metadata.labels.clone());
                let finalizers = (cluster::has_finalizer(claim), cluster::has_pvc_protection(claim));
                let deletion = (cluster::is_terminating(claim), finalizers);
                let written = (reported(claim), shown(claim));
                (metadata, deletion, cluster::volume_name(claim).map(str::to_owned), written)
            };
            if change.old.is_none_or(|old| relevant(old) != relevant(new)) {
                queue.push(change.key.clone());
            }
        });
        let (conditions, bindings) = (self.conditions.clone(), self.bindings.clone());
        let (queue, refresh) = (self.queue.clone(), self.refresh_restored());
        cluster.on_volume(move |change: &Change<'_, PersistentVolume>| {
            let Some(volume) = change.new.or(change.old).filter(|_| has_changed(change)) else { return };
            let sharing = bindings.volumes.sharing(&volume.spec);
            if change.new.is_none()
                && sharing.is_empty()
                && let Some(handle) = cluster::handle(&volume.spec)
            {
                conditions.forget(handle);
            }
            if let (None, Some(new)) = (change.old, change.new) {
                refresh(new);
            }
            // Each claim of the volume shows who shares it.
            for claim in sharing.iter().chain(change.new).filter_map(|one| cluster::claim_of(&one.spec)) {
                queue.push(claim);
            }
        })
    }

    /// Returns a handler that reads the condition of a volume that was already bound when first observed, as after a restore
    /// of the cluster: the storage infra may have lost it long ago and emits no event for it now.
    fn refresh_restored(&self) -> impl Fn(&PersistentVolume) + Send + Sync + use<> {
        let (bindings, conditions, refreshes) =
            (self.bindings.clone(), self.conditions.clone(), self.refreshes.clone());
        move |volume| {
            // Skipped before the first list, which covers all volumes.
            let known = |handle: &&str| conditions.of(handle) != Condition::Unknown;
            let id = cluster::handle(&volume.spec).filter(known).map(VolumeId::new);
            if let Some(Ok(id)) = id
                && bindings.claim_of(volume).is_some()
            {
                refreshes.push(Refresh::One(id));
            }
        }
    }

    /// Handler for storage infra events.
    pub fn on_infra_event(&self) -> impl Fn(InfraEvent<'_>) + Send + Sync + use<> {
        let (refreshes, conditions) = (self.refreshes.clone(), self.conditions.clone());
        let refresh = conditions::on_infra_event(refreshes, conditions, self.bindings.clone());
        let detached = self.waiting.on_infra_event(self.queue.clone());
        move |event| {
            refresh(event);
            detached(event);
        }
    }

    /// Handler for claims that a VolumeAttachment no longer holds.
    pub fn on_release(&self) -> impl Fn(&Key) + Send + Sync + use<> {
        let (claims, queue) = (self.bindings.claims.clone(), self.queue.clone());
        move |key| {
            if claims.get(key).is_some_and(|claim| cluster::is_terminating(&claim)) {
                queue.push(key.clone());
            }
        }
    }

    /// Reads volume conditions until `stop`. Every replica runs this; it writes nothing. It starts before the first event of
    /// the storage infra.
    pub async fn refresh_conditions(&self, infra: Arc<dyn StorageInfra>, stop: CancellationToken) {
        let worker = self.refreshes.worker("volume-conditions");
        if !self.synced(&stop).await {
            return;
        }
        // One at a time, so that an older read never overwrites a newer one.
        let refresh = |refresh| {
            let (conditions, infra, bindings, queue) =
                (&self.conditions, &infra, &self.bindings, &self.queue);
            async move { conditions.refresh(&**infra, refresh, bindings, queue).await }
        };
        worker.run(1, Retry::default(), stop, refresh).await;
    }

    /// Reconciles claims until `stop`. Only the leader runs this. Without VolumeAttachments, the storage infra alone knows which
    /// claims are held.
    pub(crate) async fn run(
        &self,
        clients: &Clients,
        attachments: Option<&Attachments>,
        stop: CancellationToken,
    ) {
        // Without its VolumeAttachments, a claim would be released too early.
        if let Some(attachments) = attachments {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = attachments.objects.informer().synced() => {}
            }
        }
        if !self.synced(&stop).await {
            return;
        }
        let reconciler = Reconciler {
            events: clients.events.clone(),
            client: clients.cluster.clone(),
            infra: clients.infra.clone(),
            bindings: self.bindings.clone(),
            conditions: self.conditions.clone(),
            refreshes: self.refreshes.clone(),
            waiting: self.waiting.clone(),
            attachments: attachments.cloned(),
            requests: Semaphore::new(CONCURRENT_REQUESTS),
            infra_calls: Semaphore::new(CONCURRENT_INFRA_CALLS),
        };
        let worker = self.queue.worker("claims");
        for claim in self.bindings.claims.informer().list() {
            self.queue.push(Key::of(&*claim));
        }
        // No limit on workers: those that wait for the storage infra must not block the others.
        let run = worker.run(usize::MAX, Retry::default(), stop, |key| {
            let reconciler = &reconciler;
            async move { reconciler.reconcile(&key).await }
        });
        run.await;
    }

    /// Waits until the caches are synced, since unsynced ones would show claims without volumes. False if `stop` came first.
    async fn synced(&self, stop: &CancellationToken) -> bool {
        let (claims, volumes) = (self.bindings.claims.informer(), self.bindings.volumes.informer());
        tokio::select! {
            () = stop.cancelled() => false,
            _ = async { tokio::join!(claims.synced(), volumes.synced()) } => true,
        }
    }
}

/// Whether a volume was added or removed, or what its claims show of it has changed.
fn has_changed(change: &Change<'_, PersistentVolume>) -> bool {
    match (change.old, change.new) {
        (Some(old), Some(new)) => old.spec != new.spec || old.metadata.labels != new.metadata.labels,
        _ => true,
    }
}
