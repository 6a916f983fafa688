//! Command line of `vm-operator-shim`.

use std::process::ExitCode;

use clap::Parser;
use process_kit::process;
use process_kit::telemetry::LogArgs;

#[derive(Debug, Parser)]
#[command(
    name = "vm-operator-shim",
    version,
    about = "Replaces the VM Operator where none is installed: creates and deletes VolumeAttachments from \
             VirtualMachine.spec.volumes, and copies their status to VirtualMachine.status.volumes"
)]
struct Cli {
    #[command(flatten)]
    args: vm_operator_shim::app::Args,
    #[command(flatten, next_help_heading = "Logs")]
    logs: LogArgs,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    process::run(&cli.logs, 2, |stop| vm_operator_shim::app::run(cli.args, stop))
}
