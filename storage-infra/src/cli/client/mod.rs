//! The client's verbs, over the same REST API that everyone uses; one module for each kind of object.

mod attachments;
mod hypervisors;
mod nodes;
mod pools;
mod snapshots;
mod volumes;

use std::path::PathBuf;

use clap::{Args, Subcommand};
use infra_api::{CapacityQuery, Client, ClientOptions, PoolName};

use super::output::{self, Format};

/// Where the server is, and who we are to it.
#[derive(Debug, Args)]
pub struct ClientArgs {
    /// The server's URL.
    #[arg(long, env = "NESTOR_INFRA_URL", value_name = "https://HOST:PORT")]
    server: String,
    /// The authority that signed the server's certificate, PEM.
    #[arg(long, env = "NESTOR_INFRA_CA", value_name = "FILE")]
    ca: PathBuf,
    /// Our certificate, PEM.
    #[arg(long, env = "NESTOR_INFRA_CERT", value_name = "FILE")]
    cert: PathBuf,
    /// Our private key, PEM.
    #[arg(long, env = "NESTOR_INFRA_KEY", value_name = "FILE")]
    key: PathBuf,
    /// What to print.
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
}

/// What to do at the server.
#[derive(Debug, Subcommand)]
pub(super) enum Verb {
    /// Pools: where volumes are kept.
    Pool {
        #[command(subcommand)]
        verb: pools::PoolVerb,
    },
    /// Volumes.
    Volume {
        #[command(subcommand)]
        verb: volumes::VolumeVerb,
    },
    /// Snapshots of volumes.
    Snapshot {
        #[command(subcommand)]
        verb: snapshots::SnapshotVerb,
    },
    /// Nodes: virtual machines that disks are plugged into.
    Node {
        #[command(subcommand)]
        verb: nodes::NodeVerb,
    },
    /// Hypervisors: what runs virtual machines.
    Hypervisor {
        #[command(subcommand)]
        verb: hypervisors::HypervisorVerb,
    },
    /// Attachments: disks in virtual machines.
    Attachment {
        #[command(subcommand)]
        verb: attachments::AttachmentVerb,
    },
    /// What new volumes can have.
    Capacity {
        /// Only this pool.
        #[arg(long)]
        pool: Option<PoolName>,
        /// Only pools that this zone can reach.
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
        Ok(Client::new(&ClientOptions::from_files(&self.server, &self.ca, &self.cert, &self.key)?)?)
    }
}

/// Does one verb.
pub(super) async fn run(verb: Verb) -> anyhow::Result<()> {
    match verb {
        Verb::Pool { verb } => pools::run(verb).await,
        Verb::Volume { verb } => volumes::run(verb).await,
        Verb::Snapshot { verb } => snapshots::run(verb).await,
        Verb::Node { verb } => nodes::run(verb).await,
        Verb::Hypervisor { verb } => hypervisors::run(verb).await,
        Verb::Attachment { verb } => attachments::run(verb).await,
        Verb::Capacity { pool, zone, labels, client } => {
            let query = CapacityQuery { pool, zone, labels: labels.into_iter().collect() };
            output::one(client.output, &client.connect()?.capacity(&query).await?)
        }
    }
}
