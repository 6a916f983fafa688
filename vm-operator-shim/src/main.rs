//! Command line of `vm-operator-shim`.

use std::process::ExitCode;

use clap::Parser;
use process_kit::telemetry::LogArgs;
use process_kit::{flags, process};
use trace_export::TraceArgs;

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
    #[command(flatten, next_help_heading = "Traces")]
    traces: TraceArgs,
}

fn main() -> ExitCode {
    let cli: Cli = flags::parse();
    let traces = || cli.traces.start("vm-operator-shim");
    process::run_traced(&cli.logs, traces, 2, |stop| vm_operator_shim::app::run(cli.args, stop))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn every_flag_has_a_help_text_and_an_environment_variable() {
        let command = flags::with_env(Cli::command());
        command.clone().debug_assert();
        assert_eq!(flags::faults(&command), [""; 0]);
    }
}
