//! What every effect of an engine or a hypervisor passes: the server's lease, without which it has no effect, and fail points
//! around it, where a test can make the server crash, or the effect report an error (see crate `fail_point`). Names of fail
//! points: `engine.<effect>` and `hypervisor.<effect>`, with the suffix `.before` or `.after`.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use infra_api::VolumeId;
use uuid::Uuid;

use crate::engine::adopt::ForeignImage;
use crate::engine::{
    self, Clearance, Contents, CopyProgress, Engine, EngineError, Expected, Files, Method, Object, PartFile,
    PoolFacts, Record, Revisions,
};
use crate::hypervisor::{
    self, AttachedDisk, Changed, DetachOutcome, Disk, DiskSource, Hypervisor, HypervisorError, MirroredDisk,
    NodeFacts, PausedVm, Presence,
};
use crate::lease::{Lease, NotActive};
use crate::safety::Check;

/// Guards an engine.
pub(crate) fn engine(engine: Arc<dyn Engine>, lease: Lease) -> Arc<dyn Engine> {
    Arc::new(Guarded(engine, lease))
}

/// Guards a hypervisor.
pub(crate) fn hypervisor(hypervisor: Arc<dyn Hypervisor>, lease: Lease) -> Arc<dyn Hypervisor> {
    Arc::new(Guarded(hypervisor, lease))
}

/// The error of an engine's effect that a test requests.
pub(crate) fn requested(why: String) -> EngineError {
    EngineError::Io { what: why, source: std::io::Error::other("requested by a test") }
}

/// An engine or a hypervisor that has effects only during the lease.
struct Guarded<T: ?Sized>(Arc<T>, Lease);

/// Fails without the lease.
fn check(lease: &Lease) -> Result<(), NotActive> {
    if Check::Lease.applies() { lease.check() } else { Ok(()) }
}

impl Guarded<dyn Engine> {
    fn effect<T>(&self, name: &str, work: impl FnOnce() -> engine::Result<T>) -> engine::Result<T> {
        let work = || {
            // After the fail point before: a server that was stopped there must notice.
            check(&self.1)?;
            work()
        };
        fail_point::effect(|| Some(format!("engine.{name}")), requested, work)
    }
}

impl Guarded<dyn Hypervisor> {
    async fn effect<T>(
        &self,
        name: &str,
        work: impl Future<Output = hypervisor::Result<T>>,
    ) -> hypervisor::Result<T> {
        let work = async {
            // After the fail point before: a server that was stopped there must notice.
            check(&self.1)?;
            work.await
        };
        fail_point::effect_async(|| Some(format!("hypervisor.{name}")), HypervisorError::Uncertain, work)
            .await
    }
}

impl Engine for Guarded<dyn Engine> {
    fn claim(&self, pool: &Record) -> engine::Result<()> {
        self.effect("adopt", || self.0.claim(pool))
    }

    fn release(&self) -> engine::Result<()> {
        self.effect("release", || self.0.release())
    }

    fn other_server(&self) -> Option<String> {
        self.0.other_server()
    }

    fn files(&self, object: &Object) -> engine::Result<Files> {
        self.0.files(object)
    }

    fn revisions(&self) -> engine::Result<Revisions> {
        self.0.revisions()
    }

    fn create(&self, cleared: &Clearance, bytes: u64, record: &Record) -> engine::Result<()> {
        self.effect("create", || self.0.create(cleared, bytes, record))
    }

    fn create_from(
        &self,
        cleared: &Clearance,
        from: &DiskSource,
        bytes: u64,
        method: Method,
        record: &Record,
        copying: &CopyProgress,
    ) -> engine::Result<()> {
        copying.under(&self.1);
        self.effect("fill", || self.0.create_from(cleared, from, bytes, method, record, copying))
    }

    fn open_part(&self, cleared: &Clearance, keep: u64, bytes: u64) -> engine::Result<PartFile> {
        self.effect("open_part", || self.0.open_part(cleared, keep, bytes))
    }

    fn complete_part(
        &self,
        cleared: &Clearance,
        part: PartFile,
        bytes: u64,
        record: &Record,
    ) -> engine::Result<()> {
        self.effect("complete_part", || self.0.complete_part(cleared, part, bytes, record))
    }

    fn examine_image(&self, path: &Path) -> engine::Result<ForeignImage> {
        self.0.examine_image(path)
    }

    fn adopt_file(
        &self,
        cleared: &Clearance,
        path: &Path,
        inode: u64,
        record: &Record,
    ) -> engine::Result<()> {
        self.effect("adopt_file", || self.0.adopt_file(cleared, path, inode, record))
    }

    fn create_from_image(
        &self,
        cleared: &Clearance,
        image: &Path,
        inode: u64,
        bytes: u64,
        record: &Record,
        progress: &CopyProgress,
    ) -> engine::Result<()> {
        progress.under(&self.1);
        let create = || self.0.create_from_image(cleared, image, inode, bytes, record, progress);
        self.effect("convert", create)
    }

    fn check_release(&self, object: &Object, path: &Path) -> engine::Result<u64> {
        self.0.check_release(object, path)
    }

    fn release_file(&self, cleared: &Clearance, path: &Path, inode: u64) -> engine::Result<()> {
        self.effect("release_file", || self.0.release_file(cleared, path, inode))
    }

    fn write_record(&self, record: &Record) -> engine::Result<()> {
        check(&self.1)?;
        // The engine has these fail points itself: only it knows whether it writes anything.
        self.0.write_record(record)
    }

    fn remove_incomplete(&self, cleared: &Clearance) -> engine::Result<()> {
        self.effect("discard", || self.0.remove_incomplete(cleared))
    }

    fn read_record(&self, object: &Object) -> engine::Result<Option<Record>> {
        self.0.read_record(object)
    }

    fn expand(&self, id: &VolumeId, bytes: u64) -> engine::Result<()> {
        self.effect("grow", || self.0.expand(id, bytes))
    }

    fn remove(&self, cleared: &Clearance) -> engine::Result<()> {
        self.effect("remove", || self.0.remove(cleared))
    }

    fn inspect(&self) -> engine::Result<PoolFacts> {
        self.0.inspect()
    }

    fn contents(&self, known: &HashSet<Object>) -> engine::Result<Contents> {
        self.0.contents(known)
    }

    fn damaged(&self, expected: &HashMap<Object, Expected>) -> engine::Result<HashMap<Object, String>> {
        self.0.damaged(expected)
    }

    fn verify(&self, object: &Object, expected: Expected) -> engine::Result<()> {
        self.0.verify(object, expected)
    }

    fn accept_file(&self, record: &Record, expected: Expected) -> engine::Result<()> {
        self.effect("accept_file", || self.0.accept_file(record, expected))
    }

    fn generation(&self) -> engine::Result<Option<u64>> {
        self.0.generation()
    }

    fn set_generation(&self, generation: u64) -> engine::Result<()> {
        // No fail point: it is written from time to time, whatever else happens.
        self.1.check()?;
        self.0.set_generation(generation)
    }

    fn expect_generation(&self, generation: u64) {
        self.0.expect_generation(generation);
    }

    fn exists(&self, object: &Object) -> engine::Result<bool> {
        self.0.exists(object)
    }

    fn is_complete(&self, object: &Object, identity: Uuid) -> engine::Result<bool> {
        self.0.is_complete(object, identity)
    }

    fn is_blank(&self, id: &VolumeId) -> engine::Result<bool> {
        self.0.is_blank(id)
    }

    fn allocated(&self, object: &Object) -> engine::Result<u64> {
        self.0.allocated(object)
    }

    fn source(&self, id: &VolumeId) -> DiskSource {
        self.0.source(id)
    }

    fn locate(&self, object: &Object) -> engine::Result<DiskSource> {
        self.0.locate(object)
    }

    fn cut_off(&self, id: &VolumeId) -> engine::Result<Vec<String>> {
        self.effect("cut_off", || self.0.cut_off(id))
    }
}

#[async_trait]
impl Hypervisor for Guarded<dyn Hypervisor> {
    async fn attach(&self, node: Uuid, disk: &Disk) -> hypervisor::Result<AttachedDisk> {
        self.effect("plug", self.0.attach(node, disk)).await
    }

    async fn undefine(&self, node: Uuid, disk: &Disk) -> hypervisor::Result<()> {
        self.effect("undefine", self.0.undefine(node, disk)).await
    }

    async fn detach(&self, node: Uuid, disk: &Disk) -> hypervisor::Result<DetachOutcome> {
        self.effect("unplug", self.0.detach(node, disk)).await
    }

    async fn resize(&self, node: Uuid, disk: &Disk, bytes: u64) -> hypervisor::Result<()> {
        self.effect("resize", self.0.resize(node, disk, bytes)).await
    }

    async fn throttle(&self, node: Uuid, disk: &Disk) -> hypervisor::Result<()> {
        self.effect("throttle", self.0.throttle(node, disk)).await
    }

    async fn paused_vms(&self) -> hypervisor::Result<Vec<PausedVm>> {
        self.0.paused_vms().await
    }

    async fn resume(&self, node: Uuid) -> hypervisor::Result<()> {
        if !Check::Resume.applies() {
            return Ok(());
        }
        self.effect("resume", self.0.resume(node)).await
    }

    async fn pause(&self, node: Uuid) -> hypervisor::Result<()> {
        self.effect("pause", self.0.pause(node)).await
    }

    async fn unpause(&self, node: Uuid) -> hypervisor::Result<()> {
        if !Check::Unpause.applies() {
            return Ok(());
        }
        self.effect("unpause", self.0.unpause(node)).await
    }

    fn can_mirror(&self) -> bool {
        self.0.can_mirror()
    }

    async fn mirrored(&self, node: Uuid, disk: &Disk) -> hypervisor::Result<MirroredDisk> {
        let mut found = self.0.mirrored(node, disk).await?;
        if !Check::OpenFile.applies() {
            found.source = found.source.map(|_| disk.source.location());
        }
        Ok(found)
    }

    async fn start_mirror(
        &self,
        node: Uuid,
        disk: &Disk,
        to: &DiskSource,
        rate: Option<u64>,
    ) -> hypervisor::Result<()> {
        self.effect("mirror", self.0.start_mirror(node, disk, to, rate)).await
    }

    async fn set_mirror_rate(&self, node: Uuid, disk: &Disk, rate: Option<u64>) -> hypervisor::Result<()> {
        check(&self.1)?;
        self.0.set_mirror_rate(node, disk, rate).await
    }

    async fn pivot(&self, node: Uuid, disk: &Disk) -> hypervisor::Result<()> {
        self.effect("pivot", self.0.pivot(node, disk)).await
    }

    async fn cancel_mirror(&self, node: Uuid, disk: &Disk) -> hypervisor::Result<()> {
        self.effect("cancel_mirror", self.0.cancel_mirror(node, disk)).await
    }

    async fn power_off(&self, node: Uuid) -> hypervisor::Result<()> {
        self.effect("power_off", self.0.power_off(node)).await
    }

    fn kind(&self) -> &'static str {
        self.0.kind()
    }

    async fn check(&self) -> hypervisor::Result<()> {
        self.0.check().await
    }

    async fn describe(&self, node: Uuid) -> hypervisor::Result<NodeFacts> {
        self.0.describe(node).await
    }

    async fn find(&self, node: Uuid) -> hypervisor::Result<hypervisor::Power> {
        self.0.find(node).await
    }

    async fn describe_all(&self, nodes: &[Uuid]) -> hypervisor::Result<HashMap<Uuid, NodeFacts>> {
        self.0.describe_all(nodes).await
    }

    async fn attached_disks(&self) -> hypervisor::Result<Vec<AttachedDisk>> {
        self.0.attached_disks().await
    }

    async fn defined_disks(&self) -> hypervisor::Result<Vec<AttachedDisk>> {
        self.0.defined_disks().await
    }

    async fn running(&self) -> hypervisor::Result<HashSet<Uuid>> {
        self.0.running().await
    }

    async fn follow_events(&self, changed: &(dyn Fn(Changed) + Send + Sync)) -> hypervisor::Result<()> {
        self.0.follow_events(changed).await
    }

    async fn presence(&self, node: Uuid, disks: &[Disk]) -> hypervisor::Result<Presence> {
        self.0.presence(node, disks).await
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::engine::FileEngine;
    use crate::hypervisor::simulated::Simulated;
    use crate::lease::clock;

    #[tokio::test]
    async fn nothing_has_an_effect_without_the_lease() {
        let dir = tempfile::tempdir().unwrap();
        let (lease, uuid, id) = (Lease::ended(), Uuid::new_v4(), VolumeId::new("v").unwrap());
        let vms = hypervisor(Arc::new(Simulated::new(dir.path(), Duration::ZERO)), lease.clone());
        let files = engine(Arc::new(FileEngine::new(dir.path(), uuid, dir.path())), lease.clone());
        assert!(matches!(vms.power_off(uuid).await, Err(HypervisorError::NotActive(_))));
        assert!(matches!(files.expand(&id, 4096), Err(EngineError::NotActive(_))));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        lease.extend(clock(), Duration::from_secs(3600));
        vms.power_off(uuid).await.unwrap();
        let expanded = files.expand(&id, 4096);
        assert!(!matches!(expanded, Ok(()) | Err(EngineError::NotActive(_))), "there is no such file");
    }
}
