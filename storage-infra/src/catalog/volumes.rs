//! The table of volumes.

use infra_api::{FormatToken, PoolName, Qos, VolumeId, VolumeSpec, VolumeState};
use rusqlite::{OptionalExtension, Row, params};
use uuid::Uuid;

use super::{Result, Tx, from_json, from_word, parse, to_json};
use crate::engine::Object;

/// A volume as the catalog keeps it.
#[derive(Debug, Clone)]
pub struct VolumeRow {
    /// Its id.
    pub id: VolumeId,
    /// The pool that holds it.
    pub pool: PoolName,
    /// Its size in bytes.
    pub capacity: u64,
    /// The size it is growing to.
    pub grow_to: Option<u64>,
    /// What the disk is known by.
    pub disk_uuid: Uuid,
    /// How far it is.
    pub state: VolumeState,
    /// What was asked for.
    pub spec: VolumeSpec,
    /// RFC 3339.
    pub created_at: String,
    /// What it may share blocks with.
    pub family: Uuid,
    /// While it is made: piece by piece, from a source that nobody may write to meanwhile.
    pub copying: bool,
    /// How fast it may be.
    pub qos: Qos,
    /// Some machine may not keep to that yet.
    pub qos_due: bool,
    /// Its secret for whoever formats it.
    pub format_token: FormatToken,
    /// Its bytes were seen to hold data once. Stays, also where they are zeros again: that is a loss, or somebody's will.
    pub written: bool,
}

impl VolumeRow {
    /// The most bytes that it may have by now: while it grows, some machine may know of them already.
    pub fn size(&self) -> u64 {
        self.grow_to.unwrap_or(self.capacity)
    }
}

/// What of a volume or snapshot counts in its pool.
#[derive(Debug, Clone)]
pub struct Use {
    /// The volume or snapshot.
    pub object: Object,
    /// The pool that holds it.
    pub pool: PoolName,
    /// What is reserved for it, growth counted.
    pub reserved: u64,
    /// What it may share blocks with.
    pub family: Uuid,
}

const COLUMNS: &str = "id, pool, capacity, grow_to, disk_uuid, state, spec, created_at, family, copying, qos, qos_due, \
     format_token, written";

/// What something was begun on and not finished.
pub(super) const UNFINISHED: &str = "state <> 'ready' OR grow_to IS NOT NULL OR qos_due";
/// What is being copied piece by piece.
pub(super) const COPIED: &str = "copying AND state = 'creating'";
/// The volumes of an anti-affinity group.
pub(super) const OF_GROUP: &str =
    "CASE WHEN json_valid(spec) THEN spec ->> '$.placement.antiAffinityId' END = ?1";

fn read(row: &Row<'_>) -> rusqlite::Result<Result<VolumeRow>> {
    let (id, pool, capacity, grow_to): (String, String, u64, Option<u64>) =
        (row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?);
    let (disk_uuid, state, spec, created_at): (String, String, String, String) =
        (row.get(4)?, row.get(5)?, row.get(6)?, row.get(7)?);
    let (family, copying, qos, qos_due): (String, bool, String, bool) =
        (row.get(8)?, row.get(9)?, row.get(10)?, row.get(11)?);
    let (format_token, written): (String, bool) = (row.get(12)?, row.get(13)?);
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
        })
    })())
}

impl Tx<'_> {
    /// One volume.
    pub fn volume(&self, id: &VolumeId) -> Result<Option<VolumeRow>> {
        self.0
            .prepare_cached(&format!("SELECT {COLUMNS} FROM volumes WHERE id = ?1"))?
            .query_row([id.as_str()], read)
            .optional()?
            .transpose()
    }

    /// At most `limit` volumes with ids after `after`, by id.
    pub fn volumes(&self, after: &str, limit: usize) -> Result<Vec<VolumeRow>> {
        self.0
            .prepare_cached(&format!("SELECT {COLUMNS} FROM volumes WHERE id > ?1 ORDER BY id LIMIT ?2"))?
            .query_map(params![after, limit], read)?
            .map(|row| row?)
            .collect()
    }

    /// The volumes that something was begun on and not finished.
    pub fn unfinished_volumes(&self) -> Result<Vec<VolumeRow>> {
        self.0
            .prepare_cached(&format!("SELECT {COLUMNS} FROM volumes WHERE {UNFINISHED} ORDER BY id"))?
            .query_map([], read)?
            .map(|row| row?)
            .collect()
    }

    /// What all volumes and snapshots use.
    pub fn uses(&self) -> Result<Vec<Use>> {
        self.0
            .prepare_cached(
                "SELECT 0, id, pool, max(capacity, coalesce(grow_to, 0)), family FROM volumes \
                 UNION ALL SELECT 1, id, pool, reserved, family FROM snapshots",
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
                    Ok(Use { object, pool, reserved, family })
                })())
            })?
            .map(|row| row?)
            .collect()
    }

    /// The volumes whose bytes should be there, with their pools.
    pub fn ready_volumes(&self) -> Result<Vec<(VolumeId, PoolName)>> {
        self.0
            .prepare_cached("SELECT id, pool FROM volumes WHERE state = 'ready'")?
            .query_map([], |row| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?)))?
            .map(|row| {
                let (id, pool) = row?;
                Ok((parse("volumes.id", &id)?, parse("volumes.pool", &pool)?))
            })
            .collect()
    }

    /// What is being copied piece by piece from this volume, for people.
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

    /// Adds a volume.
    pub fn insert_volume(&self, volume: &VolumeRow) -> Result<()> {
        self.0
            .prepare_cached(&format!(
                "INSERT INTO volumes ({COLUMNS}, record_due) \
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, 0)"
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
            ])?;
        Ok(())
    }

    /// Moves a volume to another state.
    pub fn set_volume_state(&self, id: &VolumeId, state: VolumeState) -> Result<()> {
        self.0
            .prepare_cached("UPDATE volumes SET state = ?2 WHERE id = ?1")?
            .execute(params![id.as_str(), state.to_string()])?;
        Ok(())
    }

    /// Notes that a volume's bytes are there. False when it was told to go meanwhile.
    pub fn finish_create(&self, id: &VolumeId) -> Result<bool> {
        let changed = self
            .0
            .prepare_cached("UPDATE volumes SET state = 'ready' WHERE id = ?1 AND state = 'creating'")?
            .execute([id.as_str()])?;
        Ok(changed > 0)
    }

    /// Notes the size that a volume is to grow to.
    pub fn begin_grow(&self, id: &VolumeId, grow_to: u64) -> Result<()> {
        self.0
            .prepare_cached("UPDATE volumes SET grow_to = ?2 WHERE id = ?1")?
            .execute(params![id.as_str(), grow_to])?;
        Ok(())
    }

    /// Notes that a volume has grown, everywhere.
    pub fn finish_grow(&self, id: &VolumeId) -> Result<()> {
        self.0
            .prepare_cached(
                "UPDATE volumes SET capacity = grow_to, grow_to = NULL WHERE id = ?1 AND grow_to IS NOT NULL",
            )?
            .execute([id.as_str()])?;
        Ok(())
    }

    /// Notes that a volume cannot grow to this size, and has the one that it had.
    pub fn give_up_grow(&self, id: &VolumeId, size: u64) -> Result<()> {
        self.0
            .prepare_cached("UPDATE volumes SET grow_to = NULL WHERE id = ?1 AND grow_to = ?2")?
            .execute(params![id.as_str(), size])?;
        Ok(())
    }

    /// Notes that a volume's bytes hold data, or did.
    pub fn volume_is_written(&self, id: &VolumeId) -> Result<()> {
        self.0.prepare_cached("UPDATE volumes SET written = 1 WHERE id = ?1")?.execute([id.as_str()])?;
        Ok(())
    }

    /// Notes how fast a volume may be, and that machines are to be told.
    pub fn begin_qos(&self, id: &VolumeId, qos: &Qos) -> Result<()> {
        self.0
            .prepare_cached("UPDATE volumes SET qos = ?2, qos_due = 1 WHERE id = ?1")?
            .execute(params![id.as_str(), to_json(qos)?])?;
        Ok(())
    }

    /// Notes that every machine that has the volume keeps to its limits.
    pub fn finish_qos(&self, id: &VolumeId) -> Result<()> {
        self.0.prepare_cached("UPDATE volumes SET qos_due = 0 WHERE id = ?1")?.execute([id.as_str()])?;
        Ok(())
    }

    /// Forgets a volume that never came about.
    pub fn give_up_volume(&self, id: &VolumeId) -> Result<()> {
        self.set_volume_state(id, VolumeState::Deleting)?;
        self.delete_volume(id)
    }

    /// Removes a volume. Fails while it is not in state deleting, or has attachments.
    pub fn delete_volume(&self, id: &VolumeId) -> Result<()> {
        self.0.prepare_cached("DELETE FROM volumes WHERE id = ?1")?.execute([id.as_str()])?;
        Ok(())
    }
}
