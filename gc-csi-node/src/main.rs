//! `gc-csi-node`: the node plugin of the guest driver.

use std::process::ExitCode;

use clap::Parser;
use process_kit::telemetry::LogArgs;
use process_kit::{flags, process};
use trace_export::TraceArgs;

/// Nestor's CSI driver for guest clusters: the node plugin.
///
/// Serves the CSI Node service to kubelet inside a VM: it formats, mounts and expands the disks that the controller
/// plugin attached. It has no access to the management cluster.
#[derive(Debug, Parser)]
#[command(name = "gc-csi-node", version)]
struct Cli {
    #[command(flatten)]
    args: gc_csi_node::Args,
    #[command(flatten, next_help_heading = "Logs")]
    logs: LogArgs,
    #[command(flatten, next_help_heading = "Traces")]
    traces: TraceArgs,
}

fn main() -> ExitCode {
    let cli: Cli = flags::parse();
    let traces = || cli.traces.start("gc-csi-node");
    process::run_traced(&cli.logs, traces, 1, |stop| gc_csi_node::run(cli.args, stop))
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
