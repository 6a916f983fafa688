//! Copies into new volumes and snapshots: by reflink where blocks can be shared, otherwise a block-by-block copy that
//! reports its progress and is cancelled by a deletion or a shutdown.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use infra_api::{ProblemCode, VolumeId};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::{ObjectFiles, Receivers};
use crate::catalog::{PoolRow, Tx};
use crate::engine::adopt::refuse_changed;
use crate::engine::{Clearance, CopyProgress, Engine, EngineError, Method, Object, Record};
use crate::hypervisor::DiskSource;
use crate::safety::Check;
use crate::service::lookups::refuse_writers;
use crate::service::pools::Engines;
use crate::service::problems::{Failure, Result};

/// Number of concurrent block-by-block copies; others wait.
const MAX_COPIES: usize = 2;

/// What is copied.
#[derive(Debug, Clone)]
pub(in crate::service) enum Origin {
    /// An object of a pool, by this method.
    Object {
        /// Its pool.
        pool: Box<PoolRow>,
        /// The object.
        object: Object,
        /// How it is copied.
        method: Method,
    },
    /// A raw file that is no object.
    File {
        /// Its path.
        path: PathBuf,
        /// Its inode number.
        inode: u64,
    },
    /// A qcow2 image, whose content is copied.
    Image {
        /// Its path.
        path: PathBuf,
        /// Its inode number.
        inode: u64,
    },
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Object { object, .. } => object.fmt(f),
            Self::File { path, .. } => write!(f, "the file {}", path.display()),
            Self::Image { path, .. } => write!(f, "the image {}", path.display()),
        }
    }
}

/// Copies of volumes and snapshots, and streams of imports: all that fills new objects for long.
pub(in crate::service) struct Copies {
    engines: Arc<Engines>,
    files: Arc<ObjectFiles>,
    running: Mutex<HashMap<Object, Arc<CopyProgress>>>,
    permits: Semaphore,
    receivers: Receivers,
    /// Bytes that hypervisors have copied of the disks of moving volumes.
    mirrored: Mutex<HashMap<VolumeId, u64>>,
}

impl Copies {
    pub(in crate::service) fn new(engines: Arc<Engines>, files: Arc<ObjectFiles>) -> Self {
        let (running, permits) = (Mutex::default(), Semaphore::new(MAX_COPIES));
        Self { engines, files, running, permits, receivers: Receivers::default(), mirrored: Mutex::default() }
    }

    fn table(&self) -> MutexGuard<'_, HashMap<Object, Arc<CopyProgress>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The streams of imports that are being received.
    pub(in crate::service) fn receivers(&self) -> &Receivers {
        &self.receivers
    }

    /// Bytes copied so far, if a copy of this object is running.
    pub(in crate::service) fn copied(&self, object: &Object) -> Option<u64> {
        self.table().get(object).map(|copying| copying.copied())
    }

    /// Changes the rate of a running copy.
    pub(in crate::service) fn set_rate(&self, object: &Object, rate: Option<u64>) {
        if let Some(copying) = self.table().get(object) {
            copying.set_rate(rate);
        }
    }

    fn mirrored(&self) -> MutexGuard<'_, HashMap<VolumeId, u64>> {
        self.mirrored.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets how much a hypervisor has copied of a moving volume's disk; `None` if no copy is running.
    pub(in crate::service) fn set_mirrored(&self, id: &VolumeId, bytes: Option<u64>) {
        match bytes {
            Some(bytes) => self.mirrored().insert(id.clone(), bytes),
            None => self.mirrored().remove(id),
        };
    }

    /// Bytes copied so far of a volume that is being moved, if a copy is running.
    pub(in crate::service) fn moved(&self, id: &VolumeId) -> Option<u64> {
        let mirrored = self.mirrored().get(id).copied();
        mirrored.or_else(|| self.copied(&Object::Volume(id.clone())))
    }

    pub(in crate::service) fn is_running(&self, object: &Object) -> bool {
        self.table().contains_key(object)
    }

    /// Cancels the copy of an object, if one is running.
    pub(in crate::service) fn cancel(&self, object: &Object) {
        if let Some(copying) = self.table().get(object) {
            copying.cancel();
        }
    }

    /// Cancels all copies and prevents new ones, which the next start repeats. Ends all streams of imports.
    pub(in crate::service) fn cancel_all(&self) {
        self.permits.close();
        self.receivers.end_all();
        self.table().values().for_each(|copying| copying.cancel());
    }

    /// Creates an object with the bytes of another. Its intent is in the catalog. False if it was cancelled.
    pub(in crate::service) async fn copy_into(
        &self,
        pool: &PoolRow,
        origin: Origin,
        bytes: u64,
        record: Record,
    ) -> Result<bool> {
        self.copy_at_rate(pool, origin, bytes, record, None).await
    }

    /// The same, with at most this many bytes per second.
    pub(in crate::service) async fn copy_at_rate(
        &self,
        pool: &PoolRow,
        origin: Origin,
        bytes: u64,
        record: Record,
        rate: Option<u64>,
    ) -> Result<bool> {
        let Some(object) = record.object() else {
            return Err(Failure::new(ProblemCode::Internal, "a pool cannot be the target of a copy"));
        };
        let object = &object;
        let copying = Arc::new(CopyProgress::default());
        copying.set_rate(rate);
        self.table().insert(object.clone(), copying.clone());
        let result = match self.files.clear(pool, object.clone(), record.identity()).await {
            Ok(cleared) => Ok(self.run_copy(cleared, pool, origin, bytes, record, copying).await),
            Err(failure) => Err(failure),
        };
        self.table().remove(object);
        match result? {
            Ok(()) => Ok(true),
            Err(EngineError::Cancelled) => Ok(false),
            Err(error) => {
                let mut failure = Failure::from(error);
                failure.0.detail = format!("{object} in pool {}: {}", pool.name, failure.0.detail);
                Err(failure)
            }
        }
    }

    async fn run_copy(
        &self,
        cleared: Clearance,
        pool: &PoolRow,
        origin: Origin,
        bytes: u64,
        record: Record,
        copying: Arc<CopyProgress>,
    ) -> Result<(), EngineError> {
        let object = cleared.object().clone();
        let _permit = match &origin {
            Origin::Object { method: Method::Reflink, .. } => None,
            Origin::Object { method: Method::Copy, .. } | Origin::File { .. } | Origin::Image { .. } => {
                Some(self.permits.acquire().await.map_err(|_| EngineError::Cancelled)?)
            }
        };
        let (start, from) = (Instant::now(), origin.to_string());
        match origin {
            Origin::Object { pool: from, object, method } => {
                let origin = self.engines.of(&from);
                self.engines
                    .run::<_, EngineError, _>(pool, move |engine| {
                        // Right before the copy: a layer that somebody adds has what a VM writes from then on.
                        let source = origin.locate(&object)?;
                        engine.create_from(&cleared, &source, bytes, method, &record, &copying)
                    })
                    .await?;
            }
            Origin::File { path, inode } => {
                self.engines
                    .run::<_, EngineError, _>(pool, move |engine| {
                        copy_file(engine, &cleared, &path, inode, (bytes, &record, &copying))
                    })
                    .await?;
            }
            Origin::Image { path, inode } => {
                self.engines
                    .run::<_, EngineError, _>(pool, move |engine| {
                        engine.create_from_image(&cleared, &path, inode, bytes, &record, &copying)
                    })
                    .await?;
            }
        }
        tracing::info!(%object, %from, pool = %pool.name, bytes, took = ?start.elapsed(), "copy completed");
        Ok(())
    }
}

/// Copies a raw file that is no object: it shares its blocks, if the pool and its filesystem can do that.
fn copy_file(
    engine: &dyn Engine,
    cleared: &Clearance,
    path: &Path,
    inode: u64,
    (bytes, record, copying): (u64, &Record, &CopyProgress),
) -> Result<(), EngineError> {
    refuse_changed(path, inode, bytes)?;
    let source = DiskSource::File(path.to_owned());
    match engine.create_from(cleared, &source, bytes, Method::Reflink, record, copying) {
        Err(EngineError::Io { .. } | EngineError::Unsupported(_)) => {
            engine.remove_incomplete(cleared)?;
            engine.create_from(cleared, &source, bytes, Method::Copy, record, copying)
        }
        result => result,
    }
}

/// Refuses a block-by-block copy of a volume while a VM may write to it: the copy would be inconsistent.
pub(in crate::service) fn refuse_copy_while_writable(
    tx: &Tx<'_>,
    volume: &VolumeId,
    why: &str,
) -> Result<()> {
    if !Check::ConsistentCopy.applies() {
        return Ok(());
    }
    refuse_writers(tx, volume, |nodes| {
        format!(
            "the volume {volume} is attached writable to {nodes}, and {why}, so it can only be copied block by block, which is \
             not consistent while it is written; detach it first"
        )
    })
}
