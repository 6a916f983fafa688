//! Where the data of a disk is: a file, or an image in a Ceph cluster.

use std::fmt;
use std::path::{Path, PathBuf};

use infra_api::{DiskCache, DiskOptions};
use uuid::Uuid;

/// Storage that a hypervisor opens as a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskSource {
    /// Raw file at an absolute path.
    File(PathBuf),
    /// RBD image.
    Rbd(RbdSource),
}

impl DiskSource {
    /// The place of the data, as a hypervisor reports it.
    pub fn location(&self) -> DiskLocation {
        match self {
            Self::File(path) => DiskLocation::File(path.clone()),
            Self::Rbd(source) => DiskLocation::Rbd(source.image.clone()),
        }
    }

    /// The cache mode with which it is opened.
    pub fn cache(&self, options: &DiskOptions) -> DiskCache {
        match self {
            Self::File(_) => DiskCache::None,
            Self::Rbd(_) => options.cache.unwrap_or(DiskCache::None),
        }
    }

    /// The file; otherwise why there is none.
    pub fn file(&self) -> Result<&Path, String> {
        match self {
            Self::File(path) => Ok(path),
            Self::Rbd(source) => Err(format!("the RBD image {} is not a file", source.image)),
        }
    }
}

/// An RBD image, and how its cluster is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RbdSource {
    /// The image.
    pub image: RbdImage,
    /// Who opens it.
    pub client: CephClient,
}

/// The name of an RBD image.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RbdImage {
    /// Ceph pool.
    pub pool: String,
    /// RADOS namespace.
    pub namespace: Option<String>,
    /// Name of the image.
    pub name: String,
}

impl RbdImage {
    /// Parses `POOL/IMAGE` or `POOL/NAMESPACE/IMAGE`.
    pub fn parse(text: &str) -> Option<Self> {
        let (pool, rest) = text.split_once('/')?;
        let (namespace, name) = match rest.split_once('/') {
            Some((namespace, name)) => (Some(namespace.to_owned()), name),
            None => (None, rest),
        };
        Some(Self { pool: pool.to_owned(), namespace, name: name.to_owned() })
    }
}

impl fmt::Display for RbdImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.namespace {
            Some(namespace) => write!(f, "{}/{namespace}/{}", self.pool, self.name),
            None => write!(f, "{}/{}", self.pool, self.name),
        }
    }
}

/// A client of a Ceph cluster. Its key is only in its keyring file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CephClient {
    /// Configuration file, which names the monitors.
    pub conf: PathBuf,
    /// cephx user, without `client.`.
    pub user: String,
    /// Keyring file.
    pub keyring: PathBuf,
    /// UUID of the secret under which hypervisors know the key.
    pub secret: Uuid,
}

/// Place of a disk's data, as a hypervisor reports it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum DiskLocation {
    /// File or block device at this path.
    File(PathBuf),
    /// RBD image of this name, in any cluster.
    Rbd(RbdImage),
    /// Something else, described for people. No volume is there.
    Other(String),
}

impl DiskLocation {
    /// The path of a file.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::File(path) => Some(path),
            Self::Rbd(_) | Self::Other(_) => None,
        }
    }
}

impl fmt::Display for DiskLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => path.display().fmt(f),
            Self::Rbd(image) => image.fmt(f),
            Self::Other(what) => f.write_str(what),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_an_image_round_trips_with_and_without_a_namespace() {
        for text in ["vms/pvc-1", "vms/guest-a/pvc-1"] {
            assert_eq!(RbdImage::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(RbdImage::parse("vms/a/pvc-1").unwrap().namespace.as_deref(), Some("a"));
        assert_eq!(RbdImage::parse("pvc-1"), None);
    }
}
