//! Nodes: virtual machines that disks are plugged into.

use clap::Subcommand;
use infra_api::{Labels, NodeSpec};
use uuid::Uuid;

use super::ClientArgs;
use crate::cli::output;

/// What to do with nodes.
#[derive(Debug, Subcommand)]
pub(in crate::cli) enum NodeVerb {
    /// Register a virtual machine, or change it.
    Register {
        /// Its UUID, as in its firmware.
        uuid: Uuid,
        /// A name for people.
        #[arg(long)]
        name: String,
        /// The hypervisor that runs it, by the server's name for it.
        #[arg(long)]
        hypervisor: String,
        /// The zone it is in.
        #[arg(long)]
        zone: Option<String>,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Show all nodes.
    List {
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Say that the saved state of a virtual machine is discarded: it will not go on from there, so its disks are free.
    DiscardSavedState {
        /// Its UUID.
        uuid: Uuid,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Forget a node without disks, or one whose machine is gone.
    Remove {
        /// Its UUID.
        uuid: Uuid,
        #[command(flatten)]
        client: ClientArgs,
    },
}

/// Does one verb.
pub(super) async fn run(verb: NodeVerb) -> anyhow::Result<()> {
    match verb {
        NodeVerb::Register { uuid, name, hypervisor, zone, client } => {
            let spec = NodeSpec { name, hypervisor, zone, labels: Labels::new() };
            output::one(client.output, &client.connect()?.put_node(uuid, &spec).await?)
        }
        NodeVerb::List { client } => output::many(client.output, &client.connect()?.list_nodes().await?),
        NodeVerb::DiscardSavedState { uuid, client } => {
            client.connect()?.discard_saved_state(uuid).await?;
            output::done(client.output, &format!("the saved state of node {uuid} does not count any more"))
        }
        NodeVerb::Remove { uuid, client } => {
            client.connect()?.delete_node(uuid).await?;
            output::done(client.output, &format!("node {uuid} removed"))
        }
    }
}
