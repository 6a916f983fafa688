//! Reconcilers: what gc-csi keeps in sync outside of CSI calls. Informers push the keys of changed objects to queues.
//! Reconciling a key compares the current state with the desired one; usually nothing differs, and no request is made.
//!
//! - [`volume_conditions`]: conditions and events of guest claims: attachment ([`attach_state`]), health ([`health`]),
//!   available capacity ([`resizable`]), and compatibility with the management claim ([`pv_usable`]).
//! - [`consumer_records`]: labels and annotations of management claims that name the guest objects that use them.
//! - [`abandoned_claims`]: management claims without a volume whose guest claim was deleted.
//! - [`owner_refs`]: ownerReferences of claims and snapshots.
//! - [`volume_entries`]: volume entries without a guest VolumeAttachment, and guest VolumeAttachments without an entry.
//! - [`orphans`]: management claims without a guest PersistentVolume.
//! - [`zones`]: zone labels of guest Nodes.
//! - [`out_of_service`]: out-of-service taints of guest Nodes, as annotations of VMs.
//! - [`lost_nodes`]: out-of-service taints of Nodes whose VM is proven off.

mod abandoned_claims;
mod attach_state;
mod conditions;
mod consumer_records;
mod health;
mod k8s_attachments;
mod lost_nodes;
mod metrics;
mod options;
mod orphans;
mod out_of_service;
mod owner_refs;
mod pods;
mod pv_usable;
mod repair;
mod resizable;
mod taints;
mod volume_conditions;
mod volume_entries;
mod zones;

use std::sync::Arc;
use std::time::Duration;

use csi::locks::VolumeLocks;
use futures::FutureExt;
use kube_kit::health::Health;
use kube_kit::index::Index;
use kube_kit::informer::{Change, Key};
use kube_kit::pace::Pace;
use kube_kit::queue::{Queue, Retry};
use process_kit::concurrent;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;

use crate::guest::{self, Guest};
use crate::management::claims::pending_for;
use crate::management::{ChangeHandlers, Management, OwnedObject};
use crate::vm_volumes::Vm;

use crds::names::{ClaimName, VmName};
pub(crate) use k8s_attachments::K8sAttachments;
pub(crate) use options::Options;
use repair::RepairQueues;

/// Concurrent reconciles per queue.
const WORKERS: usize = 16;

/// Conditions are updated with a delay, with few workers, and at a [`Pace`], so that CSI calls go first.
const CONDITIONS_DELAY: Duration = Duration::from_secs(1);
const CONDITIONS_WORKERS: usize = 4;

/// Slow backoff: a policy of the management cluster that refuses a write refuses it for every volume.
const SLOW_RETRY: Retry = Retry { first: Duration::from_millis(250), longest: Duration::from_secs(300) };

/// Work queues, filled by the informers of both clusters.
#[derive(Debug, Clone)]
pub(crate) struct Queues {
    conditions: Queue<ClaimName>,
    records: Queue<ClaimName>,
    pending_claims: Queue<ClaimName>,
    /// Management claims without a volume, by guest claim.
    pending_by_guest_claim: Arc<Index>,
    owner_refs: Queue<OwnedObject>,
    zone_labels: Queue<VmName>,
    lost_nodes: Queue<VmName>,
    /// Proofs that VMs are off.
    proofs: lost_nodes::Proofs,
    repair: RepairQueues,
}

/// The reconcilers, before both clusters are connected.
#[derive(Debug)]
pub(crate) struct Reconcilers {
    queues: Queues,
    pace: Pace,
    repair: repair::Registered,
    abnormal: Gauge,
    outliving: Gauge,
    taints: metrics::TaintMetrics,
}

/// The reconcilers and their informers.
pub(crate) struct Started {
    queues: Queues,
    pace: Pace,
    guest: Guest,
    management: Management,
    zones: Arc<zones::Zones>,
    lost_nodes: lost_nodes::LostNodes,
    pods: Option<pods::Pods>,
    labels: Vec<String>,
    repair: repair::Repair,
    abnormal: Gauge,
    outliving: Gauge,
    stop: CancellationToken,
}

/// Resets gauges when this replica stops to lead, so that it does not report outdated numbers.
struct ResetOnDrop<'a>([&'a Gauge; 2]);

impl Drop for ResetOnDrop<'_> {
    fn drop(&mut self) {
        for count in self.0 {
            count.set(0);
        }
    }
}

impl Queues {
    /// Queues the volume with this handle.
    pub(crate) fn push_volume(&self, handle: &ClaimName) {
        self.conditions.push_after(handle.to_owned(), CONDITIONS_DELAY);
        self.records.push(handle.to_owned());
        self.repair.volumes.push(handle.to_owned());
    }

    /// Queues the management claims without a volume of a guest claim that was deleted.
    pub(crate) fn push_deleted_guest_claim(&self, guest_claim: &Key) {
        for claim in self.pending_by_guest_claim.members(guest_claim) {
            self.pending_claims.push(ClaimName::new(claim.name));
        }
    }

    /// Queues all objects that may need an ownerReference.
    pub(crate) fn push_all_owner_refs(&self) {
        self.owner_refs.push(OwnedObject::All);
    }

    /// Change handlers for the informers of the management cluster.
    pub(crate) fn handlers(&self) -> ChangeHandlers {
        let (vms, claims, snapshots) = (self.clone(), self.clone(), self.owner_refs.clone());
        ChangeHandlers {
            vm_changed: Box::new(move |change| vms.push_vm(change)),
            claim_changed: Box::new(move |change| {
                let name = ClaimName::new(&change.key.name);
                claims.push_volume(&name);
                claims.owner_refs.push(OwnedObject::Claim(name.clone()));
                let guest_claim = change.new.and_then(|claim| pending_for(claim));
                let is_pending = guest_claim.is_some();
                claims.pending_by_guest_claim.put(change.key, guest_claim);
                if is_pending {
                    claims.pending_claims.push(name);
                }
            }),
            snapshot_changed: Box::new(move |change| {
                snapshots.push(OwnedObject::Snapshot(change.key.name.clone()));
            }),
        }
    }

    fn push_vm(&self, change: &Change<'_, Vm>) {
        let [old, new] = [change.old, change.new].map(|vm| vm.map(|vm| (&vm.metadata.uid, &vm.spec.volumes)));
        if old != new {
            self.repair.vms.push(VmName::new(&change.key.name));
        }
        for claim in attach_state::changed_claims(change) {
            self.conditions.push_after(claim, CONDITIONS_DELAY);
        }
        let [old, new] = [change.old, change.new]
            .map(|vm| vm.map(|vm| (zones::zone_of(vm), out_of_service::is_annotated(vm))));
        if old != new {
            self.zone_labels.push(VmName::new(&change.key.name));
        }
        let power = |vm: &Arc<Vm>| vm.status.as_ref().and_then(|status| status.power_state.clone());
        if self.proofs.note(change) || change.old.map(power) != change.new.map(power) {
            self.lost_nodes.push(VmName::new(&change.key.name));
        }
    }
}

impl Reconcilers {
    /// Registers metrics and creates the queues. Changes are dropped until [`Started::run`], which queues everything.
    pub(crate) fn new(registry: &mut Registry) -> Self {
        let abnormal = Gauge::default();
        registry.register(
            "volumes_abnormal",
            "Volumes of this guest that the management cluster reports as abnormal",
            abnormal.clone(),
        );
        let outliving = Gauge::default();
        registry.register(
            "objects_outliving_guest",
            "Claims and snapshots of this guest that stay after the deletion of its Cluster object although the policy is Delete",
            outliving.clone(),
        );
        let repair = repair::Registered::new(registry);
        let queues = Queues {
            conditions: Queue::default(),
            records: Queue::default(),
            pending_claims: Queue::default(),
            pending_by_guest_claim: Arc::default(),
            owner_refs: Queue::default(),
            zone_labels: Queue::default(),
            lost_nodes: Queue::default(),
            proofs: lost_nodes::Proofs::default(),
            repair: repair.queues().clone(),
        };
        let taints = metrics::TaintMetrics::register(registry);
        Self { queues, pace: Pace::default(), repair, abnormal, outliving, taints }
    }

    /// The pace of writes that nobody waits for.
    pub(crate) fn pace(&self) -> &Pace {
        &self.pace
    }

    /// The work queues.
    pub(crate) fn queues(&self) -> &Queues {
        &self.queues
    }

    /// Starts the informers that only the reconcilers need.
    pub(crate) fn start(
        self,
        guest: Guest,
        management: Management,
        options: Options,
        locks: VolumeLocks,
        ready: &Health,
        stop: CancellationToken,
    ) -> Started {
        let Self { queues, pace, repair, abnormal, outliving, taints } = self;
        let client = &guest.client;
        let nodes = ready.check("watch of guest Nodes", "not synced yet");
        let (zone_queue, vm_queue) = (queues.zone_labels.clone(), queues.repair.vms.clone());
        let lost_queue = queues.lost_nodes.clone();
        let zones = zones::Zones::start(
            client,
            management.vms.clone(),
            guest.events.clone(),
            nodes,
            &stop,
            move |node| {
                zone_queue.push(node.to_owned());
                vm_queue.push(node.to_owned());
            },
            move |node| lost_queue.push(node.to_owned()),
        );
        let zones = Arc::new(zones);
        let lost_nodes = lost_nodes::LostNodes::new(
            options.out_of_service_taint,
            client,
            zones.clone(),
            management.vms.clone(),
            queues.proofs.clone(),
            guest.events.clone(),
            taints,
        );
        let records = queues.records.clone();
        let pods = options.sync_pods.then(|| {
            let (check, claims) = (ready.check("watch of guest Pods", "not synced yet"), guest.clone());
            pods::Pods::start(client, check, &stop, move |claim| {
                if let Some(handle) = claims.handle_of(claim) {
                    records.push(handle);
                }
            })
        });
        let clusters = (guest.clone(), management.clone());
        let repair = repair.start(clusters, zones.clone(), &options, locks, ready, &stop);
        let labels = options.labels;
        Started {
            queues,
            pace,
            guest,
            management,
            zones,
            lost_nodes,
            pods,
            labels,
            repair,
            abnormal,
            outliving,
            stop,
        }
    }
}

impl Started {
    /// The guest's VolumeAttachments.
    pub(crate) fn k8s_attachments(&self) -> K8sAttachments {
        self.repair.k8s_attachments()
    }

    /// Runs the reconcilers until `stop`. They start when both clusters are synced, so that no object counts as missing
    /// because it was not read yet.
    pub(crate) async fn run(&self) {
        let Self { queues, guest, management, pods, stop, .. } = self;
        let both = async {
            guest.synced().await;
            management.synced().await;
        };
        tokio::select! {
            () = both => {}
            () = stop.cancelled() => return,
        }

        let _reset = ResetOnDrop([&self.abnormal, &self.outliving]);
        let (conditions, records) = (
            queues.conditions.worker("claim-conditions").paced(self.pace.clone()),
            queues.records.worker("consumer-records"),
        );
        let (pending_claims, owner_refs_queue) =
            (queues.pending_claims.worker("abandoned-claims"), queues.owner_refs.worker("owner-refs"));
        self.push_all();
        let volume_conditions = volume_conditions::VolumeConditions::new(
            guest.clone(),
            management.clone(),
            self.abnormal.clone(),
            self.pace.clone(),
        );
        let update_conditions = |handle: ClaimName| {
            let volume_conditions = &volume_conditions;
            async move { volume_conditions.reconcile(&handle).await }
        };
        let updating_conditions =
            conditions.run(CONDITIONS_WORKERS, Retry::default(), stop.clone(), update_conditions);
        let abandoned_claims = abandoned_claims::AbandonedClaims::new(guest.clone(), management.clone());
        let deleting_abandoned = pending_claims.run(WORKERS, Retry::default(), stop.clone(), |claim| {
            let abandoned_claims = &abandoned_claims;
            async move { abandoned_claims.reconcile(&claim).await }
        });
        let owner_refs = owner_refs::OwnerRefReconciler::new(
            management.owner_refs.clone(),
            queues.owner_refs.clone(),
            self.outliving.clone(),
        );
        let updating_owner_refs = async {
            let work = |object: OwnedObject| {
                let owner_refs = &owner_refs;
                async move { owner_refs.reconcile(&object).await }
            };
            let warning_once = async {
                tokio::select! {
                    () = management.owner_refs.warn_if_missing() => {}
                    () = stop.cancelled() => {}
                }
            };
            let updating = owner_refs_queue.run(WORKERS, SLOW_RETRY, stop.clone(), work);
            concurrent::all([updating.boxed(), warning_once.boxed()]).await;
        };
        let repair = self.repair.run(stop.clone());
        let consumer_records = consumer_records::ConsumerRecords::new(
            guest.clone(),
            management.clone(),
            self.labels.clone(),
            pods.clone(),
        );
        let updating_records = async {
            if let Some(pods) = pods {
                tokio::select! {
                    () = pods.synced() => {}
                    () = stop.cancelled() => return,
                }
            }
            let work = |handle: ClaimName| {
                let consumer_records = &consumer_records;
                async move { consumer_records.reconcile(&handle).await }
            };
            records.run(WORKERS, SLOW_RETRY, stop.clone(), work).await;
        };
        concurrent::all([
            updating_conditions.boxed(),
            deleting_abandoned.boxed(),
            updating_owner_refs.boxed(),
            repair.boxed(),
            updating_records.boxed(),
            self.update_nodes().boxed(),
        ])
        .await;
    }

    /// Labels and taints Nodes.
    async fn update_nodes(&self) {
        let Self { queues, zones, lost_nodes, stop, .. } = self;
        tokio::select! {
            () = zones.synced() => {}
            () = stop.cancelled() => return,
        }
        let labels = queues.zone_labels.worker("zone-labels");
        let taints = queues.lost_nodes.worker("lost-nodes");
        lost_nodes.forget();
        for node in zones.names() {
            queues.zone_labels.push(node.clone());
            queues.lost_nodes.push(node);
        }
        let label = |node: VmName| async move { zones.reconcile(&node).await };
        let taint = |node: VmName| async move { lost_nodes.reconcile(&node).await };
        let labelling = labels.run(WORKERS, Retry::default(), stop.clone(), label);
        let tainting = taints.run(WORKERS, Retry::default(), stop.clone(), taint);
        concurrent::all([labelling.boxed(), tainting.boxed()]).await;
    }

    /// Queues everything: it is unknown how far the previous leader came.
    fn push_all(&self) {
        let Self { queues, guest, management, .. } = self;
        for claim in management.claims.names() {
            queues.pending_claims.push(claim.clone());
            queues.push_volume(&claim);
        }
        for volume in guest.volumes.list() {
            if let Some(handle) = guest::handle(&volume) {
                queues.push_volume(&handle);
            }
        }
        queues.push_all_owner_refs();
    }
}
