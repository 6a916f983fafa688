//! Clearance before irreversible operations: checks all sources that know who uses an object's files, and issues the
//! permission that the engine requires. A source that cannot be queried is a reason to refuse.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use infra_api::{ObjectKind, Problem, ProblemCode, VolumeId};
use uuid::Uuid;

use super::probe::ProbeKind;
use super::records::PendingRecord;
use super::{Failure, Result, Service};
use crate::catalog::{PoolRow, Tx, VolumeRow};
use crate::engine::clearance::Refusal;
use crate::engine::record::RecordedAttachment;
use crate::engine::{Clearance, Engine, Evidence, Files, Object, Record, Revisions};
use crate::hypervisor::AttachedDisk;

/// Time for a process or device to close a file after it was told to release it.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);
/// Timeout for a hypervisor to list its attached disks.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum wait at start-up for the comparison of pools with the catalog.
const START_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout for a pool to report the revisions of all its records.
const REVISIONS_TIMEOUT: Duration = Duration::from_secs(600);

/// Last list of disks attached on a hypervisor, with the time at which the query started.
pub(super) type DiskListing = tokio::sync::Mutex<Option<(Instant, Arc<Vec<AttachedDisk>>)>>;

/// Instruction for a catalog that is older than a pool.
pub(super) const RECOVER: &str =
    "the catalog is older than the pool: stop the server and rebuild it with `storage-infra recover`";

impl Service {
    /// Checks whether a volume's bytes may be removed or recreated.
    pub(super) async fn clear_volume(&self, pool: &PoolRow, row: &VolumeRow) -> Result<Clearance> {
        self.clear(pool, Object::Volume(row.id.clone()), row.disk_uuid).await
    }

    /// Checks whether an object's bytes may be removed or recreated. The caller holds the object's lock.
    pub(super) async fn clear(&self, pool: &PoolRow, object: Object, identity: Uuid) -> Result<Clearance> {
        self.compare_revisions(pool).await?;
        let files = self.closed_files(pool, &object).await?;
        let mut evidence = Evidence {
            object,
            identity,
            files,
            is_catalog_stale: false,
            recorded: Vec::new(),
            live: Vec::new(),
        };
        if !evidence.files.is_empty() {
            evidence.live = self.live(&evidence.files).await?;
            (evidence.recorded, evidence.is_catalog_stale) =
                self.recorded_attachments(pool, &evidence.object).await?;
        }
        let object = evidence.object.clone();
        evidence.decide().map_err(|reasons| refused(&object, pool, &reasons))
    }

    /// An object's files, after processes that were told to release them had time to close them.
    async fn closed_files(&self, pool: &PoolRow, object: &Object) -> Result<Files> {
        let start = Instant::now();
        loop {
            let key = object.clone();
            let files =
                self.engine::<_, Failure, _>(self.engine_of(pool), move |e| Ok(e.files(&key)?)).await?;
            if files.open.is_none() || start.elapsed() > CLOSE_TIMEOUT {
                return Ok(files);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// VMs that have a file open, by the live state of all hypervisors.
    async fn live(&self, files: &Files) -> Result<Vec<(String, AttachedDisk)>> {
        if files.complete.is_empty() {
            return Ok(Vec::new());
        }
        let queries = self.0.hypervisors.keys().map(|name| async move {
            let listed = tokio::time::timeout(TIMEOUT, self.attached_disks(name)).await;
            let listed = listed.unwrap_or_else(|_| Err(format!("no answer within {TIMEOUT:?}")));
            listed.map(|all| (name, all)).map_err(|why| cannot_query(name, &why))
        });
        let mut live = Vec::new();
        for (name, all) in futures::future::try_join_all(queries).await? {
            let has = all.iter().filter(|one| files.complete.contains(&one.path));
            live.extend(has.map(|one| (name.clone(), one.clone())));
        }
        Ok(live)
    }

    /// All disks attached on a hypervisor, queried from now on. Concurrent callers share one query.
    async fn attached_disks(&self, hypervisor: &str) -> Result<Arc<Vec<AttachedDisk>>, String> {
        let started = Instant::now();
        let own = self.hypervisor(hypervisor).map_err(|failure| failure.to_string())?;
        let listing = self.0.disk_listings.get(hypervisor).ok_or("the hypervisor is not configured")?;
        let mut latest = listing.lock().await;
        if let Some((when, all)) = latest.as_ref()
            && *when >= started
        {
            return Ok(all.clone());
        }
        let when = Instant::now();
        let all = Arc::new(own.attached_disks().await.map_err(|error| error.to_string())?);
        *latest = Some((when, all.clone()));
        Ok(all)
    }

    /// Holders in an object's on-disk record that may have the disk, and whether the records are newer than the
    /// catalog.
    async fn recorded_attachments(
        &self,
        pool: &PoolRow,
        object: &Object,
    ) -> Result<(Vec<RecordedAttachment>, bool)> {
        let name = pool.name.clone();
        let is_stale =
            self.0.catalog.read(move |tx| -> Result<_> { Ok(tx.is_stale_for_pool(&name)?) }).await?;
        let Object::Volume(id) = object else { return Ok((Vec::new(), is_stale)) };
        let key = object.clone();
        let found =
            self.engine::<_, Failure, _>(self.engine_of(pool), move |e| Ok(e.read_record(&key)?)).await?;
        let Some(Record::Volume(found)) = found else { return Ok((Vec::new(), is_stale)) };
        // Read the catalog after the record: a record is never newer than the catalog.
        let key = id.clone();
        let Some(due) = self.0.catalog.read(move |tx| PendingRecord::of_any(tx, &key)).await? else {
            return Ok((found.holders, is_stale));
        };
        let is_stale = is_stale || due.is_newer(found.revision);
        // The record of another volume: the engine detects that and refuses.
        if found.disk_uuid != due.row.disk_uuid {
            return Ok((Vec::new(), is_stale));
        }
        let unknown = self.unended(due.unknown_attachments(*found)).await?;
        Ok((self.still_holding(&due, unknown).await?, is_stale))
    }

    /// Holders whose attachments did not end, by the catalog.
    async fn unended(&self, holders: Vec<RecordedAttachment>) -> Result<Vec<RecordedAttachment>> {
        let unended = move |tx: &Tx<'_>| -> Result<Vec<RecordedAttachment>> {
            let mut left = Vec::new();
            for one in holders {
                if !tx.is_attachment_ended_or_refused(&one.id)? {
                    left.push(one);
                }
            }
            Ok(left)
        };
        self.0.catalog.read(unended).await
    }

    /// Compares a pool's records with the revision that the catalog had at start-up, once per server run: later
    /// records are written by this server.
    pub(super) async fn compare_revisions(&self, pool: &PoolRow) -> Result<()> {
        // Volume names cannot contain a slash.
        let _lock = self.0.locks.lock(&format!("compare/{}", pool.name)).await;
        let is_compared =
            || self.0.compared.lock().unwrap_or_else(PoisonError::into_inner).contains(&pool.uuid);
        if is_compared() {
            return Ok(());
        }
        let result = self
            .probe(pool, ProbeKind::Revisions, REVISIONS_TIMEOUT, |engine: &dyn Engine| engine.revisions())
            .await;
        let found = result.map_err(|why| {
            let detail = format!("cannot compare the pool {} with the catalog: {why}", pool.name);
            Failure::from(Problem::new(ProblemCode::Unavailable, detail).about(ObjectKind::Pool, &pool.name))
        })?;
        let (name, start_revision) = (pool.name.clone(), self.0.start_revision);
        let behind = self.0.catalog.read(move |tx| find_stale(tx, start_revision, &found)).await?;
        if let Some(volumes) = behind {
            tracing::error!(pool = %pool.name, ?volumes, "{RECOVER}; until then nothing is removed there, and these volumes are not attached");
            self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.mark_stale(&name, &volumes)?) }).await?;
        }
        self.set_compared(pool);
        Ok(())
    }

    /// Records that from now on only this server writes records in a pool.
    pub(super) fn set_compared(&self, pool: &PoolRow) {
        self.0.compared.lock().unwrap_or_else(PoisonError::into_inner).insert(pool.uuid);
    }

    /// Compares all pools, for a limited time. A stalled pool is compared before anything is removed or written
    /// there.
    pub(super) async fn compare_all_revisions(&self) -> Result<()> {
        let pools = self.0.catalog.read(|tx| -> Result<_> { Ok(tx.pools()?) }).await?;
        let comparing = pools.into_iter().filter(|pool| pool.marked).map(|pool| {
            let service = self.clone();
            self.0.tasks.spawn(async move {
                if let Err(failure) = service.compare_revisions(&pool).await {
                    tracing::warn!(pool = %pool.name, %failure, "the pool will be compared with the catalog before anything is removed or written there");
                }
            })
        });
        let comparing = futures::future::join_all(comparing.collect::<Vec<_>>());
        if tokio::time::timeout(START_TIMEOUT, comparing).await.is_err() {
            tracing::warn!(
                "a pool did not report its revisions in time; until then nothing is removed or written there"
            );
        }
        Ok(())
    }
}

/// Whether the catalog's start-up revision is older than these records, and for which volumes.
fn find_stale(tx: &Tx<'_>, start_revision: u64, found: &Revisions) -> Result<Option<Vec<VolumeId>>> {
    let newest = found.volumes.values().copied().max().unwrap_or(0).max(found.pool);
    let mut volumes = Vec::new();
    for (id, revision) in &found.volumes {
        // A file without a row may have been copied there by an operator.
        if tx.volume_revision(id)?.is_some_and(|row| *revision > row.min(start_revision)) {
            volumes.push(id.clone());
        }
    }
    Ok((newest > start_revision || !volumes.is_empty()).then_some(volumes))
}

fn cannot_query(hypervisor: &str, why: &str) -> Failure {
    let detail = format!(
        "the hypervisor {hypervisor} cannot report which files its VMs use: {why}; until it can, nothing is removed or \
         recreated"
    );
    Problem::new(ProblemCode::Unavailable, detail).about(ObjectKind::Hypervisor, hypervisor).into()
}

fn refused(object: &Object, pool: &PoolRow, reasons: &[Refusal]) -> Failure {
    let reasons_text: Vec<String> = reasons.iter().map(ToString::to_string).collect();
    let recover =
        if reasons.iter().any(Refusal::is_catalog_stale) { format!("; {RECOVER}") } else { String::new() };
    let detail = format!(
        "refusing to change the data of {object} in pool {}: {}{recover}",
        pool.name,
        reasons_text.join("; ")
    );
    let (what, id) = match object {
        Object::Volume(id) => (ObjectKind::Volume, id.to_string()),
        Object::Snapshot(id) => (ObjectKind::Snapshot, id.to_string()),
    };
    let nodes = reasons.iter().flat_map(holding_nodes).collect();
    Problem::new(ProblemCode::InUse, detail).about(what, id).used_by(nodes).into()
}

fn holding_nodes(reason: &Refusal) -> Vec<infra_api::NodeRef> {
    let node = |uuid, name: &str| infra_api::NodeRef { uuid, name: name.to_owned() };
    match reason {
        Refusal::Attached(vms) => vms.iter().map(|(_, vm)| node(vm.node, &vm.name)).collect(),
        Refusal::Recorded(holders) => holders.iter().map(|one| node(one.uuid, &one.node.name)).collect(),
        Refusal::Open(_) | Refusal::StaleCatalog => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::{Catalog, CatalogError};

    #[tokio::test]
    async fn a_catalog_is_older_than_a_pool_with_later_revisions() {
        let dir = tempfile::tempdir().unwrap();
        let catalog = Catalog::open(dir.path(), Duration::ZERO).unwrap();
        let is_older = async |pool: u64, volume: u64| {
            let volumes = [(VolumeId::new("v").unwrap(), volume)].into();
            let read =
                move |tx: &Tx<'_>| Ok::<_, CatalogError>(find_stale(tx, 5, &Revisions { pool, volumes }));
            catalog.read(read).await.unwrap().unwrap().is_some()
        };
        assert!(!is_older(5, 5).await && !is_older(0, 0).await);
        assert!(is_older(6, 0).await && is_older(0, 6).await);
    }
}
