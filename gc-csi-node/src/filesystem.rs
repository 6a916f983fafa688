//! The filesystems that volumes can have, and how each is made, checked and mounted.

use std::ffi::OsStr;
use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use super::command::{self, CommandError, Output};

/// Making a filesystem writes little, but the disk beneath can be slow.
const MKFS_LIMIT: Duration = Duration::from_secs(10 * 60);
/// A check of a large filesystem that was cut off can read all of its metadata.
const FSCK_LIMIT: Duration = Duration::from_secs(30 * 60);
/// Growing lays out new groups only, but the disk beneath can be slow.
const GROW_LIMIT: Duration = Duration::from_secs(10 * 60);
/// A mount can replay a long journal.
const MOUNT_LIMIT: Duration = Duration::from_secs(10 * 60);

/// Options that change what is mounted, or the mounts around it, instead of how.
const FORBIDDEN_OPTIONS: [&str; 12] = [
    "bind",
    "rbind",
    "move",
    "remount",
    "loop",
    "offset",
    "sizelimit",
    "shared",
    "rshared",
    "slave",
    "rslave",
    "subdir",
];

/// Options that say when access times are written.
const ATIME_OPTIONS: [&str; 6] = ["atime", "noatime", "relatime", "norelatime", "strictatime", "lazyatime"];

/// A filesystem that volumes can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Filesystem {
    /// The default.
    Ext4,
    /// Grows online, but never shrinks.
    Xfs,
    /// Checksums its data.
    Btrfs,
}

/// Why a filesystem type is not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "filesystem type {0:?} is not supported: use ext4, xfs or btrfs (parameter csi.storage.k8s.io/fstype)"
)]
pub(crate) struct UnsupportedFilesystem(String);

impl FromStr for Filesystem {
    type Err = UnsupportedFilesystem;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "ext4" => Ok(Self::Ext4),
            "xfs" => Ok(Self::Xfs),
            "btrfs" => Ok(Self::Btrfs),
            other => Err(UnsupportedFilesystem(other.to_owned())),
        }
    }
}

impl fmt::Display for Filesystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Filesystem {
    /// The name that mount(8) and blkid(8) use.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
            Self::Btrfs => "btrfs",
        }
    }

    /// Makes the filesystem on a device that the caller has proven free to be overwritten; hence the
    /// force options. Nothing is discarded: the disk is known to be empty, and what marks a format
    /// under way must stay (see `content::marker`).
    pub(crate) async fn make(self, device: &Path) -> Result<(), CommandError> {
        let device = device.as_os_str();
        let (program, options): (_, &[&str]) = match self {
            // No blocks kept back for root: a volume is no system disk. Inode tables are zeroed by the
            // kernel after the mount.
            Self::Ext4 => ("mkfs.ext4", &["-q", "-F", "-m", "0", "-E", "nodiscard,lazy_itable_init=1"]),
            Self::Xfs => ("mkfs.xfs", &["-q", "-f", "-K"]),
            Self::Btrfs => ("mkfs.btrfs", &["-q", "-f", "-K"]),
        };
        let args: Vec<&OsStr> = options.iter().map(OsStr::new).chain([device]).collect();
        command::succeed(program, &args, MKFS_LIMIT).await
    }

    /// Checks an existing filesystem before a writable mount, and repairs what can be repaired without
    /// a person: ext4 replays its journal and clears its error flag here. xfs and btrfs repair
    /// themselves at the mount, and their check tools are not for this.
    pub(crate) async fn check(self, device: &Path) -> Result<(), CommandError> {
        match self {
            Self::Xfs | Self::Btrfs => Ok(()),
            Self::Ext4 => check_ext4(device, &[]).await,
        }
    }

    /// Fills the disk while mounted at `point`. All three do it without a moment in which a power cut
    /// would harm, and say that there is nothing to do when so it is. `btrfs_device` is the disk's number among
    /// a btrfs's disks.
    pub(crate) async fn grow(
        self,
        device: &Path,
        point: &Path,
        btrfs_device: Option<u64>,
    ) -> Result<(), CommandError> {
        let (device, point) = (device.as_os_str(), point.as_os_str());
        match self {
            Self::Ext4 => command::succeed("resize2fs", &[device], GROW_LIMIT).await,
            Self::Xfs => command::succeed("xfs_growfs", &["-d".as_ref(), point], GROW_LIMIT).await,
            Self::Btrfs => {
                // A disk that replaced another is not number 1.
                let size = format!("{}:max", btrfs_device.unwrap_or(1));
                let args = ["filesystem".as_ref(), "resize".as_ref(), size.as_ref(), point];
                command::succeed("btrfs", &args, GROW_LIMIT).await
            }
        }
    }

    /// Fills the disk while not mounted, which xfs and btrfs cannot. resize2fs asks for a whole check first.
    pub(crate) async fn grow_unmounted(self, device: &Path) -> Result<(), CommandError> {
        match self {
            Self::Xfs | Self::Btrfs => Ok(()),
            Self::Ext4 => {
                check_ext4(device, &["-f"]).await?;
                command::succeed("resize2fs", &[device.as_os_str()], GROW_LIMIT).await
            }
        }
    }

    /// Mounts the device.
    pub(crate) async fn mount(
        self,
        device: &Path,
        point: &Path,
        options: &MountOptions,
        read_only: bool,
    ) -> Result<(), CommandError> {
        let options = options.for_mount(self, read_only);
        let args = [
            "-t".as_ref(),
            self.name().as_ref(),
            "-o".as_ref(),
            options.as_ref(),
            "--".as_ref(),
            device.as_os_str(),
            point.as_os_str(),
        ];
        command::succeed("mount", &args, MOUNT_LIMIT).await
    }
}

async fn check_ext4(device: &Path, options: &[&str]) -> Result<(), CommandError> {
    let program = "e2fsck";
    let args: Vec<&OsStr> =
        ["-p"].iter().chain(options).map(OsStr::new).chain([device.as_os_str()]).collect();
    let Output { code, stdout, stderr } = command::run(program, &args, FSCK_LIMIT).await?;
    // e2fsck(8): 1 = repaired, 2 = repaired and a reboot is advised, which is for a mounted root; 4 and
    // above = not repaired, or not run.
    match code {
        0 => Ok(()),
        1..4 => {
            tracing::warn!(device = %device.display(), report = stdout.trim(), "repaired a filesystem");
            Ok(())
        }
        code => {
            let said = if stderr.is_empty() { stdout.trim().to_owned() } else { stderr };
            Err(CommandError::Failed { program, code, stderr: said })
        }
    }
}

/// Mount options as the StorageClass or the PV gave them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct MountOptions(Vec<String>);

/// Why a mount option is not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InvalidOption {
    /// It changes what is mounted.
    #[error(
        "mount option {0:?} is refused: it changes what is mounted, not how; remove it from mountOptions"
    )]
    Forbidden(String),
    /// It is no option.
    #[error("mount option {0:?} has a character that no option has; correct mountOptions")]
    Malformed(String),
}

impl MountOptions {
    /// Takes options apart at commas and checks each.
    pub(crate) fn new(flags: &[String]) -> Result<Self, InvalidOption> {
        let mut options = Vec::new();
        for option in flags.iter().flat_map(|flag| flag.split(',')).filter(|option| !option.is_empty()) {
            let name = option.split('=').next().unwrap_or_default();
            if option.chars().any(|c| c.is_control() || c.is_whitespace()) {
                return Err(InvalidOption::Malformed(option.to_owned()));
            }
            if FORBIDDEN_OPTIONS.contains(&name) || name.to_ascii_lowercase().starts_with("x-mount.") {
                return Err(InvalidOption::Forbidden(option.to_owned()));
            }
            options.push(option.to_owned());
        }
        Ok(Self(options))
    }

    /// Whether they ask for a read-only mount; the last word counts, as it does for mount(8).
    pub(crate) fn is_read_only(&self) -> bool {
        self.0.iter().rfind(|option| *option == "ro" || *option == "rw").is_some_and(|option| option == "ro")
    }

    /// The whole list for mount(8).
    fn for_mount(&self, filesystem: Filesystem, read_only: bool) -> String {
        let mut options: Vec<&str> = Vec::new();
        // A write for every read costs a thin disk its thinness and snapshots their sharing; who
        // needs access times asks for them.
        if !self.0.iter().any(|option| ATIME_OPTIONS.contains(&option.as_str())) {
            options.push("noatime");
        }
        // A clone has its source's UUID, and both can be on one machine.
        if filesystem == Filesystem::Xfs && !self.0.iter().any(|option| option == "nouuid") {
            options.push("nouuid");
        }
        // What mke2fs makes goes on after an error, and writes more on what is broken.
        if filesystem == Filesystem::Ext4 && !self.0.iter().any(|option| option.starts_with("errors=")) {
            options.push("errors=remount-ro");
        }
        options.extend(self.0.iter().map(String::as_str).filter(|option| *option != "ro" && *option != "rw"));
        options.push(if read_only { "ro" } else { "rw" });
        options.join(",")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(flags: &[&str]) -> Result<MountOptions, InvalidOption> {
        MountOptions::new(&flags.iter().map(|flag| (*flag).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn access_times_are_off_unless_asked_for() {
        assert_eq!(options(&[]).unwrap().for_mount(Filesystem::Btrfs, false), "noatime,rw");
        assert_eq!(
            options(&["relatime", "discard,commit=30"]).unwrap().for_mount(Filesystem::Btrfs, true),
            "relatime,discard,commit=30,ro"
        );
        assert_eq!(options(&["ro"]).unwrap().for_mount(Filesystem::Xfs, true), "noatime,nouuid,ro");
    }

    #[test]
    fn ext4_stops_at_an_error_unless_another_behaviour_is_asked_for() {
        let of = |flags: &[&str]| options(flags).unwrap().for_mount(Filesystem::Ext4, false);
        assert_eq!(of(&[]), "noatime,errors=remount-ro,rw");
        assert_eq!(of(&["errors=panic"]), "noatime,errors=panic,rw");
    }

    #[test]
    fn options_that_change_what_is_mounted_are_refused() {
        for flag in ["bind", "remount", "loop=/dev/loop3", "X-mount.mkdir", "noatime,rbind"] {
            assert!(matches!(options(&[flag]), Err(InvalidOption::Forbidden(_))), "{flag}");
        }
        assert!(matches!(options(&["a b"]), Err(InvalidOption::Malformed(_))));
    }

    #[test]
    fn the_last_word_on_read_only_counts() {
        assert!(options(&["rw", "ro"]).unwrap().is_read_only());
        assert!(!options(&["ro,rw"]).unwrap().is_read_only());
    }
}
