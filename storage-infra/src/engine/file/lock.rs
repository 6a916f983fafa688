//! Pool lock: an exclusive file lock on a pool's marker, which lets one server at a time use the pool. The kernel drops
//! it when the process ends, however it ends, and network filesystems that forward locks show it to other hosts.
//!
//! The marker stays open while it is the marker of the pool's directory. If the directory is unmounted or another
//! filesystem is mounted over it, the next check notices that and closes the old file.

use std::fs::{self, File, Metadata, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{XattrFlags, fsetxattr, lgetxattr};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::io_error;
use crate::engine::{EngineError, Result};

/// Extended attribute of the marker with the server that has the lock. Informational: only the lock counts.
const ATTRIBUTE: &str = "user.nestor.server";
/// How long to wait for a server that is shutting down to release the pool.
const HANDOVER_TIMEOUT: Duration = Duration::from_millis(500);

/// Identity of the server that has a pool locked.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Server {
    host: String,
    pid: u32,
    data_dir: PathBuf,
}

impl Server {
    fn this(data_dir: &Path) -> Self {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Self { host, pid: std::process::id(), data_dir: data_dir.to_owned() }
    }

    fn read(marker: &Path) -> Option<Self> {
        let mut bytes = vec![0; 1 << 16];
        let length = lgetxattr(marker, ATTRIBUTE, bytes.as_mut_slice()).ok()?;
        serde_json::from_slice(&bytes[..length]).ok()
    }
}

/// The lock of one pool.
#[derive(Default)]
pub(super) struct PoolLock {
    data_dir: PathBuf,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    held: Option<(File, u64, u64)>,
    was_attempted: bool,
    other_server: Option<String>,
}

impl State {
    fn holds(&self, marker: &Metadata) -> bool {
        self.held.as_ref().is_some_and(|(_, dev, ino)| (*dev, *ino) == (marker.dev(), marker.ino()))
    }
}

impl PoolLock {
    /// The lock, for the server with this data directory.
    pub(super) fn new(data_dir: &Path) -> Self {
        Self { data_dir: data_dir.to_owned(), state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Releases the lock.
    pub(super) fn release(&self) {
        let held = self.state().held.take();
        drop(held);
    }

    /// The server that had the pool locked at the last attempt to lock it.
    pub(super) fn other_server(&self) -> Option<String> {
        self.state().other_server.clone()
    }

    /// Ensures that this server holds the lock on this marker. Fails if another server holds it.
    pub(super) fn ensure_held(&self, marker: &Path) -> Result<()> {
        let found = fs::metadata(marker).map_err(io_error("read the metadata of", marker))?;
        let mut state = self.state();
        if state.holds(&found) {
            return Ok(());
        }
        state.held = None;
        let timeout = if state.was_attempted { Duration::ZERO } else { HANDOVER_TIMEOUT };
        state.was_attempted = true;
        let locked = lock(marker, timeout)?;
        state.other_server = locked.is_none().then(|| locked_elsewhere(marker));
        match (locked, &state.other_server) {
            (Some(file), _) => {
                let meta = file.metadata().map_err(io_error("read the metadata of", marker))?;
                self.write_owner(&file);
                state.held = Some((file, meta.dev(), meta.ino()));
                Ok(())
            }
            (None, why) => Err(EngineError::LockedElsewhere(why.clone().unwrap_or_default())),
        }
    }

    /// Writes this server's identity to the marker, if possible.
    fn write_owner(&self, marker: &File) {
        let written = serde_json::to_vec(&Server::this(&self.data_dir)).map_err(|error| error.to_string());
        let written = written.and_then(|bytes| {
            fsetxattr(marker, ATTRIBUTE, &bytes, XattrFlags::empty()).map_err(|error| error.to_string())
        });
        if let Err(error) = written {
            tracing::debug!(%error, "cannot write the server's identity to the pool marker");
        }
    }
}

/// Opens and locks the marker; `None` if another process has it locked.
fn lock(marker: &Path, timeout: Duration) -> Result<Option<File>> {
    let mut file = File::open(marker).map_err(io_error("open", marker))?;
    let start = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(Some(file)),
            // NFS requires a file opened for writing.
            Err(TryLockError::Error(error)) if Errno::from_io_error(&error) == Some(Errno::BADF) => {
                file = OpenOptions::new().write(true).open(marker).map_err(io_error("open", marker))?;
            }
            Err(TryLockError::Error(error)) => return Err(io_error("lock", marker)(error)),
            // A file lock cannot be awaited with a timeout, so poll.
            Err(TryLockError::WouldBlock) if start.elapsed() < timeout => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(TryLockError::WouldBlock) => return Ok(None),
        }
    }
}

/// A message that names the server that has this pool locked; `None` if it is unlocked.
pub(super) fn server_of(marker: &Path) -> io::Result<Option<String>> {
    match lock(marker, Duration::ZERO) {
        Ok(Some(_)) => Ok(None),
        Ok(None) => Ok(Some(locked_elsewhere(marker))),
        Err(error) => Err(io::Error::other(error.to_string())),
    }
}

fn locked_elsewhere(marker: &Path) -> String {
    let pool = marker.parent().unwrap_or(marker).display();
    let server = Server::read(marker).map_or("unknown".to_owned(), |Server { host, pid, data_dir }| {
        format!("process {pid} on host {host} with the data directory {}", data_dir.display())
    });
    format!("the pool in {pool} is locked by another server ({server}); stop that server first")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marker(dir: &tempfile::TempDir) -> PathBuf {
        let path = dir.path().join(".nestor-pool");
        fs::write(&path, "text").unwrap();
        path
    }

    #[test]
    fn one_server_holds_the_lock_and_others_get_an_error_that_names_it() {
        let dir = tempfile::tempdir().unwrap();
        let marker = marker(&dir);
        let (one, other) = (PoolLock::new(Path::new("/one")), PoolLock::new(Path::new("/other")));
        one.ensure_held(&marker).unwrap();
        one.ensure_held(&marker).unwrap();
        let Err(EngineError::LockedElsewhere(why)) = other.ensure_held(&marker) else {
            panic!("two servers hold the lock")
        };
        let process = format!("process {}", std::process::id());
        assert!(why.contains(&process) && why.contains("/one"), "{why}");
        assert_eq!(other.other_server(), Some(why.clone()));
        assert_eq!(server_of(&marker).unwrap(), Some(why));
        one.release();
        other.ensure_held(&marker).unwrap();
        assert_eq!(other.other_server(), None);
    }

    #[test]
    fn a_replaced_marker_is_locked_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = marker(&dir);
        let lock = PoolLock::new(Path::new("/one"));
        lock.ensure_held(&path).unwrap();
        fs::rename(&path, dir.path().join("old")).unwrap();
        fs::write(&path, "text").unwrap();
        lock.ensure_held(&path).unwrap();
        assert!(server_of(&path).unwrap().is_some());
        assert_eq!(server_of(&dir.path().join("old")).unwrap(), None);
    }
}
