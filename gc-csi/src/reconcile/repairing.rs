//! What is looked at because it may have been edited, lost or restored behind our back: [`entries`](super::entries) of
//! machines, and [`orphans`](super::orphans).

use std::sync::Arc;

use csi::locks::VolumeLocks;
use kube_kit::health::Health;
use kube_kit::queue::{Queue, Retry};
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;

use super::entries::{Entries, Seen};
use super::options::Options;
use super::orders::Orders;
use super::orphans::{Counts, Orphans};
use super::repairs::Repairs;
use super::zones::Zones;
use super::{AT_ONCE, RECORD_RETRY};
use crate::guest::Guest;
use crate::management::Management;

/// Where changes are pushed.
#[derive(Debug, Clone)]
pub(super) struct Pushes {
    /// Names of machines.
    pub(super) machines: Queue<String>,
    /// Handles of volumes.
    pub(super) volumes: Queue<String>,
}

/// Both, registered but not started.
#[derive(Debug)]
pub(super) struct Registered {
    pushes: Pushes,
    counts: Counts,
    repairs: Repairs,
}

/// Both, with all that they watch.
pub(super) struct Repairing {
    pushes: Pushes,
    management: Management,
    entries: Entries,
    orphans: Orphans,
}

impl Registered {
    pub(super) fn new(registry: &mut Registry) -> Self {
        Self {
            pushes: Pushes { machines: Queue::default(), volumes: Queue::default() },
            counts: Counts::register(registry),
            repairs: Repairs::register(registry),
        }
    }

    pub(super) fn pushes(&self) -> &Pushes {
        &self.pushes
    }

    /// Starts the watch of what the guest orders to be attached.
    pub(super) fn start(
        self,
        (guest, management): (Guest, Management),
        zones: Arc<Zones>,
        options: &Options,
        locks: VolumeLocks,
        ready: &Health,
        stop: &CancellationToken,
    ) -> Repairing {
        let check = ready.check("guest-attachments", "not read yet");
        let client = guest.client.clone();
        let orders = Orders::start(&client, guest.clone(), check, stop, self.pushes.machines.clone());
        let periods = (options.repair_grace, options.remove_orphans_after);
        let (counts, repairs) = (self.counts, self.repairs);
        let orphans =
            Orphans::new(guest.clone(), management.clone(), locks.clone(), periods, counts, repairs.clone());
        let entries = Entries {
            guest,
            management: management.clone(),
            orders,
            zones,
            locks,
            grace: options.repair_grace,
            repairs,
            seen: Seen::default(),
        };
        Repairing { pushes: self.pushes, management, entries, orphans }
    }
}

impl Repairing {
    pub(super) fn orders(&self) -> Orders {
        self.entries.orders.clone()
    }

    /// Looks at everything, and then at what changes, until `stop`; both clusters were read by now.
    pub(super) async fn run(&self, stop: CancellationToken) {
        let Entries { orders, zones, .. } = &self.entries;
        // An entry must not be called stale because its order was not read yet.
        tokio::select! {
            () = stop.cancelled() => return,
            _ = async { tokio::join!(orders.synced(), zones.synced()) } => {}
        }
        // Whoever leads again has not seen what went on meanwhile: the grace of each begins anew.
        self.entries.seen.forget();
        self.orphans.forget_seen();
        let (machines, volumes) = (self.pushes.machines.worker(), self.pushes.volumes.worker());
        for machine in self.management.machine_names() {
            self.pushes.machines.push(machine);
        }
        for claim in self.management.claim_names() {
            self.pushes.volumes.push(claim);
        }
        let machines = machines.run(AT_ONCE, Retry::default(), stop.clone(), |machine| async move {
            self.entries.reconcile(&machine).await
        });
        let volumes = volumes
            .run(AT_ONCE, RECORD_RETRY, stop, |handle| async move { self.orphans.reconcile(&handle).await });
        tokio::join!(machines, volumes);
    }
}
