//! Wiring: flags, and the start of all components.

use std::sync::Arc;

use anyhow::Context;
use crds::names::MANAGEMENT_DRIVER;
use csi::identity::Identity;
use csi::metrics::CallMetrics;
use csi::proto::controller_server::ControllerServer;
use csi::proto::identity_server::IdentityServer;
use csi::proto::plugin_capability::service::Type as Service;
use csi::proto::plugin_capability::volume_expansion::Type as Expansion;
use csi::self_check::SocketCheck;
use csi::server::{self, EndpointArgs};
use futures::FutureExt;
use futures::future::OptionFuture;
use infra_api::InfraArgs;
use kube_kit::client::{KubeconfigArgs, wait_until_reachable};
use kube_kit::health::Health;
use kube_kit::http::{self, HttpArgs};
use kube_kit::lease::LeaseArgs;
use process_kit::concurrent;
use prometheus_client::registry::Registry;
use tokio::sync::Notify;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::service::Routes;

use crate::adoptions::Adoptions;
use crate::attachment::AttachController;
use crate::attachment::fence::Fence;
use crate::budgets::{Budgets, VolumeOwners};
use crate::capacity::Capacity;
use crate::claims::ClaimController;
use crate::clients::Clients;
use crate::cluster::Cluster;
use crate::controller::Controller;
use crate::controller::limits::DefaultLimits;
use crate::guest_credentials::{GuestCredentialArgs, GuestCredentials};
use crate::infra::{Certificates, InfraEvent, Rest, StorageInfra, monitor, subscribe};
use crate::nodes::{NodeArgs, Nodes};
use crate::ownership;
use crate::pools::StoragePools;
use crate::repair::{self, Repair};
use crate::traces::Traces;
use crate::vm_api::{VmApi, VmApiArgs};
use crate::vm_parts::{RunningVmParts, VmParts};

/// Flags of `mgmt-csi`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    csi: EndpointArgs,
    #[command(flatten)]
    cluster: KubeconfigArgs,
    #[command(flatten)]
    infra: InfraArgs,
    /// Maximum number of concurrent requests to the management API for VolumeAttachments. Calls to the storage infra are
    /// limited per VM instead.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..))]
    parallel_attachments: u16,
    /// What to do with a VM whose guest node has the out-of-service taint and that does not release a disk to detach.
    #[arg(long, value_enum, default_value_t = Fence::PowerOff)]
    fence: Fence,
    /// Serve ControllerPublishVolume, so that pods of the management cluster can use volumes. Requires mgmt-csi-node and
    /// storage-infra on the hosts of these pods, and csi-attacher.
    #[arg(long)]
    node_service: bool,
    #[command(flatten)]
    vm_api: VmApiArgs,
    #[command(flatten)]
    limits: DefaultLimits,
    #[command(flatten)]
    ownership: ownership::OwnershipArgs,
    #[command(flatten)]
    nodes: NodeArgs,
    #[command(flatten)]
    repair: repair::Options,
    /// Namespace in which to publish the free capacity as CSIStorageCapacity objects. Without it, none are published.
    #[arg(long, value_name = "NAMESPACE")]
    capacity_namespace: Option<String>,
    #[command(flatten)]
    guest_credentials: GuestCredentialArgs,
    #[command(flatten)]
    http: HttpArgs,
    #[command(flatten, next_help_heading = "Leader election")]
    lease: LeaseArgs,
}

/// What a component does on an event of the infra.
type OnInfraEvent = Box<dyn Fn(InfraEvent<'_>)>;

/// Runs the driver until `stop`, or until a component fails.
pub async fn run(args: Args, stop: CancellationToken) -> anyhow::Result<()> {
    let infra_client = args.infra.client()?;
    let infra: Arc<dyn StorageInfra> = Arc::new(Rest::new(infra_client.clone()));
    let client = args.cluster.connect("mgmt-csi").await?;

    let mut registry = Registry::with_prefix("nestor_mgmt_csi");
    let calls = CallMetrics::register(&mut registry);
    let certificates = Certificates::register(&mut registry);
    let vm_parts = VmParts {
        attach: AttachController::new(
            &mut registry,
            args.parallel_attachments.into(),
            args.fence,
            args.ownership,
        ),
        repair: Repair::new(&mut registry, args.repair),
        nodes: Nodes::new(&mut registry, args.nodes),
    };
    let election = args.lease.election("mgmt-csi", &client, args.cluster.path(), &mut registry);
    let election = election.map_err(anyhow::Error::msg)?;
    let cluster = Cluster::new(&client);
    let claims = ClaimController::new(&mut registry, &cluster);
    let owners = VolumeOwners::new(&cluster);
    let adoptions = Adoptions::new(&cluster);
    let credentials = GuestCredentials::new(&client, args.guest_credentials);
    let (capacity, budgets, pools) = (Capacity::default(), Budgets::default(), StoragePools::default());
    let caches = (cluster.claims(), cluster.volumes());
    let traces = Traces::new(&client);
    let cluster = adoptions.watch(owners.watch(traces.watch(claims.watch(vm_parts.attach.watch(cluster)))));
    let (alive, ready) = (Health::default(), Health::default());
    // Fails until all other checks are registered; before that, those registered may all pass.
    let wired = ready.check("start-up", "not complete yet");
    let reachable = ready.check("management cluster", "not checked yet");
    let infra_answers = ready.check("storage infra", "not checked yet");

    let self_check = SocketCheck::new(&alive, MANAGEMENT_DRIVER, &args.csi.endpoint);
    // The driver serves calls at once, even if a dependency is down: each call returns its own error.
    let identity = Identity::new(MANAGEMENT_DRIVER, alive.clone(), ready.clone())
        .with_service(Service::ControllerService)
        .with_expansion(Expansion::Online);
    let controller =
        Controller::new(infra.clone(), client.clone(), caches.clone(), args.limits.into(), traces)
            .with_hosts(args.node_service);
    let routes = Routes::new(IdentityServer::new(identity)).add_service(ControllerServer::new(controller));

    let infra_back = Notify::new();
    let csi = async {
        let _all_stop = stop_with_me(&stop);
        server::serve(&args.csi.endpoint, routes, calls, stop.clone()).await.map_err(anyhow::Error::from)
    };
    let access = args.http.access(&client);
    let http = async {
        let Some(address) = args.http.address() else { return Ok(()) };
        let _all_stop = stop_with_me(&stop);
        http::serve(address, alive, ready.clone(), registry, access, stop.clone())
            .await
            .with_context(|| format!("failed to serve health and metrics on {address}"))
    };
    let work = async {
        if !wait_until_reachable(&client, "management", &reachable, &stop).await {
            return Ok(());
        }
        cluster.start(&ready, &stop);
        let Some(vm_api) = args.vm_api.decide(&client, &ready, &stop).await else { return Ok(()) };
        let vm_parts = (vm_api == VmApi::VmOperator).then_some(vm_parts);
        let mut on_infra_event: Vec<OnInfraEvent> = vec![
            Box::new(claims.on_infra_event()),
            Box::new(capacity.on_infra_event()),
            Box::new(budgets.on_infra_event()),
            Box::new(pools.on_infra_event()),
            Box::new(owners.on_infra_event()),
        ];
        if let Some(parts) = &vm_parts {
            on_infra_event.push(Box::new(parts.on_infra_event()));
        }
        let clients = Clients::new(client.clone(), infra.clone());
        let vm_parts = vm_parts
            .map(|parts| parts.start(clients.clone(), caches, claims.on_release(), &ready, stop.clone()));
        let capacity = args
            .capacity_namespace
            .as_deref()
            .map(|namespace| capacity.start(client.clone(), namespace, infra.clone(), &ready, stop.clone()));
        let budgets = budgets.start(client.clone(), infra.clone(), &ready, stop.clone());
        let pools = pools.start(client.clone(), infra.clone(), &ready, stop.clone());
        let leading = async {
            let vm_parts = OptionFuture::from(vm_parts).await;
            let is_stopped = matches!(vm_parts, Some(None));
            if is_stopped {
                return;
            }
            let vm_parts = vm_parts.flatten();
            let attachments = vm_parts.as_ref().map(RunningVmParts::attachments);
            // Reconcilers that write: they run in the leader only.
            let term = || async {
                let publish = async {
                    if let Some(capacity) = &capacity {
                        capacity.run().await;
                    }
                };
                let attach = async {
                    if let Some(parts) = &vm_parts {
                        parts.run(&infra_back, &stop).await;
                    }
                };
                let claims = claims.run(&clients, attachments.as_ref(), stop.clone());
                let owners = owners.run(&*infra, stop.clone());
                let credentials = credentials.run(stop.clone());
                let adoptions = adoptions.run(&clients, stop.clone());
                let others = concurrent::all([
                    claims.boxed(),
                    publish.boxed(),
                    pools.run().boxed(),
                    budgets.run().boxed(),
                    owners.boxed(),
                    credentials.boxed(),
                    adoptions.boxed(),
                ]);
                tokio::join!(attach, others);
            };
            election.lead(&ready, &stop, term).await;
        };
        let conditions = claims.refresh_conditions(infra.clone(), stop.clone());
        let events = subscribe(
            infra.clone(),
            |event| on_infra_event.iter().for_each(|handle| handle(event)),
            stop.clone(),
        );
        let outdated = async {
            let outdated = args.vm_api.watch(vm_api, &client, &stop).await;
            outdated.inspect_err(|_| stop.cancel())
        };
        // `biased` polls this last, once each of the others has started.
        let started = async { wired.pass() };
        let (_, _, _, outdated, ()) = tokio::join!(biased; leading, conditions, events, outdated, started);
        Ok(outdated?)
    };
    let watch_infra = monitor(infra.clone(), infra_answers, &infra_back, stop.clone());
    let watch_certificates = certificates.watch(&infra_client, stop.clone());
    let (csi, http, work, (), (), ()) =
        tokio::join!(csi, http, work, watch_infra, watch_certificates, self_check.run(stop.clone()));
    csi.and(http).and(work)
}

/// Stops all components when the guard is dropped.
fn stop_with_me(stop: &CancellationToken) -> DropGuard {
    stop.clone().drop_guard()
}
