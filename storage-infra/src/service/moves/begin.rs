//! Start and cancellation of a move. The pool is chosen or checked by the rules of placement, in the transaction that writes the
//! intent and reserves the space.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use infra_api::{
    Change, EngineKind, EventKind, MovePhase, MoveSpec, NodeRef, ObjectKind, PoolName, Problem, ProblemCode,
    VolumeId, VolumeState,
};

use super::Moves;
use super::state::{only_writer, waits};
use crate::audit;
use crate::catalog::{MoveRow, NodeRow, PoolRow, Tx, VolumeRow};
use crate::clock::now;
use crate::engine::Object;
use crate::placement::{self, Hosts};
use crate::service::lookups::{self, pool_of, refuse_held};
use crate::service::pools::CapacityInputs;
use crate::service::problems::{Failure, Result};
use crate::service::reach;

/// Lowest rate: a copy reads this many bytes at a time.
const MIN_RATE: u64 = 1 << 20;

/// Where a volume goes.
#[derive(Debug, Clone)]
pub(super) enum Target {
    /// To this pool, also if the volume was created in another one by name.
    Pool(PoolName),
    /// To the best other pool.
    Best,
}

impl Target {
    /// Whether a pool of this engine may be chosen. A volume becomes an image, or a file, only where somebody says so.
    fn allows(&self, engine: EngineKind, present: &PoolRow) -> bool {
        matches!(self, Self::Pool(_)) || engine == present.spec.engine
    }
}

/// Fails if a rate is lower than a copy can be.
pub(super) fn check_rate(rate: Option<u64>) -> Result<()> {
    if rate.is_none_or(|rate| rate >= MIN_RATE) {
        return Ok(());
    }
    let detail = format!("bytesPerSecond must be at least {MIN_RATE}; leave it out for no limit");
    Err(Failure::new(ProblemCode::Invalid, detail))
}

impl Moves {
    /// Starts the move of a volume, or changes its rate. Succeeds if the volume is in that pool.
    pub async fn begin(self: &Arc<Self>, id: VolumeId, spec: MoveSpec) -> Result<()> {
        check_rate(spec.bytes_per_second)?;
        let moves = self.clone();
        self.core
            .run_to_completion(async move {
                let mut inputs = moves.capacity.inputs().await?;
                moves.begin_to(&id, Target::Pool(spec.pool), spec.bytes_per_second, &mut inputs).await
            })
            .await
    }

    /// Starts a move with these measurements of the pools, which a refusal renews once.
    pub(super) async fn begin_to(
        &self,
        id: &VolumeId,
        target: Target,
        rate: Option<u64>,
        inputs: &mut CapacityInputs,
    ) -> Result<()> {
        self.unexpected_disks.refuse(id, None).await?;
        self.refuse_hypervisor(id).await?;
        let _placing = self.capacity.placing().await;
        while let Err(refusal) = self.reserve(id, &target, rate, inputs).await {
            self.capacity.rescan_after(inputs, refusal).await?;
        }
        self.core.emit(EventKind::Volume, id, Change::Updated);
        self.core.moves().notify_one();
        Ok(())
    }

    /// Fails if the hypervisor of the VM that has the volume cannot copy disks.
    async fn refuse_hypervisor(&self, id: &VolumeId) -> Result<()> {
        let name = id.clone();
        let read = move |tx: &Tx<'_>| -> Result<_> {
            let attachments = tx.attachments(None, Some(&name))?;
            let Some(only) = only_writer(tx, &name, &attachments)? else { return Ok(None) };
            Ok(tx.node(only.node)?)
        };
        let Some(node) = self.core.catalog().read(read).await? else { return Ok(()) };
        if self.hypervisors.get(&node.spec.hypervisor)?.can_mirror() {
            return Ok(());
        }
        let detail = format!(
            "the volume {id} is attached to {}, whose hypervisor {} cannot exchange the file of an attached disk; detach it first",
            node.spec.name, node.spec.hypervisor
        );
        Err(Problem::new(ProblemCode::InUse, detail).about(ObjectKind::Volume, id).into())
    }

    /// Writes the intent if no file is in its way.
    async fn reserve(
        &self,
        id: &VolumeId,
        target: &Target,
        rate: Option<u64>,
        inputs: &CapacityInputs,
    ) -> Result<()> {
        let (name, to, known) = (id.clone(), target.clone(), inputs.clone());
        let planned = self.core.catalog().read(move |tx| plan(tx, &name, &to, &known)).await?;
        if let Planned::New(pool) = &planned {
            self.refuse_existing_file(id, pool).await?;
        }
        let (name, to, known) = (id.clone(), target.clone(), inputs.clone());
        let write = move |tx: &Tx<'_>| -> Result<_> {
            match (plan(tx, &name, &to, &known)?, planned) {
                (Planned::Done, _) => Ok(()),
                (Planned::Moving, _) => Ok(tx.set_move_rate(&name, rate)?),
                (Planned::New(pool), Planned::New(checked)) if pool == checked => {
                    let row =
                        tx.volume(&name)?.ok_or_else(|| Failure::not_found(ObjectKind::Volume, &name))?;
                    Ok(tx.insert_move(&new_row(&row, pool, rate))?)
                }
                (Planned::New(_), _) => Err(waits(&name, "the best pool for the volume has changed; retry")),
            }
        };
        self.core.catalog().run(write).await
    }

    async fn refuse_existing_file(&self, id: &VolumeId, pool: &PoolName) -> Result<()> {
        let name = pool.clone();
        let row = self.core.catalog().read(move |tx| lookups::pool(tx, &name)).await?;
        let object = Object::Volume(id.clone());
        if !self.engines.run::<_, Failure, _>(&row, move |engine| Ok(engine.exists(&object)?)).await? {
            return Ok(());
        }
        let detail = format!(
            "the pool {pool} already has a file with the name of volume {id}, which belongs to no volume; move that file away"
        );
        Err(Problem::new(ProblemCode::Exists, detail).about(ObjectKind::Volume, id).into())
    }

    /// Cancels the move of a volume. One that has switched is completed instead. Succeeds if there is none.
    pub async fn cancel(self: &Arc<Self>, id: VolumeId) -> Result<()> {
        let name = id.clone();
        let cancel = move |tx: &Tx<'_>| -> Result<_> {
            tx.volume(&name)?.ok_or_else(|| Failure::not_found(ObjectKind::Volume, &name))?;
            Ok(tx.cancel_move(&name)?)
        };
        self.core.catalog().run(cancel).await?;
        tracing::info!(volume = %id, who = %audit::actor(), "the cancellation of a move was requested");
        self.core.emit(EventKind::Volume, &id, Change::Updated);
        self.core.moves().notify_one();
        Ok(())
    }
}

/// What a request leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Planned {
    /// The volume is in that pool.
    Done,
    /// It is being moved there.
    Moving,
    /// It is moved to this pool.
    New(PoolName),
}

fn plan(tx: &Tx<'_>, id: &VolumeId, target: &Target, inputs: &CapacityInputs) -> Result<Planned> {
    let row = tx.volume(id)?.ok_or_else(|| Failure::not_found(ObjectKind::Volume, id))?;
    if let Some(moving) = tx.volume_move(id)? {
        return again(&row, &moving, target);
    }
    if matches!(target, Target::Pool(pool) if *pool == row.pool) {
        return Ok(Planned::Done);
    }
    refuse_unready(tx, &row)?;
    let attachments = tx.attachments(None, Some(id))?;
    let node = match only_writer(tx, id, &attachments)? {
        Some(attachment) => tx.node(attachment.node)?,
        None => None,
    };
    choose(tx, &row, target, node.as_ref(), inputs).map(Planned::New)
}

/// A request for a volume that is being moved.
fn again(row: &VolumeRow, moving: &MoveRow, target: &Target) -> Result<Planned> {
    let is_target = |pool: &PoolName| match target {
        Target::Pool(wanted) => wanted == pool,
        Target::Best => true,
    };
    let id = &row.id;
    if moving.phase == MovePhase::Removing {
        return match target {
            Target::Pool(wanted) if *wanted == row.pool => Ok(Planned::Done),
            _ => Err(waits(id, format!("the old file of volume {id} is being removed; retry"))),
        };
    }
    if moving.cancelled {
        return Err(waits(id, format!("an earlier move of volume {id} is being cancelled; retry")));
    }
    if is_target(&moving.pool) {
        return Ok(Planned::Moving);
    }
    let detail =
        format!("the volume {id} is being moved to the pool {}; cancel that move first", moving.pool);
    Err(Problem::new(ProblemCode::InUse, detail).about(ObjectKind::Volume, id).into())
}

fn refuse_unready(tx: &Tx<'_>, row: &VolumeRow) -> Result<()> {
    let id = &row.id;
    match row.state {
        VolumeState::Ready => {}
        VolumeState::Creating => {
            return Err(waits(id, format!("the volume {id} is not ready yet; retry later")));
        }
        VolumeState::Deleting => {
            let detail = format!("the volume {id} is being deleted");
            return Err(Problem::new(ProblemCode::NotFound, detail).about(ObjectKind::Volume, id).into());
        }
    }
    refuse_held(tx, id, false)?;
    match row.grow_to {
        Some(_) => Err(waits(id, format!("the volume {id} is being expanded; retry after that"))),
        None => Ok(()),
    }
}

/// Chooses the pool by placement. It must be reachable from the zones from which the present one is, because PersistentVolumes
/// name them, and from the host of the VM that has the volume.
fn choose(
    tx: &Tx<'_>,
    row: &VolumeRow,
    target: &Target,
    node: Option<&NodeRow>,
    inputs: &CapacityInputs,
) -> Result<PoolName> {
    let hosts = &inputs.hosts;
    let present = pool_of(tx, row)?;
    refuse_attached_image(row, &present, node)?;
    let mut placement = row.spec.placement.clone();
    let zones = hosts.zones(&present.spec);
    placement.zones = zones.iter().flatten().cloned().collect();
    if let Target::Pool(name) = target {
        let wanted = lookups::pool(tx, name)?;
        refuse_attached_image(row, &wanted, node)?;
        refuse_zone(hosts, &row.id, &present, &wanted)?;
        refuse_host(hosts, &row.id, &wanted, node)?;
        placement.pool = Some(name.clone());
    }
    let mut candidates = inputs.candidates(tx, placement.anti_affinity_id.as_deref())?;
    let reached = reached_by(tx, hosts, node)?;
    candidates.retain(|one| {
        let is_other = one.name != row.pool && target.allows(one.engine, &present);
        is_other && serves(zones.as_ref(), one.zones.as_ref()) && reached.contains(&one.name)
    });
    placement::place(&candidates, row.size(), &placement, &[]).map_err(|rejections| {
        let detail = format!(
            "the volume {} cannot be moved from the pool {}: {}",
            row.id,
            row.pool,
            placement::explain(row.size(), &rejections)
        );
        Problem::new(ProblemCode::OutOfSpace, detail)
            .about(ObjectKind::Volume, &row.id)
            .rejected_by(rejections)
            .into()
    })
}

/// Fails if an attached volume is or becomes an image: a hypervisor exchanges only files.
fn refuse_attached_image(row: &VolumeRow, pool: &PoolRow, node: Option<&NodeRow>) -> Result<()> {
    let Some(node) = node.filter(|_| pool.spec.engine != EngineKind::File) else { return Ok(()) };
    let detail = format!(
        "the volume {} is attached to {} ({}), and the pool {} has the engine {}: to and from such a pool a volume is moved while \
         it is detached; detach it first",
        row.id, node.spec.name, node.uuid, pool.name, pool.spec.engine
    );
    let used_by = vec![NodeRef { uuid: node.uuid, name: node.spec.name.clone() }];
    Err(Problem::new(ProblemCode::InUse, detail).about(ObjectKind::Volume, &row.id).used_by(used_by).into())
}

/// Whether a pool is reachable from all zones from which the present one is. `None` stands for every zone.
fn serves(present: Option<&BTreeSet<String>>, other: Option<&BTreeSet<String>>) -> bool {
    match (present, other) {
        (_, None) => true,
        (None, Some(_)) => false,
        (Some(present), Some(other)) => present.is_subset(other),
    }
}

/// The pools that the host of a node reaches; all without a node.
fn reached_by(tx: &Tx<'_>, hosts: &Hosts, node: Option<&NodeRow>) -> Result<HashSet<PoolName>> {
    let reaches = |pool: &PoolRow| node.is_none_or(|node| hosts.reaches(&node.spec.hypervisor, &pool.spec));
    Ok(tx.pools()?.into_iter().filter(reaches).map(|pool| pool.name).collect())
}

/// Fails if the host of the VM that has the volume does not reach the other pool.
fn refuse_host(hosts: &Hosts, id: &VolumeId, other: &PoolRow, node: Option<&NodeRow>) -> Result<()> {
    let Some(node) = node.filter(|node| !hosts.reaches(&node.spec.hypervisor, &other.spec)) else {
        return Ok(());
    };
    let detail = format!(
        "the volume {id} is attached to the node {} ({}) on the host {}, which does not reach the pool {}; it is reached by: {}. \
         Choose a pool that {} reaches, or detach the volume first",
        node.spec.name,
        node.uuid,
        node.spec.hypervisor,
        other.name,
        hosts.names_text(&other.spec),
        node.spec.hypervisor
    );
    Err(reach::problem(id, detail).into())
}

/// Fails if nodes that can reach the present pool cannot reach the other.
fn refuse_zone(hosts: &Hosts, id: &VolumeId, present: &PoolRow, other: &PoolRow) -> Result<()> {
    let [from, to] = [present, other].map(|pool| hosts.zones(&pool.spec));
    if serves(from.as_ref(), to.as_ref()) {
        return Ok(());
    }
    let text = |zones: Option<BTreeSet<String>>| match zones.map(Vec::from_iter) {
        None => "every zone".to_owned(),
        Some(zones) if zones.is_empty() => "no known zone".to_owned(),
        Some(zones) => format!("the zone {}", zones.join(", ")),
    };
    let (from, to) = (text(from), text(to));
    let detail = format!(
        "the volume {id} in the pool {} can be reached from {from}, and its PersistentVolumes say so; the pool {} can only be \
         reached from {to}. Choose a pool of the same zone, or one without a zone",
        present.name, other.name
    );
    Err(Problem::new(ProblemCode::Invalid, detail).about(ObjectKind::Volume, id).into())
}

fn new_row(row: &VolumeRow, pool: PoolName, rate: Option<u64>) -> MoveRow {
    MoveRow {
        volume: row.id.clone(),
        pool,
        phase: MovePhase::Waiting,
        reserved: row.size(),
        rate,
        cancelled: false,
        paused: None,
        note: None,
        chosen: None,
        message: None,
        started_at: now(),
    }
}

#[cfg(test)]
mod tests {
    use infra_api::{Labels, NodeSpec, OnFull, PoolHosts, PoolSpec};
    use uuid::Uuid;

    use super::*;
    use crate::placement::Host;

    fn zones(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn a_volume_moves_only_where_all_zones_of_its_pool_reach() {
        let (one, two) = (zones(&["a"]), zones(&["a", "b"]));
        assert!(serves(None, None) && serves(Some(&one), None) && serves(Some(&one), Some(&two)));
        assert!(!serves(None, Some(&two)) && !serves(Some(&two), Some(&one)));
    }

    #[test]
    fn the_host_of_the_vm_must_reach_the_other_pool() {
        let host = |name: &str| Host { name: name.into(), ..Host::default() };
        let hosts = Hosts::new(vec![host("a"), host("b")]);
        let spec = PoolSpec {
            engine: EngineKind::File,
            path: "/p".into(),
            labels: Labels::new(),
            cordoned: false,
            on_full: OnFull::Pause,
            hosts: PoolHosts { names: vec!["b".into()], labels: Labels::new() },
        };
        let name = PoolName::new("p").unwrap();
        let pool = PoolRow { name, uuid: Uuid::nil(), spec, marked: true, generation: 0, suspension: None };
        let id = VolumeId::new("v").unwrap();
        let on = |hypervisor: &str| NodeRow {
            uuid: Uuid::nil(),
            spec: NodeSpec {
                name: "vm".into(),
                hypervisor: hypervisor.into(),
                zone: None,
                labels: Labels::new(),
            },
        };
        refuse_host(&hosts, &id, &pool, None).unwrap();
        refuse_host(&hosts, &id, &pool, Some(&on("b"))).unwrap();
        let refused = refuse_host(&hosts, &id, &pool, Some(&on("a"))).unwrap_err();
        assert_eq!(refused.code(), ProblemCode::NotReachable);
        assert!(refused.to_string().contains("reached by: b"), "{refused}");
    }
}
