//! Reserving space for a new volume: a pool is chosen in the very transaction that writes the intent.

use std::collections::HashSet;

use infra_api::{
    Change, EventKind, FormatToken, PoolName, Problem, ProblemCode, VolumeId, VolumeSource, VolumeSpec,
    VolumeState, What,
};
use uuid::Uuid;

use super::filling::refuse_written;
use super::placing::Ground;
use super::room::{Facts, Room};
use super::snapshots::ready_volume;
use super::{Failure, Result, Service, now};
use crate::catalog::{PoolRow, Tx, VolumeRow};
use crate::engine::{Object, PoolFacts};
use crate::placement;

/// What a new volume begins with, as it is in the catalog.
pub(super) struct Source {
    pub(super) pool: PoolRow,
    pub(super) object: Object,
    capacity: u64,
    family: Uuid,
}

impl Source {
    /// Fails unless it is there, complete.
    pub(super) fn of(tx: &Tx<'_>, source: &VolumeSource) -> Result<Self> {
        let (object, pool, capacity, family) = match source {
            VolumeSource::Volume(id) => {
                let row = ready_volume(tx, id)?;
                (Object::Volume(row.id.clone()), row.pool.clone(), row.size(), row.family)
            }
            VolumeSource::Snapshot(id) => {
                let row = tx.snapshot(id)?.ok_or_else(|| Failure::not_found(What::Snapshot, id))?;
                let about = |code, detail: String| {
                    Failure::from(Problem::new(code, detail).about(What::Snapshot, id))
                };
                match row.state {
                    VolumeState::Ready => {}
                    VolumeState::Creating => {
                        let detail = format!("the snapshot {id} is not ready yet; repeat later");
                        return Err(about(ProblemCode::Unavailable, detail));
                    }
                    VolumeState::Deleting => {
                        let detail = format!("the snapshot {id} is being deleted");
                        return Err(about(ProblemCode::NotFound, detail));
                    }
                }
                (Object::Snapshot(row.id), row.pool, row.capacity, row.family)
            }
        };
        let pool = tx.pool(&pool)?.ok_or_else(|| Failure::not_found(What::Pool, &pool))?;
        Ok(Self { pool, object, capacity, family })
    }

    /// Fails unless a volume of this size can take all its bytes.
    fn fits(&self, id: &VolumeId, size: u64) -> Result<()> {
        if self.capacity <= size {
            return Ok(());
        }
        let detail = format!(
            "the volume {id} is to have {size} bytes, less than its source, the {}, which has {}",
            self.object, self.capacity
        );
        Err(Problem::new(ProblemCode::Invalid, detail).about(What::Volume, id).into())
    }
}

/// A volume that is to be.
#[derive(Clone)]
struct Wanted {
    id: VolumeId,
    spec: VolumeSpec,
    size: u64,
    disk_uuid: Uuid,
    format_token: FormatToken,
}

impl Wanted {
    /// What it is to begin with. Fails unless that is there, complete, and the volume can take all of it.
    fn source(&self, tx: &Tx<'_>) -> Result<Option<Source>> {
        let source = self.spec.source.as_ref().map(|wanted| Source::of(tx, wanted)).transpose()?;
        if let Some(source) = &source {
            source.fits(&self.id, self.size)?;
        }
        Ok(source)
    }

    /// The volume as it is to be, in the best pool. Fails where it can be in none.
    fn plan(&self, tx: &Tx<'_>, room: &Room, facts: &Facts, is_looked_at: bool) -> Result<VolumeRow> {
        let Self { id, spec, size, disk_uuid, format_token } = self;
        let source = self.source(tx)?;
        let candidates = room.candidates(tx, facts, spec.placement.anti_affinity_id.as_deref())?;
        let near = source.as_ref().map(|source| near(facts, &source.pool.name)).unwrap_or_default();
        let pool = placement::place(&candidates, *size, &spec.placement, &near).map_err(|rejections| {
            let detail = format!("volume {id}: {}", placement::explain(*size, &rejections));
            Problem::new(ProblemCode::OutOfSpace, detail).about(What::Volume, id).rejected_by(rejections)
        })?;
        let copying = source.is_some() && !near.contains(&pool);
        if let (true, false, Some(source)) = (copying, is_looked_at, &source) {
            refuse_copy_by_guess(facts, &source.pool.name)?;
        }
        // From here on nobody may write to what is copied.
        if let (true, Some(source), Some(VolumeSource::Volume(volume))) = (copying, &source, &spec.source) {
            let why = format!("its pool {} cannot share blocks with the pool {pool}", source.pool.name);
            refuse_written(tx, volume, &why)?;
        }
        Ok(VolumeRow {
            id: id.clone(),
            pool,
            capacity: *size,
            grow_to: None,
            disk_uuid: *disk_uuid,
            state: VolumeState::Creating,
            qos: spec.qos,
            spec: spec.clone(),
            created_at: now(),
            family: source.filter(|_| !copying).map_or(*disk_uuid, |source| source.family),
            copying,
            // Nobody has the volume yet.
            qos_due: false,
            format_token: *format_token,
            // What it begins with is data.
            written: spec.source.is_some(),
        })
    }
}

/// Refuses to copy what may be had without a copy, which is slow and keeps writers off: where the source's pool can
/// share blocks, or did not say at once, only a full look tells that it is so, and no other has the room.
fn refuse_copy_by_guess(facts: &Facts, pool: &PoolName) -> Result<()> {
    if facts.get(pool).is_some_and(|said| !said.reflink) {
        return Ok(());
    }
    let detail = format!("the pool {pool} of the source does not answer, or seems to have no room; repeat");
    Err(Problem::new(ProblemCode::Unavailable, detail).about(What::Pool, pool).into())
}

/// The pools whose files can share blocks with those of this one, which comes first: there it works on every kernel.
fn near(facts: &Facts, pool: &PoolName) -> Vec<PoolName> {
    let Some(from) = facts.get(pool) else { return Vec::new() };
    let shares = |(_, to): &(&PoolName, &PoolFacts)| from.reflink && from.filesystem == to.filesystem;
    let mut near: Vec<PoolName> = facts.iter().filter(shares).map(|(name, _)| name.clone()).collect();
    near.sort_by_key(|name| (name != pool, name.clone()));
    near
}

impl Service {
    /// Chooses a pool and writes the intent.
    pub(super) async fn reserve(&self, id: &VolumeId, spec: VolumeSpec, size: u64) -> Result<VolumeRow> {
        let (disk_uuid, format_token) = (Uuid::new_v4(), FormatToken::random());
        let wanted = Wanted { id: id.clone(), spec, size, disk_uuid, format_token };
        if wanted.spec.source.is_some() {
            // Where it is not ready, no look at the pools helps.
            let first = wanted.clone();
            self.0.catalog.read(move |tx| first.source(tx)).await?;
        }
        let _placing = self.0.placing.pools.read().await;
        let mut ground = self.ground().await?;
        let row = loop {
            match self.try_reserve(&wanted, &ground).await {
                Err(refusal) => self.look_closer(&mut ground, refusal).await?,
                Ok(row) => break row,
            }
        };
        self.emit(EventKind::Volume, id, Change::Created);
        Ok(row)
    }

    async fn try_reserve(&self, wanted: &Wanted, ground: &Ground) -> Result<VolumeRow> {
        // The pools that have no file by the volume's name.
        let mut clear: HashSet<PoolName> = HashSet::new();
        let (first, room, facts) = (wanted.clone(), self.0.placing.room.clone(), ground.facts.clone());
        let is_looked_at = ground.is_looked_at;
        let mut row = self.0.catalog.read(move |tx| first.plan(tx, &room, &facts, is_looked_at)).await?;
        loop {
            self.refuse_taken(&wanted.id, &row.pool).await?;
            clear.insert(row.pool);
            let (wanted, clear, room, facts) =
                (wanted.clone(), clear.clone(), self.0.placing.room.clone(), ground.facts.clone());
            let (planned, is_written) = self
                .0
                .catalog
                .run(move |tx| -> Result<_> {
                    let row = wanted.plan(tx, &room, &facts, is_looked_at)?;
                    // Another pool may be the best by now.
                    let is_clear = clear.contains(&row.pool);
                    if is_clear {
                        tx.insert_volume(&row)?;
                    }
                    Ok((row, is_clear))
                })
                .await?;
            if is_written {
                return Ok(planned);
            }
            row = planned;
        }
    }

    /// Refuses where the pool has a file by the name of a volume that is not there yet.
    async fn refuse_taken(&self, id: &VolumeId, pool: &PoolName) -> Result<()> {
        let name = pool.clone();
        let found = self.0.catalog.read(move |tx| -> Result<_> { Ok(tx.pool(&name)?) }).await?;
        let row = found.ok_or_else(|| Failure::not_found(What::Pool, pool))?;
        let object = Object::Volume(id.clone());
        let taken: bool =
            self.engine::<_, Failure, _>(self.engine_of(&row), move |e| Ok(e.exists(&object)?)).await?;
        if !taken {
            return Ok(());
        }
        let detail = format!(
            "the pool {pool} has a file by the name of volume {id} that no volume owns; move it away, or use another id"
        );
        Err(Problem::new(ProblemCode::Exists, detail).about(What::Volume, id).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_needs_a_full_look_unless_the_pool_says_that_it_shares_nothing() {
        let name = PoolName::new("p").unwrap();
        let facts = |reflink| {
            let said = PoolFacts { filesystem: 1, capacity: 9, available: 9, used: 0, reflink };
            Facts::from([(name.clone(), said)])
        };
        refuse_copy_by_guess(&facts(false), &name).unwrap();
        for facts in [facts(true), Facts::new()] {
            let refused = refuse_copy_by_guess(&facts, &name).unwrap_err();
            assert_eq!(refused.code(), ProblemCode::Unavailable);
        }
    }
}
