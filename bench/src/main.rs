//! `cargo lab bench NAME`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use bench::attach::Direction;
use bench::report::Report;
use bench::{attach, create, memory};
use clap::{Parser, ValueEnum};

/// Measures a lab that is up.
#[derive(Debug, Parser)]
#[command(name = "bench", version)]
struct Cli {
    /// What to measure.
    name: Bench,
    /// How often the work is done, one at a time.
    #[arg(long, value_name = "COUNT", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    count: u32,
    /// How much work is done at once in the burst; each bench has its own default.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=1000))]
    burst: Option<u32>,
    /// Where the rows go, as JSON; target/bench/NAME.json unless given.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Bench {
    /// A guest claim until it is bound, against the same claim made in the management cluster.
    Create,
    /// ControllerPublishVolume until it answers, against the infra's own attach.
    Attach,
    /// ControllerUnpublishVolume until it answers, against the infra's own detach.
    Detach,
    /// Memory of each process.
    Memory,
}

impl Bench {
    fn name(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Attach => "attach",
            Self::Detach => "detach",
            Self::Memory => "memory",
        }
    }
}

async fn run(cli: Cli) -> Result<()> {
    let count = cli.count as usize;
    let burst = |default: usize| cli.burst.map_or(default, |burst| burst as usize);
    let mut report = Report::new(cli.name.name());
    match cli.name {
        Bench::Create => create::run(&mut report, count, burst(100)).await?,
        Bench::Attach => attach::run(&mut report, Direction::Attach, count, burst(30)).await?,
        Bench::Detach => attach::run(&mut report, Direction::Detach, count, burst(30)).await?,
        Bench::Memory => memory::run(&mut report)?,
    }
    report.print()?;
    let file = match cli.json {
        Some(file) => file,
        None => lab::run::target_dir()?.join("bench").join(format!("{}.json", cli.name.name())),
    };
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
