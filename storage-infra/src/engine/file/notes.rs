//! Records as extended attributes of files.

use std::fs::File;
use std::path::Path;

use rustix::fs::{XattrFlags, fsetxattr, lgetxattr};
use rustix::io::Errno;

use super::io_error;
use crate::engine::{EngineError, Record, Result};

/// The attribute that holds a file's record.
const ATTRIBUTE: &str = "user.nestor";
/// The most that the kernel keeps in an attribute.
const MOST: usize = 1 << 16;

/// What is noted of a file. None where nothing is, or where there is no such file.
pub(super) fn read(path: &Path) -> Result<Option<Record>> {
    let mut bytes = vec![0; MOST];
    match lgetxattr(path, ATTRIBUTE, bytes.as_mut_slice()) {
        Ok(length) => Record::decode(&bytes[..length])
            .map(Some)
            .map_err(|why| EngineError::Foreign(format!("{}: {why}", path.display()))),
        Err(Errno::NODATA | Errno::NOENT | Errno::OPNOTSUPP) => Ok(None),
        Err(error) => Err(io_error("read what is noted with", path)(error.into())),
    }
}

/// Notes a record with a file. On the disk once the file is synced.
pub(super) fn write(file: &File, path: &Path, record: &Record) -> Result<()> {
    let bytes = record.encode().map_err(|e| io_error("note something with", path)(e.into()))?;
    fsetxattr(file, ATTRIBUTE, &bytes, XattrFlags::empty()).map_err(|error| match error {
        Errno::OPNOTSUPP => EngineError::Unhealthy(format!(
            "the filesystem of {} keeps no extended attributes of users, in which the pool keeps what is known of its \
             volumes; use XFS or ext4",
            path.display()
        )),
        Errno::TOOBIG => EngineError::Foreign(format!(
            "what is to be noted with {} has {} bytes, more than its filesystem keeps: too many nodes have it",
            path.display(),
            bytes.len()
        )),
        // ext4 has one block for all attributes of a file, and says the same of both.
        Errno::NOSPC => EngineError::NoSpace(format!(
            "cannot note the {} bytes of what is known of it with {}: the filesystem is full, or keeps less with a file",
            bytes.len(),
            path.display()
        )),
        error => io_error("note something with", path)(error.into()),
    })
}
