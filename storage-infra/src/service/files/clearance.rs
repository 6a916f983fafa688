//! Clearance before irreversible operations: checks all sources that know who uses an object's files, and issues the
//! permission that the engine requires. A source that cannot be queried is a reason to refuse.

use std::time::Duration;

use infra_api::{NodeRef, ObjectKind, Problem, ProblemCode};
use tokio::time::Instant;
use uuid::Uuid;

use super::ObjectFiles;
use crate::catalog::{PoolRow, VolumeRow};
use crate::engine::clearance::Refusal;
use crate::engine::record::RecordedAttachment;
use crate::engine::{Clearance, Evidence, Files, Object, Record};
use crate::hypervisor::{AttachedDisk, DiskLocation};
use crate::service::pools::RECOVER;
use crate::service::problems::{Failure, Result};
use crate::service::records::{PendingRecord, unended};

/// Time for a process or device to close a file after it was told to release it.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);
/// Timeout for a hypervisor to list its attached disks.
const TIMEOUT: Duration = Duration::from_secs(10);

impl ObjectFiles {
    /// Checks whether a volume's bytes may be removed or recreated.
    pub(in crate::service) async fn clear_volume(
        &self,
        pool: &PoolRow,
        row: &VolumeRow,
    ) -> Result<Clearance> {
        self.clear(pool, Object::Volume(row.id.clone()), row.disk_uuid).await
    }

    /// Checks whether an object's bytes may be removed or recreated. The caller holds the object's lock.
    pub(in crate::service) async fn clear(
        &self,
        pool: &PoolRow,
        object: Object,
        identity: Uuid,
    ) -> Result<Clearance> {
        self.revisions.compare(pool).await?;
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
            let files = self.engines.run::<_, Failure, _>(pool, move |e| Ok(e.files(&key)?)).await?;
            if files.open.is_none() || start.elapsed() > CLOSE_TIMEOUT {
                return Ok(files);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Fails if a VM has data attached that is no object, by the live state of all hypervisors.
    pub(in crate::service) async fn refuse_attached_data(&self, data: DiskLocation) -> Result<()> {
        let shown = data.to_string();
        let files = Files { complete: vec![data], ..Files::default() };
        let live = self.live(&files).await?;
        if live.is_empty() {
            return Ok(());
        }
        let refusal = Refusal::Attached(live);
        let detail = format!("{shown} cannot become a volume: {refusal}");
        Err(Problem::new(ProblemCode::InUse, detail).used_by(holding_nodes(&refusal)).into())
    }

    /// VMs that have a file open, by the live state of all hypervisors.
    async fn live(&self, files: &Files) -> Result<Vec<(String, AttachedDisk)>> {
        if files.complete.is_empty() {
            return Ok(Vec::new());
        }
        let queries = self.hypervisors.iter().map(|(name, _)| async move {
            let listed = tokio::time::timeout(TIMEOUT, self.hypervisors.attached_disks(name)).await;
            let listed = listed.unwrap_or_else(|_| Err(format!("no answer within {TIMEOUT:?}")));
            listed.map(|all| (name, all)).map_err(|why| cannot_query(name, &why))
        });
        let mut live = Vec::new();
        for (name, all) in futures::future::try_join_all(queries).await? {
            let has = all.iter().filter(|one| files.complete.iter().any(|data| one.uses(data)));
            live.extend(has.map(|one| (name.clone(), one.clone())));
        }
        Ok(live)
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
            self.core.catalog().read(move |tx| -> Result<_> { Ok(tx.is_stale_for_pool(&name)?) }).await?;
        let Object::Volume(id) = object else { return Ok((Vec::new(), is_stale)) };
        let key = object.clone();
        let found = self.engines.run::<_, Failure, _>(pool, move |e| Ok(e.read_record(&key)?)).await?;
        let Some(Record::Volume(found)) = found else { return Ok((Vec::new(), is_stale)) };
        // Read the catalog after the record: a record is never newer than the catalog.
        let key = id.clone();
        let Some(due) = self.core.catalog().read(move |tx| PendingRecord::of_any(tx, &key)).await? else {
            return Ok((found.holders, is_stale));
        };
        let is_stale = is_stale || due.is_newer(found.revision);
        // The record of another volume: the engine detects that and refuses.
        if found.disk_uuid != due.row.disk_uuid {
            return Ok((Vec::new(), is_stale));
        }
        let unknown = due.unknown_attachments(*found);
        let unknown = self.core.catalog().read(move |tx| unended(tx, unknown)).await?;
        // The record of the other file of a move is older than its attachments, whose ids may be forgotten: the VMs tell.
        let is_old = due.is_due() || pool.name != due.row.pool;
        Ok((self.records.still_holding(&due, unknown, is_old).await?, is_stale))
    }
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

fn holding_nodes(reason: &Refusal) -> Vec<NodeRef> {
    let node = |uuid, name: &str| NodeRef { uuid, name: name.to_owned() };
    match reason {
        Refusal::Attached(vms) => vms.iter().map(|(_, vm)| node(vm.node, &vm.name)).collect(),
        Refusal::Recorded(holders) => holders.iter().map(|one| node(one.uuid, &one.node.name)).collect(),
        Refusal::Open(_) | Refusal::StaleCatalog => Vec::new(),
    }
}
