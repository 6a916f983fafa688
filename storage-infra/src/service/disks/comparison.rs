//! Comparison of the disks that VMs really have with what the server attached. A difference makes the volume abnormal, and
//! holds it against everything that would lose or copy the wrong data, until the disk is right again.

use std::collections::HashMap;
use std::fs;
use std::sync::Arc;
use std::time::Duration;

use infra_api::{AttachmentState, Change, EventKind, ObjectKind, Problem, ProblemCode, VolumeId};
use uuid::Uuid;

use super::context::AttachmentContext;
use crate::catalog::{AlteredDisk, AttachmentRow, Tx};
use crate::clock::now;
use crate::hypervisor::{AttachedDisk, Described, Difference, Disk, DiskLocation, Presence};
use crate::safety::Check;
use crate::service::conditions::Conditions;
use crate::service::core::Core;
use crate::service::hypervisors::Hypervisors;
use crate::service::lookups;
use crate::service::pools::Engines;
use crate::service::power::has_no_disks;
use crate::service::problems::Result;
use crate::service::transfers::blocking;

/// Time for one disk to be compared again; one volume that is locked for long does not delay others.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(5);

/// Compares disks.
pub(in crate::service) struct Comparison {
    core: Arc<Core>,
    engines: Arc<Engines>,
    hypervisors: Arc<Hypervisors>,
    conditions: Arc<Conditions>,
}

/// An attachment with what it should be in its VM.
struct Expected {
    context: AttachmentContext,
    disk: Disk,
    /// Where the server moves it.
    moving_to: Option<DiskLocation>,
    /// Whether it is known to be altered.
    altered: Option<AlteredDisk>,
}

/// The differences of a disk. Paths may be written in several ways. Blocks if the filesystem of a path does.
fn differences(found: &AttachedDisk, expected: &Disk, moving_to: Option<&DiskLocation>) -> Vec<Difference> {
    let all = found.differences(expected, moving_to);
    if !all.iter().any(Difference::diverts_writes) {
        return all;
    }
    let layers: Vec<DiskLocation> = found.layers.iter().map(canonical).collect();
    let data = expected.source.location();
    let same = |layer: &DiskLocation| {
        let is = |one: &DiskLocation| canonical(one) == *layer;
        if is(&data) { data.clone() } else { layer.clone() }
    };
    let found = AttachedDisk { layers: layers.iter().map(same).collect(), ..found.clone() };
    found.differences(expected, moving_to.map(canonical).as_ref())
}

/// The path without symbolic links.
fn canonical(location: &DiskLocation) -> DiskLocation {
    let real = location.path().and_then(|path| fs::canonicalize(path).ok());
    real.map_or_else(|| location.clone(), DiskLocation::File)
}

/// What follows from a comparison for the record of the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Verdict {
    /// Nothing changes.
    Keep,
    /// The disk is as it should be.
    Right,
    /// It is altered.
    Altered { diverted: bool, message: String },
}

/// Decides by what a VM has: its disk with the differences, or no disk.
fn decide(known: Option<&AlteredDisk>, found: Option<(&AttachedDisk, &[Difference])>) -> Verdict {
    match found {
        // Where writes went is not known any more. Otherwise there is no disk that could be wrong.
        None if known.is_some_and(|known| known.diverted) => Verdict::Keep,
        None | Some((_, [])) => known.map_or(Verdict::Keep, |_| Verdict::Right),
        Some((disk, differences)) => {
            let diverted = differences.iter().any(Difference::diverts_writes);
            let message = Described { disk, differences }.to_string();
            match known {
                Some(known) if known.diverted == diverted && known.message == message => Verdict::Keep,
                _ => Verdict::Altered { diverted, message },
            }
        }
    }
}

impl Comparison {
    pub(in crate::service) fn new(
        core: Arc<Core>,
        engines: Arc<Engines>,
        hypervisors: Arc<Hypervisors>,
        conditions: Arc<Conditions>,
    ) -> Self {
        Self { core, engines, hypervisors, conditions }
    }

    fn expected(
        engines: &Engines,
        tx: &Tx<'_>,
        row: AttachmentRow,
        altered: Option<AlteredDisk>,
    ) -> Result<Expected> {
        let context = AttachmentContext::of(tx, row)?;
        let disk = context.disk(engines.of(&context.pool).source(&context.volume.id));
        let moving = tx.volume_move(&context.volume.id)?;
        let other = moving.map(|moving| lookups::pool(tx, &moving.pool)).transpose()?;
        let moving_to = other.map(|pool| engines.of(&pool).source(&context.volume.id).location());
        Ok(Expected { context, disk, moving_to, altered })
    }

    /// Compares all disks of VMs on a hypervisor with its list of attached disks.
    pub(in crate::service) async fn compare_all(
        &self,
        hypervisor: &str,
        attached: &Arc<Vec<AttachedDisk>>,
    ) -> Result<()> {
        let (engines, name, attached) = (self.engines.clone(), hypervisor.to_owned(), attached.clone());
        let read = move |tx: &Tx<'_>| Self::candidates(&engines, tx, &name, &attached);
        let candidates = self.core.catalog().read(read).await?;
        let confirm = candidates.into_iter().map(|row| async move {
            match tokio::time::timeout(CONFIRM_TIMEOUT, self.confirm(&row)).await {
                Ok(Ok(_)) => {}
                Ok(Err(failure)) => {
                    tracing::debug!(volume = %row.volume, node = %row.node, %failure, "cannot compare a disk again");
                }
                Err(_) => tracing::debug!(volume = %row.volume, node = %row.node, "a disk is compared again later"),
            }
        });
        futures::future::join_all(confirm).await;
        self.remove_from_definitions(hypervisor).await
    }

    /// The attachments whose disks may differ from what is known of them.
    fn candidates(
        engines: &Engines,
        tx: &Tx<'_>,
        hypervisor: &str,
        attached: &[AttachedDisk],
    ) -> Result<Vec<AttachmentRow>> {
        let mut by_node: HashMap<Uuid, Vec<&AttachedDisk>> = HashMap::new();
        for disk in attached {
            by_node.entry(disk.node).or_default().push(disk);
        }
        let known = tx.all_altered_disks()?;
        let mut found = Vec::new();
        for row in tx.attachments(None, None)? {
            if row.state == AttachmentState::Attaching {
                continue;
            }
            let altered = known.get(&row.volume).and_then(|all| all.iter().find(|one| one.node == row.node));
            let expected = Self::expected(engines, tx, row, altered.cloned())?;
            if expected.context.node.spec.hypervisor != hypervisor {
                continue;
            }
            let disks = by_node.get(&expected.context.row.node).map_or(&[][..], Vec::as_slice);
            let (wwn, data) = (Some(expected.disk.wwn()), expected.disk.source.location());
            let disk = disks.iter().find(|disk| disk.wwn == wwn);
            let disk = disk.or_else(|| disks.iter().find(|disk| disk.layers.contains(&data)));
            let moving_to = expected.moving_to.as_ref();
            let differs = disk.is_some_and(|disk| !disk.differences(&expected.disk, moving_to).is_empty());
            if differs || expected.altered.is_some() {
                found.push(expected.context.row);
            }
        }
        Ok(found)
    }

    /// Compares the disks of a volume now. Fails if a VM has the other file of a move open already: the volume's data is there, and
    /// the catalog does not say so yet. The caller must not hold the volume's lock.
    pub(in crate::service) async fn check(&self, volume: &VolumeId) -> Result<()> {
        let id = volume.clone();
        let read = move |tx: &Tx<'_>| -> Result<_> { Ok(tx.attachments(None, Some(&id))?) };
        let rows = self.core.catalog().read(read).await?;
        for row in rows.iter().filter(|row| row.state != AttachmentState::Attaching) {
            if self.confirm(row).await? {
                self.core.moves().notify_one();
                let detail = format!(
                    "a VM has the file of volume {volume} open to which it is moved, as its disk; retry"
                );
                let problem = Problem::new(ProblemCode::Unavailable, detail);
                return Err(problem.about(ObjectKind::Volume, volume).into());
            }
        }
        Ok(())
    }

    /// Compares a disk under its volume's lock, which excludes attach, detach and the steps of a move. True if it has the other
    /// file of a move open.
    async fn confirm(&self, row: &AttachmentRow) -> Result<bool> {
        let _lock = self.core.lock_volume(&row.volume).await;
        self.compare(row).await
    }

    /// Compares a disk that is about to be detached, if it is known to be altered: it may be right again, and after the detach
    /// nothing shows that. The caller has the volume's lock.
    pub(super) async fn compare_if_altered(&self, row: &AttachmentRow) -> Result<()> {
        let (volume, node) = (row.volume.clone(), row.node);
        let known = move |tx: &Tx<'_>| -> Result<_> {
            Ok(tx.altered_disks(&volume)?.iter().any(|known| known.node == node))
        };
        if self.core.catalog().read(known).await? { self.compare(row).await.map(drop) } else { Ok(()) }
    }

    /// True if the disk has the other file of a move open.
    async fn compare(&self, row: &AttachmentRow) -> Result<bool> {
        let Some(expected) = self.read(row).await? else { return Ok(false) };
        let own = self.hypervisors.get(&expected.context.node.spec.hypervisor)?;
        let disk = std::slice::from_ref(&expected.disk);
        let Presence { facts, disks } = own.presence(row.node, disk).await?;
        let found = disks.get(&expected.disk.uuid).filter(|_| !has_no_disks(facts.power.state()));
        self.conclude(&expected, found).await?;
        let source = found.and_then(AttachedDisk::location);
        Ok(source.is_some() && source == expected.moving_to.as_ref())
    }

    async fn read(&self, row: &AttachmentRow) -> Result<Option<Expected>> {
        let (id, engines) = (row.id.clone(), self.engines.clone());
        let read = move |tx: &Tx<'_>| -> Result<_> {
            let Some(row) = tx.attachment(&id)? else { return Ok(None) };
            let known = tx.altered_disks(&row.volume)?.into_iter().find(|one| one.node == row.node);
            Self::expected(&engines, tx, row, known).map(Some)
        };
        self.core.catalog().read(read).await
    }

    /// Records what a disk that was just observed is like, and returns its alteration. The caller has the volume's lock.
    pub(super) async fn observed(
        &self,
        context: &AttachmentContext,
        found: &AttachedDisk,
    ) -> Result<Option<AlteredDisk>> {
        let (row, engines) = (context.row.clone(), self.engines.clone());
        let read = move |tx: &Tx<'_>| -> Result<_> {
            let known = tx.altered_disks(&row.volume)?.into_iter().find(|one| one.node == row.node);
            Self::expected(&engines, tx, row, known)
        };
        let expected = self.core.catalog().read(read).await?;
        self.conclude(&expected, Some(found)).await
    }

    async fn conclude(
        &self,
        expected: &Expected,
        found: Option<&AttachedDisk>,
    ) -> Result<Option<AlteredDisk>> {
        if !Check::Altered.applies() {
            return Ok(None);
        }
        let differences = match found.cloned() {
            None => Vec::new(),
            Some(found) => {
                let (disk, moving_to) = (expected.disk.clone(), expected.moving_to.clone());
                blocking(move || Ok(differences(&found, &disk, moving_to.as_ref()))).await?
            }
        };
        let known = expected.altered.as_ref();
        let (volume, node) = (expected.context.volume.id.clone(), expected.context.row.node);
        let altered = match decide(known, found.map(|disk| (disk, differences.as_slice()))) {
            Verdict::Keep => return Ok(expected.altered.clone()),
            Verdict::Right => None,
            Verdict::Altered { diverted, message } => {
                Some(AlteredDisk { node, diverted, message, since: now() })
            }
        };
        let (id, new) = (volume.clone(), altered.clone());
        let write = move |tx: &Tx<'_>| -> Result<()> {
            match &new {
                Some(new) => tx.set_altered_disk(&id, new)?,
                None => drop(tx.clear_altered_disk(&id, node)?),
            }
            Ok(())
        };
        self.core.catalog().run(write).await?;
        match &altered {
            Some(new) => tracing::error!(%volume, %node, "{}", new.message),
            None => tracing::info!(%volume, %node, "the disk is as it was attached again"),
        }
        self.core.emit(EventKind::Volume, &volume, Change::Updated);
        Ok(altered)
    }

    /// Accepts the data of a volume as it is, after an operator has compared it: its disks are not known to be altered any
    /// more. Those that still are will be found again.
    pub(in crate::service) async fn accept(&self, volume: &VolumeId) -> Result<()> {
        let _lock = self.core.lock_volume(volume).await;
        let id = volume.clone();
        let forget = move |tx: &Tx<'_>| -> Result<_> {
            lookups::volume_in(tx, &crate::scope::Scope::All, &id)?;
            Ok(tx.clear_altered_disks(&id)?)
        };
        let known = self.core.catalog().run(forget).await?;
        if known {
            tracing::warn!(%volume, "an operator accepted the data of the volume as it is");
            self.core.emit(EventKind::Volume, volume, Change::Updated);
        }
        Ok(())
    }

    /// Removes disks of the server from the persistent definitions of VMs: with them, a VM would start with the file and the
    /// access mode of an earlier attachment.
    async fn remove_from_definitions(&self, hypervisor: &str) -> Result<()> {
        let own = self.hypervisors.get(hypervisor)?;
        let defined = own.defined_disks().await?;
        let engines = self.engines.clone();
        let read = move |tx: &Tx<'_>| -> Result<_> {
            let pools = if defined.is_empty() { Vec::new() } else { tx.pools()? };
            let of = |disk: AttachedDisk| -> Result<_> {
                let of_pool = |pool| disk.layers.iter().find_map(|data| lookups::volume_at(pool, data));
                let Some(id) = pools.iter().find_map(of_pool) else { return Ok(None) };
                let Some(volume) = tx.volume(&id)? else { return Ok(None) };
                let pool = lookups::pool_of(tx, &volume)?;
                let expected = Disk {
                    uuid: volume.disk_uuid,
                    source: engines.of(&pool).source(&volume.id),
                    read_only: disk.read_only,
                    shared: false,
                    qos: volume.qos,
                    on_full: pool.spec.on_full,
                    options: volume.spec.disk,
                };
                Ok(Some((volume.id, disk, expected)))
            };
            defined.into_iter().filter_map(|disk| of(disk).transpose()).collect::<Result<Vec<_>>>()
        };
        let mut left = HashMap::new();
        for (volume, disk, expected) in self.core.catalog().read(read).await? {
            let AttachedDisk { node, name, target, .. } = &disk;
            let what = format!(
                "the persistent definition of the VM {name} has the disk {target} with the data of volume {volume}"
            );
            let is_ours = disk.wwn == Some(expected.wwn()) && disk.layers == [expected.source.location()];
            let removed = if is_ours {
                own.undefine(*node, &expected).await.map_err(|e| e.to_string())
            } else {
                Err("it does not have the serial of the volume, so somebody else added it".to_owned())
            };
            match removed {
                Ok(()) => {
                    tracing::warn!(%volume, %node, "{what}: removed it, because the VM would have started with it");
                    self.core.metrics().repaired();
                }
                Err(why) => {
                    let message = format!(
                        "{what}, and would start with it: {why}; remove it with virsh detach-disk {name} {target} --config"
                    );
                    left.insert(volume, message);
                }
            }
        }
        self.conditions.set_defined(hypervisor, left);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk() -> AttachedDisk {
        AttachedDisk::of(Uuid::from_u128(9), DiskLocation::File("/top".into()))
    }

    fn known(diverted: bool, message: &str) -> AlteredDisk {
        AlteredDisk { node: Uuid::from_u128(9), diverted, message: message.to_owned(), since: String::new() }
    }

    #[test]
    fn writes_that_went_elsewhere_are_forgotten_only_when_the_disk_is_seen_to_be_right() {
        let disk = disk();
        let overlay = [Difference::Transient];
        let job = [Difference::Copied { to: DiskLocation::File("/copy".into()) }];
        let of = |differences| Described { disk: &disk, differences }.to_string();
        let altered = |diverted, message: &str| Verdict::Altered { diverted, message: message.to_owned() };
        for (before, found, expected) in [
            (None, None, Verdict::Keep),
            (None, Some(&[][..]), Verdict::Keep),
            (None, Some(&overlay[..]), altered(true, &of(&overlay))),
            (None, Some(&job[..]), altered(false, &of(&job))),
            (Some(known(true, "x")), None, Verdict::Keep),
            (Some(known(true, "x")), Some(&[]), Verdict::Right),
            (Some(known(false, "x")), None, Verdict::Right),
            (Some(known(false, "x")), Some(&[]), Verdict::Right),
            (Some(known(true, &of(&overlay))), Some(&overlay), Verdict::Keep),
            (Some(known(true, "x")), Some(&job), altered(false, &of(&job))),
            (Some(known(false, "x")), Some(&overlay), altered(true, &of(&overlay))),
        ] {
            let verdict = decide(before.as_ref(), found.map(|found| (&disk, found)));
            assert_eq!(verdict, expected, "{before:?} {found:?}");
        }
    }

    #[test]
    fn a_path_through_a_symbolic_link_is_the_same_file() {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().join("pool");
        fs::create_dir(&real).unwrap();
        fs::write(real.join("v.raw"), "").unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let expected = Disk {
            uuid: Uuid::from_u128(7 << 64),
            source: crate::hypervisor::DiskSource::File(link.join("v.raw")),
            read_only: false,
            shared: false,
            qos: infra_api::Qos::default(),
            on_full: infra_api::OnFull::default(),
            options: infra_api::DiskOptions::default(),
        };
        let at = |path: std::path::PathBuf| AttachedDisk {
            wwn: Some(expected.wwn()),
            ..AttachedDisk::of(Uuid::from_u128(9), DiskLocation::File(path))
        };
        assert_eq!(differences(&at(real.join("v.raw")), &expected, None), []);
        assert_eq!(differences(&at(real.join("w.raw")), &expected, None).len(), 1);
    }
}
