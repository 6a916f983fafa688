//! Pool commands.

use anyhow::Context;
use clap::Subcommand;
use infra_api::{Client, EngineKind, Labels, OnFull, Pool, PoolName, PoolSpec};

use super::suspensions::SuspensionArgs;
use super::{ClientArgs, label};
use crate::cli::output;

/// Pool commands.
#[derive(Debug, Subcommand)]
pub(in crate::cli) enum PoolCommand {
    /// Register a directory as a pool, or change a pool's labels and --on-full.
    Add {
        /// Name of the pool.
        name: PoolName,
        /// Existing directory on the server.
        #[arg(long, value_name = "DIR")]
        path: String,
        /// Label that volume placement can select on. Repeatable.
        #[arg(long = "label", value_name = "KEY=VALUE", value_parser = label)]
        labels: Vec<(String, String)>,
        /// What happens when a virtual machine writes while the pool is full: `pause` it until there is free space, or
        /// `fail` the write. Default: unchanged; `pause` for a new pool.
        #[arg(long, value_name = "pause|fail", value_parser = on_full)]
        on_full: Option<OnFull>,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// List all pools.
    List {
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Show one pool.
    Show {
        /// Name of the pool.
        name: PoolName,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// List files in pool directories that belong to no volume or snapshot. The server never changes them.
    UnknownFiles {
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Cordon a pool: it accepts no new volumes.
    Cordon {
        /// Name of the pool.
        name: PoolName,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Uncordon a pool: it accepts new volumes again.
    Uncordon {
        /// Name of the pool.
        name: PoolName,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Suspend a pool: it accepts no new volumes, and none of its volumes is attached, expanded or deleted until the pool is
    /// resumed.
    Suspend {
        /// Name of the pool.
        name: PoolName,
        #[command(flatten)]
        suspension: SuspensionArgs,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Resume a suspended pool, and the VMs that were paused for it.
    Resume {
        /// Name of the pool.
        name: PoolName,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Unregister a pool that has no volumes. Its directory remains.
    Remove {
        /// Name of the pool.
        name: PoolName,
        #[command(flatten)]
        client: ClientArgs,
    },
}

fn on_full(text: &str) -> Result<OnFull, String> {
    [OnFull::Pause, OnFull::Fail]
        .into_iter()
        .find(|one| one.to_string() == text)
        .ok_or_else(|| "must be pause or fail".to_owned())
}

async fn find_pool(client: &Client, name: &PoolName) -> anyhow::Result<Pool> {
    client.get_pool(name).await?.with_context(|| format!("pool {name} not found"))
}

async fn cordon(client: &ClientArgs, name: &PoolName, cordoned: bool) -> anyhow::Result<()> {
    let server = client.connect()?;
    let Pool { engine, path, labels, on_full, .. } = find_pool(&server, name).await?;
    let spec = PoolSpec { engine, path, labels, cordoned, on_full };
    output::one(client.output, &server.put_pool(name, &spec).await?)
}

/// Runs a pool command.
pub(super) async fn run(command: PoolCommand) -> anyhow::Result<()> {
    match command {
        PoolCommand::Add { name, path, labels, on_full, client } => {
            let server = client.connect()?;
            // `pool add` of an existing pool changes its labels and keeps whether it is cordoned.
            let before = server.get_pool(&name).await?;
            let cordoned = before.as_ref().is_some_and(|pool| pool.cordoned);
            let on_full = on_full.or(before.map(|pool| pool.on_full)).unwrap_or_default();
            let labels: Labels = labels.into_iter().collect();
            let spec = PoolSpec { engine: EngineKind::File, path, labels, cordoned, on_full };
            output::one(client.output, &server.put_pool(&name, &spec).await?)
        }
        PoolCommand::List { client } => output::many(client.output, &client.connect()?.list_pools().await?),
        PoolCommand::Show { name, client } => {
            output::one(client.output, &find_pool(&client.connect()?, &name).await?)
        }
        PoolCommand::UnknownFiles { client } => {
            let pools = client.connect()?.list_pools().await?;
            output::many(client.output, &pools.iter().flat_map(output::UnknownFile::of).collect::<Vec<_>>())
        }
        PoolCommand::Cordon { name, client } => cordon(&client, &name, true).await,
        PoolCommand::Uncordon { name, client } => cordon(&client, &name, false).await,
        PoolCommand::Suspend { name, suspension, client } => {
            output::one(client.output, &client.connect()?.suspend_pool(&name, &suspension.into()).await?)
        }
        PoolCommand::Resume { name, client } => {
            client.connect()?.resume_pool(&name).await?;
            output::done(client.output, &format!("pool {name} resumed"))
        }
        PoolCommand::Remove { name, client } => {
            client.connect()?.delete_pool(&name).await?;
            output::done(client.output, &format!("pool {name} unregistered"))
        }
    }
}
