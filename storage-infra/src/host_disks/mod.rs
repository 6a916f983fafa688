//! Disks of this host: which of them can become pools, and how one does.

mod decide;
mod fstab;
mod init;
mod probe;

use std::path::PathBuf;

use serde::Serialize;

pub(crate) use decide::Unusable;
pub(crate) use init::{NewPool, prepare};
pub(crate) use probe::{discover, find};

/// Signatures on a disk, as libblkid knows them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum Signature {
    /// None.
    #[default]
    None,
    /// Of a filesystem, partition table, RAID, volume manager or encryption.
    Found(String),
    /// The disk cannot be read, or has several.
    Unclear(String),
}

/// What this host knows about a disk.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Facts {
    /// Size in bytes.
    pub(crate) bytes: u64,
    /// Whether writes are refused.
    pub(crate) read_only: bool,
    /// Names of its partitions.
    pub(crate) partitions: Vec<String>,
    /// Devices that are built on it: LVM, RAID, encryption.
    pub(crate) holders: Vec<String>,
    /// Where it is mounted.
    pub(crate) mounts: Vec<String>,
    /// Whether it is swap space.
    pub(crate) is_swap: bool,
    /// Loop devices whose backing file it is.
    pub(crate) loops: Vec<String>,
    /// The backing file, if the disk is a loop device of a file in a pool.
    pub(crate) volume: Option<String>,
    /// What is on it.
    pub(crate) signature: Signature,
    /// Whether the kernel or another program has it open exclusively.
    pub(crate) is_busy: bool,
    /// Whether its first or last MiB has other bytes than zeros.
    pub(crate) has_data: bool,
}

/// A disk of this host.
#[derive(Debug, Clone)]
pub(crate) struct Disk {
    /// Its device.
    pub(crate) device: PathBuf,
    /// ID of this disk on this device, until it is removed or the host restarts.
    pub(crate) id: String,
    /// Model, if it has one.
    pub(crate) model: Option<String>,
    /// Serial number or WWID, if it has one.
    pub(crate) serial: Option<String>,
    pub(crate) facts: Facts,
}

/// A disk as it is printed.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Candidate {
    pub(crate) device: String,
    pub(crate) bytes: u64,
    pub(crate) model: Option<String>,
    pub(crate) serial: Option<String>,
    pub(crate) id: String,
    pub(crate) usable: bool,
    /// Why it cannot become a pool.
    pub(crate) reasons: Vec<String>,
}

impl Disk {
    /// Why it cannot become a pool; empty if it can.
    pub(crate) fn unusable(&self) -> Vec<Unusable> {
        decide::unusable(&self.facts)
    }

    /// The disk as it is printed.
    pub(crate) fn candidate(&self) -> Candidate {
        let reasons: Vec<String> = self.unusable().iter().map(ToString::to_string).collect();
        Candidate {
            device: self.device.display().to_string(),
            bytes: self.facts.bytes,
            model: self.model.clone(),
            serial: self.serial.clone(),
            id: self.id.clone(),
            usable: reasons.is_empty(),
            reasons,
        }
    }
}
