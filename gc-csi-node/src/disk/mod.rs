//! Finds the block device of a disk, and proves that it is that disk.

mod identity;
mod names;

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::Instant;
use uuid::Uuid;

use self::identity::{Facts, Verdict};
pub(crate) use self::names::DiskNames;
use self::names::Found;
use super::blocking::blocking;
use super::mounts::DeviceNumber;

/// Major number of loop devices, which have no serial (Linux, `Documentation/admin-guide/devices.txt`).
const LOOP_MAJOR: u32 = 7;
/// sysfs counts sizes in these, whatever the device's own sectors are.
const SYSFS_SECTOR: u64 = 512;
/// How often a disk that is to grow is looked at.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

/// A disk, proven to be the one that was asked for.
#[derive(Debug)]
pub(crate) struct Disk {
    /// Its UUID.
    pub(crate) uuid: Uuid,
    /// The device's node.
    pub(crate) path: PathBuf,
    /// The device's number.
    pub(crate) number: DeviceNumber,
    /// Size in bytes.
    pub(crate) size: u64,
    /// Whether the device refuses writes.
    pub(crate) read_only: bool,
    /// Open for as long as the disk is dealt with: an open device keeps its number, so that no other
    /// disk can take its place under the same path meanwhile.
    file: File,
}

impl Disk {
    /// The open device, for reading.
    pub(crate) fn file(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// The disk with the size that it has by now. Blocks.
    pub(crate) fn rescanned(self) -> Result<Self, FindError> {
        let io = |source| FindError::Io { what: sysfs(self.number), source };
        let size = rescan(self.number).and_then(|()| size(self.number)).map_err(io)?;
        Ok(Self { size, ..self })
    }
}

/// Why a disk was not found, or is not trusted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FindError {
    /// It is not there.
    #[error(
        "disk {uuid} is not in this machine: none of the names {names} is in {}; {there}. \
         If the volume is shown as attached, look at the machine's disks and at udev", folder.display()
    )]
    Absent {
        /// The disk.
        uuid: Uuid,
        /// Where it was looked for.
        folder: PathBuf,
        /// Under which names.
        names: String,
        /// What is there.
        there: String,
    },
    /// Several devices have its names.
    #[error(
        "disk {uuid} is not certain: {} is {} but {} is {}; nothing was touched",
        first.0.display(), first.1.display(), second.0.display(), second.1.display()
    )]
    Ambiguous {
        /// The disk.
        uuid: Uuid,
        /// One name and its device.
        first: (PathBuf, PathBuf),
        /// Another.
        second: (PathBuf, PathBuf),
    },
    /// The name points at something that is no whole disk.
    #[error("{} points at {}, which is {what}; nothing was touched", link.display(), device.display())]
    NotADisk {
        /// The name.
        link: PathBuf,
        /// Where it points.
        device: PathBuf,
        /// What is there.
        what: &'static str,
    },
    /// The device is another disk.
    #[error(
        "{} points at {}, but that device says it is {said}, not disk {uuid}; nothing was touched",
        link.display(), device.display()
    )]
    AnotherDisk {
        /// The name.
        link: PathBuf,
        /// Where it points.
        device: PathBuf,
        /// What the device says.
        said: String,
        /// The disk that was meant.
        uuid: Uuid,
    },
    /// The name points elsewhere than a moment ago.
    #[error(
        "{} pointed at {} and now does not; nothing was touched, and a retry will look again",
        link.display(), device.display()
    )]
    Moved {
        /// The name.
        link: PathBuf,
        /// Where it pointed.
        device: PathBuf,
    },
    /// The device has no identity.
    #[error(
        "{} has neither serial nor wwid to prove that it is disk {uuid}; nothing was touched. \
         Is /sys mounted in the driver's container?", device.display()
    )]
    Unproven {
        /// The device.
        device: PathBuf,
        /// The disk that was meant.
        uuid: Uuid,
    },
    /// A name or the device cannot be read.
    #[error("cannot read {}: {source}", what.display())]
    Io {
        /// The name or device.
        what: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

impl DiskNames {
    /// The disk, which is waited for until `until`.
    pub(crate) async fn wait_for_disk(&self, uuid: Uuid, until: Instant) -> Result<Disk, FindError> {
        let found = self.wait_for(uuid, until).await?;
        blocking(move || open(&found, uuid)).await
    }

    /// The disk, which must be there.
    pub(crate) async fn disk(&self, uuid: Uuid) -> Result<Disk, FindError> {
        match self.look(uuid).await? {
            Some(found) => blocking(move || open(&found, uuid)).await,
            None => Err(self.absent(uuid).await),
        }
    }
}

/// Opens a device and proves its identity: before the device is opened, so that another's is not, and
/// once more when its number cannot pass to another disk any more.
fn open(found: &Found, uuid: Uuid) -> Result<Disk, FindError> {
    let Found { link, device } = found;
    let io = |what: &Path| {
        let what = what.to_owned();
        move |source| FindError::Io { what, source }
    };
    let named = std::fs::metadata(device).map_err(io(device))?;
    if !named.file_type().is_block_device() {
        let what = "no block device";
        return Err(FindError::NotADisk { link: link.clone(), device: device.clone(), what });
    }
    let number = DeviceNumber::from_raw(named.rdev());
    prove(found, number, uuid)?;
    let file = File::open(device).map_err(io(device))?;
    let opened = DeviceNumber::from_raw(file.metadata().map_err(io(device))?.rdev());
    if opened != number || !link.canonicalize().is_ok_and(|again| again == *device) {
        return Err(FindError::Moved { link: link.clone(), device: device.clone() });
    }
    prove(found, number, uuid)?;
    let sysfs = sysfs(number);
    let size = size(number).map_err(io(&sysfs))?;
    let read_only = attribute(number, "ro").map_err(io(&sysfs))? != 0;
    Ok(Disk { uuid, path: device.clone(), number, size, read_only, file })
}

/// Proves that the device with this number is the whole disk that it is taken for.
fn prove(found: &Found, number: DeviceNumber, uuid: Uuid) -> Result<(), FindError> {
    let Found { link, device } = found.clone();
    let sysfs = sysfs(number);
    if is_partition(number) {
        return Err(FindError::NotADisk { link, device, what: "a partition" });
    }
    // A loop device has no serial: its exact name is all the identity there is.
    if number.major == LOOP_MAJOR {
        return Ok(());
    }
    match Facts::read(&sysfs).judge(&uuid) {
        Verdict::Proven => Ok(()),
        Verdict::Another(said) => Err(FindError::AnotherDisk { link, device, said, uuid }),
        Verdict::Unknown => Err(FindError::Unproven { device, uuid }),
    }
}

/// The device's folder in sysfs.
pub(crate) fn sysfs(number: DeviceNumber) -> PathBuf {
    PathBuf::from(format!("/sys/dev/block/{number}"))
}

/// The device's size in bytes.
pub(crate) fn size(number: DeviceNumber) -> io::Result<u64> {
    Ok(attribute(number, "size")? * SYSFS_SECTOR)
}

/// Has the kernel ask a SCSI disk for its size anew; the disks of other buses tell a new size by
/// themselves, and have no such file (Linux, `Documentation/scsi/scsi_mid_low_api.rst`). Blocks.
fn rescan(number: DeviceNumber) -> io::Result<()> {
    match OpenOptions::new().write(true).open(sysfs(number).join("device/rescan")) {
        Ok(mut file) => file.write_all(b"1"),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// The disk's size, once that is `required` bytes, or as it is at `until`. Looked at again and again,
/// since nothing that a container can be sure of tells of the change.
pub(crate) async fn wait_for_size(number: DeviceNumber, required: u64, until: Instant) -> io::Result<u64> {
    loop {
        let size = blocking(move || rescan(number).and_then(|()| size(number))).await?;
        let now = Instant::now();
        if size >= required || now >= until {
            return Ok(size);
        }
        tokio::time::sleep_until(until.min(now + LOOK_AGAIN)).await;
    }
}

/// The node of a device, by the name that the kernel gave it: what a mount calls its source may lead
/// elsewhere by now. Blocks.
pub(crate) fn node(number: DeviceNumber) -> io::Result<PathBuf> {
    let about = std::fs::read_to_string(sysfs(number).join("uevent"))?;
    let name = about.lines().find_map(|line| line.strip_prefix("DEVNAME="));
    let path = name.map(|name| Path::new("/dev").join(name));
    path.filter(|path| DeviceNumber::of_block_device(path) == Some(number)).ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, format!("device {number} has no node in /dev"))
    })
}

/// Whether the device is a part of a disk, and not a whole one.
pub(crate) fn is_partition(number: DeviceNumber) -> bool {
    sysfs(number).join("partition").exists()
}

/// What the kernel says of a SCSI disk that it has given up (Linux, `Documentation/ABI/testing`,
/// `scsi_device` "state").
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

/// What the kernel calls a disk of the machine, as in `sdb`.
pub(crate) fn kernel_name(number: DeviceNumber) -> Option<String> {
    let folder = sysfs(number).canonicalize().ok()?;
    folder.file_name().map(|name| name.to_string_lossy().into_owned())
}

/// Whether the disk is still in the machine.
pub(crate) fn is_present(number: DeviceNumber) -> bool {
    sysfs(number).exists()
}
