//! `mgmt-csi`.

use std::process::ExitCode;

use clap::Parser;
use kube_kit::process;
use kube_kit::telemetry::LogArgs;

#[derive(Debug, Parser)]
#[command(name = "mgmt-csi", version, about = "Nestor's CSI driver for the management cluster")]
struct Cli {
    #[command(flatten)]
    args: mgmt_csi::app::Args,
    #[command(flatten, next_help_heading = "Logs")]
    logs: LogArgs,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    process::run(&cli.logs, 2, |stop| mgmt_csi::app::run(cli.args, stop))
}
