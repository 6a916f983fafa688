//! Command line: verbs and their flags.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

use crate::cache::{self, Kubernetes};
use crate::ceph::Engine;
use crate::demo::demo;
use crate::down::down;
use crate::host::Host;
use crate::kubevirt::VmManager;
use crate::lab::{CONSOLE, Lab};
use crate::run::Run;
use crate::sanity::{Tier, sanity};
use crate::session::{After, interrupted, with_any_lab, with_lab};
use crate::status::status;
use crate::ui::{Ui, say};
use crate::up::{UpOptions, up};
use crate::vm::network;
use crate::{advisories, cluster_api, generate, images, package, release, verbs, verify};

/// Runs a management cluster, guest clusters, virtual machines, storage-infra and Nestor on this host, from source.
#[derive(Debug, Parser)]
#[command(name = "cargo lab", bin_name = "cargo lab", version)]
pub struct Cli {
    /// Name of the lab. Labs with different names run side by side.
    #[arg(long, global = true, env = "NESTOR_LAB_NAME", default_value = "default")]
    name: String,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Start a lab. Builds or installs what is missing first.
    Up(UpOptions),
    /// Stop a lab and remove everything it created, in whatever state it is.
    Down {
        /// Keep the logs.
        #[arg(long)]
        keep_logs: bool,
    },
    /// Show every component: whether it is ready, its process and its address. Exits with 1 unless all are ready.
    Status,
    /// Show the log of a component.
    Logs {
        /// A component, or a virtual machine's `-console`, `-kubelet` or `-gc-csi-node`.
        component: String,
        /// Follow the log as it grows.
        #[arg(short, long)]
        follow: bool,
    },
    /// Restart components with their current binaries, and the sidecars that exit with their driver.
    Restart {
        /// Components, by the names that `cargo lab status` shows.
        #[arg(required = true)]
        components: Vec<String>,
    },
    /// Migrate a virtual machine live to another host of a lab with several.
    Migrate {
        /// Name of the virtual machine.
        vm: String,
        /// `host-a` or `host-b`.
        host: String,
    },
    /// Start the console, unless it runs, and print the address of its page.
    Console,
    /// Run kubectl against a cluster of the lab.
    Kubectl {
        /// `mgmt`, `guest` (guest g1), or the name of a guest.
        cluster: String,
        /// Arguments of kubectl.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Show the lifecycle of a volume in both clusters: create, write, move to another VM, verify, delete.
    Demo {
        /// Keep the lab running.
        #[arg(long)]
        keep: bool,
        /// Install Nestor with its charts, in pods on the virtual machines.
        #[arg(long)]
        deployed: bool,
        /// Version of Kubernetes in all clusters. Others than the default are built first, which takes minutes.
        #[arg(long, value_name = "MINOR", default_value_t = Kubernetes::default())]
        kubernetes: Kubernetes,
        /// Storage engine of the pools. With `rbd`, an OSD of the Ceph cluster is killed during writes, and its monitor is
        /// restarted.
        #[arg(long, value_enum, default_value_t)]
        engine: Engine,
        /// What makes the virtual machines. With `kubevirt`, another CSI driver of the management cluster keeps the volumes.
        #[arg(long, value_enum, default_value_t)]
        vm_manager: VmManager,
    },
    /// Run the checks of a change: formatting, lints, unit tests, then csi-sanity and black-box tests in a lab of their own.
    /// Prints a table of the steps, their results and times.
    Test(verify::Selection),
    /// Run random user operations in two guests while components fail, and verify the result. Uses this lab if it is
    /// up, otherwise a lab of its own.
    Soak {
        /// Duration in minutes.
        #[arg(long, default_value_t = 3)]
        minutes: u64,
        /// Repeat the operations and faults of the run with this seed.
        #[arg(long)]
        seed: Option<u64>,
    },
    /// Run csi-sanity against a driver. Uses this lab if it is up, otherwise a lab of its own.
    Sanity {
        /// The driver to test.
        tier: Tier,
    },
    /// Build the container images as OCI archives from Debian packages and Nestor's programs. Needs no container engine.
    Images(images::Options),
    /// Build the Debian package of storage-infra, with its systemd unit and its configuration.
    Package(package::Options),
    /// Build everything that is published: images, charts, programs, definitions, SBOMs, checksums and release notes.
    Release(release::Options),
    /// Write the files that are derived from the code: crds/yaml, and pages in docs/reference. Builds the programs first.
    Generate,
    /// Renew hack/advisories: the advisories about the dependencies that `cargo lab test --all` checks.
    Advisory {
        /// Clone of the RustSec advisory database.
        clone: PathBuf,
    },
    /// Forward connections between the host and the network of the virtual machines. A component of a lab.
    #[command(hide = true)]
    VmNetwork(network::ForwardOptions),
    /// Make virtual machines for Cluster API. A component of a lab.
    #[command(hide = true)]
    ClusterApiProvider(cluster_api::ProviderOptions),
    /// Run a bench. Uses this lab if it is up, otherwise a lab of its own.
    Bench {
        /// Name of the bench. `help` lists them.
        bench: String,
        /// Arguments of the bench.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
}

/// Runs one command.
pub async fn run(cli: Cli) -> Result<ExitCode> {
    let ui = Ui::default();
    let run = Run::named(&cli.name)?;
    match cli.verb {
        Verb::Up(options) => run_up(&ui, &run, &options).await,
        Verb::Down { keep_logs } => down(&ui, &run, keep_logs).await.map(|()| ExitCode::SUCCESS),
        Verb::Status => Ok(exit_code(status(&run).await?)),
        Verb::Logs { component, follow } => verbs::logs(&run, &component, follow).await,
        Verb::Restart { components } => restart(run, &components).await,
        Verb::Migrate { vm, host } => migrate(run, &vm, &host).await,
        Verb::Console => console(&ui, run).await,
        Verb::Kubectl { cluster, args } => verbs::kubectl(&run, &cluster, &args).await,
        Verb::Demo { keep, deployed, kubernetes, engine, vm_manager } => {
            let options = UpOptions { deployed, kubernetes, engine, vm_manager, ..UpOptions::default() };
            run_demo(&ui, keep, &options).await
        }
        Verb::Test(selection) => verify::verify(&ui, &selection).await,
        Verb::Sanity { tier } => run_sanity(&ui, &run, tier).await,
        Verb::Soak { minutes, seed } => run_soak(&ui, &run, minutes, seed).await,
        Verb::Images(options) => images::images(&ui, &options).await.map(|()| ExitCode::SUCCESS),
        Verb::Package(options) => package::package(&ui, &options).await.map(|()| ExitCode::SUCCESS),
        Verb::Release(options) => release::release(&ui, &options).await.map(|()| ExitCode::SUCCESS),
        Verb::Generate => generate::generate(&ui).await.map(|()| ExitCode::SUCCESS),
        Verb::Advisory { clone } => renew_advisories(&clone).await,
        Verb::VmNetwork(options) => network::forward(&options).await.map(|()| ExitCode::SUCCESS),
        Verb::ClusterApiProvider(options) => {
            cluster_api::provide(&run, &options).await.map(|()| ExitCode::SUCCESS)
        }
        Verb::Bench { bench, args } => run_bench(&ui, &run, &bench, &args).await,
    }
}

fn exit_code(success: bool) -> ExitCode {
    if success { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

async fn run_up(ui: &Ui, run: &Run, options: &UpOptions) -> Result<ExitCode> {
    tokio::select! {
        outcome = up(ui, run, options) => outcome.with_context(|| unfinished(run))?,
        interrupt = interrupted() => return Err(interrupt?.context(unfinished(run))),
    }
    let (name, dir) = (run.name(), run.dir().display());
    say(format!("lab {name} is up: `cargo lab status` shows its components; NESTOR_LAB={dir}"));
    Ok(ExitCode::SUCCESS)
}

async fn restart(run: Run, components: &[String]) -> Result<ExitCode> {
    let lab = Lab::open(run)?;
    for component in components {
        lab.restart(component).await?;
        say(format!("restarted {component}"));
    }
    Ok(ExitCode::SUCCESS)
}

async fn migrate(run: Run, vm: &str, host: &str) -> Result<ExitCode> {
    let lab = Lab::open(run)?;
    let to = Host::named(host, lab.state().hosts())?;
    lab.vm(vm)?.migrate(to).await?;
    say(format!("{vm} is on {host}"));
    Ok(ExitCode::SUCCESS)
}

async fn console(ui: &Ui, run: Run) -> Result<ExitCode> {
    let lab = Lab::open(run)?;
    cache::cargo::build_more(ui, &lab.state().binaries, CONSOLE).await?;
    say(lab.console().await?);
    Ok(ExitCode::SUCCESS)
}

async fn run_demo(ui: &Ui, keep: bool, options: &UpOptions) -> Result<ExitCode> {
    let after = if keep { After::Keep } else { After::Down };
    let run = Run::named("demo")?;
    with_lab(ui, &run, options, after, async |lab| demo(ui, lab).await).await?;
    say("demo passed");
    Ok(ExitCode::SUCCESS)
}

async fn run_sanity(ui: &Ui, run: &Run, tier: Tier) -> Result<ExitCode> {
    let options = UpOptions { vms: 0, ..UpOptions::default() };
    let work = async |lab: &Lab| sanity(ui, lab, tier).await;
    let counts = with_any_lab(ui, run, "sanity", &options, work).await?;
    say(counts.to_string());
    Ok(exit_code(counts.success()))
}

async fn run_soak(ui: &Ui, run: &Run, minutes: u64, seed: Option<u64>) -> Result<ExitCode> {
    let options = UpOptions { vms: 0, guests: 2, one_namespace: true, ..UpOptions::default() };
    let work = async |lab: &Lab| verbs::soak(lab, minutes, seed).await;
    with_any_lab(ui, run, "soak", &options, work).await
}

async fn renew_advisories(clone: &Path) -> Result<ExitCode> {
    say(format!("kept {} advisories", advisories::renew(clone).await?));
    Ok(ExitCode::SUCCESS)
}

/// `plot` draws recorded results, and help is only printed.
fn bench_needs_no_lab(bench: &str, args: &[String]) -> bool {
    ["plot", "help"].contains(&bench) || args.iter().any(|arg| arg == "--help" || arg == "-h")
}

/// Benches of storage-infra without clusters start the program themselves.
fn bench_needs_only_storage_infra(bench: &str, args: &[String]) -> bool {
    bench == "sustain" || (bench == "idle" && args.iter().any(|arg| arg == "--storage-infra"))
}

/// The lab of a bench. Most benches simulate their VMs.
fn bench_options(args: &[String]) -> UpOptions {
    let value = args.iter().position(|arg| arg == "--vm-manager").and_then(|at| args.get(at + 1));
    let value =
        value.map(String::as_str).or_else(|| args.iter().find_map(|arg| arg.strip_prefix("--vm-manager=")));
    let on_kubevirt = value == Some("kubevirt");
    let (vms, vm_manager) = if on_kubevirt { (1, VmManager::KubeVirt) } else { (0, VmManager::Libvirt) };
    UpOptions { vms, vm_manager, release: true, ..UpOptions::default() }
}

async fn run_bench(ui: &Ui, run: &Run, bench: &str, args: &[String]) -> Result<ExitCode> {
    if bench_needs_no_lab(bench, args) {
        return verbs::bench(None, bench, args).await;
    }
    if bench_needs_only_storage_infra(bench, args) {
        cache::cargo::build_storage_infra(ui).await?;
        return verbs::bench(None, bench, args).await;
    }
    let options = bench_options(args);
    let work = async |lab: &Lab| {
        if ["trace", "all"].contains(&bench) {
            cache::cargo::build_more(ui, &lab.state().binaries, "kubectl-nestor").await?;
        }
        verbs::bench(Some(lab), bench, args).await
    };
    with_any_lab(ui, run, "bench", &options, work).await
}

fn unfinished(run: &Run) -> String {
    format!("the lab at {} is not up (`cargo lab down` removes what was started)", run.dir().display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bench_of_kubevirt_has_a_lab_with_it() {
        let manager = |args: &[&str]| {
            let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
            bench_options(&args).vm_manager
        };
        assert_eq!(manager(&["--vm-manager", "kubevirt"]), VmManager::KubeVirt);
        assert_eq!(manager(&["--count", "3", "--vm-manager=kubevirt"]), VmManager::KubeVirt);
        assert_eq!(manager(&["--vm-manager", "libvirt"]), VmManager::Libvirt);
        assert_eq!(manager(&["--count", "3"]), VmManager::Libvirt);
    }
}
