//! `gc-csi controller` and `gc-csi node`.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use kube_kit::process;
use kube_kit::telemetry::LogArgs;

#[derive(Debug, Parser)]
#[command(name = "gc-csi", version, about = "Nestor's CSI driver for guest clusters")]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten, next_help_heading = "Logs")]
    logs: LogArgs,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serves the Controller service, next to csi-provisioner and csi-attacher.
    Controller(gc_csi::controller::Args),
    /// Serves the Node service, in a virtual machine, next to kubelet.
    Node(gc_csi::node::Args),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match cli.command {
        Command::Controller(args) => process::run(&cli.logs, 2, |stop| gc_csi::controller::run(args, stop)),
        Command::Node(args) => process::run(&cli.logs, 1, |stop| gc_csi::node::run(args, stop)),
    }
}
