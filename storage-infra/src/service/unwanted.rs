//! Disks of our volumes that virtual machines have and no attachment stands for: a VM that went on from a saved state which
//! was said to be discarded has them, or one that a request reached late. They are looked for again and again, reported,
//! and unplugged where it is proven that they are ours and that nobody wants them. Nobody else gets the volume meanwhile.

use std::path::Path;
use std::time::Duration;

use infra_api::{Change, EventKind, NodeRef, Problem, ProblemCode, VolumeId, VolumeState, What};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::pools::pool_of;
use super::power::is_without_disks;
use super::records::Due;
use super::{Result, Service};
use crate::catalog::{NodeRow, PoolRow, Tx, VolumeRow};
use crate::engine::{DiskSource, Object, Record};
use crate::hypervisor::{Disk, Hypervisor, Plugged, Unplugged, wwn};

/// How often what is plugged is compared with what is attached.
const EVERY: Duration = Duration::from_secs(15);
/// How soon again while something is there that nobody wants.
const AGAIN: Duration = Duration::from_secs(3);

/// A disk of a volume in a virtual machine, and no attachment of that volume to that node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Unwanted {
    hypervisor: String,
    /// The virtual machine, as its hypervisor calls it.
    pub(super) node: NodeRef,
    /// What is known and what is done about it.
    pub(super) message: String,
}

/// What is plugged and may be unwanted, with what the catalog says about it.
struct Found {
    plugged: Plugged,
    volume: VolumeRow,
    pool: PoolRow,
    node: Option<NodeRow>,
}

impl Found {
    /// None where it is no file of a volume, or is wanted.
    fn of(tx: &Tx<'_>, pools: &[PoolRow], plugged: &Plugged) -> Result<Option<Self>> {
        let Some(id) = pools.iter().find_map(|pool| volume_in(pool, &plugged.path)) else { return Ok(None) };
        let Some(volume) = tx.volume(&id)? else { return Ok(None) };
        let pool = pool_of(tx, &volume)?;
        let other = volume_in(&pool, &plugged.path).as_ref() != Some(&id);
        if other || !tx.attachments(Some(plugged.node), Some(&id))?.is_empty() {
            return Ok(None);
        }
        Ok(Some(Self { plugged: plugged.clone(), volume, pool, node: tx.node(plugged.node)? }))
    }

    fn disk(&self, source: DiskSource) -> Disk {
        let read_only = self.plugged.read_only;
        let (uuid, qos, on_full) = (self.volume.disk_uuid, self.volume.qos, self.pool.spec.on_full);
        Disk { uuid, source, read_only, shared: false, qos, on_full }
    }

    /// Why it is not proven that this is our disk and that nobody wants it. None where it is. `is_noted_there`: what is
    /// noted with the bytes says that the VM has it.
    fn not_ours(&self, hypervisor: &str, noted: Option<&Record>, is_noted_there: bool) -> Option<String> {
        let is_node = self.node.as_ref().is_some_and(|node| node.spec.hypervisor == hypervisor);
        let is_disk = self.plugged.wwn == Some(wwn(self.volume.disk_uuid));
        let is_volume = noted.is_some_and(|noted| noted.identity() == self.volume.disk_uuid);
        let why = match (is_node, is_disk, is_volume, is_noted_there) {
            (false, ..) => "the VM is not registered there as a node",
            (_, false, ..) => "its serial is not that of the volume's disk, so somebody else plugged it",
            (_, _, false, _) => "what is noted with the file does not say that it is this volume's",
            (.., true) => {
                "the VM is noted with the file as one that has it: the catalog may be older than the pool, and then `storage-infra \
                 recover` rebuilds it"
            }
            (true, true, true, false) => return None,
        };
        Some(why.to_owned())
    }

    fn node_ref(&self) -> NodeRef {
        let name = self.node.as_ref().map_or(&self.plugged.name, |node| &node.spec.name);
        NodeRef { uuid: self.plugged.node, name: name.clone() }
    }
}

/// The volume whose file this would be in a pool, by its name.
fn volume_in(pool: &PoolRow, path: &Path) -> Option<VolumeId> {
    let name = path.strip_prefix(&pool.spec.path).ok()?.to_str()?;
    VolumeId::new(name.strip_suffix(".raw")?).ok()
}

impl Service {
    /// Compares until told to stop, each hypervisor by itself: one may hang.
    pub async fn keep_compared(&self, stop: CancellationToken) {
        let all = self.0.hypervisors.keys().map(|name| self.keep_hypervisor_compared(name, &stop));
        tokio::join!(futures::future::join_all(all), stop.cancelled());
    }

    async fn keep_hypervisor_compared(&self, hypervisor: &str, stop: &CancellationToken) {
        let Some(now) = self.0.compare.get(hypervisor) else { return };
        loop {
            let compared = self.compare(hypervisor);
            let result = tokio::select! { () = stop.cancelled() => return, result = compared => result };
            let pause = match result {
                Ok(0) => EVERY,
                Ok(_) => AGAIN,
                Err(failure) => {
                    tracing::debug!(hypervisor, %failure, "could not compare what is plugged with what is attached");
                    EVERY
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                () = now.notified() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Asks for a comparison at once.
    pub(super) fn compare_now(&self, hypervisor: &str) {
        if let Some(now) = self.0.compare.get(hypervisor) {
            now.notify_one();
        }
    }

    /// Compares once, and says how many disks nobody wants.
    async fn compare(&self, hypervisor: &str) -> Result<usize> {
        let own = self.hypervisor(hypervisor)?;
        let plugged = own.plugged().await?;
        let look = move |tx: &Tx<'_>| -> Result<Vec<Found>> {
            let pools = tx.pools()?;
            let found = plugged.iter().filter_map(|one| Found::of(tx, &pools, one).transpose());
            found.collect()
        };
        let mut all = Vec::new();
        for found in self.0.catalog.read(look).await? {
            if let Some(unwanted) = self.confirm(hypervisor, &*own, found).await? {
                all.push(unwanted);
            }
        }
        let count = all.len();
        self.note_unwanted(hypervisor, all);
        Ok(count)
    }

    /// Looks again, while the volume's lock keeps everybody from plugging and unplugging it, and unplugs what is proven to
    /// be ours.
    async fn confirm(
        &self,
        hypervisor: &str,
        own: &dyn Hypervisor,
        found: Found,
    ) -> Result<Option<(VolumeId, Unwanted)>> {
        let _lock = self.0.locks.lock(found.volume.id.as_str()).await;
        let plugged = found.plugged;
        let again = move |tx: &Tx<'_>| Found::of(tx, &tx.pools()?, &plugged);
        let Some(found) = self.0.catalog.read(again).await? else { return Ok(None) };
        let disk = found.disk(self.engine_of(&found.pool).source(&found.volume.id));
        let is_ours = found.plugged.wwn.as_ref() == Some(&disk.wwn());
        let seen = own.presence(found.plugged.node, std::slice::from_ref(&disk)).await?;
        let has_left = is_ours && !seen.disks.contains(&disk.uuid);
        if has_left || is_without_disks(seen.facts.power.state()) {
            return Ok(None);
        }
        let noted = self.noted_of(&found).await?;
        let is_noted_there = self.is_noted_there(noted.as_ref(), &found).await?;
        let node = found.node_ref();
        let what = format!(
            "the VM {node} on hypervisor {hypervisor} has the disk of volume {} and no attachment stands for it",
            found.volume.id
        );
        let unwanted = |done: String| {
            let message = format!("{what}: {done}");
            Some((
                found.volume.id.clone(),
                Unwanted { hypervisor: hypervisor.to_owned(), node: node.clone(), message },
            ))
        };
        if let Some(why) = found.not_ours(hypervisor, noted.as_ref(), is_noted_there) {
            return Ok(unwanted(format!("it is left there, since {why}; unplug it there by hand")));
        }
        tracing::warn!(volume = %found.volume.id, %node, hypervisor, "{what}: unplugging it");
        Ok(match own.unplug(found.plugged.node, &disk).await? {
            Unplugged::Gone => {
                self.0.metrics.unplugged_unwanted();
                unwanted("it was unplugged".into())
            }
            Unplugged::StillThere(why) => unwanted(format!("it was asked to leave and does not: {why}")),
        })
    }

    async fn noted_of(&self, found: &Found) -> Result<Option<Record>> {
        if found.volume.state != VolumeState::Ready {
            return Ok(None);
        }
        let object = Object::Volume(found.volume.id.clone());
        self.engine(self.engine_of(&found.pool), move |engine| Ok(engine.noted(&object)?)).await
    }

    /// Whether a node is noted with a volume's bytes as one that has it, and was not told to let go of it since; or may be in
    /// what the catalog does not know.
    async fn is_noted_there(&self, noted: Option<&Record>, found: &Found) -> Result<bool> {
        let Some(Record::Volume(noted)) = noted else { return Ok(false) };
        self.compare_revisions(&found.pool).await?;
        let here = noted.holders.iter().filter(|one| one.uuid == found.plugged.node);
        let ids: Vec<_> = here.map(|one| one.id.clone()).collect();
        let (volume, revision) = (found.volume.id.clone(), noted.revision);
        let told = move |tx: &Tx<'_>| -> Result<bool> {
            for id in &ids {
                if !tx.is_attachment_over(id)? {
                    return Ok(true);
                }
            }
            // A reader may have come that is not noted yet.
            let is_behind = Due::of_any(tx, &volume)?.is_some_and(|due| due.is_behind(revision));
            Ok(ids.is_empty() && is_behind)
        };
        self.0.catalog.read(told).await
    }

    /// Notes all that a hypervisor has and nobody wants.
    fn note_unwanted(&self, hypervisor: &str, found: Vec<(VolumeId, Unwanted)>) {
        let mut troubles = self.troubles();
        let of_it = |one: &(VolumeId, Unwanted)| one.1.hypervisor == hypervisor;
        let before: Vec<_> = troubles.unwanted.iter().filter(|one| of_it(one)).cloned().collect();
        troubles.unwanted.retain(|one| !of_it(one));
        troubles.unwanted.extend(found.iter().cloned());
        self.0.metrics.set_unwanted(hypervisor, found.len());
        drop(troubles);
        for (volume, one) in found.iter().filter(|one| !before.contains(one)) {
            tracing::error!(%volume, "{}", one.message);
            self.emit(EventKind::Volume, volume, Change::Updated);
        }
        for (volume, one) in before.iter().filter(|one| !found.contains(one)) {
            tracing::info!(%volume, node = %one.node, hypervisor, "the disk that nobody wants is gone");
            self.emit(EventKind::Volume, volume, Change::Updated);
        }
    }

    fn unwanted(&self, volume: &VolumeId, to: Option<Uuid>) -> Option<Unwanted> {
        let elsewhere = |one: &&(VolumeId, Unwanted)| one.0 == *volume && Some(one.1.node.uuid) != to;
        self.troubles().unwanted.iter().find(elsewhere).map(|(_, one)| one.clone())
    }

    /// Refuses a volume that another virtual machine has, and no attachment stands for that. No volume's lock may be held.
    pub(super) async fn refuse_unwanted(&self, volume: &VolumeId, to: Option<Uuid>) -> Result<()> {
        if let Some(one) = self.unwanted(volume, to)
            && let Err(failure) = self.compare(&one.hypervisor).await
        {
            tracing::debug!(hypervisor = one.hypervisor, %failure, "what was known of its disks counts");
        }
        let Some(one) = self.unwanted(volume, to) else { return Ok(()) };
        let problem = Problem::new(ProblemCode::InUse, one.message).about(What::Volume, volume);
        Err(problem.used_by(vec![one.node]).into())
    }
}

#[cfg(test)]
mod tests {
    use infra_api::{EngineKind, Labels, NodeSpec, PoolName, PoolSpec, Qos, VolumeSpec};

    use super::*;
    use crate::service::records::volume_record;

    fn found() -> Found {
        let spec = VolumeSpec {
            capacity_bytes: 1,
            limit_bytes: None,
            placement: Default::default(),
            source: None,
            qos: Qos::default(),
            shareable: false,
            labels: Labels::new(),
        };
        let disk_uuid = Uuid::from_u128(7);
        let volume = VolumeRow {
            id: VolumeId::new("v").unwrap(),
            pool: PoolName::new("p").unwrap(),
            capacity: 1,
            grow_to: None,
            disk_uuid,
            state: VolumeState::Ready,
            spec,
            created_at: String::new(),
            family: disk_uuid,
            copying: false,
            qos: Qos::default(),
            qos_due: false,
            format_token: infra_api::FormatToken::random(),
            written: false,
        };
        let (engine, path) = (EngineKind::File, "/pool".to_owned());
        let on_full = infra_api::OnFull::default();
        let spec = PoolSpec { engine, path, labels: Labels::new(), cordoned: false, on_full };
        let pool =
            PoolRow { name: PoolName::new("p").unwrap(), uuid: Uuid::from_u128(1), spec, marked: true };
        let node = Uuid::from_u128(9);
        let spec =
            NodeSpec { name: "vm".into(), hypervisor: "here".into(), zone: None, labels: Labels::new() };
        let plugged = Plugged {
            node,
            name: "domain".into(),
            path: "/pool/v.raw".into(),
            wwn: Some(wwn(disk_uuid)),
            read_only: false,
        };
        Found { plugged, volume, pool, node: Some(NodeRow { uuid: node, spec }) }
    }

    #[test]
    fn only_a_disk_that_is_proven_ours_and_wanted_by_nobody_is_unplugged() {
        let ours = volume_record(&found().volume, 0, Vec::new());
        assert_eq!(found().not_ours("here", Some(&ours), false), None);
        let why = |found: Found, noted: Option<&Record>, is_noted_there| {
            found.not_ours("here", noted, is_noted_there).unwrap()
        };
        assert!(why(Found { node: None, ..found() }, Some(&ours), false).contains("not registered"));
        assert!(found().not_ours("there", Some(&ours), false).unwrap().contains("not registered"));
        let plugged = Plugged { wwn: None, ..found().plugged };
        assert!(why(Found { plugged, ..found() }, Some(&ours), false).contains("serial"));
        assert!(why(found(), None, false).contains("does not say"));
        let other = VolumeRow { disk_uuid: Uuid::from_u128(8), ..found().volume };
        assert!(why(found(), Some(&volume_record(&other, 0, Vec::new())), false).contains("does not say"));
        assert!(why(found(), Some(&ours), true).contains("older than the pool"));
    }

    #[test]
    fn a_file_is_a_volumes_by_its_place_and_name_alone() {
        let pool = found().pool;
        let volume = |path: &str| volume_in(&pool, Path::new(path)).map(|id| id.to_string());
        assert_eq!(volume("/pool/v.raw").as_deref(), Some("v"));
        for other in ["/pool/v.snap", "/pools/v.raw", "/pool/deeper/v.raw", "/pool/.raw", "v.raw"] {
            assert_eq!(volume(other), None, "{other}");
        }
    }
}
