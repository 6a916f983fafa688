//! Start of a lab: everything starts as soon as its dependencies are ready.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};

use crate::cache::{self, BaseImage};
use crate::cluster::{self, ControlPlane, ControlPlanePlan};
use crate::process::boot_id;
use crate::run::{Run, lock};
use crate::state::{Guest, State, VmRecord};
use crate::ui::Ui;
use crate::vm::{self, libvirtd};
use crate::{drivers, infra, kubeconfig, virtual_machines};

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
    /// Use the release build of Nestor.
    #[arg(long)]
    pub release: bool,
}

impl Default for UpOptions {
    fn default() -> Self {
        Self { vms: 2, guests: 1, one_namespace: false, replicas: 1, release: false }
    }
}

/// The built or cached inputs of a lab.
struct Built {
    tools: PathBuf,
    snapshot_definitions: PathBuf,
    image: BaseImage,
    binaries: PathBuf,
}

/// A guest that is not started yet: its control plane, and its record in the state.
struct PlannedGuest {
    plane: ControlPlane,
    guest: Guest,
}

/// Starts a lab; returns when every component is ready.
pub async fn up(ui: &Ui, run: &Run, options: &UpOptions) -> Result<()> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "a lab mounts pools and runs virtual machines, which needs root: run `sudo --preserve-env cargo lab up`"
    );
    let _alone = lock(&run.dir().with_extension("lock"))?;
    if run.exists() {
        bail!(
            "a lab already exists at {}: `cargo lab status` shows it, `cargo lab down` takes it down",
            run.dir().display()
        );
    }
    let built = prepare(ui, options.release).await?;
    make_folders(run, &built)?;
    let management = ControlPlane::plan(run, &ControlPlanePlan { name: "mgmt", scheduler: false })?;
    run.update(|state| state.management = Some(management.cluster.clone()))?;
    let guests: Vec<PlannedGuest> =
        (1..=options.guests).map(|number| plan_guest(run, options, number)).collect::<Result<_>>()?;
    let accelerator = vm::accelerator(&built.image).await;
    let vms: Vec<(String, VmRecord)> = (1..=options.vms)
        .zip(infra::ZONES.iter().cycle())
        .map(|(number, zone)| (format!("vm-{number}"), zone))
        .map(|(name, zone)| Ok((name.clone(), vm::plan(run, &name, VM_GUEST, zone, accelerator)?)))
        .collect::<Result<_>>()?;

    // The VMs boot while the control planes start, because booting takes longest.
    futures::try_join!(
        start_infra(ui, run, &built, &guests, &vms),
        start_management(ui, run, &built, &management),
        futures::future::try_join_all(guests.iter().map(|guest| start_guest(ui, run, &built, guest))),
    )?;
    start_system(ui, run, options.replicas, &management, &guests, &vms).await?;
    join_nodes(ui, run, &guests, &vms).await?;
    run.update(|state| state.complete = true)
}

/// Builds or finds everything that is needed before the first process starts.
async fn prepare(ui: &Ui, release: bool) -> Result<Built> {
    cache::packages::ensure(ui).await?;
    let tools = cache::tools(ui).await?;
    let snapshot_definitions = cache::snapshot_definitions().await?;
    let image = cache::base_image(ui, &tools).await?;
    let binaries = cache::cargo::build(ui, release).await?;
    Ok(Built { tools, snapshot_definitions, image, binaries })
}

fn make_folders(run: &Run, built: &Built) -> Result<()> {
    // Logs of a failed run.
    let _ = fs::remove_dir_all(run.dir());
    fs::create_dir_all(run.dir()).with_context(|| format!("cannot make {}", run.dir().display()))?;
    let name = run.dir().file_name().unwrap_or_default().to_string_lossy().into_owned();
    run.update(|state| {
        *state = State {
            name,
            boot_id: boot_id(),
            tools: built.tools.clone(),
            binaries: built.binaries.clone(),
            sockets: run.socket_dir(),
            ..State::default()
        };
    })?;
    for folder in ["logs", "pids", "clusters"].map(|name| run.path(name)).iter().chain([&run.socket_dir()]) {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    Ok(())
}

fn plan_guest(run: &Run, options: &UpOptions, number: u32) -> Result<PlannedGuest> {
    let name = &format!("g{number}");
    let plane = ControlPlane::plan(run, &ControlPlanePlan { name, scheduler: true })?;
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
    guests: &[PlannedGuest],
    vms: &[(String, VmRecord)],
) -> Result<()> {
    let step = ui.step("pools and libvirt");
    // libvirt's mount namespace starts as a copy of the current mounts.
    let pools = infra::mount_pools(run).await?;
    libvirtd::start(ui, run).await?;
    step.done();
    for (name, machine) in vms {
        let guest = planned(guests, &machine.guest)?;
        let kubelet = guest.plane.kubelet_files(name)?;
        vm::boot(run, name, machine, &built.image, &kubelet, &built.binaries.join("gc-csi-node")).await?;
        ui.line(format!("{name} boots ({})", machine.accelerator));
    }
    let step = ui.step("storage infra");
    infra::start(run, &built.binaries, pools).await?;
    step.done();
    Ok(())
}

async fn start_management(ui: &Ui, run: &Run, built: &Built, management: &ControlPlane) -> Result<()> {
    let step = ui.step("management control plane");
    management.start(run, &built.tools).await?;
    cluster::prepare_management(&management.cluster, &built.snapshot_definitions).await?;
    step.done();
    Ok(())
}

async fn start_guest(ui: &Ui, run: &Run, built: &Built, guest: &PlannedGuest) -> Result<()> {
    let name = &guest.guest.cluster.name;
    let step = ui.step(format!("control plane of guest {name}"));
    guest.plane.start(run, &built.tools).await?;
    let cluster_id = cluster::prepare_guest(&guest.plane.cluster, &built.snapshot_definitions).await?;
    run.update(|state| {
        if let Some(guest) = state.guests.get_mut(name) {
            guest.cluster_id = cluster_id;
        }
    })?;
    step.done();
    Ok(())
}

/// Creates namespaces and VirtualMachine objects, and starts all of Nestor's components.
async fn start_system(
    ui: &Ui,
    run: &Run,
    replicas: u32,
    management: &ControlPlane,
    guests: &[PlannedGuest],
    vms: &[(String, VmRecord)],
) -> Result<()> {
    let step = ui.step("drivers and sidecars");
    for guest in guests {
        cluster::prepare_guest_namespace(&management.cluster, &guest.guest).await?;
    }
    let state = run.state()?;
    let infra = state.infra.as_ref().context("no storage infra")?;
    let client = kubeconfig::client(&management.cluster.kubeconfig).await?;
    let machines = async {
        for (name, machine) in vms {
            let namespace = &planned(guests, &machine.guest)?.guest.namespace;
            virtual_machines::create(&client, namespace, name, &machine.uuid, &machine.zone).await?;
            infra::register_node(infra, name, &machine.uuid, &machine.zone, infra::LIBVIRT).await?;
        }
        Ok(())
    };
    let drivers =
        guests.iter().map(|guest| drivers::start_guest(run, &state, &guest.guest.cluster.name, replicas));
    futures::try_join!(
        machines,
        drivers::start_snapshot_controllers(run, &state),
        drivers::start_management(run, &state, replicas),
        futures::future::try_join_all(drivers)
    )?;
    step.done();
    Ok(())
}

async fn join_nodes(ui: &Ui, run: &Run, guests: &[PlannedGuest], vms: &[(String, VmRecord)]) -> Result<()> {
    let joins = vms.iter().map(|(name, machine)| async move {
        let step = ui.step(format!("{name} is a ready node with gc-csi-node"));
        let client = kubeconfig::client(&planned(guests, &machine.guest)?.plane.cluster.kubeconfig).await?;
        vm::wait_for_node(run, &client, name).await?;
        vm::wait_for_driver(run, &client, name).await?;
        step.done();
        Ok(())
    });
    futures::future::try_join_all(joins).await.map(drop)
}

fn planned<'a>(guests: &'a [PlannedGuest], name: &str) -> Result<&'a PlannedGuest> {
    guests.iter().find(|guest| guest.guest.cluster.name == name).with_context(|| format!("no guest {name}"))
}
