//! Bind mounts, their target directories and files, and unmounts. Every function blocks.

use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

use rustix::mount::{MountFlags, UnmountFlags};

use super::mount_table::{Mount, MountTable, MountTableError};

/// Limit of stacked mounts on one path. The driver never stacks this many.
const MAX_LAYERS: usize = 16;

/// Mode of a target below its mount: no access.
const NO_ACCESS: u32 = 0o000;

/// Type of a mount target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TargetKind {
    /// Directory, for a filesystem.
    Directory,
    /// File, for a block device.
    File,
}

/// Failure to create, mount, unmount or remove a target.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BindError {
    /// The path exists and was not created by this driver.
    #[error("{} is {what}; the driver left it unchanged. Move it away and retry", path.display())]
    Occupied {
        /// The target.
        path: PathBuf,
        /// Description of the existing file.
        what: &'static str,
    },
    /// The target contains data after the unmount.
    #[error(
        "{} is not empty although nothing is mounted there; the driver did not remove it. \
         Pods may have written to the node's disk: check the content and move it away", path.display()
    )]
    NotEmpty {
        /// The target.
        path: PathBuf,
    },
    /// The mount is in use.
    #[error("failed to unmount {}: it is in use{by}; stop the processes that use it", path.display())]
    Busy {
        /// The mount point.
        path: PathBuf,
        /// Processes that use the mount, as " by NAME (pid PID)"; empty if unknown.
        by: String,
    },
    /// The path is still mounted after the maximum number of unmounts.
    #[error("{} is still mounted after {MAX_LAYERS} unmounts", path.display())]
    TooMany {
        /// The mount point.
        path: PathBuf,
    },
    /// A system call failed.
    #[error("failed to {what} {}: {source}", path.display())]
    Io {
        /// Operation.
        what: &'static str,
        /// Path of the operation.
        path: PathBuf,
        /// OS error.
        source: io::Error,
    },
    /// The mount table cannot be read.
    #[error(transparent)]
    MountTable(#[from] MountTableError),
}

fn failed<E: Into<io::Error>>(what: &'static str, path: &Path) -> impl FnOnce(E) -> BindError {
    move |error| BindError::Io { what, path: path.to_owned(), source: error.into() }
}

/// Runs `call`, a change to the node, between two fail points.
pub(crate) fn change<T>(what: &str, call: impl FnOnce() -> T) -> T {
    fail_point::around(|| Some(format!("node.{what}")), call)
}

/// Returns the path as it appears in the kernel's mount table: symlinks of parent directories are resolved, the last
/// component is not. Returns None if the parent directory does not exist.
pub(crate) fn real_path(path: &Path) -> Result<Option<PathBuf>, BindError> {
    let (Some(dir), Some(Component::Normal(name))) = (path.parent(), path.components().next_back()) else {
        return Err(BindError::Occupied { path: path.to_owned(), what: "not a valid mount target" });
    };
    match dir.canonicalize() {
        Ok(dir) => Ok(Some(dir.join(name))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed("resolve", dir)(error)),
    }
}

/// Creates the target, or reuses an existing empty one, and sets its mode to 0000. If the mount is ever missing, pods
/// cannot write to the node's own disk instead of the volume.
pub(crate) fn make_target(path: &Path, kind: TargetKind) -> Result<(), BindError> {
    let made = change("make-target", || match kind {
        TargetKind::Directory => std::fs::DirBuilder::new().mode(NO_ACCESS).create(path),
        TargetKind::File => {
            std::fs::OpenOptions::new().write(true).create_new(true).mode(NO_ACCESS).open(path).map(drop)
        }
    });
    match made {
        Ok(()) => return Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(failed("create", path)(error)),
    }
    let occupied = |what| Err(BindError::Occupied { path: path.to_owned(), what });
    let found = std::fs::symlink_metadata(path).map_err(failed("stat", path))?;
    match kind {
        TargetKind::Directory if !found.is_dir() => return occupied("not a directory"),
        TargetKind::Directory if !is_empty(path)? => return occupied("a directory that is not empty"),
        TargetKind::File if !found.is_file() => return occupied("not a regular file"),
        TargetKind::File if found.len() > 0 => return occupied("a file that is not empty"),
        TargetKind::Directory | TargetKind::File => {}
    }
    let shut = || std::fs::set_permissions(path, std::fs::Permissions::from_mode(NO_ACCESS));
    change("shut-target", shut).map_err(failed("change the mode of", path))
}

/// Creates the staging directory. Its parent directory must exist.
pub(crate) fn make_staging(path: &Path) -> Result<(), BindError> {
    match change("make-staging", || std::fs::DirBuilder::new().mode(0o750).create(path)) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let found = std::fs::symlink_metadata(path).map_err(failed("stat", path))?;
            let what = if found.is_symlink() { "a symlink" } else { "not a directory" };
            if found.is_dir() { Ok(()) } else { Err(BindError::Occupied { path: path.to_owned(), what }) }
        }
        Err(error) => Err(failed("create", path)(error)),
    }
}

/// Bind-mounts `source` at `target`.
pub(crate) fn bind(source: &Path, target: &Path) -> Result<(), BindError> {
    change("bind-mount", || rustix::mount::mount_bind(source, target))
        .map_err(failed("bind-mount to", target))
}

/// Remounts a bind mount read-only and keeps its other options.
pub(crate) fn make_read_only(mount: &Mount) -> Result<(), BindError> {
    // A remount replaces all per-mount flags: flags that are not passed are cleared.
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

/// Unmounts all mounts stacked at `path`. `users` describes the processes that use a busy mount. Idempotent.
pub(crate) fn unmount_all(path: &Path, users: impl Fn(&Mount) -> String) -> Result<(), BindError> {
    for _ in 0..MAX_LAYERS {
        let table = MountTable::read()?;
        let Some(mount) = table.at(path) else { return Ok(()) };
        match change("unmount", || rustix::mount::unmount(path, UnmountFlags::NOFOLLOW)) {
            Ok(()) => {}
            Err(rustix::io::Errno::BUSY) => {
                return Err(BindError::Busy { path: path.to_owned(), by: users(mount) });
            }
            Err(error) => return Err(failed("unmount", path)(error)),
        }
    }
    Err(BindError::TooMany { path: path.to_owned() })
}

/// Detaches the topmost mount at `path`, even if it is in use: for a mount whose device is gone, of which nothing can be
/// flushed.
pub(crate) fn detach(path: &Path) -> Result<(), BindError> {
    let flags = UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
    change("detach", || rustix::mount::unmount(path, flags)).map_err(failed("detach the mount at", path))
}

/// Removes an unmounted target if it is an empty directory or an empty file. Idempotent.
pub(crate) fn remove_target(path: &Path) -> Result<(), BindError> {
    let found = match std::fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed("stat", path)(error)),
    };
    let kind = found.file_type();
    let removed = if kind.is_dir() {
        change("remove-target", || std::fs::remove_dir(path))
    } else if kind.is_file() && found.len() == 0 {
        change("remove-target", || std::fs::remove_file(path))
    } else if kind.is_file() {
        return Err(BindError::NotEmpty { path: path.to_owned() });
    } else {
        let what = if kind.is_block_device() {
            "a block device node"
        } else {
            "neither a directory nor a regular file"
        };
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

fn is_empty(dir: &Path) -> Result<bool, BindError> {
    Ok(std::fs::read_dir(dir).map_err(failed("read", dir))?.next().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn a_target_has_mode_0000_and_only_an_empty_one_is_reused_or_removed() {
        let root = tempfile::tempdir().unwrap();
        let (dir, file) = (root.path().join("dir"), root.path().join("file"));
        std::fs::create_dir(&dir).unwrap();
        make_target(&dir, TargetKind::Directory).unwrap();
        make_target(&file, TargetKind::File).unwrap();
        assert_eq!((mode(&dir), mode(&file)), (0, 0));
        assert!(make_target(&file, TargetKind::Directory).is_err());
        assert!(make_target(&dir, TargetKind::File).is_err());

        std::fs::write(dir.join("data"), "precious").unwrap();
        assert!(matches!(make_target(&dir, TargetKind::Directory), Err(BindError::Occupied { .. })));
        assert!(matches!(remove_target(&dir), Err(BindError::NotEmpty { .. })));
        std::fs::write(&file, "precious").unwrap();
        assert!(matches!(remove_target(&file), Err(BindError::NotEmpty { .. })));
        assert!(dir.join("data").exists() && file.exists());

        std::fs::remove_file(dir.join("data")).unwrap();
        remove_target(&dir).unwrap();
        remove_target(&dir).unwrap();
        assert!(!dir.exists());
    }

    #[test]
    fn a_symlink_is_never_followed() {
        let root = tempfile::tempdir().unwrap();
        let (link, elsewhere) = (root.path().join("link"), root.path().join("elsewhere"));
        std::fs::create_dir(&elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &link).unwrap();
        assert!(make_target(&link, TargetKind::Directory).is_err());
        assert!(make_staging(&link).is_err());
        assert!(remove_target(&link).is_err());
        assert!(elsewhere.exists());
    }

    #[test]
    fn symlinks_of_parent_directories_are_resolved_before_paths_are_compared() {
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
