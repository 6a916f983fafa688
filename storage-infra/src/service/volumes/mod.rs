//! Volumes: create, list and delete; changes of their size, limits and owner.

mod adopt;
mod create;
mod delete;
mod expand;
mod import;
mod owner;
mod qos;
mod release;
mod reserve;
mod size;

pub(super) use import::imported;
pub(super) use reserve::Source;

use std::collections::HashMap;
use std::sync::Arc;

use infra_api::{
    Change, Condition, ConditionCause, EventKind, List, Move, MovePhase, PoolName, PoolSpec, Volume,
    VolumeId, VolumeState,
};

use super::attachments::UnexpectedDisks;
use super::conditions::Conditions;
use super::core::Core;
use super::disks::{Comparison, Disks};
use super::files::{Copies, ObjectFiles};
use super::lookups::{pool_of, volume_in};
use super::pools::{Engines, PoolCapacity};
use super::problems::Result;
use super::records::Records;
use crate::catalog::{AllSuspensions, AlteredDisk, AttachmentRow, Hold, MoveRow, Tx, VolumeRow};
use crate::engine::Object;
use crate::scope::Scope;

/// Maximum number of volumes in one page of a list.
const PAGE: usize = 1000;

/// The volumes: create, list and delete.
pub struct Volumes {
    core: Arc<Core>,
    engines: Arc<Engines>,
    capacity: Arc<PoolCapacity>,
    files: Arc<ObjectFiles>,
    copies: Arc<Copies>,
    conditions: Arc<Conditions>,
    unexpected_disks: Arc<UnexpectedDisks>,
    comparison: Arc<Comparison>,
}

/// Changes of existing volumes: size, I/O limits and owner.
pub struct VolumeChanges {
    core: Arc<Core>,
    engines: Arc<Engines>,
    capacity: Arc<PoolCapacity>,
    disks: Arc<Disks>,
    records: Arc<Records>,
    volumes: Arc<Volumes>,
    comparison: Arc<Comparison>,
}

impl VolumeChanges {
    pub(super) fn new(
        core: Arc<Core>,
        engines: Arc<Engines>,
        capacity: Arc<PoolCapacity>,
        disks: Arc<Disks>,
        records: Arc<Records>,
        volumes: Arc<Volumes>,
        comparison: Arc<Comparison>,
    ) -> Self {
        Self { core, engines, capacity, disks, records, volumes, comparison }
    }

    /// Changes the row of a volume, and publishes it if `change` says that it changed. The caller has the volume's lock.
    async fn change_row<F>(&self, id: &VolumeId, change: F) -> Result<()>
    where
        F: FnOnce(&Tx<'_>) -> Result<bool> + Send + 'static,
    {
        if self.core.catalog().run(change).await? {
            self.core.emit(EventKind::Volume, id, Change::Updated);
            self.records.update_soon(id);
        }
        Ok(())
    }
}

/// Condition of a suspended volume.
fn suspended(id: &VolumeId, hold: &Hold) -> Condition {
    abnormal(ConditionCause::Suspended, format!("the volume {id} {hold}"))
}

fn abnormal(cause: ConditionCause, message: String) -> Condition {
    Condition { healthy: false, cause: Some(cause), message: Some(message) }
}

/// A move of a volume whose data is in this pool.
fn to_move(row: MoveRow, pool: &PoolName, copied_bytes: Option<u64>) -> Move {
    let (from, to) = match row.phase {
        MovePhase::Removing => (row.pool, pool.clone()),
        _ => (pool.clone(), row.pool),
    };
    Move {
        from,
        to,
        phase: row.phase,
        copied_bytes,
        bytes_per_second: row.rate,
        cancelled: row.cancelled,
        message: row.message,
        started_at: row.started_at,
    }
}

impl Volumes {
    pub(super) fn new(
        core: Arc<Core>,
        engines: Arc<Engines>,
        capacity: Arc<PoolCapacity>,
        files: Arc<ObjectFiles>,
        copies: Arc<Copies>,
        conditions: Arc<Conditions>,
        unexpected_disks: Arc<UnexpectedDisks>,
        comparison: Arc<Comparison>,
    ) -> Self {
        Self { core, engines, capacity, files, copies, conditions, unexpected_disks, comparison }
    }

    /// Accepts the data of a volume as it is, after its disk was altered: see [`Comparison::accept`].
    pub async fn accept(&self, id: &VolumeId) -> Result<()> {
        self.comparison.accept(id).await
    }

    /// One volume.
    pub async fn get(&self, scope: &Scope, id: &VolumeId) -> Result<Volume> {
        let (scope, id) = (scope.clone(), id.clone());
        let (row, attachments, pool, suspensions, altered, moving) = self
            .core
            .catalog()
            .read(move |tx| -> Result<_> {
                let row = volume_in(tx, &scope, &id)?;
                let pool = pool_of(tx, &row)?;
                let (suspensions, moving) = (tx.suspensions()?, tx.volume_move(&id)?);
                let altered = tx.altered_disks(&id)?;
                Ok((row, tx.attachments(None, Some(&id))?, pool, suspensions, altered, moving))
            })
            .await?;
        let zones = self.zones(&pool.spec);
        Ok(self.to_volume(row, &attachments, zones, (&suspensions, &altered), moving))
    }

    /// One page of volumes with IDs after `after`.
    pub async fn list(&self, scope: &Scope, limit: Option<usize>, after: String) -> Result<List<Volume>> {
        let account = scope.account().cloned();
        let limit = limit.filter(|limit| *limit > 0).unwrap_or(PAGE).min(PAGE);
        let (mut rows, attachments, pools, suspensions, altered, mut moves) = self
            .core
            .catalog()
            .read(move |tx| -> Result<_> {
                let rows = tx.volumes(account.as_ref(), &after, limit + 1)?;
                let (suspensions, moves) = (tx.suspensions()?, tx.moves_by_volume()?);
                let altered = tx.all_altered_disks()?;
                Ok((rows, tx.attachments(None, None)?, tx.pools()?, suspensions, altered, moves))
            })
            .await?;
        let more = rows.len() > limit;
        rows.truncate(limit);
        let next = rows.last().filter(|_| more).map(|row| row.id.to_string());
        let mut of: HashMap<VolumeId, Vec<AttachmentRow>> = HashMap::new();
        for attachment in attachments {
            of.entry(attachment.volume.clone()).or_default().push(attachment);
        }
        let zones: HashMap<PoolName, Vec<String>> =
            pools.into_iter().map(|pool| (pool.name, self.zones(&pool.spec))).collect();
        let item = |row: VolumeRow| {
            let attachments = of.remove(&row.id).unwrap_or_default();
            let zones = zones.get(&row.pool).cloned().unwrap_or_default();
            let moving = moves.remove(&row.id);
            let altered = altered.get(&row.id).map_or(&[][..], Vec::as_slice);
            self.to_volume(row, &attachments, zones, (&suspensions, altered), moving)
        };
        Ok(List { items: rows.into_iter().map(item).collect(), next })
    }

    /// The zones that can reach a pool; empty if every zone can.
    fn zones(&self, pool: &PoolSpec) -> Vec<String> {
        self.core.hosts().zones(pool).into_iter().flatten().collect()
    }

    fn to_volume(
        &self,
        row: VolumeRow,
        attachments: &[AttachmentRow],
        zones: Vec<String>,
        (suspensions, altered): (&AllSuspensions, &[AlteredDisk]),
        moving: Option<MoveRow>,
    ) -> Volume {
        let copied = self.copies.copied(&Object::Volume(row.id.clone()));
        Volume {
            condition: match (suspensions.hold(&row), altered.first()) {
                (Some(hold), _) => suspended(&row.id, &hold),
                (None, Some(altered)) => abnormal(ConditionCause::Altered, altered.message.clone()),
                (None, None) => self.conditions.of(&row.id),
            },
            suspension: suspensions.of(&row.id).cloned(),
            moving: moving.map(|one| to_move(one, &row.pool, self.copies.moved(&row.id))),
            copied_bytes: copied.filter(|_| row.copying && row.state == VolumeState::Creating),
            id: row.id,
            capacity_bytes: row.capacity,
            pool: row.pool,
            disk_uuid: row.disk_uuid,
            state: row.state,
            zone: zones.first().filter(|_| zones.len() == 1).cloned(),
            zones,
            source: row.spec.source,
            qos: row.qos,
            shareable: row.spec.shareable,
            disk: row.spec.disk,
            owner: row.owner,
            labels: row.spec.labels,
            created_at: row.created_at,
            attached_to: attachments.iter().map(|attachment| attachment.node).collect(),
        }
    }
}
