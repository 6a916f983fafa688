//! Command line of `kubectl-nestor`.

use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use kubectl_nestor::cli::Cli;
use kubectl_nestor::run::run;

/// Exit code of wrong usage and of clusters that cannot be read, like that of clap.
const FAILED: u8 = 2;

fn main() -> ExitCode {
    match start(Cli::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("kubectl-nestor: {error:#}");
            ExitCode::from(FAILED)
        }
    }
}

fn start(cli: Cli) -> anyhow::Result<bool> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    Ok(runtime.context("cannot start the runtime")?.block_on(run(cli))?)
}
