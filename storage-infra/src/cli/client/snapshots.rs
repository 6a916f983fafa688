//! Snapshot commands.

use std::time::Duration;

use anyhow::Context;
use clap::Subcommand;
use infra_api::{Account, Labels, Snapshot, SnapshotId, SnapshotSpec, VolumeId, VolumeSource};
use process_kit::duration;

use super::ClientArgs;
use super::transfers::{self, ExportArgs};
use crate::cli::output;

/// Snapshot commands.
#[derive(Debug, Subcommand)]
pub(in crate::cli) enum SnapshotCommand {
    /// List all snapshots, or those of a volume.
    List {
        /// Only snapshots of this volume.
        #[arg(long)]
        volume: Option<VolumeId>,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Show one snapshot.
    Show {
        /// ID of the snapshot.
        id: SnapshotId,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Take a snapshot of a volume.
    Create {
        /// ID of the snapshot.
        id: SnapshotId,
        /// The source volume.
        #[arg(long)]
        volume: VolumeId,
        /// How long to wait for completion. Copying data (pools without reflinks) takes long.
        #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = duration::parse_timeout)]
        timeout: Duration,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Export a snapshot, also while its volume is attached: its data without holes, with checksums.
    Export {
        /// ID of the snapshot.
        id: SnapshotId,
        #[command(flatten)]
        export: ExportArgs,
    },
    /// Delete a snapshot. Its volume, and volumes created from it, are not affected.
    Delete {
        /// ID of the snapshot.
        id: SnapshotId,
        #[command(flatten)]
        client: ClientArgs,
    },
}

/// Runs a snapshot command.
pub(super) async fn run(command: SnapshotCommand) -> anyhow::Result<()> {
    match command {
        SnapshotCommand::List { volume, client } => {
            let server = client.connect()?;
            let mut snapshots: Vec<Snapshot> = Vec::new();
            let mut after = None;
            loop {
                let page = server.list_snapshots(volume.as_ref(), None, after.as_deref()).await?;
                snapshots.extend(page.items);
                after = page.next;
                if after.is_none() {
                    return output::many(client.output, &snapshots);
                }
            }
        }
        SnapshotCommand::Show { id, client } => {
            let found = client.connect()?.get_snapshot(&id).await?;
            output::one(client.output, &found.with_context(|| format!("snapshot {id} not found"))?)
        }
        SnapshotCommand::Create { id, volume, timeout, client } => {
            let spec = SnapshotSpec { volume, account: Account::default(), labels: Labels::new() };
            output::one(client.output, &client.connect()?.put_snapshot(&id, &spec, timeout).await?)
        }
        SnapshotCommand::Export { id, export } => transfers::export(VolumeSource::Snapshot(id), export).await,
        SnapshotCommand::Delete { id, client } => {
            client.connect()?.delete_snapshot(&id).await?;
            output::done(client.output, &format!("snapshot {id} deleted"))
        }
    }
}
