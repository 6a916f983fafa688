//! Catalog: the durable state of the server, in SQLite or PostgreSQL. It holds pools, volumes, snapshots, nodes, attachments, and
//! intents (operations that were started and are not finished).
//!
//! SQLite runs in WAL mode with `synchronous=FULL`: a committed write survives a power failure, except for writes by
//! [`Catalog::run_unsynced`]. An intent is committed here before its effect happens anywhere else.

mod altered;
mod attachments;
pub mod backup;
mod budgets;
mod db;
mod group_commit;
pub mod integrity;
mod moves;
mod nodes;
mod pools;
pub mod postgres;
mod records;
mod revisions;
mod schema;
mod served_time;
mod snapshots;
mod suspensions;
mod transfers;
mod volumes;

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rusqlite::{Connection, ErrorCode};

pub use altered::AlteredDisk;
pub use attachments::{AttachmentRow, Blank};
pub use moves::{MoveNote, MoveRow, Side};
pub use nodes::NodeRow;
pub use pools::{InPool, PoolRow};
pub use snapshots::SnapshotRow;
pub use suspensions::{AllSuspensions, Suspended};
pub use transfers::{AdoptionMethod, AdoptionRow, Hold, ImportRow, ReleaseRow};
pub use volumes::{Origin, Reservation, VolumeRow};

use crate::lease::{Lease, NotActive};
use db::Db;
use group_commit::Threads;
use postgres::lead::Lead;

/// Time to wait for another connection's lock.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);
/// Number of prepared statements that a connection keeps.
const STATEMENTS: usize = 512;
/// Suffixes of the files of an SQLite database.
pub const DATABASE_SUFFIXES: [&str; 3] = ["", "-wal", "-shm"];

/// Errors of the catalog.
#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    /// The catalog cannot be opened or was not written by this program.
    #[error("{0}")]
    Unusable(String),
    /// The catalog file is missing or fails the integrity check.
    #[error("{0}")]
    Damaged(String),
    /// The catalog cannot be written: its filesystem is full or read-only.
    #[error(
        "the catalog cannot be written: {0}; free space on the filesystem of the data directory or remount it read-write, \
         then retry"
    )]
    ReadOnly(rusqlite::Error),
    /// A file beside the catalog cannot be written.
    #[error("{0}; free space on the filesystem of the data directory or remount it read-write, then retry")]
    Unwritable(String),
    /// The database cannot be reached, or has ended the connection. Nothing was changed.
    #[error("the catalog's database cannot be used now: {0}; retry")]
    Unreachable(String),
    /// Another server may be active.
    #[error(transparent)]
    NotActive(#[from] NotActive),
    /// Any other error of PostgreSQL.
    #[error("the catalog failed: {0}")]
    Postgres(String),
    /// Any other SQLite error.
    #[error("the catalog failed: {0}")]
    Sqlite(rusqlite::Error),
    /// A row that cannot be decoded.
    #[error("the catalog has a row that cannot be read: {0}")]
    Corrupt(String),
}

impl From<rusqlite::Error> for CatalogError {
    fn from(error: rusqlite::Error) -> Self {
        group_commit::remember_error(&error);
        match error.sqlite_error_code() {
            Some(ErrorCode::ReadOnly | ErrorCode::DiskFull | ErrorCode::CannotOpen) => Self::ReadOnly(error),
            _ => Self::Sqlite(error),
        }
    }
}

impl From<db::Error> for CatalogError {
    fn from(error: db::Error) -> Self {
        match error {
            db::Error::Sqlite(error) => error.into(),
            db::Error::Postgres(error) => postgres::error(&error),
            unfit => Self::Corrupt(unfit.to_string()),
        }
    }
}

/// Result of a catalog operation.
pub type Result<T, E = CatalogError> = std::result::Result<T, E>;

/// The catalog. Cheap to clone.
#[derive(Clone)]
pub struct Catalog(Arc<Inner>);

struct Inner {
    data_dir: Arc<Path>,
    /// Revision at the time of opening.
    revision: u64,
    lease: Lease,
    epoch: Option<i64>,
    /// Held while the list of registered objects is written.
    registered_lock: Arc<tokio::sync::Mutex<()>>,
    // The threads hold the directory lock: two servers on one catalog would undo each other's work.
    threads: Threads,
}

/// A transaction. The methods for each table are in that table's module.
pub struct Tx<'a>(Db<'a>);

impl<'a> Tx<'a> {
    fn of(connection: &'a Connection) -> Self {
        Self(Db::Sqlite(connection))
    }
}

impl Catalog {
    /// Opens or creates the catalog in a data directory and locks the directory against other servers. Waits up to
    /// `timeout` for a terminating server to release the lock.
    pub fn open(data_dir: &Path, timeout: Duration) -> Result<Self> {
        let lock = lock(data_dir, timeout)?;
        integrity::refuse_lost(data_dir)?;
        let connection = connect(&data_dir.join(integrity::CATALOG_FILE)).map_err(|error| match error {
            // SQLite cannot make sense of the file.
            CatalogError::Sqlite(why) => integrity::damaged(data_dir, format_args!("cannot be read: {why}")),
            other => other,
        });
        let mut connection = connection?;
        integrity::refuse_damaged(data_dir, &connection).map_err(|error| match error {
            CatalogError::Sqlite(why) => integrity::damaged(data_dir, format_args!("is damaged: {why}")),
            other => other,
        })?;
        schema::migrate(&mut connection)?;
        let tx = connection.transaction()?;
        let known = integrity::read_all(&Tx::of(&tx)).map_err(|error| match error {
            CatalogError::Sqlite(_) | CatalogError::Corrupt(_) => {
                integrity::damaged(data_dir, format_args!("is damaged: {error}"))
            }
            other => other,
        })?;
        let revision = Tx::of(&tx).revision()?;
        drop(tx);
        integrity::write_registered(data_dir, &known)?;
        let threads = Threads::start(lock, group_commit::writer(connection), || {
            let connection = connect(&data_dir.join(integrity::CATALOG_FILE))?;
            connection.pragma_update(None, "query_only", true)?;
            Ok(group_commit::reader(connection))
        })?;
        Ok(Self::of(data_dir, revision, (Lease::unlimited(), None), threads))
    }

    fn of(data_dir: &Path, revision: u64, (lease, epoch): (Lease, Option<i64>), threads: Threads) -> Self {
        let (data_dir, registered_lock) = (data_dir.into(), Arc::default());
        let inner = Inner { data_dir, revision, lease, epoch, registered_lock, threads };
        Self(Arc::new(inner))
    }

    /// Opens or creates the catalog in the database that this server leads, and locks the data directory as [`Catalog::open`]
    /// does.
    pub fn open_led(data_dir: &Path, timeout: Duration, lead: &Arc<Lead>) -> Result<Self> {
        let lock = lock(data_dir, timeout)?;
        let (known, revision) = postgres::outside_the_runtime(|| postgres::prepare(data_dir, lead.target()))?;
        integrity::write_registered(data_dir, &known)?;
        let mut writer = postgres::commit::Writer::new(lead.clone());
        let write = move |waiting, changes: &_| writer.commit_group(waiting, changes);
        let threads = Threads::start(lock, Box::new(write), || {
            let mut reader = postgres::commit::Reader::new(lead.target().clone());
            Ok(Box::new(move |read| reader.run(read)))
        })?;
        Ok(Self::of(data_dir, revision, (lead.lease().clone(), Some(lead.epoch())), threads))
    }

    /// The catalog of a simulated server, in a database of [`Catalog::in_memory`].
    #[cfg(test)]
    pub(crate) fn simulated(
        connection: Arc<std::sync::Mutex<Connection>>,
        lease: Lease,
        sim: Arc<crate::simulation::Sim>,
    ) -> Result<Self> {
        let revision = Self::look(&connection, |tx: &Tx<'_>| tx.revision())?;
        let threads = Threads::inline(connection, lease.clone(), sim);
        Ok(Self::of(Path::new("/simulated"), revision, (lease, None), threads))
    }

    /// A database in memory for simulated servers.
    #[cfg(test)]
    pub(crate) fn in_memory(fill: impl FnOnce(&Tx<'_>) -> Result<()>) -> Result<Connection> {
        let mut connection = connect(Path::new(":memory:"))?;
        schema::migrate(&mut connection)?;
        let tx = connection.transaction()?;
        fill(&Tx::of(&tx))?;
        tx.commit()?;
        Ok(connection)
    }

    /// Reads a database in memory.
    #[cfg(test)]
    pub(crate) fn look<T>(
        connection: &std::sync::Mutex<Connection>,
        read: impl FnOnce(&Tx<'_>) -> Result<T>,
    ) -> Result<T> {
        let mut open = connection.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let tx = open.transaction()?;
        read(&Tx::of(&tx))
    }

    /// A copy of a database in memory.
    #[cfg(test)]
    pub(crate) fn copy_in_memory(from: &Connection) -> Result<Connection> {
        let mut connection = connect(Path::new(":memory:"))?;
        rusqlite::backup::Backup::new(from, &mut connection)?.step(-1)?;
        Ok(connection)
    }

    /// The lease under which this server may act on disks.
    pub fn lease(&self) -> &Lease {
        &self.0.lease
    }

    /// Number of this server's lead, if several servers may use the catalog.
    pub fn epoch(&self) -> Option<i64> {
        self.0.epoch
    }

    /// Creates a catalog at a path that must not exist, without locking the directory; not for serving. Returns the
    /// list of registered objects to be written beside it.
    pub fn build(path: &Path, fill: impl FnOnce(&Tx<'_>) -> Result<()>) -> Result<integrity::Registered> {
        let mut connection = connect(path)?;
        schema::migrate(&mut connection)?;
        let known = {
            let tx = connection.transaction()?;
            fill(&Tx::of(&tx))?;
            let known = integrity::read_all(&Tx::of(&tx))?;
            tx.commit()?;
            known
        };
        // One file without a WAL beside it, so that it can be renamed.
        connection.pragma_update(None, "journal_mode", "delete")?;
        connection.close().map_err(|(_, error)| error)?;
        Ok(known)
    }

    /// Catalog revision at the time of opening.
    pub fn revision(&self) -> u64 {
        self.0.revision
    }

    /// Number of commits since the start that changed rows. If it is the same before a read and later, the read still
    /// shows the current rows.
    pub fn changes(&self) -> u64 {
        self.0.threads.changes()
    }

    /// The data directory.
    pub fn data_dir(&self) -> &Path {
        &self.0.data_dir
    }

    /// Runs one transaction. It is committed if `work` succeeds and rolled back if it fails; the commit is durable
    /// when this returns. The commit may be shared with other transactions (group commit), so `work` must be short.
    pub async fn run<T, E, F>(&self, work: F) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<CatalogError> + Send + 'static,
        F: FnOnce(&Tx<'_>) -> Result<T, E> + Send + 'static,
    {
        self.0.threads.write(false, work).await
    }

    /// Like [`Catalog::run`], but the commit becomes durable only with the next durable commit. Only for data that
    /// may be lost and would be written again with the same value.
    pub async fn run_unsynced<T, E, F>(&self, work: F) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<CatalogError> + Send + 'static,
        F: FnOnce(&Tx<'_>) -> Result<T, E> + Send + 'static,
    {
        self.0.threads.write(true, work).await
    }

    /// Runs a read-only transaction on a consistent snapshot of committed data. It does not wait for writers.
    pub async fn read<T, E, F>(&self, work: F) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<CatalogError> + Send + 'static,
        F: FnOnce(&Tx<'_>) -> Result<T, E> + Send + 'static,
    {
        self.0.threads.read(work).await
    }

    /// Checks that the catalog is writable by a real write that changes nothing.
    pub async fn probe(&self) -> Result<()> {
        self.run(|tx| {
            // With PostgreSQL, each transaction writes its number.
            if let Db::Sqlite(connection) = tx.0 {
                let version: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
                connection.pragma_update(None, "user_version", version)?;
            }
            Ok(())
        })
        .await
    }
}

/// Locks a data directory against other programs until the returned file is dropped. Waits up to `timeout` for a
/// terminating server.
pub fn lock(data_dir: &Path, timeout: Duration) -> Result<File> {
    let unusable = |what: &str, why: &dyn std::fmt::Display| {
        CatalogError::Unusable(format!("{what} {}: {why}", data_dir.display()))
    };
    std::fs::create_dir_all(data_dir).map_err(|e| unusable("cannot create the data directory", &e))?;
    let lock = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(data_dir.join("lock"))
        .map_err(|e| unusable("cannot open the lock file in", &e))?;
    let start = Instant::now();
    while let Err(error) = lock.try_lock() {
        match error {
            // File locks have no wait with a timeout, so poll.
            TryLockError::WouldBlock if start.elapsed() < timeout => {
                std::thread::sleep(Duration::from_millis(20));
            }
            TryLockError::WouldBlock => {
                return Err(unusable("another server runs on", &"stop that one first"));
            }
            TryLockError::Error(error) => return Err(unusable("cannot lock", &error)),
        }
    }
    Ok(lock)
}

fn connect(path: &Path) -> Result<Connection> {
    let connection = Connection::open(path)?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    connection.pragma_update(None, "journal_mode", "wal")?;
    connection.pragma_update(None, "synchronous", "full")?;
    connection.pragma_update(None, "foreign_keys", true)?;
    // More than there are queries: each is prepared once.
    connection.set_prepared_statement_cache_capacity(STATEMENTS);
    Ok(connection)
}

/// Path of a file beside a database, such as its WAL.
pub fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Parses a text column.
fn parse<T: std::str::FromStr>(column: &str, text: &str) -> Result<T>
where
    T::Err: std::fmt::Display,
{
    text.parse().map_err(|e| CatalogError::Corrupt(format!("{column} {text:?}: {e}")))
}

/// Parses a JSON column.
fn from_json<T: serde::de::DeserializeOwned>(column: &str, text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|e| CatalogError::Corrupt(format!("{column} {text:?}: {e}")))
}

fn from_word<T: serde::de::DeserializeOwned>(column: &str, word: &str) -> Result<T> {
    serde_json::from_value(serde_json::Value::String(word.to_owned()))
        .map_err(|e| CatalogError::Corrupt(format!("{column} {word:?}: {e}")))
}

fn to_json<T: serde::Serialize>(value: &T) -> Result<String> {
    serde_json::to_string(value).map_err(|e| CatalogError::Corrupt(e.to_string()))
}

#[cfg(test)]
mod tests;
