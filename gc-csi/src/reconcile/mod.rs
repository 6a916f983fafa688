//! What gc-csi keeps in step by itself, outside any call. Every change that a watch shows pushes a key; a key's round
//! looks at what is there now and writes what is missing, which usually is nothing and then costs no request.
//!
//! - [`show`]: what a guest's claim shows of its volume, as conditions and events: attachment ([`attach_state`]),
//!   health ([`health`]), growth ([`growth`]), and whether it can be used at all ([`usable`]).
//! - [`record`]: what the management claim says of the guest's objects that use it.
//! - [`unwanted`]: management claims without a volume that nobody waits for any more.
//! - [`owned`]: with what claims and snapshots are deleted.
//! - [`entries`]: entries of machines that nothing orders, and orders whose entry is lost.
//! - [`orphans`]: management claims that nothing in the guest names any more.
//! - [`zones`]: zones of machines as labels of guest nodes.
//! - [`out_of_service`]: nodes that people say are lost, as annotations of machines.

mod attach_state;
mod conditions;
mod entries;
mod growth;
mod health;
mod options;
mod orders;
mod orphans;
mod out_of_service;
mod owned;
mod pods;
mod record;
mod repairing;
mod repairs;
mod show;
mod unwanted;
mod usable;
mod zones;

use std::sync::Arc;
use std::time::Duration;

use crds::VirtualMachine;
use csi::locks::VolumeLocks;
use kube_kit::health::Health;
use kube_kit::index::Index;
use kube_kit::informer::{Change, Key};
use kube_kit::queue::{Queue, Retry};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;

use crate::guest::{self, Guest};
use crate::management::claims::waits_for;
use crate::management::{Listeners, Made, Management};

pub(crate) use options::Options;
pub(crate) use orders::Orders;
use repairing::Pushes;

/// How many keys of a kind are worked on at once.
const AT_ONCE: usize = 16;

/// Nobody waits for what claims show. Calls go first: it is written when they are over, and few at once.
const SHOWN_AFTER: Duration = Duration::from_secs(1);
const SHOWN_AT_ONCE: usize = 4;

/// What the management cluster refuses because of a policy, it refuses for every volume: those come back slowly.
const RECORD_RETRY: Retry = Retry { first: Duration::from_millis(250), longest: Duration::from_secs(300) };

/// Where changes are pushed from the watches of both clusters.
#[derive(Debug, Clone)]
pub(crate) struct Queues {
    shown: Queue<String>,
    recorded: Queue<String>,
    waiting: Queue<String>,
    /// Management claims that have no volume yet, by the guest's claim that waits.
    waiting_for: Arc<Index>,
    owned: Queue<Made>,
    zoned: Queue<String>,
    repairing: Pushes,
}

/// The reconcilers, before both clusters are there.
#[derive(Debug)]
pub(crate) struct Reconcilers {
    queues: Queues,
    repairing: repairing::Registered,
    abnormal: Gauge,
    outliving: Gauge,
}

/// The reconcilers, with all that they watch.
pub(crate) struct Started {
    queues: Queues,
    guest: Guest,
    management: Management,
    zones: Arc<zones::Zones>,
    pods: Option<pods::Pods>,
    labels: Vec<String>,
    repairing: repairing::Repairing,
    abnormal: Gauge,
    outliving: Gauge,
    stop: CancellationToken,
}

/// What only the replica counts that runs the reconcilers; of what another does, it would tell yesterday's numbers.
struct Counted<'a>([&'a Gauge; 2]);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        for count in self.0 {
            count.set(0);
        }
    }
}

impl Queues {
    /// Asks for a look at the volume of this handle.
    pub(crate) fn push_volume(&self, handle: &str) {
        self.shown.push_after(handle.to_owned(), SHOWN_AFTER);
        self.recorded.push(handle.to_owned());
        self.repairing.volumes.push(handle.to_owned());
    }

    /// Asks for a look at what was being made for a claim of the guest that is gone.
    pub(crate) fn push_gone(&self, guest_claim: &Key) {
        for claim in self.waiting_for.members(guest_claim) {
            self.waiting.push(claim.name);
        }
    }

    /// Asks for a look at everything that is deleted with the guest's Cluster object.
    pub(crate) fn push_owned(&self) {
        self.owned.push(Made::All);
    }

    /// What is to be called when the management cluster changes.
    pub(crate) fn listeners(&self) -> Listeners {
        let (machines, claims, snapshots) = (self.clone(), self.clone(), self.owned.clone());
        Listeners {
            machine_changed: Box::new(move |change| machines.push_machine(change)),
            claim_changed: Box::new(move |change| {
                claims.push_volume(&change.key.name);
                claims.owned.push(Made::Claim(change.key.name.clone()));
                let guest_claim = change.new.and_then(|claim| waits_for(claim));
                let waits = guest_claim.is_some();
                claims.waiting_for.put(change.key, guest_claim);
                if waits {
                    claims.waiting.push(change.key.name.clone());
                }
            }),
            snapshot_changed: Box::new(move |change| {
                snapshots.push(Made::Snapshot(change.key.name.clone()));
            }),
        }
    }

    fn push_machine(&self, change: &Change<'_, VirtualMachine>) {
        let [old, new] =
            [change.old, change.new].map(|machine| machine.map(|vm| (&vm.metadata.uid, &vm.spec.volumes)));
        if old != new {
            self.repairing.machines.push(change.key.name.clone());
        }
        for claim in attach_state::changed_claims(change) {
            self.shown.push_after(claim, SHOWN_AFTER);
        }
        let [old, new] = [change.old, change.new]
            .map(|machine| machine.map(|vm| (zones::zone_of(vm), out_of_service::is_said(vm))));
        if old != new {
            self.zoned.push(change.key.name.clone());
        }
    }
}

impl Reconcilers {
    /// Nothing runs before [`Started::run`], which looks at everything: changes before it are dropped.
    pub(crate) fn new(registry: &mut Registry) -> Self {
        let abnormal = Gauge::default();
        registry.register(
            "volumes_abnormal",
            "Volumes of this guest that the management cluster says are not well",
            abnormal.clone(),
        );
        let outliving = Gauge::default();
        registry.register(
            "objects_outliving_guest",
            "Claims and snapshots of this guest that stay when its Cluster object is deleted, though the policy is Delete",
            outliving.clone(),
        );
        let repairing = repairing::Registered::new(registry);
        let queues = Queues {
            shown: Queue::default(),
            recorded: Queue::default(),
            waiting: Queue::default(),
            waiting_for: Arc::default(),
            owned: Queue::default(),
            zoned: Queue::default(),
            repairing: repairing.pushes().clone(),
        };
        Self { queues, repairing, abnormal, outliving }
    }

    /// Where changes are pushed.
    pub(crate) fn queues(&self) -> &Queues {
        &self.queues
    }

    /// Starts the watches that only reconcilers need, until `stop`.
    pub(crate) fn start(
        self,
        guest: Guest,
        management: Management,
        options: Options,
        locks: VolumeLocks,
        ready: &Health,
        stop: CancellationToken,
    ) -> Started {
        let Self { queues, repairing, abnormal, outliving } = self;
        let client = &guest.client;
        let nodes = ready.check("guest-nodes", "not read yet");
        let (zoned_nodes, repaired_nodes) = (queues.zoned.clone(), queues.repairing.machines.clone());
        let zones = zones::Zones::start(
            client,
            management.clone(),
            guest.events.clone(),
            nodes,
            &stop,
            move |node| {
                zoned_nodes.push(node.to_owned());
                repaired_nodes.push(node.to_owned());
            },
        );
        let zones = Arc::new(zones);
        let recorded = queues.recorded.clone();
        let pods = options.sync_pods.then(|| {
            let (check, claims) = (ready.check("guest-pods", "not read yet"), guest.clone());
            pods::Pods::start(client, check, &stop, move |claim| {
                if let Some(handle) = claims.handle_of(claim) {
                    recorded.push(handle);
                }
            })
        });
        let clusters = (guest.clone(), management.clone());
        let repairing = repairing.start(clusters, zones.clone(), &options, locks, ready, &stop);
        let labels = options.labels;
        Started { queues, guest, management, zones, pods, labels, repairing, abnormal, outliving, stop }
    }
}

impl Started {
    /// What the guest orders to be attached.
    pub(crate) fn orders(&self) -> Orders {
        self.repairing.orders()
    }

    /// Keeps everything in step until the process is stopped; begins once both clusters were read, since what is not
    /// read yet must not be taken for gone.
    pub(crate) async fn run(&self) {
        let Self { queues, guest, management, zones, pods, stop, .. } = self;
        let both = async {
            guest.synced().await;
            management.synced().await;
        };
        tokio::select! {
            () = both => {}
            () = stop.cancelled() => return,
        }

        let _counted = Counted([&self.abnormal, &self.outliving]);
        let (shown, recorded) = (queues.shown.worker(), queues.recorded.worker());
        let (waiting, owned, zoned) = (queues.waiting.worker(), queues.owned.worker(), queues.zoned.worker());
        self.push_all();
        let show = show::Show::new(guest.clone(), management.clone(), self.abnormal.clone());
        let showing = shown.run(SHOWN_AT_ONCE, Retry::default(), stop.clone(), |handle| {
            let show = &show;
            async move { show.reconcile(&handle).await }
        });
        let unwanted = unwanted::Unwanted::new(guest.clone(), management.clone());
        let tidying = waiting.run(AT_ONCE, Retry::default(), stop.clone(), |claim| {
            let unwanted = &unwanted;
            async move { unwanted.reconcile(&claim).await }
        });
        let owners = owned::Owned::new(management.clone(), queues.owned.clone(), self.outliving.clone());
        let owning = async {
            let work = |made: Made| {
                let owners = &owners;
                async move { owners.reconcile(&made).await }
            };
            let telling = async {
                tokio::select! {
                    () = management.tell_missing_owner() => {}
                    () = stop.cancelled() => {}
                }
            };
            tokio::join!(owned.run(AT_ONCE, RECORD_RETRY, stop.clone(), work), telling);
        };
        let repairing = self.repairing.run(stop.clone());
        let record =
            record::Record::new(guest.clone(), management.clone(), self.labels.clone(), pods.clone());
        let recording = async {
            if let Some(pods) = pods {
                tokio::select! {
                    () = pods.synced() => {}
                    () = stop.cancelled() => return,
                }
            }
            let work = |handle: String| {
                let record = &record;
                async move { record.reconcile(&handle).await }
            };
            recorded.run(AT_ONCE, RECORD_RETRY, stop.clone(), work).await;
        };
        let zoning = async {
            tokio::select! {
                () = zones.synced() => {}
                () = stop.cancelled() => return,
            }
            for node in zones.names() {
                queues.zoned.push(node);
            }
            let work = |node: String| async move { zones.reconcile(&node).await };
            zoned.run(AT_ONCE, Retry::default(), stop.clone(), work).await;
        };
        tokio::join!(showing, tidying, owning, repairing, recording, zoning);
    }

    /// Asks for a look at everything: what changed before was another replica's business, and nobody knows how far it
    /// came.
    fn push_all(&self) {
        let Self { queues, guest, management, .. } = self;
        for claim in management.claim_names() {
            queues.waiting.push(claim.clone());
            queues.push_volume(&claim);
        }
        for volume in guest.volumes.list() {
            if let Some(handle) = guest::handle(&volume) {
                queues.push_volume(handle);
            }
        }
        queues.push_owned();
    }
}
