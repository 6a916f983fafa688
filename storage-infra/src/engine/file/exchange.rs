//! Files of others that become files of the pool, and files of the pool that are given away.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::names::{SNAPSHOT_PART, VOLUME_PART};
use super::{FileEngine, MARKER, io_error, record_xattr};
use crate::audit;
use crate::engine::adopt::{is_at, open_expected, own, refuse_users, rename};
use crate::engine::{Clearance, CopyProgress, EngineError, Object, Record, Result, qcow2};
use crate::fail_points::requested;

/// Suffixes of the files of a pool.
const SUFFIXES: [&str; 4] = ["raw", "snap", VOLUME_PART, SNAPSHOT_PART];

/// Whether a path has a suffix of the files of a pool.
fn has_suffix(path: &Path) -> bool {
    let suffix = path.extension().unwrap_or_default().to_string_lossy();
    let kind = suffix.split('-').next().unwrap_or_default();
    SUFFIXES.contains(&kind)
}

impl FileEngine {
    /// The file keeps its name until it has the record, and then gets that of the volume at once.
    pub(super) fn adopt(&self, cleared: &Clearance, path: &Path, inode: u64, record: &Record) -> Result<()> {
        self.check()?;
        let (object, to) = (cleared.object(), self.file(cleared.object()));
        self.refuse_another(object, cleared.identity())?;
        if is_at(&to, inode)? {
            return self.sync_dir();
        }
        let file = open_expected(path, inode)?;
        let named = || {
            refuse_users(path)?;
            own(&file, path)?;
            record_xattr::write(&file, path, record)?;
            file.sync_all().map_err(io_error("sync", path))?;
            let rename = || {
                self.lease.check()?;
                rename(path, &to)
            };
            fail_point::effect(|| Some("engine.file.adopt".into()), requested, rename)
        };
        if let Err(error) = named() {
            if is_at(path, inode)? {
                record_xattr::remove(&file, path)?;
            }
            return Err(error);
        }
        if !is_at(&to, inode)? {
            // Somebody replaced the file between the check and the rename: undone.
            rename(&to, path)?;
            return Err(EngineError::Unsuitable(format!(
                "the file {} was replaced meanwhile",
                path.display()
            )));
        }
        audit::log_action("adopt", object, path, "it becomes the file of the volume");
        Ok(())
    }

    pub(super) fn convert(
        &self,
        cleared: &Clearance,
        image: &Path,
        inode: u64,
        bytes: u64,
        record: &Record,
        progress: &CopyProgress,
    ) -> Result<()> {
        self.check()?;
        let file = open_expected(image, inode)?;
        let format = qcow2::format_of(&file).map_err(io_error("read", image))?;
        if format != Ok(qcow2::Format::Qcow2 { size: bytes }) {
            return Err(EngineError::Unsuitable(format!(
                "the image {} was changed meanwhile",
                image.display()
            )));
        }
        let part = self.create_part(cleared)?;
        let path = self.part(cleared.object());
        part.set_len(bytes).map_err(io_error("set the size of", &path))?;
        qcow2::convert(image, &path, bytes, progress)?;
        self.complete(&part, cleared.object(), bytes, record)
    }

    /// Returns the inode number of the file.
    pub(super) fn releasable(&self, object: &Object, path: &Path) -> Result<u64> {
        self.check()?;
        let unsuitable =
            |why: String| Err(EngineError::Unsuitable(format!("cannot release {object}: {why}")));
        let from = self.file(object);
        let meta = fs::symlink_metadata(&from).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => EngineError::Missing(format!("{} does not exist", from.display())),
            _ => io_error("read the metadata of", &from)(error),
        })?;
        let is_reserved = path.file_name().is_some_and(|name| name == MARKER) || has_suffix(path);
        if is_reserved {
            let reserved = SUFFIXES.join(", .");
            return unsuitable(format!(
                "{} has a suffix of files in pools (.{reserved}); choose another, such as .img",
                path.display()
            ));
        }
        if fs::symlink_metadata(path).is_ok() {
            return unsuitable(format!("{} exists; choose another path", path.display()));
        }
        let parent = path.parent().unwrap_or(Path::new("/"));
        let directory = fs::metadata(parent).map_err(io_error("access the directory", parent))?;
        if directory.dev() != meta.dev() {
            return unsuitable(format!(
                "{} is on another filesystem than its pool; release it to a path there and move it then, or export it",
                path.display()
            ));
        }
        Ok(meta.ino())
    }

    /// The record stays until the file has left the pool: with it, the file is never taken for another's.
    pub(super) fn move_out(&self, cleared: &Clearance, path: &Path, inode: u64) -> Result<()> {
        self.check()?;
        let (object, from) = (cleared.object(), self.file(cleared.object()));
        if is_at(&from, inode)? {
            self.refuse_another(object, cleared.identity())?;
            self.refuse_open(object)?;
            let named = || {
                self.lease.check()?;
                rename(&from, path)
            };
            fail_point::effect(|| Some("engine.file.release".into()), requested, named)?;
        } else if !is_at(path, inode)? {
            return Err(EngineError::Missing(format!(
                "the file of {object} is neither at {} nor at {}",
                from.display(),
                path.display()
            )));
        }
        let file = open_expected(path, inode)?;
        record_xattr::remove(&file, path)?;
        file.sync_all().map_err(io_error("sync", path))?;
        audit::log_action("release", object, path, "it is no volume any more");
        Ok(())
    }
}
