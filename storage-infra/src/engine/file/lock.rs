//! The lock on a pool's marker, by which one server at a time has the pool. It is the kernel's: it ends with the process that
//! holds it, however that ends, and the network filesystems that pass locks on show it to other hosts.
//!
//! The file stays open for as long as it is the marker of the pool's directory. A directory that was taken away, or another
//! that was mounted there, is noticed by the next look, and nothing of the old one is kept open.

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

/// The attribute of the marker that says who has the pool, for people. Only the lock itself counts.
const ATTRIBUTE: &str = "user.nestor.server";
/// How long a server that is just ending may hold a pool.
const HANDOVER: Duration = Duration::from_millis(500);

/// A server, as others are told of it.
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

    fn noted(marker: &Path) -> Option<Self> {
        let mut bytes = vec![0; 1 << 16];
        let length = lgetxattr(marker, ATTRIBUTE, bytes.as_mut_slice()).ok()?;
        serde_json::from_slice(&bytes[..length]).ok()
    }
}

/// The lock, or what is known of it.
#[derive(Default)]
pub(super) struct PoolLock {
    data_dir: PathBuf,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    held: Option<(File, u64, u64)>,
    was_tried: bool,
    elsewhere: Option<String>,
}

impl State {
    fn holds(&self, marker: &Metadata) -> bool {
        self.held.as_ref().is_some_and(|(_, dev, ino)| (*dev, *ino) == (marker.dev(), marker.ino()))
    }
}

impl PoolLock {
    /// A lock of the server over this data directory.
    pub(super) fn of(data_dir: &Path) -> Self {
        Self { data_dir: data_dir.to_owned(), state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets go of the pool.
    pub(super) fn release(&self) {
        let held = self.state().held.take();
        drop(held);
    }

    /// Who else served the pool when it was last looked at.
    pub(super) fn elsewhere(&self) -> Option<String> {
        self.state().elsewhere.clone()
    }

    /// Makes sure that this server has the pool with this marker. Fails where another one has.
    pub(super) fn hold(&self, marker: &Path) -> Result<()> {
        let found = fs::metadata(marker).map_err(io_error("look at", marker))?;
        let mut state = self.state();
        if state.holds(&found) {
            return Ok(());
        }
        state.held = None;
        let patience = if state.was_tried { Duration::ZERO } else { HANDOVER };
        state.was_tried = true;
        let locked = lock(marker, patience)?;
        state.elsewhere = locked.is_none().then(|| served_elsewhere(marker));
        match (locked, &state.elsewhere) {
            (Some(file), _) => {
                let meta = file.metadata().map_err(io_error("look at", marker))?;
                self.sign(&file);
                state.held = Some((file, meta.dev(), meta.ino()));
                Ok(())
            }
            (None, why) => Err(EngineError::Served(why.clone().unwrap_or_default())),
        }
    }

    /// Says who has the pool, where that can be written.
    fn sign(&self, marker: &File) {
        let signed = serde_json::to_vec(&Server::this(&self.data_dir)).map_err(|error| error.to_string());
        let signed = signed.and_then(|bytes| {
            fsetxattr(marker, ATTRIBUTE, &bytes, XattrFlags::empty()).map_err(|error| error.to_string())
        });
        if let Err(error) = signed {
            tracing::debug!(%error, "could not note which server has the pool");
        }
    }
}

/// The marker, locked; None where somebody else has locked it.
fn lock(marker: &Path, patience: Duration) -> Result<Option<File>> {
    let mut file = File::open(marker).map_err(io_error("open", marker))?;
    let start = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(Some(file)),
            // NFS locks only what is open for writing.
            Err(TryLockError::Error(error)) if Errno::from_io_error(&error) == Some(Errno::BADF) => {
                file = OpenOptions::new().write(true).open(marker).map_err(io_error("open", marker))?;
            }
            Err(TryLockError::Error(error)) => return Err(io_error("lock", marker)(error)),
            // A file lock can't be waited for with a deadline, so it is tried again.
            Err(TryLockError::WouldBlock) if start.elapsed() < patience => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(TryLockError::WouldBlock) => return Ok(None),
        }
    }
}

/// Who serves the pool with this marker, for people. None where nobody does.
pub(super) fn server_of(marker: &Path) -> io::Result<Option<String>> {
    match lock(marker, Duration::ZERO) {
        Ok(Some(_)) => Ok(None),
        Ok(None) => Ok(Some(served_elsewhere(marker))),
        Err(error) => Err(io::Error::other(error.to_string())),
    }
}

fn served_elsewhere(marker: &Path) -> String {
    let pool = marker.parent().unwrap_or(marker).display();
    let who =
        Server::noted(marker).map_or("which is not known".to_owned(), |Server { host, pid, data_dir }| {
            format!("process {pid} on host {host} with the data directory {}", data_dir.display())
        });
    format!(
        "{pool} is served by another server ({who}), which holds the lock on its marker; stop that one first"
    )
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
    fn one_has_a_marker_and_others_are_told_who_until_it_lets_go() {
        let dir = tempfile::tempdir().unwrap();
        let marker = marker(&dir);
        let (one, other) = (PoolLock::of(Path::new("/one")), PoolLock::of(Path::new("/other")));
        one.hold(&marker).unwrap();
        one.hold(&marker).unwrap();
        let Err(EngineError::Served(why)) = other.hold(&marker) else { panic!("two have it") };
        let process = format!("process {}", std::process::id());
        assert!(why.contains(&process) && why.contains("/one"), "{why}");
        assert_eq!(other.elsewhere(), Some(why.clone()));
        assert_eq!(server_of(&marker).unwrap(), Some(why));
        one.release();
        other.hold(&marker).unwrap();
        assert_eq!(other.elsewhere(), None);
    }

    #[test]
    fn a_marker_that_is_another_file_is_locked_anew() {
        let dir = tempfile::tempdir().unwrap();
        let path = marker(&dir);
        let lock = PoolLock::of(Path::new("/one"));
        lock.hold(&path).unwrap();
        fs::rename(&path, dir.path().join("old")).unwrap();
        fs::write(&path, "text").unwrap();
        lock.hold(&path).unwrap();
        assert!(server_of(&path).unwrap().is_some());
        assert_eq!(server_of(&dir.path().join("old")).unwrap(), None);
    }
}
