//! Fail points around every effect of an engine or a hypervisor, where a test can make the server crash (see crate
//! `fail_point`). Names: `engine.<effect>` and `hypervisor.<effect>`, with the suffix `.before` or `.after`.

use std::sync::Arc;

use crate::engine::Engine;
use crate::hypervisor::Hypervisor;

/// Wraps an engine with fail points.
#[cfg(debug_assertions)]
pub(crate) fn engine(engine: Arc<dyn Engine>) -> Arc<dyn Engine> {
    Arc::new(debug::WithFailPoints(engine))
}

/// Release builds have no fail points.
#[cfg(not(debug_assertions))]
pub(crate) fn engine(engine: Arc<dyn Engine>) -> Arc<dyn Engine> {
    engine
}

/// Wraps a hypervisor with fail points.
#[cfg(debug_assertions)]
pub(crate) fn hypervisor(hypervisor: Arc<dyn Hypervisor>) -> Arc<dyn Hypervisor> {
    Arc::new(debug::WithFailPoints(hypervisor))
}

/// Release builds have no fail points.
#[cfg(not(debug_assertions))]
pub(crate) fn hypervisor(hypervisor: Arc<dyn Hypervisor>) -> Arc<dyn Hypervisor> {
    hypervisor
}

#[cfg(debug_assertions)]
mod debug {
    use std::collections::{HashMap, HashSet};
    use std::path::Path;
    use std::sync::Arc;

    use async_trait::async_trait;
    use fail_point::{around, around_async};
    use infra_api::VolumeId;
    use uuid::Uuid;

    use crate::engine::{
        self, Clearance, Contents, CopyProgress, Engine, Files, Method, Object, PartFile, PoolFacts, Record,
        Revisions,
    };
    use crate::hypervisor::{
        self, AttachedDisk, DetachOutcome, Disk, DiskSource, Hypervisor, MirroredDisk, NodeFacts, PausedVm,
        Presence,
    };

    /// An engine or a hypervisor with fail points.
    pub(super) struct WithFailPoints<T: ?Sized>(pub(super) Arc<T>);

    fn engine_effect<T>(name: &str, work: impl FnOnce() -> T) -> T {
        around(|| Some(format!("engine.{name}")), work)
    }

    async fn hypervisor_effect<F: Future>(name: &str, work: F) -> F::Output {
        around_async(|| Some(format!("hypervisor.{name}")), work).await
    }

    impl Engine for WithFailPoints<dyn Engine> {
        fn claim(&self, pool: &Record) -> engine::Result<()> {
            engine_effect("adopt", || self.0.claim(pool))
        }

        fn release(&self) -> engine::Result<()> {
            engine_effect("release", || self.0.release())
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
            engine_effect("create", || self.0.create(cleared, bytes, record))
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
            engine_effect("fill", || self.0.create_from(cleared, from, bytes, method, record, copying))
        }

        fn open_part(&self, cleared: &Clearance, keep: u64, bytes: u64) -> engine::Result<PartFile> {
            engine_effect("open_part", || self.0.open_part(cleared, keep, bytes))
        }

        fn complete_part(
            &self,
            cleared: &Clearance,
            part: PartFile,
            bytes: u64,
            record: &Record,
        ) -> engine::Result<()> {
            engine_effect("complete_part", || self.0.complete_part(cleared, part, bytes, record))
        }

        fn adopt_file(
            &self,
            cleared: &Clearance,
            path: &Path,
            inode: u64,
            record: &Record,
        ) -> engine::Result<()> {
            engine_effect("adopt_file", || self.0.adopt_file(cleared, path, inode, record))
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
            let create = || self.0.create_from_image(cleared, image, inode, bytes, record, progress);
            engine_effect("convert", create)
        }

        fn check_release(&self, object: &Object, path: &Path) -> engine::Result<u64> {
            self.0.check_release(object, path)
        }

        fn release_file(&self, cleared: &Clearance, path: &Path, inode: u64) -> engine::Result<()> {
            engine_effect("release_file", || self.0.release_file(cleared, path, inode))
        }

        fn write_record(&self, record: &Record) -> engine::Result<()> {
            // The engine has these fail points itself: only it knows whether it writes anything.
            self.0.write_record(record)
        }

        fn remove_incomplete(&self, cleared: &Clearance) -> engine::Result<()> {
            engine_effect("discard", || self.0.remove_incomplete(cleared))
        }

        fn read_record(&self, object: &Object) -> engine::Result<Option<Record>> {
            self.0.read_record(object)
        }

        fn expand(&self, id: &VolumeId, bytes: u64) -> engine::Result<()> {
            engine_effect("grow", || self.0.expand(id, bytes))
        }

        fn remove(&self, cleared: &Clearance) -> engine::Result<()> {
            engine_effect("remove", || self.0.remove(cleared))
        }

        fn inspect(&self) -> engine::Result<PoolFacts> {
            self.0.inspect()
        }

        fn contents(&self, known: &HashSet<Object>) -> engine::Result<Contents> {
            self.0.contents(known)
        }

        fn missing(&self, expected: HashSet<Object>) -> engine::Result<HashSet<Object>> {
            self.0.missing(expected)
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
            engine_effect("cut_off", || self.0.cut_off(id))
        }
    }

    #[async_trait]
    impl Hypervisor for WithFailPoints<dyn Hypervisor> {
        async fn attach(&self, node: Uuid, disk: &Disk) -> hypervisor::Result<()> {
            hypervisor_effect("plug", self.0.attach(node, disk)).await
        }

        async fn detach(&self, node: Uuid, disk: &Disk) -> hypervisor::Result<DetachOutcome> {
            hypervisor_effect("unplug", self.0.detach(node, disk)).await
        }

        async fn resize(&self, node: Uuid, disk: &Disk, bytes: u64) -> hypervisor::Result<()> {
            hypervisor_effect("resize", self.0.resize(node, disk, bytes)).await
        }

        async fn throttle(&self, node: Uuid, disk: &Disk) -> hypervisor::Result<()> {
            hypervisor_effect("throttle", self.0.throttle(node, disk)).await
        }

        async fn paused_vms(&self) -> hypervisor::Result<Vec<PausedVm>> {
            self.0.paused_vms().await
        }

        async fn resume(&self, node: Uuid) -> hypervisor::Result<()> {
            hypervisor_effect("resume", self.0.resume(node)).await
        }

        async fn pause(&self, node: Uuid) -> hypervisor::Result<()> {
            hypervisor_effect("pause", self.0.pause(node)).await
        }

        async fn unpause(&self, node: Uuid) -> hypervisor::Result<()> {
            hypervisor_effect("unpause", self.0.unpause(node)).await
        }

        fn can_mirror(&self) -> bool {
            self.0.can_mirror()
        }

        async fn mirrored(&self, node: Uuid, disk: &Disk) -> hypervisor::Result<MirroredDisk> {
            self.0.mirrored(node, disk).await
        }

        async fn start_mirror(
            &self,
            node: Uuid,
            disk: &Disk,
            to: &DiskSource,
            rate: Option<u64>,
        ) -> hypervisor::Result<()> {
            hypervisor_effect("mirror", self.0.start_mirror(node, disk, to, rate)).await
        }

        async fn set_mirror_rate(
            &self,
            node: Uuid,
            disk: &Disk,
            rate: Option<u64>,
        ) -> hypervisor::Result<()> {
            self.0.set_mirror_rate(node, disk, rate).await
        }

        async fn pivot(&self, node: Uuid, disk: &Disk) -> hypervisor::Result<()> {
            hypervisor_effect("pivot", self.0.pivot(node, disk)).await
        }

        async fn cancel_mirror(&self, node: Uuid, disk: &Disk) -> hypervisor::Result<()> {
            hypervisor_effect("cancel_mirror", self.0.cancel_mirror(node, disk)).await
        }

        async fn power_off(&self, node: Uuid) -> hypervisor::Result<()> {
            hypervisor_effect("power_off", self.0.power_off(node)).await
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

        async fn running(&self) -> hypervisor::Result<HashSet<Uuid>> {
            self.0.running().await
        }

        async fn follow_events(&self, changed: &(dyn Fn() + Send + Sync)) -> hypervisor::Result<()> {
            self.0.follow_events(changed).await
        }

        async fn presence(&self, node: Uuid, disks: &[Disk]) -> hypervisor::Result<Presence> {
            self.0.presence(node, disks).await
        }
    }
}
