//! `storage-infra recover`: what it would do, and doing it.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;

use clap::{ArgAction, Args};

use super::output;
use crate::app::{self, HypervisorFlag};
use crate::recover::{Options, Plan, Recovery};

/// What `recover` needs.
#[derive(Debug, Args)]
pub(super) struct RecoverArgs {
    /// Where the catalog is kept, or was. No server may run on it.
    #[arg(long, value_name = "DIR")]
    data_dir: PathBuf,
    /// The directory of a pool that the data directory does not list any more. Repeatable.
    #[arg(long = "pool", value_name = "DIR")]
    pools: Vec<PathBuf>,
    /// The directory of a pool to leave out, with its volumes. Repeatable.
    #[arg(long = "skip-pool", value_name = "DIR")]
    skip_pools: Vec<PathBuf>,
    /// A hypervisor to ask what it has open, as for `serve`. Repeatable.
    #[arg(long = "hypervisor", value_name = "NAME=KIND:WHERE", value_parser = super::hypervisor)]
    hypervisors: Vec<HypervisorFlag>,
    /// Only say what would be done. Write with --dry-run=false.
    #[arg(
        long,
        value_name = "true|false",
        num_args = 0..=1,
        require_equals = true,
        default_value_t = true,
        default_missing_value = "true",
        action = ArgAction::Set
    )]
    dry_run: bool,
}

/// Draws up a recovery, says what it is, and carries it out where that was asked for.
pub(super) async fn run(args: RecoverArgs) -> anyhow::Result<()> {
    anyhow::ensure!(
        args.data_dir.is_dir(),
        "--data-dir: {} is no directory; name the one that the server has",
        args.data_dir.display()
    );
    let recovery = Recovery::draw(Options {
        data_dir: args.data_dir.clone(),
        pools: args.pools,
        skip_pools: args.skip_pools,
        hypervisors: app::hypervisors(&args.hypervisors)?,
    })
    .await?;
    output::put(&report(&recovery.plan))?;
    let obstacles = recovery.plan.obstacles.len();
    anyhow::ensure!(
        obstacles == 0,
        "nothing was changed: {obstacles} of what was found must be settled first"
    );
    if args.dry_run {
        return output::put("nothing was changed (--dry-run=false makes this catalog)\n");
    }
    let kept = recovery.write()?;
    let kept = kept.map(|path| format!("; the one that was there is {}", path.display())).unwrap_or_default();
    output::put(&format!("the catalog in {} was made{kept}\n", args.data_dir.display()))
}

fn report(plan: &Plan) -> String {
    let mut text = String::new();
    let mut holders: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for row in &plan.attachments {
        holders.entry(row.volume.as_str()).or_default().push(format!("{} as {}", row.node, row.id));
    }
    // Writing to a string cannot fail.
    for row in &plan.pools {
        let _ = writeln!(text, "pool {} at {}", row.name, row.spec.path);
    }
    for row in &plan.volumes {
        let who = holders.get(row.id.as_str()).map(|who| format!(", attached to {}", who.join(", ")));
        let _ = writeln!(
            text,
            "volume {} in pool {}, {} bytes, disk {}{}",
            row.id,
            row.pool,
            row.capacity,
            row.disk_uuid,
            who.unwrap_or_default()
        );
    }
    for row in &plan.snapshots {
        let _ = writeln!(text, "snapshot {} of volume {} in pool {}", row.id, row.volume, row.pool);
    }
    for remark in &plan.remarks {
        let _ = writeln!(text, "note: {remark}");
    }
    for obstacle in &plan.obstacles {
        let _ = writeln!(text, "settle first: {obstacle}");
    }
    let _ = writeln!(
        text,
        "{} pools, {} volumes, {} snapshots, {} nodes, {} attachments",
        plan.pools.len(),
        plan.volumes.len(),
        plan.snapshots.len(),
        plan.nodes.len(),
        plan.attachments.len()
    );
    text
}
