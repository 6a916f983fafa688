//! Pools: where volumes are kept.

use anyhow::Context;
use clap::Subcommand;
use infra_api::{Client, EngineKind, Labels, OnFull, Pool, PoolName, PoolSpec};

use super::{ClientArgs, label};
use crate::cli::output;

/// What to do with pools.
#[derive(Debug, Subcommand)]
pub(in crate::cli) enum PoolVerb {
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
        /// What becomes of a VM that writes while the pool is full: `pause` until there is room, or `fail` the write. As
        /// it was, or `pause`, where it is not given.
        #[arg(long, value_name = "pause|fail", value_parser = on_full)]
        on_full: Option<OnFull>,
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
    /// Show the files in pools that no volume or snapshot owns. They are never touched.
    UnknownFiles {
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

fn on_full(text: &str) -> Result<OnFull, String> {
    [OnFull::Pause, OnFull::Fail]
        .into_iter()
        .find(|one| one.to_string() == text)
        .ok_or_else(|| "give pause or fail".to_owned())
}

async fn find_pool(client: &Client, name: &PoolName) -> anyhow::Result<Pool> {
    client.get_pool(name).await?.with_context(|| format!("there is no pool {name}"))
}

async fn cordon(client: &ClientArgs, name: &PoolName, cordoned: bool) -> anyhow::Result<()> {
    let server = client.connect()?;
    let Pool { engine, path, labels, on_full, .. } = find_pool(&server, name).await?;
    let spec = PoolSpec { engine, path, labels, cordoned, on_full };
    output::one(client.output, &server.put_pool(name, &spec).await?)
}

/// Does one verb.
pub(super) async fn run(verb: PoolVerb) -> anyhow::Result<()> {
    match verb {
        PoolVerb::Add { name, path, labels, on_full, client } => {
            let server = client.connect()?;
            // Adding again is for changing labels; whether it is cordoned stays as it is.
            let before = server.get_pool(&name).await?;
            let cordoned = before.as_ref().is_some_and(|pool| pool.cordoned);
            let on_full = on_full.or(before.map(|pool| pool.on_full)).unwrap_or_default();
            let labels: Labels = labels.into_iter().collect();
            let spec = PoolSpec { engine: EngineKind::File, path, labels, cordoned, on_full };
            output::one(client.output, &server.put_pool(&name, &spec).await?)
        }
        PoolVerb::List { client } => output::many(client.output, &client.connect()?.list_pools().await?),
        PoolVerb::Show { name, client } => {
            output::one(client.output, &find_pool(&client.connect()?, &name).await?)
        }
        PoolVerb::UnknownFiles { client } => {
            let pools = client.connect()?.list_pools().await?;
            output::many(client.output, &pools.iter().flat_map(output::UnknownFile::of).collect::<Vec<_>>())
        }
        PoolVerb::Cordon { name, client } => cordon(&client, &name, true).await,
        PoolVerb::Uncordon { name, client } => cordon(&client, &name, false).await,
        PoolVerb::Remove { name, client } => {
            client.connect()?.delete_pool(&name).await?;
            output::done(client.output, &format!("pool {name} removed"))
        }
    }
}
