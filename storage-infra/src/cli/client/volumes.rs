//! Volume commands.

use std::time::Duration;

use anyhow::Context;
use clap::{Args, Subcommand};
use infra_api::{
    Labels, Owner, Placement, PoolName, Qos, SnapshotId, Volume, VolumeId, VolumeSize, VolumeSource,
    VolumeSpec,
};
use process_kit::duration;

use super::{ClientArgs, label};
use crate::cli::{output, size};

/// Volume commands.
#[derive(Debug, Subcommand)]
pub(in crate::cli) enum VolumeCommand {
    /// List all volumes.
    List {
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Show one volume.
    Show {
        /// ID of the volume.
        id: VolumeId,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Create a volume.
    Create {
        /// ID of the volume.
        id: VolumeId,
        /// Size, such as 10Gi.
        #[arg(long, value_parser = size::parse)]
        size: u64,
        /// Place it in this pool.
        #[arg(long)]
        pool: Option<PoolName>,
        /// Place it in a pool with this label. Repeatable.
        #[arg(long = "pool-label", value_name = "KEY=VALUE", value_parser = label)]
        pool_labels: Vec<(String, String)>,
        /// Place it in a pool that is reachable from this zone. Repeatable, in order of preference.
        #[arg(long = "zone", value_name = "ZONE")]
        zones: Vec<String>,
        /// Do not place it in a pool that holds a volume of the same anti-affinity group.
        #[arg(long, value_name = "GROUP")]
        anti_affinity: Option<String>,
        /// Create it from this snapshot.
        #[arg(long, value_name = "SNAPSHOT", conflicts_with = "from_volume")]
        from_snapshot: Option<SnapshotId>,
        /// Create it as a clone of this volume.
        #[arg(long, value_name = "VOLUME")]
        from_volume: Option<VolumeId>,
        /// Allow several nodes to write to the volume at the same time. Only cluster-aware software survives that.
        #[arg(long)]
        shareable: bool,
        #[command(flatten)]
        qos: QosArgs,
        /// How long to wait for completion. Copying data (pools without reflinks) takes long.
        #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = duration::parse_timeout)]
        timeout: Duration,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Delete a volume and its data.
    Delete {
        /// ID of the volume.
        id: VolumeId,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Expand a volume, online if it is attached.
    #[command(visible_alias = "grow")]
    Expand {
        /// ID of the volume.
        id: VolumeId,
        /// New size, such as 20Gi.
        #[arg(long, value_parser = size::parse)]
        size: u64,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Set the QoS limits of a volume, online if it is attached.
    Qos {
        /// ID of the volume.
        id: VolumeId,
        #[command(flatten)]
        qos: QosArgs,
        #[command(flatten)]
        client: ClientArgs,
    },
}

/// QoS limits.
#[derive(Debug, Args)]
pub(in crate::cli) struct QosArgs {
    /// Maximum read and write operations per second. Absent or 0: no limit.
    #[arg(long)]
    iops: Option<u64>,
    /// Maximum bytes per second, such as 100Mi. Absent or 0: no limit.
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    bytes_per_second: Option<u64>,
}

impl From<QosArgs> for Qos {
    fn from(args: QosArgs) -> Self {
        Self { iops: args.iops, bytes_per_second: args.bytes_per_second }
    }
}

/// Runs a volume command.
pub(super) async fn run(command: VolumeCommand) -> anyhow::Result<()> {
    match command {
        VolumeCommand::List { client } => {
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
        VolumeCommand::Show { id, client } => {
            let found = client.connect()?.get_volume(&id).await?;
            output::one(client.output, &found.with_context(|| format!("volume {id} not found"))?)
        }
        VolumeCommand::Create {
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
                owner: Owner::default(),
                labels: Labels::new(),
            };
            output::one(client.output, &client.connect()?.put_volume(&id, &spec, timeout).await?)
        }
        VolumeCommand::Delete { id, client } => {
            client.connect()?.delete_volume(&id).await?;
            output::done(client.output, &format!("volume {id} deleted"))
        }
        VolumeCommand::Expand { id, size, client } => {
            let size = VolumeSize { capacity_bytes: size, limit_bytes: None };
            output::one(client.output, &client.connect()?.expand_volume(&id, &size).await?)
        }
        VolumeCommand::Qos { id, qos, client } => {
            output::one(client.output, &client.connect()?.put_qos(&id, &qos.into()).await?)
        }
    }
}
