//! Engine `file`: one sparse raw file per volume in a directory.
//!
//! A marker file with the pool's UUID tells the directory that was registered from an empty mount point or from
//! another filesystem mounted there; nothing is created or removed where the marker is not as it should be.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use infra_api::VolumeId;
use rustix::fs::{StatVfsMountFlags, ioctl_ficlone, statvfs};
use uuid::Uuid;

use super::{Contents, DiskSource, Engine, EngineError, PoolFacts, Result};

/// The marker's name. A volume cannot have it: ids begin with a letter or digit.
const MARKER: &str = ".nestor-pool";
/// What a volume's file is called, after its id.
const SUFFIX: &str = ".raw";

/// A directory of raw files.
pub struct FileEngine {
    dir: PathBuf,
    uuid: Uuid,
    reflink: OnceLock<bool>,
}

fn io_error(what: &str, path: &Path) -> impl FnOnce(io::Error) -> EngineError {
    let what = format!("cannot {what} {}", path.display());
    move |source| match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => EngineError::NoSpace(what),
        io::ErrorKind::ReadOnlyFilesystem => EngineError::ReadOnly(what),
        _ => EngineError::Io { what, source },
    }
}

impl FileEngine {
    /// The pool with this UUID in this directory. Touches nothing yet.
    pub fn new(dir: impl Into<PathBuf>, uuid: Uuid) -> Self {
        Self { dir: dir.into(), uuid, reflink: OnceLock::new() }
    }

    fn marker(&self) -> PathBuf {
        self.dir.join(MARKER)
    }

    fn file(&self, id: &VolumeId) -> PathBuf {
        self.dir.join(format!("{id}{SUFFIX}"))
    }

    fn sync_dir(&self) -> Result<()> {
        File::open(&self.dir)
            .and_then(|dir| dir.sync_all())
            .map_err(io_error("sync the directory", &self.dir))
    }

    /// Reads the marker: `None` where there is none.
    fn marked(&self) -> Result<Option<String>> {
        match fs::read_to_string(self.marker()) {
            Ok(text) => Ok(Some(text.trim().to_owned())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => {
                Err(EngineError::Unhealthy(format!("cannot read {}: {error}", self.marker().display())))
            }
        }
    }

    /// Fails unless the directory is the one that was registered.
    fn check(&self) -> Result<()> {
        let dir = self.dir.display();
        match self.marked()? {
            Some(found) if found == self.uuid.to_string() => Ok(()),
            Some(found) => Err(EngineError::Unhealthy(format!(
                "{dir} belongs to another pool: its {MARKER} says {found}, this pool is {}; mount the right filesystem",
                self.uuid
            ))),
            None if self.dir.is_dir() => Err(EngineError::Unhealthy(format!(
                "{dir} is not the directory that was registered: {MARKER} is missing; is its filesystem mounted?"
            ))),
            None => Err(EngineError::Unhealthy(format!("{dir} is gone; bring the directory back"))),
        }
    }

    /// Tries a real clone, since no filesystem says in advance whether it can.
    fn can_reflink(&self) -> bool {
        *self.reflink.get_or_init(|| {
            let attempt = || -> io::Result<()> {
                let mut from = tempfile::tempfile_in(&self.dir)?;
                from.write_all(&[1; 4096])?;
                let to = tempfile::tempfile_in(&self.dir)?;
                Ok(ioctl_ficlone(&to, &from)?)
            };
            attempt().is_ok()
        })
    }
}

impl Engine for FileEngine {
    fn adopt(&self) -> Result<()> {
        if !self.dir.is_dir() {
            return Err(EngineError::Unhealthy(format!(
                "{} is not an existing directory; make it first",
                self.dir.display()
            )));
        }
        match self.marked()? {
            Some(found) if found == self.uuid.to_string() => return Ok(()),
            Some(found) => {
                return Err(EngineError::Foreign(format!(
                    "{} belongs to the pool with UUID {found}; choose another directory, or, if that pool is no more, \
                     remove {MARKER} there",
                    self.dir.display()
                )));
            }
            None => {}
        }
        // Written beside and linked into place, so that a marker is there with its text or not at all.
        let path = self.marker();
        let mut file = tempfile::NamedTempFile::with_prefix_in(".nestor-new-", &self.dir)
            .map_err(io_error("write in", &self.dir))?;
        writeln!(file, "{}", self.uuid).map_err(io_error("write", &path))?;
        file.as_file().sync_all().map_err(io_error("sync", &path))?;
        file.persist_noclobber(&path).map_err(|e| io_error("make", &path)(e.error))?;
        self.sync_dir()
    }

    fn release(&self) -> Result<()> {
        // Where the directory is gone or another's, there is nothing of ours to take away.
        if self.check().is_err() {
            return Ok(());
        }
        fs::remove_file(self.marker()).map_err(io_error("remove", &self.marker()))?;
        self.sync_dir()
    }

    fn inspect(&self) -> Result<PoolFacts> {
        self.check()?;
        let meta = fs::metadata(&self.dir).map_err(io_error("read", &self.dir))?;
        let vfs = statvfs(&self.dir).map_err(|e| io_error("measure", &self.dir)(e.into()))?;
        if vfs.f_flag.contains(StatVfsMountFlags::RDONLY) {
            return Err(EngineError::ReadOnly(format!("{} is mounted read-only", self.dir.display())));
        }
        let unit = vfs.f_frsize;
        Ok(PoolFacts {
            filesystem: meta.dev(),
            capacity: vfs.f_blocks * unit,
            available: vfs.f_bavail * unit,
            used: vfs.f_blocks.saturating_sub(vfs.f_bfree) * unit,
            reflink: self.can_reflink(),
        })
    }

    fn contents(&self, volumes: &[VolumeId]) -> Result<Contents> {
        self.check()?;
        let known: std::collections::HashSet<&str> = volumes.iter().map(VolumeId::as_str).collect();
        let mut contents = Contents::default();
        for entry in fs::read_dir(&self.dir).map_err(io_error("list", &self.dir))? {
            let entry = entry.map_err(io_error("list", &self.dir))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name == MARKER || name == "lost+found" {
                continue;
            }
            if name.strip_suffix(SUFFIX).is_some_and(|id| known.contains(id)) {
                // A file that vanished between listing and looking has nothing allocated.
                contents.allocated += entry.metadata().map_or(0, |meta| meta.blocks() * 512);
            } else {
                contents.unknown.push(name);
            }
        }
        contents.unknown.sort();
        Ok(contents)
    }

    fn exists(&self, id: &VolumeId) -> Result<bool> {
        self.check()?;
        let path = self.file(id);
        match fs::symlink_metadata(&path) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(io_error("look at", &path)(error)),
        }
    }

    fn create(&self, id: &VolumeId, bytes: u64) -> Result<()> {
        self.check()?;
        let path = self.file(id);
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(io_error("make", &path))?;
        let found = file.metadata().map_err(io_error("look at", &path))?.len();
        if found < bytes {
            file.set_len(bytes).map_err(io_error("size", &path))?;
        }
        file.sync_all().map_err(io_error("sync", &path))?;
        self.sync_dir()
    }

    fn grow(&self, id: &VolumeId, bytes: u64) -> Result<()> {
        self.check()?;
        let path = self.file(id);
        let file = OpenOptions::new().write(true).open(&path).map_err(io_error("open", &path))?;
        if file.metadata().map_err(io_error("look at", &path))?.len() < bytes {
            file.set_len(bytes).map_err(io_error("grow", &path))?;
        }
        file.sync_all().map_err(io_error("sync", &path))
    }

    fn remove(&self, id: &VolumeId) -> Result<()> {
        self.check()?;
        let path = self.file(id);
        match fs::remove_file(&path) {
            Ok(()) => self.sync_dir(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(io_error("remove", &path)(error)),
        }
    }

    fn source(&self, id: &VolumeId) -> DiskSource {
        DiskSource::File(self.file(id))
    }

    fn locate(&self, id: &VolumeId) -> Result<DiskSource> {
        self.check()?;
        let path = self.file(id);
        match fs::symlink_metadata(&path) {
            Ok(meta) if meta.is_file() => Ok(DiskSource::File(path)),
            Ok(_) => Err(EngineError::Foreign(format!("{} is not a plain file", path.display()))),
            Err(error) => Err(io_error("find", &path)(error)),
        }
    }
}

/// Makes a directory that only its owner can enter, if it is not there.
pub fn private_dir(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engine(dir: &Path) -> FileEngine {
        let engine = FileEngine::new(dir, Uuid::new_v4());
        engine.adopt().unwrap();
        engine
    }

    fn id(text: &str) -> VolumeId {
        VolumeId::new(text).unwrap()
    }

    #[test]
    fn a_volume_is_sparse_grows_and_goes() {
        let dir = tempfile::tempdir().unwrap();
        let engine = engine(dir.path());
        engine.create(&id("v"), 1 << 30).unwrap();
        engine.create(&id("v"), 1 << 30).unwrap();
        let contents = engine.contents(&[id("v")]).unwrap();
        assert!(contents.allocated < 1 << 20 && contents.unknown.is_empty(), "{contents:?}");
        engine.grow(&id("v"), 2 << 30).unwrap();
        engine.grow(&id("v"), 1 << 30).unwrap();
        let DiskSource::File(path) = engine.locate(&id("v")).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), 2 << 30);
        engine.remove(&id("v")).unwrap();
        engine.remove(&id("v")).unwrap();
        assert!(!engine.exists(&id("v")).unwrap());
    }

    #[test]
    fn a_directory_that_is_not_the_registered_one_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let engine = engine(dir.path());
        engine.create(&id("v"), 4096).unwrap();
        fs::write(dir.path().join(MARKER), Uuid::new_v4().to_string()).unwrap();
        assert!(matches!(engine.remove(&id("v")), Err(EngineError::Unhealthy(_))));
        assert!(matches!(engine.create(&id("w"), 4096), Err(EngineError::Unhealthy(_))));
        fs::remove_file(dir.path().join(MARKER)).unwrap();
        assert!(matches!(engine.inspect(), Err(EngineError::Unhealthy(_))));
        engine.release().unwrap();
        assert!(dir.path().join("v.raw").exists() && !dir.path().join("w.raw").exists());
    }

    #[test]
    fn a_directory_of_another_pool_is_refused_and_foreign_files_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let first = engine(dir.path());
        let second = FileEngine::new(dir.path(), Uuid::new_v4());
        assert!(matches!(second.adopt(), Err(EngineError::Foreign(_))));
        fs::write(dir.path().join("photo.jpg"), "x").unwrap();
        fs::write(dir.path().join("w.raw"), "x").unwrap();
        first.create(&id("v"), 4096).unwrap();
        assert_eq!(first.contents(&[id("v")]).unwrap().unknown, ["photo.jpg", "w.raw"]);
    }
}
