//! `mgmt-csi orphans`: what is there and nothing uses, in the management cluster and in the infra. Nothing of it is ever
//! removed by itself; a person can have it removed here, after having seen what that would be.

mod find;
mod print;
mod world;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use infra_api::{AttachmentId, SnapshotId, VolumeId};
use kube::api::{DeleteParams, Preconditions};
use kube::{Api, Client};
use kube_kit::client::{chain, connect};
use kube_kit::lean::PersistentVolumeClaim;
use process_kit::duration;
use tokio::time::Instant;

use super::ClockArgs;
use crate::infra::{InfraArgs, StorageInfra};
use find::{Kind, Orphan, Removal, find};
use print::Format;
use world::World;

/// How long the infra may take for one removal.
const REMOVED: Duration = Duration::from_secs(60);
/// How long what was read serves to remove things: each is decided anew on what is so now.
const FRESH: Duration = Duration::from_secs(5);

/// Flags of `mgmt-csi orphans`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Kubeconfig of the management cluster. Without it, the pod's service account is used.
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    #[command(flatten)]
    infra: InfraArgs,
    /// The shape of what is printed.
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
    /// Only these, by name or id.
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Only what is at least so old, as in 12h or 30d, by the clock of this process and with the difference of clocks added.
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    older_than: Option<Duration>,
    #[command(flatten)]
    clocks: ClockArgs,
    /// No other cluster uses this storage infra, so that what this one does not know there is nobody's. Without it, no
    /// volume and no snapshot of the infra is removed.
    #[arg(long)]
    exclusive_infra: bool,
    /// Remove what can be removed, with its data. Needs --older-than, and only says what it would do unless
    /// --dry-run=false is given.
    #[arg(long, requires = "older_than")]
    remove: bool,
    /// With --remove: only say what would be removed.
    #[arg(long, value_name = "BOOL", requires = "remove", default_value_t = true, action = clap::ArgAction::Set)]
    dry_run: bool,
}

/// What may be listed, and removed.
#[derive(Debug)]
struct Limits {
    names: Vec<String>,
    older_than: Option<Duration>,
    exclusive: bool,
    clock_skew: Duration,
}

/// What came of a removal, by the orphan.
type Outcomes = BTreeMap<(Kind, String), Result<(), String>>;

/// Lists, and removes where that was asked for.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let infra: Arc<dyn StorageInfra> = Arc::new(args.infra.connect()?);
    let client = connect("management", "--kubeconfig", args.kubeconfig.as_deref(), "mgmt-csi").await?;
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
        eprintln!("nothing was removed: {removable} would be with --dry-run=false");
    }
    let failed = outcomes.values().filter(|outcome| outcome.is_err()).count();
    if failed > 0 {
        bail!("{failed} of {removable} could not be removed");
    }
    Ok(())
}

async fn read(client: &Client, infra: &dyn StorageInfra, limits: &Limits) -> anyhow::Result<Vec<Orphan>> {
    let world = World::read(client, infra, limits.clock_skew).await?;
    let mut orphans = find(&world, limits.exclusive);
    // Each age is the difference of a time that a server wrote and this process's own.
    let is_old = |orphan: &Orphan, least: Duration| {
        orphan.age.is_some_and(|age| age >= least.saturating_add(limits.clock_skew))
    };
    orphans.retain(|orphan| limits.names.is_empty() || limits.names.contains(&orphan.name));
    orphans.retain(|orphan| limits.older_than.is_none_or(|least| is_old(orphan, least)));
    Ok(orphans)
}

/// Removes one after the other, each only where it is still to be removed.
async fn remove(client: &Client, infra: &dyn StorageInfra, orphans: &[Orphan], limits: &Limits) -> Outcomes {
    let mut outcomes = Outcomes::new();
    let mut latest: Option<(Instant, Vec<Orphan>)> = None;
    for orphan in orphans.iter().filter(|orphan| orphan.removal == Removal::Delete) {
        let outcome = async {
            if latest.as_ref().is_none_or(|(read_at, _)| read_at.elapsed() > FRESH) {
                let began = Instant::now();
                let orphans = read(client, infra, limits).await.map_err(|error| format!("{error:#}"))?;
                latest = Some((began, orphans));
            }
            let still = latest.iter().flat_map(|(_, orphans)| orphans).find(|now| now.is_same(orphan));
            match still.filter(|now| now.removal == Removal::Delete) {
                Some(now) => remove_one(client, infra, now).await.map_err(|error| format!("{error:#}")),
                None => Err("left alone: it is not as it was when it was listed".to_owned()),
            }
        };
        outcomes.insert((orphan.kind, orphan.full_name()), outcome.await);
    }
    outcomes
}

async fn remove_one(client: &Client, infra: &dyn StorageInfra, orphan: &Orphan) -> anyhow::Result<()> {
    let deadline = Instant::now() + REMOVED;
    match orphan.kind {
        Kind::Claim => {
            let namespace = orphan.namespace.as_deref().context("a claim without a namespace")?;
            let api: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), namespace);
            // Only as it was seen: a consumer or a mark that came in between would have been overlooked.
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
        Kind::InfraAttachment => Ok(infra.detach(&AttachmentId::new(&*orphan.name)?, false, REMOVED).await?),
        Kind::Volume => bail!("a PersistentVolume is never removed here"),
    }
}
