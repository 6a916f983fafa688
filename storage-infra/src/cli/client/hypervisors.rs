//! Host and hypervisor commands.

use clap::Subcommand;

use super::ClientArgs;
use crate::cli::output;

/// Hypervisor commands.
#[derive(Debug, Subcommand)]
pub(in crate::cli) enum HypervisorCommand {
    /// Declare that a hypervisor moved to another host and that nothing runs on the previous host.
    ForgetHost {
        /// Name in the server's --hypervisor flag.
        name: String,
        #[command(flatten)]
        client: ClientArgs,
    },
}

/// Host commands.
#[derive(Debug, Subcommand)]
pub(in crate::cli) enum HostCommand {
    /// List the hosts, which are the server's hypervisors, with their health and the pools that they reach.
    List {
        #[command(flatten)]
        client: ClientArgs,
    },
}

/// Runs a host command.
pub(super) async fn run_host(command: HostCommand) -> anyhow::Result<()> {
    match command {
        HostCommand::List { client } => output::many(client.output, &client.connect()?.list_hosts().await?),
    }
}

/// Runs a hypervisor command.
pub(super) async fn run(command: HypervisorCommand) -> anyhow::Result<()> {
    match command {
        HypervisorCommand::ForgetHost { name, client } => {
            client.connect()?.forget_host(&name).await?;
            output::done(client.output, &format!("previous host of hypervisor {name} forgotten"))
        }
    }
}
