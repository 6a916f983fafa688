//! `VirtualMachine`s from the `Machine`s of Cluster API: any infrastructure provider serves, as long as its provider IDs have
//! the UUIDs of the VMs.

mod decide;
mod machine;
mod reconcile;

use std::sync::Arc;

use crds::names::{CLUSTER_GROUP, LABEL_CLUSTER_ID};
use kube::core::{ApiResource, DynamicObject};
use kube::{Api, Client};
use kube_kit::api_versions;
use kube_kit::events::Events;
use kube_kit::health::{Check, Health};
use kube_kit::informer::{Change, Informer, Key};
use kube_kit::partial::{identity, only};
use kube_kit::queue::{Queue, Retry};
use tokio_util::sync::CancellationToken;

pub use decide::Reason;
use machine::{Machine, MachineExt, cluster_resource, machine_resource, newest_version};
use reconcile::Reconciler;

use crate::reconcile::Metrics;

/// Maximum number of Machines that are reconciled at the same time.
const PARALLEL: usize = 8;

/// The watches of Machines and Clusters, and the queue of Machines.
pub(crate) struct Machines {
    queue: Queue<Key>,
    machines: Informer<Machine>,
    reconciler: Arc<Reconciler>,
}

/// Health of the watches.
pub(crate) struct Checks {
    version: Check,
    machines: Check,
    clusters: Check,
}

impl Checks {
    pub(crate) fn of(ready: &Health) -> Self {
        Self {
            version: ready.check("cluster-api-version", "not checked yet"),
            machines: ready.check("machines", "not started yet"),
            clusters: ready.check("clusters", "not started yet"),
        }
    }
}

impl Machines {
    /// Starts the watches. None if `stop` is cancelled before Cluster API is served.
    pub(crate) async fn start(
        client: &Client,
        vms: &ApiResource,
        checks: Checks,
        metrics: &Metrics,
        stop: &CancellationToken,
    ) -> Option<Self> {
        let version =
            api_versions::wait_for_version(client, CLUSTER_GROUP, newest_version, &checks.version, stop)
                .await?;
        let (resource, queue) = (machine_resource(version), Queue::<Key>::default());
        let machines =
            watch_machines(Api::all_with(client.clone(), &resource), &queue, checks.machines, stop);
        let clusters = Api::all_with(client.clone(), &cluster_resource(version));
        let clusters = watch_clusters(clusters, &machines, &queue, checks.clusters, stop);
        let reconciler = Reconciler {
            events: Events::new(client.clone(), "vm-operator-shim"),
            client: client.clone(),
            vms: vms.clone(),
            resource,
            machines: machines.clone(),
            clusters,
            metrics: metrics.clone(),
        };
        Some(Self { queue, machines, reconciler: Arc::new(reconciler) })
    }

    /// Returns when all Machines and Clusters are known.
    pub(crate) async fn synced(&self) {
        tokio::join!(self.machines.synced(), self.reconciler.clusters.synced());
    }

    /// Queues the Machine whose node has the name of a VM that was deleted: it gets another one.
    pub(crate) fn vm_deleted(&self, vm: &Key) {
        let of_vm = |machine: &Machine| {
            machine.metadata.namespace.as_ref() == Some(&vm.namespace)
                && machine.node_name() == Some(vm.name.as_str())
        };
        if let Some(machine) = self.machines.find(of_vm) {
            self.queue.push(Key::of(&*machine));
        }
    }

    /// Reconciles while this process leads.
    pub(crate) async fn run(&self, stop: CancellationToken) {
        let worker = self.queue.worker("machines");
        push_all(&self.machines, &self.queue, |_| true);
        let reconciler = self.reconciler.clone();
        worker
            .run(PARALLEL, Retry::default(), stop, move |key| {
                let reconciler = reconciler.clone();
                async move { reconciler.reconcile(&key).await }
            })
            .await;
    }
}

fn push_all(machines: &Informer<Machine>, queue: &Queue<Key>, selected: impl Fn(&Machine) -> bool) {
    for machine in machines.list() {
        if selected(&machine) {
            queue.push(Key::of(&*machine));
        }
    }
}

fn watch_machines(
    api: Api<Machine>,
    queue: &Queue<Key>,
    check: Check,
    stop: &CancellationToken,
) -> Informer<Machine> {
    let (changed, connected) = (queue.clone(), queue.clone());
    Informer::<Machine>::builder("Machines", api)
        .trim(machine::trim)
        .on_change(move |change| changed.push(change.key.clone()))
        .on_reconnect(move || connected.retry_now())
        .start(check, stop.clone())
}

/// Watches the Clusters for their label with the cluster ID. A change queues the Machines of the cluster.
fn watch_clusters(
    api: Api<DynamicObject>,
    machines: &Informer<Machine>,
    queue: &Queue<Key>,
    check: Check,
    stop: &CancellationToken,
) -> Informer<DynamicObject> {
    let (machines, queue) = (machines.clone(), queue.clone());
    let changed = move |change: &Change<'_, DynamicObject>| {
        let labels = |cluster: &Arc<DynamicObject>| cluster.metadata.labels.clone();
        if change.old.map(labels) != change.new.map(labels) {
            push_all(&machines, &queue, |machine| machine.cluster() == *change.key);
        }
    };
    Informer::<DynamicObject>::builder("Clusters", api)
        .metadata_only()
        .trim(|cluster| {
            let labels = only(cluster.metadata.labels.take(), LABEL_CLUSTER_ID);
            cluster.metadata = identity(&mut cluster.metadata);
            cluster.metadata.labels = labels;
        })
        .on_change(changed)
        .start(check, stop.clone())
}
