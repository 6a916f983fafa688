//! `mgmt-csi orphans`: lists unused objects of the management cluster and the storage infra. Nothing is removed
//! automatically; `--remove` removes what the list shows as removable, by default as a dry run.

mod find;
mod inventory;
mod print;
mod reason;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use infra_api::{AttachmentId, InfraArgs, SnapshotId, VolumeId};
use kube::api::{DeleteParams, Preconditions};
use kube::{Api, Client};
use kube_kit::client::{KubeconfigArgs, chain};
use kube_kit::partial::PersistentVolumeClaim;
use process_kit::duration;
use tokio::time::Instant;

use super::ClockArgs;
use crate::infra::{Rest, StorageInfra};
use find::{Kind, Orphan, Removal, find};
use inventory::Inventory;
use print::{Format, Outcomes};

/// Timeout of one removal.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum age of the inventory on which a removal is decided.
const MAX_AGE: Duration = Duration::from_secs(5);

/// Flags of `mgmt-csi orphans`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    cluster: KubeconfigArgs,
    #[command(flatten)]
    infra: InfraArgs,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
    /// Only objects with these names or IDs.
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Only objects of at least this age, for instance 12h or 30d. The maximum clock skew is added.
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    older_than: Option<Duration>,
    #[command(flatten)]
    clocks: ClockArgs,
    /// Declares that no other cluster uses this storage infra. Without it, no volume and no snapshot of the storage infra
    /// is removed, because another cluster may use it.
    #[arg(long)]
    exclusive_infra: bool,
    /// Remove the removable objects with their data. Requires --older-than. A dry run unless --dry-run=false is given.
    #[arg(long, requires = "older_than")]
    remove: bool,
    /// With --remove, only print what would be removed.
    #[arg(long, value_name = "BOOL", requires = "remove", default_value_t = true, action = clap::ArgAction::Set)]
    dry_run: bool,
}

/// Filters of the list.
#[derive(Debug)]
struct Limits {
    names: Vec<String>,
    older_than: Option<Duration>,
    exclusive: bool,
    clock_skew: Duration,
}

/// Lists orphans, and removes them if requested.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let infra: Arc<dyn StorageInfra> = Arc::new(Rest::new(args.infra.client()?));
    let client = args.cluster.connect("mgmt-csi").await?;
    let limits = Limits {
        names: args.names,
        older_than: args.older_than,
        exclusive: args.exclusive_infra,
        clock_skew: args.clocks.max_clock_skew,
    };
    let orphans = read(&client, &*infra, &limits).await?;
    let outcomes = match args.remove && !args.dry_run {
        true => remove(&client, &*infra, &orphans, &limits).await,
        false => Outcomes::new(),
    };
    print::print(args.output, &orphans, args.remove, &outcomes)?;
    let removable = orphans.iter().filter(|orphan| orphan.removal == Removal::Delete).count();
    if args.remove && args.dry_run {
        eprintln!("dry run: nothing was removed; --dry-run=false would remove {removable}");
    }
    let failed = outcomes.values().filter(|outcome| outcome.is_err()).count();
    if failed > 0 {
        bail!("failed to remove {failed} of {removable}");
    }
    Ok(())
}

async fn read(client: &Client, infra: &dyn StorageInfra, limits: &Limits) -> anyhow::Result<Vec<Orphan>> {
    let inventory = Inventory::read(client, infra, limits.clock_skew).await?;
    let mut orphans = find(&inventory, limits.exclusive);
    // An age is the difference between a server's timestamp and the clock of this process.
    let is_old = |orphan: &Orphan, least: Duration| {
        orphan.age.is_some_and(|age| age >= least.saturating_add(limits.clock_skew))
    };
    orphans.retain(|orphan| limits.names.is_empty() || limits.names.contains(&orphan.name));
    orphans.retain(|orphan| limits.older_than.is_none_or(|least| is_old(orphan, least)));
    Ok(orphans)
}

/// Removes orphans one by one, each only if it is still removable.
async fn remove(client: &Client, infra: &dyn StorageInfra, orphans: &[Orphan], limits: &Limits) -> Outcomes {
    let mut outcomes = Outcomes::new();
    let mut cached: Option<(Instant, Vec<Orphan>)> = None;
    for orphan in orphans.iter().filter(|orphan| orphan.removal == Removal::Delete) {
        let outcome = async {
            if cached.as_ref().is_none_or(|(read_at, _)| read_at.elapsed() > MAX_AGE) {
                let began = Instant::now();
                let orphans = read(client, infra, limits).await.map_err(|error| format!("{error:#}"))?;
                cached = Some((began, orphans));
            }
            let still = cached.iter().flat_map(|(_, orphans)| orphans).find(|now| now.is_same(orphan));
            match still.filter(|now| now.removal == Removal::Delete) {
                Some(now) => remove_one(client, infra, now).await.map_err(|error| format!("{error:#}")),
                None => Err("skipped: it has changed since it was listed".to_owned()),
            }
        };
        outcomes.insert((orphan.kind, orphan.full_name()), outcome.await);
    }
    outcomes
}

async fn remove_one(client: &Client, infra: &dyn StorageInfra, orphan: &Orphan) -> anyhow::Result<()> {
    let deadline = Instant::now() + REMOVAL_TIMEOUT;
    match orphan.kind {
        Kind::Claim => {
            let namespace = orphan.namespace.as_deref().context("the claim has no namespace")?;
            let api: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), namespace);
            // The precondition fails if a consumer or an annotation was added since the read.
            let preconditions =
                Preconditions { uid: orphan.uid.clone(), resource_version: orphan.resource_version.clone() };
            let parameters = DeleteParams::default().preconditions(preconditions);
            match api.delete(&orphan.name, &parameters).await {
                Ok(_) => Ok(()),
                Err(error) => bail!("{}", chain(&error)),
            }
        }
        Kind::InfraVolume => Ok(infra.delete_volume(&VolumeId::new(&*orphan.name)?, deadline).await?),
        Kind::InfraSnapshot => Ok(infra.delete_snapshot(&SnapshotId::new(&*orphan.name)?, deadline).await?),
        Kind::InfraAttachment => {
            Ok(infra.detach(&AttachmentId::new(&*orphan.name)?, false, REMOVAL_TIMEOUT).await?)
        }
        Kind::Volume => bail!("PersistentVolumes are never removed by this command"),
    }
}
