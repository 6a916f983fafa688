//! Record of lost writes: a flush of a staged filesystem failed. The kernel reports each writeback error once (syncfs(2),
//! "ERRORS"), so a repeated flush would succeed although data is missing. The driver therefore records the error in a
//! file next to the staging path, where it finds it after a restart. The record belongs to the current mount: an operator
//! who unmounts the filesystem or reboots the node accepts the loss. Every function blocks.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Seek, Write};
use std::path::{Path, PathBuf};

/// Name of the record file, in the parent directory of the staging path.
const RECORD_NAME: &str = "nestor-lost-writes";
/// Content of the record during a flush. As long as any error text, so that recording an error allocates no disk space.
const FLUSH_IN_PROGRESS: [u8; 512] = [b' '; 512];

/// Record of lost writes for one staging path.
#[derive(Debug, Clone)]
pub(crate) struct LostWrites {
    staging: PathBuf,
    record: PathBuf,
}

/// Failure to flush a filesystem or to access its record.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LostWritesError {
    /// Writes were lost.
    #[error(
        "writes to the filesystem at {path} did not reach its disk, and the kernel does not retry them: {reason}. The node's page \
         cache may still contain the data: copy important files from {path}, check the disk, and then accept the loss with \
         `umount {path}` on the node, or by rebooting the node. Until then the driver neither mounts nor detaches the volume",
        path = staging.display()
    )]
    Lost {
        /// The staging path.
        staging: PathBuf,
        /// Error of the flush.
        reason: String,
    },
    /// The record cannot be read, written or removed.
    #[error(
        "failed to access {}, the record of lost writes: {source}", record.display()
    )]
    Record {
        /// The record.
        record: PathBuf,
        /// OS error.
        source: io::Error,
    },
}

impl LostWrites {
    /// The record for the mount at this staging path.
    pub(crate) fn of(staging: &Path) -> Self {
        Self { staging: staging.to_owned(), record: staging.with_file_name(RECORD_NAME) }
    }

    /// Fails if writes were lost. A flush that was interrupted by a crash of the driver does not count; it is repeated.
    pub(crate) fn check(&self) -> Result<(), LostWritesError> {
        let bytes = match fs::read(&self.record) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(self.failed(error)),
        };
        match String::from_utf8_lossy(&bytes).trim() {
            "" => Ok(()),
            reason => Err(self.lost(reason.to_owned())),
        }
    }

    /// Runs a flush and records its error. Does not flush if the record cannot be created, because the kernel would not
    /// report the error again.
    pub(crate) fn flush(&self, flush: impl FnOnce() -> io::Result<()>) -> Result<(), LostWritesError> {
        let mut record = self.begin().map_err(|error| self.failed(error))?;
        let Err(failure) = flush() else { return self.clear() };
        let reason = failure.to_string();
        record.write_all(reason.as_bytes()).map_err(|error| self.failed(error))?;
        Err(self.lost(reason))
    }

    /// Creates a record with allocated disk space and no error.
    fn begin(&self) -> io::Result<File> {
        let mut record = File::create(&self.record)?;
        record.write_all(&FLUSH_IN_PROGRESS)?;
        record.sync_all()?;
        record.rewind()?;
        Ok(record)
    }

    /// Removes the record. To be called when the mount is gone.
    pub(crate) fn clear(&self) -> Result<(), LostWritesError> {
        match fs::remove_file(&self.record) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(self.failed(error)),
            _ => Ok(()),
        }
    }

    fn lost(&self, reason: String) -> LostWritesError {
        LostWritesError::Lost { staging: self.staging.clone(), reason }
    }

    fn failed(&self, source: io::Error) -> LostWritesError {
        LostWritesError::Record { record: self.record.clone(), source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_kept_until_it_is_cleared_and_an_interrupted_flush_is_not_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let writes = LostWrites::of(&dir.path().join("globalmount"));
        writes.clear().unwrap();
        writes.flush(|| Ok(())).unwrap();
        writes.check().unwrap();
        let long = "no room ".repeat(100);
        for outcome in [writes.flush(|| Err(io::Error::other(long.clone()))), writes.check()] {
            let lost = outcome.unwrap_err();
            let LostWritesError::Lost { reason, .. } = &lost else { panic!("{lost}") };
            assert_eq!(reason.trim(), long.trim());
        }
        writes.clear().unwrap();
        writes.check().unwrap();

        writes.begin().unwrap();
        writes.check().unwrap();
    }

    #[test]
    fn nothing_is_flushed_if_the_record_cannot_be_created() {
        let dir = tempfile::tempdir().unwrap();
        let writes = LostWrites::of(&dir.path().join("missing/globalmount"));
        let refused = writes.flush(|| panic!("flushed")).unwrap_err();
        assert!(matches!(refused, LostWritesError::Record { .. }), "{refused}");
    }
}
