//! Snapshots: create, list, delete.

mod take;

use std::sync::Arc;
use std::time::Duration;

use infra_api::{
    Change, EventKind, List, ObjectKind, Problem, ProblemCode, Snapshot, SnapshotId, SnapshotSpec, VolumeId,
    VolumeState,
};
use tokio::sync::oneshot;

use super::core::Core;
use super::disks::Comparison;
use super::files::{Copies, ObjectFiles};
use super::lookups;
use super::pools::{Engines, PoolCapacity};
use super::problems::{Failure, Result};
use crate::audit;
use crate::catalog::{SnapshotRow, Tx};
use crate::engine::Object;
use crate::scope::{Deletion, Scope};

/// Maximum number of snapshots in one page of a list.
const PAGE: usize = 1000;

/// The snapshots.
pub struct Snapshots {
    core: Arc<Core>,
    engines: Arc<Engines>,
    capacity: Arc<PoolCapacity>,
    files: Arc<ObjectFiles>,
    copies: Arc<Copies>,
    comparison: Arc<Comparison>,
}

impl Snapshots {
    pub(super) fn new(
        core: Arc<Core>,
        engines: Arc<Engines>,
        capacity: Arc<PoolCapacity>,
        files: Arc<ObjectFiles>,
        copies: Arc<Copies>,
        comparison: Arc<Comparison>,
    ) -> Self {
        Self { core, engines, capacity, files, copies, comparison }
    }

    /// One snapshot.
    pub async fn get(&self, scope: &Scope, id: &SnapshotId) -> Result<Snapshot> {
        let (scope, id) = (scope.clone(), id.clone());
        let row = self.core.catalog().read(move |tx| lookups::snapshot_in(tx, &scope, &id)).await?;
        Ok(self.to_snapshot(row))
    }

    /// One page of snapshots, of one volume or of all, with IDs after `after`.
    pub async fn list(
        &self,
        scope: &Scope,
        volume: Option<VolumeId>,
        limit: Option<usize>,
        after: String,
    ) -> Result<List<Snapshot>> {
        let account = scope.account().cloned();
        let limit = limit.filter(|limit| *limit > 0).unwrap_or(PAGE).min(PAGE);
        let mut rows = self
            .core
            .catalog()
            .read(move |tx| -> Result<_> {
                Ok(tx.snapshots(account.as_ref(), volume.as_ref(), &after, limit + 1)?)
            })
            .await?;
        let more = rows.len() > limit;
        rows.truncate(limit);
        let next = rows.last().filter(|_| more).map(|row| row.id.to_string());
        Ok(List { items: rows.into_iter().map(|row| self.to_snapshot(row)).collect(), next })
    }

    fn to_snapshot(&self, row: SnapshotRow) -> Snapshot {
        let copied = self.copies.copied(&Object::Snapshot(row.id.clone()));
        Snapshot {
            id: row.id,
            volume: row.volume,
            capacity_bytes: row.capacity,
            pool: row.pool,
            state: row.state,
            copied_bytes: copied.filter(|_| row.copying && row.state == VolumeState::Creating),
            owner: row.owner,
            labels: row.labels,
            created_at: row.created_at,
        }
    }

    /// Takes a snapshot of a volume, or returns the existing one if the request is a repetition. True if it is new.
    /// Waits at most `wait`; the operation continues.
    pub async fn put(
        self: &Arc<Self>,
        scope: &Scope,
        id: SnapshotId,
        spec: SnapshotSpec,
        wait: Duration,
    ) -> Result<(Snapshot, bool)> {
        let spec = scope.snapshot(spec)?;
        let (snapshots, client) = (self.clone(), scope.clone());
        let (key, requested) = (id.clone(), spec.clone());
        let create = |started: oneshot::Sender<()>| async move {
            snapshots.comparison.check(&requested.volume).await?;
            let _lock = snapshots.core.lock_snapshot(&key).await;
            let (scope, name, expected) = (client.clone(), key.clone(), requested.clone());
            let find = move |tx: &Tx<'_>| same_snapshot(tx, &scope, &name, &expected);
            let found = snapshots.core.catalog().read(find).await?;
            let (row, created) = match found {
                Some(row) => (row, false),
                None => {
                    requested
                        .check_bounds()
                        .map_err(|what| Problem::from(what).about(ObjectKind::Snapshot, &key))?;
                    (snapshots.reserve(&client, &key, requested).await?, true)
                }
            };
            let _ = started.send(());
            if row.state == VolumeState::Creating {
                snapshots.finish(&client, row, true).await?;
            }
            Ok((snapshots.get(&Scope::All, &key).await?, created))
        };
        if let Some(result) = self.core.run_with_timeout(wait, create).await {
            return result;
        }
        let (scope, name) = (scope.clone(), id.clone());
        match self.core.catalog().read(move |tx| same_snapshot(tx, &scope, &name, &spec)).await? {
            Some(row) => Ok((self.to_snapshot(row), false)),
            None => {
                let detail = format!("the snapshot {id} waits for other operations; retry");
                Err(Problem::new(ProblemCode::Unavailable, detail).about(ObjectKind::Snapshot, id).into())
            }
        }
    }

    /// Deletes a snapshot and its bytes, also while it is being taken. False if it did not exist.
    pub async fn delete(self: &Arc<Self>, scope: &Scope, id: SnapshotId) -> Result<bool> {
        let (snapshots, scope) = (self.clone(), scope.clone());
        self.core
            .run_to_completion(async move {
                // Before taking the lock, so that a request that holds it does not restart the copy.
                if !snapshots.begin_delete(scope, &id).await? {
                    return Ok(false);
                }
                snapshots.copies.cancel(&Object::Snapshot(id.clone()));
                let _lock = snapshots.core.lock_snapshot(&id).await;
                snapshots.finish_delete(&id).await?;
                Ok(true)
            })
            .await
    }

    /// False if it does not exist for the client.
    async fn begin_delete(&self, scope: Scope, id: &SnapshotId) -> Result<bool> {
        let id = id.clone();
        self.core
            .catalog()
            .run(move |tx| -> Result<_> {
                let Some(row) = tx.snapshot(&id)? else { return Ok(false) };
                match scope.deletion(&row.owner, &row.labels) {
                    Deletion::Missing => return Ok(false),
                    Deletion::Refused(why) => return Err(why.into()),
                    Deletion::Permitted => tx.begin_delete_snapshot(&id)?,
                }
                Ok(true)
            })
            .await
    }

    /// Removes the bytes of a snapshot in state deleting.
    async fn finish_delete(&self, id: &SnapshotId) -> Result<()> {
        let name = id.clone();
        let found = self
            .core
            .catalog()
            .read(move |tx| -> Result<_> {
                let row = tx.snapshot(&name)?.filter(|row| row.state == VolumeState::Deleting);
                let found = row.map(|row| {
                    let pool = lookups::pool(tx, &row.pool)?;
                    Ok((pool, row.family, row.reserved))
                });
                found.transpose()
            })
            .await?;
        let Some((pool, identity, size)) = found else { return Ok(()) };
        let cleared = self.files.clear(&pool, Object::Snapshot(id.clone()), identity).await?;
        self.files.remove(&pool, cleared, size).await?;
        let name = id.clone();
        self.core.catalog().run(move |tx| -> Result<_> { Ok(tx.delete_snapshot(&name)?) }).await?;
        audit::log_removal(Object::Snapshot(id.clone()), "it was deleted");
        self.core.emit(EventKind::Snapshot, id, Change::Deleted);
        Ok(())
    }

    /// Completes or rolls back the unfinished operation of a snapshot.
    pub(super) async fn resume(&self, id: &SnapshotId) -> Result<()> {
        let _lock = self.core.lock_snapshot(id).await;
        let key = id.clone();
        // Read under the lock: its previous holder may have completed the operation.
        let row = self.core.catalog().read(move |tx| -> Result<_> { Ok(tx.snapshot(&key)?) }).await?;
        let Some(row) = row else { return Ok(()) };
        match row.state {
            VolumeState::Creating => self.finish(&Scope::All, row, false).await,
            VolumeState::Deleting => self.finish_delete(id).await,
            VolumeState::Ready => Ok(()),
        }
    }
}

/// The existing snapshot, if its spec equals the requested one.
fn same_snapshot(
    tx: &Tx<'_>,
    scope: &Scope,
    id: &SnapshotId,
    requested: &SnapshotSpec,
) -> Result<Option<SnapshotRow>> {
    let Some(row) = tx.snapshot(id)? else { return Ok(None) };
    let about =
        |code, detail: String| Failure::from(Problem::new(code, detail).about(ObjectKind::Snapshot, id));
    if !scope.includes(&row.owner) {
        return Err(about(ProblemCode::Exists, format!("the ID {id} is taken; choose another")));
    }
    if row.state == VolumeState::Deleting {
        let detail = format!("the snapshot {id} is being deleted; retry after the deletion");
        return Err(about(ProblemCode::Unavailable, detail));
    }
    if row.volume != requested.volume {
        let detail = format!(
            "the snapshot {id} exists and is of volume {}, not of volume {}",
            row.volume, requested.volume
        );
        return Err(about(ProblemCode::Exists, detail));
    }
    let source = tx.volume(&row.volume)?.map(|volume| volume.owner);
    if row.state == VolumeState::Creating && source.is_some_and(|owner| !scope.includes(&owner)) {
        // The request would take the content that the volume has now.
        return Err(Failure::not_found(ObjectKind::Volume, &row.volume));
    }
    Ok(Some(row))
}
