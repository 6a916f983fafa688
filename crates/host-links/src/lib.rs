//! The directory through which the storage infra (hypervisor kind `host`) shows the node plugin of the same host its disks:
//!
//! | path | content |
//! | --- | --- |
//! | `node` | UUID of the host as a node of the storage infra |
//! | `<UUID>/wwn-0x…` | symbolic link to the loop device of a disk, named as in `/dev/disk/by-id` |
//! | `<UUID>/.device-wwn-0x…` | which device that is: see [`DeviceRecord`] |
//!
//! The node plugin tells Kubernetes who it is with a [`HostId`].
//!
//! A loop device has no serial, and its number stands for another file after it is detached, or after a reboot. So a link
//! counts only together with its record.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use uuid::Uuid;

/// ID of the running kernel's boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// File with the UUID of the host.
const NODE: &str = "node";
/// Prefix of the names of records.
const RECORD_PREFIX: &str = ".device-";

/// Maximum length of a node ID in Kubernetes (CSINode, `nodeID`).
const MAX_ID: usize = 192;

/// Node ID of a host: its UUID, by which the storage infra knows it, and the name of its Node, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostId {
    /// UUID of the node in the storage infra.
    pub node: Uuid,
    /// Name of the Node, or its beginning.
    pub name: String,
}

impl HostId {
    /// The ID of a host; a name that is too long is cut.
    pub fn new(node: Uuid, name: &str) -> Self {
        let left = MAX_ID - node.to_string().len() - 1;
        Self { node, name: name.chars().filter(char::is_ascii).take(left).collect() }
    }

    /// Parses `UUID/NAME`.
    pub fn parse(text: &str) -> Option<Self> {
        let (node, name) = text.split_once('/')?;
        let node = Uuid::try_parse(node).ok().filter(|node| !node.is_nil())?;
        (!name.is_empty() && text.len() <= MAX_ID).then(|| Self { node, name: name.to_owned() })
    }
}

impl fmt::Display for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.node, self.name)
    }
}

/// The directory of one host.
#[derive(Debug, Clone)]
pub struct HostLinks {
    root: PathBuf,
}

impl HostLinks {
    /// The directory at this path.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// UUID of the host as a node; `None` if the storage infra has not been started with this directory.
    pub fn node(&self) -> io::Result<Option<Uuid>> {
        match fs::read_to_string(self.root.join(NODE)) {
            Ok(text) => text.trim().parse().map(Some).map_err(|_| self.invalid(&text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// UUID of the host as a node, which the first call chooses.
    pub fn create_node(&self) -> io::Result<Uuid> {
        if let Some(uuid) = self.node()? {
            return Ok(uuid);
        }
        fs::create_dir_all(&self.root)?;
        let uuid = Uuid::new_v4();
        write(&self.root.join(NODE), &uuid.to_string())?;
        Ok(uuid)
    }

    /// Directory of the links to the disks of a node.
    pub fn disks_of(&self, node: Uuid) -> PathBuf {
        self.root.join(node.to_string())
    }

    fn invalid(&self, text: &str) -> io::Error {
        let problem = format!("{} contains {text:?}, which is not a UUID", self.root.join(NODE).display());
        io::Error::new(io::ErrorKind::InvalidData, problem)
    }
}

/// Which device a link points to: the kernel counts what each device has become since the boot (`diskseq`, Linux 5.15,
/// `Documentation/ABI/stable/sysfs-block`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceRecord {
    boot: String,
    sequence: u64,
}

impl DeviceRecord {
    /// What the device with this sysfs directory is now. Not found if there is no such device.
    pub fn of(sysfs: &Path) -> io::Result<Self> {
        let sequence = fs::read_to_string(sysfs.join("diskseq")).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound if sysfs.exists() => io::Error::new(
                io::ErrorKind::Unsupported,
                "the kernel does not count devices: Linux 5.15 or newer is needed",
            ),
            _ => error,
        })?;
        let sequence = sequence.trim().parse().map_err(io::Error::other)?;
        Ok(Self { boot: fs::read_to_string(BOOT_ID)?.trim().to_owned(), sequence })
    }

    /// The record beside a link; `None` if there is none, or not a complete one.
    pub fn read(link: &Path) -> io::Result<Option<Self>> {
        match fs::read_to_string(record(link)) {
            Ok(text) => Ok(text.parse().ok()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes the record beside a link that is made afterwards.
    pub fn write(&self, link: &Path) -> io::Result<()> {
        write(&record(link), &self.to_string())
    }

    /// Removes the record of a link that was removed. Succeeds if there is none.
    pub fn remove(link: &Path) -> io::Result<()> {
        match fs::remove_file(record(link)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for DeviceRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.boot, self.sequence)
    }
}

/// The text is not a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InvalidRecord;

impl FromStr for DeviceRecord {
    type Err = InvalidRecord;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (boot, sequence) =
            text.strip_suffix('\n').and_then(|line| line.split_once(' ')).ok_or(InvalidRecord)?;
        let sequence = sequence.parse().map_err(|_| InvalidRecord)?;
        Ok(Self { boot: boot.to_owned(), sequence })
    }
}

fn record(link: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(RECORD_PREFIX);
    name.push(link.file_name().unwrap_or_default());
    link.with_file_name(name)
}

/// Replaces a file: after a crash it has the old or the new content.
fn write(path: &Path, line: &str) -> io::Result<()> {
    let mut fresh = path.as_os_str().as_bytes().to_vec();
    fresh.extend(b".unfinished");
    let fresh = PathBuf::from(std::ffi::OsStr::from_bytes(&fresh));
    let mut file = File::create(&fresh)?;
    writeln!(file, "{line}")?;
    file.sync_all()?;
    fs::rename(&fresh, path)?;
    File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_keeps_the_uuid_that_it_got_first() {
        let dir = tempfile::tempdir().unwrap();
        let links = HostLinks::at(dir.path().join("made/later"));
        assert_eq!(links.node().unwrap(), None);
        let uuid = links.create_node().unwrap();
        assert_eq!(links.create_node().unwrap(), uuid);
        assert_eq!(links.node().unwrap(), Some(uuid));
        fs::write(dir.path().join("made/later/node"), "half").unwrap();
        assert!(links.node().is_err() && links.create_node().is_err(), "another UUID would be another node");
    }

    #[test]
    fn a_record_names_one_device_of_one_boot() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("wwn-0x1");
        assert_eq!(DeviceRecord::read(&link).unwrap(), None);
        let sysfs = dir.path().join("loop0");
        fs::create_dir(&sysfs).unwrap();
        fs::write(sysfs.join("diskseq"), "42\n").unwrap();
        let first = DeviceRecord::of(&sysfs).unwrap();
        first.write(&link).unwrap();
        assert_eq!(DeviceRecord::read(&link).unwrap(), Some(first.clone()));
        fs::write(sysfs.join("diskseq"), "43\n").unwrap();
        assert_ne!(DeviceRecord::of(&sysfs).unwrap(), first);
        let earlier = DeviceRecord { boot: "another".to_owned(), ..first.clone() };
        assert_ne!(earlier, first);
        DeviceRecord::remove(&link).unwrap();
        DeviceRecord::remove(&link).unwrap();
        assert_eq!(DeviceRecord::read(&link).unwrap(), None);
    }

    #[test]
    fn a_node_id_names_the_host_and_fits_into_a_csinode() {
        let node = Uuid::from_u128(7);
        for name in ["worker-1", &"a".repeat(253)] {
            let id = HostId::new(node, name);
            assert!(id.to_string().len() <= MAX_ID && name.starts_with(&id.name));
            assert_eq!(HostId::parse(&id.to_string()), Some(id));
        }
        let nil = Uuid::nil();
        for bad in
            ["", "worker-1", &node.to_string(), &format!("{node}/"), &format!("{nil}/a"), &"a".repeat(300)]
        {
            assert_eq!(HostId::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn an_incomplete_record_is_none() {
        for text in ["", "boot", "boot 4", "boot x\n", "boot -1\n"] {
            assert_eq!(text.parse::<DeviceRecord>(), Err(InvalidRecord), "{text:?}");
        }
        let record: DeviceRecord = "boot 4\n".parse().unwrap();
        assert_eq!(record.to_string(), "boot 4");
    }
}
