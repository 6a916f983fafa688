//! Pool scan: reads a pool's directory and records without a catalog.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use uuid::Uuid;

use super::{MARKER, lock, record_xattr};
use crate::engine::Record;

/// Result of scanning a pool's directory.
#[derive(Debug, Clone)]
pub struct PoolScan {
    /// The directory.
    pub dir: PathBuf,
    /// The directory's path without symbolic links.
    pub real: PathBuf,
    /// UUID in the marker.
    pub uuid: Uuid,
    /// The pool's record.
    pub pool: Option<Record>,
    /// Error message that names the server that has the pool locked, if any.
    pub served_by: Option<String>,
    /// The files, ordered by name.
    pub files: Vec<FoundFile>,
}

/// A file in a pool's directory.
#[derive(Debug, Clone)]
pub struct FoundFile {
    /// Name of the file.
    pub name: String,
    /// Length in bytes.
    pub bytes: u64,
    /// Allocated bytes.
    pub allocated: u64,
    /// The file's record, or why it cannot be read.
    pub record: Result<Option<Record>, String>,
}

/// Scans a pool's directory. Read-only.
pub fn scan_pool(dir: &Path) -> anyhow::Result<PoolScan> {
    use anyhow::Context;
    let marker = dir.join(MARKER);
    let text = fs::read_to_string(&marker).with_context(|| {
        format!(
            "{} is not a pool directory, or its filesystem is not mounted: cannot read {MARKER}",
            dir.display()
        )
    })?;
    let uuid =
        text.trim().parse().with_context(|| format!("{} does not contain a UUID", marker.display()))?;
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name == MARKER || name == "lost+found" {
            continue;
        }
        let meta = entry
            .metadata()
            .with_context(|| format!("cannot read the metadata of {}", entry.path().display()))?;
        let record = if meta.is_file() {
            record_xattr::read(&entry.path()).map_err(|error| error.to_string())
        } else {
            Err("it is not a regular file".to_owned())
        };
        files.push(FoundFile { name, bytes: meta.len(), allocated: meta.blocks() * 512, record });
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    let real = fs::canonicalize(dir).with_context(|| format!("cannot resolve {}", dir.display()))?;
    let served_by = lock::server_of(&marker)
        .with_context(|| format!("cannot check whether a server has {} locked", dir.display()))?;
    Ok(PoolScan { dir: dir.to_owned(), real, uuid, pool: record_xattr::read(&marker)?, served_by, files })
}
