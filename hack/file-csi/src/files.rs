//! Files of volumes and snapshots. A file is complete when it has its name.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What a file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A volume.
    Volume,
    /// A snapshot.
    Snapshot,
}

impl Kind {
    fn folder(self) -> &'static str {
        match self {
            Self::Volume => "volumes",
            Self::Snapshot => "snapshots",
        }
    }
}

/// The folder of the files.
#[derive(Debug, Clone)]
pub(crate) struct Files {
    folder: PathBuf,
}

impl Files {
    pub(crate) fn open(folder: &Path) -> io::Result<Self> {
        for kind in [Kind::Volume, Kind::Snapshot] {
            fs::create_dir_all(folder.join(kind.folder()))?;
        }
        Ok(Self { folder: folder.to_owned() })
    }

    /// The path of a volume or snapshot; None if none can have this name.
    pub(crate) fn path(&self, kind: Kind, name: &str) -> Option<PathBuf> {
        let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
        let valid = !name.is_empty() && name.bytes().all(is_valid);
        valid.then(|| self.folder.join(kind.folder()).join(name))
    }

    /// The size of a file in bytes, if it exists.
    pub(crate) fn size(&self, kind: Kind, name: &str) -> io::Result<Option<u64>> {
        let Some(path) = self.path(kind, name) else { return Ok(None) };
        match fs::metadata(path) {
            Ok(found) => Ok(Some(found.len())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Creates a file of at least this size, as a copy or empty.
    pub(crate) fn create(&self, kind: Kind, name: &str, source: Option<&Path>, size: u64) -> io::Result<()> {
        let path = self.path(kind, name).ok_or(io::ErrorKind::InvalidInput)?;
        let unfinished = path.with_extension("unfinished");
        match source {
            Some(source) => copy(source, &unfinished)?,
            None => drop(File::create(&unfinished)?),
        }
        grow(&unfinished, size)?;
        fs::rename(unfinished, path)
    }

    /// Makes a volume larger.
    pub(crate) fn expand(&self, name: &str, size: u64) -> io::Result<()> {
        grow(&self.path(Kind::Volume, name).ok_or(io::ErrorKind::InvalidInput)?, size)
    }

    /// Removes a file, if it exists.
    pub(crate) fn remove(&self, kind: Kind, name: &str) -> io::Result<()> {
        let Some(path) = self.path(kind, name) else { return Ok(()) };
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let copied = Command::new("cp").arg("--reflink=auto").args([from, to]).output()?;
    if copied.status.success() {
        return Ok(());
    }
    Err(io::Error::other(String::from_utf8_lossy(&copied.stderr).trim().to_owned()))
}

fn grow(path: &Path, size: u64) -> io::Result<()> {
    let file = OpenOptions::new().write(true).open(path)?;
    if file.metadata()?.len() < size {
        file.set_len(size)?;
    }
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_has_the_data_of_its_source_and_may_be_larger() {
        let folder = tempfile::tempdir().unwrap();
        let files = Files::open(folder.path()).unwrap();
        files.create(Kind::Volume, "a", None, 4096).unwrap();
        let path = files.path(Kind::Volume, "a").unwrap();
        fs::write(&path, "data").unwrap();
        files.create(Kind::Snapshot, "s", Some(&path), 0).unwrap();
        let snapshot = files.path(Kind::Snapshot, "s").unwrap();
        files.create(Kind::Volume, "b", Some(&snapshot), 8192).unwrap();
        assert_eq!(files.size(Kind::Volume, "b").unwrap(), Some(8192));
        assert!(fs::read(files.path(Kind::Volume, "b").unwrap()).unwrap().starts_with(b"data\0"));
        files.remove(Kind::Volume, "a").unwrap();
        files.remove(Kind::Volume, "a").unwrap();
        assert_eq!(files.size(Kind::Volume, "a").unwrap(), None);
    }

    #[test]
    fn a_name_stays_within_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        let files = Files::open(folder.path()).unwrap();
        for name in ["", "../a", "a/b", "a.unfinished"] {
            assert_eq!(files.path(Kind::Volume, name), None, "{name:?}");
        }
    }
}
