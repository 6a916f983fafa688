//! Volume commands.

use std::time::Duration;

use anyhow::Context;
use clap::{Args, Subcommand};
use infra_api::{
    Account, Adoption, AntiAffinity, DetectZeroes, DiskCache, DiskDiscard, DiskIo, DiskOptions, Owner,
    Placement, PoolName, Qos, Release, SnapshotId, Volume, VolumeId, VolumeSize, VolumeSource, VolumeSpec,
};
use process_kit::duration;

use super::moves::{self, MoveArgs};
use super::suspensions::SuspensionArgs;
use super::transfers::{self, ExportArgs, ImportArgs};
use super::{ClientArgs, label, progress};
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
        /// Create it from this snapshot.
        #[arg(long, value_name = "SNAPSHOT", conflicts_with = "from_volume")]
        from_snapshot: Option<SnapshotId>,
        /// Create it as a clone of this volume.
        #[arg(long, value_name = "VOLUME")]
        from_volume: Option<VolumeId>,
        #[command(flatten)]
        volume: NewVolumeArgs,
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
    /// Export a volume that is not attached for writing: its data without holes, with checksums.
    Export {
        /// ID of the volume.
        id: VolumeId,
        #[command(flatten)]
        export: ExportArgs,
    },
    /// Create a volume from an export.
    Import(Box<ImportArgs>),
    /// Make a file of the server's host a volume: raw, or a qcow2 image without a backing file. A raw file on the filesystem
    /// of the pool is renamed; any other is copied or converted, and stays. An RBD image is renamed in its Ceph pool.
    Adopt {
        /// ID of the new volume.
        id: VolumeId,
        /// Absolute path of the file on the server's host, or rbd:POOL[/NAMESPACE]/IMAGE.
        #[arg(long, value_name = "PATH")]
        file: String,
        /// Place it in this pool. [default: the pool of the file, or one on its filesystem]
        #[arg(long)]
        pool: Option<PoolName>,
        /// Allow several nodes to write to the volume at the same time. Only cluster-aware software survives that.
        #[arg(long)]
        shareable: bool,
        #[command(flatten)]
        owner: OwnerArgs,
        #[command(flatten)]
        qos: QosArgs,
        /// How long to wait for completion. Copying and converting take long.
        #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = duration::parse_timeout)]
        timeout: Duration,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Make a volume a raw file of the server's host, or an RBD image, again, and forget the volume. It must be detached and
    /// have no snapshots.
    Release {
        /// ID of the volume.
        id: VolumeId,
        /// Absolute path on the filesystem of the volume's pool, or rbd:POOL[/NAMESPACE]/IMAGE where the volume is. [default:
        /// ID.img in the directory of the pool, or in its Ceph pool or namespace]
        #[arg(long, value_name = "PATH")]
        to: Option<String>,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Move a volume to another pool, also while a VM writes to it. Snapshots of it stay in their pool.
    Move(MoveArgs),
    /// Suspend a volume: it is not attached, expanded or deleted until it is resumed. Its snapshots and clones stay possible.
    Suspend {
        /// ID of the volume.
        id: VolumeId,
        #[command(flatten)]
        suspension: SuspensionArgs,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Resume a suspended volume, and the VMs that were paused for it.
    Resume {
        /// ID of the volume.
        id: VolumeId,
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Accept the data of a volume as it is, after its disk in a VM was altered from outside, for example by an external
    /// snapshot, and the VM stopped before that was undone. Compare the data first.
    Accept {
        /// ID of the volume.
        id: VolumeId,
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

/// Placement, limits and owner of a new volume.
#[derive(Debug, Args)]
pub(in crate::cli) struct NewVolumeArgs {
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
    /// Place it in a pool that holds a volume of the same anti-affinity group if no other pool fits.
    #[arg(long, requires = "anti_affinity")]
    anti_affinity_preferred: bool,
    /// Allow several nodes to write to the volume at the same time. Only cluster-aware software survives that.
    #[arg(long)]
    shareable: bool,
    #[command(flatten)]
    owner: OwnerArgs,
    #[command(flatten)]
    qos: QosArgs,
    #[command(flatten)]
    disk: DiskArgs,
}

impl NewVolumeArgs {
    /// The spec of a volume of this size.
    pub(super) fn spec(self, bytes: u64) -> VolumeSpec {
        let placement = Placement {
            pool: self.pool,
            pool_labels: self.pool_labels.into_iter().collect(),
            anti_affinity_id: self.anti_affinity,
            anti_affinity: if self.anti_affinity_preferred {
                AntiAffinity::Preferred
            } else {
                AntiAffinity::Required
            },
            zones: self.zones,
        };
        VolumeSpec {
            placement,
            qos: self.qos.into(),
            shareable: self.shareable,
            disk: self.disk.into(),
            owner: self.owner.into(),
            ..VolumeSpec::of_size(bytes)
        }
    }
}

/// Whom a new volume counts for.
#[derive(Debug, Args)]
pub(in crate::cli) struct OwnerArgs {
    /// Account that the volume counts for: the cluster ID of a guest.
    #[arg(long)]
    account: Option<Account>,
    /// Class that the volume counts for: a StorageClass of the management cluster.
    #[arg(long, value_name = "CLASS", default_value = "", hide_default_value = true)]
    class: String,
}

impl From<OwnerArgs> for Owner {
    fn from(args: OwnerArgs) -> Self {
        Self { account: args.account.unwrap_or_default(), class: args.class }
    }
}

/// How the hypervisor reads and writes the disk.
#[derive(Debug, Args)]
pub(in crate::cli) struct DiskArgs {
    /// How QEMU reads and writes a file: threads, native or io_uring. [default: threads]
    #[arg(long, value_name = "MODE")]
    disk_io: Option<DiskIo>,
    /// Whether Ceph's client acknowledges writes from its cache: none or writeback. [default: none]
    #[arg(long, value_name = "MODE")]
    disk_cache: Option<DiskCache>,
    /// What happens with the guest's discards: unmap or ignore. [default: unmap]
    #[arg(long, value_name = "MODE")]
    disk_discard: Option<DiskDiscard>,
    /// What happens with writes of zeros: off, on or unmap. [default: off]
    #[arg(long, value_name = "MODE")]
    disk_detect_zeroes: Option<DetectZeroes>,
}

impl From<DiskArgs> for DiskOptions {
    fn from(args: DiskArgs) -> Self {
        Self {
            io: args.disk_io,
            cache: args.disk_cache,
            discard: args.disk_discard,
            detect_zeroes: args.disk_detect_zeroes,
        }
    }
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
        VolumeCommand::Create { id, size, from_snapshot, from_volume, volume, timeout, client } => {
            let source = from_snapshot.map(VolumeSource::Snapshot).or(from_volume.map(VolumeSource::Volume));
            let spec = VolumeSpec { source, ..volume.spec(size) };
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
        VolumeCommand::Export { id, export } => transfers::export(VolumeSource::Volume(id), export).await,
        VolumeCommand::Import(import) => transfers::import(*import).await,
        VolumeCommand::Adopt { id, file, pool, shareable, owner, qos, timeout, client } => {
            let adoption = Adoption { path: file, pool, qos: qos.into(), shareable, owner: owner.into() };
            output::one(client.output, &progress::adopt(&client.connect()?, &id, &adoption, timeout).await?)
        }
        VolumeCommand::Release { id, to, client } => {
            let released = client.connect()?.release(&id, &Release { path: to }).await?;
            match client.output {
                output::Format::Json => output::json(&released),
                output::Format::Table => {
                    output::done(client.output, &format!("volume {id} released to {}", released.path))
                }
            }
        }
        VolumeCommand::Move(args) => moves::move_volume(args).await,
        VolumeCommand::Suspend { id, suspension, client } => {
            output::one(client.output, &client.connect()?.suspend_volume(&id, &suspension.into()).await?)
        }
        VolumeCommand::Resume { id, client } => {
            client.connect()?.resume_volume(&id).await?;
            output::done(client.output, &format!("volume {id} resumed"))
        }
        VolumeCommand::Accept { id, client } => {
            client.connect()?.accept_volume(&id).await?;
            output::done(client.output, &format!("the data of volume {id} is accepted as it is"))
        }
        VolumeCommand::Qos { id, qos, client } => {
            output::one(client.output, &client.connect()?.put_qos(&id, &qos.into()).await?)
        }
    }
}
