//! In-memory double of what the handlers need, for their tests.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crds::names::{ClaimName, CsiName, VmName};
use csi::Status;
use csi::capability::Capability;
use csi::request::Size;
use kube_kit::informer::Key;
use tokio::time::Instant;

use super::create::CreatableVolumes;
use super::delete::{DeletableVolumes, NamedVolume};
use super::expand::ExpandableVolumes;
use super::pinned::PinnedVolumes;
use super::publish::AttachableVolumes;
use super::snapshots::{SnapshotSources, SnapshotStore};
use crate::compatibility::{Incompatible, PvRequirements};
use crate::management::ApiError;
use crate::management::claims::ExpandError;
use crate::management::provisioner::{Abandoned, BoundClaim, CreateError, DeleteError, NewClaim};
use crate::management::snapshots::{
    AbandonedSnapshot, DeleteSnapshotError, NewSnapshot, SnapshotError, VolumeSnapshot,
};
use crate::management::volume_entries::{Attach, AttachError, Attached, DetachError};

/// Outcomes of the calls of one operation, in order.
pub(super) struct Outcomes<T> {
    left: Mutex<VecDeque<T>>,
    taken: AtomicUsize,
}

impl<T> Default for Outcomes<T> {
    fn default() -> Self {
        Self::of([])
    }
}

impl<T> Outcomes<T> {
    pub(super) fn of(outcomes: impl IntoIterator<Item = T>) -> Self {
        Self { left: Mutex::new(outcomes.into_iter().collect()), taken: AtomicUsize::new(0) }
    }

    /// Number of calls.
    pub(super) fn taken(&self) -> usize {
        self.taken.load(Ordering::SeqCst)
    }

    /// The outcome of the next call; the test fails if it expects none.
    fn next(&self) -> T {
        self.taken.fetch_add(1, Ordering::SeqCst);
        self.left.lock().expect("no call panicked").pop_front().expect("no call is expected")
    }
}

/// Both clusters: what a test sets is answered, everything else is empty.
pub(super) struct InMemory {
    /// Requirements of the guest's PersistentVolumes.
    pub(super) requirements: Vec<PvRequirements>,
    /// Why the volume has other data than its pin says, before and after a refresh.
    pub(super) replaced: [Option<Incompatible>; 2],
    /// The VMs of each refresh.
    pub(super) refreshed: Mutex<Vec<Vec<VmName>>>,
    /// The guest's PersistentVolumes of the handle.
    pub(super) named: Vec<NamedVolume>,
    pub(super) deletions: Outcomes<Result<(), DeleteError>>,
    pub(super) expansions: Outcomes<Result<u64, ExpandError>>,
    pub(super) attaches: Outcomes<Result<Attached, AttachError>>,
    pub(super) detaches: Outcomes<Result<(), DetachError>>,
    /// The VMs that use the volume.
    pub(super) using: Vec<VmName>,
    /// Whether another driver name attached the disk.
    pub(super) attached_elsewhere: Result<bool, String>,
    /// ID of the boot of the Node.
    pub(super) boot: Result<Option<String>, String>,
    /// StorageClass of the guest claim.
    pub(super) class: Option<String>,
    /// Reclaim policies of the StorageClasses of guest and management cluster.
    pub(super) policies: Option<(String, String)>,
    /// Whether the guest claim exists.
    pub(super) has_claim: Result<bool, String>,
    pub(super) created: Mutex<Vec<NewClaim>>,
    pub(super) creations: Outcomes<Result<BoundClaim, CreateError>>,
    pub(super) abandons: Outcomes<Result<Abandoned, DeleteError>>,
    /// Whether the VolumeSnapshotContent is gone.
    pub(super) is_content_gone: bool,
    /// Whether the snapshot exists.
    pub(super) has_snapshot: bool,
    pub(super) snapshot_creations: Outcomes<Result<Arc<VolumeSnapshot>, SnapshotError>>,
    pub(super) snapshot_abandons: Outcomes<Result<AbandonedSnapshot, DeleteSnapshotError>>,
    pub(super) snapshot_deletions: Outcomes<Result<(), DeleteSnapshotError>>,
}

impl Default for InMemory {
    fn default() -> Self {
        Self {
            requirements: Vec::new(),
            replaced: [None, None],
            refreshed: Mutex::default(),
            named: Vec::new(),
            deletions: Outcomes::default(),
            expansions: Outcomes::default(),
            attaches: Outcomes::default(),
            detaches: Outcomes::default(),
            using: Vec::new(),
            attached_elsewhere: Ok(false),
            boot: Ok(None),
            class: Some(String::new()),
            policies: None,
            has_claim: Ok(true),
            created: Mutex::default(),
            creations: Outcomes::default(),
            abandons: Outcomes::default(),
            is_content_gone: false,
            has_snapshot: false,
            snapshot_creations: Outcomes::default(),
            snapshot_abandons: Outcomes::default(),
            snapshot_deletions: Outcomes::default(),
        }
    }
}

impl InMemory {
    /// The VMs of each refresh.
    pub(super) fn refreshed(&self) -> Vec<Vec<VmName>> {
        self.refreshed.lock().expect("no call panicked").clone()
    }
}

impl PinnedVolumes for InMemory {
    fn requirements_of(&self, _: &ClaimName) -> Vec<PvRequirements> {
        self.requirements.clone()
    }

    fn check_cached_pins(&self, _: &ClaimName, _: &[PvRequirements]) -> Result<(), Incompatible> {
        let is_current = !self.refreshed().is_empty();
        self.replaced[usize::from(is_current)].clone().map_or(Ok(()), Err)
    }

    async fn refresh(&self, _: &ClaimName, vms: &[&VmName], _: Instant) -> Result<(), ApiError> {
        self.refreshed.lock().expect("no call panicked").push(vms.iter().copied().cloned().collect());
        Ok(())
    }
}

impl CreatableVolumes for InMemory {
    fn supports(&self, _: &[Capability]) -> Result<(), Status> {
        Ok(())
    }

    async fn class_of(&self, _: &Key, _: &CsiName, _: Instant) -> Option<String> {
        self.class.clone()
    }

    async fn has_claim_for(&self, _: &Key, _: &CsiName) -> Result<bool, String> {
        self.has_claim.clone()
    }

    async fn reclaim_policies(&self, _: &str, _: &str, _: Instant) -> Option<(String, String)> {
        self.policies.clone()
    }

    fn on_policy_mismatch(&self, _: &Key, text: String) -> Result<(), Status> {
        Err(Status::failed_precondition(text))
    }

    async fn create_claim(
        &self,
        claim: &NewClaim,
        _: Instant,
        _: Instant,
    ) -> Result<BoundClaim, CreateError> {
        self.created.lock().expect("no call panicked").push(claim.clone());
        self.creations.next()
    }

    async fn abandon_claim(&self, _: &CsiName, _: Instant) -> Result<Abandoned, DeleteError> {
        self.abandons.next()
    }
}

impl DeletableVolumes for InMemory {
    fn named_volumes(&self, _: &ClaimName) -> Vec<NamedVolume> {
        self.named.clone()
    }

    async fn delete_claim(&self, _: &ClaimName, _: &[PvRequirements], _: Instant) -> Result<(), DeleteError> {
        self.deletions.next()
    }
}

impl ExpandableVolumes for InMemory {
    async fn expand_claim(&self, _: &ClaimName, _: Size, _: Instant) -> Result<u64, ExpandError> {
        self.expansions.next()
    }
}

impl AttachableVolumes for InMemory {
    fn supports(&self, _: &Capability) -> Result<(), Status> {
        Ok(())
    }

    async fn attach(&self, _: &Attach, _: Instant) -> Result<Attached, AttachError> {
        self.attaches.next()
    }

    fn vms_using(&self, _: &ClaimName) -> Vec<VmName> {
        self.using.clone()
    }

    async fn boot_of(&self, _: &ClaimName, _: &VmName) -> Result<Option<String>, String> {
        self.boot.clone()
    }

    async fn is_attached_under_another_name(&self, _: &ClaimName, _: &VmName) -> Result<bool, String> {
        self.attached_elsewhere.clone()
    }

    async fn detach(&self, _: &ClaimName, _: &VmName, _: Instant) -> Result<(), DetachError> {
        self.detaches.next()
    }
}

impl SnapshotSources for InMemory {
    async fn has_live_content(&self, _: &str) -> bool {
        !self.is_content_gone
    }
}

impl SnapshotStore for InMemory {
    fn exists(&self, _: &CsiName) -> bool {
        self.has_snapshot
    }

    async fn create(
        &self,
        _: &NewSnapshot,
        _: Instant,
        _: Instant,
    ) -> Result<Arc<VolumeSnapshot>, SnapshotError> {
        self.snapshot_creations.next()
    }

    async fn abandon(&self, _: &CsiName, _: Instant) -> Result<AbandonedSnapshot, DeleteSnapshotError> {
        self.snapshot_abandons.next()
    }

    async fn delete(&self, _: &str, _: Instant) -> Result<(), DeleteSnapshotError> {
        self.snapshot_deletions.next()
    }
}

/// The error of a claim that has other data than the guest's PersistentVolume is pinned to.
pub(super) fn replaced() -> Incompatible {
    let text = |text: &str| text.to_owned();
    Incompatible::Replaced { volume: text("pv"), pinned: text("old"), claim: text("c"), bound: text("new") }
}

/// A deadline that does not pass.
pub(super) fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(60)
}
