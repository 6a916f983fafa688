//! Single images: their metadata, their users, and their removal.

use std::sync::PoisonError;

use nix::errno::Errno;
use serde_json::Value;

use super::command::{CallError, Ceph, LONG, QUICK};
use super::output::{self, DiskUsage, Examined, Lock, Trashed, Watcher};
use super::session::Call;
use crate::engine::{EngineError, Record, Result};
use crate::hypervisor::RbdImage;

/// Image metadata that holds the record.
const RECORD: &str = "nestor-record";
/// How long a client that was cut off stays blocked, in seconds: a host that hangs may come back at any time.
const BLOCKED: u64 = 365 * 24 * 3600;
/// Prefix of the names of images in the trash.
const DELETED: &str = "_deleted.";

/// The name of a deleted image. It has the time at which it was deleted, in seconds that the catalog was served: Ceph tells the age by
/// the wall clocks of its hosts and of this one.
fn deleted_name(image: &str, served: Option<u64>, unique: uuid::Uuid) -> String {
    let time = served.map(|seconds| format!("t{seconds}.")).unwrap_or_default();
    format!("{DELETED}{image}.{time}{}", unique.simple())
}

/// Whether a deleted image was there for so many seconds of service. One without a time is as old as Ceph says.
fn is_old(name: &str, served: Option<u64>, seconds: u64) -> bool {
    let time = name.rsplit('.').nth(1).and_then(|word| word.strip_prefix('t')?.parse::<u64>().ok());
    match (time, served) {
        (None, _) => true,
        (Some(_), _) if seconds == 0 => true,
        (Some(time), Some(now)) => time.saturating_add(seconds) <= now,
        (Some(_), None) => false,
    }
}

/// `None` instead of an error if what was asked for does not exist.
fn found<T>(result: Result<T, CallError>) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is(Errno::ENOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

impl Ceph {
    /// Names of all images of the pool or namespace.
    pub(super) fn names(&self) -> Result<Vec<String>> {
        let (pool, namespace) = (&self.location.pool, self.location.namespace.as_deref().unwrap_or_default());
        Ok(self.call(&Call::Names { pool, namespace })?)
    }

    /// Size of an image in bytes.
    pub(super) fn size(&self, image: &RbdImage) -> Result<Option<u64>> {
        found(self.call(&Call::Size { image: image.into() }))
    }

    /// Creates an empty image. It takes no space.
    pub(super) fn create(&self, image: &RbdImage, bytes: u64) -> Result<()> {
        Ok(self.call(&Call::Create { image: image.into(), bytes })?)
    }

    /// Expands an image. Fails instead of shrinking one.
    pub(super) fn resize(&self, image: &RbdImage, bytes: u64) -> Result<()> {
        Ok(self.call(&Call::Resize { image: image.into(), bytes })?)
    }

    /// Renames an image. False if the name is taken.
    pub(super) fn rename(&self, from: &RbdImage, to: &RbdImage) -> Result<bool> {
        match self.call(&Call::Rename { image: from.into(), to: &to.name }) {
            Ok(()) => Ok(true),
            Err(error) if error.is(Errno::EEXIST) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Clients that have an image open for writing.
    pub(super) fn watchers(&self, image: &RbdImage) -> Result<Vec<Watcher>> {
        Ok(found(self.call(&Call::Watchers { image: image.into() }))?.unwrap_or_default())
    }

    /// Whether an image has no data of its own and no parent's.
    pub(super) fn is_blank(&self, image: &RbdImage) -> Result<bool> {
        let extents: Vec<Value> = self.rbd_json(&["diff", "--whole-object", &image.to_string()])?;
        Ok(extents.is_empty())
    }

    /// Bytes that an image has allocated.
    pub(super) fn allocated(&self, image: &RbdImage) -> Result<u64> {
        let usage: DiskUsage = self.rbd_json(&["du", &image.to_string()])?;
        Ok(usage.by_image().values().sum())
    }

    /// The value of image metadata; `None` without it or without the image.
    pub(super) fn metadata(&self, image: &RbdImage, key: &str) -> Result<Option<String>> {
        Ok(found(self.call(&Call::Metadata { image: image.into(), key }))?.flatten())
    }

    /// Sets image metadata. It is durable on return.
    pub(super) fn set_metadata(&self, image: &RbdImage, key: &str, value: &str) -> Result<()> {
        Ok(self.call(&Call::SetMetadata { image: image.into(), key, value })?)
    }

    /// The record of an image.
    pub(super) fn record(&self, image: &RbdImage) -> Result<Option<Record>> {
        let text = self.metadata(image, RECORD)?;
        let decoded = text.map(|text| Record::decode(text.as_bytes())).transpose();
        decoded
            .map_err(|why| EngineError::Foreign(format!("the metadata {RECORD} of the image {image}: {why}")))
    }

    /// Writes the record of an image.
    pub(super) fn set_record(&self, image: &RbdImage, record: &Record) -> Result<()> {
        let text = record.encode().map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let text = text.map_err(|error| EngineError::Io {
            what: format!("cannot encode the record of the image {image}"),
            source: error.into(),
        })?;
        self.set_metadata(image, RECORD, &text)
    }

    /// Whether an image has a record, readable or not.
    pub(super) fn has_record(&self, image: &RbdImage) -> Result<bool> {
        Ok(self.metadata(image, RECORD)?.is_some())
    }

    /// Removes the record of an image, if it has one.
    pub(super) fn remove_record(&self, image: &RbdImage) -> Result<()> {
        Ok(self.call(&Call::RemoveMetadata { image: image.into(), key: RECORD })?)
    }

    /// What tells whether an image can become a volume; `None` without the image.
    pub(super) fn examine(&self, image: &RbdImage) -> Result<Option<Examined>> {
        match found(self.call(&Call::Examine { image: image.into() }))? {
            None => Ok(None),
            Some(Some(examined)) => Ok(Some(examined)),
            Some(None) => Err(EngineError::Unsuitable(format!(
                "the image {image} has the format 1, which keeps no metadata; copy it with `rbd cp`"
            ))),
        }
    }

    /// Removes the data of an image of this size from a byte on.
    pub(super) fn cut(&self, image: &RbdImage, keep: u64, bytes: u64) -> Result<()> {
        Ok(self.call(&Call::Cut { image: image.into(), keep, bytes })?)
    }

    /// Creates a clone of an image as it is now. The snapshot that this takes disappears with the clone.
    pub(super) fn clone_image(&self, from: &RbdImage, to: &RbdImage, snapshot: &str) -> Result<()> {
        let point = format!("{from}@{snapshot}");
        self.rbd(QUICK, &["snap", "create", "--no-progress", &point])?;
        let clone = ["clone", "--rbd-default-clone-format", "2", &point, &to.to_string()];
        let cloned = self.rbd(QUICK, &clone);
        // Ceph keeps a snapshot that has clones until the last one is gone.
        self.rbd(QUICK, &["snap", "rm", "--no-progress", &point])?;
        cloned?;
        Ok(())
    }

    /// Names of the snapshots of an image.
    pub(super) fn snapshots(&self, image: &RbdImage) -> Result<Vec<String>> {
        let all: Vec<Value> = self.rbd_json(&["snap", "ls", &image.to_string()])?;
        Ok(all.iter().filter_map(|one| Some(one.get("name")?.as_str()?.to_owned())).collect())
    }

    /// Removes a snapshot of an image.
    pub(super) fn remove_snapshot(&self, image: &RbdImage, snapshot: &str) -> Result<()> {
        self.rbd(QUICK, &["snap", "rm", "--no-progress", &format!("{image}@{snapshot}")])?;
        Ok(())
    }

    /// Copies what a clone shares with its parent into it.
    pub(super) fn flatten(&self, image: &RbdImage) -> Result<()> {
        self.rbd(LONG, &["flatten", "--no-progress", &image.to_string()])?;
        Ok(())
    }

    /// Moves an image to the trash for this many seconds. Succeeds if it does not exist.
    pub(super) fn discard(&self, image: &RbdImage, seconds: u64) -> Result<bool> {
        if self.size(image)?.is_none() {
            return Ok(false);
        }
        for snapshot in self.snapshots(image)? {
            self.remove_snapshot(image, &snapshot)?;
        }
        // The name tells the images that the server deleted from those of other users of the pool.
        let name = deleted_name(&image.name, self.clock.served(), uuid::Uuid::new_v4());
        let deleted = self.location.image(name);
        let _one_at_a_time = self.discarding.lock().unwrap_or_else(PoisonError::into_inner);
        self.rename(image, &deleted)?;
        self.move_to_trash(&deleted, seconds)?;
        Ok(true)
    }

    fn move_to_trash(&self, image: &RbdImage, seconds: u64) -> Result<()> {
        let until = format!("@{}", jiff::Timestamp::now().as_second().saturating_add_unsigned(seconds));
        // Ceph takes a moment that has passed for one in a century.
        let until: &[&str] = if seconds == 0 { &[] } else { &["--expires-at", &until] };
        self.rbd(QUICK, &[&["trash", "mv"], until, &[&image.to_string()]].concat())?;
        Ok(())
    }

    /// Moves images to the trash whose removal was interrupted.
    fn finish_discards(&self) -> Result<()> {
        let _one_at_a_time = self.discarding.lock().unwrap_or_else(PoisonError::into_inner);
        for name in self.names()?.into_iter().filter(|name| name.starts_with(DELETED)) {
            self.move_to_trash(&self.location.image(name), self.location.trash_seconds)?;
        }
        Ok(())
    }

    /// Removes the images from the trash whose time is over. One that has clones stays until the last clone is gone.
    pub(super) fn empty_trash(&self) -> Result<()> {
        self.finish_discards()?;
        // The removal of a clone makes that of its parent possible.
        while self.remove_expired()? > 0 {}
        Ok(())
    }

    fn remove_expired(&self) -> Result<usize> {
        let all: Vec<Trashed> = self.rbd_here(&["trash", "ls", "--all", "--long"])?;
        let (served, kept) = (self.clock.served(), self.location.trash_seconds);
        let is_due = |one: &&Trashed| {
            one.name.starts_with(DELETED) && one.is_expired() && is_old(&one.name, served, kept)
        };
        let expired = all.iter().filter(is_due);
        let removed: Vec<bool> = expired.map(|one| self.remove_trashed(one)).collect::<Result<_>>()?;
        Ok(removed.into_iter().filter(|removed| *removed).count())
    }

    /// Removes an image from the trash. False if that is not possible yet.
    fn remove_trashed(&self, image: &Trashed) -> Result<bool> {
        let place = self.place();
        let place: Vec<&str> = place.iter().map(String::as_str).collect();
        let remove = [&["trash", "rm", "--no-progress"], &place[..], &[&image.id]].concat();
        match self.rbd(LONG, &remove) {
            Ok(_) => {
                tracing::info!(image = image.name, "removed an image from the trash");
                Ok(true)
            }
            // It has clones, or a program that was killed had it open; or it is gone.
            Err(error)
                if [Errno::ENOTEMPTY, Errno::EBUSY, Errno::ENOENT].iter().any(|one| error.is(*one)) =>
            {
                Ok(false)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Blocks the clients that have an image open, and breaks their locks: they can never write to it again.
    pub(super) fn cut_off(&self, image: &RbdImage) -> Result<Vec<String>> {
        let clients: Vec<String> = self.watchers(image)?.into_iter().map(|one| one.address).collect();
        if clients.is_empty() {
            return Ok(clients);
        }
        let blocked: Vec<Value> = clients.iter().map(|address| output::block(address, BLOCKED)).collect();
        self.lease.check()?;
        self.call::<Value>(&Call::Monitors { commands: &blocked })?;
        let name = image.to_string();
        let locks: Vec<Lock> = self.rbd_json(&["lock", "ls", &name])?;
        for lock in locks.iter().filter(|lock| clients.contains(&lock.address)) {
            found(self.rbd(QUICK, &["lock", "rm", &name, &lock.id, &lock.locker]))?;
        }
        Ok(clients)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deleted_image_is_old_by_the_time_that_the_catalog_was_served() {
        let name = deleted_name("v.1", Some(100), uuid::Uuid::from_u128(7));
        assert_eq!(name, "_deleted.v.1.t100.00000000000000000000000000000007");
        let old = |served, seconds| is_old(&name, served, seconds);
        assert!(!old(Some(159), 60) && old(Some(160), 60));
        assert!(old(Some(0), 0), "nothing is kept");
        assert!(!old(Some(7), 60), "the catalog was made anew");
        assert!(!old(None, 60));
        let before = deleted_name("v.1", None, uuid::Uuid::from_u128(7));
        assert!(is_old(&before, Some(0), 60));
    }
}
