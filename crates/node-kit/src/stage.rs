//! NodeStageVolume and NodeUnstageVolume: formats, checks, expands and mounts a disk once per node, at the staging path.
//! Block volumes are not mounted; the driver only waits for their disk.

use std::path::{Path, PathBuf};

use tokio::time::Instant;
use uuid::Uuid;

use super::bind::{self, BindError};
use super::blocking::blocking;
use super::command::CommandError;
use super::content::{
    self, Attestations, FormatError, Plan, ProbeError, RecordError, Refusal, UsedAttestations,
};
use super::disk::{Disk, DiskNames, FindError};
use super::duplicate_uuids::{self, DuplicateUuidError};
use super::expand::{ExpandFilesystemError, ExpandableFilesystem};
use super::filesystem::Filesystem;
use super::kubelet::Kubelet;
use super::lost_writes::{LostWrites, LostWritesError};
use super::mount_options::MountOptions;
use super::mount_table::{DeviceNumber, Mount, MountTable, MountTableError};
use super::mount_users;
use super::replaced::{self, Replaced};
use super::volume_condition;

/// Parameters of NodeStageVolume.
#[derive(Debug, Clone)]
pub(crate) struct StageParams {
    /// UUID of the disk.
    pub(crate) disk: Uuid,
    /// Staging path.
    pub(crate) staging: PathBuf,
    /// Requested filesystem; None for a block volume.
    pub(crate) filesystem: Option<RequestedFilesystem>,
    /// Whether the mount is read-only.
    pub(crate) read_only: bool,
    /// Attestations of the storage infra about the disk.
    pub(crate) attestations: Attestations,
    /// Deadline for the disk to appear.
    pub(crate) until: Instant,
}

/// Requested filesystem.
#[derive(Debug, Clone)]
pub(crate) struct RequestedFilesystem {
    /// Type; None for any.
    pub(crate) kind: Option<Filesystem>,
    /// Mount options.
    pub(crate) options: MountOptions,
}

/// Failure to stage a volume.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StageError {
    /// The disk was not found.
    #[error(transparent)]
    Find(#[from] FindError),
    /// Another disk is mounted at the staging path.
    #[error(
        "staging path {} has {} mounted instead of disk {disk}; it was left unchanged. \
         Unstage that volume first", staging.display(), existing.display()
    )]
    AnotherDisk {
        /// The staging path.
        staging: PathBuf,
        /// Source of the mount.
        existing: PathBuf,
        /// UUID of the requested disk.
        disk: Uuid,
    },
    /// The volume is staged in another way.
    #[error("the volume is already staged at {}, but {difference}; unstage it first", staging.display())]
    StagedDifferently {
        /// The staging path.
        staging: PathBuf,
        /// The difference.
        difference: String,
    },
    /// The content of the disk does not permit it.
    #[error("disk {disk} ({}) was not mounted: {reason}{advice}", device.display())]
    Refused {
        /// UUID of the disk.
        disk: Uuid,
        /// Device of the disk.
        device: PathBuf,
        /// Reason.
        reason: Refusal,
        /// What to do about it, with a space before it; empty if the reason says it.
        advice: &'static str,
    },
    /// The content of the disk cannot be read.
    #[error("failed to determine the content of disk {disk}: {source}")]
    Probe {
        /// UUID of the disk.
        disk: Uuid,
        /// Failure of the probe.
        source: ProbeError,
    },
    /// The disk cannot be formatted.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The record of used attestations cannot be read or written.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The filesystem needs a manual repair.
    #[error(
        "the {filesystem} filesystem on disk {disk} ({}) has errors that need a manual repair: \
         {source}", device.display()
    )]
    Check {
        /// UUID of the disk.
        disk: Uuid,
        /// Device of the disk.
        device: PathBuf,
        /// Filesystem type.
        filesystem: Filesystem,
        /// Failure of the check.
        source: CommandError,
    },
    /// A btrfs with the same UUID is mounted.
    #[error(transparent)]
    DuplicateUuid(#[from] DuplicateUuidError),
    /// The filesystem cannot be expanded.
    #[error(transparent)]
    ExpandFilesystem(#[from] ExpandFilesystemError),
    /// The filesystem cannot be mounted.
    #[error("failed to mount disk {disk} ({}) as {filesystem}{hint}: {source}", device.display())]
    Mount {
        /// UUID of the disk.
        disk: Uuid,
        /// Device of the disk.
        device: PathBuf,
        /// Filesystem type.
        filesystem: Filesystem,
        /// Hint for the operator.
        hint: &'static str,
        /// Failure of mount.
        source: CommandError,
    },
    /// The staging path cannot be used.
    #[error(transparent)]
    Path(#[from] BindError),
    /// The parent directory of the staging path does not exist.
    #[error("the parent directory of staging path {} does not exist", staging.display())]
    NoParentDirectory {
        /// The staging path.
        staging: PathBuf,
    },
    /// Earlier writes to the mounted filesystem were lost.
    #[error(transparent)]
    Lost(#[from] LostWritesError),
    /// The volume is staged now, but was staged with a device that is gone. An error, so that kubelet reports it as an event
    /// of the pod; its next attempt succeeds.
    #[error("{0}")]
    Replaced(Replaced),
    /// The mount table cannot be read.
    #[error(transparent)]
    MountTable(#[from] MountTableError),
}

/// Stages a volume. Idempotent. Repairs a mount whose device is gone, see [`replaced`].
pub(crate) async fn stage(
    names: &DiskNames,
    used: &UsedAttestations,
    requested: StageParams,
    kubelet: &Kubelet,
) -> Result<(), StageError> {
    let disk = names.wait_for_disk(requested.disk, requested.until).await?;
    // The disk may have been resized since it was attached.
    let disk = blocking(move || disk.rescanned()).await?;
    let Some(filesystem) = requested.filesystem else { return Ok(()) };
    let read_only = read_only_because(&disk, requested.read_only);
    let staging = requested.staging.clone();
    let staging = blocking(move || {
        let Some(staging) = bind::real_path(&staging)? else {
            return Err(StageError::NoParentDirectory { staging });
        };
        bind::make_staging(&staging)?;
        Ok(staging)
    })
    .await?;
    let (disk, replaced) = detach_dead(disk, &staging, kubelet).await?;
    let table = blocking(MountTable::read).await?;
    if let Some(mount) = table.at(&staging) {
        check_existing_mount(mount, mount.block_device(), &disk, filesystem.kind, read_only.is_some())?;
        let earlier = LostWrites::of(&staging);
        blocking(move || earlier.check()).await?;
        // An interrupted call may have mounted the filesystem without expanding it.
        if let (None, Ok(kind)) = (read_only, mount.fs_type.parse()) {
            let expandable = read_filesystem(&disk, kind).await?;
            if expandable.is_smaller_than_disk() {
                expandable.expand(&staging).await?;
            }
        }
        return Ok(());
    }
    // The record is about an earlier mount, which is gone.
    let earlier = LostWrites::of(&staging);
    blocking(move || earlier.clear()).await?;
    let attestations = requested.attestations;
    let found = content::examine(&disk, attestations.token)
        .await
        .map_err(|source| StageError::Probe { disk: disk.uuid, source })?;
    let permit = used.permit(disk.uuid, attestations).await?;
    let refused = |reason| {
        let advice = if reason == Refusal::NotAttested { names.identity().no_attestation() } else { "" };
        StageError::Refused { disk: disk.uuid, device: disk.path.clone(), reason, advice }
    };
    let plan = content::plan(found, filesystem.kind, read_only, permit).map_err(refused)?;
    let mount = PendingMount { disk: &disk, staging: &staging, options: &filesystem.options, read_only };
    let kind = match plan {
        Plan::Format(kind, token) => {
            content::format(&disk, kind, token, used.mark_used(disk.uuid, attestations)).await?;
            mount.mount(kind).await?;
            kind
        }
        Plan::Use(kind) => {
            used.mark_used(disk.uuid, attestations).await?;
            let mounted = table.iter().any(|mount| mount.block_device() == Some(disk.number));
            mount.mount_existing(kind, mounted).await?;
            kind
        }
    };
    tracing::info!(disk = %disk.uuid, device = %disk.path.display(), filesystem = %kind, staging = %staging.display(), "staged");
    replaced.map_or(Ok(()), |replaced| Err(StageError::Replaced(replaced)))
}

/// Detaches a mount at the staging path whose device is gone. Not if an operator must accept lost writes first.
async fn detach_dead(
    disk: Disk,
    staging: &Path,
    kubelet: &Kubelet,
) -> Result<(Disk, Option<Replaced>), StageError> {
    let (staging, kubelet) = (staging.to_owned(), kubelet.clone());
    blocking(move || {
        if MountTable::read()?.at(&staging).is_some_and(|mount| replaced::is_dead(mount, &disk)) {
            LostWrites::of(&staging).check()?;
        }
        let replaced = replaced::detach(&staging, &disk, &kubelet)?;
        Ok((disk, replaced))
    })
    .await
}

/// Whether a volume that is to be published must be staged first, although kubelet takes it for staged: its mount is gone,
/// or the device of its mount is. Blocks.
pub(crate) fn must_stage_again(disk: &Disk, staging: &Path) -> Result<bool, StageError> {
    let Some(staging) = bind::real_path(staging)? else { return Ok(false) };
    Ok(match MountTable::read()?.at(&staging) {
        Some(mount) => replaced::is_dead(mount, disk),
        // kubelet creates the directory when it stages the volume, and removes it when it unstages it.
        None => std::fs::symlink_metadata(&staging).is_ok_and(|found| found.is_dir()),
    })
}

/// A mount in progress.
struct PendingMount<'a> {
    disk: &'a Disk,
    staging: &'a Path,
    options: &'a MountOptions,
    read_only: Option<&'static str>,
}

impl PendingMount<'_> {
    /// Mounts an existing filesystem and expands it to the size of its disk. `mounted`: it is already mounted elsewhere.
    async fn mount_existing(&self, kind: Filesystem, mounted: bool) -> Result<(), StageError> {
        let expandable = read_filesystem(self.disk, kind).await?;
        // A filesystem that is mounted elsewhere must not be checked or modified.
        if !mounted {
            if let Some(btrfs) = expandable.superblock.btrfs {
                duplicate_uuids::make_mountable(
                    &self.disk.path,
                    self.disk.number,
                    btrfs,
                    self.read_only.is_some(),
                )
                .await?;
            }
            if self.read_only.is_none() {
                self.check(kind).await?;
            }
        }
        self.mount(kind).await?;
        if self.read_only.is_some() || !expandable.is_smaller_than_disk() {
            return Ok(());
        }
        let Err(refused) = expandable.expand(self.staging).await else { return Ok(()) };
        // Unmount it: a retry would take the volume for staged.
        let staging = self.staging.to_owned();
        blocking(move || bind::unmount_all(&staging, mount_users::describe)).await?;
        if mounted || kind != Filesystem::Ext4 {
            return Err(refused.into());
        }
        // Some kernels and sandboxes cannot resize a mounted ext4. Resizing it offline is the fallback, because that needs a
        // full check, and may need a repair after a power failure.
        tracing::warn!(disk = %self.disk.uuid, %refused, "online expansion failed, expanding the filesystem unmounted");
        expandable.expand_unmounted().await?;
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
                Some(_) => " read-only (if it was not unmounted cleanly, it must be mounted writable once)",
                None => "",
            };
            StageError::Mount { disk: disk.uuid, device: disk.path.clone(), filesystem, hint, source }
        })
    }
}

/// Reads the size of the filesystem on a disk.
async fn read_filesystem(disk: &Disk, kind: Filesystem) -> Result<ExpandableFilesystem, StageError> {
    let (file, path, size) = (disk.file(), disk.path.clone(), disk.size);
    let read = move || {
        let file = file.map_err(|source| ExpandFilesystemError::Read {
            device: path.clone(),
            filesystem: kind,
            source,
        })?;
        ExpandableFilesystem::read(&file, &path, size, kind)
    };
    Ok(blocking(read).await?)
}

/// Reason to mount the disk read-only, if there is one.
fn read_only_because(disk: &Disk, requested: bool) -> Option<&'static str> {
    if disk.read_only {
        Some("its device is read-only")
    } else if requested {
        Some("the request is read-only")
    } else {
        None
    }
}

/// Checks that the mount at the staging path is the requested one.
fn check_existing_mount(
    mount: &Mount,
    device: Option<DeviceNumber>,
    disk: &Disk,
    requested: Option<Filesystem>,
    read_only: bool,
) -> Result<(), StageError> {
    if device != Some(disk.number) {
        let (staging, existing) = (mount.point.clone(), mount.source.clone());
        return Err(StageError::AnotherDisk { staging, existing, disk: disk.uuid });
    }
    let difference = match (requested, mount.is_read_only()) {
        (Some(requested), _) if requested.name() != mount.fs_type => {
            format!("as {}, and the request is for {requested}", mount.fs_type)
        }
        (_, true) if !read_only => "read-only, and the request is for a writable mount".to_owned(),
        (_, false) if read_only => "writable, and the request is for a read-only mount".to_owned(),
        _ => return Ok(()),
    };
    Err(StageError::StagedDifferently { staging: mount.point.clone(), difference })
}

/// Failure to unstage a volume.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UnstageError {
    /// The volume is still published.
    #[error(
        "the filesystem at {} is still mounted at {}; unpublish it there first, so that all data is written \
         before the disk is detached", staging.display(), other_mount.display()
    )]
    Published {
        /// The staging path.
        staging: PathBuf,
        /// Mount point of the other mount.
        other_mount: PathBuf,
    },
    /// Writes were lost.
    #[error(transparent)]
    Lost(#[from] LostWritesError),
    /// The staging path cannot be unmounted.
    #[error(transparent)]
    Unmount(#[from] BindError),
    /// The mount table cannot be read.
    #[error(transparent)]
    MountTable(#[from] MountTableError),
}

/// Flushes and unmounts a staged volume. Idempotent. Leaves the staging directory to kubelet, which created it. Blocks.
pub(crate) fn unstage(staging: &Path, kubelet: &Kubelet) -> Result<(), UnstageError> {
    let Some(staging) = bind::real_path(staging)? else { return Ok(()) };
    let table = MountTable::read()?;
    let Some(mount) = table.at(&staging) else { return Ok(LostWrites::of(&staging).clear()?) };
    // Unmounting one of several mounts flushes nothing. Only mounts below kubelet's directory count: in a container, the
    // host's mounts may also appear at other paths.
    if let Some(other) = table.other_mounts_of(mount, &kubelet.dir).next()
        && !is_staged_under_another_name(&table, mount, kubelet)
    {
        return Err(UnstageError::Published { staging, other_mount: other.point.clone() });
    }
    flush(&table, mount)?;
    bind::unmount_all(&staging, mount_users::describe)?;
    LostWrites::of(&staging).clear()?;
    tracing::info!(staging = %staging.display(), "unstaged");
    Ok(())
}

/// Whether the filesystem is also staged under another driver name. Its disk then stays attached for that name, and
/// unstaging there waits for all remaining mounts.
fn is_staged_under_another_name(table: &MountTable, mount: &Mount, kubelet: &Kubelet) -> bool {
    let own = kubelet.staged_under(&mount.point);
    let mut others = table.other_mounts_of(mount, &kubelet.dir).filter(|other| other.root == mount.root);
    others.any(|other| {
        let under = kubelet.staged_under(&other.point);
        under.is_some() && under != own
    })
}

/// Flushes the filesystem, because it may stay mounted in the mount namespace of a terminating container. Skipped if the
/// disk is gone, or if the kernel made the filesystem read-only after an error: pods have received that error. A failed
/// flush keeps the volume staged, because no pod received its error.
fn flush(table: &MountTable, mount: &Mount) -> Result<(), UnstageError> {
    if !mount.block_device().is_some_and(super::disk::is_present) {
        return Ok(());
    }
    let writes = LostWrites::of(&mount.point);
    writes.check()?;
    if mount.is_read_only() || volume_condition::stopped(table, mount).is_some() {
        return Ok(());
    }
    let flushed = writes.flush(|| {
        let dir = std::fs::File::open(&mount.point)?;
        Ok(bind::change("flush", || rustix::fs::syncfs(&dir))?)
    });
    Ok(flushed?)
}
