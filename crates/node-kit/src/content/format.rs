//! Crash-safe formatting: an interrupted mkfs is recognized by a marker and repeated.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use uuid::Uuid;

use super::attestation::RecordError;
use super::marker::{self, FormatToken, MarkerBlock};
use crate::bind::change;
use crate::blocking::blocking;
use crate::command::CommandError;
use crate::disk::Disk;
use crate::filesystem::Filesystem;

/// Failure to format a disk. The marker stays on the disk, so that a retry formats it again.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FormatError {
    /// The device is in use.
    #[error(
        "failed to format {}: another process or mount uses it; it was not changed",
        device.display()
    )]
    InUse {
        /// The device.
        device: PathBuf,
    },
    /// The marker cannot be written or cleared.
    #[error("failed to write to {}: {source}", device.display())]
    Write {
        /// The device.
        device: PathBuf,
        /// OS error.
        source: io::Error,
    },
    /// The use of the attestation cannot be recorded.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// mkfs failed.
    #[error("failed to format {}; the driver will format it again on a retry: {source}", device.display())]
    Make {
        /// The device.
        device: PathBuf,
        /// Failure of mkfs.
        source: CommandError,
    },
}

/// Formats a disk with `filesystem`, as decided by [`super::plan`]. `record` records the attestation as used. Until then,
/// the marker shows that the disk was never mounted; afterwards the record prevents another format.
pub(crate) async fn format(
    disk: &Disk,
    filesystem: Filesystem,
    token: FormatToken,
    record: impl Future<Output = Result<(), RecordError>>,
) -> Result<(), FormatError> {
    let (uuid, size) = (disk.uuid, disk.size);
    tracing::info!(disk = %uuid, device = %disk.path.display(), %filesystem, "formatting");
    let path = disk.path.clone();
    blocking(move || write_marker(&path, size, &marker::write(uuid, token))).await?;
    filesystem
        .make(&disk.path)
        .await
        .map_err(|source| FormatError::Make { device: disk.path.clone(), source })?;
    record.await?;
    let path = disk.path.clone();
    blocking(move || clear_marker(&path, size, uuid, token)).await
}

fn write_marker(device: &Path, size: u64, mark: &[u8; marker::SIZE]) -> Result<(), FormatError> {
    let file = open(device)?;
    let write = || file.write_all_at(mark, marker::offset(size)).and_then(|()| file.sync_all());
    change("mark", write).map_err(|source| FormatError::Write { device: device.to_owned(), source })
}

/// Clears the marker if mkfs has not overwritten it. All writes of mkfs are synced before.
fn clear_marker(device: &Path, size: u64, disk: Uuid, token: FormatToken) -> Result<(), FormatError> {
    let file = open(device)?;
    let clear = || {
        file.sync_all()?;
        let mut block = [0; marker::SIZE];
        let at = marker::offset(size);
        file.read_exact_at(&mut block, at)?;
        if matches!(marker::read(&block, at, disk, Some(token)), MarkerBlock::Valid(_)) {
            change("unmark", || {
                file.write_all_at(&[0; marker::SIZE], marker::offset(size))?;
                file.sync_all()
            })?;
        }
        Ok(())
    };
    clear().map_err(|source| FormatError::Write { device: device.to_owned(), source })
}

/// Opens the device exclusively: fails if it is mounted, or a mkfs of a previous process still runs (open(2), "O_EXCL" on
/// block devices).
fn open(device: &Path) -> Result<File, FormatError> {
    let exclusive = i32::try_from(OFlags::EXCL.bits()).unwrap_or_default();
    OpenOptions::new().read(true).write(true).custom_flags(exclusive).open(device).map_err(|source| {
        let device = device.to_owned();
        match source.kind() {
            io::ErrorKind::ResourceBusy => FormatError::InUse { device },
            _ => FormatError::Write { device, source },
        }
    })
}
