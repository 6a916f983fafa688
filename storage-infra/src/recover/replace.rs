//! Replacement of a catalog by a new one. The previous catalog is renamed and stays beside it.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::catalog::integrity::CATALOG_FILE;
use crate::catalog::{DATABASE_SUFFIXES, beside};

/// Renames a new catalog into its place. Returns the new name of the previous one. The caller holds the directory's lock.
pub fn catalog(data_dir: &Path, fresh: &Path) -> anyhow::Result<Option<PathBuf>> {
    let current = data_dir.join(CATALOG_FILE);
    let previous = set_aside(data_dir, &current)?;
    fs::rename(fresh, &current).context("cannot rename the new catalog into place")?;
    File::open(data_dir)?.sync_all().context("cannot sync the data directory")?;
    Ok(previous)
}

/// Removes a database that was not completed.
pub fn remove_database(path: &Path) -> anyhow::Result<()> {
    DATABASE_SUFFIXES.iter().map(|suffix| beside(path, suffix)).try_for_each(|file| remove(&file))
}

/// Renames the previous catalog. The database file goes first, before its WAL: without it no server starts.
fn set_aside(data_dir: &Path, current: &Path) -> anyhow::Result<Option<PathBuf>> {
    let moment = jiff::Timestamp::now().strftime("%Y%m%dT%H%M%SZ").to_string();
    let name = |number: usize| data_dir.join(format!("catalog.{moment}-{number}.old"));
    let free = |path: &PathBuf| DATABASE_SUFFIXES.iter().all(|suffix| !beside(path, suffix).exists());
    let previous = (0..).map(name).find(free).context("found no free name for the previous catalog")?;
    let mut moved = false;
    for suffix in DATABASE_SUFFIXES {
        let from = beside(current, suffix);
        if from.exists() {
            let to = beside(&previous, suffix);
            fs::rename(&from, &to).with_context(|| format!("cannot rename {}", from.display()))?;
            moved = true;
        }
    }
    Ok(moved.then_some(previous))
}

fn remove(path: &Path) -> anyhow::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}
