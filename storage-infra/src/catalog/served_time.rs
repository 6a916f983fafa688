//! Table of the time that servers have served the catalog, which is what ages are told by.

use super::db::OptionalExtension;
use super::{Result, Tx};

impl Tx<'_> {
    /// Adds seconds in which a server served.
    pub fn add_served_time(&self, seconds: u64) -> Result<()> {
        self.0.prepare_cached("UPDATE served_time SET seconds = seconds + ?1")?.execute([seconds])?;
        Ok(())
    }

    /// Seconds that servers have served this catalog.
    pub fn served_time(&self) -> Result<u64> {
        let mut select = self.0.prepare_cached("SELECT seconds FROM served_time")?;
        Ok(select.query_row([], |row| row.get(0)).optional()?.unwrap_or(0))
    }
}
