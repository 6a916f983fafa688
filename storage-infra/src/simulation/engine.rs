//! Engine of a simulated pool: what [`crate::engine::FileEngine`] does, on files in the world.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use infra_api::VolumeId;
use uuid::Uuid;

use super::Sim;
use super::faults::Fault;
use super::world::{Data, Inode, OWN_HOST, SLOT, Vm, VmDisk, World};
use crate::engine::adopt::ForeignImage;
use crate::engine::{
    Clearance, Contents, CopyProgress, DirectoryVersion, Engine, EngineError, Expected, Files, Method,
    Object, PartFile, PoolFacts, Record, Result, Revisions,
};
use crate::hypervisor::{DiskLocation, DiskSource};
use crate::safety::Check;

/// Size of a pool in blocks.
const CAPACITY: u64 = 4096;

/// Time from the question which VMs of other hosts have a file open until it is removed.
const CLEARANCE_TIME: Duration = Duration::from_secs(30);

/// A pool in a directory of the world.
pub(super) struct SimEngine {
    pub(super) sim: Arc<Sim>,
    pub(super) dir: PathBuf,
    pub(super) uuid: Uuid,
    /// The lowest number in the marker of the pool's present state.
    pub(super) generation: AtomicU64,
}

fn failed(what: &str) -> EngineError {
    EngineError::Io { what: what.to_owned(), source: io::Error::other("a simulated error") }
}

impl Record {
    /// Whether it is the record of the volume with this disk.
    fn is_of(&self, disk: Uuid) -> bool {
        matches!(self, Self::Volume(volume) if volume.disk_uuid == disk)
    }
}

fn file_name(object: &Object) -> String {
    match object {
        Object::Volume(id) => format!("{id}.raw"),
        Object::Snapshot(id) => format!("{id}.snap"),
    }
}

impl SimEngine {
    fn file(&self, object: &Object) -> PathBuf {
        self.dir.join(file_name(object))
    }

    fn part(&self, object: &Object) -> PathBuf {
        self.dir.join(match object {
            Object::Volume(id) => format!("{id}.vpart"),
            Object::Snapshot(id) => format!("{id}.spart"),
        })
    }

    /// Reads the world.
    fn read<T>(&self, work: impl FnOnce(&World) -> Result<T>) -> Result<T> {
        self.sim.refuse_dead();
        let mut world = self.sim.world();
        world.tick();
        self.check(&world)?;
        work(&world)
    }

    /// Changes the world, unless that fails.
    fn effect<T>(&self, what: &str, work: impl FnOnce(&mut World) -> Result<T>) -> Result<T> {
        self.sim.refuse_dead();
        let mut world = self.sim.world();
        world.tick();
        self.check(&world)?;
        let fault = world.faults.next();
        let (dir, pool) = (self.dir.display(), fault);
        world.note(|| format!("{what} in {dir}: {pool:?}"));
        match fault {
            Some(Fault::NotDone) => Err(failed(what)),
            Some(Fault::NoSpace) => Err(EngineError::NoSpace(what.to_owned())),
            Some(Fault::Done) => {
                work(&mut world)?;
                Err(failed(what))
            }
            Some(Fault::Late(_)) | None => work(&mut world),
        }
    }

    fn check(&self, world: &World) -> Result<()> {
        let least = self.generation.load(Ordering::SeqCst);
        match world.pools.get(&self.dir) {
            Some(pool) if pool.marker == Some(self.uuid) && pool.generation >= least => Ok(()),
            _ => Err(EngineError::Unhealthy(format!("{} is another pool", self.dir.display()))),
        }
    }

    fn existing(&self, world: &World, object: &Object) -> Result<Inode> {
        let path = self.file(object);
        let missing =
            || EngineError::Missing(format!("the file of {object} does not exist: {}", path.display()));
        world.inode(&path).ok_or_else(missing)
    }

    /// What is wrong with the file of an object.
    fn problem(&self, world: &World, object: &Object, expected: Expected) -> Option<String> {
        let path = self.file(object).display().to_string();
        let Some(inode) = world.inode(&self.file(object)) else {
            return Some(format!("the file of {object} is missing: {path}"));
        };
        let data = world.file(inode);
        let is_of = data.record.as_ref().map(|record| record.identity() == expected.identity);
        match is_of {
            _ if (data.blocks.len() as u64) * SLOT < expected.bytes => Some(format!("{path} is too short")),
            Some(true) => None,
            None if !expected.recorded => None,
            _ => Some(format!("{path} is not the file of {object}")),
        }
    }

    /// Fails if a layer over the file of a volume has later writes.
    fn refuse_layers(&self, world: &World, object: &Object) -> Result<()> {
        if !Check::Altered.applies() || !Check::Layers.applies() {
            return Ok(());
        }
        let Some(base) = world.inode(&self.file(object)) else { return Ok(()) };
        let is_later = |inode: &Inode| {
            let layer = world.file(*inode);
            layer.backing == Some(base) && layer.changed >= world.file(base).changed
        };
        match world.names.iter().find(|(path, inode)| path.parent() == Some(&self.dir) && is_later(inode)) {
            Some((path, _)) => {
                Err(EngineError::InUse(format!("{} is a layer over {object}", path.display())))
            }
            None => Ok(()),
        }
    }

    /// Fails if the file is another object's.
    fn refuse_another(&self, world: &World, object: &Object, identity: Uuid) -> Result<()> {
        let found = world.inode(&self.file(object)).and_then(|inode| world.file(inode).record.clone());
        if found.is_none_or(|found| found.object().as_ref() == Some(object) && found.identity() == identity) {
            return Ok(());
        }
        Err(EngineError::Foreign(format!("{} is another object", self.file(object).display())))
    }

    /// Fails if a VM of this host has a file open.
    fn refuse_open(&self, object: &Object, world: &World) -> Result<()> {
        for path in [self.file(object), self.part(object)] {
            let inode = world.inode(&path);
            if inode.is_some_and(|inode| world.is_locked(inode)) {
                return Err(EngineError::InUse(format!("the file of {object} is in use")));
            }
        }
        Ok(())
    }

    /// Creates an incomplete file.
    fn create_part(&self, world: &mut World, cleared: &Clearance, data: Data) -> Result<()> {
        if !cleared.was_empty() {
            self.refuse_open(cleared.object(), world)?;
        }
        let part = self.part(cleared.object());
        world.unlink(&part);
        if data.blocks.iter().any(|block| *block != 0) && world.is_full(&part) {
            return Err(EngineError::NoSpace(part.display().to_string()));
        }
        world.create(part, data);
        Ok(())
    }

    /// Gives an incomplete file its name. The crash of the server before that leaves it incomplete.
    fn complete(&self, object: &Object, bytes: u64, record: &Record) -> Result<()> {
        self.sim.pass("engine.file.name.before");
        let mut world = self.sim.world();
        let part = self.part(object);
        let Some(inode) = world.inode(&part) else { return Err(failed("rename")) };
        let slots = usize::try_from(bytes / SLOT).unwrap_or(0);
        let data = world.file_mut(inode);
        let length = data.blocks.len().max(slots);
        data.blocks.resize(length, 0);
        data.record = Some(record.clone());
        world.rename(&part, &self.file(object));
        drop(world);
        self.sim.pass("engine.file.name.after");
        Ok(())
    }

    /// The blocks of a file, read one after the other unless the file is cloned.
    fn copied(&self, world: &mut World, from: &Path, method: Method) -> Result<Vec<u64>> {
        let Some(inode) = world.inode(from) else {
            return Err(EngineError::Missing(format!("{} does not exist", from.display())));
        };
        let pools = [world.pool_of(from), world.pools.get(&self.dir)];
        let [from_filesystem, filesystem] = pools.map(|pool| pool.map(|pool| pool.filesystem));
        match method {
            Method::Reflink if filesystem == Some(0) && from_filesystem == filesystem => {
                Ok(world.file(inode).blocks.clone())
            }
            Method::Reflink => Err(EngineError::Unsupported("no reflinks".to_owned())),
            Method::Copy => {
                let mut blocks = Vec::new();
                for slot in 0..world.file(inode).blocks.len() {
                    blocks.push(world.file(inode).blocks[slot]);
                    world.guest();
                }
                Ok(blocks)
            }
        }
    }

    /// Checks what was copied, and takes it as the content of the copy.
    fn copied_object(&self, world: &mut World, from: &Path, record: &Record, blocks: &[u64]) {
        let source = world.inode(from).and_then(|inode| world.file(inode).record.clone());
        let reader =
            format!("the copy to {}", record.object().map_or_else(String::new, |one| one.to_string()));
        let wrong = match &source {
            // A move: the content is the volume's if nobody writes until it ends.
            Some(Record::Volume(volume)) if record.is_of(volume.disk_uuid) => return,
            Some(Record::Volume(volume)) => world.oracle.wrong_volume(volume.disk_uuid, blocks, &reader),
            Some(Record::Snapshot(one)) => world.oracle.wrong_snapshot(&one.id, blocks, &reader),
            Some(Record::Pool(_)) | None => None,
        };
        match record {
            Record::Volume(volume) => world.oracle.begin_copy(volume.disk_uuid, blocks, wrong),
            Record::Snapshot(snapshot) => world.oracle.begin_snapshot(&snapshot.id, blocks, wrong),
            Record::Pool(_) => {}
        }
    }

    fn remove_names(&self, world: &mut World, object: &Object, paths: &[PathBuf]) -> Result<()> {
        self.refuse_open(object, world)?;
        for path in paths {
            let Some(inode) = world.inode(path) else { continue };
            if let Some(vm) = world.vms.values().find(|vm| must_be_known(world, vm, inode)) {
                let what = format!("{} is removed, and {} has it open", path.display(), vm.name);
                world.oracle.violated(what);
            }
            world.note(|| format!("remove {}", path.display()));
            world.unlink(path);
        }
        Ok(())
    }
}

/// Whether a VM has a file open, and the server must know: it sees the locks of its own host, and asks others before it removes
/// a file.
fn must_be_known(world: &World, vm: &Vm, inode: Inode) -> bool {
    let is_old = |disk: &VmDisk| disk.since + CLEARANCE_TIME < world.now();
    let mut disks = vm.disks.values().filter(|disk| disk.has_open(inode));
    disks.any(|disk| vm.host == OWN_HOST || !disk.is_foreign || is_old(disk))
}

impl Engine for SimEngine {
    fn claim(&self, _pool: &Record) -> Result<()> {
        Ok(())
    }

    fn release(&self) -> Result<()> {
        Err(EngineError::Unsupported("simulated pools stay".to_owned()))
    }

    fn other_server(&self) -> Option<String> {
        None
    }

    fn inspect(&self) -> Result<PoolFacts> {
        self.read(|world| {
            let pool = &world.pools[&self.dir];
            let names = world.names.iter().filter(|(path, _)| path.parent() == Some(&self.dir));
            let used =
                |inode: &Inode| world.file(*inode).blocks.iter().filter(|block| **block != 0).count() as u64;
            let used: u64 = names.map(|(_, inode)| used(inode)).sum();
            let available = if pool.is_full { 0 } else { CAPACITY.saturating_sub(used) };
            Ok(PoolFacts {
                directory: DirectoryVersion::of_names(pool.version),
                filesystem: pool.filesystem,
                capacity: CAPACITY * SLOT,
                fixed_size: Some(CAPACITY * SLOT),
                available: available * SLOT,
                used: (CAPACITY - available) * SLOT,
                reflink: pool.filesystem == 0,
                ceph: None,
            })
        })
    }

    fn contents(&self, known: &HashSet<Object>) -> Result<Contents> {
        self.read(|world| {
            let mut contents = Contents::default();
            for (path, inode) in world.names.iter().filter(|(path, _)| path.parent() == Some(&self.dir)) {
                let is_of = |object: &&Object| self.file(object) == *path || self.part(object) == *path;
                let bytes =
                    world.file(*inode).blocks.iter().filter(|block| **block != 0).count() as u64 * SLOT;
                match known.iter().find(is_of) {
                    Some(object) => *contents.allocated.entry(object.clone()).or_default() += bytes,
                    None => contents.unknown.push(path.display().to_string()),
                }
            }
            Ok(contents)
        })
    }

    fn damaged(&self, expected: &HashMap<Object, Expected>) -> Result<HashMap<Object, String>> {
        self.read(|world| {
            let problem = |(object, expected): (&Object, &Expected)| {
                Some((object.clone(), self.problem(world, object, *expected)?))
            };
            Ok(expected.iter().filter_map(problem).collect())
        })
    }

    fn verify(&self, object: &Object, expected: Expected) -> Result<()> {
        self.read(|world| match self.problem(world, object, expected) {
            None => Ok(()),
            Some(problem) => Err(EngineError::Missing(problem)),
        })
    }

    fn accept_file(&self, record: &Record, expected: Expected) -> Result<()> {
        let Some(object) = record.object() else { return Ok(()) };
        self.verify(&object, Expected { recorded: false, ..expected })?;
        self.write_record(record)
    }

    fn generation(&self) -> Result<Option<u64>> {
        self.read(|world| Ok(Some(world.pools[&self.dir].generation)))
    }

    fn set_generation(&self, generation: u64) -> Result<()> {
        self.effect("set_generation", |world| {
            let pool = world.pools.get_mut(&self.dir).expect("a pool that was checked");
            pool.generation = generation;
            Ok(())
        })
    }

    fn expect_generation(&self, generation: u64) {
        self.generation.fetch_max(generation, Ordering::SeqCst);
    }

    fn exists(&self, object: &Object) -> Result<bool> {
        self.read(|world| {
            Ok([self.file(object), self.part(object)].iter().any(|path| world.inode(path).is_some()))
        })
    }

    fn is_complete(&self, object: &Object, identity: Uuid) -> Result<bool> {
        self.read(|world| {
            self.refuse_another(world, object, identity)?;
            Ok(world.inode(&self.file(object)).is_some())
        })
    }

    fn is_blank(&self, id: &VolumeId) -> Result<bool> {
        self.read(|world| {
            let inode = self.existing(world, &Object::Volume(id.clone()))?;
            Ok(world.file(inode).blocks.iter().all(|block| *block == 0))
        })
    }

    fn allocated(&self, object: &Object) -> Result<u64> {
        self.read(|world| {
            let inode = self.existing(world, object)?;
            Ok(world.file(inode).blocks.iter().filter(|block| **block != 0).count() as u64 * SLOT)
        })
    }

    fn files(&self, object: &Object) -> Result<Files> {
        self.read(|_| Ok(()))?;
        let (file, part) = (self.file(object), self.part(object));
        let open = self.sim.holder(&file).or_else(|| self.sim.holder(&part));
        let world = self.sim.world();
        let complete = world.inode(&file).map(|_| DiskLocation::File(file)).into_iter().collect();
        Ok(Files { complete, unfinished: world.inode(&part).is_some(), open })
    }

    fn create(&self, cleared: &Clearance, bytes: u64, record: &Record) -> Result<()> {
        let object = cleared.object();
        if self.is_complete(object, record.identity())? {
            return Ok(());
        }
        self.effect("create", |world| self.create_part(world, cleared, Data::default()))?;
        self.sim.world().oracle.begin(record.identity(), &[]);
        self.complete(object, bytes, record)
    }

    fn create_from(
        &self,
        cleared: &Clearance,
        from: &DiskSource,
        bytes: u64,
        method: Method,
        record: &Record,
        _progress: &CopyProgress,
    ) -> Result<()> {
        let from = from.file().map_err(EngineError::Unsupported)?;
        self.effect("fill", |world| {
            let blocks = self.copied(world, from, method)?;
            if blocks.len() as u64 * SLOT > bytes {
                return Err(EngineError::SourceExpanded(from.display().to_string()));
            }
            self.copied_object(world, from, record, &blocks);
            self.create_part(world, cleared, Data { blocks, ..Data::default() })
        })?;
        self.complete(cleared.object(), bytes, record)
    }

    fn open_part(&self, _cleared: &Clearance, _keep: u64, _bytes: u64) -> Result<PartFile> {
        Err(EngineError::Unsupported("no imports are simulated".to_owned()))
    }

    fn complete_part(
        &self,
        _cleared: &Clearance,
        _part: PartFile,
        _bytes: u64,
        _record: &Record,
    ) -> Result<()> {
        Err(EngineError::Unsupported("no imports are simulated".to_owned()))
    }

    fn examine_image(&self, path: &Path) -> Result<ForeignImage> {
        Err(EngineError::Unsupported(path.display().to_string()))
    }

    fn adopt_file(&self, _cleared: &Clearance, path: &Path, _inode: u64, _record: &Record) -> Result<()> {
        Err(EngineError::Unsupported(path.display().to_string()))
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
        Err(EngineError::Unsupported(image.display().to_string()))
    }

    fn check_release(&self, object: &Object, path: &Path) -> Result<u64> {
        self.read(|world| {
            let inode = self.existing(world, object)?;
            if world.inode(path).is_some() {
                return Err(EngineError::Unsuitable(format!("{} exists", path.display())));
            }
            Ok(inode)
        })
    }

    fn release_file(&self, cleared: &Clearance, path: &Path, inode: u64) -> Result<()> {
        let from = self.file(cleared.object());
        self.effect("release_file", |world| {
            if world.inode(&from) == Some(inode) {
                self.refuse_open(cleared.object(), world)?;
                world.rename(&from, path);
            } else if world.inode(path) != Some(inode) {
                return Err(EngineError::Missing(from.display().to_string()));
            }
            world.file_mut(inode).record = None;
            Ok(())
        })
    }

    fn revisions(&self) -> Result<Revisions> {
        self.read(|world| {
            let mut found = Revisions::default();
            if let Some(Record::Pool(record)) = &world.pools[&self.dir].record {
                found.pool = record.revision;
            }
            for (path, inode) in &world.names {
                let is_volume =
                    path.parent() == Some(&self.dir) && path.extension().is_some_and(|end| end == "raw");
                if let (true, Some(Record::Volume(record))) = (is_volume, &world.file(*inode).record) {
                    found.volumes.insert(record.id.clone(), record.revision);
                }
            }
            Ok(found)
        })
    }

    fn read_record(&self, object: &Object) -> Result<Option<Record>> {
        self.read(|world| {
            Ok(world.inode(&self.file(object)).and_then(|inode| world.file(inode).record.clone()))
        })
    }

    fn write_record(&self, record: &Record) -> Result<()> {
        let object = record.object();
        let inode = match &object {
            Some(object) => Some(self.read(|world| self.existing(world, object))?),
            None => None,
        };
        let write = || {
            self.effect("note", |world| {
                match inode {
                    Some(inode) => world.file_mut(inode).record = Some(record.clone()),
                    None => {
                        let pool = world.pools.get_mut(&self.dir).expect("a pool that was checked");
                        pool.record = Some(record.clone());
                    }
                }
                Ok(())
            })
        };
        fail_point::around(|| Some("engine.file.note".into()), write)
    }

    fn expand(&self, id: &VolumeId, bytes: u64) -> Result<()> {
        self.effect("expand", |world| {
            let inode = self.existing(world, &Object::Volume(id.clone()))?;
            let slots = usize::try_from(bytes / SLOT).unwrap_or(0);
            let data = world.file_mut(inode);
            let length = data.blocks.len().max(slots);
            data.blocks.resize(length, 0);
            Ok(())
        })
    }

    fn remove(&self, cleared: &Clearance) -> Result<()> {
        let object = cleared.object();
        self.effect("remove", |world| {
            self.refuse_another(world, object, cleared.identity())?;
            self.remove_names(world, object, &[self.file(object), self.part(object)])
        })
    }

    fn remove_incomplete(&self, cleared: &Clearance) -> Result<()> {
        let object = cleared.object();
        self.effect("discard", |world| self.remove_names(world, object, &[self.part(object)]))
    }

    fn source(&self, id: &VolumeId) -> DiskSource {
        DiskSource::File(self.file(&Object::Volume(id.clone())))
    }

    fn locate(&self, object: &Object) -> Result<DiskSource> {
        self.read(|world| {
            self.existing(world, object)?;
            self.refuse_layers(world, object)
        })?;
        Ok(DiskSource::File(self.file(object)))
    }

    fn cut_off(&self, _id: &VolumeId) -> Result<Vec<String>> {
        Ok(Vec::new())
    }
}
