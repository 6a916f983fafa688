//! Storage engines: how a pool stores its volumes. One engine object per pool. All calls block; run them on blocking
//! threads.

pub mod adopt;
pub mod clearance;
pub mod file;
pub mod image_lock;
pub mod qcow2;
pub mod rbd;
pub mod record;
pub mod scan;
pub mod transfer;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use infra_api::{CephPool, SnapshotId, VolumeId};
use uuid::Uuid;

use crate::hypervisor::DiskSource;
use crate::lease::{Lease, NotActive};

use adopt::ForeignImage;

pub use clearance::{Clearance, Evidence, Files};
pub use file::FileEngine;
pub use rbd::{RbdEngine, RbdLocation};
pub use record::Record;
pub use transfer::{PartFile, SourceFile, is_zero};

/// An object that a pool stores: a volume or a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Object {
    /// A volume.
    Volume(VolumeId),
    /// A snapshot; read-only once it is complete.
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

/// How the data of a source is duplicated into a new object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// By reflink: atomic, sharing blocks. The source may be written to meanwhile.
    Reflink,
    /// By copying. The source must not be written to meanwhile.
    Copy,
}

/// Progress of a copy, shared with observers, who can cancel it.
#[derive(Debug, Default)]
pub struct CopyProgress {
    copied: AtomicU64,
    cancelled: AtomicBool,
    /// Maximum bytes per second; 0 without a limit.
    rate: AtomicU64,
    /// Of the server that copies.
    lease: OnceLock<Lease>,
}

impl CopyProgress {
    /// Bytes of the source processed so far, including holes.
    pub fn copied(&self) -> u64 {
        self.copied.load(Ordering::Relaxed)
    }

    /// Requests that the copy stop before it is complete.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Limits the copy to this many bytes per second, from now on.
    pub fn set_rate(&self, rate: Option<u64>) {
        self.rate.store(rate.unwrap_or(0), Ordering::Relaxed);
    }

    /// How long the next copy of this many bytes must wait.
    fn pause_after(&self, bytes: u64) -> Duration {
        match self.rate.load(Ordering::Relaxed) {
            0 => Duration::ZERO,
            rate => Duration::from_nanos(bytes.saturating_mul(1_000_000_000) / rate),
        }
    }

    /// Lets the copy go on only during this lease.
    pub fn under(&self, lease: &Lease) {
        // It is that of the process.
        let _ = self.lease.set(lease.clone());
    }

    /// Fails if the copy must not write its next part.
    fn proceed(&self) -> Result<()> {
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(EngineError::Cancelled);
        }
        Ok(self.lease.get().map_or(Ok(()), Lease::check)?)
    }

    fn set(&self, copied: u64) {
        self.copied.store(copied, Ordering::Relaxed);
    }
}

/// Why an engine call failed.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The pool is missing or not the one that was registered. Nothing was changed.
    #[error("{0}")]
    Unhealthy(String),
    /// Another server may be active. An incomplete file stays as it is, and a complete one unchanged.
    #[error(transparent)]
    NotActive(#[from] NotActive),
    /// Another server has locked the pool. Nothing was changed.
    #[error("{0}")]
    LockedElsewhere(String),
    /// A process or device has the file open that was to be removed or recreated. Nothing was changed.
    #[error("{0}")]
    InUse(String),
    /// A foreign file or directory is in the way. Nothing was changed.
    #[error("{0}")]
    Foreign(String),
    /// A file cannot become a volume, or a path cannot take one. Nothing was changed.
    #[error("{0}")]
    Unsuitable(String),
    /// The engine does not support this. Nothing was changed.
    #[error("{0}")]
    Unsupported(String),
    /// An image could not be converted.
    #[error("{0}")]
    Conversion(String),
    /// The pool's filesystem is full.
    #[error("the pool has no space left: {0}")]
    NoSpace(String),
    /// The pool's filesystem does not support files of that size.
    #[error("the pool's filesystem does not support files of that size: {0}")]
    TooLarge(String),
    /// A volume could not be expanded, and keeps its size.
    #[error("the volume keeps its size: {0}")]
    NotExpanded(String),
    /// The pool's filesystem is read-only.
    #[error("the pool is read-only: {0}")]
    ReadOnly(String),
    /// The object's file does not exist, or is another one.
    #[error("{0}")]
    Missing(String),
    /// The source is larger than the requested object: it was expanded meanwhile.
    #[error("{0}")]
    SourceExpanded(String),
    /// The copy was cancelled.
    #[error("the copy was cancelled")]
    Cancelled,
    /// Any other I/O error; the operation may be half done.
    #[error("{what}: {source}")]
    Io {
        /// What failed, and on which file.
        what: String,
        /// The cause.
        source: io::Error,
    },
}

/// Result of an engine call.
pub type Result<T, E = EngineError> = std::result::Result<T, E>;

/// Version of a pool's directory, which changes with every entry that is added, renamed or removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DirectoryVersion {
    /// Device and inode: another directory may be mounted there.
    identity: (u64, u64),
    /// Last modification in seconds and nanoseconds.
    modified: (i64, i64),
    /// Last change of the inode, which no program can set.
    changed: (i64, i64),
}

impl DirectoryVersion {
    fn of(directory: &Metadata) -> Self {
        Self {
            identity: (directory.dev(), directory.ino()),
            modified: (directory.mtime(), directory.mtime_nsec()),
            changed: (directory.ctime(), directory.ctime_nsec()),
        }
    }

    /// The version of a pool without a directory, by a hash of the names in it.
    pub(crate) fn of_names(hash: u64) -> Self {
        Self { identity: (hash, 0), ..Self::default() }
    }
}

/// Measurements of a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolFacts {
    /// Version of the directory before the measurement.
    pub directory: DirectoryVersion,
    /// Identifies the filesystem: pools on the same filesystem share its space.
    pub filesystem: u64,
    /// Size of the filesystem in bytes.
    pub capacity: u64,
    /// The same, if it only changes when somebody resizes the filesystem. Not of a Ceph pool: its size is what it has stored
    /// and what it can still store, so it changes with all data in the cluster.
    pub fixed_size: Option<u64>,
    /// Bytes that the filesystem can still allocate.
    pub available: u64,
    /// Bytes in use in the filesystem.
    pub used: u64,
    /// Whether the filesystem supports reflinks.
    pub reflink: bool,
    /// How a Ceph pool keeps its data, if it is known.
    pub ceph: Option<CephPool>,
}

/// Catalog revisions recorded in a pool; see `crate::catalog`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Revisions {
    /// Revision in the pool's own record.
    pub pool: u64,
    /// Revision in each volume's record.
    pub volumes: HashMap<VolumeId, u64>,
}

/// Contents of a pool's directory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Contents {
    /// Bytes allocated to each of the expected objects that exists.
    pub allocated: HashMap<Object, u64>,
    /// Names of files that belong to none of them. Never changed.
    pub unknown: Vec<String>,
}

/// What the file of a volume must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    /// Distinguishes the volume from another one of the same ID.
    pub identity: Uuid,
    /// Its size; the file is never shorter.
    pub bytes: u64,
    /// Whether it has a record. Files of earlier versions get theirs when the server starts.
    pub recorded: bool,
}

/// Storage of one pool. No method has a default implementation, because the fail point wrapper has to forward every
/// one.
pub trait Engine: Send + Sync {
    /// Claims the storage for this pool and writes the pool's record. Fails if it belongs to another pool.
    fn claim(&self, pool: &Record) -> Result<()>;

    /// Reverts [`Engine::claim`]; changes nothing else.
    fn release(&self) -> Result<()>;

    /// Which other server had the pool locked at the last attempt to lock it. Does no I/O.
    fn other_server(&self) -> Option<String>;

    /// Checks that the storage exists and belongs to this pool, and measures it.
    fn inspect(&self) -> Result<PoolFacts>;

    /// Compares the files in the pool with the objects that should exist.
    fn contents(&self, known: &HashSet<Object>) -> Result<Contents>;

    /// Which of these objects have no complete file, or not the one that they should have, with what is wrong. Fails where
    /// [`Engine::inspect`] would. Images are known by their names only.
    fn damaged(&self, expected: &HashMap<Object, Expected>) -> Result<HashMap<Object, String>>;

    /// Fails with [`EngineError::Missing`] if an object has no complete file, or not the one that it should have.
    fn verify(&self, object: &Object, expected: Expected) -> Result<()>;

    /// Writes the record of a volume to a file that has none, after an operator has said that the file is the volume's.
    fn accept_file(&self, record: &Record, expected: Expected) -> Result<()>;

    /// The number that was last written to the marker of the pool, by which a pool that was restored from an earlier state is
    /// recognized. `None` if the engine keeps none.
    fn generation(&self) -> Result<Option<u64>>;

    /// Writes a higher number to the marker. Durable when it returns.
    fn set_generation(&self, generation: u64) -> Result<()>;

    /// From now on, a marker with a lower number is that of an earlier state of the pool, which is not used.
    fn expect_generation(&self, generation: u64);

    /// Whether a file of the object exists, complete or incomplete.
    fn exists(&self, object: &Object) -> Result<bool>;

    /// Whether the object's complete file exists. Fails if that file is another object of the same ID.
    fn is_complete(&self, object: &Object, identity: Uuid) -> Result<bool>;

    /// Whether an existing volume holds no data, so that it reads as zeros throughout.
    fn is_blank(&self, id: &VolumeId) -> Result<bool>;

    /// Bytes allocated to an existing object.
    fn allocated(&self, object: &Object) -> Result<u64>;

    /// Files of an object, and which process or device has them open.
    fn files(&self, object: &Object) -> Result<Files>;

    /// Creates an empty volume with its record, or completes an interrupted creation. The file gets its final name when
    /// it is complete. A complete file with a record is left as it is. The intent to create the volume must be in the
    /// catalog. Fails if another volume with this ID exists.
    fn create(&self, cleared: &Clearance, bytes: u64, record: &Record) -> Result<()>;

    /// Creates an object of `bytes` bytes from a source, with its record. Replaces an incomplete file of the object.
    /// The file gets its final name when it is complete. The intent to create the object must be in the catalog.
    fn create_from(
        &self,
        cleared: &Clearance,
        from: &DiskSource,
        bytes: u64,
        method: Method,
        record: &Record,
        progress: &CopyProgress,
    ) -> Result<()>;

    /// Opens the incomplete file of an object of `bytes` bytes for writing, and removes everything from byte `keep` on.
    /// Creates it if `keep` is 0; otherwise fails with [`EngineError::Missing`] if it is shorter. The intent to create the object must
    /// be in the catalog.
    fn open_part(&self, cleared: &Clearance, keep: u64, bytes: u64) -> Result<PartFile>;

    /// Sets the size and the record of an incomplete file and gives it its final name once it is durable.
    fn complete_part(&self, cleared: &Clearance, part: PartFile, bytes: u64, record: &Record) -> Result<()>;

    /// Examines an image of others in the pool. Fails if it cannot become a volume or is in use.
    fn examine_image(&self, path: &Path) -> Result<ForeignImage>;

    /// Makes the file at this path, with this inode number, the file of a volume, with its record. Succeeds if that was
    /// done before. The intent must be in the catalog. For an RBD image, the number is that of [`ForeignImage`].
    fn adopt_file(&self, cleared: &Clearance, path: &Path, inode: u64, record: &Record) -> Result<()>;

    /// Creates an object of `bytes` bytes from a qcow2 image with this inode number, like [`Engine::create_from`].
    fn create_from_image(
        &self,
        cleared: &Clearance,
        image: &Path,
        inode: u64,
        bytes: u64,
        record: &Record,
        progress: &CopyProgress,
    ) -> Result<()>;

    /// Checks that the file of an object can be moved to a path. Returns the file's inode number.
    fn check_release(&self, object: &Object, path: &Path) -> Result<u64>;

    /// Moves the file of an object to a path, and removes its record. Succeeds if that was done before. The intent must be
    /// in the catalog. Fails with [`EngineError::Missing`] if the file is at neither place.
    fn release_file(&self, cleared: &Clearance, path: &Path, inode: u64) -> Result<()>;

    /// Catalog revisions recorded in a pool; see `crate::catalog`.
    fn revisions(&self) -> Result<Revisions>;

    /// Reads the record of an existing object; `None` if it has none.
    fn read_record(&self, object: &Object) -> Result<Option<Record>>;

    /// Writes the record of an existing object or of the pool. It is durable on return.
    fn write_record(&self, record: &Record) -> Result<()>;

    /// Expands a volume; never shrinks it. After [`EngineError::NotExpanded`] the volume has its previous size.
    fn expand(&self, id: &VolumeId, bytes: u64) -> Result<()>;

    /// Removes the files of an object, complete or incomplete. Succeeds if there are none. Fails if the file is another
    /// object of the same ID.
    fn remove(&self, cleared: &Clearance) -> Result<()>;

    /// Removes the incomplete file of an object. A complete file remains.
    fn remove_incomplete(&self, cleared: &Clearance) -> Result<()>;

    /// What a hypervisor has open, or would open, for a volume. Does no I/O: detaching must work while the pool is
    /// unavailable.
    fn source(&self, id: &VolumeId) -> DiskSource;

    /// What to open for an object, after checking that it exists. Fails with [`EngineError::InUse`] if a layer over it, which somebody
    /// else made, may have later data.
    fn locate(&self, object: &Object) -> Result<DiskSource>;

    /// Cuts off the clients that have a volume open, so that they can never write to it again. Returns them. Does nothing
    /// where a client's access ends with its process.
    fn cut_off(&self, id: &VolumeId) -> Result<Vec<String>>;
}
