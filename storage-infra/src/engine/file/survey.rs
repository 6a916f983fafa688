//! What a directory tells of itself, without a catalog.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use uuid::Uuid;

use super::{MARKER, lock, notes};
use crate::engine::Record;

/// What was found in a pool's directory.
#[derive(Debug, Clone)]
pub struct Survey {
    /// The directory.
    pub dir: PathBuf,
    /// The same without symbolic links, as the kernel knows it.
    pub real: PathBuf,
    /// What its marker says.
    pub uuid: Uuid,
    /// What is noted of the pool.
    pub pool: Option<Record>,
    /// Which server has it now, for people.
    pub served: Option<String>,
    /// Its files, by name.
    pub files: Vec<Found>,
}

/// A file in a pool's directory.
#[derive(Debug, Clone)]
pub struct Found {
    /// Its name.
    pub name: String,
    /// How long it is.
    pub bytes: u64,
    /// What it has allocated.
    pub allocated: u64,
    /// What is noted of it, or why that cannot be read.
    pub record: Result<Option<Record>, String>,
}

/// Looks at all that is in a pool's directory. Reads only.
pub fn survey(dir: &Path) -> anyhow::Result<Survey> {
    use anyhow::Context;
    let marker = dir.join(MARKER);
    let text = fs::read_to_string(&marker).with_context(|| {
        format!(
            "{} is no pool's directory, or its filesystem is not mounted: cannot read {MARKER}",
            dir.display()
        )
    })?;
    let uuid = text.trim().parse().with_context(|| format!("{} holds no UUID", marker.display()))?;
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name == MARKER || name == "lost+found" {
            continue;
        }
        let meta = entry.metadata().with_context(|| format!("cannot look at {}", entry.path().display()))?;
        let record = if meta.is_file() {
            notes::read(&entry.path()).map_err(|error| error.to_string())
        } else {
            Err("it is not a plain file".to_owned())
        };
        files.push(Found { name, bytes: meta.len(), allocated: meta.blocks() * 512, record });
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    let real = fs::canonicalize(dir).with_context(|| format!("cannot find {}", dir.display()))?;
    let served =
        lock::server_of(&marker).with_context(|| format!("cannot ask who serves {}", dir.display()))?;
    Ok(Survey { dir: dir.to_owned(), real, uuid, pool: notes::read(&marker)?, served, files })
}
