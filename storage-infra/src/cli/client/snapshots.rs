//! Snapshots of volumes.

use std::time::Duration;

use anyhow::Context;
use clap::Subcommand;
use infra_api::{Labels, Snapshot, SnapshotId, SnapshotSpec, VolumeId};

use super::ClientArgs;
use crate::cli::output;

/// What to do with snapshots.
#[derive(Debug, Subcommand)]
pub(in crate::cli) enum SnapshotVerb {
    /// Show all snapshots, or those of a volume.
    List {
        /// Only of this volume.
        #[arg(long)]
        volume: Option<VolumeId>,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Show one snapshot.
    Show {
        /// The snapshot's id.
        id: SnapshotId,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Keep a volume's bytes as they are now.
    Create {
        /// The snapshot's id.
        id: SnapshotId,
        /// The volume.
        #[arg(long)]
        volume: VolumeId,
        /// How long to wait, in seconds, where much has to be copied.
        #[arg(long, default_value_t = 60)]
        timeout: u64,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Delete a snapshot. Its volume, and volumes made from it, stay.
    Delete {
        /// The snapshot's id.
        id: SnapshotId,
        #[command(flatten)]
        client: ClientArgs,
    },
}

/// Does one verb.
pub(super) async fn run(verb: SnapshotVerb) -> anyhow::Result<()> {
    match verb {
        SnapshotVerb::List { volume, client } => {
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
        SnapshotVerb::Show { id, client } => {
            let found = client.connect()?.get_snapshot(&id).await?;
            output::one(client.output, &found.with_context(|| format!("there is no snapshot {id}"))?)
        }
        SnapshotVerb::Create { id, volume, timeout, client } => {
            let spec = SnapshotSpec { volume, labels: Labels::new() };
            let timeout = Duration::from_secs(timeout);
            output::one(client.output, &client.connect()?.put_snapshot(&id, &spec, timeout).await?)
        }
        SnapshotVerb::Delete { id, client } => {
            client.connect()?.delete_snapshot(&id).await?;
            output::done(client.output, &format!("snapshot {id} deleted"))
        }
    }
}
