//! Recovery command: `storage-infra recover` prints a recovery plan and, unless it is a dry run, rebuilds the catalog.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;

use clap::{ArgAction, Args};

use super::output;
use crate::app::{self, HypervisorFlag};
use crate::lease::Lease;
use crate::recover::{Options, Plan, Recovery};

/// Flags of `storage-infra recover`.
#[derive(Debug, Args)]
pub(super) struct RecoverArgs {
    /// Directory of the catalog to rebuild. No server may be running with it.
    #[arg(long, value_name = "DIR")]
    data_dir: PathBuf,
    /// Directory of a pool that is not listed in the data directory. Repeatable.
    #[arg(long = "pool", value_name = "DIR")]
    pools: Vec<PathBuf>,
    /// Directory of a pool to leave out of the catalog, with its volumes. Repeatable.
    #[arg(long = "skip-pool", value_name = "DIR")]
    skip_pools: Vec<PathBuf>,
    /// A hypervisor to query for attached disks, in the syntax of `serve --hypervisor`. Repeatable.
    #[arg(long = "hypervisor", value_name = "NAME=KIND:WHERE", value_parser = super::hypervisor)]
    hypervisors: Vec<HypervisorFlag>,
    /// Only print the plan. Use --dry-run=false to write the catalog.
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

/// Computes the recovery plan, prints it, and rebuilds the catalog unless `--dry-run` is set.
pub(super) async fn run(args: RecoverArgs) -> anyhow::Result<()> {
    anyhow::ensure!(
        args.data_dir.is_dir(),
        "--data-dir: {} is not a directory; use the server's data directory",
        args.data_dir.display()
    );
    let recovery = Recovery::prepare(Options {
        data_dir: args.data_dir.clone(),
        pools: args.pools,
        skip_pools: args.skip_pools,
        hypervisors: app::hypervisors(&args.hypervisors, &Lease::unlimited())?,
    })
    .await?;
    output::put(&report(&recovery.plan))?;
    let conflicts = recovery.plan.conflicts.len();
    anyhow::ensure!(
        conflicts == 0,
        "the catalog was not changed: resolve the {conflicts} conflicts above first"
    );
    if args.dry_run {
        return output::put("dry run: the catalog was not changed (use --dry-run=false to write it)\n");
    }
    let backup = recovery.write()?;
    let backup =
        backup.map(|path| format!("; the previous catalog is now {}", path.display())).unwrap_or_default();
    output::put(&format!("rebuilt the catalog in {}{backup}\n", args.data_dir.display()))
}

fn report(plan: &Plan) -> String {
    let mut text = String::new();
    let mut attachments: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for row in &plan.attachments {
        attachments.entry(row.volume.as_str()).or_default().push(format!("{} as {}", row.node, row.id));
    }
    // Writing to a string cannot fail.
    for row in &plan.pools {
        let _ = writeln!(text, "pool {} at {}", row.name, row.spec.path);
    }
    for row in &plan.volumes {
        let attached_to =
            attachments.get(row.id.as_str()).map(|nodes| format!(", attached to {}", nodes.join(", ")));
        let _ = writeln!(
            text,
            "volume {} in pool {}, {} bytes, disk {}{}",
            row.id,
            row.pool,
            row.capacity,
            row.disk_uuid,
            attached_to.unwrap_or_default()
        );
    }
    for row in &plan.snapshots {
        let _ = writeln!(text, "snapshot {} of volume {} in pool {}", row.id, row.volume, row.pool);
    }
    for note in &plan.notes {
        let _ = writeln!(text, "note: {note}");
    }
    for conflict in &plan.conflicts {
        let _ = writeln!(text, "conflict: {conflict}");
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
