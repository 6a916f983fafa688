//! `cargo lab bench NAME`.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use bench::apart::apart;
use bench::benches::attach::Direction;
use bench::benches::copy::Copy;
use bench::benches::{
    attach, blocked, burst, copy, create, delete, extents, fairness, heal, idle, lifecycle, memory, recovery,
    scale,
};
use bench::instant::Backend;
use bench::plot;
use bench::report::Report;
use bench::work::Work;
use clap::{Parser, Subcommand};
use lab::{Lab, Setting};

/// Measures a lab that is up.
#[derive(Debug, Parser)]
#[command(name = "bench", version)]
struct Cli {
    #[command(subcommand)]
    bench: Bench,
    /// Where the rows go, as JSON; target/bench/NAME.json unless given.
    #[arg(long, global = true, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Runs a part of the lab with another flag meanwhile, as in g1-provisioner:kube-api-qps=5. Repeatable.
    #[arg(long = "set", global = true, value_name = "PART:FLAG[=VALUE]")]
    settings: Vec<Setting>,
    /// Gives the guests' parts half of the processors, and all other parts the other half.
    #[arg(long, global = true)]
    apart: bool,
}

#[derive(Debug, Subcommand)]
enum Bench {
    /// A guest claim until it is bound, against the same claim made in the management cluster.
    Create {
        #[command(flatten)]
        work: Work,
        /// What makes the volumes of management claims.
        #[arg(long, value_enum, default_value_t = Backend::Infra)]
        backend: Backend,
    },
    /// A guest claim from its deletion until its volume is gone, against the same in the management cluster.
    Delete(Work),
    /// More and more claims at once, until all are bound and until all are gone.
    Burst(Work),
    /// A volume's whole life, against the same one tier further down.
    Lifecycle {
        #[command(flatten)]
        work: Work,
        #[command(flatten)]
        beside: lifecycle::Beside,
    },
    /// A guest's order to attach until it is carried out, against the infra's own attach.
    Attach(Work),
    /// A guest's order to attach, taken back, until it is gone, against the infra's own detach.
    Detach(Work),
    /// Other work while many disks wait for a machine that hangs, against the same work alone.
    Blocked {
        #[command(flatten)]
        work: Work,
        /// How many disks wait.
        #[arg(long, default_value_t = 100)]
        waiting: usize,
    },
    /// CreateSnapshot of a volume of 1 GiB until it is ready, against the infra's own snapshot.
    Snapshot(Work),
    /// CreateVolume from a volume of 1 GiB until it answers, against the infra's own clone.
    Clone(Work),
    /// How long claims and attaches wait on when what kept them from being carried out is over.
    Heal {
        #[command(flatten)]
        work: Work,
        /// How long they are kept.
        #[arg(long, default_value_t = 60)]
        seconds: u64,
    },
    /// Requests and processor time while nothing happens.
    Idle {
        /// With how many volumes.
        #[arg(long, value_delimiter = ',', default_values_t = [1000])]
        volumes: Vec<u32>,
        /// For how long.
        #[arg(long, default_value_t = 60)]
        seconds: u64,
    },
    /// Memory of each process.
    Memory {
        /// With how many volumes.
        #[arg(long, value_delimiter = ',', default_values_t = [125, 1000])]
        volumes: Vec<u32>,
    },
    /// From the start of a process until it is ready, and from an API server's return until all watch it again.
    Recovery {
        #[command(flatten)]
        work: Work,
        /// With how many volumes.
        #[arg(long, default_value_t = 100)]
        volumes: usize,
    },
    /// A guest's attaches and detaches while another VM does its worst, against the same alone.
    Fairness(fairness::Worst),
    /// What a pool's filesystem takes for itself for volumes that are written in random order.
    Extents {
        /// How large the volumes are, in MiB.
        #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(16..=256))]
        mebibytes: u64,
    },
    /// Many guests on one management tier: a first attach of everything, and a rack that fails.
    Scale(scale::Size),
    /// Draws what the benches wrote, as SVG.
    Plot {
        /// Where the plots go; docs/reference/plots unless given.
        folder: Option<PathBuf>,
    },
}

impl Bench {
    fn name(&self) -> &'static str {
        match self {
            Self::Create { backend: Backend::Infra, .. } => "create",
            Self::Create { backend: Backend::Instant, .. } => "create-instant",
            Self::Delete(_) => "delete",
            Self::Burst(_) => "burst",
            Self::Lifecycle { .. } => "lifecycle",
            Self::Attach(_) => "attach",
            Self::Detach(_) => "detach",
            Self::Blocked { .. } => "blocked",
            Self::Snapshot(_) => "snapshot",
            Self::Clone(_) => "clone",
            Self::Heal { .. } => "heal",
            Self::Idle { .. } => "idle",
            Self::Memory { .. } => "memory",
            Self::Recovery { .. } => "recovery",
            Self::Fairness(_) => "fairness",
            Self::Extents { .. } => "extents",
            Self::Scale(_) => "scale",
            Self::Plot { .. } => "plot",
        }
    }

    async fn run(&self, report: &Report) -> Result<()> {
        match self {
            Self::Create { work, backend } => create::run(report, work, *backend).await,
            Self::Delete(work) => delete::run(report, work).await,
            Self::Burst(work) => burst::run(report, work).await,
            Self::Lifecycle { work, beside } => lifecycle::run(report, work, beside).await,
            Self::Attach(work) => attach::run(report, work, Direction::Attach).await,
            Self::Detach(work) => attach::run(report, work, Direction::Detach).await,
            Self::Blocked { work, waiting } => blocked::run(report, work, *waiting).await,
            Self::Snapshot(work) => copy::run(report, work, Copy::Snapshot).await,
            Self::Clone(work) => copy::run(report, work, Copy::Clone).await,
            Self::Heal { work, seconds } => heal::run(report, work, *seconds).await,
            Self::Idle { volumes, seconds } => idle::run(report, volumes, *seconds).await,
            Self::Memory { volumes } => memory::run(report, volumes).await,
            Self::Recovery { work, volumes } => recovery::run(report, work, *volumes).await,
            Self::Fairness(worst) => fairness::run(report, worst).await,
            Self::Extents { mebibytes } => extents::run(report, *mebibytes).await,
            Self::Scale(size) => scale::run(report, size).await,
            Self::Plot { .. } => Ok(()),
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
    let name = cli.bench.name().to_owned() + if cli.apart { "-apart" } else { "" };
    let (lab, report) = (Lab::from_env()?, Report::new(&name));
    let work = async {
        match cli.apart {
            true => apart(&lab, cli.bench.run(&report)).await,
            false => cli.bench.run(&report).await,
        }
    };
    lab.with_settings(&cli.settings, work).await?;
    report.print()?;
    let file = cli.json.unwrap_or_else(|| results.join(format!("{name}.json")));
    report.write(&file)
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
}
