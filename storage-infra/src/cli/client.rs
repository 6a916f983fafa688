//! The client's verbs, over the same REST API that everyone uses.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, Subcommand};
use infra_api::{
    AttachmentId, CapacityQuery, Client, ClientOptions, EngineKind, Labels, NodeSpec, Placement, Pool,
    PoolName, PoolSpec, Volume, VolumeId, VolumeSize, VolumeSpec,
};
use uuid::Uuid;

use super::output::{self, Format};
use super::size;

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
        verb: PoolVerb,
    },
    /// Volumes.
    Volume {
        #[command(subcommand)]
        verb: VolumeVerb,
    },
    /// Nodes: virtual machines that disks are plugged into.
    Node {
        #[command(subcommand)]
        verb: NodeVerb,
    },
    /// Attachments: disks in virtual machines.
    Attachment {
        #[command(subcommand)]
        verb: AttachmentVerb,
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

/// What to do with pools.
#[derive(Debug, Subcommand)]
pub(super) enum PoolVerb {
    /// Register a directory as a pool, or change a pool's labels.
    Add {
        /// The pool's name.
        name: PoolName,
        /// An existing directory on the server.
        #[arg(long, value_name = "DIR")]
        path: String,
        /// A label that placement can ask for. Repeatable.
        #[arg(long = "label", value_name = "KEY=VALUE", value_parser = label)]
        labels: Vec<(String, String)>,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Show all pools.
    List {
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Show one pool.
    Show {
        /// The pool's name.
        name: PoolName,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Let a pool take no new volumes.
    Cordon {
        /// The pool's name.
        name: PoolName,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Let a pool take new volumes again.
    Uncordon {
        /// The pool's name.
        name: PoolName,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Forget a pool without volumes. Its directory stays.
    Remove {
        /// The pool's name.
        name: PoolName,
        #[command(flatten)]
        client: ClientArgs,
    },
}

/// What to do with volumes.
#[derive(Debug, Subcommand)]
pub(super) enum VolumeVerb {
    /// Show all volumes.
    List {
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Show one volume.
    Show {
        /// The volume's id.
        id: VolumeId,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Create a volume.
    Create {
        /// The volume's id.
        id: VolumeId,
        /// Its size, such as 10Gi.
        #[arg(long, value_parser = size::parse)]
        size: u64,
        /// Only in this pool.
        #[arg(long)]
        pool: Option<PoolName>,
        /// Only in a pool with this label. Repeatable.
        #[arg(long = "pool-label", value_name = "KEY=VALUE", value_parser = label)]
        pool_labels: Vec<(String, String)>,
        /// Only in a pool that this zone can reach.
        #[arg(long)]
        zone: Option<String>,
        /// Not in a pool with another volume of this group.
        #[arg(long, value_name = "GROUP")]
        anti_affinity: Option<String>,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Delete a volume and its bytes.
    Delete {
        /// The volume's id.
        id: VolumeId,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Grow a volume, live where it is attached.
    Grow {
        /// The volume's id.
        id: VolumeId,
        /// Its new size, such as 20Gi.
        #[arg(long, value_parser = size::parse)]
        size: u64,
        #[command(flatten)]
        client: ClientArgs,
    },
}

/// What to do with nodes.
#[derive(Debug, Subcommand)]
pub(super) enum NodeVerb {
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
    /// Forget a node without disks, or one whose machine is gone.
    Remove {
        /// Its UUID.
        uuid: Uuid,
        #[command(flatten)]
        client: ClientArgs,
    },
}

/// What to do with attachments.
#[derive(Debug, Subcommand)]
pub(super) enum AttachmentVerb {
    /// Show all attachments.
    List {
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Unplug a disk.
    Delete {
        /// The attachment's id.
        id: AttachmentId,
        /// How long to wait, in seconds.
        #[arg(long, default_value_t = 60)]
        timeout: u64,
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
        Verb::Pool { verb } => pool(verb).await,
        Verb::Volume { verb } => volume(verb).await,
        Verb::Node { verb } => node(verb).await,
        Verb::Attachment { verb } => attachment(verb).await,
        Verb::Capacity { pool, zone, labels, client } => {
            let query = CapacityQuery { pool, zone, labels: labels.into_iter().collect() };
            output::one(client.output, &client.connect()?.capacity(&query).await?)
        }
    }
}

async fn find_pool(client: &Client, name: &PoolName) -> anyhow::Result<Pool> {
    client.get_pool(name).await?.with_context(|| format!("there is no pool {name}"))
}

async fn cordon(client: &ClientArgs, name: &PoolName, cordoned: bool) -> anyhow::Result<()> {
    let server = client.connect()?;
    let Pool { engine, path, labels, .. } = find_pool(&server, name).await?;
    output::one(client.output, &server.put_pool(name, &PoolSpec { engine, path, labels, cordoned }).await?)
}

async fn pool(verb: PoolVerb) -> anyhow::Result<()> {
    match verb {
        PoolVerb::Add { name, path, labels, client } => {
            let server = client.connect()?;
            // Adding again is for changing labels; whether it is cordoned stays as it is.
            let cordoned = server.get_pool(&name).await?.is_some_and(|pool| pool.cordoned);
            let labels: Labels = labels.into_iter().collect();
            let spec = PoolSpec { engine: EngineKind::File, path, labels, cordoned };
            output::one(client.output, &server.put_pool(&name, &spec).await?)
        }
        PoolVerb::List { client } => output::many(client.output, &client.connect()?.list_pools().await?),
        PoolVerb::Show { name, client } => {
            output::one(client.output, &find_pool(&client.connect()?, &name).await?)
        }
        PoolVerb::Cordon { name, client } => cordon(&client, &name, true).await,
        PoolVerb::Uncordon { name, client } => cordon(&client, &name, false).await,
        PoolVerb::Remove { name, client } => {
            client.connect()?.delete_pool(&name).await?;
            output::done(client.output, &format!("pool {name} removed"))
        }
    }
}

async fn volume(verb: VolumeVerb) -> anyhow::Result<()> {
    match verb {
        VolumeVerb::List { client } => {
            let server = client.connect()?;
            let mut volumes: Vec<Volume> = Vec::new();
            let mut after = None;
            loop {
                let page = server.list_volumes(None, after.as_deref()).await?;
                volumes.extend(page.items);
                after = page.next;
                if after.is_none() {
                    return output::many(client.output, &volumes);
                }
            }
        }
        VolumeVerb::Show { id, client } => {
            let found = client.connect()?.get_volume(&id).await?;
            output::one(client.output, &found.with_context(|| format!("there is no volume {id}"))?)
        }
        VolumeVerb::Create { id, size, pool, pool_labels, zone, anti_affinity, client } => {
            let placement = Placement {
                pool,
                pool_labels: pool_labels.into_iter().collect(),
                anti_affinity_id: anti_affinity,
                zone,
            };
            let spec =
                VolumeSpec { capacity_bytes: size, limit_bytes: None, placement, labels: Labels::new() };
            output::one(client.output, &client.connect()?.put_volume(&id, &spec).await?)
        }
        VolumeVerb::Delete { id, client } => {
            client.connect()?.delete_volume(&id).await?;
            output::done(client.output, &format!("volume {id} deleted"))
        }
        VolumeVerb::Grow { id, size, client } => {
            let size = VolumeSize { capacity_bytes: size, limit_bytes: None };
            output::one(client.output, &client.connect()?.grow_volume(&id, &size).await?)
        }
    }
}

async fn node(verb: NodeVerb) -> anyhow::Result<()> {
    match verb {
        NodeVerb::Register { uuid, name, hypervisor, zone, client } => {
            let spec = NodeSpec { name, hypervisor, zone, labels: Labels::new() };
            output::one(client.output, &client.connect()?.put_node(uuid, &spec).await?)
        }
        NodeVerb::List { client } => output::many(client.output, &client.connect()?.list_nodes().await?),
        NodeVerb::Remove { uuid, client } => {
            client.connect()?.delete_node(uuid).await?;
            output::done(client.output, &format!("node {uuid} removed"))
        }
    }
}

async fn attachment(verb: AttachmentVerb) -> anyhow::Result<()> {
    match verb {
        AttachmentVerb::List { client } => {
            output::many(client.output, &client.connect()?.list_attachments(None, None).await?)
        }
        AttachmentVerb::Delete { id, timeout, client } => {
            client.connect()?.detach(&id, Duration::from_secs(timeout)).await?;
            output::done(client.output, &format!("attachment {id} deleted"))
        }
    }
}
