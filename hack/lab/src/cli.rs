//! The command line: verbs and their flags.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::run::Run;
use crate::ui::Ui;
use crate::up::UpOptions;
use crate::{down, up};

/// Brings up both clusters, virtual machines, the storage infra and the system on this machine, from source.
#[derive(Debug, Parser)]
#[command(name = "cargo lab", bin_name = "cargo lab", version)]
pub struct Cli {
    /// Which lab: labs of different names run side by side.
    #[arg(long, global = true, env = "NESTOR_LAB_NAME", default_value = "default")]
    name: String,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Brings a lab up. What is missing is built or installed first.
    Up(UpOptions),
    /// Takes a lab down, wholly, whatever state it is in.
    Down {
        /// Leave the logs.
        #[arg(long)]
        keep_logs: bool,
    },
}

/// Runs one command.
pub async fn run(cli: Cli) -> Result<ExitCode> {
    let ui = Ui::default();
    let run = Run::named(&cli.name)?;
    match cli.verb {
        Verb::Up(options) => up::up(&ui, &run, &options).await?,
        Verb::Down { keep_logs } => down::down(&ui, &run, keep_logs).await?,
    }
    Ok(ExitCode::SUCCESS)
}
