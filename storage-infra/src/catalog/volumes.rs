//! Table of volumes.

use std::fmt;

use infra_api::{Account, FormatToken, Owner, PoolName, Qos, VolumeId, VolumeSpec, VolumeState};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::db::{self, OptionalExtension, Row, params};
use super::{Result, Tx, from_json, from_word, parse, to_json};
use crate::engine::Expected;
use crate::engine::Object;

/// Where the content of a volume came from. It decides how an interrupted creation is completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// Empty, or copied from a snapshot or volume.
    Created,
    /// From a stream that a client sends.
    Imported,
    /// From a file on the server.
    Adopted,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Created => "created",
            Self::Imported => "imported",
            Self::Adopted => "adopted",
        })
    }
}

/// A volume in the catalog.
#[derive(Debug, Clone)]
pub struct VolumeRow {
    /// Its ID.
    pub id: VolumeId,
    /// The pool that holds it.
    pub pool: PoolName,
    /// Its size in bytes.
    pub capacity: u64,
    /// Target size of a running expansion.
    pub grow_to: Option<u64>,
    /// UUID of the disk in VMs.
    pub disk_uuid: Uuid,
    /// Lifecycle state.
    pub state: VolumeState,
    /// The spec of the create request.
    pub spec: VolumeSpec,
    /// Creation time, RFC 3339.
    pub created_at: String,
    /// Reflink family: objects that may share blocks.
    pub family: Uuid,
    /// Created by a block-by-block copy; the source must not be written meanwhile.
    pub copying: bool,
    /// I/O limits.
    pub qos: Qos,
    /// The limits are not yet applied in every VM that has the volume.
    pub qos_due: bool,
    /// Secret for the node that formats the volume.
    pub format_token: FormatToken,
    /// The volume was observed to contain data. Never cleared, even if the bytes are zero again: that is data loss,
    /// or intended.
    pub written: bool,
    /// Whom it counts for.
    pub owner: Owner,
    /// Where its content came from.
    pub origin: Origin,
}

impl VolumeRow {
    /// Upper bound of the current size: during an expansion, VMs may already see the new size.
    pub fn size(&self) -> u64 {
        self.grow_to.unwrap_or(self.capacity)
    }
}

/// Bytes reserved in a pool for a volume or snapshot.
#[derive(Debug, Clone)]
pub struct Reservation {
    /// The volume or snapshot.
    pub object: Object,
    /// The pool that holds it.
    pub pool: PoolName,
    /// Reserved bytes, including a running expansion.
    pub reserved: u64,
    /// Reflink family: objects that may share blocks.
    pub family: Uuid,
}

const COLUMNS: &str = "id, pool, capacity, grow_to, disk_uuid, state, spec, created_at, family, copying, qos, qos_due, \
     format_token, written, account, class, origin";

/// Condition of volumes with an unfinished operation that the server can complete: all but imports that wait for their client.
pub(super) const RESUMABLE: &str = "(state <> 'ready' OR grow_to IS NOT NULL OR qos_due) AND NOT (state = 'creating' \
     AND origin = 'imported' AND id NOT IN (SELECT volume FROM imports WHERE verified))";
/// Condition of objects that are being copied block by block.
pub(super) const COPIED: &str = "copying AND state = 'creating'";
/// Condition of the volumes of an anti-affinity group.
pub(super) const OF_GROUP: &str =
    "CASE WHEN json_valid(spec) THEN spec ->> '$.placement.antiAffinityId' END = ?1";

fn read(row: &Row<'_>) -> db::Result<Result<VolumeRow>> {
    let (id, pool, capacity, grow_to): (String, String, u64, Option<u64>) =
        (row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?);
    let (disk_uuid, state, spec, created_at): (String, String, String, String) =
        (row.get(4)?, row.get(5)?, row.get(6)?, row.get(7)?);
    let (family, copying, qos, qos_due): (String, bool, String, bool) =
        (row.get(8)?, row.get(9)?, row.get(10)?, row.get(11)?);
    let (format_token, written): (String, bool) = (row.get(12)?, row.get(13)?);
    let (account, class, origin): (String, String, String) = (row.get(14)?, row.get(15)?, row.get(16)?);
    Ok((|| {
        Ok(VolumeRow {
            id: parse("volumes.id", &id)?,
            pool: parse("volumes.pool", &pool)?,
            capacity,
            grow_to,
            disk_uuid: parse("volumes.disk_uuid", &disk_uuid)?,
            state: from_word("volumes.state", &state)?,
            spec: from_json("volumes.spec", &spec)?,
            created_at,
            family: parse("volumes.family", &family)?,
            copying,
            qos: from_json("volumes.qos", &qos)?,
            qos_due,
            format_token: parse("volumes.format_token", &format_token)?,
            written,
            owner: Owner { account: parse("volumes.account", &account)?, class },
            origin: from_word("volumes.origin", &origin)?,
        })
    })())
}

impl Tx<'_> {
    /// Reads one volume.
    pub fn volume(&self, id: &VolumeId) -> Result<Option<VolumeRow>> {
        self.0
            .prepare_cached(&format!("SELECT {COLUMNS} FROM volumes WHERE id = ?1"))?
            .query_row([id.as_str()], read)
            .optional()?
            .transpose()
    }

    /// Reads at most `limit` volumes of one account or of all, with IDs after `after`, ordered by ID.
    pub fn volumes(&self, account: Option<&Account>, after: &str, limit: usize) -> Result<Vec<VolumeRow>> {
        let of = if account.is_some() { "account = ?2" } else { "CAST(?2 AS TEXT) IS NULL" };
        self.0
            .prepare_cached(&format!(
                "SELECT {COLUMNS} FROM volumes WHERE id > ?1 AND {of} ORDER BY id LIMIT ?3"
            ))?
            .query_map(params![after, account.map(Account::as_str), limit], read)?
            .map(|row| row?)
            .collect()
    }

    /// Reads the volumes with an unfinished operation.
    pub fn unfinished_volumes(&self) -> Result<Vec<VolumeRow>> {
        self.0
            .prepare_cached(&format!("SELECT {COLUMNS} FROM volumes WHERE {RESUMABLE} ORDER BY id"))?
            .query_map([], read)?
            .map(|row| row?)
            .collect()
    }

    /// Reservations of all volumes and snapshots, and of the other files of moves.
    pub fn reservations(&self) -> Result<Vec<Reservation>> {
        self.0
            .prepare_cached(
                "SELECT FALSE, id, pool, CASE WHEN grow_to > capacity THEN grow_to ELSE capacity END, family FROM volumes \
                 UNION ALL SELECT TRUE, id, pool, reserved, family FROM snapshots \
                 UNION ALL SELECT FALSE, m.volume, m.pool, m.reserved, v.family FROM moves m JOIN volumes v ON v.id = m.volume",
            )?
            .query_map([], |row| {
                let (is_snapshot, id, pool): (bool, String, String) = (row.get(0)?, row.get(1)?, row.get(2)?);
                let (reserved, family): (u64, String) = (row.get(3)?, row.get(4)?);
                Ok((|| {
                    let object = if is_snapshot {
                        Object::Snapshot(parse("snapshots.id", &id)?)
                    } else {
                        Object::Volume(parse("volumes.id", &id)?)
                    };
                    let (pool, family) = (parse("pool", &pool)?, parse("family", &family)?);
                    Ok(Reservation { object, pool, reserved, family })
                })())
            })?
            .map(|row| row?)
            .collect()
    }

    /// Volumes of a pool whose bytes must exist.
    pub fn ready_volumes(&self, pool: &PoolName) -> Result<Vec<VolumeId>> {
        self.0
            .prepare_cached("SELECT id FROM volumes WHERE pool = ?1 AND state = 'ready'")?
            .query_map([pool.as_str()], |row| row.get::<String>(0))?
            .map(|row| parse("volumes.id", &row?))
            .collect()
    }

    /// The volumes of a pool whose bytes must exist, with what their files must be.
    pub fn files_of_pool(&self, pool: &PoolName) -> Result<Vec<(VolumeId, Expected)>> {
        let sql = "SELECT id, disk_uuid, capacity, recorded FROM volumes WHERE pool = ?1 AND state = 'ready'";
        let read = |row: &Row<'_>| {
            Ok((row.get::<String>(0)?, row.get::<String>(1)?, row.get(2)?, row.get::<bool>(3)?))
        };
        let rows = self.0.prepare_cached(sql)?.query_map([pool.as_str()], read)?;
        let parsed = |(id, uuid, bytes, recorded): (String, String, u64, bool)| {
            let identity = parse("volumes.disk_uuid", &uuid)?;
            Ok((parse("volumes.id", &id)?, Expected { identity, bytes, recorded }))
        };
        rows.map(|row| parsed(row?)).collect()
    }

    /// Objects that are being copied block by block from this volume, as text for messages.
    pub fn copies_of(&self, volume: &VolumeId) -> Result<Vec<String>> {
        self.0
            .prepare_cached(&format!(
                "SELECT 'volume ' || id FROM volumes WHERE {COPIED} AND spec ->> '$.source.volume' = ?1 \
                 UNION ALL SELECT 'snapshot ' || id FROM snapshots WHERE {COPIED} AND volume = ?1"
            ))?
            .query_map([volume.as_str()], |row| row.get(0))?
            .map(|row| Ok(row?))
            .collect()
    }

    /// Inserts a volume.
    pub fn insert_volume(&self, volume: &VolumeRow) -> Result<()> {
        self.0
            .prepare_cached(&format!(
                "INSERT INTO volumes ({COLUMNS}, record_due) \
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, FALSE)"
            ))?
            .execute(params![
                volume.id.as_str(),
                volume.pool.as_str(),
                volume.capacity,
                volume.grow_to,
                volume.disk_uuid.to_string(),
                volume.state.to_string(),
                to_json(&volume.spec)?,
                volume.created_at,
                volume.family.to_string(),
                volume.copying,
                to_json(&volume.qos)?,
                volume.qos_due,
                volume.format_token.reveal(),
                volume.written,
                volume.owner.account.as_str(),
                volume.owner.class,
                volume.origin.to_string(),
            ])?;
        Ok(())
    }

    /// Sets a volume's state.
    pub fn set_volume_state(&self, id: &VolumeId, state: VolumeState) -> Result<()> {
        self.0
            .prepare_cached("UPDATE volumes SET state = ?2 WHERE id = ?1")?
            .execute(params![id.as_str(), state.to_string()])?;
        Ok(())
    }

    /// Marks a volume as ready. False if its deletion was requested meanwhile.
    pub fn finish_create(&self, id: &VolumeId) -> Result<bool> {
        let changed = self
            .0
            .prepare_cached("UPDATE volumes SET state = 'ready' WHERE id = ?1 AND state = 'creating'")?
            .execute([id.as_str()])?;
        Ok(changed > 0)
    }

    /// Starts an expansion to this size.
    pub fn begin_expand(&self, id: &VolumeId, grow_to: u64) -> Result<()> {
        self.0
            .prepare_cached("UPDATE volumes SET grow_to = ?2 WHERE id = ?1")?
            .execute(params![id.as_str(), grow_to])?;
        Ok(())
    }

    /// Completes an expansion.
    pub fn finish_expand(&self, id: &VolumeId) -> Result<()> {
        self.0
            .prepare_cached(
                "UPDATE volumes SET capacity = grow_to, grow_to = NULL WHERE id = ?1 AND grow_to IS NOT NULL",
            )?
            .execute([id.as_str()])?;
        Ok(())
    }

    /// Cancels an expansion to this size; the volume keeps its size.
    pub fn cancel_expand(&self, id: &VolumeId, size: u64) -> Result<()> {
        self.0
            .prepare_cached("UPDATE volumes SET grow_to = NULL WHERE id = ?1 AND grow_to = ?2")?
            .execute(params![id.as_str(), size])?;
        Ok(())
    }

    /// Records that a volume contains or contained data.
    pub fn set_volume_has_data(&self, id: &VolumeId) -> Result<()> {
        self.0.prepare_cached("UPDATE volumes SET written = TRUE WHERE id = ?1")?.execute([id.as_str()])?;
        Ok(())
    }

    /// Sets I/O limits that are still to be applied in VMs.
    pub fn begin_qos(&self, id: &VolumeId, qos: &Qos) -> Result<()> {
        self.0
            .prepare_cached("UPDATE volumes SET qos = ?2, qos_due = TRUE WHERE id = ?1")?
            .execute(params![id.as_str(), to_json(qos)?])?;
        Ok(())
    }

    /// Records that the limits are applied in every VM that has the volume.
    pub fn finish_qos(&self, id: &VolumeId) -> Result<()> {
        self.0.prepare_cached("UPDATE volumes SET qos_due = FALSE WHERE id = ?1")?.execute([id.as_str()])?;
        Ok(())
    }

    /// Deletes a volume whose creation failed.
    pub fn abort_volume(&self, id: &VolumeId) -> Result<()> {
        self.set_volume_state(id, VolumeState::Deleting)?;
        self.delete_volume(id)
    }

    /// Deletes a volume. Fails unless it is in state deleting and has no attachments.
    pub fn delete_volume(&self, id: &VolumeId) -> Result<()> {
        self.0.prepare_cached("DELETE FROM volumes WHERE id = ?1")?.execute([id.as_str()])?;
        Ok(())
    }
}
