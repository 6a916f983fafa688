//! Remembers that what was written to a staged filesystem did not reach its disk. The kernel tells of each failure once
//! (syncfs(2), "ERRORS"): a flush that is tried again would succeed, though nothing was written. So it is written down,
//! beside the staging path, where a driver that is started anew finds it. It is of the mount that is there, and of no
//! other: whoever unmounts that, or restarts the machine, has decided that it may go. Everything here blocks.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Seek, Write};
use std::path::{Path, PathBuf};

/// Name of the record, in the folder of the staging path.
const NAME: &str = "nestor-lost-writes";
/// What the record says until the flush is over; as long as any failure, so that this needs no room once it happens.
const UNDER_WAY: [u8; 512] = [b' '; 512];

/// What is known of the writes to the filesystem that is mounted at a staging path.
#[derive(Debug, Clone)]
pub(crate) struct LostWrites {
    staging: PathBuf,
    record: PathBuf,
}

/// Why a mount must stay as it is.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LostWritesError {
    /// Writes are lost.
    #[error(
        "what was written below {path} did not reach the disk, and the kernel does not try again: {why}. The machine's \
         memory may still have it: copy what matters from below {path}, look after the disk, and then let go of it by \
         `umount {path}` on the machine, or by a restart of the machine. Until then the volume is neither used nor detached",
        path = staging.display()
    )]
    Lost {
        /// The staging path.
        staging: PathBuf,
        /// What the flush said.
        why: String,
    },
    /// The record can't be read, written or removed.
    #[error(
        "cannot write down in {} whether all that was written has reached the disk: {source}", record.display()
    )]
    Record {
        /// The record.
        record: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

impl LostWrites {
    /// Of what is mounted at this staging path.
    pub(crate) fn of(staging: &Path) -> Self {
        Self { staging: staging.to_owned(), record: staging.with_file_name(NAME) }
    }

    /// Refuses where writes are known to be lost. Of a flush that a driver began and did not live to end, nothing is known:
    /// it is done again.
    pub(crate) fn check(&self) -> Result<(), LostWritesError> {
        let bytes = match fs::read(&self.record) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(self.failed(error)),
        };
        match String::from_utf8_lossy(&bytes).trim() {
            "" => Ok(()),
            why => Err(self.lost(why.to_owned())),
        }
    }

    /// Runs a flush whose failure is not forgotten. Where it can't be written down, nothing is flushed: the kernel would
    /// tell nobody else.
    pub(crate) fn remember(&self, flush: impl FnOnce() -> io::Result<()>) -> Result<(), LostWritesError> {
        let mut record = self.begin().map_err(|error| self.failed(error))?;
        let Err(failure) = flush() else { return self.forget() };
        let why = failure.to_string();
        record.write_all(why.as_bytes()).map_err(|error| self.failed(error))?;
        Err(self.lost(why))
    }

    /// A record that has its room on the machine's disk, and says nothing yet.
    fn begin(&self) -> io::Result<File> {
        let mut record = File::create(&self.record)?;
        record.write_all(&UNDER_WAY)?;
        record.sync_all()?;
        record.rewind()?;
        Ok(record)
    }

    /// Forgets what is known: the mount is not there any more.
    pub(crate) fn forget(&self) -> Result<(), LostWritesError> {
        match fs::remove_file(&self.record) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(self.failed(error)),
            _ => Ok(()),
        }
    }

    fn lost(&self, why: String) -> LostWritesError {
        LostWritesError::Lost { staging: self.staging.clone(), why }
    }

    fn failed(&self, source: io::Error) -> LostWritesError {
        LostWritesError::Record { record: self.record.clone(), source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_known_until_it_is_forgotten_and_an_interrupted_flush_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let writes = LostWrites::of(&folder.path().join("globalmount"));
        writes.forget().unwrap();
        writes.remember(|| Ok(())).unwrap();
        writes.check().unwrap();
        let long = "no room ".repeat(100);
        for outcome in [writes.remember(|| Err(io::Error::other(long.clone()))), writes.check()] {
            let lost = outcome.unwrap_err();
            let LostWritesError::Lost { why, .. } = &lost else { panic!("{lost}") };
            assert_eq!(why.trim(), long.trim());
        }
        writes.forget().unwrap();
        writes.check().unwrap();

        writes.begin().unwrap();
        writes.check().unwrap();
    }

    #[test]
    fn nothing_is_flushed_where_its_failure_would_be_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let writes = LostWrites::of(&folder.path().join("missing/globalmount"));
        let refused = writes.remember(|| panic!("flushed")).unwrap_err();
        assert!(matches!(refused, LostWritesError::Record { .. }), "{refused}");
    }
}
