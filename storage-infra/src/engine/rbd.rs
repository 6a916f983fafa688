//! RBD engine: one image per volume or snapshot in a pool, or in a namespace of a pool, of an existing Ceph cluster.
//!
//! A volume's image has the volume's ID as its name. All other names begin with an underscore, which no ID does. An
//! image that is being made has another name until it is complete, so after a crash its name alone tells whether it is
//! complete. A snapshot is an image of its own, a clone: it outlives its volume. Records are image metadata.
//!
//! A marker image with the pool's UUID distinguishes the registered pool from another one. Replicas and device class
//! are those of the Ceph pool.

mod adopt;
mod clones;
mod command;
mod data;
mod images;
mod location;
mod names;
mod output;
mod scan;
mod session;

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use infra_api::VolumeId;
use uuid::Uuid;

use super::adopt::ForeignImage;
use super::clearance::{Clearance, Files};
use super::image_lock::Holder;
use super::{
    Contents, CopyProgress, DirectoryVersion, Engine, EngineError, Expected, Method, Object, PartFile,
    PoolFacts, Record, Result, Revisions,
};
use crate::audit;
use crate::clock::Clock;
use crate::fail_points::requested;
use crate::hypervisor::{DiskLocation, DiskSource, RbdImage, RbdSource};
use crate::lease::Lease;
use command::Ceph;
use names::{MARKER, image_name, object_of, part_name, part_of};
use output::ClusterState;
use session::Call;

pub(super) use data::ImageData;
pub use location::{RbdLocation, image_path, is_rbd, parse_image};
pub(super) use scan::scan_pool;

/// Size of the marker image, which holds no data.
const MARKER_SIZE: u64 = 1 << 20;
/// Image metadata of the marker: the pool's UUID.
const POOL_UUID: &str = "nestor-pool-uuid";
/// Age up to which a report of the cluster answers further requests: its statistics are not newer.
const REPORT_AGE: Duration = Duration::from_secs(2);
/// Age up to which the marker is known to be right: nobody can mount another pool there.
const MARKER_AGE: Duration = Duration::from_secs(10);

/// Storage engine of a pool whose volumes are images in a Ceph cluster.
pub struct RbdEngine {
    ceph: Ceph,
    uuid: Uuid,
    checked: Mutex<Option<Instant>>,
    report: Mutex<Option<(Instant, ClusterState)>>,
    /// Snapshots that are being cloned.
    cloning: Mutex<HashSet<String>>,
    /// Of the server, if there may be several.
    epoch: Option<i64>,
}

impl RbdEngine {
    /// The pool with this UUID at this location. Does no I/O.
    pub fn new(location: RbdLocation, uuid: Uuid, clock: Clock) -> Self {
        let (checked, report, cloning) = (Mutex::default(), Mutex::default(), Mutex::default());
        let ceph = Ceph::new(location, Lease::unlimited(), clock);
        Self { ceph, uuid, checked, report, cloning, epoch: None }
    }

    /// The same, for a server with this lease, and with this epoch if there may be several.
    pub fn under(self, lease: Lease, epoch: Option<i64>) -> Self {
        let Ceph { location, clock, .. } = self.ceph;
        Self { ceph: Ceph::new(location, lease, clock), epoch, ..self }
    }

    fn image(&self, object: &Object) -> RbdImage {
        self.ceph.location.image(image_name(object))
    }

    fn part(&self, object: &Object) -> RbdImage {
        self.ceph.location.image(part_name(object, self.epoch))
    }

    /// Incomplete images of an object that servers of earlier epochs left, the latest first.
    fn left_parts(&self, object: &Object) -> Result<Vec<RbdImage>> {
        if self.epoch.is_none() {
            return Ok(Vec::new());
        }
        let left = |name: String| {
            let (of, epoch) = part_of(&name)?;
            (of == *object && epoch < self.epoch).then(|| (epoch, self.ceph.location.image(name)))
        };
        let mut found: Vec<_> = self.ceph.names()?.into_iter().filter_map(left).collect();
        found.sort_by_key(|(epoch, _)| std::cmp::Reverse(*epoch));
        Ok(found.into_iter().map(|(_, image)| image).collect())
    }

    /// Removes what earlier servers left of objects that are complete, once those servers have it open no longer.
    fn discard_left_parts(&self, known: &HashSet<Object>, used: &mut HashMap<String, u64>) -> Result<()> {
        let is_left = |name: &String| {
            part_of(name).is_some_and(|(object, epoch)| {
                epoch < self.epoch && known.contains(&object) && used.contains_key(&image_name(&object))
            })
        };
        let left: Vec<String> = used.keys().filter(|name| is_left(name)).cloned().collect();
        for name in left {
            let image = self.ceph.location.image(name.clone());
            if self.watched_by(&image)?.is_none() && self.ceph.discard(&image, 0)? {
                used.remove(&name);
            }
        }
        Ok(())
    }

    /// Removes the incomplete images of an object. One that an earlier server still has open stays until that has ended.
    fn discard_parts(&self, object: &Object) -> Result<bool> {
        let mut removed = self.ceph.discard(&self.part(object), 0)?;
        for left in self.left_parts(object)? {
            if self.watched_by(&left)?.is_none() {
                removed |= self.ceph.discard(&left, 0)?;
            }
        }
        Ok(removed)
    }

    fn marker(&self) -> RbdImage {
        self.ceph.location.image(MARKER)
    }

    /// The UUID of the pool that has claimed the images here.
    fn read_marker(&self) -> Result<Option<String>> {
        self.ceph.metadata(&self.marker(), POOL_UUID)
    }

    /// Fails unless the images here belong to this pool.
    fn check(&self) -> Result<()> {
        let is_recent = |at: &Instant| at.elapsed() < MARKER_AGE;
        if self.checked.lock().unwrap_or_else(PoisonError::into_inner).as_ref().is_some_and(is_recent) {
            return Ok(());
        }
        let (now, marker) = (Instant::now(), self.marker());
        match self.read_marker()? {
            Some(found) if found == self.uuid.to_string() => {}
            Some(found) => {
                return Err(EngineError::Unhealthy(format!(
                    "the image {marker} says that its pool has the UUID {found}, this pool has {}: it is another cluster or \
                     pool; correct the Ceph configuration",
                    self.uuid
                )));
            }
            None => {
                return Err(EngineError::Unhealthy(format!(
                    "the image {marker} is missing: it is another cluster or pool, or the image was removed; correct the Ceph \
                     configuration"
                )));
            }
        }
        *self.checked.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
        Ok(())
    }

    /// The cluster's state. Fails if requests to the pool would wait: a hypervisor that opens an image then freezes its
    /// VM.
    fn cluster(&self) -> Result<ClusterState> {
        let mut report = self.report.lock().unwrap_or_else(PoisonError::into_inner);
        let known =
            report.as_ref().filter(|(at, _)| at.elapsed() < REPORT_AGE).map(|(_, state)| state.clone());
        let state = match known {
            Some(state) => state,
            None => {
                let (now, commands) = (Instant::now(), ClusterState::commands());
                let answers = self.ceph.call(&Call::Monitors { commands: &commands })?;
                let state = ClusterState::parse(answers, &self.ceph.location.pool);
                let state = state.map_err(EngineError::Unhealthy)?;
                *report = Some((now, state.clone()));
                state
            }
        };
        match state.stalled {
            Some(why) => Err(EngineError::Unhealthy(format!(
                "the Ceph pool {} does not answer: {why}; `ceph health detail` says what is wrong",
                self.ceph.location.pool
            ))),
            None => Ok(state),
        }
    }

    /// Fails if an object's image belongs to another object: the catalog is older than the pool, or someone made it.
    fn refuse_another(&self, object: &Object, identity: Uuid) -> Result<()> {
        let image = self.image(object);
        match self.ceph.record(&image)? {
            Some(found) if found.object().as_ref() != Some(object) || found.identity() != identity => {
                Err(EngineError::Foreign(format!(
                    "the image {image} is another object than the {object} in the catalog; the catalog may be older than the \
                     pool. The image is left alone: rename it, or rebuild the catalog with `storage-infra recover`"
                )))
            }
            _ => Ok(()),
        }
    }

    fn open_by(&self, object: &Object) -> Result<Option<Holder>> {
        self.watched_by(&self.image(object))
    }

    fn watched_by(&self, image: &RbdImage) -> Result<Option<Holder>> {
        let watchers = self.ceph.watchers(image)?;
        let clients: Vec<String> = watchers.into_iter().map(|one| one.address).collect();
        Ok((!clients.is_empty()).then_some(Holder::Watching(clients)))
    }

    /// Fails if a client has the image open now, whatever the evidence said: Ceph moves an image in use to the trash.
    fn refuse_open(&self, object: &Object) -> Result<()> {
        match self.open_by(object)? {
            None => Ok(()),
            Some(holder) => Err(EngineError::InUse(format!("the image of {object} is in use by {holder}"))),
        }
    }

    /// Fails unless an object's complete image exists.
    fn existing(&self, object: &Object) -> Result<RbdImage> {
        self.check()?;
        let image = self.image(object);
        match self.ceph.size(&image)? {
            Some(_) => Ok(image),
            None => Err(EngineError::Missing(format!("the image of {object} does not exist: {image}"))),
        }
    }

    fn missing(&self, object: &Object) -> String {
        format!("the image of {object} is missing: {}", self.image(object))
    }

    fn source_of(&self, image: RbdImage) -> DiskSource {
        DiskSource::Rbd(RbdSource { image, client: self.ceph.location.client(self.uuid) })
    }

    /// Removes what an interrupted creation left, so that the image can be made.
    fn clear_part(&self, object: &Object) -> Result<RbdImage> {
        self.refuse_open(object)?;
        self.discard_parts(object)?;
        Ok(self.part(object))
    }

    /// Gives an incomplete image its size, its record and then its name.
    fn complete(&self, object: &Object, bytes: u64, record: &Record) -> Result<()> {
        let (part, image) = (self.part(object), self.image(object));
        if self.ceph.size(&part)?.is_some_and(|size| size < bytes) {
            self.ceph.resize(&part, bytes)?;
        }
        self.ceph.set_record(&part, record)?;
        match self.ceph.rename(&part, &image)? {
            true => Ok(()),
            false => Err(EngineError::Foreign(format!(
                "the image {image} exists and belongs to no object; rename or remove it, or use another ID"
            ))),
        }
    }
}

fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

impl Engine for RbdEngine {
    fn claim(&self, pool: &Record) -> Result<()> {
        self.cluster()?;
        let marker = self.marker();
        if self.read_marker()?.is_none() {
            // Made under another name, so that the marker exists completely or not at all.
            let new = self.ceph.location.image(format!("_new-pool.{}", self.uuid.simple()));
            self.ceph.discard(&new, 0)?;
            self.ceph.create(&new, MARKER_SIZE)?;
            self.ceph.set_metadata(&new, POOL_UUID, &self.uuid.to_string())?;
            self.ceph.set_record(&new, pool)?;
            if !self.ceph.rename(&new, &marker)? {
                self.ceph.discard(&new, 0)?;
            }
        }
        match self.read_marker()? {
            Some(found) if found == self.uuid.to_string() => self.write_record(pool),
            found => Err(EngineError::Foreign(format!(
                "the image {marker} says that the pool with UUID {} uses this Ceph pool; if this server's catalog was lost, \
                 `storage-infra recover` rebuilds it with that pool; otherwise choose another pool or namespace, or, if that \
                 pool no longer exists, remove the image",
                found.unwrap_or_default()
            ))),
        }
    }

    fn release(&self) -> Result<()> {
        match self.check() {
            Ok(()) => {}
            // If the pool is gone or another one's, there is nothing to remove.
            Err(_) => return Ok(()),
        }
        *self.checked.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.ceph.discard(&self.marker(), 0)?;
        self.ceph.empty_trash()
    }

    fn other_server(&self) -> Option<String> {
        None
    }

    fn inspect(&self) -> Result<PoolFacts> {
        self.check()?;
        let ClusterState { fsid, space, kept, .. } = self.cluster()?;
        Ok(PoolFacts {
            directory: DirectoryVersion::of_names(hash(self.ceph.names()?)),
            filesystem: hash((fsid, space.id)),
            capacity: space.used + space.available,
            fixed_size: None,
            available: space.available,
            used: space.used,
            reflink: true,
            ceph: kept,
        })
    }

    fn contents(&self, known: &HashSet<Object>) -> Result<Contents> {
        self.check()?;
        self.ceph.empty_trash()?;
        let usage: output::DiskUsage = self.ceph.rbd_here(&["du"])?;
        let mut used = usage.by_image();
        self.discard_left_parts(known, &mut used)?;
        let mut contents = Contents::default();
        used.remove(MARKER);
        for object in known {
            if let Some(bytes) = used.remove(&image_name(object)) {
                *contents.allocated.entry(object.clone()).or_default() += bytes;
            }
        }
        used.retain(|name, bytes| match part_of(name).and_then(|(object, _)| known.get(&object)) {
            Some(object) => {
                *contents.allocated.entry(object.clone()).or_default() += *bytes;
                false
            }
            None => true,
        });
        contents.unknown = used.into_keys().collect();
        contents.unknown.sort();
        Ok(contents)
    }

    fn damaged(&self, expected: &HashMap<Object, Expected>) -> Result<HashMap<Object, String>> {
        self.check()?;
        let names: HashSet<String> = self.ceph.names()?.into_iter().collect();
        let missing = expected.keys().filter(|object| !names.contains(&image_name(object)));
        Ok(missing.map(|object| (object.clone(), self.missing(object))).collect())
    }

    fn verify(&self, object: &Object, expected: Expected) -> Result<()> {
        self.cluster()?;
        match self.ceph.size(&self.image(object))? {
            None => Err(EngineError::Missing(self.missing(object))),
            Some(bytes) if bytes < expected.bytes => Err(EngineError::Missing(format!(
                "the image {} has {bytes} bytes, and {object} has {}: somebody has resized it; do not use what is left of it \
                 before you know why",
                self.image(object),
                expected.bytes
            ))),
            Some(_) => Ok(()),
        }
    }

    fn accept_file(&self, record: &Record, _expected: Expected) -> Result<()> {
        let object = record.object().map(|object| object.to_string()).unwrap_or_default();
        Err(EngineError::Unsupported(format!("{object} is an image, which has its record in itself")))
    }

    fn generation(&self) -> Result<Option<u64>> {
        // A Ceph pool has no earlier state to which it could be set back as a whole.
        Ok(None)
    }

    fn set_generation(&self, _generation: u64) -> Result<()> {
        Ok(())
    }

    fn expect_generation(&self, _generation: u64) {}

    fn exists(&self, object: &Object) -> Result<bool> {
        self.check()?;
        let is_there = |image: &RbdImage| Ok::<_, EngineError>(self.ceph.size(image)?.is_some());
        Ok(is_there(&self.image(object))?
            || is_there(&self.part(object))?
            || !self.left_parts(object)?.is_empty())
    }

    fn is_complete(&self, object: &Object, identity: Uuid) -> Result<bool> {
        self.check()?;
        self.refuse_another(object, identity)?;
        Ok(self.ceph.size(&self.image(object))?.is_some())
    }

    fn is_blank(&self, id: &VolumeId) -> Result<bool> {
        self.ceph.is_blank(&self.existing(&Object::Volume(id.clone()))?)
    }

    fn allocated(&self, object: &Object) -> Result<u64> {
        self.ceph.allocated(&self.existing(object)?)
    }

    fn files(&self, object: &Object) -> Result<Files> {
        self.check()?;
        let has = |image: &RbdImage| Ok::<_, EngineError>(self.ceph.size(image)?.is_some());
        let image = self.image(object);
        let complete = if has(&image)? { vec![DiskLocation::Rbd(image)] } else { Vec::new() };
        let unfinished = has(&self.part(object))? || !self.left_parts(object)?.is_empty();
        Ok(Files { complete, unfinished, open: self.open_by(object)? })
    }

    fn create(&self, cleared: &Clearance, bytes: u64, record: &Record) -> Result<()> {
        let object = cleared.object();
        if self.is_complete(object, record.identity())? {
            return match self.ceph.record(&self.image(object))? {
                // Created before a crash: its record is the more complete one.
                Some(_) => Ok(()),
                None => Err(EngineError::Foreign(format!(
                    "the image {} has no record of {object}; rename or remove it, or use another ID",
                    self.image(object)
                ))),
            };
        }
        let part = self.clear_part(object)?;
        self.ceph.create(&part, bytes)?;
        self.complete(object, bytes, record)
    }

    fn create_from(
        &self,
        cleared: &Clearance,
        from: &DiskSource,
        bytes: u64,
        method: Method,
        record: &Record,
        progress: &CopyProgress,
    ) -> Result<()> {
        self.check()?;
        match (from, method) {
            (_, Method::Copy) => self.copy_into(cleared.object(), from, bytes, record, progress),
            (DiskSource::Rbd(source), Method::Reflink)
                if self.ceph.location.name_of(&source.image).is_some() =>
            {
                let part = self.clear_part(cleared.object())?;
                self.clone_into(&source.image, &part, bytes)?;
                self.complete(cleared.object(), bytes, record)?;
                progress.set(bytes);
                Ok(())
            }
            (_, Method::Reflink) => Err(EngineError::Unsupported(format!(
                "images of {} share no data with {}",
                self.ceph.location.place(),
                from.location()
            ))),
        }
    }

    fn open_part(&self, cleared: &Clearance, keep: u64, bytes: u64) -> Result<PartFile> {
        self.reopen_part(cleared, keep, bytes)
    }

    fn complete_part(&self, cleared: &Clearance, part: PartFile, bytes: u64, record: &Record) -> Result<()> {
        self.check()?;
        self.finish_part(cleared.object(), part, bytes, record)
    }

    fn examine_image(&self, path: &Path) -> Result<ForeignImage> {
        self.examine(path)
    }

    fn adopt_file(&self, cleared: &Clearance, path: &Path, id: u64, record: &Record) -> Result<()> {
        self.adopt(cleared, path, id, record)
    }

    fn create_from_image(
        &self,
        _cleared: &Clearance,
        image: &Path,
        _inode: u64,
        _bytes: u64,
        _record: &Record,
        _progress: &CopyProgress,
    ) -> Result<()> {
        Err(EngineError::Unsupported(format!("{} cannot be converted into an RBD image", image.display())))
    }

    fn check_release(&self, object: &Object, path: &Path) -> Result<u64> {
        self.releasable(object, path)
    }

    fn release_file(&self, cleared: &Clearance, path: &Path, id: u64) -> Result<()> {
        self.move_out(cleared, path, id)
    }

    fn revisions(&self) -> Result<Revisions> {
        self.check()?;
        let mut found = Revisions::default();
        if let Some(Record::Pool(record)) = self.ceph.record(&self.marker())? {
            found.pool = record.revision;
        }
        let names = self.ceph.names()?;
        for name in names.into_iter().filter(|name| matches!(object_of(name), Some(Object::Volume(_)))) {
            // An unreadable record is reported by the operation that needs it.
            if let Ok(Some(Record::Volume(record))) = self.ceph.record(&self.ceph.location.image(name)) {
                found.volumes.insert(record.id, record.revision);
            }
        }
        Ok(found)
    }

    fn read_record(&self, object: &Object) -> Result<Option<Record>> {
        self.check()?;
        self.ceph.record(&self.image(object))
    }

    fn write_record(&self, record: &Record) -> Result<()> {
        self.check()?;
        let image = record.object().map_or_else(|| self.marker(), |object| self.image(&object));
        let write = || self.ceph.set_record(&image, record);
        fail_point::effect(|| Some("engine.rbd.note".into()), requested, write)
    }

    fn expand(&self, id: &VolumeId, bytes: u64) -> Result<()> {
        let image = self.existing(&Object::Volume(id.clone()))?;
        if self.ceph.size(&image)?.is_some_and(|size| size >= bytes) {
            return Ok(());
        }
        self.ceph.resize(&image, bytes).map_err(|error| match error {
            EngineError::NoSpace(why) => EngineError::NotExpanded(why),
            other => other,
        })
    }

    fn remove(&self, cleared: &Clearance) -> Result<()> {
        self.check()?;
        let object = cleared.object();
        self.refuse_another(object, cleared.identity())?;
        self.refuse_open(object)?;
        let image = self.image(object);
        let seconds = self.ceph.location.trash_seconds;
        let removed = self.ceph.discard(&image, seconds)?;
        if self.discard_parts(object)? || removed {
            let place = image.to_string();
            audit::log_action("move to the trash", object, Path::new(&place), "it is deleted and not in use");
        }
        self.ceph.empty_trash()
    }

    fn remove_incomplete(&self, cleared: &Clearance) -> Result<()> {
        self.check()?;
        let (object, part) = (cleared.object(), self.part(cleared.object()));
        if self.discard_parts(object)? {
            audit::log_action(
                "remove",
                object,
                Path::new(&part.to_string()),
                "it is incomplete and abandoned",
            );
        }
        self.ceph.empty_trash()
    }

    fn source(&self, id: &VolumeId) -> DiskSource {
        self.source_of(self.image(&Object::Volume(id.clone())))
    }

    fn locate(&self, object: &Object) -> Result<DiskSource> {
        self.cluster()?;
        self.existing(object).map(|image| self.source_of(image))
    }

    fn cut_off(&self, id: &VolumeId) -> Result<Vec<String>> {
        self.check()?;
        self.ceph.cut_off(&self.image(&Object::Volume(id.clone())))
    }
}
