//! Backup commands: `storage-infra backup` and `storage-infra restore`.

use std::fmt::Write;
use std::path::PathBuf;

use clap::Args;
use jiff::Timestamp;

use super::output::{self, Format};
use crate::backup::{self, Restore, RestoreOptions};
use crate::catalog::backup::Summary;

/// Flags of `storage-infra backup`.
#[derive(Debug, Args)]
pub(super) struct BackupArgs {
    /// Directory of the catalog. A server may be running with it.
    #[arg(long, value_name = "DIR")]
    data_dir: PathBuf,
    /// The file to write, which must not exist; or a directory, for a file with the time in its name.
    #[arg(long, value_name = "FILE|DIR")]
    to: PathBuf,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
}

/// Flags of `storage-infra restore`.
#[derive(Debug, Args)]
pub(super) struct RestoreArgs {
    /// Directory of the catalog. No server may be running with it.
    #[arg(long, value_name = "DIR")]
    data_dir: PathBuf,
    /// The backup.
    #[arg(long, value_name = "FILE")]
    from: PathBuf,
    /// Replace a catalog that has content. It is kept under another name.
    #[arg(long)]
    replace: bool,
    /// Only verify the backup and compare it with the pools.
    #[arg(long)]
    dry_run: bool,
}

/// Backs up the catalog and prints what was written.
pub(super) fn back_up(args: &BackupArgs) -> anyhow::Result<()> {
    let now = Timestamp::now();
    let target =
        if args.to.is_dir() { args.to.join(backup::name_at("catalog-", now)) } else { args.to.clone() };
    let made = backup::write(&args.data_dir, &target, now, false)?;
    match args.output {
        Format::Json => output::json(&made),
        Format::Table => output::put(&format!(
            "wrote {}: {} bytes, {}\n",
            made.file.display(),
            made.bytes,
            content(&made.summary)
        )),
    }
}

/// Verifies a backup, compares it with the pools, and replaces the catalog unless `--dry-run` is set.
pub(super) fn restore(args: &RestoreArgs) -> anyhow::Result<()> {
    let options = RestoreOptions {
        data_dir: args.data_dir.clone(),
        from: args.from.clone(),
        replace: args.replace || args.dry_run,
    };
    let prepared = Restore::prepare(&options)?;
    output::put(&report(&prepared))?;
    let next = next(&prepared, args);
    if args.dry_run {
        return output::put("dry run: the catalog was not changed\n");
    }
    let previous = prepared.write()?;
    let previous = previous.map(|path| format!("; the previous catalog is now {}", path.display()));
    let dir = args.data_dir.display();
    output::put(&format!("restored the catalog in {dir}{}\n{next}\n", previous.unwrap_or_default()))
}

fn content(summary: &Summary) -> String {
    let Summary { schema_version, revision, pools, volumes, snapshots, nodes, attachments } = summary;
    format!(
        "{pools} pools, {volumes} volumes, {snapshots} snapshots, {nodes} nodes, {attachments} attachments \
         (revision {revision}, schema version {schema_version})"
    )
}

fn report(restore: &Restore) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    if let Some(origin) = &restore.origin {
        let (time, host, dir) = (&origin.created_at, &origin.host, origin.data_dir.display());
        let _ =
            writeln!(text, "backup of {dir} on host {host} at {time} by version {}", origin.program_version);
    }
    let _ = writeln!(text, "{}", content(&restore.summary));
    for difference in &restore.differences {
        let _ = writeln!(text, "changed: {difference}");
    }
    for why in &restore.not_compared {
        let _ = writeln!(text, "not compared: {why}");
    }
    text
}

/// What the operator does next.
fn next(restore: &Restore, args: &RestoreArgs) -> String {
    let recover =
        format!("storage-infra recover --data-dir {} --hypervisor NAME=KIND:WHERE", args.data_dir.display());
    if restore.is_current() {
        "next: start the server; the pools show no change after the backup".to_owned()
    } else if restore.differences.is_empty() {
        format!(
            "next: mount the pools above and run `{recover}`, which shows what they contain; or start the server: it \
             removes nothing from a pool that has changes after the backup"
        )
    } else {
        format!(
            "next: before you start the server, run `{recover}`: the catalog that it shows contains the changes after the \
             backup. Without it, the server does not attach the changed volumes, and removes nothing from their pools"
        )
    }
}
