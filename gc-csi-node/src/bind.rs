//! Bind mounts, and taking mounts away. Everything here blocks.

use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

use rustix::mount::{MountFlags, UnmountFlags};

use super::mounts::{Mount, MountTable, MountsError};

/// More mounts than this on one path are no accident of ours.
const MAX_LAYERS: usize = 16;

/// Mode of a target beneath its mount: nobody may do anything.
const SHUT: u32 = 0o000;

/// What a target is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TargetKind {
    /// For a filesystem.
    Folder,
    /// For a block device.
    File,
}

/// Why a target could not be made, mounted or taken away.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BindError {
    /// The target is something that this driver did not make.
    #[error("{} is {what}; it was not touched. Move it away", path.display())]
    Occupied {
        /// The target.
        path: PathBuf,
        /// What is there.
        what: &'static str,
    },
    /// The target still has data after the unmount.
    #[error(
        "{} is not empty though nothing is mounted there; it was not removed. \
         Look at what was written there, and move it away", path.display()
    )]
    NotEmpty {
        /// The target.
        path: PathBuf,
    },
    /// Something uses the mount.
    #[error("{} cannot be unmounted because it is in use{by}; stop what uses it", path.display())]
    Busy {
        /// The mount point.
        path: PathBuf,
        /// By whom, with a word before it, or nothing where that cannot be seen.
        by: String,
    },
    /// Mounts keep coming.
    #[error("{} is still mounted after {MAX_LAYERS} unmounts", path.display())]
    TooMany {
        /// The mount point.
        path: PathBuf,
    },
    /// The system refused.
    #[error("cannot {what} {}: {source}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// On which path.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The mounts are unknown.
    #[error(transparent)]
    Mounts(#[from] MountsError),
}

fn failed<E: Into<io::Error>>(what: &'static str, path: &Path) -> impl FnOnce(E) -> BindError {
    move |error| BindError::Io { what, path: path.to_owned(), source: error.into() }
}

/// Changes something on the machine, with a point before and after it at which a test can let the driver die.
pub(crate) fn change<T>(what: &str, call: impl FnOnce() -> T) -> T {
    fail_point::around(|| Some(format!("node.{what}")), call)
}

/// The path as the kernel shows it in its list of mounts: symlinks of its folders followed, its last
/// part left as it is. None when its folder does not exist.
pub(crate) fn real_path(path: &Path) -> Result<Option<PathBuf>, BindError> {
    let (Some(folder), Some(Component::Normal(name))) = (path.parent(), path.components().next_back()) else {
        return Err(BindError::Occupied { path: path.to_owned(), what: "no place for a mount" });
    };
    match folder.canonicalize() {
        Ok(folder) => Ok(Some(folder.join(name))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed("resolve", folder)(error)),
    }
}

/// Makes the target, or takes the empty one that is there, and shuts it with mode 0000: should the
/// mount ever be missing, nobody writes to the machine's own disk instead of the volume.
pub(crate) fn make_target(path: &Path, kind: TargetKind) -> Result<(), BindError> {
    let made = change("make-target", || match kind {
        TargetKind::Folder => std::fs::DirBuilder::new().mode(SHUT).create(path),
        TargetKind::File => {
            std::fs::OpenOptions::new().write(true).create_new(true).mode(SHUT).open(path).map(drop)
        }
    });
    match made {
        Ok(()) => return Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(failed("create", path)(error)),
    }
    let occupied = |what| Err(BindError::Occupied { path: path.to_owned(), what });
    let found = std::fs::symlink_metadata(path).map_err(failed("look at", path))?;
    match kind {
        TargetKind::Folder if !found.is_dir() => return occupied("no folder"),
        TargetKind::Folder if !is_empty(path)? => return occupied("a folder that is not empty"),
        TargetKind::File if !found.is_file() => return occupied("no plain file"),
        TargetKind::File if found.len() > 0 => return occupied("a file that is not empty"),
        TargetKind::Folder | TargetKind::File => {}
    }
    let shut = || std::fs::set_permissions(path, std::fs::Permissions::from_mode(SHUT));
    change("shut-target", shut).map_err(failed("shut", path))
}

/// Makes a folder for a filesystem to be mounted on, in a folder that exists.
pub(crate) fn make_staging(path: &Path) -> Result<(), BindError> {
    match change("make-staging", || std::fs::DirBuilder::new().mode(0o750).create(path)) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let found = std::fs::symlink_metadata(path).map_err(failed("look at", path))?;
            let what = if found.is_symlink() { "a symlink" } else { "no folder" };
            if found.is_dir() { Ok(()) } else { Err(BindError::Occupied { path: path.to_owned(), what }) }
        }
        Err(error) => Err(failed("create", path)(error)),
    }
}

/// Shows `source` at `target`, too.
pub(crate) fn bind(source: &Path, target: &Path) -> Result<(), BindError> {
    change("bind-mount", || rustix::mount::mount_bind(source, target))
        .map_err(failed("bind-mount to", target))
}

/// Makes one mount read-only, and leaves its other options as they are.
pub(crate) fn make_read_only(mount: &Mount) -> Result<(), BindError> {
    // A remount sets all options of a mount: what is not given is taken away.
    let kept = mount.options.iter().map(|option| match option.as_str() {
        "nosuid" => MountFlags::NOSUID,
        "nodev" => MountFlags::NODEV,
        "noexec" => MountFlags::NOEXEC,
        "noatime" => MountFlags::NOATIME,
        "nodiratime" => MountFlags::NODIRATIME,
        "relatime" => MountFlags::RELATIME,
        "nosymfollow" => MountFlags::NOSYMFOLLOW,
        _ => MountFlags::empty(),
    });
    let flags = kept.fold(MountFlags::BIND | MountFlags::RDONLY, MountFlags::union);
    let remount = || rustix::mount::mount_remount(&mount.point, flags, "");
    change("remount", remount).map_err(failed("remount read-only", &mount.point))
}

/// Unmounts everything at `path`; nothing to do is fine. `who` says who uses a mount that is busy.
pub(crate) fn unmount_all(path: &Path, who: impl Fn(&Mount) -> String) -> Result<(), BindError> {
    for _ in 0..MAX_LAYERS {
        let table = MountTable::read()?;
        let Some(mount) = table.at(path) else { return Ok(()) };
        match change("unmount", || rustix::mount::unmount(path, UnmountFlags::NOFOLLOW)) {
            Ok(()) => {}
            Err(rustix::io::Errno::BUSY) => {
                return Err(BindError::Busy { path: path.to_owned(), by: who(mount) });
            }
            Err(error) => return Err(failed("unmount", path)(error)),
        }
    }
    Err(BindError::TooMany { path: path.to_owned() })
}

/// Removes a target that has no mount: an empty folder or an empty file, never more.
pub(crate) fn remove_target(path: &Path) -> Result<(), BindError> {
    let found = match std::fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed("look at", path)(error)),
    };
    let kind = found.file_type();
    let removed = if kind.is_dir() {
        change("remove-target", || std::fs::remove_dir(path))
    } else if kind.is_file() && found.len() == 0 {
        change("remove-target", || std::fs::remove_file(path))
    } else if kind.is_file() {
        return Err(BindError::NotEmpty { path: path.to_owned() });
    } else {
        let what =
            if kind.is_block_device() { "a block device of its own" } else { "neither folder nor file" };
        return Err(BindError::Occupied { path: path.to_owned(), what });
    };
    match removed {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
            Err(BindError::NotEmpty { path: path.to_owned() })
        }
        Err(error) => Err(failed("remove", path)(error)),
    }
}

fn is_empty(folder: &Path) -> Result<bool, BindError> {
    Ok(std::fs::read_dir(folder).map_err(failed("read", folder))?.next().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn a_target_is_shut_and_only_an_empty_one_is_taken_or_removed() {
        let root = tempfile::tempdir().unwrap();
        let (folder, file) = (root.path().join("folder"), root.path().join("file"));
        std::fs::create_dir(&folder).unwrap();
        make_target(&folder, TargetKind::Folder).unwrap();
        make_target(&file, TargetKind::File).unwrap();
        assert_eq!((mode(&folder), mode(&file)), (0, 0));
        assert!(make_target(&file, TargetKind::Folder).is_err());
        assert!(make_target(&folder, TargetKind::File).is_err());

        std::fs::write(folder.join("data"), "precious").unwrap();
        assert!(matches!(make_target(&folder, TargetKind::Folder), Err(BindError::Occupied { .. })));
        assert!(matches!(remove_target(&folder), Err(BindError::NotEmpty { .. })));
        std::fs::write(&file, "precious").unwrap();
        assert!(matches!(remove_target(&file), Err(BindError::NotEmpty { .. })));
        assert!(folder.join("data").exists() && file.exists());

        std::fs::remove_file(folder.join("data")).unwrap();
        remove_target(&folder).unwrap();
        remove_target(&folder).unwrap();
        assert!(!folder.exists());
    }

    #[test]
    fn a_symlink_is_never_followed() {
        let root = tempfile::tempdir().unwrap();
        let (link, elsewhere) = (root.path().join("link"), root.path().join("elsewhere"));
        std::fs::create_dir(&elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &link).unwrap();
        assert!(make_target(&link, TargetKind::Folder).is_err());
        assert!(make_staging(&link).is_err());
        assert!(remove_target(&link).is_err());
        assert!(elsewhere.exists());
    }

    #[test]
    fn a_path_is_compared_with_the_symlinks_of_its_folders_followed() {
        let root = tempfile::tempdir().unwrap();
        let real = root.path().canonicalize().unwrap().join("real");
        std::fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, root.path().join("link")).unwrap();
        let found = real_path(&root.path().join("link/target/")).unwrap();
        assert_eq!(found, Some(real.join("target")));
        assert_eq!(real_path(&root.path().join("missing/target")).unwrap(), None);
        assert!(real_path(Path::new("/")).is_err());
    }
}
