//! Bringing a lab up: what depends on nothing starts at once, the rest as soon as what it needs is ready.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::cache;
use crate::cluster::{self, ControlPlane, ControlPlanePlan};
use crate::process::boot_id;
use crate::run::{Run, lock};
use crate::state::{Guest, State};
use crate::ui::Ui;

/// What to bring up.
#[derive(Debug, Clone, clap::Args)]
pub struct UpOptions {
    /// Virtual machines, all nodes of guest g1.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(0..=16))]
    pub vms: u32,
    /// Guest clusters, named g1, g2 and so on.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=8))]
    pub guests: u32,
    /// Leave something out.
    #[arg(long, hide = true)]
    pub without: Vec<String>,
}

/// Brings a lab up; when it returns, every part is ready.
pub async fn up(ui: &Ui, run: &Run, options: &UpOptions) -> Result<()> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "a lab mounts pools and runs virtual machines, which needs root: run `sudo --preserve-env cargo lab up`"
    );
    let _alone = lock(&run.dir().with_extension("lock"))?;
    if run.exists() {
        bail!(
            "there is a lab at {} already: `cargo lab status` shows it, `cargo lab down` takes it down",
            run.dir().display()
        );
    }
    cache::packages::ensure(ui).await?;
    let (tools, binaries) = (cache::tools(ui).await?, PathBuf::new());
    let _ = fs::remove_dir_all(run.dir());
    make_folders(run, options, &tools, &binaries)?;
    let image = cache::base_image(ui, &tools).await?;
    crate::vm::libvirtd::start(ui, run).await?;
    clusters(ui, run, options, &tools, &image).await?;
    run.update(|state| state.complete = true)?;
    Ok(())
}

fn make_folders(run: &Run, _options: &UpOptions, tools: &Path, binaries: &Path) -> Result<()> {
    fs::create_dir_all(run.dir()).with_context(|| format!("cannot make {}", run.dir().display()))?;
    let name = run.dir().file_name().unwrap_or_default().to_string_lossy().into_owned();
    run.update(|state| {
        *state = State {
            name,
            boot_id: boot_id(),
            tools: tools.to_owned(),
            binaries: binaries.to_owned(),
            sockets: run.socket_dir(),
            ..State::default()
        };
    })?;
    for folder in ["logs", "pids", "clusters"].map(|name| run.path(name)).iter().chain([&run.socket_dir()]) {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    Ok(())
}

async fn clusters(ui: &Ui, run: &Run, options: &UpOptions, tools: &Path, image: &cache::BaseImage) -> Result<()> {
    let management = ControlPlane::plan(run, &ControlPlanePlan { name: "mgmt", scheduler: false, audit: true })?;
    run.update(|state| state.management = Some(management.cluster.clone()))?;
    let mut guests = Vec::new();
    for number in 1..=options.guests {
        let name = format!("g{number}");
        let plane = ControlPlane::plan(run, &ControlPlanePlan { name: &name, scheduler: true, audit: false })?;
        let guest = Guest {
            cluster: plane.cluster.clone(),
            namespace: format!("guest-{name}"),
            cluster_id: String::new(),
            controller_socket: run.socket_dir().join(format!("{name}-gc-csi.sock")),
        };
        run.update(|state| state.guests.insert(name.clone(), guest.clone()))?;
        guests.push((plane, guest));
    }
    let step = ui.step("management control plane");
    management.start(run, tools).await?;
    cluster::prepare_management(&management.cluster).await?;
    step.done();
    for (plane, guest) in &guests {
        let step = ui.step(format!("control plane of {}", guest.cluster.name));
        plane.start(run, tools).await?;
        let cluster_id = cluster::prepare_guest(&plane.cluster).await?;
        cluster::prepare_guest_namespace(&management.cluster, guest).await?;
        run.update(|state| {
            if let Some(guest) = state.guests.get_mut(&guest.cluster.name) {
                guest.cluster_id = cluster_id;
            }
        })?;
        step.done();
    }
    let accel = crate::vm::accelerator(image).await;
    ui.line(accel);
    let client = crate::kubeconfig::client(&guests[0].0.cluster.kubeconfig).await?;
    for i in 1..=options.vms {
        let name = format!("vm-{i}");
        let vm = crate::vm::plan(run, &name, "g1", accel)?;
        let k = guests[0].0.kubelet_files(&name)?;
        crate::vm::boot(run, &name, &vm, image, &k, Path::new("target/debug/gc-csi")).await?;
    }
    for i in 1..=options.vms {
        let name = format!("vm-{i}");
        crate::vm::wait_for_node(run, &client, &name).await?;
        ui.line(format!("{name} ready"));
    }
    Ok(())
}
