//! Whether the catalog is there and whole. A server that began with an empty catalog, or with half of one, would tell
//! its callers that their volumes are gone; so one that cannot be trusted is not served.
//!
//! Beside the catalog is a list of what was registered by hand: pools and nodes. Without it, a catalog that is missing
//! could not be told from one that never was, nor could nodes be brought back.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use infra_api::{NodeSpec, PoolName};
use rusqlite::Connection;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{Catalog, CatalogError, Result, Tx};

/// The catalog's file in the data directory.
pub const FILE: &str = "catalog.sqlite";
/// The list beside it.
const KNOWN: &str = "known.json";

/// What was registered by hand.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Known {
    /// The pools.
    pub pools: Vec<KnownPool>,
    /// The nodes.
    pub nodes: Vec<KnownNode>,
}

/// A node as the list beside the catalog has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownNode {
    /// Its UUID.
    pub uuid: Uuid,
    /// What was asked for.
    pub spec: NodeSpec,
}

/// A pool as the list beside the catalog has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownPool {
    /// Its name.
    pub name: PoolName,
    /// Its directory.
    pub path: PathBuf,
}

/// Says that a catalog is not to be used, and what to do.
pub(super) fn damaged(data_dir: &Path, why: impl std::fmt::Display) -> CatalogError {
    let (file, dir) = (data_dir.join(FILE), data_dir.display());
    CatalogError::Damaged(format!(
        "the catalog {} {why}; nothing is served, so that no volume is taken for gone. Keep the file; then put a backup \
         of it back, or rebuild it from what is in the pools: `storage-infra recover --data-dir {dir}` says what that \
         would bring, and changes nothing",
        file.display()
    ))
}

impl Known {
    fn of(tx: &Tx<'_>) -> Result<Self> {
        let pool = |row: super::PoolRow| KnownPool { name: row.name, path: row.spec.path.into() };
        let node = |row: super::NodeRow| KnownNode { uuid: row.uuid, spec: row.spec };
        Ok(Self {
            pools: tx.pools()?.into_iter().map(pool).collect(),
            nodes: tx.nodes()?.into_iter().map(node).collect(),
        })
    }
}

/// What the list in a data directory has. Empty where there is none.
pub fn known(data_dir: &Path) -> Result<Known> {
    let path = data_dir.join(KNOWN);
    let failed = |why: String| {
        CatalogError::Unusable(format!(
            "cannot read {}, the list of pools and nodes: {why}; it can be removed where a good catalog is beside it, or where \
             pools are named with --pool",
            path.display()
        ))
    };
    match fs::read(&path) {
        Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| failed(error.to_string())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Known::default()),
        Err(error) => Err(failed(error.to_string())),
    }
}

/// Puts the list into a data directory.
pub fn write_known(data_dir: &Path, list: &Known) -> Result<()> {
    let write = || -> io::Result<()> {
        let mut file = tempfile::NamedTempFile::new_in(data_dir)?;
        file.write_all(&serde_json::to_vec_pretty(list)?)?;
        file.as_file().sync_all()?;
        file.persist(data_dir.join(KNOWN))?;
        File::open(data_dir)?.sync_all()
    };
    // So that a server can start on a full disk.
    if known(data_dir).is_ok_and(|known| known == *list) {
        return Ok(());
    }
    write().map_err(|error| {
        CatalogError::Unwritable(format!("cannot write {}: {error}", data_dir.join(KNOWN).display()))
    })
}

/// Fails where a catalog was and is no more.
pub(super) fn refuse_lost(data_dir: &Path) -> Result<()> {
    let size = match fs::metadata(data_dir.join(FILE)) {
        Ok(meta) => Some(meta.len()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(damaged(data_dir, format_args!("cannot be looked at: {error}"))),
    };
    let why = match size {
        None => "is missing",
        Some(0) => "is empty",
        Some(_) => return Ok(()),
    };
    let pools = known(data_dir)?.pools;
    if pools.is_empty() {
        return Ok(());
    }
    let names: Vec<String> =
        pools.iter().map(|pool| format!("{} at {}", pool.name, pool.path.display())).collect();
    Err(damaged(data_dir, format_args!("{why}, yet there are the pools {}", names.join(", "))))
}

/// Fails where the file is no catalog, or its pages do not go together. Before anything is written to it.
pub(super) fn refuse_damaged(data_dir: &Path, connection: &Connection) -> Result<()> {
    let version: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    if version == 0 && !known(data_dir)?.pools.is_empty() {
        return Err(damaged(data_dir, "has no tables, yet there are pools"));
    }
    let mut found: Vec<String> = Vec::new();
    let mut check = connection.prepare("PRAGMA integrity_check(5)")?;
    for line in check.query_map([], |row| row.get::<_, String>(0))? {
        found.extend(Some(line?).filter(|line| line != "ok"));
    }
    let mut check = connection.prepare("PRAGMA foreign_key_check")?;
    for table in check.query_map([], |row| row.get::<_, String>(0))?.take(5) {
        found.push(format!("a row of {} refers to nothing", table?));
    }
    if found.is_empty() {
        Ok(())
    } else {
        Err(damaged(data_dir, format_args!("is damaged: {}", found.join("; "))))
    }
}

/// Reads every row once: what cannot be read is better known at the start than in the middle of an operation.
pub(super) fn read_all(tx: &Tx<'_>) -> Result<Known> {
    tx.volumes("", usize::MAX >> 1)?;
    tx.snapshots(None, "", usize::MAX >> 1)?;
    tx.attachments(None, None)?;
    Known::of(tx)
}

impl Catalog {
    /// Brings the list beside the catalog up to date.
    pub async fn remember(&self) -> Result<()> {
        // Held until it is written, so that two changes at once do not leave the older list.
        let remembering = self.0.remembering.clone().lock_owned().await;
        let known = self.read(Known::of).await?;
        let data_dir = self.0.data_dir.clone();
        let writing = tokio::task::spawn_blocking(move || {
            let _remembering = remembering;
            write_known(&data_dir, &known)
        });
        let broke =
            |error| CatalogError::Unwritable(format!("the list of pools and nodes is not written: {error}"));
        writing.await.unwrap_or_else(|error| Err(broke(error)))
    }
}
