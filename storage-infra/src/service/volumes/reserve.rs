//! Space reservation for new volumes. The pool is chosen in the same transaction that writes the intent.

use std::collections::HashSet;

use infra_api::{
    Change, EngineKind, EventKind, FormatToken, ObjectKind, PoolName, Problem, ProblemCode, VolumeId,
    VolumeSource, VolumeSpec, VolumeState,
};
use uuid::Uuid;

use super::Volumes;
use super::adopt;
use crate::budget::Demand;
use crate::catalog::{AdoptionMethod, AdoptionRow, Origin, PoolRow, Tx, VolumeRow};
use crate::clock::now;
use crate::engine::adopt::{Candidate, Home};
use crate::engine::qcow2::Format;
use crate::engine::{Object, PoolFacts};
use crate::placement;
use crate::random;
use crate::service::budgets::refuse_over_budget;
use crate::service::files::refuse_copy_while_writable;
use crate::service::lookups::{self, ready_volume};
use crate::service::pools::{CapacityInputs, Facts};
use crate::service::problems::{Failure, Result};

/// Source of a new volume, as stored in the catalog.
pub(in crate::service) struct Source {
    pub(in crate::service) pool: PoolRow,
    pub(in crate::service) object: Object,
    pub(in crate::service) capacity: u64,
    family: Uuid,
}

impl Source {
    /// Fails unless the source exists and is complete.
    pub(in crate::service) fn of(tx: &Tx<'_>, source: &VolumeSource) -> Result<Self> {
        let (object, pool, capacity, family) = match source {
            VolumeSource::Volume(id) => {
                let row = ready_volume(tx, id)?;
                (Object::Volume(row.id.clone()), row.pool.clone(), row.size(), row.family)
            }
            VolumeSource::Snapshot(id) => {
                let row = tx.snapshot(id)?.ok_or_else(|| Failure::not_found(ObjectKind::Snapshot, id))?;
                let about = |code, detail: String| {
                    Failure::from(Problem::new(code, detail).about(ObjectKind::Snapshot, id))
                };
                match row.state {
                    VolumeState::Ready => {}
                    VolumeState::Creating => {
                        let detail = format!("the snapshot {id} is not ready yet; retry later");
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
        Ok(Self { pool: lookups::pool(tx, &pool)?, object, capacity, family })
    }

    /// Fails if the source does not fit into a volume of this size.
    fn refuse_too_small(&self, id: &VolumeId, size: u64) -> Result<()> {
        if self.capacity <= size {
            return Ok(());
        }
        let detail = format!(
            "the volume {id} was requested with {size} bytes, less than its source, the {}, which has {} bytes",
            self.object, self.capacity
        );
        Err(Problem::new(ProblemCode::Invalid, detail).about(ObjectKind::Volume, id).into())
    }
}

/// The intent that is written with a new volume: where its content comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Content {
    /// Nowhere, or from the source in the spec.
    Created,
    /// A client sends it.
    Imported,
    /// From this file of the host.
    Adopted(Candidate),
}

impl Content {
    pub(super) fn origin(&self) -> Origin {
        match self {
            Self::Created => Origin::Created,
            Self::Imported => Origin::Imported,
            Self::Adopted(_) => Origin::Adopted,
        }
    }

    /// Writes the intent.
    fn insert(&self, tx: &Tx<'_>, id: &VolumeId, filesystem: Option<u64>) -> Result<()> {
        match self {
            Self::Created => Ok(()),
            Self::Imported => Ok(tx.insert_import(id)?),
            Self::Adopted(file) => {
                let (path, inode, method) = (file.path.clone(), file.inode, adopt::method(file, filesystem));
                Ok(tx.insert_adoption(id, &AdoptionRow { path, inode, method })?)
            }
        }
    }
}

/// A requested volume.
#[derive(Clone)]
struct RequestedVolume {
    id: VolumeId,
    spec: VolumeSpec,
    size: u64,
    disk_uuid: Uuid,
    format_token: FormatToken,
    content: Content,
}

impl RequestedVolume {
    /// Reads its source. Fails unless it is complete and fits.
    fn source(&self, tx: &Tx<'_>) -> Result<Option<Source>> {
        let source = self.spec.source.as_ref().map(|source| Source::of(tx, source)).transpose()?;
        if let Some(source) = &source {
            source.refuse_too_small(&self.id, self.size)?;
        }
        Ok(source)
    }

    /// Why no pool can make this volume, whatever its space.
    fn no_suitable_engine(&self) -> Failure {
        let detail = format!(
            "the volume {} cannot be adopted: all pools have the engine rbd, into which no qcow2 image is converted; convert it to \
             a raw file with `qemu-img convert` first",
            self.id
        );
        Problem::new(ProblemCode::Invalid, detail).about(ObjectKind::Volume, &self.id).into()
    }

    /// Plans the volume's row in the best pool. Fails if the budget does not allow it or no pool fits.
    fn plan(&self, tx: &Tx<'_>, inputs: &CapacityInputs) -> Result<VolumeRow> {
        let Self { id, spec, size, disk_uuid, format_token, content } = self;
        let source = self.source(tx)?;
        let demand = Demand { bytes: *size, volumes: 1, ..Demand::default() };
        refuse_over_budget(tx, &spec.owner, &demand, ObjectKind::Volume, id)?;
        let (facts, from_scan) = (&*inputs.facts, inputs.from_scan);
        let mut candidates = inputs.candidates(tx, spec.placement.anti_affinity_id.as_deref())?;
        let mut near = source.as_ref().map(|source| near(facts, &source.pool)).unwrap_or_default();
        if let Content::Adopted(file) = content {
            near = adopt::near(file, &tx.pools()?, facts);
            adopt::credit(file, &near, &mut candidates);
        }
        let has_pools = !candidates.is_empty();
        candidates.retain(|one| can_make(content, &near, (&one.name, one.engine)));
        if candidates.is_empty() && has_pools {
            return Err(self.no_suitable_engine());
        }
        let pool = placement::place(&candidates, *size, &spec.placement, &near).map_err(|rejections| {
            let detail = format!("volume {id}: {}", placement::explain(*size, &rejections));
            Problem::new(ProblemCode::OutOfSpace, detail)
                .about(ObjectKind::Volume, id)
                .rejected_by(rejections)
        })?;
        let copying = match content {
            Content::Created | Content::Imported => source.is_some() && !near.contains(&pool),
            Content::Adopted(file) => adopt::method(file, inputs.filesystem(&pool)) != AdoptionMethod::Rename,
        };
        if let (true, false, Some(source)) = (copying, from_scan, &source) {
            refuse_premature_copy(facts, &source.pool.name)?;
        }
        // From here on the source of the copy must not be written.
        if let (true, Some(source), Some(VolumeSource::Volume(volume))) = (copying, &source, &spec.source) {
            let why = format!("its pool {} cannot share blocks with the pool {pool}", source.pool.name);
            refuse_copy_while_writable(tx, volume, &why)?;
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
            // The volume is not attached yet.
            qos_due: false,
            format_token: *format_token,
            // Bytes from elsewhere count as data.
            written: spec.source.is_some() || *content != Content::Created,
            owner: spec.owner.clone(),
            origin: content.origin(),
        })
    }
}

/// Whether a pool can make a volume with this content: an image stays in its pool, and qemu-img writes only files.
fn can_make(content: &Content, near: &[PoolName], (pool, engine): (&PoolName, EngineKind)) -> bool {
    let Content::Adopted(file) = content else { return true };
    match (&file.home, file.format) {
        (Home::Pool(_), _) => near.contains(pool),
        (Home::Filesystem(_), Format::Raw) => true,
        (Home::Filesystem(_), Format::Qcow2 { .. }) => engine == EngineKind::File,
    }
}

/// Refuses a copy, which is slow and blocks writers, while reflink may still be possible: if the source's pool
/// supports reflink or did not answer in time, only a full scan shows that no pool with shared blocks has the
/// capacity.
fn refuse_premature_copy(facts: &Facts, pool: &PoolName) -> Result<()> {
    if facts.get(pool).is_some_and(|found| !found.reflink) {
        return Ok(());
    }
    let detail = format!("the pool {pool} of the source does not answer or seems to be full; retry");
    Err(Problem::new(ProblemCode::Unavailable, detail).about(ObjectKind::Pool, pool).into())
}

/// Pools whose files can share blocks with this pool's, this one first: reflink within one directory works on every
/// kernel. Images are cloned only within their pool.
fn near(facts: &Facts, pool: &PoolRow) -> Vec<PoolName> {
    let (name, engine) = (&pool.name, pool.spec.engine);
    let Some(from) = facts.get(name) else { return Vec::new() };
    let shares = |(to_name, to): &(&PoolName, &PoolFacts)| {
        let is_possible = engine == EngineKind::File || *to_name == name;
        is_possible && from.reflink && from.filesystem == to.filesystem
    };
    let mut near: Vec<PoolName> = facts.iter().filter(shares).map(|(name, _)| name.clone()).collect();
    near.sort_by_key(|one| (one != name, one.clone()));
    near
}

impl Volumes {
    /// Chooses a pool and writes the intent.
    pub(super) async fn reserve(
        &self,
        id: &VolumeId,
        spec: VolumeSpec,
        size: u64,
        content: Content,
    ) -> Result<VolumeRow> {
        let (disk_uuid, format_token) = (random::uuid(), FormatToken::random());
        let request = RequestedVolume { id: id.clone(), spec, size, disk_uuid, format_token, content };
        if request.spec.source.is_some() {
            // If the source is not ready, probing the pools is useless.
            let first = request.clone();
            self.core.catalog().read(move |tx| first.source(tx)).await?;
        }
        let _placing = self.capacity.placing().await;
        let mut inputs = self.capacity.inputs().await?;
        let row = loop {
            match self.try_reserve(&request, &inputs).await {
                Err(refusal) => self.capacity.rescan_after(&mut inputs, refusal).await?,
                Ok(row) => break row,
            }
        };
        self.core.emit(EventKind::Volume, id, Change::Created);
        Ok(row)
    }

    async fn try_reserve(&self, request: &RequestedVolume, inputs: &CapacityInputs) -> Result<VolumeRow> {
        // Pools that are known to have no file with the volume's name.
        let mut clear: HashSet<PoolName> = HashSet::new();
        let (first, known) = (request.clone(), inputs.clone());
        let mut row = self.core.catalog().read(move |tx| first.plan(tx, &known)).await?;
        loop {
            self.refuse_existing_file(&request.id, &row.pool).await?;
            clear.insert(row.pool);
            let (request, clear, known) = (request.clone(), clear.clone(), inputs.clone());
            let (planned, is_written) = self
                .core
                .catalog()
                .run(move |tx| -> Result<_> {
                    let row = request.plan(tx, &known)?;
                    // By now another pool may be the best.
                    let is_clear = clear.contains(&row.pool);
                    if is_clear {
                        tx.insert_volume(&row)?;
                        request.content.insert(tx, &row.id, known.filesystem(&row.pool))?;
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

    /// Fails if the pool already has a file with the name of a volume that does not exist yet.
    async fn refuse_existing_file(&self, id: &VolumeId, pool: &PoolName) -> Result<()> {
        let name = pool.clone();
        let row = self.core.catalog().read(move |tx| lookups::pool(tx, &name)).await?;
        let object = Object::Volume(id.clone());
        let exists: bool = self.engines.run::<_, Failure, _>(&row, move |e| Ok(e.exists(&object)?)).await?;
        if !exists {
            return Ok(());
        }
        let detail = format!(
            "the pool {pool} already has a file with the name of volume {id}, which belongs to no volume; move \
             the file away or use another id"
        );
        Err(Problem::new(ProblemCode::Exists, detail).about(ObjectKind::Volume, id).into())
    }
}

#[cfg(test)]
mod tests {
    use infra_api::PoolSpec;

    use super::*;
    use crate::engine::DirectoryVersion;

    #[test]
    fn a_copy_needs_a_full_scan_unless_the_pool_reports_no_reflink() {
        let name = PoolName::new("p").unwrap();
        let facts = |reflink| {
            let found = PoolFacts {
                directory: DirectoryVersion::default(),
                filesystem: 1,
                capacity: 9,
                fixed_size: Some(9),
                available: 9,
                used: 0,
                reflink,
                ceph: None,
            };
            Facts::from([(name.clone(), found)])
        };
        refuse_premature_copy(&facts(false), &name).unwrap();
        for facts in [facts(true), Facts::new()] {
            let refused = refuse_premature_copy(&facts, &name).unwrap_err();
            assert_eq!(refused.code(), ProblemCode::Unavailable);
        }
    }

    #[test]
    fn an_image_stays_in_its_pool_and_a_qcow2_image_becomes_a_file() {
        let [f, r, s] = ["f", "r", "s"].map(|name| PoolName::new(name).unwrap());
        let (file, rbd, other) = ((&f, EngineKind::File), (&r, EngineKind::Rbd), (&s, EngineKind::Rbd));
        let adopted = |home, format| {
            let path = "/disk".into();
            Content::Adopted(Candidate { path, inode: 1, home, size: 4096, allocated: 0, format })
        };
        let made = |content: &Content| {
            [file, rbd, other].map(|pool| can_make(content, std::slice::from_ref(&r), pool))
        };
        assert_eq!(made(&Content::Created), [true; 3]);
        assert_eq!(made(&Content::Imported), [true; 3]);
        assert_eq!(made(&adopted(Home::Pool(r.clone()), Format::Raw)), [false, true, false]);
        assert_eq!(made(&adopted(Home::Filesystem(1), Format::Raw)), [true; 3]);
        assert_eq!(made(&adopted(Home::Filesystem(1), Format::Qcow2 { size: 4096 })), [true, false, false]);
    }

    #[test]
    fn images_are_cloned_within_their_pool_and_files_share_blocks_on_their_filesystem() {
        let found = |filesystem| PoolFacts {
            directory: DirectoryVersion::default(),
            filesystem,
            capacity: 9,
            fixed_size: Some(9),
            available: 9,
            used: 0,
            reflink: true,
            ceph: None,
        };
        let name = |text: &str| PoolName::new(text).unwrap();
        let facts = Facts::from([(name("a"), found(1)), (name("b"), found(1)), (name("c"), found(2))]);
        let of = |engine| {
            let spec = PoolSpec {
                engine,
                path: "/b".into(),
                labels: infra_api::Labels::new(),
                cordoned: false,
                on_full: infra_api::OnFull::default(),
                hosts: infra_api::PoolHosts::default(),
            };
            let pool = PoolRow {
                name: name("b"),
                uuid: Uuid::nil(),
                spec,
                marked: true,
                generation: 0,
                suspension: None,
            };
            near(&facts, &pool)
        };
        assert_eq!(of(EngineKind::File), [name("b"), name("a")]);
        assert_eq!(of(EngineKind::Rbd), [name("b")]);
    }
}
