//! Table of pools.

use std::collections::HashMap;

use infra_api::{PoolName, PoolSpec, Suspension};
use uuid::Uuid;

use super::db::{self, OptionalExtension, Row, params};
use super::volumes::OF_GROUP;
use super::{Result, Tx, from_json, from_word, parse, to_json};

/// A pool in the catalog.
#[derive(Debug, Clone)]
pub struct PoolRow {
    /// Its name.
    pub name: PoolName,
    /// UUID in its marker file.
    pub uuid: Uuid,
    /// The spec of the last request.
    pub spec: PoolSpec,
    /// Whether the marker file was written.
    pub marked: bool,
    /// The number that was last written to its marker; see [`crate::engine::Engine::generation`].
    pub generation: u64,
    /// Its suspension.
    pub suspension: Option<Suspension>,
}

/// Number of objects in [`InPool::first`].
const NAMED: usize = 5;

/// Volumes or snapshots in a pool.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct InPool {
    /// How many.
    pub count: u64,
    /// How many of them are being deleted.
    pub deleting: u64,
    /// The IDs of the first ones.
    pub first: Vec<String>,
}

const COLUMNS: &str = "name, uuid, engine, path, labels, cordoned, marked, on_full, hosts, generation";
/// Pools with their suspensions.
const POOLS: &str = "pools LEFT JOIN suspended_pools ON pool = name";
const SUSPENSION: &str = "reason, since";

fn read(row: &Row<'_>) -> db::Result<Result<PoolRow>> {
    let (name, uuid, engine): (String, String, String) = (row.get(0)?, row.get(1)?, row.get(2)?);
    let (path, labels): (String, String) = (row.get(3)?, row.get(4)?);
    let (cordoned, marked, on_full): (bool, bool, String) = (row.get(5)?, row.get(6)?, row.get(7)?);
    let hosts: String = row.get(8)?;
    let generation = row.get(9)?;
    let (reason, since): (Option<String>, Option<String>) = (row.get(10)?, row.get(11)?);
    Ok((|| {
        Ok(PoolRow {
            name: parse("pools.name", &name)?,
            uuid: parse("pools.uuid", &uuid)?,
            spec: PoolSpec {
                engine: from_word("pools.engine", &engine)?,
                path,
                labels: from_json("pools.labels", &labels)?,
                cordoned,
                on_full: from_word("pools.on_full", &on_full)?,
                hosts: from_json("pools.hosts", &hosts)?,
            },
            marked,
            generation,
            suspension: reason.zip(since).map(|(reason, since)| Suspension { reason, since }),
        })
    })())
}

impl Tx<'_> {
    /// Reads one pool.
    pub fn pool(&self, name: &PoolName) -> Result<Option<PoolRow>> {
        self.0
            .prepare_cached(&format!("SELECT {COLUMNS}, {SUSPENSION} FROM {POOLS} WHERE name = ?1"))?
            .query_row([name.as_str()], read)
            .optional()?
            .transpose()
    }

    /// Reads all pools, ordered by name.
    pub fn pools(&self) -> Result<Vec<PoolRow>> {
        self.0
            .prepare_cached(&format!("SELECT {COLUMNS}, {SUSPENSION} FROM {POOLS} ORDER BY name"))?
            .query_map([], read)?
            .map(|row| row?)
            .collect()
    }

    /// Inserts a pool.
    pub fn insert_pool(&self, pool: &PoolRow) -> Result<()> {
        self.0
            .prepare_cached(&format!(
                "INSERT INTO pools ({COLUMNS}) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)"
            ))?
            .execute(params![
                pool.name.as_str(),
                pool.uuid.to_string(),
                pool.spec.engine.to_string(),
                pool.spec.path,
                to_json(&pool.spec.labels)?,
                pool.spec.cordoned,
                pool.marked,
                pool.spec.on_full.to_string(),
                to_json(&pool.spec.hosts)?,
                pool.generation,
            ])?;
        Ok(())
    }

    /// Records the number that was written to the marker of a pool.
    pub fn set_pool_generation(&self, name: &PoolName, generation: u64) -> Result<()> {
        self.0
            .prepare_cached("UPDATE pools SET generation = ?2 WHERE name = ?1")?
            .execute(params![name.as_str(), generation])?;
        Ok(())
    }

    /// Updates the mutable fields of a pool.
    pub fn update_pool(&self, name: &PoolName, spec: &PoolSpec) -> Result<()> {
        self.0
            .prepare_cached(
                "UPDATE pools SET labels = ?2, cordoned = ?3, on_full = ?4, hosts = ?5 WHERE name = ?1",
            )?
            .execute(params![
                name.as_str(),
                to_json(&spec.labels)?,
                spec.cordoned,
                spec.on_full.to_string(),
                to_json(&spec.hosts)?
            ])?;
        Ok(())
    }

    /// Records that the marker file was written.
    pub fn set_pool_marked(&self, name: &PoolName) -> Result<()> {
        self.0.prepare_cached("UPDATE pools SET marked = TRUE WHERE name = ?1")?.execute([name.as_str()])?;
        Ok(())
    }

    /// Bytes reserved in each pool for volumes and snapshots, including running expansions. Triggers maintain the
    /// sums.
    pub fn reserved(&self) -> Result<HashMap<PoolName, u64>> {
        self.0
            .prepare_cached("SELECT name, reserved FROM pools")?
            .query_map([], |row| Ok((row.get::<String>(0)?, row.get(1)?)))?
            .map(|row| {
                let (name, reserved) = row?;
                Ok((parse("pools.name", &name)?, reserved))
            })
            .collect()
    }

    /// Number of volumes of an anti-affinity group in each pool that holds one. A volume that is moved counts in both pools.
    pub fn count_by_pool(&self, group: &str) -> Result<HashMap<PoolName, u64>> {
        self.0
            .prepare_cached(&format!(
                "SELECT pool, count(*) FROM (SELECT pool FROM volumes WHERE {OF_GROUP} \
                 UNION ALL SELECT pool FROM moves WHERE volume IN (SELECT id FROM volumes WHERE {OF_GROUP})) AS places GROUP BY pool"
            ))?
            .query_map([group], |row| Ok((row.get::<String>(0)?, row.get(1)?)))?
            .map(|row| {
                let (name, count) = row?;
                Ok((parse("volumes.pool", &name)?, count))
            })
            .collect()
    }

    /// The volumes in a pool.
    pub fn volumes_in_pool(&self, name: &PoolName) -> Result<InPool> {
        self.in_pool("volumes", name)
    }

    /// The snapshots in a pool.
    pub fn snapshots_in_pool(&self, name: &PoolName) -> Result<InPool> {
        self.in_pool("snapshots", name)
    }

    fn in_pool(&self, table: &str, pool: &PoolName) -> Result<InPool> {
        let counts = format!(
            "SELECT count(*), count(*) FILTER (WHERE state = 'deleting') FROM {table} WHERE pool = ?1"
        );
        let (count, deleting) = self
            .0
            .prepare_cached(&counts)?
            .query_row([pool.as_str()], |row| Ok((row.get(0)?, row.get(1)?)))?;
        let first = self
            .0
            .prepare_cached(&format!("SELECT id FROM {table} WHERE pool = ?1 ORDER BY id LIMIT {NAMED}"))?
            .query_map([pool.as_str()], |row| row.get(0))?
            .collect::<db::Result<_>>()?;
        Ok(InPool { count, deleting, first })
    }

    /// Deletes a pool. Fails while it has volumes or snapshots.
    pub fn delete_pool(&self, name: &PoolName) -> Result<()> {
        self.0.prepare_cached("DELETE FROM pools WHERE name = ?1")?.execute([name.as_str()])?;
        Ok(())
    }
}
