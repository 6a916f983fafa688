//! Disk names in udev's directory `/dev/disk/by-id`: wakes waiting calls when a disk's name appears.
//!
//! All calls share one inotify instance, because these are limited (128 per user by default). The directory may not exist
//! before the first disk is attached; then its nearest existing ancestor is watched.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use process_kit::supervise;
use rustix::fs::inotify;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{FindError, Identity, is_recorded, sysfs};
use crate::blocking::blocking;
use crate::mount_table::DeviceNumber;

/// Interval at which a waiting call also polls, in case inotify is unavailable, such as when all instances of the node are in
/// use.
const FALLBACK_INTERVAL: Duration = Duration::from_secs(5);

/// Maximum number of names in an error.
const MAX_LISTED: usize = 30;

/// The watched directory of disk names.
#[derive(Debug, Clone)]
pub struct DiskNames {
    dir: PathBuf,
    identity: Identity,
    changed: watch::Receiver<()>,
}

/// A disk's name and its device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DiskLink {
    /// Path of the name.
    pub(super) link: PathBuf,
    /// Device that the name points to.
    pub(super) device: PathBuf,
}

impl DiskNames {
    /// Watches a directory until `stop`. `identity`: how its devices are verified.
    pub fn watch(dir: PathBuf, identity: Identity, stop: CancellationToken) -> Self {
        let (sender, changed) = watch::channel(());
        let watched = dir.clone();
        let until = stop.clone();
        supervise::background("watch of disk names", until, async move {
            if let Some(Err(error)) = stop.run_until_cancelled(watch_dir(&watched, &sender)).await {
                tracing::warn!(dir = %watched.display(), %error, "failed to watch the disk names with inotify; polling every {FALLBACK_INTERVAL:?}");
                // Waiting calls poll as long as the sender exists.
                stop.cancelled().await;
                drop(sender);
            }
        });
        Self { dir, identity, changed }
    }

    /// The directory.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// How its devices are verified.
    pub(crate) fn identity(&self) -> Identity {
        self.identity
    }

    /// Checks that the directory is readable, or can still be created in an existing ancestor.
    pub(crate) fn check(&self) -> io::Result<()> {
        match std::fs::read_dir(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                nearest_existing(&self.dir).metadata().map(drop)
            }
            other => other.map(drop),
        }
    }

    /// Looks up the disk.
    pub(super) async fn lookup(&self, uuid: Uuid) -> Result<Option<DiskLink>, FindError> {
        let (dir, identity) = (self.dir.clone(), self.identity);
        blocking(move || lookup(&dir, uuid, identity)).await
    }

    /// Waits for the disk, at most until `until`.
    pub(super) async fn wait_for(&self, uuid: Uuid, until: Instant) -> Result<DiskLink, FindError> {
        let mut changed = self.changed.clone();
        loop {
            // Before the lookup, so that a later change is noticed.
            changed.mark_unchanged();
            if let Some(found) = self.lookup(uuid).await? {
                return Ok(found);
            }
            let now = Instant::now();
            if now >= until {
                return Err(self.not_attached(uuid).await);
            }
            // Look up again after a change or a timeout.
            let _ = tokio::time::timeout_at(until.min(now + FALLBACK_INTERVAL), changed.changed()).await;
        }
    }

    /// Creates the error with the expected and existing names.
    pub(super) async fn not_attached(&self, uuid: Uuid) -> FindError {
        let dir = self.dir.clone();
        let existing = blocking(move || list(&dir)).await;
        FindError::NotAttached {
            uuid,
            dir: self.dir.clone(),
            names: crds::names::disk_by_id(&uuid.to_string()).join(", "),
            existing,
            advice: self.identity.not_attached(),
        }
    }
}

/// Looks up each possible name of a disk UUID.
fn lookup(dir: &Path, uuid: Uuid, identity: Identity) -> Result<Option<DiskLink>, FindError> {
    let mut found: Option<DiskLink> = None;
    for name in crds::names::disk_by_id(&uuid.to_string()) {
        let link = dir.join(name);
        let device = match link.canonicalize() {
            Ok(device) => device,
            // The name does not exist, or points to a removed device.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(source) => return Err(FindError::Io { what: link, source }),
        };
        if identity == Identity::Recorded && !is_current(&link, &device)? {
            continue;
        }
        match &found {
            Some(first) if first.device != device => {
                return Err(FindError::Ambiguous {
                    uuid,
                    first: (first.link.clone(), first.device.clone()),
                    second: (link, device),
                });
            }
            Some(_) => {}
            None => found = Some(DiskLink { link, device }),
        }
    }
    Ok(found)
}

/// Whether a link of a host still stands for its device: after a reboot it is there, and points to any device.
fn is_current(link: &Path, device: &Path) -> Result<bool, FindError> {
    let Some(number) = DeviceNumber::of_block_device(device) else { return Ok(false) };
    is_recorded(link, &sysfs(number)).map_err(|source| FindError::Io { what: link.to_owned(), source })
}

/// Existing names, for an error.
fn list(dir: &Path) -> String {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) => return format!("the directory cannot be read: {error}"),
    };
    let mut names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    let more = names.len().saturating_sub(MAX_LISTED);
    names.truncate(MAX_LISTED);
    match (names.is_empty(), more) {
        (true, _) => "the directory is empty".to_owned(),
        (false, 0) => format!("the directory contains {}", names.join(", ")),
        (false, more) => format!("the directory contains {} and {more} more", names.join(", ")),
    }
}

fn nearest_existing(dir: &Path) -> &Path {
    dir.ancestors().find(|ancestor| ancestor.is_dir()).unwrap_or(Path::new("/"))
}

/// Notifies `changed` when the directory's entries change, and when the directory is created or deleted.
async fn watch_dir(dir: &Path, changed: &watch::Sender<()>) -> io::Result<()> {
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
        // Add the watch again after each event, on the directory or its nearest existing ancestor. The kernel treats this as
        // a no-op if the path is unchanged.
        loop {
            let target = nearest_existing(dir);
            match inotify::add_watch(&inotify, target, flags) {
                // A directory created before the watch was added would generate no event.
                Ok(_) if nearest_existing(dir) == target => break,
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

/// Drains all events. Their content does not matter, because waiting calls look up their disk again.
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

    fn names(dir: &Path) -> (DiskNames, tokio_util::sync::DropGuard) {
        let stop = CancellationToken::new();
        (DiskNames::watch(dir.to_owned(), Identity::Reported, stop.clone()), stop.drop_guard())
    }

    #[tokio::test]
    async fn a_disk_is_found_when_its_name_appears_even_if_the_directory_did_not_exist() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("disk/by-id");
        let (names, _stop) = names(&dir);
        let until = Instant::now() + Duration::from_secs(60);
        let waiting = tokio::spawn(async move { names.wait_for(UUID.parse().unwrap(), until).await });
        tokio::task::yield_now().await;
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(root.path().join("sdb"), "").unwrap();
        // A longer name belongs to another device.
        symlink("../../sdb", dir.join("wwn-0x6f9c1b2a0d3e4f5a-part1")).unwrap();
        symlink("../../sdb", dir.join("wwn-0x6f9c1b2a0d3e4f5a")).unwrap();
        let found = waiting.await.unwrap().unwrap();
        assert_eq!(found.device, root.path().join("sdb").canonicalize().unwrap());
    }

    #[tokio::test]
    async fn the_error_for_a_missing_disk_lists_expected_and_existing_names() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("wwn-0x1"), "").unwrap();
        let (names, _stop) = names(root.path());
        let until = Instant::now() + Duration::from_millis(20);
        let error = names.wait_for(UUID.parse().unwrap(), until).await.unwrap_err().to_string();
        assert!(
            error.contains("wwn-0x6f9c1b2a0d3e4f5a, ") && error.contains("the directory contains wwn-0x1"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn names_of_one_disk_that_point_to_two_devices_are_refused() {
        let root = tempfile::tempdir().unwrap();
        for (device, name) in [("a", "wwn-0x6f9c1b2a0d3e4f5a"), ("b", "virtio-6f9c1b2a-0d3e-4f5a-8")] {
            std::fs::write(root.path().join(device), "").unwrap();
            symlink(device, root.path().join(name)).unwrap();
        }
        let error = lookup(root.path(), UUID.parse().unwrap(), Identity::Reported).unwrap_err();
        assert!(matches!(error, FindError::Ambiguous { .. }), "{error}");
    }

    #[test]
    fn a_link_of_a_host_without_a_record_of_its_device_is_stale() {
        let root = tempfile::tempdir().unwrap();
        let link = root.path().join("wwn-0x6f9c1b2a0d3e4f5a");
        symlink("/dev/null", &link).unwrap();
        let found = |identity| lookup(root.path(), UUID.parse().unwrap(), identity).unwrap();
        assert!(found(Identity::Reported).is_some());
        assert_eq!(found(Identity::Recorded), None, "not a block device");
        let Some(device) = block_device() else { return };
        std::fs::remove_file(&link).unwrap();
        symlink(&device, &link).unwrap();
        assert_eq!(found(Identity::Recorded), None, "no record");
        let number = DeviceNumber::of_block_device(&device).unwrap();
        host_links::DeviceRecord::of(&sysfs(number)).unwrap().write(&link).unwrap();
        assert_eq!(found(Identity::Recorded).map(|found| found.device), Some(device));
        std::fs::write(root.path().join(".device-wwn-0x6f9c1b2a0d3e4f5a"), "another-boot 1\n").unwrap();
        assert_eq!(found(Identity::Recorded), None, "of another boot");
    }

    /// Any block device of this machine.
    fn block_device() -> Option<PathBuf> {
        let devices = std::fs::read_dir("/sys/block").ok()?.flatten();
        let paths = devices.map(|device| Path::new("/dev").join(device.file_name()));
        paths.into_iter().find(|path| DeviceNumber::of_block_device(path).is_some())
    }
}
