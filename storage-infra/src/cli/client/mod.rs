//! Client commands, over the REST API; one module per kind of object.

mod attachments;
mod budgets;
mod hypervisors;
mod nodes;
mod pools;
mod snapshots;
mod volumes;

use clap::{Args, Subcommand};
use infra_api::{CapacityQuery, Client, InfraArgs, PoolName};

use super::output::{self, Format};

/// Server address and client credentials.
#[derive(Debug, Args)]
#[command(next_help_heading = "Client")]
pub struct ClientArgs {
    #[command(flatten)]
    infra: InfraArgs,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
}

/// Client commands.
#[derive(Debug, Subcommand)]
pub(super) enum ClientCommand {
    /// Manage pools, the directories that hold volumes.
    Pool {
        #[command(subcommand)]
        command: pools::PoolCommand,
    },
    /// Manage volumes.
    Volume {
        #[command(subcommand)]
        command: volumes::VolumeCommand,
    },
    /// Manage snapshots of volumes.
    Snapshot {
        #[command(subcommand)]
        command: snapshots::SnapshotCommand,
    },
    /// Manage nodes, the virtual machines that volumes are attached to.
    Node {
        #[command(subcommand)]
        command: nodes::NodeCommand,
    },
    /// Manage hypervisors.
    Hypervisor {
        #[command(subcommand)]
        command: hypervisors::HypervisorCommand,
    },
    /// Manage attachments of volumes to nodes.
    Attachment {
        #[command(subcommand)]
        command: attachments::AttachmentCommand,
    },
    /// Show budgets of guests, and what each guest uses.
    Budget {
        #[command(subcommand)]
        command: budgets::BudgetCommand,
    },
    /// Show the capacity available to new volumes.
    Capacity {
        /// Only this pool.
        #[arg(long)]
        pool: Option<PoolName>,
        /// Only pools that are reachable from this zone.
        #[arg(long)]
        zone: Option<String>,
        /// Only pools with this label. Repeatable.
        #[arg(long = "label", value_name = "KEY=VALUE", value_parser = label)]
        labels: Vec<(String, String)>,
        #[command(flatten)]
        client: ClientArgs,
    },
}

fn label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("must be KEY=VALUE")?;
    if key.is_empty() { Err("must be KEY=VALUE".into()) } else { Ok((key.to_owned(), value.to_owned())) }
}

impl ClientArgs {
    fn connect(&self) -> anyhow::Result<Client> {
        Ok(self.infra.client()?)
    }
}

/// Runs a client command.
pub(super) async fn run(command: ClientCommand) -> anyhow::Result<()> {
    match command {
        ClientCommand::Pool { command } => pools::run(command).await,
        ClientCommand::Volume { command } => volumes::run(command).await,
        ClientCommand::Snapshot { command } => snapshots::run(command).await,
        ClientCommand::Node { command } => nodes::run(command).await,
        ClientCommand::Hypervisor { command } => hypervisors::run(command).await,
        ClientCommand::Attachment { command } => attachments::run(command).await,
        ClientCommand::Budget { command } => budgets::run(command).await,
        ClientCommand::Capacity { pool, zone, labels, client } => {
            let query = CapacityQuery { pool, zone, labels: labels.into_iter().collect() };
            output::one(client.output, &client.connect()?.capacity(&query).await?)
        }
    }
}
