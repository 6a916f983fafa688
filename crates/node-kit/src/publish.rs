//! NodePublishVolume and NodeUnpublishVolume: bind mounts of a staged volume at the target paths of pods.

use std::path::{Path, PathBuf};

use uuid::Uuid;

use super::bind::{self, BindError, TargetKind};
use super::blocking::blocking;
use super::content::{Attestations, RecordError, UsedAttestations};
use super::disk::{Disk, DiskNames, FindError};
use super::kubelet::Kubelet;
use super::mount_table::{DeviceNumber, Mount, MountTable, MountTableError};
use super::mount_users;
use super::replaced::{self, Replaced};
use super::stage::{self, StageError, StageParams};

/// Parameters of NodePublishVolume.
#[derive(Debug, Clone)]
pub(crate) struct PublishParams {
    /// UUID of the disk.
    pub(crate) disk: Uuid,
    /// How the filesystem is staged; None for a block volume.
    pub(crate) staged: Option<StageParams>,
    /// Target path.
    pub(crate) target: PathBuf,
    /// Whether the target is read-only.
    pub(crate) read_only: bool,
    /// Whether only one target may exist at a time (ReadWriteOncePod).
    pub(crate) single_writer: bool,
    /// Attestations of the storage infra about the disk.
    pub(crate) attestations: Attestations,
}

/// Failure to publish a volume.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PublishError {
    /// The disk was not found.
    #[error(transparent)]
    Find(#[from] FindError),
    /// The volume is not staged.
    #[error("the volume is not staged: nothing is mounted at {}; stage it first", staging.display())]
    NotStaged {
        /// The staging path.
        staging: PathBuf,
    },
    /// Another volume is staged at the staging path.
    #[error(
        "staging path {} has {} mounted instead of disk {disk}; nothing was published",
        staging.display(), existing.display()
    )]
    AnotherDiskStaged {
        /// The staging path.
        staging: PathBuf,
        /// Source of the mount.
        existing: PathBuf,
        /// UUID of the requested disk.
        disk: Uuid,
    },
    /// The volume cannot be staged again.
    #[error(transparent)]
    Stage(#[from] StageError),
    /// The volume is published now, but the target had a device that is gone. An error, so that kubelet reports it as an event of
    /// the pod; its next attempt succeeds.
    #[error("{0}")]
    Replaced(Replaced),
    /// Another volume is mounted at the target.
    #[error("target path {} already has {} mounted; unpublish that volume first", target.display(), existing.display())]
    TargetTaken {
        /// The target path.
        target: PathBuf,
        /// Source of the mount.
        existing: PathBuf,
    },
    /// The volume is published read-only at the target.
    #[error("the volume is already published read-only at {}; unpublish it before publishing it writable", target.display())]
    PublishedReadOnly {
        /// The target path.
        target: PathBuf,
    },
    /// The disk or its mount is read-only.
    #[error("disk {disk} is {state} and cannot be published writable; set readOnly in the pod")]
    ReadOnly {
        /// UUID of the disk.
        disk: Uuid,
        /// What is read-only.
        state: &'static str,
    },
    /// The volume is published at another target.
    #[error(
        "the volume has a single writer (ReadWriteOncePod) and is already published at {}",
        other_target.display()
    )]
    SingleWriter {
        /// The other target.
        other_target: PathBuf,
    },
    /// The parent directory of the target path does not exist.
    #[error("the parent directory of target path {} does not exist", target.display())]
    NoParentDirectory {
        /// The target path.
        target: PathBuf,
    },
    /// The target cannot be created or mounted.
    #[error(transparent)]
    Target(#[from] BindError),
    /// The use of the attestation cannot be recorded.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The mount table cannot be read.
    #[error(transparent)]
    MountTable(#[from] MountTableError),
}

/// Remaining work at a target.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// None: the target is as requested.
    Done,
    /// Mount the target.
    Mount,
    /// Make the existing mount read-only: an earlier call was interrupted.
    MakeReadOnly,
}

/// Publishes a volume. Idempotent.
pub(crate) async fn publish(
    names: &DiskNames,
    used: UsedAttestations,
    requested: PublishParams,
    kubelet: Kubelet,
) -> Result<(), PublishError> {
    let mut disk = names.disk(requested.disk).await?;
    if let Some(staged) = requested.staged.clone() {
        let staging = staged.staging.clone();
        let (found, must_stage) = blocking(move || {
            let must_stage = stage::must_stage_again(&disk, &staging);
            must_stage.map(|must_stage| (disk, must_stage))
        })
        .await?;
        disk = found;
        if must_stage {
            stage::stage(names, &used, staged, &kubelet).await?;
        }
    }
    blocking(move || {
        let target = target(&requested)?;
        let replaced = replaced::detach(&target, &disk, &kubelet)?;
        match &requested.staged {
            Some(staged) => publish_filesystem(&disk, &staged.staging, &requested, &kubelet)?,
            None => publish_block(&disk, &used, &requested, &kubelet.dir)?,
        }
        replaced.map_or(Ok(()), |replaced| Err(PublishError::Replaced(replaced)))
    })
    .await
}

fn publish_filesystem(
    disk: &Disk,
    staging: &Path,
    requested: &PublishParams,
    kubelet: &Kubelet,
) -> Result<(), PublishError> {
    let not_staged = || PublishError::NotStaged { staging: staging.to_owned() };
    let staging = bind::real_path(staging)?.ok_or_else(not_staged)?;
    let target = target(requested)?;
    let table = MountTable::read()?;
    let staged = table.at(&staging).ok_or_else(not_staged)?;
    if staged.block_device() != Some(disk.number) {
        let existing = staged.source.clone();
        return Err(PublishError::AnotherDiskStaged { staging, existing, disk: disk.uuid });
    }
    if !requested.read_only && staged.is_read_only() {
        return Err(PublishError::ReadOnly { disk: disk.uuid, state: "staged read-only" });
    }
    let step = filesystem_step(staged, table.at(&target), requested.read_only)?;
    if requested.single_writer
        && let Some(other) = other_targets(&table, staged, &target, kubelet).next()
    {
        return Err(PublishError::SingleWriter { other_target: other.point.clone() });
    }
    if step == Step::Mount {
        bind::make_target(&target, TargetKind::Directory)?;
        bind::bind(&staging, &target)?;
    }
    if step != Step::Done && requested.read_only {
        // Read again: the remount must keep the options of the new mount.
        let table = MountTable::read()?;
        if let Some(mount) = table.at(&target) {
            bind::make_read_only(mount)?;
        }
    }
    Ok(())
}

fn filesystem_step(staged: &Mount, existing: Option<&Mount>, read_only: bool) -> Result<Step, PublishError> {
    let Some(existing) = existing else { return Ok(Step::Mount) };
    let target = existing.point.clone();
    if !existing.has_same_root_as(staged) {
        return Err(PublishError::TargetTaken { target, existing: existing.source.clone() });
    }
    match (read_only, existing.is_read_only()) {
        (true, false) => Ok(Step::MakeReadOnly),
        (false, true) => Err(PublishError::PublishedReadOnly { target }),
        (true, true) | (false, false) => Ok(Step::Done),
    }
}

/// Returns the other targets of a staged filesystem: its mounts below kubelet's directory, except staging paths (one per
/// driver name) and kubelet's subPath mounts.
fn other_targets<'a>(
    table: &'a MountTable,
    staged: &'a Mount,
    target: &'a Path,
    kubelet: &'a Kubelet,
) -> impl Iterator<Item = &'a Mount> {
    table.other_mounts_of(staged, &kubelet.dir).filter(move |mount| {
        mount.point != target
            && kubelet.staged_under(&mount.point).is_none()
            && mount.root == staged.root
            && !mount.point.components().any(|part| part.as_os_str() == "volume-subpaths")
    })
}

fn publish_block(
    disk: &Disk,
    used: &UsedAttestations,
    requested: &PublishParams,
    kubelet_dir: &Path,
) -> Result<(), PublishError> {
    // kubelet enforces a read-only block volume through the container's device permissions. A read-only bind mount of a
    // device node does not restrict writes to the device.
    if !requested.read_only && disk.read_only {
        return Err(PublishError::ReadOnly { disk: disk.uuid, state: "attached read-only" });
    }
    let target = target(requested)?;
    let table = MountTable::read()?;
    let published = table.at(&target);
    if let Some(mount) = published
        && DeviceNumber::of_block_device(&target) != Some(disk.number)
    {
        let existing = mount.root.clone();
        return Err(PublishError::TargetTaken { target, existing });
    }
    if requested.single_writer
        && let Some(other) = table.iter().find(|mount| {
            mount.point != target && mount.point.starts_with(kubelet_dir) && is_device_node_of(mount, disk)
        })
    {
        return Err(PublishError::SingleWriter { other_target: other.point.clone() });
    }
    if published.is_none() {
        // A pod may write data that the probe does not recognize.
        used.mark_used_blocking(disk.uuid, requested.attestations)?;
        bind::make_target(&target, TargetKind::File)?;
        bind::bind(&disk.path, &target)?;
    }
    Ok(())
}

/// Whether a mount is a bind mount of the disk's device node.
fn is_device_node_of(mount: &Mount, disk: &Disk) -> bool {
    mount.root.file_name() == disk.path.file_name()
        && DeviceNumber::of_block_device(&mount.point) == Some(disk.number)
}

fn target(requested: &PublishParams) -> Result<PathBuf, PublishError> {
    bind::real_path(&requested.target)?
        .ok_or_else(|| PublishError::NoParentDirectory { target: requested.target.clone() })
}

/// Unmounts and removes the target of a volume. Idempotent. Blocks.
pub(crate) fn unpublish(target: &Path) -> Result<(), BindError> {
    let Some(target) = bind::real_path(target)? else { return Ok(()) };
    bind::unmount_all(&target, mount_users::describe)?;
    bind::remove_target(&target)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[u8] = b"30 22 8:16 / /k/staging rw,noatime - ext4 /dev/sdb rw\n\
        31 22 8:16 / /k/pods/one/mount rw,noatime - ext4 /dev/sdb rw\n\
        32 22 8:16 /sub /k/pods/one/volume-subpaths/v/c/0 rw - ext4 /dev/sdb rw\n\
        33 22 8:16 / /k/pods/ro/mount ro,noatime - ext4 /dev/sdb rw\n\
        34 22 8:32 / /k/pods/other/mount rw - ext4 /dev/sdc rw\n\
        35 22 8:16 / /k/plugins/kubernetes.io/csi/old/5f0a/globalmount rw - ext4 /dev/sdb rw\n";

    fn at<'a>(table: &'a MountTable, path: &str) -> &'a Mount {
        table.at(Path::new(path)).unwrap()
    }

    #[test]
    fn a_target_is_mounted_once_and_an_interrupted_publish_is_completed() {
        let table = MountTable::parse(TABLE).unwrap();
        let staged = at(&table, "/k/staging");
        assert_eq!(filesystem_step(staged, None, false).unwrap(), Step::Mount);
        let one = Some(at(&table, "/k/pods/one/mount"));
        assert_eq!(filesystem_step(staged, one, false).unwrap(), Step::Done);
        assert_eq!(filesystem_step(staged, one, true).unwrap(), Step::MakeReadOnly);
        let read_only = Some(at(&table, "/k/pods/ro/mount"));
        assert_eq!(filesystem_step(staged, read_only, true).unwrap(), Step::Done);
        assert!(matches!(
            filesystem_step(staged, read_only, false),
            Err(PublishError::PublishedReadOnly { .. })
        ));
    }

    #[test]
    fn a_target_with_another_volume_is_refused() {
        let table = MountTable::parse(TABLE).unwrap();
        let other = Some(at(&table, "/k/pods/other/mount"));
        let error = filesystem_step(at(&table, "/k/staging"), other, false).unwrap_err();
        assert!(matches!(error, PublishError::TargetTaken { .. }), "{error}");
    }

    #[test]
    fn staging_paths_and_subpaths_are_not_other_targets() {
        let table = MountTable::parse(TABLE).unwrap();
        let kubelet = Kubelet { dir: PathBuf::from("/k"), drivers: vec!["old".to_owned()] };
        let others = |target| {
            other_targets(&table, at(&table, "/k/staging"), Path::new(target), &kubelet)
                .map(|mount| mount.point.to_string_lossy().into_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(others("/k/pods/one/mount"), ["/k/pods/ro/mount"]);
        assert_eq!(others("/k/pods/new/mount"), ["/k/pods/one/mount", "/k/pods/ro/mount"]);
    }
}
