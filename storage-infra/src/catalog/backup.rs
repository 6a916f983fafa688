//! Backups of the catalog as SQLite databases: copies by SQLite's online backup while a server may be writing, their
//! verification, and the catalog to restore from one.
//!
//! A backup is one file. Its table `backup` says where it comes from; a catalog has no such table.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use infra_api::{PoolName, VolumeId};
use rusqlite::backup::{Backup, StepResult};
use rusqlite::{Connection, OpenFlags, OptionalExtension};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::integrity::{self, CATALOG_FILE, Registered};
use super::{AttachmentRow, CatalogError, PoolRow, Result, SnapshotRow, Tx, VolumeRow, connect, schema};

/// More rows than any catalog has.
const ALL: usize = usize::MAX >> 1;

/// Where a backup comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Origin {
    /// Time of the backup, RFC 3339.
    pub created_at: String,
    /// Version of the program that made it.
    pub program_version: String,
    /// Host of the data directory.
    pub host: String,
    /// The data directory.
    pub data_dir: PathBuf,
    /// Whether a server made it by its schedule. Only such backups are removed by a server.
    pub scheduled: bool,
}

impl Origin {
    /// Whether both are backups of the same data directory.
    pub fn is_of_the_same_catalog(&self, other: &Self) -> bool {
        (&self.host, &self.data_dir) == (&other.host, &other.data_dir)
    }
}

/// What a catalog or a backup contains.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// Version of the schema.
    pub schema_version: usize,
    /// The catalog's revision.
    pub revision: u64,
    /// Number of pools.
    pub pools: usize,
    /// Number of volumes.
    pub volumes: usize,
    /// Number of snapshots.
    pub snapshots: usize,
    /// Number of nodes.
    pub nodes: usize,
    /// Number of attachments.
    pub attachments: usize,
}

/// Rows of a catalog to restore.
#[derive(Debug)]
pub struct Content {
    /// The catalog's revision.
    pub revision: u64,
    /// Pools.
    pub pools: Vec<PoolRow>,
    /// Volumes, each with its revision.
    pub volumes: Vec<(VolumeRow, u64)>,
    /// Snapshots.
    pub snapshots: Vec<SnapshotRow>,
    /// Attachments.
    pub attachments: Vec<AttachmentRow>,
    /// Pools and nodes as in the list beside the catalog.
    pub registered: Registered,
}

/// Writes a backup of the catalog in a data directory to an existing empty file. A server may use the catalog.
///
/// The first copy is made in memory: a slow target must not hold a snapshot of the catalog, which would let its WAL grow.
pub fn write(data_dir: &Path, target: &Path, origin: &Origin) -> Result<()> {
    let source = data_dir.join(CATALOG_FILE);
    if !source.is_file() {
        let why = format!("there is no catalog at {}; use the server's data directory", source.display());
        return Err(CatalogError::Unusable(why));
    }
    let mut memory = Connection::open_in_memory()?;
    copy(&read_only(&source)?, &mut memory)?;
    let faults = integrity::faults(&memory)?;
    if !faults.is_empty() {
        return Err(CatalogError::Damaged(format!(
            "the catalog {} is damaged: {}; no backup was written. Keep earlier backups, stop the server, and rebuild the \
             catalog from the pools with `storage-infra recover`",
            source.display(),
            faults.join("; ")
        )));
    }
    stamp(&memory, origin)?;
    let mut file = Connection::open(target)?;
    copy(&memory, &mut file)?;
    // One file without a WAL beside it.
    file.pragma_update(None, "journal_mode", "delete")?;
    file.close().map_err(|(_, error)| error.into())
}

/// Verifies a backup of the current schema version: reads every row. Changes nothing.
pub fn verify(file: &Path) -> Result<Summary> {
    let mut connection = read_only(file)?;
    refuse_faults(file, &connection)?;
    let tx = connection.transaction()?;
    integrity::read_all(&Tx::of(&tx))?;
    summary(&tx)
}

/// Where a backup comes from. `None` for other files.
pub fn origin(file: &Path) -> Result<Option<Origin>> {
    read_origin(&read_only(file)?)
}

/// Revision of the catalog that a backup contains.
pub fn revision(file: &Path) -> Result<u64> {
    let mut connection = read_only(file)?;
    let tx = connection.transaction()?;
    Tx::of(&tx).revision()
}

/// Whether a catalog contains any pool or node; true if it cannot be read.
pub fn has_content(catalog: &Path) -> bool {
    let count = |connection: Connection| -> Result<usize> {
        let sql = "SELECT (SELECT count(*) FROM pools) + (SELECT count(*) FROM nodes)";
        Ok(connection.query_row(sql, [], |row| row.get(0))?)
    };
    let is_empty = fs::metadata(catalog).map_or(true, |meta| meta.len() == 0);
    !is_empty && read_only(catalog).and_then(count).map_or(true, |rows| rows > 0)
}

/// Writes the catalog of a backup to a path that must not exist, with the current schema, and verifies it. The backup
/// remains unchanged.
pub fn restore_to(backup: &Path, fresh: &Path) -> Result<(Content, Summary, Option<Origin>)> {
    for suffix in ["", "-wal"] {
        let from = super::beside(backup, suffix);
        if from.exists() {
            copy_file(&from, &super::beside(fresh, suffix))?;
        }
    }
    let mut connection = connect(fresh).map_err(|error| unusable(backup, &error))?;
    refuse_faults(backup, &connection)?;
    let origin = read_origin(&connection)?;
    connection.execute_batch("DROP TABLE IF EXISTS backup").map_err(|error| unusable(backup, &error))?;
    schema::migrate(&mut connection)?;
    let (content, summary) = read(&mut connection).map_err(|error| unusable(backup, &error))?;
    connection.pragma_update(None, "journal_mode", "delete")?;
    connection.close().map_err(|(_, error)| error)?;
    Ok((content, summary, origin))
}

/// Marks pools and volumes of a catalog that no server uses as older than their on-disk records.
pub fn mark_stale(catalog: &Path, stale: &BTreeMap<PoolName, Vec<VolumeId>>) -> Result<()> {
    let mut connection = Connection::open(catalog)?;
    let tx = connection.transaction()?;
    stale.iter().try_for_each(|(pool, volumes)| Tx::of(&tx).mark_stale(pool, volumes))?;
    Ok(tx.commit()?)
}

fn read(connection: &mut Connection) -> Result<(Content, Summary)> {
    let tx = connection.transaction()?;
    let rows = Tx::of(&tx);
    let revision_of = |row: VolumeRow| -> Result<_> {
        let revision = rows.volume_revision(&row.id)?.unwrap_or(0);
        Ok((row, revision))
    };
    let content = Content {
        revision: rows.revision()?,
        pools: rows.pools()?,
        volumes: rows.volumes(None, "", ALL)?.into_iter().map(revision_of).collect::<Result<_>>()?,
        snapshots: rows.snapshots(None, None, "", ALL)?,
        attachments: rows.attachments(None, None)?,
        registered: integrity::read_all(&rows)?,
    };
    Ok((content, summary(&tx)?))
}

fn copy_file(from: &Path, to: &Path) -> Result<()> {
    let copy = || -> io::Result<()> {
        let mut fresh = File::options().write(true).create_new(true).mode(0o600).open(to)?;
        io::copy(&mut File::open(from)?, &mut fresh)?;
        fresh.sync_all()
    };
    copy().map_err(|error| {
        CatalogError::Unusable(format!("cannot copy {} to {}: {error}", from.display(), to.display()))
    })
}

fn read_only(path: &Path) -> Result<Connection> {
    let connection = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY)
        .map_err(|error| CatalogError::Unusable(format!("cannot open {}: {error}", path.display())))?;
    connection.busy_timeout(super::BUSY_TIMEOUT)?;
    Ok(connection)
}

fn copy(from: &Connection, to: &mut Connection) -> Result<()> {
    match Backup::new(from, to)?.step(-1)? {
        StepResult::Done => Ok(()),
        state => {
            Err(CatalogError::Unusable(format!("the copy of the catalog ended in state {state:?}; retry")))
        }
    }
}

fn stamp(connection: &Connection, origin: &Origin) -> Result<()> {
    connection
        .execute_batch("DROP TABLE IF EXISTS backup; CREATE TABLE backup (origin TEXT NOT NULL) STRICT")?;
    connection.execute("INSERT INTO backup VALUES (?1)", [super::to_json(origin)?])?;
    Ok(())
}

fn read_origin(connection: &Connection) -> Result<Option<Origin>> {
    let sql = "SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name = 'backup'";
    if connection.query_row(sql, [], |row| row.get::<_, u64>(0))? == 0 {
        return Ok(None);
    }
    let text = connection.query_row("SELECT origin FROM backup", [], |row| row.get::<_, String>(0));
    text.optional()?.map(|text| super::from_json("backup.origin", &text)).transpose()
}

fn summary(connection: &Connection) -> Result<Summary> {
    let count = |table: &str| -> rusqlite::Result<usize> {
        connection.query_row(&format!("SELECT count(*) FROM {table}"), [], |row| row.get(0))
    };
    Ok(Summary {
        schema_version: connection.query_row("PRAGMA user_version", [], |row| row.get(0))?,
        revision: Tx::of(connection).revision()?,
        pools: count("pools")?,
        volumes: count("volumes")?,
        snapshots: count("snapshots")?,
        nodes: count("nodes")?,
        attachments: count("attachments")?,
    })
}

/// Fails if a backup is no catalog, is damaged, or has a newer schema.
fn refuse_faults(file: &Path, connection: &Connection) -> Result<()> {
    let read = |error: CatalogError| unusable(file, &error);
    let version = schema::supported_version(connection).map_err(read)?;
    if version == 0 {
        return Err(unusable(file, &"it has no tables"));
    }
    let faults = integrity::faults(connection).map_err(read)?;
    if faults.is_empty() {
        Ok(())
    } else {
        Err(unusable(file, &format!("it is damaged: {}", faults.join("; "))))
    }
}

fn unusable(file: &Path, why: &dyn std::fmt::Display) -> CatalogError {
    CatalogError::Unusable(format!(
        "{} is not a usable backup of a catalog: {why}; use another backup, or rebuild the catalog from the pools with \
         `storage-infra recover`",
        file.display()
    ))
}

/// The directory and host as a short stable text, for the names of backups.
pub fn tag(origin: &Origin) -> String {
    let text = format!("{}\n{}", origin.host, origin.data_dir.display());
    Uuid::new_v5(&Uuid::NAMESPACE_URL, text.as_bytes()).simple().to_string()[..8].to_owned()
}
