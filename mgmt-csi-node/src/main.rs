//! `mgmt-csi-node`: the node plugin of the management driver.

use std::process::ExitCode;

use clap::Parser;
use process_kit::telemetry::LogArgs;
use process_kit::{flags, process};
use trace_export::TraceArgs;

/// Nestor's CSI driver for the management cluster: the node plugin.
///
/// Serves the CSI Node service to kubelet on a host of the management cluster: it formats, mounts and expands the disks that
/// the storage infra attached to this host for its pods. It has no access to the storage infra.
#[derive(Debug, Parser)]
#[command(name = "mgmt-csi-node", version)]
struct Cli {
    #[command(flatten)]
    args: mgmt_csi_node::Args,
    #[command(flatten, next_help_heading = "Logs")]
    logs: LogArgs,
    #[command(flatten, next_help_heading = "Traces")]
    traces: TraceArgs,
}

fn main() -> ExitCode {
    let cli: Cli = flags::parse();
    let traces = || cli.traces.start("mgmt-csi-node");
    process::run_traced(&cli.logs, traces, 1, |stop| mgmt_csi_node::run(cli.args, stop))
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
