//! The records of volumes and snapshots as they should be on disk, by the catalog.

use infra_api::{
    Access, Labels, MovePhase, NodeRef, NodeSpec, ObjectKind, Owner, Placement, PoolName, Problem,
    ProblemCode, Qos, VolumeId, VolumeSpec, VolumeState,
};

use crate::catalog::{AttachmentRow, PoolRow, SnapshotRow, Tx, VolumeRow};
use crate::engine::Expected;
use crate::engine::Record;
use crate::engine::record::{RecordedAttachment, SnapshotRecord, VolumeRecord};
use crate::hypervisor::{Disk, DiskSource};
use crate::service::lookups::pool_of;
use crate::service::pools::RECOVER;
use crate::service::problems::{Failure, Result};

/// The record of a volume with these holders at this revision.
pub(in crate::service) fn volume_record(
    row: &VolumeRow,
    revision: u64,
    holders: Vec<RecordedAttachment>,
) -> Record {
    Record::Volume(Box::new(VolumeRecord {
        id: row.id.clone(),
        disk_uuid: row.disk_uuid,
        capacity: row.capacity,
        // Zones matter only for new volumes, owner and limits are recorded below, and the size of a record is limited.
        spec: VolumeSpec {
            owner: Owner::default(),
            qos: Qos::default(),
            placement: Placement { zones: Vec::new(), ..row.spec.placement.clone() },
            ..row.spec.clone()
        },
        family: row.family,
        qos: row.qos,
        created_at: row.created_at.clone(),
        format_token: Some(row.format_token),
        written: row.written,
        revision,
        owner: Some(row.owner.clone()),
        unfinished_move: false,
        moved_from: None,
        holders,
    }))
}

/// The record of a snapshot taken at this time.
pub(in crate::service) fn snapshot_record(row: &SnapshotRow, taken_at: &str) -> Record {
    Record::Snapshot(SnapshotRecord {
        id: row.id.clone(),
        volume: row.volume.clone(),
        capacity: row.capacity,
        family: row.family,
        labels: row.labels.clone(),
        created_at: taken_at.to_owned(),
        owner: Some(row.owner.clone()),
    })
}

fn holders(tx: &Tx<'_>, rows: Vec<AttachmentRow>) -> Result<Vec<RecordedAttachment>> {
    let holder = |row: AttachmentRow| {
        let node = tx.node(row.node)?.ok_or_else(|| Failure::not_found(ObjectKind::Node, row.node))?;
        Ok(RecordedAttachment {
            id: row.id,
            uuid: row.node,
            // Labels are informational, and the size of a record is limited.
            node: NodeSpec { labels: Labels::new(), ..node.spec },
            read_only: row.read_only,
            access: row.access,
            created_at: row.created_at,
        })
    };
    rows.into_iter().map(holder).collect()
}

/// A volume's record as it should be, and whether the one on disk may be older than the catalog.
pub(in crate::service) struct PendingRecord {
    pub(super) pool: PoolRow,
    pub(in crate::service) row: VolumeRow,
    revision: u64,
    /// Records on disk were newer than the catalog.
    is_stale: bool,
    holders: Vec<RecordedAttachment>,
    /// The pool that may still have the old file of a volume that was moved.
    moved_from: Option<PoolName>,
    pub(super) due: bool,
    /// Whether the file has a record, or is not the volume's.
    recorded: bool,
}

impl PendingRecord {
    pub(super) fn of(tx: &Tx<'_>, id: &VolumeId) -> Result<Option<Self>> {
        Ok(Self::of_any(tx, id)?.filter(|due| due.row.state == VolumeState::Ready))
    }

    /// Like `of`, also for volumes that are being created or deleted.
    pub(in crate::service) fn of_any(tx: &Tx<'_>, id: &VolumeId) -> Result<Option<Self>> {
        let Some(row) = tx.volume(id)? else { return Ok(None) };
        let holders = holders(tx, tx.attachments(None, Some(id))?)?;
        let revision = tx.volume_revision(id)?.unwrap_or(0);
        let (due, is_stale) = (tx.is_record_due(id)?, tx.is_stale_for_volume(id)?);
        let recorded = tx.is_recorded(id)?;
        let moved = tx.volume_move(id)?.filter(|one| one.phase == MovePhase::Removing);
        let moved_from = moved.map(|one| one.pool);
        Ok(Some(Self {
            pool: pool_of(tx, &row)?,
            row,
            revision,
            is_stale,
            holders,
            moved_from,
            due,
            recorded,
        }))
    }

    /// Whether the record on disk may be older than the catalog.
    pub(in crate::service) fn is_due(&self) -> bool {
        self.due
    }

    /// What the file must be before its record is written.
    pub(super) fn expected(&self) -> Expected {
        Expected { identity: self.row.disk_uuid, bytes: self.row.capacity, recorded: self.recorded }
    }

    pub(super) fn record(&self) -> Record {
        self.marked(false, self.moved_from.clone())
    }

    /// The record of the other file of a move that is not complete.
    pub(in crate::service) fn unfinished_move(&self) -> Record {
        self.marked(true, None)
    }

    fn marked(&self, unfinished_move: bool, moved_from: Option<PoolName>) -> Record {
        match volume_record(&self.row, self.revision, self.holders.clone()) {
            Record::Volume(record) => {
                Record::Volume(Box::new(VolumeRecord { unfinished_move, moved_from, ..*record }))
            }
            other => other,
        }
    }

    /// Whether a record with this revision is newer than the catalog.
    pub(in crate::service) fn is_newer(&self, recorded: u64) -> bool {
        self.is_stale || recorded > self.revision
    }

    /// Holders in the record that are not in the catalog.
    pub(in crate::service) fn unknown_attachments(&self, found: VolumeRecord) -> Vec<RecordedAttachment> {
        found.unexpected_attachments(&self.holders)
    }

    /// Fails if the record on disk is newer than the catalog.
    pub(super) fn refuse_stale_catalog(&self, found: Option<&Record>) -> Result<()> {
        let Some(Record::Volume(found)) = found else { return Ok(()) };
        if !self.is_newer(found.revision) {
            return Ok(());
        }
        let detail =
            format!("the on-disk record of volume {} is newer than the catalog; {RECOVER}", self.row.id);
        Err(Problem::new(ProblemCode::InUse, detail).about(ObjectKind::Volume, &self.row.id).into())
    }

    /// Holders in the record that are not in the catalog. Fails if the record belongs to another volume.
    pub(super) fn checked_unknown_attachments(&self, found: Record) -> Result<Vec<RecordedAttachment>> {
        match found {
            Record::Volume(found) if found.disk_uuid == self.row.disk_uuid => {
                Ok(found.unexpected_attachments(&self.holders))
            }
            _ => Err(self.foreign_file_error()),
        }
    }

    /// The error for a record with holders that the catalog does not know.
    pub(super) fn unknown_attachments_error(&self, unknown: &[RecordedAttachment]) -> Failure {
        let attachments: Vec<String> =
            unknown.iter().map(|one| format!("{} ({}) as {}", one.node.name, one.uuid, one.id)).collect();
        let detail = format!(
            "the on-disk record of volume {} lists attachments to {} that are not in the catalog: the catalog is older than \
             the pool; stop the server and rebuild it with `storage-infra recover`",
            self.row.id,
            attachments.join(", ")
        );
        let nodes = unknown.iter().map(|one| NodeRef { uuid: one.uuid, name: one.node.name.clone() });
        let problem = Problem::new(ProblemCode::InUse, detail).about(ObjectKind::Volume, &self.row.id);
        problem.used_by(nodes.collect()).into()
    }

    pub(super) fn disk_of(&self, holder: &RecordedAttachment, source: DiskSource) -> Disk {
        Disk {
            uuid: self.row.disk_uuid,
            source,
            read_only: holder.read_only,
            shared: holder.access != Access::SingleNode,
            qos: self.row.qos,
            on_full: self.pool.spec.on_full,
            options: self.row.spec.disk,
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

/// Holders whose attachments did not end, by the catalog.
pub(in crate::service) fn unended(
    tx: &Tx<'_>,
    holders: Vec<RecordedAttachment>,
) -> Result<Vec<RecordedAttachment>> {
    let mut left = Vec::new();
    for one in holders {
        if !tx.is_attachment_ended_or_refused(&one.id)? {
            left.push(one);
        }
    }
    Ok(left)
}

#[cfg(test)]
mod tests {
    use infra_api::{
        Account, AntiAffinity, AttachmentId, DetectZeroes, DiskCache, DiskDiscard, DiskIo, DiskOptions,
        FormatToken, MAX_ANTI_AFFINITY_ID, MAX_CLASS, MAX_LABELS, MAX_NODE_NAME, MAX_ZONE, MAX_ZONES,
        PoolName, Qos, SnapshotId, VolumeSource,
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
                anti_affinity: AntiAffinity::Preferred,
                zones: vec!["z".repeat(MAX_ZONE); MAX_ZONES],
            },
            source: Some(VolumeSource::Volume(VolumeId::new("s".repeat(LONGEST_ID)).unwrap())),
            qos: Qos { iops: Some(u64::MAX), bytes_per_second: Some(u64::MAX) },
            shareable: true,
            disk: DiskOptions {
                io: Some(DiskIo::IoUring),
                cache: Some(DiskCache::Writeback),
                discard: Some(DiskDiscard::Ignore),
                detect_zeroes: Some(DetectZeroes::Unmap),
            },
            owner: Owner { account: Account::new("g".repeat(63)).unwrap(), class: "c".repeat(MAX_CLASS) },
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
            owner: spec.owner.clone(),
            spec,
            created_at: "2026-01-01T00:00:00Z".into(),
            family: Uuid::max(),
            copying: false,
            qos_due: false,
            format_token: FormatToken::random(),
            written: false,
            origin: crate::catalog::Origin::Created,
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
            owner: row.owner.clone(),
        };
        let written = snapshot_record(&snapshot, &row.created_at).encode().unwrap().len();
        assert!(written <= MAX_RECORD_BYTES, "{written}");
    }
}
