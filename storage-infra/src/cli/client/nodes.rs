//! Node commands.

use clap::Subcommand;
use infra_api::{Labels, NodeSpec};
use uuid::Uuid;

use super::ClientArgs;
use crate::cli::output;

/// Node commands.
#[derive(Debug, Subcommand)]
pub(in crate::cli) enum NodeCommand {
    /// Register a virtual machine as a node, or change its registration.
    Register {
        /// UUID of the virtual machine, as in its firmware (DMI).
        uuid: Uuid,
        /// Display name.
        #[arg(long)]
        name: String,
        /// Hypervisor that runs it, by its name in the server's --hypervisor flag. Default: the one that has a virtual
        /// machine with this UUID.
        #[arg(long, default_value = "", hide_default_value = true)]
        hypervisor: String,
        /// Zone of the node. Default: that of its hypervisor.
        #[arg(long)]
        zone: Option<String>,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// List all nodes.
    List {
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Declare the saved state of a virtual machine as discarded: it will never resume from it, so its disks can be
    /// detached.
    DiscardSavedState {
        /// UUID of the node.
        uuid: Uuid,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Unregister a node that has no attachments, or whose virtual machine does not exist.
    Remove {
        /// UUID of the node.
        uuid: Uuid,
        #[command(flatten)]
        client: ClientArgs,
    },
}

/// Runs a node command.
pub(super) async fn run(command: NodeCommand) -> anyhow::Result<()> {
    match command {
        NodeCommand::Register { uuid, name, hypervisor, zone, client } => {
            let spec = NodeSpec { name, hypervisor, zone, labels: Labels::new() };
            output::one(client.output, &client.connect()?.put_node(uuid, &spec).await?)
        }
        NodeCommand::List { client } => output::many(client.output, &client.connect()?.list_nodes().await?),
        NodeCommand::DiscardSavedState { uuid, client } => {
            client.connect()?.discard_saved_state(uuid).await?;
            output::done(client.output, &format!("saved state of node {uuid} declared as discarded"))
        }
        NodeCommand::Remove { uuid, client } => {
            client.connect()?.delete_node(uuid).await?;
            output::done(client.output, &format!("node {uuid} unregistered"))
        }
    }
}
