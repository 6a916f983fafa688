//! Repair of drift, caused by edits, losses or restores: of [`volume_entries`](super::volume_entries) of VMs, and
//! [`orphans`](super::orphans).

use std::sync::Arc;

use crds::names::{ClaimName, VmName};
use csi::locks::VolumeLocks;
use futures::FutureExt;
use kube_kit::health::Health;
use kube_kit::queue::{Queue, Retry};
use process_kit::concurrent;
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;

use super::k8s_attachments::K8sAttachments;
use super::metrics::{OrphanGauges, RepairMetrics};
use super::options::Options;
use super::orphans::Orphans;
use super::volume_entries::{DriftTracker, VolumeEntries};
use super::zones::Zones;
use super::{SLOW_RETRY, WORKERS};
use crate::guest::Guest;
use crate::management::Management;

/// Work queues.
#[derive(Debug, Clone)]
pub(super) struct RepairQueues {
    /// Names of VMs.
    pub(super) vms: Queue<VmName>,
    /// Handles of volumes.
    pub(super) volumes: Queue<ClaimName>,
}

/// Queues and metrics, before the clusters are connected.
#[derive(Debug)]
pub(super) struct Registered {
    queues: RepairQueues,
    gauges: OrphanGauges,
    metrics: RepairMetrics,
}

/// Both reconcilers and their informers.
pub(super) struct Repair {
    queues: RepairQueues,
    management: Management,
    volume_entries: VolumeEntries,
    orphans: Orphans,
}

impl Registered {
    pub(super) fn new(registry: &mut Registry) -> Self {
        Self {
            queues: RepairQueues { vms: Queue::default(), volumes: Queue::default() },
            gauges: OrphanGauges::register(registry),
            metrics: RepairMetrics::register(registry),
        }
    }

    pub(super) fn queues(&self) -> &RepairQueues {
        &self.queues
    }

    /// Starts the informer of guest VolumeAttachments.
    pub(super) fn start(
        self,
        (guest, management): (Guest, Management),
        zones: Arc<Zones>,
        options: &Options,
        locks: VolumeLocks,
        ready: &Health,
        stop: &CancellationToken,
    ) -> Repair {
        let check = ready.check("watch of guest VolumeAttachments", "not synced yet");
        let client = guest.client.clone();
        let k8s_attachments =
            K8sAttachments::start(&client, guest.clone(), check, stop, self.queues.vms.clone());
        let periods = (options.repair_grace, options.remove_orphans_after);
        let (gauges, metrics) = (self.gauges, self.metrics);
        let orphans =
            Orphans::new(guest.clone(), management.clone(), locks.clone(), periods, gauges, metrics.clone());
        let volume_entries = VolumeEntries {
            guest,
            management: management.clone(),
            k8s_attachments,
            zones,
            locks,
            grace: options.repair_grace,
            metrics,
            drift: DriftTracker::default(),
        };
        Repair { queues: self.queues, management, volume_entries, orphans }
    }
}

impl Repair {
    pub(super) fn k8s_attachments(&self) -> K8sAttachments {
        self.volume_entries.k8s_attachments.clone()
    }

    /// Reconciles everything once, then each change, until `stop`. Both clusters are synced.
    pub(super) async fn run(&self, stop: CancellationToken) {
        let VolumeEntries { k8s_attachments, zones, .. } = &self.volume_entries;
        // Wait for all VolumeAttachments, so that no entry counts as stale too early.
        tokio::select! {
            () = stop.cancelled() => return,
            _ = async { tokio::join!(k8s_attachments.synced(), zones.synced()) } => {}
        }
        // A new leader has not observed the time before: all grace periods start again.
        self.volume_entries.drift.forget();
        self.orphans.forget_observations();
        let (vms, volumes) =
            (self.queues.vms.worker("volume-entries"), self.queues.volumes.worker("orphans"));
        for vm_name in self.management.vms.names() {
            self.queues.vms.push(vm_name);
        }
        for claim in self.management.claims.names() {
            self.queues.volumes.push(claim);
        }
        let vms = vms.run(WORKERS, Retry::default(), stop.clone(), |vm_name| async move {
            self.volume_entries.reconcile(&vm_name).await
        });
        let volumes = volumes
            .run(WORKERS, SLOW_RETRY, stop, |handle| async move { self.orphans.reconcile(&handle).await });
        concurrent::all([vms.boxed(), volumes.boxed()]).await;
    }
}
