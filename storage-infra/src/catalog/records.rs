//! On-disk records that are due: volumes and snapshots whose record beside their bytes may differ from the catalog.
//! Triggers in the schema set `record_due` after every relevant change.

use infra_api::{PoolName, SnapshotId, VolumeId};

use super::{Result, Tx, parse};
use crate::engine::Object;

/// Condition of complete objects whose record is due.
pub(super) const DUE: &str = "record_due AND state = 'ready'";

impl Tx<'_> {
    /// Complete volumes and snapshots whose on-disk record is due, with their pools.
    pub fn due_records(&self) -> Result<Vec<(Object, PoolName)>> {
        self.0
            .prepare_cached(&format!(
                "SELECT FALSE, id, pool FROM volumes WHERE {DUE} UNION ALL SELECT TRUE, id, pool FROM snapshots WHERE {DUE}"
            ))?
            .query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?
            .map(|row| {
                let (is_snapshot, id, pool): (bool, String, String) = row?;
                let object = if is_snapshot {
                    Object::Snapshot(parse("snapshots.id", &id)?)
                } else {
                    Object::Volume(parse("volumes.id", &id)?)
                };
                Ok((object, parse("pool", &pool)?))
            })
            .collect()
    }

    /// Whether a volume's on-disk record may be older than the catalog.
    pub fn is_record_due(&self, id: &VolumeId) -> Result<bool> {
        let mut due = self.0.prepare_cached("SELECT 1 FROM volumes WHERE id = ?1 AND record_due")?;
        Ok(due.exists([id.as_str()])?)
    }

    /// Whether the file of a volume without a record is not the volume's.
    pub fn is_recorded(&self, id: &VolumeId) -> Result<bool> {
        let mut recorded = self.0.prepare_cached("SELECT 1 FROM volumes WHERE id = ?1 AND recorded")?;
        Ok(recorded.exists([id.as_str()])?)
    }

    /// Marks a volume's on-disk record as up to date. If this write is lost, the same record is written again.
    pub fn volume_record_is_current(&self, id: &VolumeId) -> Result<()> {
        self.0
            .prepare_cached("UPDATE volumes SET record_due = FALSE, recorded = TRUE WHERE id = ?1")?
            .execute([id.as_str()])?;
        Ok(())
    }

    /// Marks a snapshot's on-disk record as up to date. If this write is lost, the same record is written again.
    pub fn snapshot_record_is_current(&self, id: &SnapshotId) -> Result<()> {
        self.0
            .prepare_cached("UPDATE snapshots SET record_due = FALSE WHERE id = ?1")?
            .execute([id.as_str()])?;
        Ok(())
    }
}
