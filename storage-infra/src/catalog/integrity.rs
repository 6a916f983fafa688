//! Integrity check of the catalog. A server with an empty or damaged catalog would report existing volumes as
//! deleted, so it refuses to start.
//!
//! A list of registered pools and nodes (`known.json`) is stored beside the catalog. It distinguishes a lost catalog
//! from a new installation, and recovery restores nodes from it.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use infra_api::{NodeSpec, PoolName};
use rusqlite::Connection;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::postgres::Target;
use super::{Catalog, CatalogError, Result, Tx};

/// File name of the catalog in the data directory.
pub const CATALOG_FILE: &str = "catalog.sqlite";
/// File name of the list of registered objects.
const REGISTERED_FILE: &str = "known.json";

/// Pools and nodes that were registered by an operator or controller.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registered {
    /// The pools.
    pub pools: Vec<RegisteredPool>,
    /// The nodes.
    pub nodes: Vec<RegisteredNode>,
}

/// A registered node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegisteredNode {
    /// Its UUID.
    pub uuid: Uuid,
    /// The spec of the last request.
    pub spec: NodeSpec,
}

/// A registered pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegisteredPool {
    /// Its name.
    pub name: PoolName,
    /// Its directory.
    pub path: PathBuf,
}

/// The error for an unusable catalog, with instructions.
pub(super) fn damaged(data_dir: &Path, why: impl std::fmt::Display) -> CatalogError {
    let (file, dir) = (data_dir.join(CATALOG_FILE), data_dir.display());
    CatalogError::Damaged(format!(
        "the catalog {} {why}; the server does not start, because it would report existing volumes as deleted. Keep the \
         file; then rebuild it from the pools: `storage-infra recover --data-dir {dir}` shows what that would restore, and \
         changes nothing; or restore a backup: `storage-infra restore --data-dir {dir} --from FILE`",
        file.display()
    ))
}

impl Registered {
    fn of(tx: &Tx<'_>) -> Result<Self> {
        let pool = |row: super::PoolRow| RegisteredPool { name: row.name, path: row.spec.path.into() };
        let node = |row: super::NodeRow| RegisteredNode { uuid: row.uuid, spec: row.spec };
        Ok(Self {
            pools: tx.pools()?.into_iter().map(pool).collect(),
            nodes: tx.nodes()?.into_iter().map(node).collect(),
        })
    }
}

/// Reads the list of registered objects. Empty if there is none.
pub fn read_registered(data_dir: &Path) -> Result<Registered> {
    let path = data_dir.join(REGISTERED_FILE);
    let failed = |why: String| {
        CatalogError::Unusable(format!(
            "cannot read {}, the list of pools and nodes: {why}; it may be removed if the catalog beside it is intact or if the \
             pools are given with --pool",
            path.display()
        ))
    };
    match fs::read(&path) {
        Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| failed(error.to_string())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Registered::default()),
        Err(error) => Err(failed(error.to_string())),
    }
}

/// Writes the list of registered objects.
pub fn write_registered(data_dir: &Path, list: &Registered) -> Result<()> {
    let write = || -> io::Result<()> {
        let mut file = tempfile::NamedTempFile::new_in(data_dir)?;
        file.write_all(&serde_json::to_vec_pretty(list)?)?;
        file.as_file().sync_all()?;
        file.persist(data_dir.join(REGISTERED_FILE))?;
        File::open(data_dir)?.sync_all()
    };
    // Do not write an unchanged list: a server must start on a full disk.
    if read_registered(data_dir).is_ok_and(|known| known == *list) {
        return Ok(());
    }
    write().map_err(|error| {
        CatalogError::Unwritable(format!(
            "cannot write {}: {error}",
            data_dir.join(REGISTERED_FILE).display()
        ))
    })
}

/// Fails if a catalog existed and is lost.
pub(super) fn refuse_lost(data_dir: &Path) -> Result<()> {
    let size = match fs::metadata(data_dir.join(CATALOG_FILE)) {
        Ok(meta) => Some(meta.len()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(damaged(data_dir, format_args!("cannot be examined: {error}"))),
    };
    let why = match size {
        None => "is missing",
        Some(0) => "is empty",
        Some(_) => return Ok(()),
    };
    let pools = read_registered(data_dir)?.pools;
    if pools.is_empty() {
        return Ok(());
    }
    Err(damaged(data_dir, format_args!("{why}, but these pools are registered: {}", names(&pools))))
}

/// Fails if pools are registered and their catalog would be created anew.
pub(super) fn refuse_lost_database(data_dir: &Path, target: &Target) -> Result<()> {
    let pools = read_registered(data_dir)?.pools;
    if pools.is_empty() {
        return Ok(());
    }
    Err(CatalogError::Damaged(format!(
        "{target} has no catalog, but these pools are registered: {}; the server does not start, because it would report \
         existing volumes as deleted. Restore the database from a backup; or rebuild the catalog from the pools in a new data \
         directory with `storage-infra recover`, and bring it into the database with `storage-infra catalog import`",
        names(&pools)
    )))
}

fn names(pools: &[RegisteredPool]) -> String {
    let names: Vec<String> =
        pools.iter().map(|pool| format!("{} at {}", pool.name, pool.path.display())).collect();
    names.join(", ")
}

/// Fails if the file is not a catalog or fails SQLite's integrity checks. Runs before anything is written to it.
pub(super) fn refuse_damaged(data_dir: &Path, connection: &Connection) -> Result<()> {
    let version: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    if version == 0 && !read_registered(data_dir)?.pools.is_empty() {
        return Err(damaged(data_dir, "has no tables, but pools are registered"));
    }
    let found = faults(connection)?;
    if found.is_empty() {
        Ok(())
    } else {
        Err(damaged(data_dir, format_args!("is damaged: {}", found.join("; "))))
    }
}

/// The first faults that SQLite's integrity checks find.
pub(super) fn faults(connection: &Connection) -> Result<Vec<String>> {
    let mut found: Vec<String> = Vec::new();
    let mut check = connection.prepare("PRAGMA integrity_check(5)")?;
    for line in check.query_map([], |row| row.get::<_, String>(0))? {
        found.extend(Some(line?).filter(|line| line != "ok"));
    }
    let mut check = connection.prepare("PRAGMA foreign_key_check")?;
    for table in check.query_map([], |row| row.get::<_, String>(0))?.take(5) {
        found.push(format!("a row of {} violates a foreign key", table?));
    }
    Ok(found)
}

/// Decodes every row once, so that a corrupt row fails the start instead of a later operation.
pub(super) fn read_all(tx: &Tx<'_>) -> Result<Registered> {
    tx.volumes(None, "", usize::MAX >> 1)?;
    tx.snapshots(None, None, "", usize::MAX >> 1)?;
    tx.attachments(None, None)?;
    tx.moves()?;
    Registered::of(tx)
}

impl Catalog {
    /// Updates the list of registered objects.
    pub async fn save_registered(&self) -> Result<()> {
        #[cfg(test)]
        if crate::simulation::current().is_some() {
            return Ok(());
        }
        // Held until the list is written, so that concurrent changes do not leave an older list.
        let registered_lock = self.0.registered_lock.clone().lock_owned().await;
        let known = self.read(Registered::of).await?;
        let data_dir = self.0.data_dir.clone();
        let writing = tokio::task::spawn_blocking(move || {
            let _remembering = registered_lock;
            write_registered(&data_dir, &known)
        });
        let broke =
            |error| CatalogError::Unwritable(format!("the list of pools and nodes was not written: {error}"));
        writing.await.unwrap_or_else(|error| Err(broke(error)))
    }
}
