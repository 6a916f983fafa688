//! Start of a lab: everything starts as soon as its dependencies are ready.

mod on_kubevirt;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};

use crate::cache::{self, BaseImage, KubeVirt, Kubernetes};
use crate::ceph::{self, Engine};
use crate::cluster::{self, ControlPlane, ControlPlanePlan};
use crate::deployed::{self, Deployment, Disks, MANAGEMENT, MANAGEMENT_NODE, Version};
use crate::host::{Host, Pool};
use crate::kubevirt::VmManager;
use crate::process::boot_id;
use crate::run::{Run, lock};
use crate::state::{Guest, State, VmRecord};
use crate::ui::Ui;
use crate::vm::network::Forwarded;
use crate::vm::{self, Payload, libvirtd};
use crate::{cluster_api, drivers, infra, kubeconfig, ports, virtual_machines};

/// The guest that all VMs belong to.
const VM_GUEST: &str = "g1";
/// The management namespace of guests that share one.
const ONE_NAMESPACE: &str = "guests";

/// What to start.
#[derive(Debug, Clone, clap::Args)]
pub struct UpOptions {
    /// Number of virtual machines, all nodes of guest g1.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(0..=16))]
    pub vms: u32,
    /// Number of guest clusters, named g1, g2 and so on.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=8))]
    pub guests: u32,
    /// Put all guests into one namespace of the management cluster, instead of one namespace each.
    #[arg(long)]
    pub one_namespace: bool,
    /// Number of replicas of each Nestor controller with its sidecars. Several replicas use leader election.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=5))]
    pub replicas: u32,
    /// Version of Kubernetes in all clusters. Others than the default are built first, which takes minutes.
    #[arg(long, value_name = "MINOR", default_value_t = Kubernetes::default())]
    pub kubernetes: Kubernetes,
    /// Storage engine of the pools. `rbd` starts a small Ceph cluster, and installs its Debian packages.
    #[arg(long, value_enum, default_value_t)]
    pub engine: Engine,
    /// Number of storage-infra servers. Several have their catalog in a PostgreSQL database; one of them is active.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=3), conflicts_with = "deployed")]
    pub infra_servers: u32,
    /// Number of hypervisor hosts. Two are two libvirt daemons, each with a network and a local pool of its own, and a pool that
    /// both reach; the first is in zone-a, the second in zone-b. The virtual machines are distributed over them.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=2),
        conflicts_with_all = ["deployed", "cluster_api", "engine"])]
    pub hosts: u8,
    /// Use the release build of Nestor.
    #[arg(long)]
    pub release: bool,
    /// Run Nestor in pods: install its charts with helm, and start one more virtual machine as a node of the management
    /// cluster.
    #[arg(long, conflicts_with = "replicas")]
    pub deployed: bool,
    /// With --deployed: install this commit or tag of Nestor instead of this tree.
    #[arg(long, value_name = "COMMIT", requires = "deployed")]
    pub version: Option<String>,
    /// Let Cluster API make the virtual machines: its core controllers, with an infrastructure provider of the lab. They are
    /// the workers of a MachineDeployment.
    #[arg(long, conflicts_with_all = ["deployed", "replicas"])]
    pub cluster_api: bool,
    /// What makes the virtual machines. With `kubevirt`, they are VirtualMachines of KubeVirt in the management cluster, whose
    /// node is this host. That cluster has a CSI driver of the lab beside mgmt-csi, and no VM Operator.
    #[arg(long, value_enum, default_value_t, value_name = "MANAGER")]
    pub vm_manager: VmManager,
}

impl Default for UpOptions {
    fn default() -> Self {
        Self {
            vms: 2,
            guests: 1,
            one_namespace: false,
            replicas: 1,
            kubernetes: Kubernetes::default(),
            engine: Engine::default(),
            infra_servers: 1,
            hosts: 1,
            release: false,
            deployed: false,
            version: None,
            cluster_api: false,
            vm_manager: VmManager::default(),
        }
    }
}

/// The built or cached inputs of a lab.
struct Built {
    tools: PathBuf,
    snapshot_definitions: PathBuf,
    image: BaseImage,
    binaries: PathBuf,
    deployment: Option<Deployment>,
    cluster_api: Option<cluster_api::Built>,
    kubevirt: Option<KubeVirt>,
}

/// A guest that is not started yet: its control plane, and its record in the state.
struct PlannedGuest {
    plane: ControlPlane,
    guest: Guest,
}

/// What is started.
struct Plan {
    management: ControlPlane,
    guests: Vec<PlannedGuest>,
    vms: Vec<(String, VmRecord)>,
    /// Ports of the kubelets of VMs that come later.
    kubelet_ports: Vec<u16>,
}

/// Starts a lab; returns when every component is ready.
pub async fn up(ui: &Ui, run: &Run, options: &UpOptions) -> Result<()> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "a lab mounts pools and runs virtual machines, which needs root: run `sudo --preserve-env cargo lab up`"
    );
    options.check()?;
    let _alone = lock(&run.dir().with_extension("lock"))?;
    if run.exists() {
        bail!(
            "a lab already exists at {}: `cargo lab status` shows it, `cargo lab down` takes it down",
            run.dir().display()
        );
    }
    let built = prepare(ui, options).await?;
    make_folders(run, options, &built)?;
    let plan = Plan::new(run, options, &built).await?;
    if let Some(kubevirt) = &built.kubevirt {
        on_kubevirt::start(ui, run, &built, kubevirt, &plan).await?;
        return run.update(|state| state.complete = true);
    }
    let disks = match &built.deployment {
        Some(deployment) => Some(Disks::build(ui, run, &built.tools, &deployment.versions()).await?),
        None => None,
    };
    // The VMs boot while the control planes start, because booting takes longest.
    futures::try_join!(
        start_infra(ui, run, &built, options, &plan, disks.as_ref()),
        start_management(ui, run, &built, &plan.management),
        futures::future::try_join_all(plan.guests.iter().map(|guest| start_guest(ui, run, &built, guest))),
    )?;
    match &built.deployment {
        Some(deployment) => deploy(ui, run, &plan, &deployment.installed).await?,
        None => start_system(ui, run, options.replicas, &plan).await?,
    }
    if options.cluster_api {
        cluster_api::start_workers(ui, run, &plan.guest(VM_GUEST)?.record(run)?, options.vms).await?;
    }
    run.update(|state| state.complete = true)
}

/// Builds or finds everything that is needed before the first process starts.
async fn prepare(ui: &Ui, options: &UpOptions) -> Result<Built> {
    let others = async {
        match options.engine {
            Engine::File => cache::packages::ensure(ui).await?,
            Engine::Rbd => cache::packages::ensure_ceph(ui).await?,
        }
        futures::try_join!(cache::snapshot_definitions(), cache::debian_root(ui), build(ui, options))
    };
    // Go needs no packages of Debian, and neither Go nor Rust keeps two cores busy all the time.
    let (tools, (snapshot_definitions, debian, binaries)) =
        futures::try_join!(cache::tools(ui, options.kubernetes), others)?;
    let image = cache::base_image(ui, &debian, &tools).await?;
    let cluster_api = match options.cluster_api {
        true => Some(cluster_api::prepare(ui).await?),
        false => None,
    };
    let kubevirt = match options.vm_manager {
        VmManager::Libvirt => None,
        VmManager::KubeVirt => {
            let arguments = vm::kernel_arguments(vm::accelerator(&image).await);
            Some(cache::kubevirt(ui, &image, arguments).await?)
        }
    };
    let built =
        Built { tools, snapshot_definitions, image, binaries, deployment: None, cluster_api, kubevirt };
    if !options.deployed {
        return Ok(built);
    }
    let current = Version::current(&built.binaries);
    let installed = match &options.version {
        Some(commit) => Version::of_commit(ui, commit, options.release).await?,
        None => current.clone(),
    };
    let binaries = installed.binaries.clone();
    let deployment = Some(Deployment { helm: cache::helm(ui).await?, installed, current });
    Ok(Built { binaries, deployment, ..built })
}

/// Builds the programs that the lab runs.
async fn build(ui: &Ui, options: &UpOptions) -> Result<PathBuf> {
    let libvirt = options.vm_manager == VmManager::Libvirt;
    if options.vms == 0 && libvirt && !options.deployed && !options.cluster_api {
        return cache::cargo::build_without_vms(ui, options.release).await;
    }
    cache::cargo::build(ui, options.release).await
}

fn make_folders(run: &Run, options: &UpOptions, built: &Built) -> Result<()> {
    // Logs of a failed run.
    let _ = fs::remove_dir_all(run.dir());
    fs::create_dir_all(run.dir()).with_context(|| format!("cannot make {}", run.dir().display()))?;
    let name = run.dir().file_name().unwrap_or_default().to_string_lossy().into_owned();
    run.update(|state| {
        *state = State {
            name,
            boot_id: boot_id(),
            kubernetes: options.kubernetes.to_string(),
            tools: built.tools.clone(),
            engine: options.engine,
            hosts: options.hosts,
            vm_manager: options.vm_manager,
            binaries: built.binaries.clone(),
            deployment: built.deployment.clone(),
            sockets: run.socket_dir(),
            ..State::default()
        };
    })?;
    for folder in ["logs", "pids", "clusters"].map(|name| run.path(name)).iter().chain([&run.socket_dir()]) {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    Ok(())
}

impl Plan {
    /// Signs certificates, and records all clusters and VMs in the state.
    async fn new(run: &Run, options: &UpOptions, built: &Built) -> Result<Self> {
        // Pods need a scheduler.
        let kubevirt = options.vm_manager == VmManager::KubeVirt;
        let plan = ControlPlanePlan {
            name: MANAGEMENT,
            scheduler: options.deployed || kubevirt,
            aggregates: kubevirt,
        };
        let management = ControlPlane::plan(run, &plan)?;
        run.update(|state| state.management = Some(management.cluster.clone()))?;
        let guests: Vec<PlannedGuest> =
            (1..=options.guests).map(|number| plan_guest(run, options, number)).collect::<Result<_>>()?;
        let accelerator = vm::accelerator(&built.image).await;
        let kubelet_ports = match options.cluster_api {
            true => {
                let guest = guests.iter().find(|guest| guest.guest.cluster.name == VM_GUEST);
                let plane = &guest.context("a lab without guests")?.plane;
                cluster_api::plan(run, plane, &built.image, accelerator)?.kubelet_ports
            }
            false => Vec::new(),
        };
        let own_vms = if options.cluster_api { 0 } else { options.vms };
        let nodes = (1..=own_vms)
            .zip(infra::ZONES.iter().zip(Host::of_lab(options.hosts).iter().cycle()).cycle())
            .map(|(number, (zone, host))| (format!("vm-{number}"), VM_GUEST, *zone, *host));
        let own = options
            .deployed
            .then(|| (MANAGEMENT_NODE.to_owned(), MANAGEMENT, infra::ZONES[0], Host::default()));
        let vms = own
            .into_iter()
            .chain(nodes)
            .map(|(name, cluster, zone, host)| {
                Ok((name.clone(), vm::plan(run, &name, cluster, zone, host, accelerator)?))
            })
            .collect::<Result<_>>()?;
        Ok(Self { management, guests, vms, kubelet_ports })
    }

    /// The control plane of a cluster.
    fn plane(&self, name: &str) -> Result<&ControlPlane> {
        if name == MANAGEMENT { Ok(&self.management) } else { Ok(&self.guest(name)?.plane) }
    }

    fn guest(&self, name: &str) -> Result<&PlannedGuest> {
        let found = self.guests.iter().find(|guest| guest.guest.cluster.name == name);
        found.with_context(|| format!("no guest {name}"))
    }

    /// The VMs that are nodes of guests.
    fn guest_vms(&self) -> impl Iterator<Item = &(String, VmRecord)> {
        self.vms.iter().filter(|(_, machine)| machine.guest != MANAGEMENT)
    }
}

impl PlannedGuest {
    /// The guest's record, which has its cluster ID once its control plane runs.
    fn record(&self, run: &Run) -> Result<Guest> {
        let name = &self.guest.cluster.name;
        run.state()?.guests.remove(name).with_context(|| format!("no guest {name}"))
    }
}

fn plan_guest(run: &Run, options: &UpOptions, number: u32) -> Result<PlannedGuest> {
    let name = &format!("g{number}");
    let plane = ControlPlane::plan(run, &ControlPlanePlan { name, scheduler: true, aggregates: false })?;
    let guest = Guest {
        cluster: plane.cluster.clone(),
        namespace: if options.one_namespace { ONE_NAMESPACE.to_owned() } else { format!("guest-{name}") },
        cluster_id: String::new(),
        controller_socket: run.socket_dir().join(format!("{name}-gc-csi.sock")),
    };
    run.update(|state| state.guests.insert(name.to_owned(), guest.clone()))?;
    Ok(PlannedGuest { plane, guest })
}

async fn start_infra(
    ui: &Ui,
    run: &Run,
    built: &Built,
    options: &UpOptions,
    plan: &Plan,
    disks: Option<&Disks>,
) -> Result<()> {
    let engine = options.engine;
    let step = ui.step("pools and libvirt");
    // libvirt's mount namespace starts as a copy of the current mounts.
    let mounted = match engine {
        Engine::File => infra::mount_pools(run, Host::of_lab(options.hosts)).await?,
        Engine::Rbd => BTreeMap::new(),
    };
    start_hosts(ui, run, Host::of_lab(options.hosts), &mounted).await?;
    step.done();
    let plugin = built.binaries.join("gc-csi-node");
    for (name, machine) in &plan.vms {
        let plane = plan.plane(&machine.guest)?;
        let payload = match disks {
            Some(disks) => Payload::Pods { images: disks.of(&machine.guest), api_server: plane.api_port() },
            None => Payload::Plugin { program: &plugin, is_kubevirt: false },
        };
        vm::boot(run, name, machine, &built.image, &plane.kubelet_files(name)?, payload).await?;
        ui.line(format!("{name} boots ({})", machine.accelerator));
    }
    let pools = match engine {
        Engine::File => mounted,
        Engine::Rbd => ceph::start(ui, run).await?,
    };
    let step = ui.step("storage infra");
    infra::start(run, &built.binaries, engine, pools, options.infra_servers).await?;
    step.done();
    connect_vms(run, plan).await
}

/// Starts the hosts: each has the mounts of the pools that it reaches.
async fn start_hosts(ui: &Ui, run: &Run, hosts: &[Host], mounted: &BTreeMap<String, PathBuf>) -> Result<()> {
    let pools = Pool::of_lab(hosts);
    for host in hosts {
        let unreached = pools.iter().filter(|pool| !pool.is_reached_by(*host));
        let hidden: Vec<PathBuf> = unreached.filter_map(|pool| mounted.get(pool.name).cloned()).collect();
        vm::network::create(run, *host).await?;
        libvirtd::start(ui, run, *host, &hidden).await?;
    }
    Ok(())
}

/// Connects the VMs with the API server of their cluster and the host with their kubelets; in pods, Nestor also needs the
/// management cluster and the storage infra.
async fn connect_vms(run: &Run, plan: &Plan) -> Result<()> {
    if plan.vms.is_empty() && plan.kubelet_ports.is_empty() {
        return Ok(());
    }
    let mut to_host: Vec<u16> = plan.guests.iter().map(|guest| guest.plane.api_port()).collect();
    if plan.vms.iter().any(|(_, machine)| machine.guest == MANAGEMENT) {
        let infra = run.state()?.infra.context("no storage infra")?;
        to_host.extend([plan.management.api_port(), ports::of_url(&infra.url)?]);
    }
    let kubelets = plan.vms.iter().map(|(_, machine)| machine.kubelet_port);
    let to_vms: Vec<u16> = kubelets.chain(plan.kubelet_ports.iter().copied()).collect();
    let of_ceph = match run.state()?.engine {
        Engine::File => Vec::new(),
        Engine::Rbd => ceph::ports(run)?,
    };
    let forwarded = Forwarded { to_host, to_vms, to_host_ipv6: of_ceph, ..Forwarded::default() };
    vm::network::start(run, &forwarded).await
}

async fn start_management(ui: &Ui, run: &Run, built: &Built, management: &ControlPlane) -> Result<()> {
    let step = ui.step("management control plane");
    management.start(run, &built.tools).await?;
    let cluster = &management.cluster;
    cluster::apply_snapshot_api(cluster, &built.snapshot_definitions).await?;
    if built.cluster_api.is_none() {
        cluster::apply_cluster_api(cluster).await?;
    }
    if built.deployment.is_none() {
        cluster::prepare_management(cluster).await?;
    }
    step.done();
    if let Some(built) = &built.cluster_api {
        cluster_api::start_controllers(ui, run, built).await?;
    }
    Ok(())
}

async fn start_guest(ui: &Ui, run: &Run, built: &Built, guest: &PlannedGuest) -> Result<()> {
    let cluster = &guest.plane.cluster;
    let step = ui.step(format!("control plane of guest {}", cluster.name));
    guest.plane.start(run, &built.tools).await?;
    cluster::apply_snapshot_api(cluster, &built.snapshot_definitions).await?;
    if built.deployment.is_none() {
        cluster::prepare_guest(cluster).await?;
    }
    let id = cluster::cluster_id(cluster).await?;
    run.update(|state| {
        if let Some(guest) = state.guests.get_mut(&cluster.name) {
            guest.cluster_id = id;
        }
    })?;
    step.done();
    Ok(())
}

/// Starts all of Nestor's components on this host, and creates the VirtualMachines.
async fn start_system(ui: &Ui, run: &Run, replicas: u32, plan: &Plan) -> Result<()> {
    let step = ui.step("drivers and sidecars");
    let state = run.state()?;
    for guest in state.guests.values() {
        cluster::prepare_guest_namespace(&plan.management.cluster, guest).await?;
    }
    let guests = plan.guests.iter().map(|guest| guest.guest.cluster.name.as_str());
    let drivers = guests.map(|guest| drivers::start_guest(run, &state, guest, replicas));
    futures::try_join!(
        register_vms(run, plan, false),
        drivers::start_snapshot_controllers(run, &state),
        drivers::start_management(run, &state, replicas),
        futures::future::try_join_all(drivers)
    )?;
    step.done();
    join_nodes(ui, run, plan).await?;
    wait_for_drivers(run, plan).await
}

/// Installs the charts once the VMs have joined, and creates the VirtualMachines.
async fn deploy(ui: &Ui, run: &Run, plan: &Plan, version: &Version) -> Result<()> {
    join_nodes(ui, run, plan).await?;
    deployed::install_management(ui, run, version).await?;
    register_vms(run, plan, *version != Version::current(&version.binaries)).await?;
    for guest in &plan.guests {
        deployed::install_guest(ui, run, &guest.guest.cluster.name, version).await?;
    }
    wait_for_drivers(run, plan).await
}

/// Creates the VirtualMachine objects, and waits until mgmt-csi has registered the VMs with the storage infra. An earlier
/// version does not: then they are registered by hand.
async fn register_vms(run: &Run, plan: &Plan, by_hand: bool) -> Result<()> {
    let state = run.state()?;
    let infra = state.infra.as_ref().context("no storage infra")?;
    let client = kubeconfig::client(&plan.management.cluster.kubeconfig).await?;
    for (name, machine) in plan.guest_vms() {
        let Guest { namespace, cluster_id, .. } = state.guests.get(&machine.guest).context("no guest")?;
        // The zone of several hosts is that of the VM's host.
        let zone = (state.hosts().len() == 1).then_some(machine.zone.as_str());
        virtual_machines::create(&client, namespace, cluster_id, name, &machine.uuid, zone).await?;
        if by_hand {
            virtual_machines::report(&client, namespace, name, &machine.uuid, &machine.zone).await?;
            infra::register_node(infra, name, &machine.uuid, &machine.zone, infra::LIBVIRT).await?;
        } else {
            virtual_machines::wait_until_registered(&client, namespace, name).await?;
        }
    }
    Ok(())
}

async fn join_nodes(ui: &Ui, run: &Run, plan: &Plan) -> Result<()> {
    let joins = plan.vms.iter().map(|(name, machine)| async move {
        let step = ui.step(format!("{name} is a ready node"));
        let client = kubeconfig::client(&plan.plane(&machine.guest)?.cluster.kubeconfig).await?;
        if !vm::joins_soon(&client, name).await && run.state()?.vm_manager == VmManager::Libvirt {
            ui.line(format!("{name} has not become a node yet; it is reset"));
            vm::reset(run, name).await?;
        }
        vm::wait_for_node(run, &client, name).await?;
        step.done();
        Ok(())
    });
    futures::future::try_join_all(joins).await.map(drop)
}

async fn wait_for_drivers(run: &Run, plan: &Plan) -> Result<()> {
    let waits = plan.guest_vms().map(|(name, machine)| async move {
        let client = kubeconfig::client(&plan.plane(&machine.guest)?.cluster.kubeconfig).await?;
        vm::wait_for_driver(run, &client, name).await
    });
    futures::future::try_join_all(waits).await.map(drop)
}
