//! Wiring: flags, watches, and the queue of machines.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use crds::{
    VIRTUAL_MACHINE_GROUP, VolumeAttachment, newest_virtual_machine_version, virtual_machine_resource,
};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Api, Client};
use kube_kit::client::connect;
use kube_kit::events::Events;
use kube_kit::fair::{Gate, Limits};
use kube_kit::health::{Check, Health};
use kube_kit::http;
use kube_kit::informer::{Change, Informer, Key};
use kube_kit::latest::Latest;
use kube_kit::lean::Metadata;
use kube_kit::lease::{Election, LeaseArgs};
use kube_kit::queue::{Queue, Retry};
use kube_kit::versions;
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;

use crate::absent::Absent;
use crate::allowance::{Allowance, Rate};
use crate::attachments::{self, Attachments};
use crate::machine::{self, Machine};
use crate::reconcile::{Metrics, Reconciler};

/// How many machines are worked on at once.
const PARALLEL: usize = 32;

/// How many requests are made at once: in all, for the VMs of one namespace, and for one VM.
const REQUESTS: Limits = Limits { total: 32, namespace: 16, object: 4 };

/// A claim, of which only its existence counts.
type Claim = Metadata<PersistentVolumeClaim>;

/// Flags of `vm-operator-shim`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Kubeconfig of the management cluster. Without it, the pod's service account is used.
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Serve /healthz, /readyz and /metrics here.
    #[arg(long, value_name = "ADDR:PORT")]
    http_listen: Option<SocketAddr>,
    #[command(flatten)]
    rate: Rate,
    #[command(flatten, next_help_heading = "Leader election")]
    lease: LeaseArgs,
}

/// Runs the shim until `stop`, or until a part of it fails.
pub async fn run(args: Args, stop: CancellationToken) -> anyhow::Result<()> {
    let client =
        connect("management", "--kubeconfig", args.kubeconfig.as_deref(), "vm-operator-shim").await?;
    let mut registry = Registry::with_prefix("nestor_vm_operator_shim");
    let metrics = Metrics::register(&mut registry);
    let election =
        args.lease.election("vm-operator-shim", &client, args.kubeconfig.as_deref(), &mut registry);
    let election = election.map_err(anyhow::Error::msg)?;
    let (alive, ready) = (Health::default(), Health::default());
    let checks = Checks {
        version: ready.check("version of VirtualMachine", "not asked yet"),
        machines: ready.check("watch of VirtualMachines", "not started yet"),
        attachments: ready.check("watch of VolumeAttachments", "not started yet"),
        claims: ready.check("watch of PersistentVolumeClaims", "not started yet"),
    };
    let parts = Parts { client, metrics, allowance: Allowance::new(args.rate) };
    let http = async {
        let Some(address) = args.http_listen else { return Ok(()) };
        let _all_stop = stop.clone().drop_guard();
        http::serve(address, alive, ready.clone(), registry, stop.clone())
            .await
            .with_context(|| format!("cannot serve health and metrics on {address}"))
    };
    let (http, ()) = tokio::join!(http, serve_machines(parts, checks, election, &ready, stop.clone()));
    http
}

struct Checks {
    version: Check,
    machines: Check,
    attachments: Check,
    claims: Check,
}

struct Parts {
    client: Client,
    metrics: Metrics,
    allowance: Allowance,
}

async fn serve_machines(
    Parts { client, metrics, allowance }: Parts,
    checks: Checks,
    election: Election,
    ready: &Health,
    stop: CancellationToken,
) {
    let version = versions::served(
        &client,
        VIRTUAL_MACHINE_GROUP,
        newest_virtual_machine_version,
        &checks.version,
        &stop,
    );
    let Some(version) = version.await else { return };
    let resource = virtual_machine_resource(version);
    let queue = Queue::<Key>::default();

    let builder = Informer::<Machine>::builder(
        format!("VirtualMachines ({version})"),
        Api::all_with(client.clone(), &resource),
    );
    let machines = Arc::new(Latest::new(builder.informer()));
    let handler = {
        let (machines, queue) = (machines.clone(), queue.clone());
        move |change: &Change<'_, Machine>| {
            machines.seen(change);
            queue.push(change.key.clone());
        }
    };
    // What was written may be gone without a change that says so: in a break of the watch, or with an older state of the
    // server.
    let look_at_all = || {
        let (machines, queue) = (machines.clone(), queue.clone());
        move || machines.informer().list().iter().for_each(|machine| queue.push(Key::of(&**machine)))
    };
    let back = queue.clone();
    builder
        .trim(machine::trim)
        .on_change(handler)
        .on_return(move || back.hurry())
        .on_read(look_at_all())
        .start(checks.machines, stop.clone());

    let builder = Informer::<VolumeAttachment>::builder("VolumeAttachments", Api::all(client.clone()));
    let informer = builder.informer();
    let attachments = Arc::new(Attachments::new(informer.clone()));
    let handler = {
        let (attachments, queue) = (attachments.clone(), queue.clone());
        move |change: &Change<'_, VolumeAttachment>| {
            for machine in attachments.seen(change) {
                queue.push(machine);
            }
        }
    };
    builder
        .trim(attachments::trim)
        .on_change(handler)
        .on_read(look_at_all())
        .start(checks.attachments, stop.clone());

    let absent = Arc::new(Absent::default());
    let claims = watch_claims(&client, &absent, &queue, checks.claims, &stop);

    // A disk must not be called gone because the attachments were not read yet, nor a claim.
    tokio::select! {
        () = stop.cancelled() => return,
        _ = async { tokio::join!(machines.informer().synced(), informer.synced(), claims.synced()) } => {}
    }
    tracing::info!(
        version,
        machines = machines.informer().len(),
        attachments = informer.len(),
        "serving machines"
    );
    let reconciler = Arc::new(Reconciler {
        events: Events::new(client.clone(), "vm-operator-shim"),
        client,
        resource,
        claims,
        absent,
        allowance,
        requests: Gate::new(REQUESTS),
        machines,
        attachments,
        gathering: Default::default(),
        metrics,
    });
    let term = || {
        let worker = queue.worker();
        for machine in reconciler.machines.informer().list() {
            queue.push(Key::of(&*machine));
        }
        worker.run_fair(PARALLEL, Retry::default(), stop.clone(), Key::clone, |key| {
            let reconciler = reconciler.clone();
            async move { reconciler.reconcile(&key).await }
        })
    };
    election.lead(ready, &stop, term).await;
}

/// Watches which claims there are. The machines that miss one are looked at when it comes.
fn watch_claims(
    client: &Client,
    absent: &Arc<Absent>,
    queue: &Queue<Key>,
    check: Check,
    stop: &CancellationToken,
) -> Informer<Claim> {
    let (absent, queue) = (absent.clone(), queue.clone());
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
                absent.waiting_for(change.key).into_iter().for_each(|machine| queue.push(machine));
            }
        })
        .start(check, stop.clone())
}
