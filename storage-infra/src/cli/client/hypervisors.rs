//! Hypervisor commands.

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

/// Runs a hypervisor command.
pub(super) async fn run(command: HypervisorCommand) -> anyhow::Result<()> {
    match command {
        HypervisorCommand::ForgetHost { name, client } => {
            client.connect()?.forget_host(&name).await?;
            output::done(client.output, &format!("previous host of hypervisor {name} forgotten"))
        }
    }
}
