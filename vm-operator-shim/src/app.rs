//! Wiring: flags, watches, and the queue of VMs.

use std::sync::Arc;

use anyhow::Context;
use crds::{
    VIRTUAL_MACHINE_GROUP, VolumeAttachment, newest_virtual_machine_version, virtual_machine_resource,
};
use futures::FutureExt;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::ApiResource;
use kube::{Api, Client};
use kube_kit::api_versions;
use kube_kit::client::KubeconfigArgs;
use kube_kit::events::Events;
use kube_kit::fair::{FairLimiter, Limits};
use kube_kit::health::{Check, Health};
use kube_kit::http::{self, HttpArgs};
use kube_kit::informer::{Change, Informer, Key};
use kube_kit::lease::{Election, LeaseArgs};
use kube_kit::mutation_cache::MutationCache;
use kube_kit::partial::Metadata;
use kube_kit::queue::{Queue, Retry};
use prometheus_client::registry::Registry;
use tokio::sync::SetOnce;
use tokio_util::sync::CancellationToken;

use crate::attach_limiter::{AttachLimiter, RateArgs};
use crate::attachments::{self, Attachments};
use crate::machines::{self, Machines};
use crate::missing_claims::MissingClaims;
use crate::reconcile::{Metrics, Reconciler};
use crate::vm::{self, Vm};

/// Maximum number of VMs that are reconciled at the same time.
const PARALLEL: usize = 32;

/// Maximum number of concurrent API requests: in total, per namespace and per VM.
const REQUESTS: Limits = Limits { total: 32, namespace: 16, object: 4 };

/// A claim, as metadata only: the shim checks its existence.
type Claim = Metadata<PersistentVolumeClaim>;

/// Flags of `vm-operator-shim`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    cluster: KubeconfigArgs,
    #[command(flatten)]
    http: HttpArgs,
    #[command(flatten)]
    rate: RateArgs,
    /// Create the VirtualMachines of guests whose VMs Cluster API makes, from its Machines. Their provider IDs must end with
    /// the UUID of the VM, and the Cluster must have the label nestor.dev/cluster-id.
    #[arg(long)]
    cluster_api: bool,
    #[command(flatten, next_help_heading = "Leader election")]
    lease: LeaseArgs,
}

/// Runs the shim until `stop`, or until a component fails.
pub async fn run(args: Args, stop: CancellationToken) -> anyhow::Result<()> {
    let client = args.cluster.connect("vm-operator-shim").await?;
    let mut registry = Registry::with_prefix("nestor_vm_operator_shim");
    let metrics = Metrics::register(&mut registry);
    let election = args.lease.election("vm-operator-shim", &client, args.cluster.path(), &mut registry);
    let election = election.map_err(anyhow::Error::msg)?;
    let (alive, ready) = (Health::default(), Health::default());
    let checks = Checks {
        version: ready.check("virtual-machine-version", "not checked yet"),
        vms: ready.check("virtual-machines", "not started yet"),
        attachments: ready.check("volume-attachments", "not started yet"),
        claims: ready.check("claims", "not started yet"),
        machines: args.cluster_api.then(|| machines::Checks::of(&ready)),
    };
    let access = args.http.access(&client);
    let components = Components { client, metrics, attach_limiter: AttachLimiter::new(args.rate) };
    let http = async {
        let Some(address) = args.http.address() else { return Ok(()) };
        let _all_stop = stop.clone().drop_guard();
        http::serve(address, alive, ready.clone(), registry, access, stop.clone())
            .await
            .with_context(|| format!("failed to serve health and metrics on {address}"))
    };
    let (http, ()) = tokio::join!(http, run_controller(components, checks, election, &ready, stop.clone()));
    http
}

struct Checks {
    version: Check,
    vms: Check,
    attachments: Check,
    claims: Check,
    /// None: no VirtualMachines are created.
    machines: Option<machines::Checks>,
}

struct Components {
    client: Client,
    metrics: Metrics,
    attach_limiter: AttachLimiter,
}

async fn run_controller(
    Components { client, metrics, attach_limiter }: Components,
    checks: Checks,
    election: Election,
    ready: &Health,
    stop: CancellationToken,
) {
    let version = api_versions::wait_for_version(
        &client,
        VIRTUAL_MACHINE_GROUP,
        newest_virtual_machine_version,
        &checks.version,
        &stop,
    );
    let Some(version) = version.await else { return };
    let resource = virtual_machine_resource(version);
    let queue = Queue::<Key>::default();
    let machines = Arc::new(SetOnce::<Machines>::new());
    let start_machines = start_machines(&client, &resource, checks.machines, &metrics, &machines, &stop);

    let builder = Informer::<Vm>::builder(
        format!("VirtualMachines ({version})"),
        Api::all_with(client.clone(), &resource),
    );
    let vms = Arc::new(MutationCache::new(builder.informer()));
    let handler = {
        let (vms, queue) = (vms.clone(), queue.clone());
        let machines = machines.clone();
        move |change: &Change<'_, Vm>| {
            vms.observe(change);
            queue.push(change.key.clone());
            if change.new.is_none()
                && let Some(machines) = machines.get()
            {
                machines.vm_deleted(change.key);
            }
        }
    };
    // After a relist, own writes may be lost without a change event: the watch was interrupted, or the API server was restored
    // to an older state.
    let requeue_all = || {
        let (vms, queue) = (vms.clone(), queue.clone());
        move || vms.informer().list().iter().for_each(|vm| queue.push(Key::of(&**vm)))
    };
    let queue_on_reconnect = queue.clone();
    builder
        .trim(vm::trim)
        .on_change(handler)
        .on_reconnect(move || queue_on_reconnect.retry_now())
        .on_relist(requeue_all())
        .start(checks.vms, stop.clone());

    let builder = Informer::<VolumeAttachment>::builder("VolumeAttachments", Api::all(client.clone()));
    let informer = builder.informer();
    let attachments = Arc::new(Attachments::new(informer.clone()));
    let handler = {
        let (attachments, queue) = (attachments.clone(), queue.clone());
        move |change: &Change<'_, VolumeAttachment>| {
            for vm in attachments.observe(change) {
                queue.push(vm);
            }
        }
    };
    builder
        .trim(attachments::trim)
        .on_change(handler)
        .on_relist(requeue_all())
        .start(checks.attachments, stop.clone());

    let missing_claims = Arc::new(MissingClaims::default());
    let claims = watch_claims(&client, &missing_claims, &queue, checks.claims, &stop);

    // Unsynced caches would show existing attachments and claims as missing.
    tokio::select! {
        () = stop.cancelled() => return,
        _ = async { tokio::join!(vms.informer().synced(), informer.synced(), claims.synced()) } => {}
    }
    tracing::info!(
        version,
        vms = vms.informer().len(),
        attachments = informer.len(),
        "reconciling VirtualMachines"
    );
    let reconciler = Arc::new(Reconciler {
        events: Events::new(client.clone(), "vm-operator-shim"),
        client: client.clone(),
        resource: resource.clone(),
        claims,
        missing_claims,
        attach_limiter,
        requests: FairLimiter::new(REQUESTS),
        vms,
        attachments,
        status_delay: Default::default(),
        metrics: metrics.clone(),
    });
    let term = || {
        let worker = queue.worker("virtual-machines");
        for vm in reconciler.vms.informer().list() {
            queue.push(Key::of(&*vm));
        }
        let vms = worker.run_fair(PARALLEL, Retry::default(), stop.clone(), Key::clone, |key| {
            let reconciler = reconciler.clone();
            async move { reconciler.reconcile(&key).await }
        });
        let machines = async {
            tokio::select! {
                () = stop.cancelled() => {}
                machines = machines.wait() => machines.run(stop.clone()).await,
            }
        };
        async { tokio::join!(vms, machines) }.map(drop)
    };
    tokio::join!(start_machines, election.lead(ready, &stop, term));
}

/// Starts the watches of Cluster API's objects, if they are wanted, and makes them known once they are synced. Cluster API may
/// be installed later.
async fn start_machines(
    client: &Client,
    vms: &ApiResource,
    checks: Option<machines::Checks>,
    metrics: &Metrics,
    known: &SetOnce<Machines>,
    stop: &CancellationToken,
) {
    let Some(checks) = checks else { return };
    let Some(machines) = Machines::start(client, vms, checks, metrics, stop).await else { return };
    tokio::select! {
        () = stop.cancelled() => {}
        () = machines.synced() => {
            // Nothing else sets it.
            let _ = known.set(machines);
        }
    }
}

/// Watches the claims. When a missing claim is created, the VMs that name it are requeued.
fn watch_claims(
    client: &Client,
    missing_claims: &Arc<MissingClaims>,
    queue: &Queue<Key>,
    check: Check,
    stop: &CancellationToken,
) -> Informer<Claim> {
    let (missing_claims, queue) = (missing_claims.clone(), queue.clone());
    Informer::<Claim>::builder("PersistentVolumeClaims", Api::all(client.clone()))
        .metadata_only()
        .trim(|claim| {
            let meta = std::mem::take(&mut claim.metadata);
            claim.metadata = ObjectMeta {
                name: meta.name,
                namespace: meta.namespace,
                resource_version: meta.resource_version,
                ..Default::default()
            };
        })
        .on_change(move |change| {
            if change.old.is_none() {
                missing_claims.waiting_for(change.key).into_iter().for_each(|vm| queue.push(vm));
            }
        })
        .start(check, stop.clone())
}
