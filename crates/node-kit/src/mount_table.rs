//! Mount table of the driver's mount namespace, from `/proc/self/mountinfo` (proc_pid_mountinfo(5)).

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

const MOUNTINFO: &str = "/proc/self/mountinfo";

/// Device number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceNumber {
    /// Major number: the driver.
    pub major: u32,
    /// Minor number: the device.
    pub minor: u32,
}

impl DeviceNumber {
    /// Converts a raw `dev_t`.
    pub fn from_raw(raw: u64) -> Self {
        Self { major: rustix::fs::major(raw), minor: rustix::fs::minor(raw) }
    }

    /// Returns the number of the block device at `path`, or None if it is not one.
    pub fn of_block_device(path: &Path) -> Option<Self> {
        let found = std::fs::metadata(path).ok()?;
        found.file_type().is_block_device().then(|| Self::from_raw(found.rdev()))
    }
}

impl fmt::Display for DeviceNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)
    }
}

/// A mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Device number of the filesystem; anonymous (major 0) for btrfs and filesystems without a device.
    pub device: DeviceNumber,
    /// Directory or file within the filesystem that is mounted.
    pub root: PathBuf,
    /// Mount point.
    pub point: PathBuf,
    /// Options of this mount.
    pub options: Vec<String>,
    /// Filesystem type.
    pub fs_type: String,
    /// Mount source: the device's path if the filesystem has one.
    pub source: PathBuf,
    /// Superblock options, common to all mounts of the filesystem.
    pub super_options: Vec<String>,
}

impl Mount {
    /// Whether the mount is read-only.
    pub fn is_read_only(&self) -> bool {
        self.options.iter().any(|option| option == "ro")
    }

    /// Whether the mounted file was deleted. The kernel shows the bind-mounted node of a removed device so; its device number
    /// may belong to another device.
    pub fn is_deleted(&self) -> bool {
        self.root.as_os_str().as_bytes().ends_with(b"//deleted")
    }

    /// Number of the block device. btrfs has an anonymous number, so it is taken from the mount source.
    pub fn block_device(&self) -> Option<DeviceNumber> {
        match self.device.major {
            0 => DeviceNumber::of_block_device(&self.source),
            _ => Some(self.device),
        }
    }

    /// Whether both mounts show the same directory of the same filesystem.
    pub fn has_same_root_as(&self, other: &Self) -> bool {
        self.device == other.device && self.root == other.root && self.fs_type == other.fs_type
    }
}

/// Failure to read the mount table.
#[derive(Debug, thiserror::Error)]
pub enum MountTableError {
    /// The file cannot be read.
    #[error("failed to read {MOUNTINFO}: {0}")]
    Read(#[from] io::Error),
    /// A line cannot be parsed.
    #[error("failed to parse line {0} of {MOUNTINFO}: {1:?}")]
    Malformed(usize, String),
}

/// All mounts, in mount order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MountTable(Vec<Mount>);

impl MountTable {
    /// Reads the kernel's mount table. Blocks.
    pub fn read() -> Result<Self, MountTableError> {
        Self::parse(&std::fs::read(MOUNTINFO)?)
    }

    /// Parses the format of mountinfo.
    pub fn parse(text: &[u8]) -> Result<Self, MountTableError> {
        let lines = text.split(|byte| *byte == b'\n').enumerate().filter(|(_, line)| !line.is_empty());
        let mount = |(at, line): (usize, &[u8])| {
            parse_line(line)
                .ok_or_else(|| MountTableError::Malformed(at + 1, String::from_utf8_lossy(line).into_owned()))
        };
        lines.map(mount).collect::<Result<_, _>>().map(Self)
    }

    /// Returns the topmost mount at `path`.
    pub fn at(&self, path: &Path) -> Option<&Mount> {
        self.0.iter().rev().find(|mount| mount.point == path)
    }

    /// All mounts.
    pub fn iter(&self) -> impl Iterator<Item = &Mount> {
        self.0.iter()
    }

    /// Whether the kernel made the filesystem of `mount` read-only after an error: the superblock is read-only although a
    /// mount is not, or ext4 reports it as an option (newer kernels).
    pub fn became_read_only(&self, mount: &Mount) -> bool {
        let has_option = |option: &str| mount.super_options.iter().any(|found| found == option);
        let is_same = |other: &&Mount| other.device == mount.device && other.fs_type == mount.fs_type;
        let writable = || self.0.iter().filter(is_same).any(|other| !other.is_read_only());
        has_option("emergency_ro") || has_option("shutdown") || (has_option("ro") && writable())
    }

    /// Returns the other mounts of the same filesystem, below `dir`.
    pub fn other_mounts_of<'a>(&'a self, mount: &'a Mount, dir: &'a Path) -> impl Iterator<Item = &'a Mount> {
        self.0.iter().filter(move |other| {
            other.device == mount.device
                && other.fs_type == mount.fs_type
                && other.point != mount.point
                && other.point.starts_with(dir)
        })
    }
}

/// Fields: id, parent, device, root, mount point, options, optional fields, "-", type, source, superblock options.
fn parse_line(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|byte| *byte == b' ');
    let (_id, _parent) = (fields.next()?, fields.next()?);
    let (major, minor) = std::str::from_utf8(fields.next()?).ok()?.split_once(':')?;
    let device = DeviceNumber { major: major.parse().ok()?, minor: minor.parse().ok()? };
    let (root, point) = (unescape(fields.next()?), unescape(fields.next()?));
    let options = list(fields.next()?);
    fields.find(|field| *field == b"-")?;
    let fs_type = String::from_utf8_lossy(fields.next()?).into_owned();
    let source = unescape(fields.next()?);
    let super_options = list(fields.next()?);
    Some(Mount { device, root, point, options, fs_type, source, super_options })
}

fn list(field: &[u8]) -> Vec<String> {
    String::from_utf8_lossy(field).split(',').map(str::to_owned).collect()
}

/// Decodes octal escapes: the kernel escapes space, tab, newline, backslash and '#'.
fn unescape(field: &[u8]) -> PathBuf {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, after)) = rest.split_first() {
        match after {
            [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', tail @ ..] if byte == b'\\' => {
                plain.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                rest = tail;
            }
            _ => {
                plain.push(byte);
                rest = after;
            }
        }
    }
    OsString::from_vec(plain).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[u8] = b"22 1 254:1 / / rw,relatime shared:1 master:2 - ext4 /dev/vda1 rw\n\
        30 22 8:16 / /a\\040b\\134c rw,noatime - ext4 /dev/sdb ro,errors=remount-ro\n\
        31 22 8:16 / /pods/one rw,noatime shared:7 - ext4 /dev/sdb rw\n\
        32 22 0:45 /sub /pods/two ro,nosuid - btrfs /dev/sdc rw,ssd\n\
        33 22 8:32 / /pods/two rw - xfs /dev/sdd rw\n";

    #[test]
    fn escaped_paths_and_optional_fields_are_parsed() {
        let table = MountTable::parse(TABLE).unwrap();
        let odd = table.at(Path::new("/a b\\c")).unwrap();
        assert_eq!(odd.device, DeviceNumber { major: 8, minor: 16 });
        assert!(table.became_read_only(odd) && !odd.is_read_only());
        assert_eq!(table.at(Path::new("/")).unwrap().fs_type, "ext4");
    }

    #[test]
    fn at_returns_the_topmost_mount() {
        let table = MountTable::parse(TABLE).unwrap();
        assert_eq!(table.at(Path::new("/pods/two")).unwrap().fs_type, "xfs");
        assert!(table.at(Path::new("/pods")).is_none());
    }

    #[test]
    fn other_mounts_of_a_filesystem_are_found_below_a_directory() {
        let table = MountTable::parse(TABLE).unwrap();
        let mount = table.at(Path::new("/a b\\c")).unwrap();
        let others: Vec<_> =
            table.other_mounts_of(mount, Path::new("/pods")).map(|m| m.point.clone()).collect();
        assert_eq!(others, [PathBuf::from("/pods/one")]);
        assert_eq!(table.other_mounts_of(mount, Path::new("/elsewhere")).count(), 0);
    }

    #[test]
    fn a_filesystem_made_read_only_by_an_error_differs_from_one_mounted_read_only() {
        let table = MountTable::parse(
            b"30 22 8:16 / /staging rw - xfs /dev/sdb ro\n\
            31 22 8:16 / /pods/reader ro - xfs /dev/sdb ro\n\
            32 22 8:32 / /pods/asked ro - xfs /dev/sdc ro\n\
            33 22 8:48 / /pods/ext ro - ext4 /dev/sdd rw,emergency_ro\n\
            34 22 8:64 / /pods/well rw - ext4 /dev/sde rw,errors=remount-ro\n",
        )
        .unwrap();
        let became_read_only = |path| table.became_read_only(table.at(Path::new(path)).unwrap());
        assert!(
            became_read_only("/staging") && became_read_only("/pods/reader") && became_read_only("/pods/ext")
        );
        assert!(!became_read_only("/pods/asked") && !became_read_only("/pods/well"));
    }

    #[test]
    fn the_error_contains_the_line_that_cannot_be_parsed() {
        let error = MountTable::parse(b"22 1 254:1 / / rw - ext4 /dev/vda1 rw\n1 2 3\n").unwrap_err();
        assert_eq!(error.to_string(), "failed to parse line 2 of /proc/self/mountinfo: \"1 2 3\"");
    }

    #[test]
    fn the_kernels_mount_table_is_parsed() {
        assert!(MountTable::read().unwrap().at(Path::new("/")).is_some());
    }
}
