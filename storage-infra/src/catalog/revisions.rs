//! Catalog revisions. Triggers in the schema increment the revision with every change that is also written to on-disk
//! records in the pools. A record is therefore newer than the catalog only if an old catalog was restored.

use infra_api::{PoolName, VolumeId};

use super::db::{OptionalExtension, params};
use super::{Result, Tx};

impl Tx<'_> {
    /// The catalog's revision.
    pub fn revision(&self) -> Result<u64> {
        Ok(self.0.prepare_cached("SELECT number FROM revision")?.query_row([], |row| row.get(0))?)
    }

    /// Raises the catalog's revision to at least this value.
    pub fn raise_revision(&self, least: u64) -> Result<()> {
        self.0.prepare_cached("UPDATE revision SET number = ?1 WHERE number < ?1")?.execute([least])?;
        Ok(())
    }

    /// Revision of a volume's row, if it exists.
    pub fn volume_revision(&self, id: &VolumeId) -> Result<Option<u64>> {
        let mut select = self.0.prepare_cached("SELECT revision FROM volumes WHERE id = ?1")?;
        Ok(select.query_row([id.as_str()], |row| row.get(0)).optional()?)
    }

    /// Whether a pool has on-disk records newer than the catalog.
    pub fn is_stale_for_pool(&self, pool: &PoolName) -> Result<bool> {
        Ok(self
            .0
            .prepare_cached("SELECT 1 FROM pools WHERE name = ?1 AND behind")?
            .exists([pool.as_str()])?)
    }

    /// Whether a volume's on-disk record is newer than the catalog.
    pub fn is_stale_for_volume(&self, id: &VolumeId) -> Result<bool> {
        Ok(self.0.prepare_cached("SELECT 1 FROM volumes WHERE id = ?1 AND behind")?.exists([id.as_str()])?)
    }

    /// Marks a pool and these of its volumes as having on-disk records newer than the catalog.
    pub fn mark_stale(&self, pool: &PoolName, volumes: &[VolumeId]) -> Result<()> {
        self.0.prepare_cached("UPDATE pools SET behind = TRUE WHERE name = ?1")?.execute([pool.as_str()])?;
        let mut update =
            self.0.prepare_cached("UPDATE volumes SET behind = TRUE WHERE id = ?1 AND pool = ?2")?;
        for id in volumes {
            update.execute(params![id.as_str(), pool.as_str()])?;
        }
        Ok(())
    }
}
