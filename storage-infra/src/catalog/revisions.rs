//! How new the catalog is, compared with what is noted in the pools. The schema itself counts every change that is noted
//! there, in the transaction that makes it; so what is noted is never newer than the catalog, unless an older one was put
//! back.

use infra_api::{PoolName, VolumeId};
use rusqlite::{OptionalExtension, params};

use super::{Result, Tx};

impl Tx<'_> {
    /// How new the catalog is.
    pub fn revision(&self) -> Result<u64> {
        Ok(self.0.prepare_cached("SELECT number FROM revision")?.query_row([], |row| row.get(0))?)
    }

    /// Makes every change from now on newer than this.
    pub fn raise_revision(&self, least: u64) -> Result<()> {
        self.0.prepare_cached("UPDATE revision SET number = max(number, ?1)")?.execute([least])?;
        Ok(())
    }

    /// How new a volume's row is, where there is one.
    pub fn volume_revision(&self, id: &VolumeId) -> Result<Option<u64>> {
        let mut select = self.0.prepare_cached("SELECT revision FROM volumes WHERE id = ?1")?;
        Ok(select.query_row([id.as_str()], |row| row.get(0)).optional()?)
    }

    /// Whether more is noted in a pool than the catalog knows.
    pub fn is_pool_behind(&self, pool: &PoolName) -> Result<bool> {
        Ok(self
            .0
            .prepare_cached("SELECT 1 FROM pools WHERE name = ?1 AND behind")?
            .exists([pool.as_str()])?)
    }

    /// Whether more is noted with a volume's bytes than the catalog knows.
    pub fn is_volume_behind(&self, id: &VolumeId) -> Result<bool> {
        Ok(self.0.prepare_cached("SELECT 1 FROM volumes WHERE id = ?1 AND behind")?.exists([id.as_str()])?)
    }

    /// Notes that more is noted in a pool than the catalog knows, also with these of its volumes.
    pub fn set_behind(&self, pool: &PoolName, volumes: &[VolumeId]) -> Result<()> {
        self.0.prepare_cached("UPDATE pools SET behind = 1 WHERE name = ?1")?.execute([pool.as_str()])?;
        let mut update =
            self.0.prepare_cached("UPDATE volumes SET behind = 1 WHERE id = ?1 AND pool = ?2")?;
        for id in volumes {
            update.execute(params![id.as_str(), pool.as_str()])?;
        }
        Ok(())
    }
}
