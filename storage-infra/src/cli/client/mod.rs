//! Client commands, over the REST API; one module per kind of object.

mod attachments;
mod budgets;
mod disks;
mod hypervisors;
mod moves;
mod nodes;
mod pools;
mod progress;
mod snapshots;
mod suspensions;
mod transfers;
mod volumes;

use std::path::PathBuf;

use clap::{Args, Subcommand};
use infra_api::{CapacityQuery, Client, ClientOptions, PoolName};

use super::output::{self, Format};

/// Server address and client credentials.
#[derive(Debug, Args)]
#[command(next_help_heading = "Client")]
pub struct ClientArgs {
    /// URL of the storage infra API, for instance `https://infra.example:8443`.
    #[arg(long, env = "NESTOR_INFRA_URL", hide_env_values = true, value_name = "URL")]
    infra_url: String,
    /// CA certificate of the storage infra, PEM.
    #[arg(
        long,
        env = "NESTOR_INFRA_CA",
        hide_env_values = true,
        value_name = "FILE",
        default_value = "/etc/nestor/pki/ca.crt"
    )]
    infra_ca: PathBuf,
    /// Client certificate with the role operator, PEM. Commands that only show something also work with the role reader.
    #[arg(
        long,
        env = "NESTOR_INFRA_CERT",
        hide_env_values = true,
        value_name = "FILE",
        default_value = "/etc/nestor/pki/operator.crt"
    )]
    infra_cert: PathBuf,
    /// Private key of the client certificate, PEM.
    #[arg(
        long,
        env = "NESTOR_INFRA_KEY",
        hide_env_values = true,
        value_name = "FILE",
        default_value = "/etc/nestor/pki/operator.key"
    )]
    infra_key: PathBuf,
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
    /// Show the hosts that run virtual machines.
    Host {
        #[command(subcommand)]
        command: hypervisors::HostCommand,
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
        let Self { infra_url, infra_ca, infra_cert, infra_key, .. } = self;
        Ok(Client::new(&ClientOptions::from_files(infra_url, infra_ca, infra_cert, infra_key))?)
    }
}

/// Runs a client command.
pub(super) async fn run(command: ClientCommand) -> anyhow::Result<()> {
    match command {
        ClientCommand::Pool { command } => pools::run(command).await,
        ClientCommand::Volume { command } => volumes::run(command).await,
        ClientCommand::Snapshot { command } => snapshots::run(command).await,
        ClientCommand::Node { command } => nodes::run(command).await,
        ClientCommand::Host { command } => hypervisors::run_host(command).await,
        ClientCommand::Hypervisor { command } => hypervisors::run(command).await,
        ClientCommand::Attachment { command } => attachments::run(command).await,
        ClientCommand::Budget { command } => budgets::run(command).await,
        ClientCommand::Capacity { pool, zone, labels, client } => {
            let query = CapacityQuery { pool, zone, labels: labels.into_iter().collect() };
            output::one(client.output, &client.connect()?.capacity(&query).await?)
        }
    }
}
