//! Record storage: records as extended attributes of files.

use std::fs::File;
use std::path::Path;

use rustix::fs::{XattrFlags, fremovexattr, fsetxattr, lgetxattr};
use rustix::io::Errno;

use super::io_error;
use crate::engine::{EngineError, Record, Result};

/// Extended attribute with the record.
const ATTRIBUTE: &str = "user.nestor";
/// Extended attribute of a marker with the generation of the pool's state.
const GENERATION: &str = "user.nestor.generation";
/// Maximum size of an extended attribute in the kernel.
const MAX_BYTES: usize = 1 << 16;

/// Reads the record of a file; `None` if it has none or does not exist.
pub(super) fn read(path: &Path) -> Result<Option<Record>> {
    let mut bytes = vec![0; MAX_BYTES];
    match lgetxattr(path, ATTRIBUTE, bytes.as_mut_slice()) {
        Ok(length) => Record::decode(&bytes[..length])
            .map(Some)
            .map_err(|why| EngineError::Foreign(format!("{}: {why}", path.display()))),
        Err(Errno::NODATA | Errno::NOENT | Errno::OPNOTSUPP) => Ok(None),
        Err(error) => Err(io_error("read the record of", path)(error.into())),
    }
}

/// Reads the generation of a marker; 0 if it has none.
pub(super) fn read_generation(path: &Path) -> Result<u64> {
    let mut bytes = [0; 32];
    match lgetxattr(path, GENERATION, bytes.as_mut_slice()) {
        Ok(length) => {
            let text = std::str::from_utf8(&bytes[..length]).ok().and_then(|text| text.parse().ok());
            let invalid =
                || EngineError::Foreign(format!("the generation of {} is not a number", path.display()));
            text.ok_or_else(invalid)
        }
        Err(Errno::NODATA | Errno::NOENT | Errno::OPNOTSUPP) => Ok(0),
        Err(error) => Err(io_error("read the generation of", path)(error.into())),
    }
}

/// Writes the generation of a marker. It is durable after the next fsync of the file.
pub(super) fn write_generation(file: &File, path: &Path, generation: u64) -> Result<()> {
    let written = fsetxattr(file, GENERATION, generation.to_string().as_bytes(), XattrFlags::empty());
    written.map_err(|error| io_error("write the generation of", path)(error.into()))
}

/// Whether a file has a record, readable or not.
pub(in crate::engine) fn has_record(path: &Path) -> Result<bool> {
    Ok(!matches!(read(path), Ok(None)))
}

/// Removes the record of a file, if it has one. That is durable after the next fsync of the file.
pub(super) fn remove(file: &File, path: &Path) -> Result<()> {
    match fremovexattr(file, ATTRIBUTE) {
        Ok(()) | Err(Errno::NODATA) => Ok(()),
        Err(error) => Err(io_error("remove the record of", path)(error.into())),
    }
}

/// Writes the record of a file. It is durable after the next fsync of the file.
pub(super) fn write(file: &File, path: &Path, record: &Record) -> Result<()> {
    let bytes = record.encode().map_err(|e| io_error("write the record of", path)(e.into()))?;
    fsetxattr(file, ATTRIBUTE, &bytes, XattrFlags::empty()).map_err(|error| match error {
        Errno::OPNOTSUPP => EngineError::Unhealthy(format!(
            "the filesystem of {} does not support user extended attributes, which store the records of pools and \
             volumes; use XFS or ext4",
            path.display()
        )),
        Errno::TOOBIG => EngineError::Foreign(format!(
            "the record of {} has {} bytes, more than an extended attribute can hold: the volume has too many attachments",
            path.display(),
            bytes.len()
        )),
        // ext4 stores all attributes of a file in one block, and reports a full block like a full filesystem.
        Errno::NOSPC => EngineError::NoSpace(format!(
            "cannot write the record of {} bytes to {}: the filesystem is full, or its limit for extended attributes is lower",
            bytes.len(),
            path.display()
        )),
        error => io_error("write the record of", path)(error.into()),
    })
}
