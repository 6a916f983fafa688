//! Operations on files: existence, removal, size, holes and copies.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{SeekFrom, ioctl_ficlone, seek};
use rustix::io::Errno;

use crate::engine::{CopyProgress, EngineError, Result};

/// Number of bytes copied at a time.
const CHUNK: usize = 1 << 20;

pub(super) fn exists(path: &Path) -> Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(io_error("read the metadata of", path)(error)),
    }
}

/// Removes a file; false if it did not exist.
pub(super) fn unlink(path: &Path) -> Result<bool> {
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(io_error("remove", path)(error)),
    }
}

pub(in crate::engine) fn io_error(action: &str, path: &Path) -> impl FnOnce(io::Error) -> EngineError {
    let what = format!("cannot {action} {}", path.display());
    move |source| match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => EngineError::NoSpace(what),
        io::ErrorKind::FileTooLarge => EngineError::TooLarge(what),
        io::ErrorKind::ReadOnlyFilesystem => EngineError::ReadOnly(what),
        _ => EngineError::Io { what, source },
    }
}

/// Expands a file, never truncates it, and syncs it.
pub(super) fn extend(path: &Path, bytes: u64) -> Result<()> {
    let file = OpenOptions::new().write(true).open(path).map_err(io_error("open", path))?;
    if file.metadata().map_err(io_error("read the metadata of", path))?.len() < bytes {
        file.set_len(bytes).map_err(|error| match io_error("expand", path)(error) {
            EngineError::NoSpace(what) => EngineError::NotExpanded(format!("{what}: the filesystem is full")),
            EngineError::TooLarge(what) => EngineError::NotExpanded(format!(
                "{what}: the filesystem does not support files of {bytes} bytes"
            )),
            other => other,
        })?;
    }
    file.sync_all().map_err(io_error("sync", path))
}

/// Start and end of the next data extent at or after `at`; `None` if there is none before the end of the file.
pub(crate) fn next_data(file: &File, at: u64) -> io::Result<Option<(u64, u64)>> {
    match seek(file, SeekFrom::Data(at)) {
        Ok(start) => Ok(Some((start, seek(file, SeekFrom::Hole(start))?))),
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Tests reflink support in a directory with a real clone, since no filesystem reports it in advance. `None` if that is
/// not known.
pub(super) fn can_reflink(dir: &Path) -> Option<bool> {
    let attempt = || -> io::Result<()> {
        let mut from = tempfile::tempfile_in(dir)?;
        from.write_all(&[1; 4096])?;
        let to = tempfile::tempfile_in(dir)?;
        Ok(ioctl_ficlone(&to, &from)?)
    };
    match attempt() {
        Ok(()) => Some(true),
        Err(error) => match Errno::from_io_error(&error) {
            Some(Errno::OPNOTSUPP | Errno::NOTTY | Errno::INVAL | Errno::NOSYS) => Some(false),
            _ => None,
        },
    }
}

/// Copies the first `bytes` of a file and preserves holes. `to` must be empty.
pub(super) fn copy_sparse(from: &File, to: &File, bytes: u64, progress: &CopyProgress) -> Result<()> {
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            EngineError::NoSpace("cannot copy the data".into())
        }
        _ => EngineError::Io { what: "cannot copy the data".into(), source },
    };
    let mut buffer = vec![0; CHUNK];
    let mut at = 0;
    while let Some((start, end)) = next_data(from, at).map_err(failed)? {
        at = start;
        let end = end.min(bytes);
        while at < end {
            progress.proceed()?;
            let length = usize::try_from(end - at).unwrap_or(CHUNK).min(CHUNK);
            from.read_exact_at(&mut buffer[..length], at).map_err(failed)?;
            to.write_all_at(&buffer[..length], at).map_err(failed)?;
            at += length as u64;
            progress.set(at);
            std::thread::sleep(progress.pause_after(length as u64));
        }
        if at >= bytes {
            break;
        }
    }
    progress.set(bytes);
    Ok(())
}
