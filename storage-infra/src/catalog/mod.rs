//! What the server must not forget: pools, volumes, nodes, attachments, and what was meant to be done to them.
//!
//! SQLite in WAL mode with `synchronous=FULL`: when a write has returned, it survives a power cut. An intent is
//! written here before its effect happens anywhere else.

mod attachments;
mod nodes;
mod pools;
mod schema;
mod volumes;

use std::fs::{File, TryLockError};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rusqlite::{Connection, ErrorCode, Transaction, TransactionBehavior};

pub use attachments::AttachmentRow;
pub use nodes::NodeRow;
pub use pools::PoolRow;
pub use volumes::{VolumeRow, VolumeUse};

/// Why the catalog did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    /// The catalog cannot be opened or is not one of ours.
    #[error("{0}")]
    Unusable(String),
    /// The catalog cannot be written: its filesystem is full or read-only.
    #[error("the catalog cannot be written: {0}")]
    ReadOnly(rusqlite::Error),
    /// Anything else that SQLite says.
    #[error("the catalog failed: {0}")]
    Sqlite(rusqlite::Error),
    /// A row that makes no sense.
    #[error("the catalog has a row that cannot be read: {0}")]
    Corrupt(String),
}

impl From<rusqlite::Error> for CatalogError {
    fn from(error: rusqlite::Error) -> Self {
        match error.sqlite_error_code() {
            Some(ErrorCode::ReadOnly | ErrorCode::DiskFull | ErrorCode::CannotOpen) => Self::ReadOnly(error),
            _ => Self::Sqlite(error),
        }
    }
}

type Result<T, E = CatalogError> = std::result::Result<T, E>;

/// The catalog. Cheap to clone.
#[derive(Clone)]
pub struct Catalog {
    connection: Arc<Mutex<Connection>>,
    // Held for as long as the catalog is open: two servers on one catalog would undo each other's work.
    _lock: Arc<File>,
}

/// One transaction; the methods for each table are in the table's own file.
pub struct Tx<'a>(Transaction<'a>);

impl Catalog {
    /// Opens or creates the catalog in a data directory, and keeps every other server out of it. One that is just
    /// being killed has so long to let go.
    pub fn open(data_dir: &Path, patience: Duration) -> Result<Self> {
        let unusable = |what: &str, why: &dyn std::fmt::Display| {
            CatalogError::Unusable(format!("{what} {}: {why}", data_dir.display()))
        };
        std::fs::create_dir_all(data_dir).map_err(|e| unusable("cannot make the data directory", &e))?;
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(data_dir.join("lock"))
            .map_err(|e| unusable("cannot open the lock file in", &e))?;
        let start = Instant::now();
        while let Err(error) = lock.try_lock() {
            match error {
                // A file lock can't be waited for with a deadline, so it is tried again.
                TryLockError::WouldBlock if start.elapsed() < patience => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                TryLockError::WouldBlock => {
                    return Err(unusable("another server runs on", &"stop that one first"));
                }
                TryLockError::Error(error) => return Err(unusable("cannot lock", &error)),
            }
        }
        let mut connection = Connection::open(data_dir.join("catalog.sqlite"))?;
        connection.busy_timeout(Duration::from_secs(5))?;
        connection.pragma_update(None, "journal_mode", "wal")?;
        connection.pragma_update(None, "synchronous", "full")?;
        connection.pragma_update(None, "foreign_keys", true)?;
        schema::migrate(&mut connection)?;
        Ok(Self { connection: Arc::new(Mutex::new(connection)), _lock: Arc::new(lock) })
    }

    /// Runs one transaction on a blocking thread. It is committed when `work` succeeds, and undone when it fails.
    pub async fn run<T, E, F>(&self, work: F) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<CatalogError> + Send + 'static,
        F: FnOnce(&Tx<'_>) -> Result<T, E> + Send + 'static,
    {
        let connection = self.connection.clone();
        let task = tokio::task::spawn_blocking(move || {
            // A panic inside a transaction rolls it back, so the connection stays good.
            let mut connection = connection.lock().unwrap_or_else(PoisonError::into_inner);
            let tx = connection
                .transaction_with_behavior(TransactionBehavior::Immediate)
                .map_err(CatalogError::from)?;
            let tx = Tx(tx);
            let value = work(&tx)?;
            tx.0.commit().map_err(CatalogError::from)?;
            Ok(value)
        });
        match task.await {
            Ok(result) => result,
            Err(error) => {
                Err(CatalogError::Unusable(format!("a catalog transaction broke off: {error}")).into())
            }
        }
    }

    /// Whether the catalog can be written: really writes, without changing anything.
    pub async fn probe(&self) -> Result<()> {
        self.run(|tx| {
            let version: i64 = tx.0.query_row("PRAGMA user_version", [], |row| row.get(0))?;
            tx.0.pragma_update(None, "user_version", version)?;
            Ok(())
        })
        .await
    }
}

/// Reads a column that one of our own types wrote.
fn parse<T: std::str::FromStr>(column: &str, text: &str) -> Result<T>
where
    T::Err: std::fmt::Display,
{
    text.parse().map_err(|e| CatalogError::Corrupt(format!("{column} {text:?}: {e}")))
}

/// Reads a column that holds JSON, or a bare word of one of our enums.
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
mod tests {
    use infra_api::*;
    use uuid::Uuid;

    use super::*;

    fn volume(id: &str) -> VolumeRow {
        VolumeRow {
            id: VolumeId::new(id).unwrap(),
            pool: PoolName::new("p").unwrap(),
            capacity: 1 << 20,
            grow_to: None,
            disk_uuid: Uuid::new_v4(),
            state: VolumeState::Ready,
            spec: VolumeSpec {
                capacity_bytes: 1,
                limit_bytes: None,
                placement: Placement::default(),
                labels: Labels::new(),
            },
            created_at: "2026-01-01T00:00:00Z".into(),
        }
    }

    fn attachment(id: &str, volume: &VolumeRow, node: Uuid, access: Access) -> AttachmentRow {
        AttachmentRow {
            id: AttachmentId::new(id).unwrap(),
            volume: volume.id.clone(),
            node,
            read_only: access == Access::MultiNodeReadOnly,
            access,
            state: AttachmentState::Attaching,
            message: None,
            created_at: "2026-01-01T00:00:00Z".into(),
        }
    }

    async fn catalog(dir: &Path, volume: &VolumeRow, nodes: &[Uuid]) -> Catalog {
        let catalog = Catalog::open(dir, Duration::ZERO).unwrap();
        let (volume, nodes) = (volume.clone(), nodes.to_vec());
        catalog
            .run::<_, CatalogError, _>(move |tx| {
                tx.insert_pool(&PoolRow {
                    name: volume.pool.clone(),
                    uuid: Uuid::new_v4(),
                    spec: PoolSpec {
                        engine: EngineKind::File,
                        path: "/p".into(),
                        labels: Labels::new(),
                        cordoned: false,
                    },
                    marked: true,
                })?;
                tx.insert_volume(&volume)?;
                for uuid in nodes {
                    let spec = NodeSpec {
                        name: "n".into(),
                        hypervisor: "h".into(),
                        zone: None,
                        labels: Labels::new(),
                    };
                    tx.put_node(&NodeRow { uuid, spec })?;
                }
                Ok(())
            })
            .await
            .unwrap();
        catalog
    }

    #[tokio::test]
    async fn the_schema_itself_refuses_a_second_writer() {
        let dir = tempfile::tempdir().unwrap();
        let v = volume("v");
        let (a, b) = (Uuid::new_v4(), Uuid::new_v4());
        let catalog = catalog(dir.path(), &v, &[a, b]).await;
        let insert =
            |row: AttachmentRow| catalog.run::<_, CatalogError, _>(move |tx| tx.insert_attachment(&row));
        insert(attachment("one", &v, a, Access::SingleNode)).await.unwrap();
        insert(attachment("two", &v, b, Access::SingleNode)).await.unwrap_err();
        insert(attachment("three", &v, b, Access::MultiNodeReadOnly)).await.unwrap_err();
        let id = AttachmentId::new("one").unwrap();
        catalog.run::<_, CatalogError, _>(move |tx| tx.delete_attachment(&id)).await.unwrap();
        insert(attachment("four", &v, a, Access::MultiNodeReadOnly)).await.unwrap();
        insert(attachment("five", &v, b, Access::MultiNodeReadOnly)).await.unwrap();
    }

    #[tokio::test]
    async fn a_volume_row_goes_only_when_it_is_deleting_and_not_attached() {
        let dir = tempfile::tempdir().unwrap();
        let v = volume("v");
        let node = Uuid::new_v4();
        let catalog = catalog(dir.path(), &v, &[node]).await;
        let row = attachment("one", &v, node, Access::SingleNode);
        catalog.run::<_, CatalogError, _>(move |tx| tx.insert_attachment(&row)).await.unwrap();
        let remove = |id: VolumeId| catalog.run::<_, CatalogError, _>(move |tx| tx.delete_volume(&id));
        remove(v.id.clone()).await.unwrap_err();
        let id = v.id.clone();
        catalog
            .run::<_, CatalogError, _>(move |tx| tx.set_volume_state(&id, VolumeState::Deleting))
            .await
            .unwrap();
        remove(v.id.clone()).await.unwrap_err();
        let id = AttachmentId::new("one").unwrap();
        catalog.run::<_, CatalogError, _>(move |tx| tx.delete_attachment(&id)).await.unwrap();
        remove(v.id).await.unwrap();
    }

    #[tokio::test]
    async fn what_failed_halfway_leaves_nothing_and_a_second_server_is_kept_out() {
        let dir = tempfile::tempdir().unwrap();
        let v = volume("v");
        let catalog = catalog(dir.path(), &v, &[]).await;
        let id = v.id.clone();
        catalog
            .run::<(), CatalogError, _>(move |tx| {
                tx.set_volume_state(&id, VolumeState::Deleting)?;
                Err(CatalogError::Corrupt("stop".into()))
            })
            .await
            .unwrap_err();
        let id = v.id.clone();
        let found = catalog.run::<_, CatalogError, _>(move |tx| tx.volume(&id)).await.unwrap().unwrap();
        assert_eq!(found.state, VolumeState::Ready);
        catalog.probe().await.unwrap();
        let error = Catalog::open(dir.path(), Duration::ZERO).err().unwrap().to_string();
        assert!(error.contains("another server"), "{error}");
        drop(catalog);
        Catalog::open(dir.path(), Duration::ZERO).unwrap();
    }
}
