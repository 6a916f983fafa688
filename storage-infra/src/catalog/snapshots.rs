//! Table of snapshots.

use infra_api::{Account, Labels, Owner, PoolName, SnapshotId, VolumeId, VolumeState};
use uuid::Uuid;

use super::db::{self, OptionalExtension, Row, params};
use super::{Result, Tx, from_json, from_word, parse, to_json};

/// A snapshot in the catalog.
#[derive(Debug, Clone)]
pub struct SnapshotRow {
    /// Its ID.
    pub id: SnapshotId,
    /// The source volume, which may have been deleted.
    pub volume: VolumeId,
    /// The pool that holds it.
    pub pool: PoolName,
    /// Size of the volume at the time of the snapshot.
    pub capacity: u64,
    /// Upper bound of its allocated bytes.
    pub reserved: u64,
    /// Reflink family: objects that may share blocks.
    pub family: Uuid,
    /// Created by a block-by-block copy; the volume must not be written meanwhile.
    pub copying: bool,
    /// Lifecycle state.
    pub state: VolumeState,
    /// Labels of the request.
    pub labels: Labels,
    /// Time of the snapshot, RFC 3339.
    pub created_at: String,
    /// Whom it counts for.
    pub owner: Owner,
}

const COLUMNS: &str = "id, volume, pool, capacity, reserved, family, copying, state, labels, created_at, \
     account, class";

/// Condition of snapshots with an unfinished operation.
pub(super) const UNFINISHED: &str = "state <> 'ready'";

fn read(row: &Row<'_>) -> db::Result<Result<SnapshotRow>> {
    let (id, volume, pool, capacity): (String, String, String, u64) =
        (row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?);
    let (reserved, family, copying): (u64, String, bool) = (row.get(4)?, row.get(5)?, row.get(6)?);
    let (state, labels, created_at): (String, String, String) = (row.get(7)?, row.get(8)?, row.get(9)?);
    let (account, class): (String, String) = (row.get(10)?, row.get(11)?);
    Ok((|| {
        Ok(SnapshotRow {
            id: parse("snapshots.id", &id)?,
            volume: parse("snapshots.volume", &volume)?,
            pool: parse("snapshots.pool", &pool)?,
            capacity,
            reserved,
            family: parse("snapshots.family", &family)?,
            copying,
            state: from_word("snapshots.state", &state)?,
            labels: from_json("snapshots.labels", &labels)?,
            created_at,
            owner: Owner { account: parse("snapshots.account", &account)?, class },
        })
    })())
}

impl Tx<'_> {
    /// Reads one snapshot.
    pub fn snapshot(&self, id: &SnapshotId) -> Result<Option<SnapshotRow>> {
        self.0
            .prepare_cached(&format!("SELECT {COLUMNS} FROM snapshots WHERE id = ?1"))?
            .query_row([id.as_str()], read)
            .optional()?
            .transpose()
    }

    /// Reads at most `limit` snapshots of one account or of all, and of one volume or of all, with IDs after `after`, ordered
    /// by ID.
    pub fn snapshots(
        &self,
        account: Option<&Account>,
        volume: Option<&VolumeId>,
        after: &str,
        limit: usize,
    ) -> Result<Vec<SnapshotRow>> {
        let of = if volume.is_some() { "volume = ?2" } else { "CAST(?2 AS TEXT) IS NULL" };
        let counts_for = if account.is_some() { "account = ?3" } else { "CAST(?3 AS TEXT) IS NULL" };
        let (account, volume) = (account.map(Account::as_str), volume.map(VolumeId::as_str));
        self.0
            .prepare_cached(&format!(
                "SELECT {COLUMNS} FROM snapshots WHERE id > ?1 AND {of} AND {counts_for} ORDER BY id LIMIT ?4"
            ))?
            .query_map(params![after, volume, account, limit], read)?
            .map(|row| row?)
            .collect()
    }

    /// Reads the snapshots with an unfinished operation.
    pub fn unfinished_snapshots(&self) -> Result<Vec<SnapshotRow>> {
        self.0
            .prepare_cached(&format!("SELECT {COLUMNS} FROM snapshots WHERE {UNFINISHED} ORDER BY id"))?
            .query_map([], read)?
            .map(|row| row?)
            .collect()
    }

    /// Inserts a snapshot.
    pub fn insert_snapshot(&self, row: &SnapshotRow) -> Result<()> {
        self.0
            .prepare_cached(&format!(
                "INSERT INTO snapshots ({COLUMNS}, record_due) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, FALSE)"
            ))?
            .execute(params![
                row.id.as_str(),
                row.volume.as_str(),
                row.pool.as_str(),
                row.capacity,
                row.reserved,
                row.family.to_string(),
                row.copying,
                row.state.to_string(),
                to_json(&row.labels)?,
                row.created_at,
                row.owner.account.as_str(),
                row.owner.class,
            ])?;
        Ok(())
    }

    /// Marks a snapshot as ready, with its allocation bound and its time. False if its deletion was requested
    /// meanwhile.
    pub fn finish_snapshot(&self, id: &SnapshotId, reserved: u64, created_at: &str) -> Result<bool> {
        let changed = self
            .0
            .prepare_cached(
                "UPDATE snapshots SET state = 'ready', reserved = ?2, created_at = ?3 \
                 WHERE id = ?1 AND state = 'creating'",
            )?
            .execute(params![id.as_str(), reserved, created_at])?;
        Ok(changed > 0)
    }

    /// Marks a snapshot as deleting.
    pub fn begin_delete_snapshot(&self, id: &SnapshotId) -> Result<()> {
        self.0
            .prepare_cached("UPDATE snapshots SET state = 'deleting' WHERE id = ?1")?
            .execute([id.as_str()])?;
        Ok(())
    }

    /// Deletes a snapshot.
    pub fn delete_snapshot(&self, id: &SnapshotId) -> Result<()> {
        self.0.prepare_cached("DELETE FROM snapshots WHERE id = ?1")?.execute([id.as_str()])?;
        Ok(())
    }
}
