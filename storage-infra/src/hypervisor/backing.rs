//! The backing file of a loop device, and how a device is set up on it.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{major, minor};

use super::losetup::{Device, losetup};
use super::{Disk, HypervisorError, Result};

/// The backing file of a disk, compared by inode because a path can be written in several ways.
pub(super) struct Backing {
    pub(super) path: PathBuf,
    /// Inode number and filesystem; `None` if there is no file at the path.
    identity: Option<(u64, String)>,
}

impl Backing {
    pub(super) fn of(disk: &Disk) -> Result<Self> {
        let path = disk.source.file().map_err(|why| {
            HypervisorError::Unsupported(format!(
                "only files are attached as loop devices of a host, and {why}"
            ))
        })?;
        let identity = match fs::metadata(path) {
            Ok(meta) => Some((meta.ino(), format!("{}:{}", major(meta.dev()), minor(meta.dev())))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => {
                let what = format!("cannot read the metadata of {}: {error}", path.display());
                return Err(HypervisorError::Uncertain(what));
            }
        };
        Ok(Self { path: path.to_owned(), identity })
    }

    pub(super) fn exists(&self) -> bool {
        self.identity.is_some()
    }

    /// Whether the file backs a device. A file that is missing, or is being released, is recognized by its path.
    pub(super) fn backs(&self, device: &Device) -> bool {
        match (&self.identity, &device.identity) {
            // Some versions of losetup pad the numbers with spaces.
            (Some((inode, filesystem)), Some((backing, on))) => inode == backing && filesystem == on.trim(),
            _ => device.file.as_ref().is_some_and(|file| {
                let file = file.to_string_lossy();
                Path::new(file.trim_end_matches(" (deleted)")) == self.path
            }),
        }
    }
}

/// Sets up a free device on the file of a disk.
pub(super) async fn set_up(device: &Path, disk: &Disk, path: &Path) -> Result<()> {
    let attempt = |direct: bool| {
        let mut arguments: Vec<&OsStr> = Vec::new();
        if direct {
            arguments.push("--direct-io=on".as_ref());
        }
        if disk.read_only {
            arguments.push("--read-only".as_ref());
        }
        arguments.extend([device.as_os_str(), path.as_os_str()]);
        async move { losetup(Some("set_up"), &arguments).await }
    };
    // Without direct I/O every page would be cached twice; some filesystems do not support it.
    match attempt(true).await {
        Ok(_) => Ok(()),
        Err(_) => attempt(false).await.map(drop),
    }
}
