//! CSI Controller service of the guest driver: flags, wiring, and one file per kind of call.

mod capacity;
mod create;
mod delete;
mod errors;
mod expand;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod legacy;
mod list;
mod modify;
mod parameters;
mod pinned;
mod publish;
mod service;
mod snapshots;
#[cfg(any(test, fuzzing))]
mod testing;

use std::iter;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use crds::names::{self, ClusterId};
use csi::identity::Identity;
use csi::locks::VolumeLocks;
use csi::metrics::CallMetrics;
use csi::proto::controller_server::ControllerServer;
use csi::proto::identity_server::IdentityServer;
use csi::proto::plugin_capability::service::Type as Service;
use csi::proto::plugin_capability::volume_expansion::Type as Expansion;
use csi::self_check::SocketCheck;
use csi::server::{EndpointArgs, LegacyArgs};
use kube_kit::health::Health;
use kube_kit::http::HttpArgs;
use kube_kit::lease::LeaseArgs;
use kube_kit::{api_versions, client, http, token};
use process_kit::{duration, supervise};
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;

use crate::credential::{self, Credential, CredentialArgs};
use crate::guest::{Guest, Scope};
use crate::management::{ClusterOwner, GuestDeletion, GuestIdentity, Management, OptionalApis, ServedApis};
use crate::reconcile::{self, Reconcilers};
use crate::vm_operator::{VmApiArg, VmOperator, VmOperatorArg, choose_api};

/// Flags of the `gc-csi` program.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    csi: EndpointArgs,
    /// Kubeconfig of the guest cluster. [default: the pod's service account]
    #[arg(long, value_name = "FILE")]
    guest_kubeconfig: Option<PathBuf>,
    /// Kubeconfig of the management cluster, with this guest's credentials.
    #[arg(long, value_name = "FILE")]
    management_kubeconfig: PathBuf,
    #[command(flatten)]
    credential: CredentialArgs,
    /// Namespace of this guest in the management cluster.
    #[arg(long, value_name = "NAMESPACE", value_parser = dns_label)]
    management_namespace: String,
    /// ID of this guest cluster: its UID, or another label value that is unique among the guests.
    #[arg(long, value_name = "ID")]
    cluster_id: ClusterId,
    /// Name prefix of the PersistentVolumeClaims that gc-csi creates in the management cluster.
    #[arg(long, value_name = "PREFIX", default_value = "pvc", value_parser = prefix)]
    volume_prefix: String,
    /// Action when the guest StorageClass and the management StorageClass have different reclaim policies.
    #[arg(long, value_enum, default_value_t = OnMismatch::Refuse)]
    reclaim_policy_mismatch: OnMismatch,
    /// Namespace of the management cluster in which mgmt-csi publishes CSIStorageCapacity objects. Without it,
    /// GetCapacity is not served.
    #[arg(long, value_name = "NAMESPACE", value_parser = dns_label)]
    capacity_namespace: Option<String>,
    /// API of this guest's VMs in the management cluster. `auto` selects the one that is served, and refuses to choose if both
    /// are.
    #[arg(long, value_enum, default_value_t = VmApiArg::Auto)]
    vm_api: VmApiArg,
    /// VM Operator of the management cluster, if its API is `vm-operator`. `auto` selects the shim if volumeattachments.nestor.dev is served.
    #[arg(long, value_enum, default_value_t = VmOperatorArg::Auto)]
    vm_operator: VmOperatorArg,
    /// Announce topology support, so that volumes are placed in zones that their pods can reach. Requires `gc-csi-node`
    /// with --topology or --zone on every node: csi-provisioner then creates no volume for a node without a zone.
    #[arg(long)]
    topology: bool,
    #[command(flatten)]
    guest_deletion: GuestDeletion,
    #[command(flatten)]
    legacy: LegacyArgs,
    /// Timeout of a call that has no deadline.
    #[arg(long, value_name = "DURATION", default_value = "15s", value_parser = duration::parse_timeout)]
    default_timeout: Duration,
    #[command(flatten)]
    http: HttpArgs,
    #[command(flatten)]
    sync: reconcile::Options,
    #[command(flatten, next_help_heading = "Leader election")]
    lease: LeaseArgs,
}

/// Action when reclaim policies differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum OnMismatch {
    /// Refuse to create the volume.
    Refuse,
    /// Create the volume, and log and report a warning Event on the guest's PersistentVolumeClaim.
    Warn,
}

fn dns_label(text: &str) -> Result<String, String> {
    let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if text.is_empty()
        || text.len() > names::MAX_LABEL
        || !text.chars().all(legal)
        || text.starts_with('-')
        || text.ends_with('-')
    {
        return Err("not a DNS label: use 1 to 63 lower-case letters, digits or '-', and start and end with a letter \
            or digit".to_owned());
    }
    Ok(text.to_owned())
}

/// Parses a name prefix that is short enough for the hash that follows it.
fn prefix(text: &str) -> Result<String, String> {
    if text.len() > 30 { Err("longer than 30 characters".to_owned()) } else { dns_label(text) }
}

/// Runs the controller plugin until `stop`.
pub async fn run(args: Args, stop: CancellationToken) -> anyhow::Result<()> {
    let (alive, ready) = (Health::default(), Health::default());
    let mut registry = Registry::with_prefix("nestor_gc_csi");
    let calls = CallMetrics::register(&mut registry);
    let reconcilers = Reconcilers::new(&mut registry);
    let expiry = credential::Expiry::register(&mut registry);

    let guest_client =
        client::connect("guest", "--guest-kubeconfig", args.guest_kubeconfig.as_deref(), "gc-csi").await?;
    let management_client =
        client::connect("management", "--management-kubeconfig", Some(&args.management_kubeconfig), "gc-csi")
            .await?;
    let kubeconfig = args.guest_kubeconfig.as_deref();
    let election = args.lease.election("gc-csi-controller", &guest_client, kubeconfig, &mut registry);
    let election = election.map_err(anyhow::Error::msg)?;
    // Fails until all other checks are registered: a set of checks that is not complete yet may pass.
    let startup = ready.check("start-up", "not complete yet");
    let api_checks =
        ["guest", "management"].map(|cluster| ready.check(format!("{cluster} cluster"), "not checked yet"));
    if let Some(address) = args.http.address() {
        let access = args.http.access(&guest_client);
        let serving = http::serve(address, alive.clone(), ready.clone(), registry, access, stop.clone());
        supervise::worker("health and metrics", async move {
            if let Err(error) = serving.await {
                supervise::fail(format!("cannot serve health and metrics on {address}: {error}"));
            }
        });
    }

    let clients = (guest_client.clone(), management_client.clone());
    let credentials = token::credentials(&args.management_kubeconfig).await?;
    let credential = Credential::new(args.credential, credentials, clients, expiry, &ready);
    supervise::background("management credential", stop.clone(), credential.run(stop.clone()));

    let identity = |driver: &str| {
        let identity = Identity::new(driver, alive.clone(), ready.clone())
            .with_service(Service::ControllerService)
            .with_expansion(Expansion::Online);
        match args.topology {
            true => identity.with_service(Service::VolumeAccessibilityConstraints),
            false => identity,
        }
    };
    for (client, cluster, check) in
        [(&guest_client, "guest", &api_checks[0]), (&management_client, "management", &api_checks[1])]
    {
        if !client::wait_until_reachable(client, cluster, check, &stop).await {
            return Ok(());
        }
    }
    let api_check = ready.check("API of VirtualMachine", "not checked yet");
    let choosing = api_versions::wait_for_groups(
        &management_client,
        |served| choose_api(args.vm_api, served),
        &api_check,
        &stop,
    );
    let Some(vm_api) = choosing.await else { return Ok(()) };
    let optional = OptionalApis::discover(&management_client, args.capacity_namespace, &ready, &stop).await;
    let Some(optional) = optional else { return Ok(()) };
    let detecting = VmOperator::detect(args.vm_operator, vm_api, &management_client, &ready, &stop);
    let Some(vm_operator) = detecting.await else { return Ok(()) };
    if args.topology && vm_operator == VmOperator::KubeVirt {
        tracing::warn!(
            "--topology is set, but VMs of KubeVirt have no zone: gc-csi-node with --topology registers only once another program has \
             set the label topology.kubernetes.io/zone of its Node; else leave it out on both sides"
        );
    }
    tracing::info!(?vm_api, ?vm_operator, namespace = args.management_namespace, cluster = %args.cluster_id, "connected to the management cluster");

    let (volumes, claims) = (reconcilers.queues().clone(), reconcilers.queues().clone());
    let scope = Scope { drivers: legacy::drivers(&args.legacy), claim_labels: args.sync.labels.clone() };
    let guest = Guest::start(
        &guest_client,
        scope,
        &ready,
        &stop,
        move |handle| volumes.push_volume(handle),
        move |claim| claims.push_deleted_guest_claim(claim),
    );
    let guest_identity = GuestIdentity {
        namespace: args.management_namespace,
        cluster: args.cluster_id,
        prefix: args.volume_prefix,
    };
    let queues = reconcilers.queues().clone();
    let cluster_owner = ClusterOwner::start(
        &management_client,
        &guest_identity,
        args.guest_deletion,
        &ready,
        &stop,
        move || {
            queues.push_all_owner_refs();
        },
    );
    let Some(cluster_owner) = cluster_owner.await else { return Ok(()) };
    let handlers = reconcilers.queues().handlers();
    let served = ServedApis { vm_api, vm_operator, optional: &optional };
    let management =
        Management::start(&management_client, guest_identity, served, cluster_owner, &ready, &stop, handlers);
    let (locks, pace) = (VolumeLocks::default(), reconcilers.pace().clone());
    let reconcilers =
        reconcilers.start(guest.clone(), management.clone(), args.sync, locks.clone(), &ready, stop.clone());
    let k8s_attachments = reconcilers.k8s_attachments();
    let (electing, stopping) = (ready.clone(), stop.clone());
    let reconciling = supervise::background("reconcilers", stop.clone(), async move {
        election.lead(&electing, &stopping, || reconcilers.run()).await;
    });

    let service = service::Controller::new(
        management,
        guest,
        k8s_attachments,
        args.reclaim_policy_mismatch == OnMismatch::Refuse,
        args.default_timeout,
        locks,
        pace,
    );
    startup.pass();
    for (driver, endpoint) in iter::once((names::GUEST_DRIVER, &args.csi.endpoint)).chain(args.legacy.get()) {
        let check = SocketCheck::new(&alive, driver, endpoint);
        supervise::background(format!("self-check of {driver}"), stop.clone(), check.run(stop.clone()));
    }
    let routes = tonic::service::Routes::new(IdentityServer::new(identity(names::GUEST_DRIVER)))
        .add_service(ControllerServer::new(service.clone()));
    let own = csi::server::serve(&args.csi.endpoint, routes, calls.clone(), stop.clone());
    let legacy = legacy::serve(&args.legacy, identity, &service, calls, stop.clone());
    tokio::try_join!(own, legacy)?;
    stop.cancel();
    reconciling.await.context("the reconcilers failed")
}
