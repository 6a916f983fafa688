//! Pool scan: reads a pool's directory and records without a catalog.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::{MARKER, lock, object_of, record_xattr};
use crate::engine::scan::{FoundFile, Place, PoolScan};

/// Scans a pool's directory. Read-only.
pub(in crate::engine) fn scan_pool(dir: &Path) -> anyhow::Result<PoolScan> {
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
        files.push(FoundFile {
            object: object_of(&name),
            name,
            bytes: meta.len(),
            allocated: meta.blocks() * 512,
            record,
        });
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    let place = fs::canonicalize(dir)
        .map(Place::Directory)
        .with_context(|| format!("cannot resolve {}", dir.display()))?;
    let served_by = lock::server_of(&marker)
        .with_context(|| format!("cannot check whether a server has {} locked", dir.display()))?;
    Ok(PoolScan { dir: dir.to_owned(), place, uuid, pool: record_xattr::read(&marker)?, served_by, files })
}
