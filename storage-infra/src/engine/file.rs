//! Engine `file`: one sparse raw file per volume or snapshot in a directory.
//!
//! A file that gets the bytes of another has a name for the unfinished until it is complete and on the disk, so that
//! after a crash the name alone tells. Each kind of name has a suffix of its own, so none can be another's.
//!
//! A marker file with the pool's UUID tells the directory that was registered from an empty mount point or from
//! another filesystem mounted there; nothing is created or removed where the marker is not as it should be. What is
//! noted of a volume, snapshot or pool is an extended attribute of its file or of the marker.

mod lock;
mod notes;
mod survey;

use std::collections::{HashMap, HashSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use infra_api::VolumeId;
use rustix::fs::{SeekFrom, StatVfsMountFlags, ioctl_ficlone, seek, statvfs};
use rustix::io::Errno;
use uuid::Uuid;

use crate::audit;

use super::clearance::{Cleared, Files};
use super::{
    Contents, Copying, DiskSource, Engine, EngineError, Method, Object, PoolFacts, Record, Result, Revisions,
    image_lock,
};

pub use survey::{Found, Survey, survey};

/// The marker's name. A volume cannot have it: ids begin with a letter or digit.
const MARKER: &str = ".nestor-pool";
/// How much is copied at a time.
const CHUNK: usize = 1 << 20;

fn file_name(object: &Object) -> String {
    match object {
        Object::Volume(id) => format!("{id}.raw"),
        Object::Snapshot(id) => format!("{id}.snap"),
    }
}

fn part_name(object: &Object) -> String {
    match object {
        Object::Volume(id) => format!("{id}.vpart"),
        Object::Snapshot(id) => format!("{id}.spart"),
    }
}

fn exists(path: &Path) -> Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(io_error("look at", path)(error)),
    }
}

/// Removes a file. False when there was none.
fn unlink(path: &Path) -> Result<bool> {
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(io_error("remove", path)(error)),
    }
}

/// A directory of raw files.
pub struct FileEngine {
    dir: PathBuf,
    uuid: Uuid,
    reflink: OnceLock<bool>,
    lock: lock::PoolLock,
}

fn io_error(what: &str, path: &Path) -> impl FnOnce(io::Error) -> EngineError {
    let what = format!("cannot {what} {}", path.display());
    move |source| match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => EngineError::NoSpace(what),
        io::ErrorKind::FileTooLarge => EngineError::TooLarge(what),
        io::ErrorKind::ReadOnlyFilesystem => EngineError::ReadOnly(what),
        _ => EngineError::Io { what, source },
    }
}

impl FileEngine {
    /// The pool with this UUID in this directory, for the server over this data directory. Touches nothing yet.
    pub fn new(dir: impl Into<PathBuf>, uuid: Uuid, data_dir: &Path) -> Self {
        Self { dir: dir.into(), uuid, reflink: OnceLock::new(), lock: lock::PoolLock::of(data_dir) }
    }

    fn marker(&self) -> PathBuf {
        self.dir.join(MARKER)
    }

    fn file(&self, object: &Object) -> PathBuf {
        self.dir.join(file_name(object))
    }

    /// Where an object's bytes are until they are complete.
    fn part(&self, object: &Object) -> PathBuf {
        self.dir.join(part_name(object))
    }

    fn volume(&self, id: &VolumeId) -> PathBuf {
        self.file(&Object::Volume(id.clone()))
    }

    fn names(&self) -> Result<Vec<fs::DirEntry>> {
        let entries = fs::read_dir(&self.dir).and_then(Iterator::collect);
        entries.map_err(io_error("list", &self.dir))
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

    /// Fails unless the directory is the one that was registered, and this server has it.
    fn check(&self) -> Result<()> {
        // What is not the pool's any more is not held, so that it can be unmounted.
        self.check_marker().inspect_err(|_| self.lock.release())?;
        self.lock.hold(&self.marker())
    }

    fn check_marker(&self) -> Result<()> {
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

    /// Gives a part its size, its record and, once all is on the disk, its name.
    fn complete(&self, part: &File, object: &Object, bytes: u64, record: &Record) -> Result<()> {
        let (from, to) = (self.part(object), self.file(object));
        part.set_len(bytes).map_err(io_error("size", &from))?;
        notes::write(part, &from, record)?;
        part.sync_all().map_err(io_error("sync", &from))?;
        let name = || fs::rename(&from, &to);
        fail_point::around(|| Some("engine.file.name".into()), name).map_err(io_error("name", &to))?;
        self.sync_dir()
    }

    /// Fails where the file by an object's name is known to be another's: the catalog is older than the pool, or
    /// somebody put the file there.
    fn refuse_another(&self, object: &Object, identity: Uuid) -> Result<()> {
        let path = self.file(object);
        let found = notes::read(&path)?;
        if found
            .as_ref()
            .is_none_or(|found| found.object().as_ref() == Some(object) && found.identity() == identity)
        {
            return Ok(());
        }
        Err(EngineError::Foreign(format!(
            "{} is not the {object} that the catalog knows, but another of that name; is the catalog older than the \
             pool? It is left alone: move it away, or rebuild the catalog with `storage-infra recover`",
            path.display()
        )))
    }

    /// Fails where somebody has a file of the object open now, whatever was found before.
    fn refuse_open(&self, object: &Object) -> Result<()> {
        match self.open_by(object)? {
            None => Ok(()),
            Some(holder) => Err(EngineError::InUse(format!("the file of {object} stays: {holder}"))),
        }
    }

    fn open_by(&self, object: &Object) -> Result<Option<image_lock::Holder>> {
        for path in [self.file(object), self.part(object)] {
            let holder = image_lock::holder(&path).map_err(io_error("ask who has", &path))?;
            if holder.is_some() {
                return Ok(holder);
            }
        }
        Ok(None)
    }

    /// An empty file for an object that is not complete: what there was of it is gone.
    fn fresh(&self, cleared: &Cleared) -> Result<File> {
        let part = self.part(cleared.object());
        if !cleared.was_nothing() {
            self.refuse_open(cleared.object())?;
            if unlink(&part)? {
                audit::done("remove", cleared.object(), &part, "what was unfinished is made anew");
            }
        }
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        options.open(&part).map_err(io_error("make", &part))
    }

    /// Tries a real clone, since no filesystem says in advance whether it can. Only a definite answer is remembered.
    fn can_reflink(&self) -> bool {
        if let Some(known) = self.reflink.get() {
            return *known;
        }
        let attempt = || -> io::Result<()> {
            let mut from = tempfile::tempfile_in(&self.dir)?;
            from.write_all(&[1; 4096])?;
            let to = tempfile::tempfile_in(&self.dir)?;
            Ok(ioctl_ficlone(&to, &from)?)
        };
        let can = match attempt() {
            Ok(()) => true,
            Err(error) => match Errno::from_io_error(&error) {
                Some(Errno::OPNOTSUPP | Errno::NOTTY | Errno::INVAL | Errno::NOSYS) => false,
                _ => return false,
            },
        };
        *self.reflink.get_or_init(|| can)
    }
}

/// Makes a file longer, never shorter, and syncs it.
fn lengthen(path: &Path, bytes: u64) -> Result<()> {
    let file = OpenOptions::new().write(true).open(path).map_err(io_error("open", path))?;
    if file.metadata().map_err(io_error("look at", path))?.len() < bytes {
        file.set_len(bytes).map_err(|error| match io_error("grow", path)(error) {
            EngineError::NoSpace(what) => EngineError::NotGrown(format!("{what}: no space is left")),
            EngineError::TooLarge(what) => {
                EngineError::NotGrown(format!("{what}: its filesystem has no files of {bytes} bytes"))
            }
            other => other,
        })?;
    }
    file.sync_all().map_err(io_error("sync", path))
}

/// Where data begins at or after `at`, and where it ends. `None` when there is none before the end of the file.
fn next_data(file: &File, at: u64) -> io::Result<Option<(u64, u64)>> {
    match seek(file, SeekFrom::Data(at)) {
        Ok(start) => Ok(Some((start, seek(file, SeekFrom::Hole(start))?))),
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Copies the first `bytes` of a file, leaving holes where it has holes. `to` must be empty.
fn copy_sparse(from: &File, to: &File, bytes: u64, copying: &Copying) -> Result<()> {
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            EngineError::NoSpace("while copying".into())
        }
        _ => EngineError::Io { what: "cannot copy".into(), source },
    };
    let mut buffer = vec![0; CHUNK];
    let mut at = 0;
    while let Some((start, end)) = next_data(from, at).map_err(failed)? {
        at = start;
        let end = end.min(bytes);
        while at < end {
            if copying.is_cancelled() {
                return Err(EngineError::Cancelled);
            }
            let length = usize::try_from(end - at).unwrap_or(CHUNK).min(CHUNK);
            from.read_exact_at(&mut buffer[..length], at).map_err(failed)?;
            to.write_all_at(&buffer[..length], at).map_err(failed)?;
            at += length as u64;
            copying.set(at);
        }
        if at >= bytes {
            break;
        }
    }
    copying.set(bytes);
    Ok(())
}

impl Engine for FileEngine {
    fn adopt(&self, pool: &Record) -> Result<()> {
        if !self.dir.is_dir() {
            return Err(EngineError::Unhealthy(format!(
                "{} is not an existing directory; make it first",
                self.dir.display()
            )));
        }
        match self.marked()? {
            Some(found) if found == self.uuid.to_string() => return self.note(pool),
            Some(found) => {
                return Err(EngineError::Foreign(format!(
                    "{} belongs to the pool with UUID {found}; if this server's catalog was lost, `storage-infra \
                     recover` brings it back with that pool; else choose another directory, or, if that pool is no \
                     more, remove {MARKER} there",
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
        notes::write(file.as_file(), &path, pool)?;
        file.as_file().sync_all().map_err(io_error("sync", &path))?;
        file.persist_noclobber(&path).map_err(|e| io_error("make", &path)(e.error))?;
        self.sync_dir()?;
        self.check()
    }

    fn release(&self) -> Result<()> {
        match self.check() {
            Ok(()) => {}
            Err(served @ EngineError::Served(_)) => return Err(served),
            // Where the directory is gone or another's, there is nothing of ours to take away.
            Err(_) => return Ok(()),
        }
        fs::remove_file(self.marker()).map_err(io_error("remove", &self.marker()))?;
        let synced = self.sync_dir();
        self.lock.release();
        synced
    }

    fn served_elsewhere(&self) -> Option<String> {
        self.lock.elsewhere()
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

    fn contents(&self, known: &HashSet<Object>) -> Result<Contents> {
        self.check()?;
        let mut names: HashMap<String, Option<&Object>> = HashMap::new();
        for object in known {
            names.insert(file_name(object), Some(object));
            names.insert(part_name(object), Some(object));
        }
        for ours in [MARKER, "lost+found"] {
            names.insert(ours.to_owned(), None);
        }
        let mut contents = Contents::default();
        for entry in self.names()? {
            let name = entry.file_name().to_string_lossy().into_owned();
            match names.get(&name) {
                // A file that vanished between listing and looking has nothing allocated.
                Some(Some(object)) => {
                    *contents.allocated.entry((*object).clone()).or_default() +=
                        entry.metadata().map_or(0, |meta| meta.blocks() * 512);
                }
                Some(None) => {}
                None => contents.unknown.push(name),
            }
        }
        contents.unknown.sort();
        Ok(contents)
    }

    fn missing(&self, expected: HashSet<Object>) -> Result<HashSet<Object>> {
        self.inspect()?;
        let names: HashSet<_> = self.names()?.into_iter().map(|entry| entry.file_name()).collect();
        let gone = |object: &Object| !names.contains(std::ffi::OsStr::new(&file_name(object)));
        Ok(expected.into_iter().filter(gone).collect())
    }

    fn exists(&self, object: &Object) -> Result<bool> {
        self.check()?;
        Ok(exists(&self.file(object))? || exists(&self.part(object))?)
    }

    fn is_complete(&self, object: &Object, identity: Uuid) -> Result<bool> {
        self.check()?;
        self.refuse_another(object, identity)?;
        exists(&self.file(object))
    }

    fn is_blank(&self, id: &VolumeId) -> Result<bool> {
        let DiskSource::File(path) = self.locate(&Object::Volume(id.clone()))?;
        let file = File::open(&path).map_err(io_error("open", &path))?;
        // A filesystem that cannot tell holes calls all of it data (lseek(2), "SEEK_DATA"): not blank.
        Ok(next_data(&file, 0).map_err(io_error("look for data in", &path))?.is_none())
    }

    fn allocated(&self, object: &Object) -> Result<u64> {
        let DiskSource::File(path) = self.locate(object)?;
        Ok(fs::metadata(&path).map_err(io_error("look at", &path))?.blocks() * 512)
    }

    fn files(&self, object: &Object) -> Result<Files> {
        self.check()?;
        let (file, unfinished) = (self.file(object), exists(&self.part(object))?);
        let mut complete = Vec::new();
        if exists(&file)? {
            // A hypervisor may say either.
            complete.extend(fs::canonicalize(&file).ok().filter(|real| *real != file));
            complete.push(file);
        }
        Ok(Files { complete, unfinished, open: self.open_by(object)? })
    }

    fn fill(
        &self,
        cleared: &Cleared,
        from: &DiskSource,
        bytes: u64,
        method: Method,
        record: &Record,
        copying: &Copying,
    ) -> Result<()> {
        self.check()?;
        let DiskSource::File(source) = from;
        let object = cleared.object();
        let part = self.part(object);
        let from = File::open(source).map_err(io_error("open", source))?;
        let to = self.fresh(cleared)?;
        match method {
            Method::Reflink => {
                ioctl_ficlone(&to, &from).map_err(|e| io_error("share the blocks with", &part)(e.into()))?;
                // Whoever has the source may have written there since it grew: it must not be cut off.
                let length = to.metadata().map_err(io_error("look at", &part))?.len();
                if length > bytes {
                    return Err(EngineError::Grown(format!(
                        "{} has {length} bytes, more than the {bytes} that it had before; repeat",
                        source.display()
                    )));
                }
            }
            Method::Copy => copy_sparse(&from, &to, bytes, copying)?,
        }
        // What was asked for may be larger; and nobody wrote to what a source grew by while it was copied.
        self.complete(&to, object, bytes, record)
    }

    fn create(&self, cleared: &Cleared, bytes: u64, record: &Record) -> Result<()> {
        let object = cleared.object();
        if !self.is_complete(object, record.identity())? {
            return self.complete(&self.fresh(cleared)?, object, bytes, record);
        }
        // By ourselves, before a crash, or in a past that the catalog does not know: then its record has more.
        if notes::read(&self.file(object))?.is_some() {
            return Ok(());
        }
        // By an earlier version, which gave a volume its name before its size.
        self.refuse_open(object)?;
        lengthen(&self.file(object), bytes)?;
        self.note(record)
    }

    fn revisions(&self) -> Result<Revisions> {
        self.check()?;
        let mut found = Revisions::default();
        if let Some(Record::Pool(record)) = notes::read(&self.marker())? {
            found.pool = record.revision;
        }
        for entry in self.names()? {
            let is_volume = entry.path().extension().is_some_and(|suffix| suffix == "raw");
            // What cannot be read says so to whoever needs it.
            if is_volume && let Ok(Some(Record::Volume(record))) = notes::read(&entry.path()) {
                found.volumes.insert(record.id.clone(), record.revision);
            }
        }
        Ok(found)
    }

    fn noted(&self, object: &Object) -> Result<Option<Record>> {
        self.check()?;
        notes::read(&self.file(object))
    }

    fn note(&self, record: &Record) -> Result<()> {
        self.check()?;
        let path = record.object().map_or_else(|| self.marker(), |object| self.file(&object));
        let write = || {
            let file = File::open(&path).map_err(io_error("open", &path))?;
            // What cannot be read is written anew: the catalog is here, and whole.
            if !notes::read(&path).is_ok_and(|found| found.as_ref() == Some(record)) {
                notes::write(&file, &path, record)?;
            }
            // Also what was there already: whoever wrote it may not have come to this.
            file.sync_all().map_err(io_error("sync", &path))
        };
        fail_point::around(|| Some("engine.file.note".into()), write)
    }

    fn grow(&self, id: &VolumeId, bytes: u64) -> Result<()> {
        self.check()?;
        lengthen(&self.volume(id), bytes)
    }

    fn remove(&self, cleared: &Cleared) -> Result<()> {
        self.check()?;
        let object = cleared.object();
        self.refuse_another(object, cleared.identity())?;
        self.refuse_open(object)?;
        let mut removed = false;
        for path in [self.file(object), self.part(object)] {
            if unlink(&path)? {
                audit::done("remove", object, &path, "it is deleted, and nobody has it");
                removed = true;
            }
        }
        if removed { self.sync_dir() } else { Ok(()) }
    }

    fn discard(&self, cleared: &Cleared) -> Result<()> {
        self.check()?;
        let (object, part) = (cleared.object(), self.part(cleared.object()));
        self.refuse_open(object)?;
        if !unlink(&part)? {
            return Ok(());
        }
        audit::done("remove", object, &part, "it was never complete, and is given up");
        self.sync_dir()
    }

    fn source(&self, id: &VolumeId) -> DiskSource {
        DiskSource::File(self.volume(id))
    }

    fn locate(&self, object: &Object) -> Result<DiskSource> {
        self.check()?;
        let path = self.file(object);
        match fs::symlink_metadata(&path) {
            Ok(meta) if meta.is_file() => Ok(DiskSource::File(path)),
            Ok(_) => Err(EngineError::Foreign(format!("{} is not a plain file", path.display()))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(EngineError::Missing(format!("the file of {object} is missing: {}", path.display())))
            }
            Err(error) => Err(io_error("find", &path)(error)),
        }
    }
}

/// Makes a directory that only its owner can enter, if it is not there.
pub fn private_dir(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

#[cfg(test)]
mod tests;
