//! How a pool keeps its volumes. One engine object per pool; all calls block and belong on blocking threads.

pub mod file;

use std::io;
use std::path::PathBuf;

use infra_api::VolumeId;

pub use file::FileEngine;

/// Why an engine did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The pool is not there, or is not the one that was registered. Nothing was touched.
    #[error("{0}")]
    Unhealthy(String),
    /// There is something in the way that is not ours. Nothing was touched.
    #[error("{0}")]
    Foreign(String),
    /// The pool's filesystem is full.
    #[error("the pool has no space left: {0}")]
    NoSpace(String),
    /// The pool's filesystem is read-only.
    #[error("the pool is read-only: {0}")]
    ReadOnly(String),
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

/// What is in a pool, as far as it is not known to the catalog.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Contents {
    /// The volumes' bytes really allocated, by the ids that were asked for.
    pub allocated: u64,
    /// Names that belong to no volume. Never touched.
    pub unknown: Vec<String>,
}

/// One pool's storage.
pub trait Engine: Send + Sync {
    /// Makes the storage this pool's own. Refused where it belongs to another.
    fn adopt(&self) -> Result<()>;

    /// Undoes [`Engine::adopt`]; touches nothing else.
    fn release(&self) -> Result<()>;

    /// Checks that the storage is there and this pool's own, and measures it.
    fn inspect(&self) -> Result<PoolFacts>;

    /// Compares what is there with the volumes that should be.
    fn contents(&self, volumes: &[VolumeId]) -> Result<Contents>;

    /// Whether there is something by the name of the volume.
    fn exists(&self, id: &VolumeId) -> Result<bool>;

    /// Makes a volume of zeros, or finishes making it. Only for a volume whose intent is in the catalog:
    /// whatever has its name is taken as its own.
    fn create(&self, id: &VolumeId, bytes: u64) -> Result<()>;

    /// Makes a volume larger. Never smaller.
    fn grow(&self, id: &VolumeId, bytes: u64) -> Result<()>;

    /// Removes a volume's bytes. Fine when they are gone.
    fn remove(&self, id: &VolumeId) -> Result<()>;

    /// What a hypervisor has open, or would open. Nothing is checked: unplugging must work when the pool is gone.
    fn source(&self, id: &VolumeId) -> DiskSource;

    /// What a hypervisor is to open, once it is certain that it is there.
    fn locate(&self, id: &VolumeId) -> Result<DiskSource>;
}
