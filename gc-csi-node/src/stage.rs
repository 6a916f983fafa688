//! NodeStageVolume and NodeUnstageVolume: a disk becomes a filesystem that is mounted once on the
//! machine, at the staging path. Block volumes are not staged; their disk is only looked for.

use std::path::{Path, PathBuf};

use tokio::time::Instant;
use uuid::Uuid;

use super::bind::{self, BindError};
use super::blocking::blocking;
use super::command::CommandError;
use super::condition;
use super::content::{self, Attested, FormatError, Plan, ProbeError, RecordError, Refusal, UsedAttestations};
use super::copies::{self, CopyError};
use super::disk::{Disk, DiskNames, FindError};
use super::filesystem::{Filesystem, MountOptions};
use super::grow::{GrowError, Growable};
use super::holders;
use super::kubelet::Kubelet;
use super::lost_writes::{LostWrites, LostWritesError};
use super::mounts::{DeviceNumber, Mount, MountTable, MountsError};

/// What is asked for.
#[derive(Debug, Clone)]
pub(crate) struct Stage {
    /// The disk.
    pub(crate) disk: Uuid,
    /// Where.
    pub(crate) staging: PathBuf,
    /// The filesystem; none for a block volume.
    pub(crate) filesystem: Option<WantedFilesystem>,
    /// Whether nobody may write.
    pub(crate) read_only: bool,
    /// What the infra attests of the disk.
    pub(crate) attested: Attested,
    /// Until when the disk is waited for.
    pub(crate) until: Instant,
}

/// The filesystem that is asked for.
#[derive(Debug, Clone)]
pub(crate) struct WantedFilesystem {
    /// Its type; none where any will do.
    pub(crate) kind: Option<Filesystem>,
    /// How to mount it.
    pub(crate) options: MountOptions,
}

/// Why a volume was not staged.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StageError {
    /// The disk was not found.
    #[error(transparent)]
    Find(#[from] FindError),
    /// The staging path has another disk.
    #[error(
        "staging path {} has {} mounted, not disk {disk}; it was not touched. \
         Unstage what is there first", staging.display(), there.display()
    )]
    AnotherDisk {
        /// The staging path.
        staging: PathBuf,
        /// What is mounted there.
        there: PathBuf,
        /// The disk that was meant.
        disk: Uuid,
    },
    /// It is staged already, in another way.
    #[error("the volume is staged at {} already, but {how}; unstage it first", staging.display())]
    Differently {
        /// The staging path.
        staging: PathBuf,
        /// In what way.
        how: String,
    },
    /// What is on the disk forbids it.
    #[error("disk {disk} ({}) cannot be used: {why}", device.display())]
    Refused {
        /// The disk.
        disk: Uuid,
        /// Its device.
        device: PathBuf,
        /// Why.
        why: Refusal,
    },
    /// What is on the disk is not known.
    #[error("what is on disk {disk} cannot be told: {source}")]
    Probe {
        /// The disk.
        disk: Uuid,
        /// Why.
        source: ProbeError,
    },
    /// The filesystem was not made.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// What its attestation permits is not known, or could not be written down.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The filesystem needs a person.
    #[error(
        "the {filesystem} filesystem of disk {disk} ({}) has errors that are not repaired without a person: \
         {source}", device.display()
    )]
    Check {
        /// The disk.
        disk: Uuid,
        /// Its device.
        device: PathBuf,
        /// Its filesystem.
        filesystem: Filesystem,
        /// What the check said.
        source: CommandError,
    },
    /// It is a copy of one that is mounted.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// The filesystem does not fill its disk.
    #[error(transparent)]
    Grow(#[from] GrowError),
    /// The filesystem was not mounted.
    #[error("disk {disk} ({}) cannot be mounted as {filesystem}{hint}: {source}", device.display())]
    Mount {
        /// The disk.
        disk: Uuid,
        /// Its device.
        device: PathBuf,
        /// Its filesystem.
        filesystem: Filesystem,
        /// What else may matter.
        hint: &'static str,
        /// What mount said.
        source: CommandError,
    },
    /// The staging path cannot be used.
    #[error(transparent)]
    Path(#[from] BindError),
    /// The folder of the staging path is missing.
    #[error("staging path {} is in a folder that does not exist", staging.display())]
    NoFolder {
        /// The staging path.
        staging: PathBuf,
    },
    /// What was written here before is lost.
    #[error(transparent)]
    Lost(#[from] LostWritesError),
    /// The mounts are unknown.
    #[error(transparent)]
    Mounts(#[from] MountsError),
}

/// Stages a volume. Repeating it is fine.
pub(crate) async fn stage(
    names: &DiskNames,
    used: &UsedAttestations,
    wanted: Stage,
) -> Result<(), StageError> {
    let disk = names.wait_for_disk(wanted.disk, wanted.until).await?;
    // It may have grown while nobody looked.
    let disk = blocking(move || disk.rescanned()).await?;
    let Some(filesystem) = wanted.filesystem else { return Ok(()) };
    let read_only = read_only_because(&disk, wanted.read_only);
    let staging = wanted.staging.clone();
    let staging = blocking(move || {
        let Some(staging) = bind::real_path(&staging)? else { return Err(StageError::NoFolder { staging }) };
        bind::make_staging(&staging)?;
        Ok(staging)
    })
    .await?;
    let table = blocking(MountTable::read).await?;
    if let Some(mount) = table.at(&staging) {
        already(mount, mount.block_device(), &disk, filesystem.kind, read_only.is_some())?;
        let earlier = LostWrites::of(&staging);
        blocking(move || earlier.check()).await?;
        // A stage that was cut off may have left it to grow.
        if let (None, Ok(kind)) = (read_only, mount.fs_type.parse()) {
            let growable = look(&disk, kind).await?;
            if growable.is_smaller_than_disk() {
                growable.grow(&staging).await?;
            }
        }
        return Ok(());
    }
    // Of an earlier mount, which is gone.
    let earlier = LostWrites::of(&staging);
    blocking(move || earlier.forget()).await?;
    let attested = wanted.attested;
    let found = content::examine(&disk, attested.token)
        .await
        .map_err(|source| StageError::Probe { disk: disk.uuid, source })?;
    let permit = used.permit(disk.uuid, attested).await?;
    let refused = |why| StageError::Refused { disk: disk.uuid, device: disk.path.clone(), why };
    let plan = content::plan(found, filesystem.kind, read_only, permit).map_err(refused)?;
    let mount = Mounting { disk: &disk, staging: &staging, options: &filesystem.options, read_only };
    let kind = match plan {
        Plan::Format(kind, token) => {
            content::format(&disk, kind, token, used.use_up(disk.uuid, attested)).await?;
            mount.mount(kind).await?;
            kind
        }
        Plan::Use(kind) => {
            used.use_up(disk.uuid, attested).await?;
            let mounted = table.iter().any(|mount| mount.block_device() == Some(disk.number));
            mount.mount_existing(kind, mounted).await?;
            kind
        }
    };
    tracing::info!(disk = %disk.uuid, device = %disk.path.display(), filesystem = %kind, staging = %staging.display(), "staged");
    Ok(())
}

/// A disk that is about to be mounted.
struct Mounting<'a> {
    disk: &'a Disk,
    staging: &'a Path,
    options: &'a MountOptions,
    read_only: Option<&'static str>,
}

impl Mounting<'_> {
    /// Mounts a filesystem that was there, `mounted` elsewhere or not, and has it fill its disk.
    async fn mount_existing(&self, kind: Filesystem, mounted: bool) -> Result<(), StageError> {
        let growable = look(self.disk, kind).await?;
        // A filesystem that is mounted elsewhere must be neither checked nor changed.
        if !mounted {
            if let Some(btrfs) = growable.superblock.btrfs {
                copies::tell_apart(&self.disk.path, self.disk.number, btrfs, self.read_only.is_some())
                    .await?;
            }
            if self.read_only.is_none() {
                self.check(kind).await?;
            }
        }
        self.mount(kind).await?;
        if self.read_only.is_some() || !growable.is_smaller_than_disk() {
            return Ok(());
        }
        let Err(refused) = growable.grow(self.staging).await else { return Ok(()) };
        // Not left mounted: the retry would take it for staged.
        let staging = self.staging.to_owned();
        blocking(move || bind::unmount_all(&staging, holders::of)).await?;
        if mounted || kind != Filesystem::Ext4 {
            return Err(refused.into());
        }
        // Some kernels and sandboxes do not let ext4 grow while mounted. Only then otherwise: it takes a
        // whole check, and a power cut in it can need a repair.
        tracing::warn!(disk = %self.disk.uuid, %refused, "growing while not mounted");
        growable.grow_unmounted().await?;
        self.mount(kind).await
    }

    async fn check(&self, filesystem: Filesystem) -> Result<(), StageError> {
        filesystem.check(&self.disk.path).await.map_err(|source| StageError::Check {
            disk: self.disk.uuid,
            device: self.disk.path.clone(),
            filesystem,
            source,
        })
    }

    async fn mount(&self, filesystem: Filesystem) -> Result<(), StageError> {
        let Self { disk, staging, options, read_only } = *self;
        filesystem.mount(&disk.path, staging, options, read_only.is_some()).await.map_err(|source| {
            let hint = match read_only {
                Some(_) => " read-only (if it was not unmounted cleanly, it must be used writable once)",
                None => "",
            };
            StageError::Mount { disk: disk.uuid, device: disk.path.clone(), filesystem, hint, source }
        })
    }
}

/// Looks at the filesystem of a disk.
async fn look(disk: &Disk, kind: Filesystem) -> Result<Growable, StageError> {
    let (file, path, size) = (disk.file(), disk.path.clone(), disk.size);
    let look = move || {
        let file =
            file.map_err(|source| GrowError::Read { device: path.clone(), filesystem: kind, source })?;
        Growable::look(&file, &path, size, kind)
    };
    Ok(blocking(look).await?)
}

/// Why the disk is not to be written, if so.
fn read_only_because(disk: &Disk, asked: bool) -> Option<&'static str> {
    if disk.read_only {
        Some("its device is read-only")
    } else if asked {
        Some("a read-only use is asked for")
    } else {
        None
    }
}

/// Whether what is mounted at the staging path is what is asked for.
fn already(
    mount: &Mount,
    beneath: Option<DeviceNumber>,
    disk: &Disk,
    wanted: Option<Filesystem>,
    read_only: bool,
) -> Result<(), StageError> {
    if beneath != Some(disk.number) {
        let (staging, there) = (mount.point.clone(), mount.source.clone());
        return Err(StageError::AnotherDisk { staging, there, disk: disk.uuid });
    }
    let how = match (wanted, mount.is_read_only()) {
        (Some(wanted), _) if wanted.name() != mount.fs_type => {
            format!("as {}, and {wanted} is asked for", mount.fs_type)
        }
        (_, true) if !read_only => "read-only, and a writable use is asked for".to_owned(),
        (_, false) if read_only => "writable, and a read-only use is asked for".to_owned(),
        _ => return Ok(()),
    };
    Err(StageError::Differently { staging: mount.point.clone(), how })
}

/// Why a volume was not unstaged.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UnstageError {
    /// It is still published.
    #[error(
        "the filesystem at {} is still mounted at {}; unpublish it there first, so that all is written \
         before the disk goes", staging.display(), elsewhere.display()
    )]
    Published {
        /// The staging path.
        staging: PathBuf,
        /// Where else it is mounted.
        elsewhere: PathBuf,
    },
    /// What was written does not reach the disk.
    #[error(transparent)]
    Lost(#[from] LostWritesError),
    /// It could not be unmounted.
    #[error(transparent)]
    Unmount(#[from] BindError),
    /// The mounts are unknown.
    #[error(transparent)]
    Mounts(#[from] MountsError),
}

/// Unstages a volume: all is on the disk when this is done. Repeating it is fine. The staging folder is
/// left to who made it. Blocks.
pub(crate) fn unstage(staging: &Path, kubelet: &Kubelet) -> Result<(), UnstageError> {
    let Some(staging) = bind::real_path(staging)? else { return Ok(()) };
    let table = MountTable::read()?;
    let Some(mount) = table.at(&staging) else { return Ok(LostWrites::of(&staging).forget()?) };
    // Unmounting one of several mounts flushes nothing. Only kubelet's folder counts: in a container,
    // the machine's mounts can show a second time elsewhere.
    if let Some(other) = table.others_of(mount, &kubelet.dir).next()
        && !is_staged_otherwise(&table, mount, kubelet)
    {
        return Err(UnstageError::Published { staging, elsewhere: other.point.clone() });
    }
    flush(&table, mount)?;
    bind::unmount_all(&staging, holders::of)?;
    LostWrites::of(&staging).forget()?;
    tracing::info!(staging = %staging.display(), "unstaged");
    Ok(())
}

/// Whether the filesystem is staged under another name of the driver, too. That one has its disk then, and waits for
/// every other mount of it, whoever's that is, before it lets go.
fn is_staged_otherwise(table: &MountTable, mount: &Mount, kubelet: &Kubelet) -> bool {
    let own = kubelet.staged_under(&mount.point);
    let mut others = table.others_of(mount, &kubelet.dir).filter(|other| other.root == mount.root);
    others.any(|other| {
        let under = kubelet.staged_under(&other.point);
        under.is_some() && under != own
    })
}

/// Writes out what is pending, since the filesystem may live on in the mounts of a container that is
/// just ending. A disk that is gone already cannot hold anything up, nor a filesystem that the kernel stopped writing to,
/// which its pods were told; but what a flush could not write does, since nobody was told of that.
fn flush(table: &MountTable, mount: &Mount) -> Result<(), UnstageError> {
    if !mount.block_device().is_some_and(super::disk::is_present) {
        return Ok(());
    }
    let writes = LostWrites::of(&mount.point);
    writes.check()?;
    if mount.is_read_only() || condition::stopped(table, mount).is_some() {
        return Ok(());
    }
    let flushed = writes.remember(|| {
        let folder = std::fs::File::open(&mount.point)?;
        Ok(bind::change("flush", || rustix::fs::syncfs(&folder))?)
    });
    Ok(flushed?)
}
