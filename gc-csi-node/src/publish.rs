//! NodePublishVolume and NodeUnpublishVolume: a staged volume is shown at a pod's target path.

use std::path::{Path, PathBuf};

use uuid::Uuid;

use super::bind::{self, BindError, TargetKind};
use super::blocking::blocking;
use super::content::{Attested, RecordError, UsedAttestations};
use super::disk::{Disk, DiskNames, FindError};
use super::holders;
use super::kubelet::Kubelet;
use super::mounts::{DeviceNumber, Mount, MountTable, MountsError};

/// What is asked for.
#[derive(Debug, Clone)]
pub(crate) struct Publish {
    /// The disk.
    pub(crate) disk: Uuid,
    /// Where its filesystem is staged; none for a block volume.
    pub(crate) staging: Option<PathBuf>,
    /// Where to show it.
    pub(crate) target: PathBuf,
    /// Whether the pod may not write.
    pub(crate) read_only: bool,
    /// Whether only one target may exist at a time.
    pub(crate) single_writer: bool,
    /// What the infra attests of the disk.
    pub(crate) attested: Attested,
}

/// Why a volume was not published.
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
    /// Another disk is staged.
    #[error(
        "staging path {} has {} mounted, not disk {disk}; nothing was published",
        staging.display(), there.display()
    )]
    AnotherDiskStaged {
        /// The staging path.
        staging: PathBuf,
        /// What is mounted there.
        there: PathBuf,
        /// The disk that was meant.
        disk: Uuid,
    },
    /// Something else is mounted at the target.
    #[error("target path {} has {} mounted; unpublish that first", target.display(), there.display())]
    TargetTaken {
        /// The target path.
        target: PathBuf,
        /// What is mounted there.
        there: PathBuf,
    },
    /// It is published there already, in another way.
    #[error("the volume is published read-only at {} already; unpublish it before a writable use", target.display())]
    PublishedReadOnly {
        /// The target path.
        target: PathBuf,
    },
    /// It cannot be written.
    #[error("disk {disk} is {how}, so that it cannot be published writable; set readOnly in the pod")]
    ReadOnly {
        /// The disk.
        disk: Uuid,
        /// In what way.
        how: &'static str,
    },
    /// Another target has it.
    #[error(
        "the volume is for a single writer (ReadWriteOncePod) and is published at {} already",
        elsewhere.display()
    )]
    SingleWriter {
        /// The other target.
        elsewhere: PathBuf,
    },
    /// The folder of the target path is missing.
    #[error("target path {} is in a folder that does not exist", target.display())]
    NoFolder {
        /// The target path.
        target: PathBuf,
    },
    /// The target could not be made or mounted.
    #[error(transparent)]
    Target(#[from] BindError),
    /// That the disk is not blank any more could not be written down.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The mounts are unknown.
    #[error(transparent)]
    Mounts(#[from] MountsError),
}

/// What a target has to become.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// Nothing: it is as asked.
    Done,
    /// A new mount.
    Mount,
    /// The mount that is there, made read-only: what an interrupted publish left to do.
    MakeReadOnly,
}

/// Publishes a volume. Repeating it is fine.
pub(crate) async fn publish(
    names: &DiskNames,
    used: UsedAttestations,
    wanted: Publish,
    kubelet: Kubelet,
) -> Result<(), PublishError> {
    let disk = names.disk(wanted.disk).await?;
    blocking(move || match &wanted.staging {
        Some(staging) => publish_filesystem(&disk, staging, &wanted, &kubelet),
        None => publish_block(&disk, &used, &wanted, &kubelet.dir),
    })
    .await
}

fn publish_filesystem(
    disk: &Disk,
    staging: &Path,
    wanted: &Publish,
    kubelet: &Kubelet,
) -> Result<(), PublishError> {
    let not_staged = || PublishError::NotStaged { staging: staging.to_owned() };
    let staging = bind::real_path(staging)?.ok_or_else(not_staged)?;
    let target = target(wanted)?;
    let table = MountTable::read()?;
    let staged = table.at(&staging).ok_or_else(not_staged)?;
    if staged.block_device() != Some(disk.number) {
        let there = staged.source.clone();
        return Err(PublishError::AnotherDiskStaged { staging, there, disk: disk.uuid });
    }
    if !wanted.read_only && staged.is_read_only() {
        return Err(PublishError::ReadOnly { disk: disk.uuid, how: "staged read-only" });
    }
    let step = filesystem_step(staged, table.at(&target), wanted.read_only)?;
    if wanted.single_writer
        && let Some(other) = other_targets(&table, staged, &target, kubelet).next()
    {
        return Err(PublishError::SingleWriter { elsewhere: other.point.clone() });
    }
    if step == Step::Mount {
        bind::make_target(&target, TargetKind::Folder)?;
        bind::bind(&staging, &target)?;
    }
    if step != Step::Done && wanted.read_only {
        // Read again: a remount must keep the options that the mount has.
        let table = MountTable::read()?;
        if let Some(mount) = table.at(&target) {
            bind::make_read_only(mount)?;
        }
    }
    Ok(())
}

fn filesystem_step(staged: &Mount, there: Option<&Mount>, read_only: bool) -> Result<Step, PublishError> {
    let Some(there) = there else { return Ok(Step::Mount) };
    let target = there.point.clone();
    if !there.shows_the_same_as(staged) {
        return Err(PublishError::TargetTaken { target, there: there.source.clone() });
    }
    match (read_only, there.is_read_only()) {
        (true, false) => Ok(Step::MakeReadOnly),
        (false, true) => Err(PublishError::PublishedReadOnly { target }),
        (true, true) | (false, false) => Ok(Step::Done),
    }
}

/// Other targets of a staged filesystem: its mounts in kubelet's folder, but for its staging paths, of which it has one
/// under each name of the driver, and for the subpaths that kubelet mounts from a target.
fn other_targets<'a>(
    table: &'a MountTable,
    staged: &'a Mount,
    target: &'a Path,
    kubelet: &'a Kubelet,
) -> impl Iterator<Item = &'a Mount> {
    table.others_of(staged, &kubelet.dir).filter(move |mount| {
        mount.point != target
            && kubelet.staged_under(&mount.point).is_none()
            && mount.root == staged.root
            && !mount.point.components().any(|part| part.as_os_str() == "volume-subpaths")
    })
}

fn publish_block(
    disk: &Disk,
    used: &UsedAttestations,
    wanted: &Publish,
    kubelet_dir: &Path,
) -> Result<(), PublishError> {
    // A read-only use of a writable disk is held by kubelet, which gives the container a device that
    // it can only read; a bind mount cannot, since it says nothing about the device behind a node.
    if !wanted.read_only && disk.read_only {
        return Err(PublishError::ReadOnly { disk: disk.uuid, how: "attached read-only" });
    }
    let target = target(wanted)?;
    let table = MountTable::read()?;
    let published = table.at(&target);
    if let Some(mount) = published
        && DeviceNumber::of_block_device(&target) != Some(disk.number)
    {
        let there = mount.root.clone();
        return Err(PublishError::TargetTaken { target, there });
    }
    if wanted.single_writer
        && let Some(other) = table.iter().find(|mount| {
            mount.point != target && mount.point.starts_with(kubelet_dir) && is_node_of(mount, disk)
        })
    {
        return Err(PublishError::SingleWriter { elsewhere: other.point.clone() });
    }
    if published.is_none() {
        // What the pod writes need not be where anybody looks.
        used.use_up_now(disk.uuid, wanted.attested)?;
        bind::make_target(&target, TargetKind::File)?;
        bind::bind(&disk.path, &target)?;
    }
    Ok(())
}

/// Whether a mount shows the disk's device node.
fn is_node_of(mount: &Mount, disk: &Disk) -> bool {
    mount.root.file_name() == disk.path.file_name()
        && DeviceNumber::of_block_device(&mount.point) == Some(disk.number)
}

fn target(wanted: &Publish) -> Result<PathBuf, PublishError> {
    bind::real_path(&wanted.target)?.ok_or_else(|| PublishError::NoFolder { target: wanted.target.clone() })
}

/// Unpublishes a volume: unmounts its target and removes it. Repeating it is fine. Blocks.
pub(crate) fn unpublish(target: &Path) -> Result<(), BindError> {
    let Some(target) = bind::real_path(target)? else { return Ok(()) };
    bind::unmount_all(&target, holders::of)?;
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
    fn a_target_is_mounted_once_and_finished_when_a_publish_was_cut_off() {
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
    fn another_volumes_mount_at_the_target_is_not_taken() {
        let table = MountTable::parse(TABLE).unwrap();
        let other = Some(at(&table, "/k/pods/other/mount"));
        let error = filesystem_step(at(&table, "/k/staging"), other, false).unwrap_err();
        assert!(matches!(error, PublishError::TargetTaken { .. }), "{error}");
    }

    #[test]
    fn other_targets_are_those_of_pods_not_staging_or_subpaths() {
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
