//! The one gate before anything irreversible: asks everybody who knows who has an object's files, and gives the permission
//! that the engine's functions need. Who cannot be asked is a reason to refuse.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use infra_api::{Problem, ProblemCode, VolumeId, What};
use uuid::Uuid;

use super::asking::Question;
use super::records::Due;
use super::{Failure, Result, Service};
use crate::catalog::{PoolRow, Tx, VolumeRow};
use crate::engine::clearance::Refusal;
use crate::engine::record::Holder;
use crate::engine::{Cleared, Engine, Evidence, Files, Object, Record, Revisions};
use crate::hypervisor::Plugged;

/// How long a process or device may take to close a file that it was told to let go of.
const CLOSING: Duration = Duration::from_secs(3);
/// How long a hypervisor may take to say what it has open.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long the start waits for pools to be compared with the catalog.
const AT_START: Duration = Duration::from_secs(5);
/// How long a pool may take to say how new all of its records are.
const READING: Duration = Duration::from_secs(600);

/// What a hypervisor had plugged when it was last asked, and when that was begun.
pub(super) type Listing = tokio::sync::Mutex<Option<(Instant, Arc<Vec<Plugged>>)>>;

/// What to do about a catalog that is older than a pool.
pub(super) const RECOVER: &str =
    "the catalog is older than the pool: stop the server and rebuild it with `storage-infra recover`";

impl Service {
    /// Asks whether a volume's bytes may go, or be made anew.
    pub(super) async fn clear_volume(&self, pool: &PoolRow, row: &VolumeRow) -> Result<Cleared> {
        self.clear(pool, Object::Volume(row.id.clone()), row.disk_uuid).await
    }

    /// Asks whether an object's bytes may go, or be made anew. The object's lock is held.
    pub(super) async fn clear(&self, pool: &PoolRow, object: Object, identity: Uuid) -> Result<Cleared> {
        self.compare_revisions(pool).await?;
        let files = self.closed_files(pool, &object).await?;
        let mut evidence =
            Evidence { object, identity, files, is_behind: false, noted: Vec::new(), live: Vec::new() };
        if !evidence.files.is_nothing() {
            evidence.live = self.live(&evidence.files).await?;
            (evidence.noted, evidence.is_behind) = self.noted(pool, &evidence.object).await?;
        }
        let object = evidence.object.clone();
        evidence.decide().map_err(|reasons| refused(&object, pool, &reasons))
    }

    /// An object's files, after whoever was told to let go of them has had time to.
    async fn closed_files(&self, pool: &PoolRow, object: &Object) -> Result<Files> {
        let start = Instant::now();
        loop {
            let key = object.clone();
            let files =
                self.engine::<_, Failure, _>(self.engine_of(pool), move |e| Ok(e.files(&key)?)).await?;
            if files.open.is_none() || start.elapsed() > CLOSING {
                return Ok(files);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// The VMs that have a file, by the live state of all hypervisors.
    async fn live(&self, files: &Files) -> Result<Vec<(String, Plugged)>> {
        if files.complete.is_empty() {
            return Ok(Vec::new());
        }
        let asking = self.0.hypervisors.keys().map(|name| async move {
            let listed = tokio::time::timeout(PATIENCE, self.listed(name)).await;
            let listed = listed.unwrap_or_else(|_| Err(format!("no answer within {PATIENCE:?}")));
            listed.map(|all| (name, all)).map_err(|why| cannot_say(name, &why))
        });
        let mut live = Vec::new();
        for (name, all) in futures::future::try_join_all(asking).await? {
            let has = all.iter().filter(|one| files.complete.contains(&one.path));
            live.extend(has.map(|one| (name.clone(), one.clone())));
        }
        Ok(live)
    }

    /// All that a hypervisor has plugged, asked from now on; by one for all who wait.
    async fn listed(&self, hypervisor: &str) -> Result<Arc<Vec<Plugged>>, String> {
        let began = Instant::now();
        let own = self.hypervisor(hypervisor).map_err(|failure| failure.to_string())?;
        let listing = self.0.listings.get(hypervisor).ok_or("it is not known")?;
        let mut latest = listing.lock().await;
        if let Some((when, all)) = latest.as_ref()
            && *when >= began
        {
            return Ok(all.clone());
        }
        let when = Instant::now();
        let all = Arc::new(own.plugged().await.map_err(|error| error.to_string())?);
        *latest = Some((when, all.clone()));
        Ok(all)
    }

    /// Who is noted with an object and may have it, and whether more is noted than the catalog knows.
    async fn noted(&self, pool: &PoolRow, object: &Object) -> Result<(Vec<Holder>, bool)> {
        let name = pool.name.clone();
        let is_behind = self.0.catalog.read(move |tx| -> Result<_> { Ok(tx.is_pool_behind(&name)?) }).await?;
        let Object::Volume(id) = object else { return Ok((Vec::new(), is_behind)) };
        let key = object.clone();
        let found = self.engine::<_, Failure, _>(self.engine_of(pool), move |e| Ok(e.noted(&key)?)).await?;
        let Some(Record::Volume(found)) = found else { return Ok((Vec::new(), is_behind)) };
        // After what is noted, which is never newer.
        let key = id.clone();
        let Some(due) = self.0.catalog.read(move |tx| Due::of_any(tx, &key)).await? else {
            return Ok((found.holders, is_behind));
        };
        let is_behind = is_behind || due.is_behind(found.revision);
        // Of another volume: the engine says so, and leaves it alone.
        if found.disk_uuid != due.row.disk_uuid {
            return Ok((Vec::new(), is_behind));
        }
        let strangers = self.unended(due.strangers_in(*found)).await?;
        Ok((self.still_there(&due, strangers).await?, is_behind))
    }

    /// Those whose attachments did not end, as far as the catalog knows.
    async fn unended(&self, holders: Vec<Holder>) -> Result<Vec<Holder>> {
        let unended = move |tx: &Tx<'_>| -> Result<Vec<Holder>> {
            let mut left = Vec::new();
            for one in holders {
                if !tx.is_attachment_over(&one.id)? {
                    left.push(one);
                }
            }
            Ok(left)
        };
        self.0.catalog.read(unended).await
    }

    /// Compares what is noted in a pool with the catalog as it was at the start, once in the server's life: from then on this
    /// server notes there what it does.
    pub(super) async fn compare_revisions(&self, pool: &PoolRow) -> Result<()> {
        // No volume can have a name with a slash.
        let _lock = self.0.locks.lock(&format!("compare/{}", pool.name)).await;
        let is_compared =
            || self.0.compared.lock().unwrap_or_else(PoisonError::into_inner).contains(&pool.uuid);
        if is_compared() {
            return Ok(());
        }
        let asked =
            self.ask(pool, Question::Revisions, READING, |engine: &dyn Engine| engine.revisions()).await;
        let found = asked.map_err(|why| {
            let detail = format!("cannot compare the pool {} with the catalog: {why}", pool.name);
            Failure::from(Problem::new(ProblemCode::Unavailable, detail).about(What::Pool, &pool.name))
        })?;
        let (name, started) = (pool.name.clone(), self.0.started);
        let behind = self.0.catalog.read(move |tx| older(tx, started, &found)).await?;
        if let Some(volumes) = behind {
            tracing::error!(pool = %pool.name, ?volumes, "{RECOVER}; until then nothing is removed there, and these volumes are not plugged");
            self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.set_behind(&name, &volumes)?) }).await?;
        }
        self.note_compared(pool);
        Ok(())
    }

    /// Notes that from now on only this server notes anything in a pool.
    pub(super) fn note_compared(&self, pool: &PoolRow) {
        self.0.compared.lock().unwrap_or_else(PoisonError::into_inner).insert(pool.uuid);
    }

    /// Compares all pools. Waits only a while: what hangs is compared before anything is removed or noted there.
    pub(super) async fn compare_all_revisions(&self) -> Result<()> {
        let pools = self.0.catalog.read(|tx| -> Result<_> { Ok(tx.pools()?) }).await?;
        let comparing = pools.into_iter().filter(|pool| pool.marked).map(|pool| {
            let service = self.clone();
            self.0.tasks.spawn(async move {
                if let Err(failure) = service.compare_revisions(&pool).await {
                    tracing::warn!(pool = %pool.name, %failure, "will be compared before anything is removed or noted there");
                }
            })
        });
        let comparing = futures::future::join_all(comparing.collect::<Vec<_>>());
        if tokio::time::timeout(AT_START, comparing).await.is_err() {
            tracing::warn!(
                "a pool does not say in time how new it is; nothing is removed or noted there before it has"
            );
        }
        Ok(())
    }
}

/// Whether a catalog that was so new at the start is older than what was found, and which volumes it knows too little of.
fn older(tx: &Tx<'_>, started: u64, found: &Revisions) -> Result<Option<Vec<VolumeId>>> {
    let newest = found.volumes.values().copied().max().unwrap_or(0).max(found.pool);
    let mut volumes = Vec::new();
    for (id, revision) in &found.volumes {
        // One without a row may have been put there by hand.
        if tx.volume_revision(id)?.is_some_and(|row| *revision > row.min(started)) {
            volumes.push(id.clone());
        }
    }
    Ok((newest > started || !volumes.is_empty()).then_some(volumes))
}

fn cannot_say(hypervisor: &str, why: &str) -> Failure {
    let detail = format!(
        "the hypervisor {hypervisor} cannot say which files its VMs have: {why}; nothing is removed or made anew until it can"
    );
    Problem::new(ProblemCode::Unavailable, detail).about(What::Hypervisor, hypervisor).into()
}

fn refused(object: &Object, pool: &PoolRow, reasons: &[Refusal]) -> Failure {
    let told: Vec<String> = reasons.iter().map(ToString::to_string).collect();
    let recover = if reasons.iter().any(Refusal::is_behind) { format!("; {RECOVER}") } else { String::new() };
    let detail =
        format!("the bytes of {object} in pool {} stay as they are: {}{recover}", pool.name, told.join("; "));
    let (what, id) = match object {
        Object::Volume(id) => (What::Volume, id.to_string()),
        Object::Snapshot(id) => (What::Snapshot, id.to_string()),
    };
    let nodes = reasons.iter().flat_map(holding_nodes).collect();
    Problem::new(ProblemCode::InUse, detail).about(what, id).used_by(nodes).into()
}

fn holding_nodes(reason: &Refusal) -> Vec<infra_api::NodeRef> {
    let node = |uuid, name: &str| infra_api::NodeRef { uuid, name: name.to_owned() };
    match reason {
        Refusal::Plugged(vms) => vms.iter().map(|(_, vm)| node(vm.node, &vm.name)).collect(),
        Refusal::Noted(holders) => holders.iter().map(|one| node(one.uuid, &one.node.name)).collect(),
        Refusal::Open(_) | Refusal::Behind => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::{Catalog, CatalogError};

    #[tokio::test]
    async fn a_catalog_is_older_than_a_pool_that_knows_of_later_changes() {
        let dir = tempfile::tempdir().unwrap();
        let catalog = Catalog::open(dir.path(), Duration::ZERO).unwrap();
        let is_older = async |pool: u64, volume: u64| {
            let volumes = [(VolumeId::new("v").unwrap(), volume)].into();
            let look = move |tx: &Tx<'_>| Ok::<_, CatalogError>(older(tx, 5, &Revisions { pool, volumes }));
            catalog.read(look).await.unwrap().unwrap().is_some()
        };
        assert!(!is_older(5, 5).await && !is_older(0, 0).await);
        assert!(is_older(6, 0).await && is_older(0, 6).await);
    }
}
