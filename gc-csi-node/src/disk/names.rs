//! The folder of disk names that udev keeps (`/dev/disk/by-id`): who is waiting for a disk is woken
//! when its name appears.
//!
//! One watch serves all calls, since inotify instances are few (128 per user by default). The folder
//! itself can be missing until the first disk is plugged; then its nearest existing ancestor is watched.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::inotify;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::blocking::blocking;
use super::FindError;

/// The safety net: how often a waiting call looks anyway. Needed only where inotify cannot be had, as
/// when the machine's inotify instances are used up.
const LOOK_ANYWAY: Duration = Duration::from_secs(5);

/// At most this many names are listed in an error.
const MAX_LISTED: usize = 30;

/// The watched folder of disk names.
#[derive(Debug, Clone)]
pub(crate) struct DiskNames {
    folder: PathBuf,
    changed: watch::Receiver<()>,
}

/// Where a disk's name points.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Found {
    /// The name, as a path.
    pub(super) link: PathBuf,
    /// The device that it points at.
    pub(super) device: PathBuf,
}

impl DiskNames {
    /// Watches `folder` until `stop`.
    pub(crate) fn watch(folder: PathBuf, stop: CancellationToken) -> Self {
        let (sender, changed) = watch::channel(());
        let watched = folder.clone();
        tokio::spawn(async move {
            if let Some(Err(error)) = stop.run_until_cancelled(keep_watching(&watched, &sender)).await {
                tracing::warn!(folder = %watched.display(), %error, "disk names cannot be watched: looking every {LOOK_ANYWAY:?} instead");
                // Who waits keeps its safety net as long as the sender lives.
                sender.closed().await;
            }
        });
        Self { folder, changed }
    }

    /// The folder.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Whether disks could be found: the folder can be read, or can still appear below a folder that is there.
    pub(crate) fn check(&self) -> io::Result<()> {
        match std::fs::read_dir(&self.folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                nearest_existing(&self.folder).metadata().map(drop)
            }
            other => other.map(drop),
        }
    }

    /// Where the disk is now.
    pub(super) async fn look(&self, uuid: Uuid) -> Result<Option<Found>, FindError> {
        let folder = self.folder.clone();
        blocking(move || look(&folder, uuid)).await
    }

    /// Waits until the disk is there, at most until `until`.
    pub(super) async fn wait_for(&self, uuid: Uuid, until: Instant) -> Result<Found, FindError> {
        let mut changed = self.changed.clone();
        loop {
            // Before the look: a change after it is then seen as one.
            changed.mark_unchanged();
            if let Some(found) = self.look(uuid).await? {
                return Ok(found);
            }
            let now = Instant::now();
            if now >= until {
                return Err(self.absent(uuid).await);
            }
            // Both a wake-up and its absence lead to another look.
            let _ = tokio::time::timeout_at(until.min(now + LOOK_ANYWAY), changed.changed()).await;
        }
    }

    /// The error that says what was looked for and what is there.
    pub(super) async fn absent(&self, uuid: Uuid) -> FindError {
        let folder = self.folder.clone();
        let there = blocking(move || list(&folder)).await;
        FindError::Absent {
            uuid,
            folder: self.folder.clone(),
            names: crds::names::disk_by_id(&uuid.to_string()).join(", "),
            there,
        }
    }
}

/// Looks for each exact name that the UUID can have.
fn look(folder: &Path, uuid: Uuid) -> Result<Option<Found>, FindError> {
    let mut found: Option<Found> = None;
    for name in crds::names::disk_by_id(&uuid.to_string()) {
        let link = folder.join(name);
        let device = match link.canonicalize() {
            Ok(device) => device,
            // Not there, or pointing at a device that has just left.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(source) => return Err(FindError::Io { what: link, source }),
        };
        match &found {
            Some(first) if first.device != device => {
                return Err(FindError::Ambiguous {
                    uuid,
                    first: (first.link.clone(), first.device.clone()),
                    second: (link, device),
                });
            }
            Some(_) => {}
            None => found = Some(Found { link, device }),
        }
    }
    Ok(found)
}

/// The names that are there, for an error.
fn list(folder: &Path) -> String {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) => return format!("the folder cannot be read: {error}"),
    };
    let mut names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    let more = names.len().saturating_sub(MAX_LISTED);
    names.truncate(MAX_LISTED);
    match (names.is_empty(), more) {
        (true, _) => "the folder is empty".to_owned(),
        (false, 0) => format!("the folder has {}", names.join(", ")),
        (false, more) => format!("the folder has {} and {more} more", names.join(", ")),
    }
}

fn nearest_existing(folder: &Path) -> &Path {
    folder.ancestors().find(|ancestor| ancestor.is_dir()).unwrap_or(Path::new("/"))
}

/// Tells `changed` of every change of the folder, and of its coming and going.
async fn keep_watching(folder: &Path, changed: &watch::Sender<()>) -> io::Result<()> {
    use inotify::WatchFlags as Flags;
    let flags = Flags::CREATE
        | Flags::MOVED_TO
        | Flags::ATTRIB
        | Flags::DELETE
        | Flags::DELETE_SELF
        | Flags::MOVE_SELF
        | Flags::ONLYDIR;
    let inotify = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC)?;
    #[allow(
        deprecated,
        reason = "its successor is an unsafe function, for types unlike OwnedFd that may change their file"
    )]
    let inotify = AsyncFd::new(inotify)?;
    loop {
        // After every change the watch is set again, on the folder or on what there is of its path:
        // that is a no-op for the kernel while nothing about the path changed.
        loop {
            let target = nearest_existing(folder);
            match inotify::add_watch(&inotify, target, flags) {
                // What appeared between the look and the watch would never be told of.
                Ok(_) if nearest_existing(folder) == target => break,
                Ok(_) | Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        changed.send_replace(());
        let mut ready = inotify.readable().await?;
        drain(&inotify)?;
        ready.clear_ready();
    }
}

/// Takes all events: what they say does not matter, since everybody looks again.
fn drain(inotify: &AsyncFd<OwnedFd>) -> io::Result<()> {
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut events = inotify::Reader::new(inotify, &mut buffer);
    loop {
        match events.next() {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const UUID: &str = "6f9c1b2a-0d3e-4f5a-8b7c-1234567890ab";

    fn names(folder: &Path) -> (DiskNames, tokio_util::sync::DropGuard) {
        let stop = CancellationToken::new();
        (DiskNames::watch(folder.to_owned(), stop.clone()), stop.drop_guard())
    }

    #[tokio::test]
    async fn a_disk_is_found_as_soon_as_its_name_appears_even_when_the_folder_was_missing() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("disk/by-id");
        let (names, _stop) = names(&folder);
        let until = Instant::now() + Duration::from_secs(60);
        let waiting = tokio::spawn(async move { names.wait_for(UUID.parse().unwrap(), until).await });
        tokio::task::yield_now().await;
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(root.path().join("sdb"), "").unwrap();
        // A name that is longer than the exact one is another disk's.
        symlink("../../sdb", folder.join("wwn-0x6f9c1b2a0d3e4f5a-part1")).unwrap();
        symlink("../../sdb", folder.join("wwn-0x6f9c1b2a0d3e4f5a")).unwrap();
        let found = waiting.await.unwrap().unwrap();
        assert_eq!(found.device, root.path().join("sdb").canonicalize().unwrap());
    }

    #[tokio::test]
    async fn a_missing_disk_is_told_with_the_names_and_what_is_there() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("wwn-0x1"), "").unwrap();
        let (names, _stop) = names(root.path());
        let until = Instant::now() + Duration::from_millis(20);
        let error = names.wait_for(UUID.parse().unwrap(), until).await.unwrap_err().to_string();
        assert!(
            error.contains("wwn-0x6f9c1b2a0d3e4f5a, ") && error.contains("the folder has wwn-0x1"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn two_devices_under_one_disks_names_are_refused() {
        let root = tempfile::tempdir().unwrap();
        for (device, name) in [("a", "wwn-0x6f9c1b2a0d3e4f5a"), ("b", "virtio-6f9c1b2a-0d3e-4f5a-8")] {
            std::fs::write(root.path().join(device), "").unwrap();
            symlink(device, root.path().join(name)).unwrap();
        }
        let error = look(root.path(), UUID.parse().unwrap()).unwrap_err();
        assert!(matches!(error, FindError::Ambiguous { .. }), "{error}");
    }
}
