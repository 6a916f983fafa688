//! How a pool keeps its volumes. One engine object per pool; all calls block and belong on blocking threads.

pub mod clearance;
pub mod file;
pub mod image_lock;
pub mod record;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use infra_api::{SnapshotId, VolumeId};
use uuid::Uuid;

pub use clearance::{Cleared, Evidence, Files};
pub use file::FileEngine;
pub use record::Record;

/// Something that a pool keeps bytes of.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Object {
    /// A volume, which machines write to.
    Volume(VolumeId),
    /// A snapshot, which nobody writes to once it is complete.
    Snapshot(SnapshotId),
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Volume(id) => write!(f, "volume {id}"),
            Self::Snapshot(id) => write!(f, "snapshot {id}"),
        }
    }
}

/// How an object gets the bytes of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// All at one moment, sharing blocks. The source may be written to meanwhile.
    Reflink,
    /// Piece by piece. Nobody may write to the source meanwhile.
    Copy,
}

/// A copy under way, as others see it.
#[derive(Debug, Default)]
pub struct Copying {
    copied: AtomicU64,
    cancelled: AtomicBool,
}

impl Copying {
    /// How many bytes of the source are done with, holes counted.
    pub fn copied(&self) -> u64 {
        self.copied.load(Ordering::Relaxed)
    }

    /// Lets the copy end soon, unfinished.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    fn set(&self, copied: u64) {
        self.copied.store(copied, Ordering::Relaxed);
    }
}

/// Why an engine did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The pool is not there, or is not the one that was registered. Nothing was touched.
    #[error("{0}")]
    Unhealthy(String),
    /// Another server has the pool. Nothing was touched.
    #[error("{0}")]
    Served(String),
    /// Somebody has what was to be removed or made anew. Nothing was touched.
    #[error("{0}")]
    InUse(String),
    /// There is something in the way that is not ours. Nothing was touched.
    #[error("{0}")]
    Foreign(String),
    /// The pool's filesystem is full.
    #[error("the pool has no space left: {0}")]
    NoSpace(String),
    /// The pool's filesystem has no files so large.
    #[error("the pool's filesystem has no files of that size: {0}")]
    TooLarge(String),
    /// A volume could not grow, and has the size that it had.
    #[error("the volume keeps its size: {0}")]
    NotGrown(String),
    /// The pool's filesystem is read-only.
    #[error("the pool is read-only: {0}")]
    ReadOnly(String),
    /// What was to be read is not there.
    #[error("{0}")]
    Missing(String),
    /// The source is larger than what was to be made of it: it grew meanwhile.
    #[error("{0}")]
    Grown(String),
    /// A copy was told to end before it was complete.
    #[error("the copy was ended before it was complete")]
    Cancelled,
    /// Anything else that the system says; the work may be half done.
    #[error("{what}: {source}")]
    Io {
        /// What was being done, and to which file.
        what: String,
        /// What the system said.
        source: io::Error,
    },
}

/// The result of an engine's call.
pub type Result<T, E = EngineError> = std::result::Result<T, E>;

/// What a pool is like now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolFacts {
    /// Tells filesystems apart: pools on the same one share its space.
    pub filesystem: u64,
    /// The filesystem's size.
    pub capacity: u64,
    /// What the filesystem can still allocate.
    pub available: u64,
    /// What the filesystem has in use.
    pub used: u64,
    /// Whether clones share their blocks.
    pub reflink: bool,
}

/// What a hypervisor is to open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskSource {
    /// A raw file at an absolute path.
    File(PathBuf),
}

/// How new the catalogs were by which something was noted: see `crate::catalog`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Revisions {
    /// With the pool itself.
    pub pool: u64,
    /// With each volume.
    pub volumes: HashMap<VolumeId, u64>,
}

/// What is in a pool.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Contents {
    /// The bytes allocated to each object that was asked for and is there.
    pub allocated: HashMap<Object, u64>,
    /// Names that belong to no object. Never touched.
    pub unknown: Vec<String>,
}

/// One pool's storage. No method has a default: `crate::points` passes all of them on.
pub trait Engine: Send + Sync {
    /// Makes the storage this pool's own, and notes what pool that is. Refused where it belongs to another.
    fn adopt(&self, pool: &Record) -> Result<()>;

    /// Undoes [`Engine::adopt`]; touches nothing else.
    fn release(&self) -> Result<()>;

    /// Who else had the pool when it was last looked at, for people. Looks at nothing.
    fn served_elsewhere(&self) -> Option<String>;

    /// Checks that the storage is there and this pool's own, and measures it.
    fn inspect(&self) -> Result<PoolFacts>;

    /// Compares what is there with the objects that should be.
    fn contents(&self, known: &HashSet<Object>) -> Result<Contents>;

    /// Which of these objects are not there, complete. Looks at names only, and fails where [`Engine::inspect`] would.
    fn missing(&self, expected: HashSet<Object>) -> Result<HashSet<Object>>;

    /// Whether there is something by a name of the object, complete or not.
    fn exists(&self, object: &Object) -> Result<bool>;

    /// Whether the object is there, complete. Fails where what is there is another of the same id.
    fn is_complete(&self, object: &Object, identity: Uuid) -> Result<bool>;

    /// Whether a volume that is there holds no data at all, so that it reads as zeros throughout.
    fn is_blank(&self, id: &VolumeId) -> Result<bool>;

    /// The bytes allocated to an object that is there.
    fn allocated(&self, object: &Object) -> Result<u64>;

    /// What there is by an object's names, and who has it by what the kernel knows.
    fn files(&self, object: &Object) -> Result<Files>;

    /// Makes a volume of zeros, or finishes making it; with its record. Until it is complete, it is not there by its
    /// name. What is complete and has its record stays as it is. Only for a volume whose intent is in the catalog. Fails
    /// where there is another volume of this id.
    fn create(&self, cleared: &Cleared, bytes: u64, record: &Record) -> Result<()>;

    /// Makes an object with the bytes of another, `bytes` long, and with its record. What there was of it unfinished is
    /// replaced; until it is complete, it is not there by its name. Only for an object whose intent is in the catalog.
    fn fill(
        &self,
        cleared: &Cleared,
        from: &DiskSource,
        bytes: u64,
        method: Method,
        record: &Record,
        copying: &Copying,
    ) -> Result<()>;

    /// How new the catalogs were by which the pool and its volumes were noted.
    fn revisions(&self) -> Result<Revisions>;

    /// What is noted of an object that is there. None where nothing is.
    fn noted(&self, object: &Object) -> Result<Option<Record>>;

    /// Notes this of its object, which is there, or of the pool. On the disk when this returns.
    fn note(&self, record: &Record) -> Result<()>;

    /// Makes a volume larger. Never smaller. [`EngineError::NotGrown`] says that it has the size that it had.
    fn grow(&self, id: &VolumeId, bytes: u64) -> Result<()>;

    /// Removes an object's bytes, complete or not. Fine when they are gone. Fails where what is there is another object
    /// of the same id.
    fn remove(&self, cleared: &Cleared) -> Result<()>;

    /// Removes what there is of an object that was never complete. What is complete stays.
    fn discard(&self, cleared: &Cleared) -> Result<()>;

    /// What a hypervisor has open, or would open. Nothing is checked: unplugging must work when the pool is gone.
    fn source(&self, id: &VolumeId) -> DiskSource;

    /// What to open, once it is certain that it is there.
    fn locate(&self, object: &Object) -> Result<DiskSource>;
}
