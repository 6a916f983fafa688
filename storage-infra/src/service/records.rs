//! What is noted with the bytes of volumes and snapshots, kept as the catalog has it: at once where the safety of the
//! bytes hangs on it, which is before a disk is plugged, else soon.

use infra_api::{
    Access, NodeSpec, Placement, Problem, ProblemCode, SnapshotId, VolumeId, VolumeSpec, VolumeState, What,
};

use super::clearance::RECOVER;
use super::pools::{pool_of, pool_record};
use super::power::is_without_disks;
use super::{Failure, Result, Service};
use crate::catalog::{AttachmentRow, NodeRow, PoolRow, SnapshotRow, Tx, VolumeRow};
use crate::engine::record::{Holder, SnapshotRecord, VolumeRecord};
use crate::engine::{DiskSource, Engine, EngineError, Object, Record};
use crate::hypervisor::{Disk, Unplugged};

/// What is noted of a volume that these have, by a row that is so new.
pub(super) fn volume_record(row: &VolumeRow, revision: u64, holders: Vec<Holder>) -> Record {
    Record::Volume(Box::new(VolumeRecord {
        id: row.id.clone(),
        disk_uuid: row.disk_uuid,
        capacity: row.capacity,
        // Zones say where a new volume goes, and this one is there; and a file can keep only so much.
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

/// What is noted of a snapshot of this moment.
pub(super) fn snapshot_record(row: &SnapshotRow, moment: &str) -> Record {
    Record::Snapshot(SnapshotRecord {
        id: row.id.clone(),
        volume: row.volume.clone(),
        capacity: row.capacity,
        family: row.family,
        labels: row.labels.clone(),
        created_at: moment.to_owned(),
    })
}

fn holders(tx: &Tx<'_>, rows: Vec<AttachmentRow>) -> Result<Vec<Holder>> {
    let holder = |row: AttachmentRow| {
        let node = tx.node(row.node)?.ok_or_else(|| Failure::not_found(What::Node, row.node))?;
        Ok(Holder {
            id: row.id,
            uuid: row.node,
            // Labels are for people, and a file can keep only so much.
            node: NodeSpec { labels: infra_api::Labels::new(), ..node.spec },
            read_only: row.read_only,
            access: row.access,
            created_at: row.created_at,
        })
    };
    rows.into_iter().map(holder).collect()
}

/// What is to be noted of a volume, where, and whether what is noted now may be older than the catalog.
pub(super) struct Due {
    pool: PoolRow,
    pub(super) row: VolumeRow,
    revision: u64,
    /// More was noted than the catalog knows.
    behind: bool,
    holders: Vec<Holder>,
    due: bool,
}

impl Due {
    fn of(tx: &Tx<'_>, id: &VolumeId) -> Result<Option<Self>> {
        Ok(Self::of_any(tx, id)?.filter(|due| due.row.state == VolumeState::Ready))
    }

    /// The same, also of a volume that comes or goes.
    pub(super) fn of_any(tx: &Tx<'_>, id: &VolumeId) -> Result<Option<Self>> {
        let Some(row) = tx.volume(id)? else { return Ok(None) };
        let holders = holders(tx, tx.attachments(None, Some(id))?)?;
        let revision = tx.volume_revision(id)?.unwrap_or(0);
        let (due, behind) = (tx.is_record_due(id)?, tx.is_volume_behind(id)?);
        Ok(Some(Self { pool: pool_of(tx, &row)?, row, revision, behind, holders, due }))
    }

    fn record(&self) -> Record {
        volume_record(&self.row, self.revision, self.holders.clone())
    }

    /// Whether more is noted than the catalog knows, where this is noted.
    pub(super) fn is_behind(&self, noted: u64) -> bool {
        self.behind || noted > self.revision
    }

    /// Who is noted and not in the catalog.
    pub(super) fn strangers_in(&self, found: VolumeRecord) -> Vec<Holder> {
        found.strangers(&self.holders)
    }

    /// Fails where more is noted than the catalog knows.
    fn refuse_behind(&self, found: Option<&Record>) -> Result<()> {
        let Some(Record::Volume(found)) = found else { return Ok(()) };
        if !self.is_behind(found.revision) {
            return Ok(());
        }
        let detail = format!(
            "what is noted with the bytes of volume {} is newer than what the catalog knows of it; {RECOVER}",
            self.row.id
        );
        Err(Problem::new(ProblemCode::InUse, detail).about(What::Volume, &self.row.id).into())
    }

    /// Who is noted with the volume's bytes and not in the catalog. Fails where the bytes are another volume's.
    fn strangers(&self, found: Record) -> Result<Vec<Holder>> {
        match found {
            Record::Volume(found) if found.disk_uuid == self.row.disk_uuid => {
                Ok(found.strangers(&self.holders))
            }
            _ => Err(self.another()),
        }
    }

    /// The volume's own file knows of more than the catalog does.
    fn newer(&self, strangers: &[Holder]) -> Failure {
        let who: Vec<String> =
            strangers.iter().map(|one| format!("{} ({}) as {}", one.node.name, one.uuid, one.id)).collect();
        let detail = format!(
            "the volume {} is noted with its bytes as attached to {}, and the catalog does not know of that: it is \
             older than the pool; stop the server and rebuild it with `storage-infra recover`",
            self.row.id,
            who.join(", ")
        );
        let nodes =
            strangers.iter().map(|one| infra_api::NodeRef { uuid: one.uuid, name: one.node.name.clone() });
        let problem = Problem::new(ProblemCode::InUse, detail).about(What::Volume, &self.row.id);
        problem.used_by(nodes.collect()).into()
    }

    fn disk_of(&self, holder: &Holder, source: DiskSource) -> Disk {
        Disk {
            uuid: self.row.disk_uuid,
            source,
            read_only: holder.read_only,
            shared: holder.access != Access::SingleNode,
            qos: self.row.qos,
            on_full: self.pool.spec.on_full,
        }
    }

    fn another(&self) -> Failure {
        let detail = format!(
            "the file of volume {} in pool {} is that of another volume of this id: the catalog is older than the pool; \
             stop the server and rebuild it with `storage-infra recover`",
            self.row.id, self.pool.name
        );
        Problem::new(ProblemCode::InUse, detail).about(What::Volume, &self.row.id).into()
    }
}

impl Service {
    /// Notes with a volume's bytes who may have it, by what the catalog has now.
    pub(super) async fn note_volume(&self, id: &VolumeId) -> Result<()> {
        // A lock of its own: a filesystem that stands still must not keep disks from being unplugged. No volume can have
        // a name with a slash.
        let _lock = self.0.locks.lock(&format!("note/{id}")).await;
        let key = id.clone();
        let Some(mut due) = self.0.catalog.read(move |tx| Due::of(tx, &key)).await? else { return Ok(()) };
        self.compare_revisions(&due.pool).await?;
        due.row.written = self.is_written(&due).await?;
        let (engine, object, record) = (self.engine_of(&due.pool), Object::Volume(id.clone()), due.record());
        let found = self.engine::<_, Failure, _>(engine.clone(), move |e| Ok(e.noted(&object)?)).await?;
        let behind = due.refuse_behind(found.as_ref());
        let strangers = found.map_or(Ok(Vec::new()), |found| due.strangers(found))?;
        let there = self.still_there(&due, strangers).await?;
        if !there.is_empty() {
            return Err(due.newer(&there));
        }
        behind?;
        let write = record.clone();
        self.engine::<_, Failure, _>(engine, move |e| Ok(e.note(&write)?)).await?;
        if !due.due {
            return Ok(());
        }
        let key = id.clone();
        self.0
            .catalog
            .note(move |tx| -> Result<_> {
                // Not where it changed meanwhile: then it is due again.
                if Due::of(tx, &key)?.is_some_and(|now| now.record() == record) {
                    tx.volume_is_noted(&key)?;
                }
                Ok(())
            })
            .await
    }

    /// Fails where more is noted with a volume's bytes than the catalog knows. Writes nothing there.
    pub(super) async fn refuse_behind(&self, id: &VolumeId) -> Result<()> {
        let key = id.clone();
        let Some(due) = self.0.catalog.read(move |tx| Due::of(tx, &key)).await? else { return Ok(()) };
        self.compare_revisions(&due.pool).await?;
        let object = Object::Volume(id.clone());
        let noted = move |e: &dyn Engine| Ok(e.noted(&object)?);
        let found = self.engine::<_, Failure, _>(self.engine_of(&due.pool), noted).await?;
        // After what is noted, which is never newer.
        let key = id.clone();
        let due = self.0.catalog.read(move |tx| Due::of(tx, &key)).await?;
        due.map_or(Ok(()), |due| due.refuse_behind(found.as_ref()))
    }

    /// Whether the volume's bytes hold data, or were seen to. Remembered with them, so that bytes which are lost do not
    /// make the volume blank.
    async fn is_written(&self, due: &Due) -> Result<bool> {
        let id = due.row.id.clone();
        let is_blank = move |e: &dyn Engine| Ok(e.is_blank(&id)?);
        if due.row.written || self.engine::<_, Failure, _>(self.engine_of(&due.pool), is_blank).await? {
            return Ok(due.row.written);
        }
        let id = due.row.id.clone();
        self.0.catalog.note(move |tx| -> Result<_> { Ok(tx.volume_is_written(&id)?) }).await?;
        Ok(true)
    }

    /// Those of the strangers who may have the disk. Where the note may be older than the catalog, whoever was told to
    /// go has not, and of the others their machine's live state tells.
    pub(super) async fn still_there(&self, due: &Due, strangers: Vec<Holder>) -> Result<Vec<Holder>> {
        if !due.due || strangers.is_empty() {
            return Ok(strangers);
        }
        let untold = move |tx: &Tx<'_>| -> Result<Vec<Holder>> {
            let mut left = Vec::new();
            for one in strangers {
                if !tx.is_attachment_over(&one.id)? {
                    left.push(one);
                }
            }
            Ok(left)
        };
        let mut there = Vec::new();
        for one in self.0.catalog.read(untold).await? {
            let disk = due.disk_of(&one, self.engine_of(&due.pool).source(&due.row.id));
            let uuid = disk.uuid;
            let presence = self.hypervisor(&one.node.hypervisor)?.presence(one.uuid, &[disk]).await?;
            let node = NodeRow { uuid: one.uuid, spec: one.node.clone() };
            let has = presence.disks.contains(&uuid) && !is_without_disks(presence.facts.power.state());
            if has || self.prove_off(&node, &presence.facts).await? != Unplugged::Gone {
                there.push(one);
            }
        }
        Ok(there)
    }

    /// Notes later what changed about a volume. Nobody waits for it.
    pub(super) fn note_soon(&self, id: &VolumeId) {
        let (service, id) = (self.clone(), id.clone());
        self.0.tasks.spawn(async move { service.note_or_tell(&id).await });
    }

    async fn note_or_tell(&self, id: &VolumeId) {
        if let Err(failure) = self.note_volume(id).await {
            tracing::debug!(volume = %id, %failure, "not noted yet; will be tried again");
        }
    }

    async fn note_snapshot(&self, id: &SnapshotId) -> Result<()> {
        let key = id.clone();
        let found = self
            .0
            .catalog
            .read(move |tx| -> Result<_> {
                let Some(row) = tx.snapshot(&key)?.filter(|row| row.state == VolumeState::Ready) else {
                    return Ok(None);
                };
                let pool = tx.pool(&row.pool)?.ok_or_else(|| Failure::not_found(What::Pool, &row.pool))?;
                Ok(Some((pool, row)))
            })
            .await?;
        let Some((pool, row)) = found else { return Ok(()) };
        let record = snapshot_record(&row, &row.created_at);
        self.engine::<_, Failure, _>(self.engine_of(&pool), move |e| Ok(e.note(&record)?)).await?;
        let key = id.clone();
        self.0.catalog.note(move |tx| -> Result<_> { Ok(tx.snapshot_is_noted(&key)?) }).await
    }

    /// Notes all that is still to be noted: what an earlier version made, and what could not be noted when it changed.
    /// Nobody waits for it, and it is not begun again before it has ended.
    pub(super) fn note_due_soon(&self) {
        let Ok(noting) = self.0.noting.clone().try_lock_owned() else { return };
        let service = self.clone();
        self.0.tasks.spawn(async move {
            let _noting = noting;
            if let Err(failure) = service.note_due().await {
                tracing::warn!(%failure, "could not look for what is to be noted");
            }
        });
    }

    async fn note_due(&self) -> Result<()> {
        let (pools, objects) =
            self.0.catalog.read(|tx| -> Result<_> { Ok((tx.pools()?, tx.due_records()?)) }).await?;
        let sick = self.sick_pools();
        for pool in pools.iter().filter(|pool| pool.marked && !sick.contains(&pool.name)) {
            if let Err(failure) = self.compare_revisions(pool).await {
                tracing::debug!(pool = %pool.name, %failure, "not noted yet; will be tried again");
                continue;
            }
            let name = pool.name.clone();
            let now = move |tx: &Tx<'_>| -> Result<_> { Ok((tx.revision()?, tx.is_pool_behind(&name)?)) };
            let (revision, is_behind) = self.0.catalog.read(now).await?;
            if is_behind {
                continue;
            }
            let record = pool_record(pool, revision);
            let noted =
                self.engine::<_, EngineError, _>(self.engine_of(pool), move |e| e.note(&record)).await;
            if let Err(error) = noted {
                tracing::debug!(pool = %pool.name, %error, "not noted yet; will be tried again");
            }
        }
        for (object, pool) in objects {
            if sick.contains(&pool) {
                continue;
            }
            match object {
                Object::Volume(id) => self.note_or_tell(&id).await,
                Object::Snapshot(id) => {
                    let _lock = self.lock_snapshot(&id).await;
                    if let Err(failure) = self.note_snapshot(&id).await {
                        tracing::debug!(snapshot = %id, %failure, "not noted yet; will be tried again");
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

    /// What ext4 keeps with a file, in one block of 4 KiB.
    const LEAST_KEPT: usize = 4036;
    const LONGEST_ID: usize = 249;

    fn labels() -> Labels {
        // Braces, quotes and a colon are counted too.
        Labels::from([("k".to_owned(), "v".repeat(MAX_LABELS - 8))])
    }

    fn longest() -> (VolumeRow, Holder) {
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
        let holder = Holder {
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
    fn what_is_noted_of_the_longest_request_and_whoever_has_it_fits_in_every_filesystem() {
        let (row, holder) = longest();
        let noted = volume_record(&row, u64::MAX, vec![holder]).encode().unwrap().len();
        assert!((3_500..=LEAST_KEPT).contains(&noted), "{noted}");
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
        let noted = snapshot_record(&snapshot, &row.created_at).encode().unwrap().len();
        assert!(noted <= LEAST_KEPT, "{noted}");
    }
}
