//! Files that become volumes, and volumes that become files again: checks, and renames that never replace a file.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use infra_api::PoolName;
use nix::libc;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use super::file::{has_record, io_error};
use super::image_lock;
use super::qcow2::{self, Format};
use super::{EngineError, Result};

/// Size granularity of volumes.
pub(super) const UNIT: u64 = 4096;

/// Where a file can become a volume without a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Home {
    /// In the pools on this filesystem; in others with a copy.
    Filesystem(u64),
    /// In the pool that has the image, and in no other.
    Pool(PoolName),
}

/// A file or an RBD image that can be adopted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// Its path, without symbolic links.
    pub path: PathBuf,
    /// Its inode number, or the number of the image.
    pub inode: u64,
    /// Where it can stay.
    pub home: Home,
    /// Size of its disk in bytes.
    pub size: u64,
    /// Bytes that it has allocated.
    pub allocated: u64,
    /// Its format.
    pub format: Format,
}

/// An RBD image that is no object, in the Ceph pool or namespace of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForeignImage {
    /// Its number, which a rename does not change.
    pub id: u64,
    /// Its size in bytes.
    pub size: u64,
    /// Bytes that it has allocated.
    pub allocated: u64,
}

fn refused<T>(path: &Path, why: impl std::fmt::Display) -> Result<T> {
    Err(EngineError::Unsuitable(format!("the file {} cannot become a volume: {why}", path.display())))
}

/// Opens a regular file, never a symbolic link.
fn open_regular(path: &Path) -> Result<(File, Metadata)> {
    let mut options = OpenOptions::new();
    // Not blocked by a FIFO.
    options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let file = options.open(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            EngineError::Unsuitable(format!("the file {} does not exist", path.display()))
        }
        _ if Errno::from_io_error(&error) == Some(Errno::LOOP) => {
            EngineError::Unsuitable(format!("{} is a symbolic link; name the file itself", path.display()))
        }
        _ => io_error("open", path)(error),
    })?;
    let meta = file.metadata().map_err(io_error("read the metadata of", path))?;
    if meta.is_file() { Ok((file, meta)) } else { refused(path, "it is not a regular file") }
}

/// Examines a file at a path without symbolic links. Fails if it cannot become a volume or is in use.
pub fn examine(path: &Path) -> Result<Candidate> {
    let (file, meta) = open_regular(path)?;
    if meta.nlink() != 1 {
        return refused(path, format_args!("it has {} hard links: others could change it", meta.nlink()));
    }
    if has_record(path)? {
        return refused(
            path,
            "it has the record of a volume, a snapshot or a pool of a storage-infra server; if that server's catalog was \
             lost, `storage-infra recover` rebuilds it",
        );
    }
    refuse_users(path)?;
    let format = qcow2::format_of(&file).map_err(io_error("read", path))?;
    let format = format.or_else(|why| refused(path, why))?;
    let size = match format {
        Format::Raw => meta.len(),
        Format::Qcow2 { size } => size,
    };
    if size == 0 || size % UNIT != 0 {
        return refused(
            path,
            format_args!(
                "its disk has {size} bytes, which is not a multiple of {UNIT}; enlarge it with `qemu-img resize` first"
            ),
        );
    }
    let (inode, home, allocated) = (meta.ino(), Home::Filesystem(meta.dev()), meta.blocks() * 512);
    Ok(Candidate { path: path.to_owned(), inode, home, size, allocated, format })
}

/// Fails if a process or a device has a file open.
pub(super) fn refuse_users(path: &Path) -> Result<()> {
    let users = image_lock::users(path, false).map_err(io_error("check for users of", path))?;
    match users.first() {
        None => Ok(()),
        Some(holder) => Err(EngineError::InUse(format!(
            "the file {} is in use by {holder}; stop that first",
            path.display()
        ))),
    }
}

/// Opens a file for a change of its record. Fails if it is not the expected one.
pub(super) fn open_expected(path: &Path, inode: u64) -> Result<File> {
    let (file, meta) = open_regular(path)?;
    if meta.ino() == inode { Ok(file) } else { refused(path, "it was replaced meanwhile") }
}

/// Fails unless the file at a path is the expected one, unused, and has this size.
pub fn refuse_changed(path: &Path, inode: u64, size: u64) -> Result<()> {
    let file = open_expected(path, inode)?;
    refuse_users(path)?;
    match file.metadata().map_err(io_error("read the metadata of", path))?.len() == size {
        true => Ok(()),
        false => refused(path, "it was changed meanwhile"),
    }
}

/// Whether the file with this inode number is at a path.
pub(super) fn is_at(path: &Path, inode: u64) -> Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(meta) => Ok(meta.is_file() && meta.ino() == inode),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(io_error("read the metadata of", path)(error)),
    }
}

/// Makes a file accessible to this server only, as the files of a pool are.
pub(super) fn own(file: &File, path: &Path) -> Result<()> {
    let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let meta = file.metadata().map_err(io_error("read the metadata of", path))?;
    if (meta.uid(), meta.gid()) != (user, group) {
        fchown(file, Some(user), Some(group)).map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => EngineError::Unsuitable(format!(
                "the server may not make itself the owner of {}: run `chown {user}:{group}` on it first",
                path.display()
            )),
            _ => io_error("change the owner of", path)(error),
        })?;
    }
    file.set_permissions(fs::Permissions::from_mode(0o600)).map_err(io_error("change the mode of", path))
}

/// Renames a file durably. Never replaces one.
pub(super) fn rename(from: &Path, to: &Path) -> Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Ok(()) => {}
        Err(Errno::EXIST) => {
            return Err(EngineError::Foreign(format!("{} exists; choose another path", to.display())));
        }
        Err(Errno::XDEV) => {
            return Err(EngineError::Unsuitable(format!(
                "{} and {} are not in the same mount of a filesystem: move the file there first",
                from.display(),
                to.display()
            )));
        }
        Err(error) => return Err(io_error("rename a file to", to)(error.into())),
    }
    sync_parent(to)?;
    sync_parent(from)
}

/// Gives a complete file its name, durably. Never replaces a file, where the filesystem can promise that: NFS cannot, and there
/// the caller has made sure that none has the name.
pub(super) fn name(from: &Path, to: &Path) -> Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Err(Errno::INVAL) => {
            fs::rename(from, to).map_err(io_error("rename a file to", to))?;
            sync_parent(to)
        }
        Err(Errno::EXIST) => Err(EngineError::Foreign(format!(
            "{} exists and belongs to no object; move it away, or use another ID",
            to.display()
        ))),
        Err(error) => Err(io_error("rename a file to", to)(error.into())),
        Ok(()) => sync_parent(to),
    }
}

fn sync_parent(path: &Path) -> Result<()> {
    let parent = path.parent().unwrap_or(Path::new("/"));
    File::open(parent).and_then(|dir| dir.sync_all()).map_err(io_error("sync the directory", parent))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::process::Command;

    use super::*;

    fn why(path: &Path) -> String {
        examine(path).unwrap_err().to_string()
    }

    #[test]
    fn only_a_regular_unused_file_of_a_whole_size_can_become_a_volume() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        File::create(path("raw")).unwrap().set_len(8192).unwrap();
        let found = examine(&path("raw")).unwrap();
        assert_eq!((found.size, found.format, found.allocated), (8192, Format::Raw, 0));
        assert!(why(&path("missing")).contains("does not exist"));
        assert!(why(dir.path()).contains("not a regular file"));
        symlink(path("raw"), path("link")).unwrap();
        assert!(why(&path("link")).contains("symbolic link"));
        assert!(Command::new("mkfifo").arg(path("fifo")).status().unwrap().success());
        assert!(why(&path("fifo")).contains("not a regular file"));
        File::create(path("odd")).unwrap().set_len(8193).unwrap();
        assert!(why(&path("odd")).contains("not a multiple of 4096"));
        let mut reader = Command::new("tail").arg("-f").arg(path("raw")).spawn().unwrap();
        while examine(&path("raw")).is_ok() {}
        assert!(why(&path("raw")).contains("tail"));
        reader.kill().unwrap();
        reader.wait().unwrap();
        fs::hard_link(path("raw"), path("same")).unwrap();
        assert!(why(&path("raw")).contains("2 hard links"));
    }

    #[test]
    fn a_rename_never_replaces_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("a"), "a").unwrap();
        fs::write(path("b"), "b").unwrap();
        assert!(matches!(rename(&path("a"), &path("b")), Err(EngineError::Foreign(_))));
        rename(&path("a"), &path("c")).unwrap();
        assert_eq!(
            (fs::read(path("b")).unwrap(), fs::read(path("c")).unwrap()),
            (b"b".to_vec(), b"a".to_vec())
        );
    }
}
