//! Volumes.

use std::time::Duration;

use anyhow::Context;
use clap::{Args, Subcommand};
use infra_api::{
    Labels, Placement, PoolName, Qos, SnapshotId, Volume, VolumeId, VolumeSize, VolumeSource, VolumeSpec,
};

use super::{ClientArgs, label};
use crate::cli::{output, size};

/// What to do with volumes.
#[derive(Debug, Subcommand)]
pub(in crate::cli) enum VolumeVerb {
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
        /// Only in a pool that this zone can reach. Repeatable: then one of these, the best first.
        #[arg(long = "zone", value_name = "ZONE")]
        zones: Vec<String>,
        /// Not in a pool with another volume of this group.
        #[arg(long, value_name = "GROUP")]
        anti_affinity: Option<String>,
        /// Begin with the bytes of this snapshot.
        #[arg(long, value_name = "SNAPSHOT", conflicts_with = "from_volume")]
        from_snapshot: Option<SnapshotId>,
        /// Begin with the bytes that this volume has now.
        #[arg(long, value_name = "VOLUME")]
        from_volume: Option<VolumeId>,
        /// Several machines may write to it at once, which only software made for that survives.
        #[arg(long)]
        shareable: bool,
        #[command(flatten)]
        qos: QosArgs,
        /// How long to wait, in seconds, where much has to be copied.
        #[arg(long, default_value_t = 60)]
        timeout: u64,
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
    /// Limit how fast a volume may be, live where it is attached.
    Qos {
        /// The volume's id.
        id: VolumeId,
        #[command(flatten)]
        qos: QosArgs,
        #[command(flatten)]
        client: ClientArgs,
    },
}

/// How fast a volume may be.
#[derive(Debug, Args)]
pub(in crate::cli) struct QosArgs {
    /// At most so many reads and writes per second; without it, or with 0, not limited.
    #[arg(long)]
    iops: Option<u64>,
    /// At most so many bytes per second, such as 100Mi; without it, or with 0, not limited.
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    bytes_per_second: Option<u64>,
}

impl From<QosArgs> for Qos {
    fn from(args: QosArgs) -> Self {
        Self { iops: args.iops, bytes_per_second: args.bytes_per_second }
    }
}

/// Does one verb.
pub(super) async fn run(verb: VolumeVerb) -> anyhow::Result<()> {
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
        VolumeVerb::Create {
            id,
            size,
            pool,
            pool_labels,
            zones,
            anti_affinity,
            from_snapshot,
            from_volume,
            shareable,
            qos,
            timeout,
            client,
        } => {
            let placement = Placement {
                pool,
                pool_labels: pool_labels.into_iter().collect(),
                anti_affinity_id: anti_affinity,
                zones,
            };
            let source = from_snapshot.map(VolumeSource::Snapshot).or(from_volume.map(VolumeSource::Volume));
            let spec = VolumeSpec {
                capacity_bytes: size,
                limit_bytes: None,
                placement,
                source,
                qos: qos.into(),
                shareable,
                labels: Labels::new(),
            };
            let timeout = Duration::from_secs(timeout);
            output::one(client.output, &client.connect()?.put_volume(&id, &spec, timeout).await?)
        }
        VolumeVerb::Delete { id, client } => {
            client.connect()?.delete_volume(&id).await?;
            output::done(client.output, &format!("volume {id} deleted"))
        }
        VolumeVerb::Grow { id, size, client } => {
            let size = VolumeSize { capacity_bytes: size, limit_bytes: None };
            output::one(client.output, &client.connect()?.grow_volume(&id, &size).await?)
        }
        VolumeVerb::Qos { id, qos, client } => {
            output::one(client.output, &client.connect()?.put_qos(&id, &qos.into()).await?)
        }
    }
}
