//! The table of volumes.

use infra_api::{PoolName, VolumeId, VolumeSpec, VolumeState};
use rusqlite::{OptionalExtension, Row, params};
use uuid::Uuid;

use super::{Result, Tx, from_json, from_word, parse, to_json};

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
}

/// What placement needs to know of a volume.
#[derive(Debug, Clone)]
pub struct VolumeUse {
    /// The volume.
    pub id: VolumeId,
    /// The pool that holds it.
    pub pool: PoolName,
    /// What is reserved for it, growth counted.
    pub reserved: u64,
    /// Its anti-affinity group.
    pub group: Option<String>,
}

const COLUMNS: &str = "id, pool, capacity, grow_to, disk_uuid, state, spec, created_at";

fn read(row: &Row<'_>) -> rusqlite::Result<Result<VolumeRow>> {
    let (id, pool, capacity, grow_to): (String, String, u64, Option<u64>) =
        (row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?);
    let (disk_uuid, state, spec, created_at): (String, String, String, String) =
        (row.get(4)?, row.get(5)?, row.get(6)?, row.get(7)?);
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
            .prepare_cached(&format!(
                "SELECT {COLUMNS} FROM volumes WHERE state <> 'ready' OR grow_to IS NOT NULL ORDER BY id"
            ))?
            .query_map([], read)?
            .map(|row| row?)
            .collect()
    }

    /// What all volumes use.
    pub fn volume_uses(&self) -> Result<Vec<VolumeUse>> {
        self.0
            .prepare_cached(
                "SELECT id, pool, max(capacity, coalesce(grow_to, 0)), spec ->> '$.placement.antiAffinityId' \
                 FROM volumes",
            )?
            .query_map([], |row| {
                let (id, pool): (String, String) = (row.get(0)?, row.get(1)?);
                let (reserved, group) = (row.get(2)?, row.get(3)?);
                Ok((|| {
                    let (id, pool) = (parse("volumes.id", &id)?, parse("volumes.pool", &pool)?);
                    Ok(VolumeUse { id, pool, reserved, group })
                })())
            })?
            .map(|row| row?)
            .collect()
    }

    /// Adds a volume.
    pub fn insert_volume(&self, volume: &VolumeRow) -> Result<()> {
        self.0
            .prepare_cached(&format!(
                "INSERT INTO volumes ({COLUMNS}) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)"
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

    /// Removes a volume. Fails while it is not in state deleting, or has attachments.
    pub fn delete_volume(&self, id: &VolumeId) -> Result<()> {
        self.0.prepare_cached("DELETE FROM volumes WHERE id = ?1")?.execute([id.as_str()])?;
        Ok(())
    }
}
