//! Pool scans: what a pool contains, read without a catalog.

use std::path::{Path, PathBuf};

use infra_api::VolumeId;
use uuid::Uuid;

use super::rbd::{self, RbdLocation};
use super::{Object, Record, file};
use crate::hypervisor::DiskLocation;

/// Result of scanning a pool.
#[derive(Debug, Clone)]
pub struct PoolScan {
    /// The path with which it was registered.
    pub dir: PathBuf,
    /// Where its data is, as hypervisors report it.
    pub place: Place,
    /// UUID in the marker.
    pub uuid: Uuid,
    /// The pool's record.
    pub pool: Option<Record>,
    /// Error message that names the server that has the pool locked, if any.
    pub served_by: Option<String>,
    /// The files or images, ordered by name.
    pub files: Vec<FoundFile>,
}

/// A file in a pool's directory, or an image in a Ceph pool.
#[derive(Debug, Clone)]
pub struct FoundFile {
    /// Its name.
    pub name: String,
    /// The object that has this name.
    pub object: Option<Object>,
    /// Length in bytes.
    pub bytes: u64,
    /// Allocated bytes.
    pub allocated: u64,
    /// Its record, or why it cannot be read.
    pub record: Result<Option<Record>, String>,
}

/// Where the data of a pool is, as hypervisors report it.
#[derive(Debug, Clone)]
pub enum Place {
    /// Directory without symbolic links.
    Directory(PathBuf),
    /// Ceph pool or namespace.
    Rbd(RbdLocation),
}

impl Place {
    /// The data of a volume.
    pub fn volume(&self, id: &VolumeId) -> DiskLocation {
        match self {
            Self::Directory(dir) => DiskLocation::File(dir.join(format!("{id}.raw"))),
            Self::Rbd(location) => DiskLocation::Rbd(location.image(id.to_string())),
        }
    }

    /// Whether data is in the pool.
    pub fn contains(&self, data: &DiskLocation) -> bool {
        match (self, data) {
            (Self::Directory(dir), DiskLocation::File(path)) => path.starts_with(dir),
            (Self::Rbd(location), DiskLocation::Rbd(image)) => location.name_of(image).is_some(),
            _ => false,
        }
    }
}

/// Scans the pool that was registered with this path. Read-only.
pub fn scan_pool(path: &Path) -> anyhow::Result<PoolScan> {
    match rbd::is_rbd(path) {
        true => rbd::scan_pool(path),
        false => file::scan_pool(path),
    }
}
