//! Incomplete files, which have a temporary name until they are complete and durable, and complete ones.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use rustix::fs::ioctl_ficlone;

use super::{FileEngine, copy_sparse, exists, io_error, record_xattr, unlink};
use crate::audit;
use crate::engine::adopt::name;
use crate::engine::transfer::{PartData, copy};
use crate::engine::{
    Clearance, CopyProgress, EngineError, Method, Object, PartFile, Record, Result, SourceFile,
};
use crate::fail_points::requested;
use crate::hypervisor::DiskSource;

impl FileEngine {
    /// Creates an empty temporary file for an incomplete object; removes the previous one.
    pub(super) fn create_part(&self, cleared: &Clearance) -> Result<File> {
        let part = self.part(cleared.object());
        if !cleared.was_empty() {
            self.refuse_open(cleared.object())?;
            for part in self.all_parts(cleared.object())? {
                self.lease.check()?;
                if unlink(&part)? {
                    audit::log_action("remove", cleared.object(), &part, "the incomplete file is recreated");
                }
            }
        }
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        options.open(&part).map_err(io_error("create", &part))
    }

    /// Sets the size and record of an incomplete file and renames it once all of it is durable.
    pub(super) fn complete(&self, part: &File, object: &Object, bytes: u64, record: &Record) -> Result<()> {
        let (from, to) = (self.part(object), self.file(object));
        part.set_len(bytes).map_err(io_error("set the size of", &from))?;
        record_xattr::write(part, &from, record)?;
        part.sync_all().map_err(io_error("sync", &from))?;
        let rename = || {
            // The last step after what may have taken hours.
            self.lease.check()?;
            name(&from, &to)
        };
        fail_point::effect(|| Some("engine.file.name".into()), requested, rename)
    }

    /// Opens the incomplete file of an object, with this size, and removes everything from byte `keep` on.
    pub(super) fn reopen_part(&self, cleared: &Clearance, keep: u64, bytes: u64) -> Result<PartFile> {
        self.check()?;
        let path = self.part(cleared.object());
        let file = match keep {
            0 => self.create_part(cleared)?,
            _ => self.truncated_part(cleared, keep)?,
        };
        // Writes beyond the end would allocate more than they need.
        file.set_len(bytes).map_err(io_error("set the size of", &path))?;
        Ok(PartFile { data: PartData::File(file, path), lease: self.lease.clone() })
    }

    /// Gives an incomplete file its name.
    pub(super) fn finish_part(
        &self,
        object: &Object,
        part: &PartFile,
        bytes: u64,
        record: &Record,
    ) -> Result<()> {
        match &part.data {
            PartData::File(file, _) => self.complete(file, object, bytes, record),
            PartData::Image(_) => {
                Err(EngineError::Unsupported(format!("the image of {object} is not in this pool")))
            }
        }
    }

    /// Fills an object with the data of another.
    pub(super) fn fill(
        &self,
        cleared: &Clearance,
        from: &DiskSource,
        bytes: u64,
        method: Method,
        record: &Record,
        progress: &CopyProgress,
    ) -> Result<()> {
        self.check()?;
        let source = match (from, method) {
            (DiskSource::File(path), _) => path,
            (DiskSource::Rbd(_), Method::Copy) => {
                return self.copy_image(cleared, from, bytes, record, progress);
            }
            (DiskSource::Rbd(one), Method::Reflink) => {
                return Err(EngineError::Unsupported(format!("no file shares data with {}", one.image)));
            }
        };
        let object = cleared.object();
        let part = self.part(object);
        let from = File::open(source).map_err(io_error("open", source))?;
        let to = self.create_part(cleared)?;
        match method {
            Method::Reflink => {
                ioctl_ficlone(&to, &from).map_err(|e| io_error("share the blocks with", &part)(e.into()))?;
                // The source may have been expanded and written to meanwhile: its data must not be truncated.
                let length = to.metadata().map_err(io_error("read the metadata of", &part))?.len();
                if length > bytes {
                    return Err(EngineError::SourceExpanded(format!(
                        "{} was expanded from {bytes} to {length} bytes meanwhile; retry",
                        source.display()
                    )));
                }
            }
            Method::Copy => copy_sparse(&from, &to, bytes, progress)?,
        }
        // The object may be larger than its source; and a source that was expanded during the copy was not written to.
        self.complete(&to, object, bytes, record)
    }

    /// Fills an object with the data of an image.
    fn copy_image(
        &self,
        cleared: &Clearance,
        from: &DiskSource,
        bytes: u64,
        record: &Record,
        progress: &CopyProgress,
    ) -> Result<()> {
        let from = SourceFile::open(from, bytes)?;
        let part = self.reopen_part(cleared, 0, bytes)?;
        copy(&from, &part, progress)?;
        self.finish_part(cleared.object(), &part, bytes, record)
    }

    fn truncated_part(&self, cleared: &Clearance, keep: u64) -> Result<File> {
        let path = self.part(cleared.object());
        self.refuse_open(cleared.object())?;
        // What an earlier server left gets this one's name: it has the lock of the pool, so the earlier one has ended.
        if !exists(&path)?
            && let Some(left) = self.left_parts(cleared.object())?.first()
        {
            self.lease.check()?;
            name(left, &path)?;
        }
        let file =
            OpenOptions::new().read(true).write(true).open(&path).map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => EngineError::Missing(format!("{} does not exist", path.display())),
                _ => io_error("open", &path)(error),
            })?;
        let length = file.metadata().map_err(io_error("read the metadata of", &path))?.len();
        if length < keep {
            let what = format!("{} has {length} bytes instead of at least {keep}", path.display());
            return Err(EngineError::Missing(what));
        }
        file.set_len(keep).map_err(io_error("truncate", &path))?;
        Ok(file)
    }

    /// The path of an object's file, after checking that it exists.
    pub(super) fn existing(&self, object: &Object) -> Result<PathBuf> {
        self.check()?;
        let path = self.file(object);
        match fs::symlink_metadata(&path) {
            Ok(meta) if meta.is_file() => Ok(path),
            Ok(_) => Err(EngineError::Foreign(format!("{} is not a regular file", path.display()))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(EngineError::Missing(format!("the file of {object} does not exist: {}", path.display())))
            }
            Err(error) => Err(io_error("access", &path)(error)),
        }
    }
}
