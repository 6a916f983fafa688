//! File engine: one sparse raw file per volume or snapshot in a directory.
//!
//! A file that is being copied has a temporary name until it is complete and durable, so after a crash its name alone
//! tells whether it is complete. Each kind of file has its own suffix, so no two names collide.
//!
//! A marker file with the pool's UUID distinguishes the registered directory from an empty mount point or another
//! filesystem; the engine creates and removes nothing if the marker is missing or wrong. Records are extended
//! attributes of the volume's, snapshot's or marker file.

mod exchange;
mod layers;
mod lock;
mod names;
mod ops;
mod part;
mod record_xattr;
mod scan;
mod verify;

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use infra_api::VolumeId;
use rustix::fs::{StatVfsMountFlags, statvfs};
use uuid::Uuid;

use crate::audit;
use crate::fail_points::requested;
use crate::hypervisor::{DiskLocation, DiskSource};
use crate::lease::Lease;

use super::adopt::ForeignImage;
use super::clearance::{Clearance, Files};
use super::{
    Contents, CopyProgress, DirectoryVersion, Engine, EngineError, Expected, Method, Object, PartFile,
    PoolFacts, Record, Result, Revisions, image_lock,
};

#[cfg(test)]
pub(crate) use layers::NOT_CHOSEN;
pub(crate) use names::{MARKER, object_of};
use names::{file_name, part_name, part_of};
pub(in crate::engine) use ops::io_error;
pub(crate) use ops::next_data;
use ops::{copy_sparse, exists, extend, unlink};

pub(in crate::engine) use record_xattr::has_record;
pub(super) use scan::scan_pool;

/// Storage engine of a pool whose volumes are raw files in a directory.
pub struct FileEngine {
    dir: PathBuf,
    uuid: Uuid,
    reflink: OnceLock<bool>,
    lock: lock::PoolLock,
    known: verify::Known,
    /// Of the server that uses the pool.
    lease: Lease,
    /// Of the server, if there may be several.
    epoch: Option<i64>,
}

impl FileEngine {
    /// The pool with this UUID in this directory, for the server with this data directory. Does no I/O.
    pub fn new(dir: impl Into<PathBuf>, uuid: Uuid, data_dir: &Path) -> Self {
        let (reflink, known) = (OnceLock::new(), verify::Known::default());
        let lock = lock::PoolLock::new(data_dir);
        Self { dir: dir.into(), uuid, reflink, lock, known, lease: Lease::unlimited(), epoch: None }
    }

    /// The same, for a server with this lease, and with this epoch if there may be several.
    pub fn under(self, lease: Lease, epoch: Option<i64>) -> Self {
        Self { lease, epoch, ..self }
    }

    fn marker(&self) -> PathBuf {
        self.dir.join(MARKER)
    }

    fn file(&self, object: &Object) -> PathBuf {
        self.dir.join(file_name(object))
    }

    /// Path of an object's file until it is complete.
    fn part(&self, object: &Object) -> PathBuf {
        self.dir.join(part_name(object, self.epoch))
    }

    /// Incomplete files of an object that servers of earlier epochs left, the latest first.
    fn left_parts(&self, object: &Object) -> Result<Vec<PathBuf>> {
        if self.epoch.is_none() {
            return Ok(Vec::new());
        }
        let mut found = Vec::new();
        for entry in self.names()? {
            let part = part_of(&entry.file_name().to_string_lossy());
            let of_object = part.filter(|(one, epoch)| one == object && *epoch < self.epoch);
            found.extend(of_object.map(|(_, epoch)| (epoch, entry.path())));
        }
        found.sort();
        Ok(found.into_iter().rev().map(|(_, path)| path).collect())
    }

    /// All files that an object may have.
    fn all_files(&self, object: &Object) -> Result<Vec<PathBuf>> {
        Ok([vec![self.file(object)], self.all_parts(object)?].concat())
    }

    fn all_parts(&self, object: &Object) -> Result<Vec<PathBuf>> {
        Ok([vec![self.part(object)], self.left_parts(object)?].concat())
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

    /// Reads the marker; `None` if it is missing.
    fn read_marker(&self) -> Result<Option<String>> {
        match fs::read_to_string(self.marker()) {
            Ok(text) => Ok(Some(text.trim().to_owned())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => {
                Err(EngineError::Unhealthy(format!("cannot read {}: {error}", self.marker().display())))
            }
        }
    }

    /// Checks that the directory is the registered one and that this server holds its lock.
    fn check(&self) -> Result<()> {
        // If the directory is no longer the pool's, release the marker so that its filesystem can be unmounted.
        self.check_marker().inspect_err(|_| self.lock.release())?;
        self.lock.ensure_held(&self.marker())
    }

    fn check_marker(&self) -> Result<()> {
        let dir = self.dir.display();
        match self.read_marker()? {
            Some(found) if found == self.uuid.to_string() => self.refuse_earlier_state(),
            Some(found) => Err(EngineError::Unhealthy(format!(
                "{dir} belongs to another pool: its {MARKER} contains the UUID {found}, this pool has {}; mount the right filesystem",
                self.uuid
            ))),
            None if self.dir.is_dir() => Err(EngineError::Unhealthy(format!(
                "{dir} is not the registered directory: {MARKER} is missing; mount the pool's filesystem"
            ))),
            None => Err(EngineError::Unhealthy(format!(
                "{dir} does not exist; restore the directory or mount its filesystem"
            ))),
        }
    }

    /// Fails if an object's file belongs to another object: the catalog is older than the pool, or someone put the file
    /// there.
    fn refuse_another(&self, object: &Object, identity: Uuid) -> Result<()> {
        let path = self.file(object);
        let found = record_xattr::read(&path)?;
        if found
            .as_ref()
            .is_none_or(|found| found.object().as_ref() == Some(object) && found.identity() == identity)
        {
            return Ok(());
        }
        Err(EngineError::Foreign(format!(
            "{} is another object than the {object} in the catalog; the catalog may be older than the pool. The file is \
             left alone: move it away, or rebuild the catalog with `storage-infra recover`",
            path.display()
        )))
    }

    /// Fails if a file of the object is open now, whatever the evidence said.
    fn refuse_open(&self, object: &Object) -> Result<()> {
        match self.open_by(object)? {
            None => Ok(()),
            Some(holder) => Err(EngineError::InUse(format!("the file of {object} is in use by {holder}"))),
        }
    }

    fn open_by(&self, object: &Object) -> Result<Option<image_lock::Holder>> {
        for path in self.all_files(object)? {
            let holder = image_lock::holder(&path).map_err(io_error("check for users of", &path))?;
            if holder.is_some() {
                return Ok(holder);
            }
        }
        Ok(None)
    }

    /// Whether the filesystem supports reflinks. Caches only a definite result.
    fn can_reflink(&self) -> bool {
        if let Some(known) = self.reflink.get() {
            return *known;
        }
        ops::can_reflink(&self.dir).is_some_and(|can| *self.reflink.get_or_init(|| can))
    }
}

impl Engine for FileEngine {
    fn claim(&self, pool: &Record) -> Result<()> {
        if !self.dir.is_dir() {
            return Err(EngineError::Unhealthy(format!(
                "{} is not an existing directory; create it first",
                self.dir.display()
            )));
        }
        match self.read_marker()? {
            Some(found) if found == self.uuid.to_string() => return self.write_record(pool),
            Some(found) => {
                return Err(EngineError::Foreign(format!(
                    "{} belongs to the pool with UUID {found}; if this server's catalog was lost, `storage-infra \
                     recover` rebuilds it with that pool; otherwise choose another directory, or, if that pool no \
                     longer exists, remove its {MARKER}",
                    self.dir.display()
                )));
            }
            None => {}
        }
        // Written to a temporary file and linked into place, so that the marker exists completely or not at all.
        let path = self.marker();
        let mut file = tempfile::NamedTempFile::with_prefix_in(".nestor-new-", &self.dir)
            .map_err(io_error("create a file in", &self.dir))?;
        writeln!(file, "{}", self.uuid).map_err(io_error("write", &path))?;
        record_xattr::write(file.as_file(), &path, pool)?;
        file.as_file().sync_all().map_err(io_error("sync", &path))?;
        self.lease.check()?;
        file.persist_noclobber(&path).map_err(|e| io_error("create", &path)(e.error))?;
        self.sync_dir()?;
        self.check()
    }

    fn release(&self) -> Result<()> {
        match self.check() {
            Ok(()) => {}
            Err(served @ EngineError::LockedElsewhere(_)) => return Err(served),
            // If the directory is gone or another pool's, there is nothing to remove.
            Err(_) => return Ok(()),
        }
        fs::remove_file(self.marker()).map_err(io_error("remove", &self.marker()))?;
        let synced = self.sync_dir();
        self.lock.release();
        synced
    }

    fn other_server(&self) -> Option<String> {
        self.lock.other_server()
    }

    fn inspect(&self) -> Result<PoolFacts> {
        self.check()?;
        let meta = fs::metadata(&self.dir).map_err(io_error("read", &self.dir))?;
        let vfs = statvfs(&self.dir).map_err(|e| io_error("measure", &self.dir)(e.into()))?;
        if vfs.f_flag.contains(StatVfsMountFlags::RDONLY) {
            return Err(EngineError::ReadOnly(format!("{} is mounted read-only", self.dir.display())));
        }
        let unit = vfs.f_frsize;
        let capacity = vfs.f_blocks * unit;
        Ok(PoolFacts {
            directory: DirectoryVersion::of(&meta),
            filesystem: meta.dev(),
            capacity,
            fixed_size: Some(capacity),
            available: vfs.f_bavail * unit,
            used: vfs.f_blocks.saturating_sub(vfs.f_bfree) * unit,
            reflink: self.can_reflink(),
            ceph: None,
        })
    }

    fn contents(&self, known: &HashSet<Object>) -> Result<Contents> {
        self.check()?;
        let mut names: HashMap<String, Option<&Object>> = HashMap::new();
        for object in known {
            names.insert(file_name(object), Some(object));
            names.insert(part_name(object, self.epoch), Some(object));
        }
        for ours in [MARKER, "lost+found"] {
            names.insert(ours.to_owned(), None);
        }
        let mut contents = Contents::default();
        for entry in self.names()? {
            let name = entry.file_name().to_string_lossy().into_owned();
            let left = || part_of(&name).and_then(|(object, _)| known.get(&object));
            let object = match names.get(&name) {
                Some(None) => continue,
                Some(Some(object)) => Some(*object),
                None => left(),
            };
            match object {
                // A file that was removed since it was listed has nothing allocated.
                Some(object) => {
                    *contents.allocated.entry(object.clone()).or_default() +=
                        entry.metadata().map_or(0, |meta| meta.blocks() * 512);
                }
                None => contents.unknown.push(name),
            }
        }
        contents.unknown.sort();
        Ok(contents)
    }

    fn damaged(&self, expected: &HashMap<Object, Expected>) -> Result<HashMap<Object, String>> {
        self.inspect()?;
        self.find_damaged(expected)
    }

    fn verify(&self, object: &Object, expected: Expected) -> Result<()> {
        self.check()?;
        self.verify_file(object, expected)
    }

    fn accept_file(&self, record: &Record, expected: Expected) -> Result<()> {
        self.check()?;
        self.accept(record, expected)
    }

    fn generation(&self) -> Result<Option<u64>> {
        self.check()?;
        record_xattr::read_generation(&self.marker()).map(Some)
    }

    fn set_generation(&self, generation: u64) -> Result<()> {
        self.check()?;
        self.write_generation(generation)
    }

    fn expect_generation(&self, generation: u64) {
        self.raise_generation(generation);
    }

    fn exists(&self, object: &Object) -> Result<bool> {
        self.check()?;
        for path in self.all_files(object)? {
            if exists(&path)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn is_complete(&self, object: &Object, identity: Uuid) -> Result<bool> {
        self.check()?;
        self.refuse_another(object, identity)?;
        exists(&self.file(object))
    }

    fn is_blank(&self, id: &VolumeId) -> Result<bool> {
        let path = self.existing(&Object::Volume(id.clone()))?;
        let file = File::open(&path).map_err(io_error("open", &path))?;
        // A filesystem without hole detection reports the whole file as data (lseek(2), SEEK_DATA): not blank.
        Ok(next_data(&file, 0).map_err(io_error("search for data in", &path))?.is_none())
    }

    fn allocated(&self, object: &Object) -> Result<u64> {
        let path = self.existing(object)?;
        Ok(fs::metadata(&path).map_err(io_error("read the metadata of", &path))?.blocks() * 512)
    }

    fn files(&self, object: &Object) -> Result<Files> {
        self.check()?;
        let file = self.file(object);
        let unfinished = exists(&self.part(object))? || !self.left_parts(object)?.is_empty();
        let mut complete = Vec::new();
        if exists(&file)? {
            // A hypervisor may report either path.
            complete
                .extend(fs::canonicalize(&file).ok().filter(|real| *real != file).map(DiskLocation::File));
            complete.push(DiskLocation::File(file));
        }
        Ok(Files { complete, unfinished, open: self.open_by(object)? })
    }

    fn create_from(
        &self,
        cleared: &Clearance,
        from: &DiskSource,
        bytes: u64,
        method: Method,
        record: &Record,
        progress: &CopyProgress,
    ) -> Result<()> {
        self.fill(cleared, from, bytes, method, record, progress)
    }

    fn create(&self, cleared: &Clearance, bytes: u64, record: &Record) -> Result<()> {
        let object = cleared.object();
        if !self.is_complete(object, record.identity())? {
            return self.complete(&self.create_part(cleared)?, object, bytes, record);
        }
        // Created by this server before a crash, or before the catalog was restored: its record is the more complete
        // one.
        if record_xattr::read(&self.file(object))?.is_some() {
            return Ok(());
        }
        // Created by an earlier version, which named a volume's file before it set its size.
        self.refuse_open(object)?;
        extend(&self.file(object), bytes)?;
        self.write_record(record)
    }

    fn open_part(&self, cleared: &Clearance, keep: u64, bytes: u64) -> Result<PartFile> {
        self.reopen_part(cleared, keep, bytes)
    }

    fn complete_part(&self, cleared: &Clearance, part: PartFile, bytes: u64, record: &Record) -> Result<()> {
        self.check()?;
        self.finish_part(cleared.object(), &part, bytes, record)
    }

    fn examine_image(&self, path: &Path) -> Result<ForeignImage> {
        Err(EngineError::Unsupported(format!("{} is no image in a directory of files", path.display())))
    }

    fn adopt_file(&self, cleared: &Clearance, path: &Path, inode: u64, record: &Record) -> Result<()> {
        self.adopt(cleared, path, inode, record)
    }

    fn create_from_image(
        &self,
        cleared: &Clearance,
        image: &Path,
        inode: u64,
        bytes: u64,
        record: &Record,
        progress: &CopyProgress,
    ) -> Result<()> {
        self.convert(cleared, image, inode, bytes, record, progress)
    }

    fn check_release(&self, object: &Object, path: &Path) -> Result<u64> {
        self.releasable(object, path)
    }

    fn release_file(&self, cleared: &Clearance, path: &Path, inode: u64) -> Result<()> {
        self.move_out(cleared, path, inode)
    }

    fn revisions(&self) -> Result<Revisions> {
        self.check()?;
        let mut found = Revisions::default();
        if let Some(Record::Pool(record)) = record_xattr::read(&self.marker())? {
            found.pool = record.revision;
        }
        for entry in self.names()? {
            let is_volume = entry.path().extension().is_some_and(|suffix| suffix == "raw");
            // An unreadable record is reported by the operation that needs it.
            if is_volume && let Ok(Some(Record::Volume(record))) = record_xattr::read(&entry.path()) {
                found.volumes.insert(record.id.clone(), record.revision);
            }
        }
        Ok(found)
    }

    fn read_record(&self, object: &Object) -> Result<Option<Record>> {
        self.check()?;
        record_xattr::read(&self.file(object))
    }

    fn write_record(&self, record: &Record) -> Result<()> {
        self.check()?;
        let path = record.object().map_or_else(|| self.marker(), |object| self.file(&object));
        let write = || {
            self.lease.check()?;
            let file = File::open(&path).map_err(io_error("open", &path))?;
            // An unreadable record is overwritten: the catalog is available and intact.
            if !record_xattr::read(&path).is_ok_and(|found| found.as_ref() == Some(record)) {
                record_xattr::write(&file, &path, record)?;
            }
            // Sync also an unchanged record: its writer may have crashed before the sync.
            file.sync_all().map_err(io_error("sync", &path))
        };
        fail_point::effect(|| Some("engine.file.note".into()), requested, write)
    }

    fn expand(&self, id: &VolumeId, bytes: u64) -> Result<()> {
        self.check()?;
        self.lease.check()?;
        extend(&self.volume(id), bytes)
    }

    fn remove(&self, cleared: &Clearance) -> Result<()> {
        self.check()?;
        let object = cleared.object();
        self.refuse_another(object, cleared.identity())?;
        self.refuse_open(object)?;
        let mut removed = false;
        for path in self.all_files(object)? {
            self.lease.check()?;
            if unlink(&path)? {
                audit::log_action("remove", object, &path, "it is deleted and not in use");
                removed = true;
            }
        }
        if removed { self.sync_dir() } else { Ok(()) }
    }

    fn remove_incomplete(&self, cleared: &Clearance) -> Result<()> {
        self.check()?;
        let (object, mut removed) = (cleared.object(), false);
        self.refuse_open(object)?;
        for part in self.all_parts(object)? {
            self.lease.check()?;
            if unlink(&part)? {
                audit::log_action("remove", object, &part, "it is incomplete and abandoned");
                removed = true;
            }
        }
        if removed { self.sync_dir() } else { Ok(()) }
    }

    fn source(&self, id: &VolumeId) -> DiskSource {
        DiskSource::File(self.volume(id))
    }

    fn locate(&self, object: &Object) -> Result<DiskSource> {
        let path = self.existing(object)?;
        self.refuse_layers(object)?;
        Ok(DiskSource::File(path))
    }

    fn cut_off(&self, _id: &VolumeId) -> Result<Vec<String>> {
        Ok(Vec::new())
    }
}

/// Creates a directory that only its owner can access, unless it exists.
pub fn private_dir(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

#[cfg(test)]
mod tests;
