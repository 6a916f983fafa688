//! Adoptions: a file of this host, or an image in the Ceph pool of a pool, becomes a volume. An image, and a raw file on the
//! filesystem of the pool, is renamed; any other file is copied or converted, and stays where it is.

use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use infra_api::{
    Adoption, DiskOptions, EngineKind, Labels, ObjectKind, Placement, PoolName, Problem, ProblemCode, Volume,
    VolumeId, VolumeSpec, VolumeState,
};
use tokio::sync::oneshot;

use super::Volumes;
use super::create::same_volume;
use super::qos::validated;
use super::reserve::Content;
use crate::catalog::{AdoptionMethod, AdoptionRow, Origin, PoolRow, Tx, VolumeRow};
use crate::engine::adopt::{Candidate, ForeignImage, Home, examine};
use crate::engine::qcow2::Format;
use crate::engine::rbd::{is_rbd, parse_image};
use crate::engine::{EngineError, RbdLocation, Record};
use crate::hypervisor::{DiskLocation, RbdImage};
use crate::placement;
use crate::scope::Scope;
use crate::service::files;
use crate::service::pools::Facts;
use crate::service::problems::{Failure, Result};
use crate::service::transfers::blocking;

/// How a file becomes the file of a volume in a pool of this filesystem.
pub(super) fn method(file: &Candidate, filesystem: Option<u64>) -> AdoptionMethod {
    match (file.format, &file.home) {
        (Format::Qcow2 { .. }, _) => AdoptionMethod::Convert,
        (Format::Raw, Home::Pool(_)) => AdoptionMethod::Rename,
        (Format::Raw, Home::Filesystem(home)) if filesystem == Some(*home) => AdoptionMethod::Rename,
        (Format::Raw, Home::Filesystem(_)) => AdoptionMethod::Copy,
    }
}

/// Pools in which a file can stay: those on its filesystem, the one whose directory holds it first; or that of an image.
pub(super) fn near(file: &Candidate, pools: &[PoolRow], facts: &Facts) -> Vec<PoolName> {
    let home = match &file.home {
        Home::Filesystem(home) => *home,
        Home::Pool(pool) => return vec![pool.clone()],
    };
    let on_filesystem = |pool: &&PoolRow| facts.get(&pool.name).is_some_and(|facts| facts.filesystem == home);
    let mut near: Vec<&PoolRow> = pools.iter().filter(on_filesystem).collect();
    near.sort_by_key(|pool| (!file.path.starts_with(&pool.spec.path), pool.name.clone()));
    near.into_iter().map(|pool| pool.name.clone()).collect()
}

/// A renamed file needs no space that it does not have already.
pub(super) fn credit(file: &Candidate, near: &[PoolName], candidates: &mut [placement::Candidate]) {
    if file.format != Format::Raw {
        return;
    }
    for candidate in candidates.iter_mut().filter(|candidate| near.contains(&candidate.name)) {
        candidate.free_bytes = candidate.free_bytes.saturating_add(file.allocated.min(file.size));
    }
}

/// Whether an image is in the Ceph pool or namespace of a pool.
fn has_image(pool: &PoolRow, image: &RbdImage) -> bool {
    let location = pool.spec.path.parse::<RbdLocation>();
    pool.spec.engine == EngineKind::Rbd && location.is_ok_and(|place| place.name_of(image).is_some())
}

/// The spec of the volume that a file becomes.
fn spec_of(adoption: &Adoption, size: u64) -> VolumeSpec {
    VolumeSpec {
        capacity_bytes: size,
        limit_bytes: Some(size),
        placement: Placement { pool: adoption.pool.clone(), ..Placement::default() },
        source: None,
        qos: adoption.qos,
        shareable: adoption.shareable,
        disk: DiskOptions::default(),
        owner: adoption.owner.clone(),
        labels: Labels::new(),
    }
}

impl Volumes {
    /// Adopts a file, or returns the existing volume if the request is a repetition. True if it is new. Waits at most
    /// `wait`; the operation continues.
    pub async fn adopt(
        self: &Arc<Self>,
        id: VolumeId,
        mut adoption: Adoption,
        wait: Duration,
    ) -> Result<(Volume, bool)> {
        adoption.qos = validated(adoption.qos)?;
        adoption.owner.check_bounds().map_err(|what| Problem::from(what).about(ObjectKind::Volume, &id))?;
        let (volumes, key) = (self.clone(), id.clone());
        let adopt = |started: oneshot::Sender<()>| async move {
            let _lock = volumes.core.lock_volume(&key).await;
            let (row, created) = match volumes.adopted(&key, &adoption).await? {
                Some(row) => (row, false),
                None => (volumes.begin_adoption(&key, &adoption).await?, true),
            };
            let _ = started.send(());
            if row.state == VolumeState::Creating {
                volumes.finish_create(row).await?;
            }
            Ok((volumes.get(&Scope::All, &key).await?, created))
        };
        match self.core.run_with_timeout(wait, adopt).await {
            Some(result) => result,
            None => Ok((self.get(&Scope::All, &id).await?, false)),
        }
    }

    /// The volume of an earlier request that was the same, as far as that is known: the file may be gone since.
    async fn adopted(&self, id: &VolumeId, adoption: &Adoption) -> Result<Option<VolumeRow>> {
        let (id, adoption) = (id.clone(), adoption.clone());
        let find = move |tx: &Tx<'_>| -> Result<_> {
            let Some(row) = tx.volume(&id)? else { return Ok(None) };
            if let Some(begun) = tx.adoption(&id)?.filter(|begun| begun.path != Path::new(&adoption.path)) {
                let detail = format!("the volume {id} is being adopted from {}", begun.path.display());
                return Err(Problem::new(ProblemCode::Exists, detail).about(ObjectKind::Volume, &id).into());
            }
            same_volume(tx, &id, &spec_of(&adoption, row.spec.capacity_bytes), Origin::Adopted)
        };
        self.core.catalog().read(find).await
    }

    /// Checks the file and writes the intent.
    async fn begin_adoption(&self, id: &VolumeId, adoption: &Adoption) -> Result<VolumeRow> {
        let path = Path::new(&adoption.path);
        let (file, location) = match is_rbd(path) {
            true => self.image(path, adoption.pool.as_ref()).await?,
            false => {
                let path = self.permitted_path(&adoption.path).await?;
                let file = blocking(move || Ok(examine(&path)?)).await?;
                let location = DiskLocation::File(file.path.clone());
                (file, location)
            }
        };
        self.files.refuse_attached_data(location).await?;
        let spec = spec_of(adoption, file.size);
        self.reserve(id, spec, file.size, Content::Adopted(file)).await
    }

    /// Examines an image in the Ceph pool or namespace of a pool.
    async fn image(&self, path: &Path, wanted: Option<&PoolName>) -> Result<(Candidate, DiskLocation)> {
        let invalid = |why: String| Failure::new(ProblemCode::Invalid, why);
        let image = parse_image(path).map_err(invalid)?;
        let pools = self.core.catalog().read(|tx| -> Result<_> { Ok(tx.pools()?) }).await?;
        let has =
            |pool: &&PoolRow| wanted.is_none_or(|wanted| *wanted == pool.name) && has_image(pool, &image);
        let pool = match pools.iter().filter(has).collect::<Vec<_>>().as_slice() {
            [only] => (*only).clone(),
            [] => {
                return Err(invalid(format!(
                    "the image {image} is in the Ceph pool or namespace of no pool that may have the volume; add one with \
                     `storage-infra pool add --engine rbd`, in which the image then is"
                )));
            }
            _ => {
                return Err(invalid(format!(
                    "several pools may have the image {image}; choose one with --pool"
                )));
            }
        };
        let path = path.to_owned();
        let found = self
            .engines
            .run::<_, EngineError, _>(&pool, move |e| Ok((e.examine_image(&path)?, path)))
            .await?;
        let (ForeignImage { id, size, allocated }, path) = found;
        let (home, format) = (Home::Pool(pool.name), Format::Raw);
        Ok((Candidate { path, inode: id, home, size, allocated, format }, DiskLocation::Rbd(image)))
    }

    /// A path in a directory of a pool or of --file-dir, without symbolic links in its directory.
    pub(super) async fn permitted_path(&self, text: &str) -> Result<PathBuf> {
        let path = Path::new(text);
        let invalid = |why: &str| Failure::new(ProblemCode::Invalid, format!("the path {text:?} {why}"));
        let is_plain = |part| matches!(part, Component::RootDir | Component::Normal(_));
        if !path.is_absolute() || !path.components().all(is_plain) || text.contains('\0') {
            return Err(invalid("must be absolute and must not contain .."));
        }
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(invalid("names no file"));
        };
        let (parent, name) = (parent.to_owned(), name.to_owned());
        let pools = self.core.catalog().read(|tx| -> Result<_> { Ok(tx.pools()?) }).await?;
        let roots: Vec<PathBuf> = pools.into_iter().map(|pool| pool.spec.path.into()).collect();
        let roots = [self.files.permitted_dirs(), &roots].concat();
        let shown = text.to_owned();
        blocking(move || {
            let parent = parent.canonicalize().map_err(|error| {
                let detail = format!("cannot access the directory of {shown}: {error}");
                Failure::new(ProblemCode::Invalid, detail)
            })?;
            let mut roots = roots.iter().filter_map(|root| root.canonicalize().ok());
            match roots.any(|root| parent.starts_with(root)) {
                true if parent.to_str().is_some() => Ok(parent.join(name)),
                _ => {
                    let detail = format!(
                        "the path {shown} is neither in the directory of a pool nor in one of --file-dir of the server; move \
                         the file, or permit its directory with that flag"
                    );
                    Err(Failure::new(ProblemCode::Invalid, detail))
                }
            }
        })
        .await
    }

    /// Makes an adopted file the file of its volume. False if that was cancelled.
    pub(super) async fn adopt_bytes(&self, row: &VolumeRow) -> Result<bool> {
        let id = row.id.clone();
        let Some(adoption) =
            self.core.catalog().read(move |tx| -> Result<_> { Ok(tx.adoption(&id)?) }).await?
        else {
            return Ok(true);
        };
        let (pool, record) = self.new_record(row).await?;
        let AdoptionRow { path, inode, method } = adoption;
        match method {
            AdoptionMethod::Rename => self.rename_into(row, pool, record, path, inode).await,
            AdoptionMethod::Copy => {
                self.copy_into(row, pool, record, files::Origin::File { path, inode }).await
            }
            AdoptionMethod::Convert => {
                self.copy_into(row, pool, record, files::Origin::Image { path, inode }).await
            }
        }
    }

    async fn rename_into(
        &self,
        row: &VolumeRow,
        pool: PoolRow,
        record: Record,
        path: PathBuf,
        inode: u64,
    ) -> Result<bool> {
        let cleared = self.files.clear_volume(&pool, row).await?;
        self.engines
            .run::<_, EngineError, _>(&pool, move |e| e.adopt_file(&cleared, &path, inode, &record))
            .await?;
        Ok(true)
    }

    async fn copy_into(
        &self,
        row: &VolumeRow,
        pool: PoolRow,
        record: Record,
        origin: files::Origin,
    ) -> Result<bool> {
        let (object, identity) = (crate::engine::Object::Volume(row.id.clone()), row.disk_uuid);
        let is_complete = move |e: &dyn crate::engine::Engine| e.is_complete(&object, identity);
        if self.engines.run::<_, EngineError, _>(&pool, is_complete).await? {
            return Ok(true);
        }
        self.copies.copy_into(&pool, origin, row.capacity, record).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(format: Format) -> Candidate {
        let path = "/pools/b/disk.img".into();
        Candidate { path, inode: 1, home: Home::Filesystem(7), size: 100, allocated: 60, format }
    }

    #[test]
    fn an_image_stays_in_its_pool() {
        let pool = PoolName::new("r").unwrap();
        let image = Candidate { home: Home::Pool(pool.clone()), ..file(Format::Raw) };
        assert_eq!(method(&image, None), AdoptionMethod::Rename);
        assert_eq!(near(&image, &[], &Facts::new()), [pool]);
    }

    #[test]
    fn a_raw_file_is_renamed_on_its_filesystem_only() {
        assert_eq!(method(&file(Format::Raw), Some(7)), AdoptionMethod::Rename);
        assert_eq!(method(&file(Format::Raw), Some(8)), AdoptionMethod::Copy);
        assert_eq!(method(&file(Format::Raw), None), AdoptionMethod::Copy);
        assert_eq!(method(&file(Format::Qcow2 { size: 100 }), Some(7)), AdoptionMethod::Convert);
    }

    #[test]
    fn only_a_file_that_is_renamed_needs_no_space_for_what_it_has() {
        let near = [PoolName::new("b").unwrap()];
        let pool = |name: &str| placement::Candidate {
            engine: infra_api::EngineKind::File,
            name: PoolName::new(name).unwrap(),
            labels: Labels::new(),
            zones: None,
            reached: true,
            healthy: true,
            cordoned: false,
            suspended: false,
            free_bytes: 50,
            in_group: 0,
        };
        let free = |format| {
            let mut pools = [pool("a"), pool("b")];
            credit(&file(format), &near, &mut pools);
            pools.map(|pool| pool.free_bytes)
        };
        assert_eq!(free(Format::Raw), [50, 110]);
        assert_eq!(free(Format::Qcow2 { size: 100 }), [50, 50]);
    }
}
