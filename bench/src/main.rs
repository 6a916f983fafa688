//! Program `cargo lab bench NAME`.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail};
use bench::benches::attach::Direction;
use bench::benches::copy::Copy;
use bench::benches::{
    attach, attach_kubevirt, blocked, burst, copy, create, delete, extents, fairness, idle, io, lifecycle,
    memory, pod, rbd, recovery, retry, scale, sustain, trace, tracing,
};
use bench::instant::Backend;
use bench::plot;
use bench::report::{self, Report};
use bench::split_cpus::split_cpus;
use bench::suite;
use bench::work::Work;
use clap::{Parser, Subcommand};
use lab::{Lab, Setting, VmManager};

/// Measures a running lab.
#[derive(Debug, Parser)]
#[command(name = "bench", version)]
struct Cli {
    #[command(subcommand)]
    bench: Bench,
    /// Output file for the rows as JSON. [default: target/bench/NAME.json]
    #[arg(long, global = true, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Run a component of the lab with a changed flag, as in g1-provisioner:kube-api-qps=5. Repeatable.
    #[arg(long = "set", global = true, value_name = "COMPONENT:FLAG[=VALUE]")]
    settings: Vec<Setting>,
    /// Run the guests' components on half of the processors, and all others on the other half.
    #[arg(long, global = true)]
    split_cpus: bool,
}

#[derive(Debug, Subcommand)]
enum Bench {
    /// Guest claim until it is bound, compared with the same claim in the management cluster.
    Create {
        #[command(flatten)]
        work: Work,
        /// Back end that creates the volumes of management claims.
        #[arg(long, value_enum, default_value_t = Backend::Infra)]
        backend: Backend,
    },
    /// Guest claim from its deletion until its volume is deleted, compared with the management cluster.
    Delete(Work),
    /// Bursts of claims of increasing size, until all are bound and until all are deleted.
    Burst(Work),
    /// Lifecycle of a volume, compared with the same one tier below.
    Lifecycle {
        #[command(flatten)]
        work: Work,
        #[command(flatten)]
        others: lifecycle::OtherObjects,
    },
    /// Guest VolumeAttachment until it is attached, compared with the storage infra's own attach.
    Attach {
        #[command(flatten)]
        work: Work,
        #[command(flatten)]
        others: attach::Others,
        /// What makes the lab's virtual machines. With `kubevirt`, the attach is compared with the same PATCH of the
        /// VirtualMachine made by hand.
        #[arg(long, value_enum, default_value_t, value_name = "MANAGER", conflicts_with_all = ["reported", "attached"])]
        vm_manager: VmManager,
    },
    /// Guest VolumeAttachment from its deletion until it is gone, compared with the storage infra's own detach.
    Detach(Work),
    /// Attaches and claims while many disks wait for hanging VMs, compared with the same work without them.
    Blocked {
        #[command(flatten)]
        work: Work,
        #[command(flatten)]
        load: blocked::Load,
    },
    /// CreateSnapshot of a volume of 1 GiB until it is ready, compared with the storage infra's own snapshot.
    Snapshot(Work),
    /// CreateVolume from a volume of 1 GiB until it returns, compared with the storage infra's own clone.
    Clone(Work),
    /// Delay of claims and attaches after the cause of their failure is removed.
    Retry {
        #[command(flatten)]
        work: Work,
        /// Duration of the failure in seconds.
        #[arg(long, default_value_t = 60)]
        seconds: u64,
    },
    /// Requests and CPU time while nothing happens.
    Idle {
        /// Numbers of volumes.
        #[arg(long, value_delimiter = ',', default_values_t = [1000])]
        volumes: Vec<u32>,
        /// Duration in seconds.
        #[arg(long, default_value_t = 60)]
        seconds: u64,
        /// Only a storage-infra, which is started for this, without clusters.
        #[arg(long)]
        storage_infra: bool,
        /// With --storage-infra: attach this many volumes to VMs without a system, in a libvirtd that is started for this.
        #[arg(long, requires = "storage_infra", default_value_t = 0)]
        attached: u32,
    },
    /// Volumes created at a constant rate in a storage-infra that is started for this, without clusters.
    Sustain(sustain::Load),
    /// Memory of each process.
    Memory {
        /// Numbers of volumes.
        #[arg(long, value_delimiter = ',', default_values_t = [125, 1000])]
        volumes: Vec<u32>,
    },
    /// A pod with a volume until its container runs, moves to another VM, or survives its VM; compared with an emptyDir.
    Pod {
        #[command(flatten)]
        work: Work,
        #[command(flatten)]
        options: pod::Options,
    },
    /// Reads and writes of a volume by fio in a VM, compared with a disk that is attached by hand.
    Io {
        #[command(flatten)]
        work: Work,
        #[command(flatten)]
        options: io::Options,
    },
    /// Volumes that are images in Ceph: create, attach to a virtual machine and detach, compared with files.
    Rbd(Work),
    /// From the start of a process until it is ready, and from an API server's return until all watches are back.
    Recovery {
        #[command(flatten)]
        work: Work,
        /// Number of volumes.
        #[arg(long, default_value_t = 100)]
        volumes: usize,
    },
    /// A guest's attaches and detaches while another VM floods the management tier, compared with a quiet one.
    Fairness(fairness::Load),
    /// Filesystem metadata of volumes that are written in random order.
    Extents {
        /// Size of the volumes in MiB.
        #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(16..=256))]
        mebibytes: u64,
    },
    /// Many guests on one management tier: first attach of all volumes, and failure of a rack.
    Scale(scale::Size),
    /// `kubectl nestor trace` beside many volumes, compared with few.
    Trace {
        #[command(flatten)]
        work: Work,
        #[command(flatten)]
        volumes: trace::Volumes,
    },
    /// Create, attach and detach without tracing, and with the spans of a tenth and of all operations.
    Tracing(Work),
    /// All benches whose results the page about performance shows, one after the other; writes their tables to the page.
    All {
        /// Only benches with these names; the others keep their last results. [default: all]
        #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
        only: Vec<String>,
    },
    /// Draw the results of the benches as SVG.
    Plot {
        /// Output folder. [default: docs/reference/plots]
        folder: Option<PathBuf>,
    },
}

impl Cli {
    /// Name of the results: the bench, and what it was run with.
    fn name(&self) -> String {
        let split = self.split_cpus.then(|| "split-cpus".to_owned());
        // Limits of the VM Operator only make the bench possible.
        let settings = self.settings.iter().filter(|setting| !setting.is_of("vm-operator-shim"));
        let parts = [Some(self.bench.name().to_owned()), split, settings.map(Setting::label).next()];
        parts.into_iter().flatten().collect::<Vec<_>>().join("-")
    }

    /// File of the results.
    fn file(&self, results: &Path) -> PathBuf {
        self.json.clone().unwrap_or_else(|| results.join(self.name()).with_extension("json"))
    }
}

impl Bench {
    fn name(&self) -> &'static str {
        match self {
            Self::Create { backend: Backend::Infra, .. } => "create",
            Self::Create { backend: Backend::Instant, .. } => "create-instant",
            Self::Delete(_) => "delete",
            Self::Burst(_) => "burst",
            Self::Lifecycle { .. } => "lifecycle",
            Self::Attach { vm_manager: VmManager::KubeVirt, .. } => "attach-kubevirt",
            Self::Attach { .. } => "attach",
            Self::Detach(_) => "detach",
            Self::Blocked { .. } => "blocked",
            Self::Snapshot(_) => "snapshot",
            Self::Clone(_) => "clone",
            Self::Retry { .. } => "retry",
            Self::Idle { storage_infra: false, .. } => "idle",
            Self::Idle { storage_infra: true, attached: 1.., .. } => "idle-attached",
            Self::Idle { storage_infra: true, .. } => "idle-storage-infra",
            Self::Sustain(_) => "sustain",
            Self::Memory { .. } => "memory",
            Self::Pod { .. } => "pod",
            Self::Io { .. } => "io",
            Self::Rbd(_) => "rbd",
            Self::Recovery { .. } => "recovery",
            Self::Fairness(_) => "fairness",
            Self::Extents { .. } => "extents",
            Self::Scale(_) => "scale",
            Self::Trace { .. } => "trace",
            Self::Tracing(_) => "tracing",
            Self::All { .. } => "all",
            Self::Plot { .. } => "plot",
        }
    }

    fn needs_lab(&self) -> bool {
        !matches!(self, Self::Sustain(_) | Self::Idle { storage_infra: true, .. } | Self::Plot { .. })
    }

    async fn run(&self, report: &Report) -> Result<()> {
        match self {
            Self::Create { work, backend } => create::run(report, work, *backend).await,
            Self::Delete(work) => delete::run(report, work).await,
            Self::Burst(work) => burst::run(report, work).await,
            Self::Lifecycle { work, others } => lifecycle::run(report, work, others).await,
            Self::Attach { work, vm_manager: VmManager::KubeVirt, .. } => {
                attach_kubevirt::run(report, work).await
            }
            Self::Attach { work, others, .. } => attach::run(report, work, others, Direction::Attach).await,
            Self::Detach(work) => {
                attach::run(report, work, &attach::Others::default(), Direction::Detach).await
            }
            Self::Blocked { work, load } => blocked::run(report, work, load).await,
            Self::Snapshot(work) => copy::run(report, work, Copy::Snapshot).await,
            Self::Clone(work) => copy::run(report, work, Copy::Clone).await,
            Self::Retry { work, seconds } => retry::run(report, work, *seconds).await,
            Self::Idle { volumes, seconds, storage_infra: false, .. } => {
                idle::run(report, volumes, *seconds).await
            }
            Self::Idle { seconds, storage_infra: true, attached: attached @ 1.., .. } => {
                idle::run_attached(report, *attached, *seconds).await
            }
            Self::Idle { volumes, seconds, storage_infra: true, .. } => {
                idle::run_alone(report, volumes, *seconds).await
            }
            Self::Sustain(load) => sustain::run(report, load).await,
            Self::Memory { volumes } => memory::run(report, volumes).await,
            Self::Pod { work, options } => pod::run(report, work, options).await,
            Self::Io { work, options } => io::run(report, work, options).await,
            Self::Rbd(work) => rbd::run(report, work).await,
            Self::Recovery { work, volumes } => recovery::run(report, work, *volumes).await,
            Self::Fairness(load) => fairness::run(report, load).await,
            Self::Extents { mebibytes } => extents::run(report, *mebibytes).await,
            Self::Scale(size) => scale::run(report, size).await,
            Self::Trace { work, volumes } => trace::run(report, work, volumes).await,
            Self::Tracing(work) => tracing::run(report, work).await,
            Self::All { .. } | Self::Plot { .. } => Ok(()),
        }
    }
}

async fn run(cli: Cli) -> Result<()> {
    let results = lab::run::target_dir()?.join("bench");
    if let Bench::Plot { folder } = &cli.bench {
        let folder = folder.clone().unwrap_or_else(|| lab::run::repository().join("docs/reference/plots"));
        for file in plot::draw(&results, &folder)? {
            writeln!(std::io::stdout(), "{}", file.display())?;
        }
        return Ok(());
    }
    if let Bench::All { only } = &cli.bench {
        return run_all(&results, only).await;
    }
    measure(cli, &results).await
}

async fn measure(cli: Cli, results: &Path) -> Result<()> {
    let report = Report::new(&cli.name());
    match cli.bench.needs_lab() {
        true => run_in_lab(&cli, &report).await?,
        false => cli.bench.run(&report).await?,
    }
    report.print()?;
    report.write(&cli.file(results))
}

/// Runs the benches of the suite with these names, or all, and writes the tables.
async fn run_all(results: &Path, only: &[String]) -> Result<()> {
    let all: Vec<(&str, Cli)> =
        suite::commands().into_iter().map(|command| Ok((command, parse(command)?))).collect::<Result<_>>()?;
    let names: Vec<String> = all.iter().map(|(_, cli)| cli.name()).collect();
    if let Some(unknown) = only.iter().find(|name| !names.contains(name)) {
        bail!("no bench {unknown} in the suite; it has {}", names.join(", "));
    }
    for (command, cli) in all {
        if only.is_empty() || only.contains(&cli.name()) {
            eprintln!("bench {command}");
            measure(cli, results).await?;
        }
    }
    let page = lab::run::repository().join("docs/reference/speed.md");
    suite::write(&page, |command| report::read(&parse(command)?.file(results)))
}

fn parse(command: &str) -> Result<Cli> {
    Ok(Cli::try_parse_from(["bench"].into_iter().chain(command.split(' ')))?)
}

async fn run_in_lab(cli: &Cli, report: &Report) -> Result<()> {
    let lab = Lab::from_env()?;
    let work = async {
        match cli.split_cpus {
            true => split_cpus(&lab, cli.bench.run(report)).await,
            false => cli.bench.run(report).await,
        }
    };
    lab.with_settings(&cli.settings, work).await
}

#[tokio::main]
async fn main() -> ExitCode {
    match run(Cli::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn results_are_named_after_the_bench_and_the_setting_that_it_measures() {
        let name = |command: &str| parse(command).unwrap().name();
        assert_eq!(name("create --backend instant --split-cpus"), "create-instant-split-cpus");
        assert_eq!(name("attach --set vm-operator-shim:flapping=10000"), "attach");
        assert_eq!(
            name("attach --set g1-attacher:kube-api-qps=5 --set g1-attacher:kube-api-burst=10"),
            "attach-g1-attacher-kube-api-qps"
        );
    }

    #[test]
    fn each_command_of_the_page_has_results_of_its_own() {
        let mut names: Vec<String> =
            suite::commands().into_iter().map(|command| parse(command).unwrap().name()).collect();
        let all = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all, "{names:?}");
    }

    #[test]
    fn the_suite_consists_of_commands() {
        for command in suite::commands() {
            parse(command).unwrap_or_else(|error| panic!("{command}: {error}"));
        }
    }
}
