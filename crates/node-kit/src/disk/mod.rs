//! Disk lookup: finds the block device of a disk UUID and verifies its identity.

mod identity;
mod names;

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use host_links::DeviceRecord;
use tokio::time::Instant;
use uuid::Uuid;

use self::identity::{Comparison, Identifiers};
use self::names::DiskLink;
pub use self::names::DiskNames;
use super::blocking::blocking;
use super::mount_table::DeviceNumber;

/// Major number of loop devices, which have no serial (Linux, `Documentation/admin-guide/devices.txt`).
const LOOP_MAJOR: u32 = 7;
/// Unit of sizes in sysfs, regardless of the device's sector size.
const SYSFS_SECTOR: u64 = 512;
/// Poll interval while waiting for a disk to be resized.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// How a device proves that it is the disk of its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Identity {
    /// By the serial or the WWN that it reports, in a VM. A loop device reports none: its name is its only identity.
    Reported,
    /// By the record that the storage infra wrote beside the name, on a host: see [`host_links`].
    Recorded,
}

impl Identity {
    /// What to check if a disk is not attached.
    fn not_attached(self) -> &'static str {
        match self {
            Self::Reported => {
                "If the VirtualMachine reports the volume as attached, check the node's disks and udev"
            }
            Self::Recorded => {
                "If the VolumeAttachment reports the volume as attached, check that storage-infra runs on this host; it attaches \
                 disks again after a reboot"
            }
        }
    }

    /// Why new disks may have no attestation, with a space before it.
    pub(crate) fn no_attestation(self) -> &'static str {
        match self {
            Self::Reported => {
                " If VirtualMachine.status.volumes has no blankAttestation for any new disk, the VM Operator or the storage \
                 infra does not report attestations, which every new disk needs. With KubeVirt, new disks are attested if the \
                 management StorageClass has the annotation nestor.dev/new-volumes: blank, and only under their first attachment"
            }
            Self::Recorded => "",
        }
    }
}

/// A disk with verified identity.
#[derive(Debug)]
pub(crate) struct Disk {
    /// UUID.
    pub(crate) uuid: Uuid,
    /// Device node.
    pub(crate) path: PathBuf,
    /// Device number.
    pub(crate) number: DeviceNumber,
    /// Size in bytes.
    pub(crate) size: u64,
    /// Whether the device is read-only.
    pub(crate) read_only: bool,
    /// Open file. The kernel does not reuse the number of an open device, so no other disk can appear under the same path.
    file: File,
}

impl Disk {
    /// Returns the device, open for reading.
    pub(crate) fn file(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// Rereads the disk's size. Blocks.
    pub(crate) fn rescanned(self) -> Result<Self, FindError> {
        let io = |source| FindError::Io { what: sysfs(self.number), source };
        let size = rescan(self.number).and_then(|()| size(self.number)).map_err(io)?;
        Ok(Self { size, ..self })
    }
}

/// Failure to find or verify a disk.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FindError {
    /// The disk is not attached.
    #[error(
        "disk {uuid} is not attached to this node: none of the names {names} is in {}; {existing}. \
         {advice}", dir.display()
    )]
    NotAttached {
        /// UUID of the disk.
        uuid: Uuid,
        /// Directory of disk names.
        dir: PathBuf,
        /// Possible names.
        names: String,
        /// Existing names.
        existing: String,
        /// What to check.
        advice: &'static str,
    },
    /// The disk's names point to different devices.
    #[error(
        "the names of disk {uuid} point to different devices: {} to {} and {} to {}; nothing was changed",
        first.0.display(), first.1.display(), second.0.display(), second.1.display()
    )]
    Ambiguous {
        /// UUID of the disk.
        uuid: Uuid,
        /// A name and its device.
        first: (PathBuf, PathBuf),
        /// Another name and its device.
        second: (PathBuf, PathBuf),
    },
    /// The name does not point to a whole disk.
    #[error("{} points to {}, which is {what}; nothing was changed", link.display(), device.display())]
    NotADisk {
        /// Name.
        link: PathBuf,
        /// Device.
        device: PathBuf,
        /// Type of the device.
        what: &'static str,
    },
    /// The device is another disk.
    #[error(
        "{} points to {}, but that device identifies itself as {reported} and not as disk {uuid}; nothing was changed",
        link.display(), device.display()
    )]
    AnotherDisk {
        /// Name.
        link: PathBuf,
        /// Device.
        device: PathBuf,
        /// Identifiers of the device.
        reported: String,
        /// UUID of the requested disk.
        uuid: Uuid,
    },
    /// The name was changed during the lookup.
    #[error(
        "{} no longer points to {}: it changed during the lookup; nothing was changed, retry later",
        link.display(), device.display()
    )]
    Changed {
        /// Name.
        link: PathBuf,
        /// Previous device.
        device: PathBuf,
    },
    /// The device reports no identifiers.
    #[error(
        "{} reports neither a serial nor a wwid by which to verify that it is disk {uuid}; nothing was changed. \
         Check that /sys is mounted in the driver's container", device.display()
    )]
    Unverifiable {
        /// The device.
        device: PathBuf,
        /// UUID of the requested disk.
        uuid: Uuid,
    },
    /// A name or the device cannot be read.
    #[error("failed to read {}: {source}", what.display())]
    Io {
        /// Name or device.
        what: PathBuf,
        /// OS error.
        source: io::Error,
    },
}

impl DiskNames {
    /// Waits for the disk until `until`.
    pub(crate) async fn wait_for_disk(&self, uuid: Uuid, until: Instant) -> Result<Disk, FindError> {
        let (found, identity) = (self.wait_for(uuid, until).await?, self.identity());
        blocking(move || open(&found, uuid, identity)).await
    }

    /// Returns the disk; fails if it is not attached.
    pub(crate) async fn disk(&self, uuid: Uuid) -> Result<Disk, FindError> {
        match self.lookup(uuid).await? {
            Some(found) => {
                let identity = self.identity();
                blocking(move || open(&found, uuid, identity)).await
            }
            None => Err(self.not_attached(uuid).await),
        }
    }
}

/// Opens a device and verifies its identity: before opening, so that no other disk is opened, and after, when the kernel
/// can no longer reuse the number.
fn open(found: &DiskLink, uuid: Uuid, identity: Identity) -> Result<Disk, FindError> {
    let DiskLink { link, device } = found;
    let io = |what: &Path| {
        let what = what.to_owned();
        move |source| FindError::Io { what, source }
    };
    let named = std::fs::metadata(device).map_err(io(device))?;
    if !named.file_type().is_block_device() {
        let what = "not a block device";
        return Err(FindError::NotADisk { link: link.clone(), device: device.clone(), what });
    }
    let number = DeviceNumber::from_raw(named.rdev());
    verify(found, number, uuid, identity)?;
    let file = File::open(device).map_err(io(device))?;
    let opened = DeviceNumber::from_raw(file.metadata().map_err(io(device))?.rdev());
    if opened != number || !link.canonicalize().is_ok_and(|again| again == *device) {
        return Err(FindError::Changed { link: link.clone(), device: device.clone() });
    }
    verify(found, number, uuid, identity)?;
    let sysfs = sysfs(number);
    let size = size(number).map_err(io(&sysfs))?;
    let read_only = attribute(number, "ro").map_err(io(&sysfs))? != 0;
    Ok(Disk { uuid, path: device.clone(), number, size, read_only, file })
}

/// Verifies that the device with this number is the whole disk with this UUID.
fn verify(found: &DiskLink, number: DeviceNumber, uuid: Uuid, identity: Identity) -> Result<(), FindError> {
    let DiskLink { link, device } = found.clone();
    let sysfs = sysfs(number);
    if is_partition(number) {
        return Err(FindError::NotADisk { link, device, what: "a partition" });
    }
    if identity == Identity::Recorded {
        let is_recorded =
            is_recorded(&link, &sysfs).map_err(|source| FindError::Io { what: sysfs, source })?;
        return if is_recorded { Ok(()) } else { Err(FindError::Changed { link, device }) };
    }
    // Loop devices have no serial: the name is their only identity.
    if number.major == LOOP_MAJOR {
        return Ok(());
    }
    match Identifiers::read(&sysfs).compare(&uuid) {
        Comparison::Match => Ok(()),
        Comparison::Mismatch(reported) => Err(FindError::AnotherDisk { link, device, reported, uuid }),
        Comparison::Missing => Err(FindError::Unverifiable { device, uuid }),
    }
}

/// Whether a device is the one of the record beside a link. A device that is gone is not.
fn is_recorded(link: &Path, sysfs: &Path) -> io::Result<bool> {
    let Some(record) = DeviceRecord::read(link)? else { return Ok(false) };
    match DeviceRecord::of(sysfs) {
        Ok(present) => Ok(present == record),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// sysfs directory of a device.
pub fn sysfs(number: DeviceNumber) -> PathBuf {
    PathBuf::from(format!("/sys/dev/block/{number}"))
}

/// Size of a device in bytes.
pub(crate) fn size(number: DeviceNumber) -> io::Result<u64> {
    Ok(attribute(number, "size")? * SYSFS_SECTOR)
}

/// Makes the kernel reread the size of a SCSI disk. Other buses report a new size themselves and have no such file (Linux,
/// `Documentation/scsi/scsi_mid_low_api.rst`). Blocks.
fn rescan(number: DeviceNumber) -> io::Result<()> {
    match OpenOptions::new().write(true).open(sysfs(number).join("device/rescan")) {
        Ok(mut file) => file.write_all(b"1"),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// Waits until the disk has `required` bytes, at most until `until`, and returns its size. Polls, because a container
/// cannot rely on an event for the change.
pub(crate) async fn wait_for_size(number: DeviceNumber, required: u64, until: Instant) -> io::Result<u64> {
    loop {
        let size = blocking(move || rescan(number).and_then(|()| size(number))).await?;
        let now = Instant::now();
        if size >= required || now >= until {
            return Ok(size);
        }
        tokio::time::sleep_until(until.min(now + POLL_INTERVAL)).await;
    }
}

/// Device node of a device, by its kernel name: the path in a mount's source may point to another device by now. Blocks.
pub(crate) fn device_node(number: DeviceNumber) -> io::Result<PathBuf> {
    let about = std::fs::read_to_string(sysfs(number).join("uevent"))?;
    let name = about.lines().find_map(|line| line.strip_prefix("DEVNAME="));
    let path = name.map(|name| Path::new("/dev").join(name));
    path.filter(|path| DeviceNumber::of_block_device(path) == Some(number)).ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, format!("device {number} has no node in /dev"))
    })
}

/// Whether the device is a partition.
pub(crate) fn is_partition(number: DeviceNumber) -> bool {
    sysfs(number).join("partition").exists()
}

/// Whether the kernel set a SCSI disk offline after errors (Linux, `Documentation/ABI/testing`, `scsi_device` "state").
pub(crate) fn is_offline(number: DeviceNumber) -> bool {
    std::fs::read_to_string(sysfs(number).join("device/state"))
        .is_ok_and(|state| matches!(state.trim(), "offline" | "transport-offline"))
}

fn attribute(number: DeviceNumber, name: &str) -> io::Result<u64> {
    let text = std::fs::read_to_string(sysfs(number).join(name))?;
    text.trim()
        .parse()
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, format!("{name}: {error}")))
}

/// Kernel name of a device, such as `sdb`.
pub(crate) fn kernel_name(number: DeviceNumber) -> Option<String> {
    let dir = sysfs(number).canonicalize().ok()?;
    dir.file_name().map(|name| name.to_string_lossy().into_owned())
}

/// Whether the device exists.
pub(crate) fn is_present(number: DeviceNumber) -> bool {
    sysfs(number).exists()
}
