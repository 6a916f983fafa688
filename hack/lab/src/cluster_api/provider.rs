//! The infrastructure provider: a VM under libvirt for each `LabMachine`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use kube::api::{Api, DynamicObject, Patch, PatchParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Client, ResourceExt};
use kube_kit::health::Health;
use kube_kit::informer::{Informer, Key};
use kube_kit::queue::{NextAction, Queue, Retry};
use serde_json::{Value, json};
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;

use super::guest::CLUSTER;
use crate::cluster::KubeletFiles;
use crate::ready::Ready;
use crate::run::Run;
use crate::state::{ClusterApi, Component, Guest, State, VmRecord};
use crate::vm::{self, Payload};
use crate::{infra, kubeconfig};

/// API group and version of the provider's kinds.
pub(super) const GROUP: &str = "infrastructure.lab.nestor.dev";
pub(super) const VERSION: &str = "v1alpha1";
/// The component, and the verb that runs it.
const COMPONENT: &str = "cluster-api-provider";
/// While it is set, the VM may exist.
const FINALIZER: &str = "infrastructure.lab.nestor.dev/vm";
/// VMs that boot or stop at the same time.
const PARALLEL: usize = 8;
/// A VM waits for the Machine, for a port or for libvirt.
const RETRY: Retry = Retry { first: Duration::from_millis(500), longest: Duration::from_secs(5) };

/// Arguments of the component.
#[derive(Debug, Clone, clap::Args)]
pub struct ProviderOptions {
    /// Unix socket that exists while the provider runs.
    #[arg(long)]
    ready: PathBuf,
}

/// Starts the component.
pub(super) async fn start(run: &Run) -> Result<()> {
    let ready = run.socket_dir().join("cluster-api-provider.sock");
    let program = std::env::current_exe().context("cannot find the path of this program")?;
    let argv = vec![
        program.display().to_string(),
        format!("--name={}", run.name()),
        COMPONENT.to_owned(),
        format!("--ready={}", ready.display()),
    ];
    let component = Component {
        argv,
        env: Default::default(),
        ready: Ready::Socket(ready),
        http: None,
        grace: 3,
        driver: None,
    };
    run.launch(COMPONENT, component).await
}

/// What a reconcile uses.
struct Provider {
    run: Run,
    client: Client,
    informer: Informer<DynamicObject>,
}

/// Makes VMs until the process is stopped.
pub async fn provide(run: &Run, options: &ProviderOptions) -> Result<()> {
    let management = run.state()?.management.context("no management cluster")?;
    let client = kubeconfig::client(&management.kubeconfig).await?;
    let (queue, health, stop) = (Queue::<Key>::default(), Health::default(), CancellationToken::new());
    let worker = queue.worker("lab-machines");
    let resource = machine_resource();
    let informer =
        Informer::<DynamicObject>::builder("LabMachines", Api::all_with(client.clone(), &resource))
            .on_change(move |change| queue.push(change.key.clone()))
            .start(health.check("lab-machines", "not started yet"), stop.clone());
    informer.synced().await;
    let _ready = UnixListener::bind(&options.ready)
        .with_context(|| format!("cannot make the socket {}", options.ready.display()))?;
    let provider = Arc::new(Provider { run: run.clone(), client, informer });
    worker
        .run(PARALLEL, RETRY, stop, |key| {
            let provider = provider.clone();
            async move { provider.reconcile(&key).await.map_err(|error| format!("{error:#}")) }
        })
        .await;
    Ok(())
}

fn machine_resource() -> ApiResource {
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(GROUP, VERSION, "LabMachine"), "labmachines")
}

impl Provider {
    async fn reconcile(&self, key: &Key) -> Result<NextAction> {
        let Some(machine) = self.informer.get(key) else { return Ok(NextAction::AwaitChange) };
        if machine.metadata.deletion_timestamp.is_some() {
            self.remove(&machine).await?;
        } else if machine.data["status"]["initialization"]["provisioned"] != json!(true)
            && let Some(owner) = machine.owner_references().iter().find(|owner| owner.kind == "Machine")
        {
            self.make(&machine, &owner.name).await?;
        }
        Ok(NextAction::AwaitChange)
    }

    fn api(&self, machine: &DynamicObject) -> Api<DynamicObject> {
        let namespace = machine.namespace().unwrap_or_default();
        Api::namespaced_with(self.client.clone(), &namespace, &machine_resource())
    }

    async fn remove(&self, machine: &DynamicObject) -> Result<()> {
        vm::remove(&self.run, &machine.name_any()).await?;
        self.patch(machine, json!({"metadata": {"finalizers": null}})).await
    }

    async fn patch(&self, machine: &DynamicObject, patch: Value) -> Result<()> {
        self.api(machine).patch(&machine.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await?;
        Ok(())
    }

    async fn make(&self, machine: &DynamicObject, owner: &str) -> Result<()> {
        let name = machine.name_any();
        let machines = GroupVersionKind::gvk("cluster.x-k8s.io", "v1beta2", "Machine");
        let machines = ApiResource::from_gvk_with_plural(&machines, "machines");
        let namespace = machine.namespace().unwrap_or_default();
        let machines: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), &namespace, &machines);
        let wanted = machines.get(owner).await?.data["spec"]["failureDomain"].as_str().map(str::to_owned);
        self.patch(machine, json!({"metadata": {"finalizers": [FINALIZER]}})).await?;
        let record = self.record(&name, wanted)?;
        let state = self.run.state()?;
        if vm::process(&self.run, &name, &record).is_none() {
            self.boot(&state, &name, &record).await?;
        }
        self.patch(machine, json!({"spec": {"providerID": vm::provider_id(&record)}})).await?;
        let status = json!({"initialization": {"provisioned": true}, "failureDomain": record.zone});
        let patch = Patch::Merge(json!({"status": status}));
        self.api(machine).patch_status(&name, &PatchParams::default(), &patch).await?;
        self.initialize_node(&state, name)
    }

    /// The VM's record in the state, which is made if it has none: with a free port, in the wanted zone or that with the
    /// fewest VMs.
    fn record(&self, name: &str, zone: Option<String>) -> Result<VmRecord> {
        let made = |state: &mut State| {
            if let Some(known) = state.vms.get(name) {
                return Ok(known.clone());
            }
            let planned = state.cluster_api.as_ref().context("a lab without Cluster API")?;
            let is_free = |port: &&u16| !state.vms.values().any(|vm| vm.kubelet_port == **port);
            let port = planned.kubelet_ports.iter().find(is_free).context("too many VMs at the same time")?;
            let zone = zone.unwrap_or_else(|| emptiest_zone(state).to_owned());
            let record = vm::record(CLUSTER, &zone, &planned.accelerator, *port);
            state.vms.insert(name.to_owned(), record.clone());
            Ok(record)
        };
        self.run.update(made)?
    }

    async fn boot(&self, state: &State, name: &str, record: &VmRecord) -> Result<()> {
        let ClusterApi { image, .. } = state.cluster_api.as_ref().context("a lab without Cluster API")?;
        let kubelet = KubeletFiles::of_running(&guest(state)?.cluster, name)?;
        let plugin = state.binaries.join("gc-csi-node");
        let payload = Payload::Plugin { program: &plugin, is_kubevirt: false };
        vm::boot(&self.run, name, record, image, &kubelet, payload).await
    }

    /// Initializes the VM's node when it joins. The VM may be removed before.
    fn initialize_node(&self, state: &State, name: String) -> Result<()> {
        let (run, kubeconfig) = (self.run.clone(), guest(state)?.cluster.kubeconfig.clone());
        tokio::spawn(async move {
            let initialized = async {
                let client = kubeconfig::client(&kubeconfig).await?;
                vm::wait_for_node(&run, &client, &name).await
            };
            if let Err(error) = initialized.await {
                eprintln!("node {name} did not become ready: {error:#}");
            }
        });
        Ok(())
    }
}

fn guest(state: &State) -> Result<&Guest> {
    state.guests.get(CLUSTER).context("the lab has no guest g1")
}

fn emptiest_zone(state: &State) -> &'static str {
    let vms = |zone: &&&str| state.vms.values().filter(|vm| vm.zone == **zone).count();
    infra::ZONES.iter().min_by_key(vms).copied().unwrap_or_default()
}
