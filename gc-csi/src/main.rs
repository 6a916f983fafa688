//! `gc-csi`: controller plugin of the guest driver.

use std::process::ExitCode;

use clap::Parser;
use process_kit::telemetry::LogArgs;
use process_kit::{flags, process};
use trace_export::TraceArgs;

/// Nestor's CSI driver for guest clusters: the controller plugin.
///
/// Serves the CSI Controller service to csi-provisioner, csi-attacher, csi-resizer and csi-snapshotter, and reconciles
/// guest volumes with PersistentVolumeClaims and VirtualMachines of the management cluster.
#[derive(Debug, Parser)]
#[command(name = "gc-csi", version)]
struct Cli {
    #[command(flatten)]
    args: gc_csi::controller::Args,
    #[command(flatten, next_help_heading = "Logs")]
    logs: LogArgs,
    #[command(flatten, next_help_heading = "Traces")]
    traces: TraceArgs,
}

fn main() -> ExitCode {
    let cli: Cli = flags::parse();
    let traces = || cli.traces.start("gc-csi");
    // One thread: with two, a claim in a burst takes a tenth more CPU time, since each event wakes both.
    process::run_traced(&cli.logs, traces, 1, |stop| gc_csi::controller::run(cli.args, stop))
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
