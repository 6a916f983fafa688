//! Makes a filesystem so that it can be cut off at any moment and done again.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use uuid::Uuid;

use crate::bind::change;
use crate::blocking::blocking;
use crate::command::CommandError;
use crate::disk::Disk;
use crate::filesystem::Filesystem;
use super::attestation::RecordError;
use super::marker::{self, FormatToken, Mark};

/// Why a filesystem was not made. The mark stays, so that a retry begins anew.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FormatError {
    /// Something holds the device.
    #[error(
        "{} is held by another program or mount, so that it cannot be formatted; it was not touched",
        device.display()
    )]
    InUse {
        /// The device.
        device: PathBuf,
    },
    /// The mark cannot be written or cleared.
    #[error("cannot write to {}: {source}", device.display())]
    Write {
        /// The device.
        device: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// That the attestation is used could not be written down.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The tool failed.
    #[error("{} could not be formatted and will be anew at the next try: {source}", device.display())]
    Make {
        /// The device.
        device: PathBuf,
        /// What the tool said.
        source: CommandError,
    },
}

/// Makes `filesystem` on a disk that [`super::plan`] gave free. `record` writes down that what permitted it is used;
/// until then the mark tells that nobody has mounted the disk, and afterwards the record does.
pub(crate) async fn format(
    disk: &Disk,
    filesystem: Filesystem,
    token: FormatToken,
    record: impl Future<Output = Result<(), RecordError>>,
) -> Result<(), FormatError> {
    let (uuid, size) = (disk.uuid, disk.size);
    tracing::info!(disk = %uuid, device = %disk.path.display(), %filesystem, "formatting");
    let path = disk.path.clone();
    blocking(move || write_mark(&path, size, &marker::write(uuid, token))).await?;
    filesystem
        .make(&disk.path)
        .await
        .map_err(|source| FormatError::Make { device: disk.path.clone(), source })?;
    record.await?;
    let path = disk.path.clone();
    blocking(move || clear_mark(&path, size, uuid, token)).await
}

fn write_mark(device: &Path, size: u64, mark: &[u8; marker::SIZE]) -> Result<(), FormatError> {
    let file = open(device)?;
    let write = || file.write_all_at(mark, marker::offset(size)).and_then(|()| file.sync_all());
    change("mark", write).map_err(|source| FormatError::Write { device: device.to_owned(), source })
}

/// Clears the mark, if the tool has not laid anything else there; all of the tool's writes are on the
/// disk before the mark goes.
fn clear_mark(device: &Path, size: u64, disk: Uuid, token: FormatToken) -> Result<(), FormatError> {
    let file = open(device)?;
    let clear = || {
        file.sync_all()?;
        let mut block = [0; marker::SIZE];
        let at = marker::offset(size);
        file.read_exact_at(&mut block, at)?;
        if matches!(marker::read(&block, at, disk, Some(token)), Mark::Own(_)) {
            change("unmark", || {
                file.write_all_at(&[0; marker::SIZE], marker::offset(size))?;
                file.sync_all()
            })?;
        }
        Ok(())
    };
    clear().map_err(|source| FormatError::Write { device: device.to_owned(), source })
}

/// Opens for writing, and only when nobody else holds the device: no mount, and no format that an
/// earlier life of this process began (open(2), "O_EXCL" on block devices).
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
