//! On-disk records beside the bytes of volumes and snapshots. They are kept equal to the catalog: written
//! synchronously where data safety depends on it, which is before a disk is attached, and asynchronously otherwise.

use infra_api::{
    Access, NodeSpec, ObjectKind, Placement, Problem, ProblemCode, SnapshotId, VolumeId, VolumeSpec,
    VolumeState,
};

use super::clearance::RECOVER;
use super::pools::{pool_of, pool_record};
use super::power::has_no_disks;
use super::{Failure, Result, Service};
use crate::catalog::{AttachmentRow, NodeRow, PoolRow, SnapshotRow, Tx, VolumeRow};
use crate::engine::record::{RecordedAttachment, SnapshotRecord, VolumeRecord};
use crate::engine::{Engine, EngineError, Object, Record};
use crate::hypervisor::DiskSource;
use crate::hypervisor::{DetachOutcome, Disk};

/// The record of a volume with these holders at this revision.
pub(super) fn volume_record(row: &VolumeRow, revision: u64, holders: Vec<RecordedAttachment>) -> Record {
    Record::Volume(Box::new(VolumeRecord {
        id: row.id.clone(),
        disk_uuid: row.disk_uuid,
        capacity: row.capacity,
        // Zones matter only for new volumes, and the size of a record is limited.
        spec: VolumeSpec {
            placement: Placement { zones: Vec::new(), ..row.spec.placement.clone() },
            ..row.spec.clone()
        },
        family: row.family,
        qos: row.qos,
        created_at: row.created_at.clone(),
        format_token: Some(row.format_token),
        written: row.written,
        revision,
        holders,
    }))
}

/// The record of a snapshot taken at this time.
pub(super) fn snapshot_record(row: &SnapshotRow, taken_at: &str) -> Record {
    Record::Snapshot(SnapshotRecord {
        id: row.id.clone(),
        volume: row.volume.clone(),
        capacity: row.capacity,
        family: row.family,
        labels: row.labels.clone(),
        created_at: taken_at.to_owned(),
    })
}

fn holders(tx: &Tx<'_>, rows: Vec<AttachmentRow>) -> Result<Vec<RecordedAttachment>> {
    let holder = |row: AttachmentRow| {
        let node = tx.node(row.node)?.ok_or_else(|| Failure::not_found(ObjectKind::Node, row.node))?;
        Ok(RecordedAttachment {
            id: row.id,
            uuid: row.node,
            // Labels are informational, and the size of a record is limited.
            node: NodeSpec { labels: infra_api::Labels::new(), ..node.spec },
            read_only: row.read_only,
            access: row.access,
            created_at: row.created_at,
        })
    };
    rows.into_iter().map(holder).collect()
}

/// A volume's record as it should be, and whether the one on disk may be older than the catalog.
pub(super) struct PendingRecord {
    pool: PoolRow,
    pub(super) row: VolumeRow,
    revision: u64,
    /// Records on disk were newer than the catalog.
    is_stale: bool,
    holders: Vec<RecordedAttachment>,
    due: bool,
}

impl PendingRecord {
    fn of(tx: &Tx<'_>, id: &VolumeId) -> Result<Option<Self>> {
        Ok(Self::of_any(tx, id)?.filter(|due| due.row.state == VolumeState::Ready))
    }

    /// Like `of`, also for volumes that are being created or deleted.
    pub(super) fn of_any(tx: &Tx<'_>, id: &VolumeId) -> Result<Option<Self>> {
        let Some(row) = tx.volume(id)? else { return Ok(None) };
        let holders = holders(tx, tx.attachments(None, Some(id))?)?;
        let revision = tx.volume_revision(id)?.unwrap_or(0);
        let (due, is_stale) = (tx.is_record_due(id)?, tx.is_stale_for_volume(id)?);
        Ok(Some(Self { pool: pool_of(tx, &row)?, row, revision, is_stale, holders, due }))
    }

    fn record(&self) -> Record {
        volume_record(&self.row, self.revision, self.holders.clone())
    }

    /// Whether a record with this revision is newer than the catalog.
    pub(super) fn is_newer(&self, recorded: u64) -> bool {
        self.is_stale || recorded > self.revision
    }

    /// Holders in the record that are not in the catalog.
    pub(super) fn unknown_attachments(&self, found: VolumeRecord) -> Vec<RecordedAttachment> {
        found.unexpected_attachments(&self.holders)
    }

    /// Fails if the record on disk is newer than the catalog.
    fn refuse_stale_catalog(&self, found: Option<&Record>) -> Result<()> {
        let Some(Record::Volume(found)) = found else { return Ok(()) };
        if !self.is_newer(found.revision) {
            return Ok(());
        }
        let detail =
            format!("the on-disk record of volume {} is newer than the catalog; {RECOVER}", self.row.id);
        Err(Problem::new(ProblemCode::InUse, detail).about(ObjectKind::Volume, &self.row.id).into())
    }

    /// Holders in the record that are not in the catalog. Fails if the record belongs to another volume.
    fn checked_unknown_attachments(&self, found: Record) -> Result<Vec<RecordedAttachment>> {
        match found {
            Record::Volume(found) if found.disk_uuid == self.row.disk_uuid => {
                Ok(found.unexpected_attachments(&self.holders))
            }
            _ => Err(self.foreign_file_error()),
        }
    }

    /// The error for a record with holders that the catalog does not know.
    fn unknown_attachments_error(&self, unknown: &[RecordedAttachment]) -> Failure {
        let attachments: Vec<String> =
            unknown.iter().map(|one| format!("{} ({}) as {}", one.node.name, one.uuid, one.id)).collect();
        let detail = format!(
            "the on-disk record of volume {} lists attachments to {} that are not in the catalog: the catalog is older than \
             the pool; stop the server and rebuild it with `storage-infra recover`",
            self.row.id,
            attachments.join(", ")
        );
        let nodes =
            unknown.iter().map(|one| infra_api::NodeRef { uuid: one.uuid, name: one.node.name.clone() });
        let problem = Problem::new(ProblemCode::InUse, detail).about(ObjectKind::Volume, &self.row.id);
        problem.used_by(nodes.collect()).into()
    }

    fn disk_of(&self, holder: &RecordedAttachment, source: DiskSource) -> Disk {
        Disk {
            uuid: self.row.disk_uuid,
            source,
            read_only: holder.read_only,
            shared: holder.access != Access::SingleNode,
            qos: self.row.qos,
            on_full: self.pool.spec.on_full,
        }
    }

    fn foreign_file_error(&self) -> Failure {
        let detail = format!(
            "the file of volume {} in pool {} belongs to another volume with the same ID: the catalog is older than the pool; \
             stop the server and rebuild it with `storage-infra recover`",
            self.row.id, self.pool.name
        );
        Problem::new(ProblemCode::InUse, detail).about(ObjectKind::Volume, &self.row.id).into()
    }
}

impl Service {
    /// Updates a volume's on-disk record from the catalog.
    pub(super) async fn update_record(&self, id: &VolumeId) -> Result<()> {
        // A lock of its own: a stalled filesystem must not block detaches. Volume names cannot contain a slash.
        let _lock = self.0.locks.lock(&format!("record/{id}")).await;
        let key = id.clone();
        let Some(mut due) = self.0.catalog.read(move |tx| PendingRecord::of(tx, &key)).await? else {
            return Ok(());
        };
        self.compare_revisions(&due.pool).await?;
        due.row.written = self.is_written(&due).await?;
        let (engine, object, record) = (self.engine_of(&due.pool), Object::Volume(id.clone()), due.record());
        let found =
            self.engine::<_, Failure, _>(engine.clone(), move |e| Ok(e.read_record(&object)?)).await?;
        let stale_check = due.refuse_stale_catalog(found.as_ref());
        let unknown = found.map_or(Ok(Vec::new()), |found| due.checked_unknown_attachments(found))?;
        let holding = self.still_holding(&due, unknown).await?;
        if !holding.is_empty() {
            return Err(due.unknown_attachments_error(&holding));
        }
        stale_check?;
        let write = record.clone();
        self.engine::<_, Failure, _>(engine, move |e| Ok(e.write_record(&write)?)).await?;
        if !due.due {
            return Ok(());
        }
        let key = id.clone();
        self.0
            .catalog
            .run_unsynced(move |tx| -> Result<_> {
                // If the row changed meanwhile, the record stays due.
                if PendingRecord::of(tx, &key)?.is_some_and(|now| now.record() == record) {
                    tx.volume_record_is_current(&key)?;
                }
                Ok(())
            })
            .await
    }

    /// Fails if a volume's on-disk record is newer than the catalog. Writes nothing to the pool.
    pub(super) async fn refuse_stale_catalog(&self, id: &VolumeId) -> Result<()> {
        let key = id.clone();
        let Some(due) = self.0.catalog.read(move |tx| PendingRecord::of(tx, &key)).await? else {
            return Ok(());
        };
        self.compare_revisions(&due.pool).await?;
        let object = Object::Volume(id.clone());
        let read = move |e: &dyn Engine| Ok(e.read_record(&object)?);
        let found = self.engine::<_, Failure, _>(self.engine_of(&due.pool), read).await?;
        // Read the catalog after the record: a record is never newer than the catalog.
        let key = id.clone();
        let due = self.0.catalog.read(move |tx| PendingRecord::of(tx, &key)).await?;
        due.map_or(Ok(()), |due| due.refuse_stale_catalog(found.as_ref()))
    }

    /// Whether the volume contains data or was observed to. This is stored, so that data loss does not make the
    /// volume blank.
    async fn is_written(&self, due: &PendingRecord) -> Result<bool> {
        let id = due.row.id.clone();
        let is_blank = move |e: &dyn Engine| Ok(e.is_blank(&id)?);
        if due.row.written || self.engine::<_, Failure, _>(self.engine_of(&due.pool), is_blank).await? {
            return Ok(due.row.written);
        }
        let id = due.row.id.clone();
        self.0.catalog.run_unsynced(move |tx| -> Result<_> { Ok(tx.set_volume_has_data(&id)?) }).await?;
        Ok(true)
    }

    /// The unknown holders that may have the disk. If the record may be older than the catalog, ended attachments are
    /// excluded, and live state decides on the others.
    pub(super) async fn still_holding(
        &self,
        due: &PendingRecord,
        unknown: Vec<RecordedAttachment>,
    ) -> Result<Vec<RecordedAttachment>> {
        if !due.due || unknown.is_empty() {
            return Ok(unknown);
        }
        let unended = move |tx: &Tx<'_>| -> Result<Vec<RecordedAttachment>> {
            let mut left = Vec::new();
            for one in unknown {
                if !tx.is_attachment_ended_or_refused(&one.id)? {
                    left.push(one);
                }
            }
            Ok(left)
        };
        let mut holding = Vec::new();
        for one in self.0.catalog.read(unended).await? {
            let disk = due.disk_of(&one, self.engine_of(&due.pool).source(&due.row.id));
            let uuid = disk.uuid;
            let presence = self.hypervisor(&one.node.hypervisor)?.presence(one.uuid, &[disk]).await?;
            let node = NodeRow { uuid: one.uuid, spec: one.node.clone() };
            let has = presence.disks.contains(&uuid) && !has_no_disks(presence.facts.power.state());
            if has || self.prove_off(&node, &presence.facts).await? != DetachOutcome::Detached {
                holding.push(one);
            }
        }
        Ok(holding)
    }

    /// Updates a volume's record in the background.
    pub(super) fn update_record_soon(&self, id: &VolumeId) {
        let (service, id) = (self.clone(), id.clone());
        self.0.tasks.spawn(async move { service.update_record_or_log(&id).await });
    }

    async fn update_record_or_log(&self, id: &VolumeId) {
        if let Err(failure) = self.update_record(id).await {
            tracing::debug!(volume = %id, %failure, "cannot update the volume's record; will retry");
        }
    }

    async fn update_snapshot_record(&self, id: &SnapshotId) -> Result<()> {
        let key = id.clone();
        let found = self
            .0
            .catalog
            .read(move |tx| -> Result<_> {
                let Some(row) = tx.snapshot(&key)?.filter(|row| row.state == VolumeState::Ready) else {
                    return Ok(None);
                };
                let pool =
                    tx.pool(&row.pool)?.ok_or_else(|| Failure::not_found(ObjectKind::Pool, &row.pool))?;
                Ok(Some((pool, row)))
            })
            .await?;
        let Some((pool, row)) = found else { return Ok(()) };
        let record = snapshot_record(&row, &row.created_at);
        self.engine::<_, Failure, _>(self.engine_of(&pool), move |e| Ok(e.write_record(&record)?)).await?;
        let key = id.clone();
        self.0.catalog.run_unsynced(move |tx| -> Result<_> { Ok(tx.snapshot_record_is_current(&key)?) }).await
    }

    /// Writes all due records in the background, unless that is already running: records of objects from earlier
    /// versions, and records whose update failed.
    pub(super) fn write_due_records_soon(&self) {
        let Ok(writing) = self.0.record_writer.clone().try_lock_owned() else { return };
        let service = self.clone();
        self.0.tasks.spawn(async move {
            let _writing = writing;
            if let Err(failure) = service.write_due_records().await {
                tracing::warn!(%failure, "cannot list the records that are due");
            }
        });
    }

    async fn write_due_records(&self) -> Result<()> {
        let (pools, objects) =
            self.0.catalog.read(|tx| -> Result<_> { Ok((tx.pools()?, tx.due_records()?)) }).await?;
        let unhealthy = self.unhealthy_pools();
        for pool in pools.iter().filter(|pool| pool.marked && !unhealthy.contains(&pool.name)) {
            if let Err(failure) = self.compare_revisions(pool).await {
                tracing::debug!(pool = %pool.name, %failure, "cannot compare the pool's records with the catalog; will retry");
                continue;
            }
            let name = pool.name.clone();
            let now = move |tx: &Tx<'_>| -> Result<_> { Ok((tx.revision()?, tx.is_stale_for_pool(&name)?)) };
            let (revision, is_stale) = self.0.catalog.read(now).await?;
            if is_stale {
                continue;
            }
            let record = pool_record(pool, revision);
            let written = self
                .engine::<_, EngineError, _>(self.engine_of(pool), move |e| e.write_record(&record))
                .await;
            if let Err(error) = written {
                tracing::debug!(pool = %pool.name, %error, "cannot update the pool's record; will retry");
            }
        }
        for (object, pool) in objects {
            if unhealthy.contains(&pool) {
                continue;
            }
            match object {
                Object::Volume(id) => self.update_record_or_log(&id).await,
                Object::Snapshot(id) => {
                    let _lock = self.lock_snapshot(&id).await;
                    if let Err(failure) = self.update_snapshot_record(&id).await {
                        tracing::debug!(snapshot = %id, %failure, "cannot update the snapshot's record; will retry");
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use infra_api::{
        AttachmentId, FormatToken, Labels, MAX_ANTI_AFFINITY_ID, MAX_LABELS, MAX_NODE_NAME, MAX_ZONE,
        MAX_ZONES, PoolName, Qos, VolumeSource,
    };
    use uuid::Uuid;

    use super::*;

    /// Bytes of extended attributes that ext4 stores per file, in one 4 KiB block.
    const MAX_RECORD_BYTES: usize = 4036;
    const LONGEST_ID: usize = 249;

    fn labels() -> Labels {
        // Braces, quotes and a colon count too.
        Labels::from([("k".to_owned(), "v".repeat(MAX_LABELS - 8))])
    }

    fn longest() -> (VolumeRow, RecordedAttachment) {
        let spec = VolumeSpec {
            capacity_bytes: u64::MAX,
            limit_bytes: Some(u64::MAX),
            placement: Placement {
                pool: Some(PoolName::new("p".repeat(63)).unwrap()),
                pool_labels: labels(),
                anti_affinity_id: Some("g".repeat(MAX_ANTI_AFFINITY_ID)),
                zones: vec!["z".repeat(MAX_ZONE); MAX_ZONES],
            },
            source: Some(VolumeSource::Volume(VolumeId::new("s".repeat(LONGEST_ID)).unwrap())),
            qos: Qos { iops: Some(u64::MAX), bytes_per_second: Some(u64::MAX) },
            shareable: true,
            labels: labels(),
        };
        spec.check_bounds().unwrap();
        let node = NodeSpec {
            name: "n".repeat(MAX_NODE_NAME),
            hypervisor: "h".repeat(63),
            zone: Some("z".repeat(MAX_ZONE)),
            labels: labels(),
        };
        node.check_bounds().unwrap();
        let row = VolumeRow {
            id: VolumeId::new("v".repeat(LONGEST_ID)).unwrap(),
            pool: PoolName::new("p").unwrap(),
            capacity: u64::MAX,
            grow_to: None,
            disk_uuid: Uuid::max(),
            state: VolumeState::Ready,
            qos: spec.qos,
            spec,
            created_at: "2026-01-01T00:00:00Z".into(),
            family: Uuid::max(),
            copying: false,
            qos_due: false,
            format_token: FormatToken::random(),
            written: false,
        };
        let holder = RecordedAttachment {
            id: AttachmentId::new("a".repeat(LONGEST_ID)).unwrap(),
            uuid: Uuid::max(),
            node: NodeSpec { labels: Labels::new(), ..node },
            read_only: true,
            access: Access::MultiNodeReadOnly,
            created_at: "2026-01-01T00:00:00Z".into(),
        };
        (row, holder)
    }

    #[test]
    fn the_record_of_the_longest_request_fits_into_every_filesystem() {
        let (row, holder) = longest();
        let written = volume_record(&row, u64::MAX, vec![holder]).encode().unwrap().len();
        assert!((3_500..=MAX_RECORD_BYTES).contains(&written), "{written}");
        let snapshot = SnapshotRow {
            id: SnapshotId::new("s".repeat(LONGEST_ID)).unwrap(),
            volume: row.id.clone(),
            pool: row.pool.clone(),
            capacity: u64::MAX,
            reserved: u64::MAX,
            family: Uuid::max(),
            copying: false,
            state: VolumeState::Ready,
            labels: labels(),
            created_at: row.created_at.clone(),
        };
        let written = snapshot_record(&snapshot, &row.created_at).encode().unwrap().len();
        assert!(written <= MAX_RECORD_BYTES, "{written}");
    }
}
