//! Creation of management snapshots, and the wait until they are ready to use.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crds::names::{self, ClaimName, CsiName};
use kube::api::PostParams;
use kube_kit::informer::Key;
use process_kit::operation;
use tokio::time::Instant;

use super::{
    GROUP_VERSION, SnapshotSource, SnapshotSpec, Snapshots, VolumeSnapshot, is_cut, is_ready, source_claim,
};
use crate::management::claims::is_bound;
use crate::management::error::ApiError;
use crate::management::identity::Relation;

/// How long an error may last before it is reported: the snapshot-controller writes one after each conflict and retries
/// a second later.
const TRANSIENT_ERROR_WINDOW: Duration = Duration::from_secs(3);

/// A snapshot to create.
#[derive(Debug, Clone)]
pub struct NewSnapshot {
    /// CSI name of the snapshot.
    pub csi_name: CsiName,
    /// Name of the management claim.
    pub claim: ClaimName,
    /// Management VolumeSnapshotClass.
    pub class: String,
    /// Annotations that name the guest objects.
    pub annotations: BTreeMap<String, String>,
}

/// Why a snapshot was not created or is not cut.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The management cluster does not serve snapshots.
    #[error(
        "the management cluster does not serve {GROUP_VERSION}: ask the platform team to install the CustomResourceDefinitions and the snapshot-controller of external-snapshotter, and then restart gc-csi's controller"
    )]
    NotServed,
    /// The volume does not exist for this guest.
    #[error("there is no volume {0} of this guest to take a snapshot of")]
    NoClaim(ClaimName),
    /// The claim is not bound.
    #[error("management PersistentVolumeClaim {0} is not bound yet: no snapshot can be taken of it")]
    NotBound(ClaimName),
    /// The management class does not exist.
    #[error(
        "VolumeSnapshotClass {0:?} does not exist in the management cluster: correct the parameter {parameter} of the guest's VolumeSnapshotClass, or ask the platform team for that class",
        parameter = names::PARAMETER_MANAGEMENT_SNAPSHOT_CLASS
    )]
    NoClass(String),
    /// A snapshot of this name exists with other properties.
    #[error("snapshot {csi_name:?} exists as management VolumeSnapshot {snapshot}, but {difference}")]
    Differs {
        /// CSI name of the snapshot.
        csi_name: CsiName,
        /// Name of the management snapshot.
        snapshot: String,
        /// The difference.
        difference: String,
    },
    /// The management cluster reports an error and retries.
    #[error("management VolumeSnapshot {snapshot} is not ready yet: {message}")]
    Failing {
        /// Name of the management snapshot.
        snapshot: String,
        /// The reported error.
        message: String,
    },
    /// The snapshot is being deleted.
    #[error("management VolumeSnapshot {0} is being deleted: wait until it is gone")]
    Deleting(String),
    /// The deadline passed; the snapshot is still being created.
    #[error("timed out waiting until management VolumeSnapshot {0} is ready: its creation continues")]
    Deadline(String),
    /// The API request failed.
    #[error("failed to create management VolumeSnapshot {snapshot}: {source}")]
    Api {
        /// Name of the management snapshot.
        snapshot: String,
        /// Error of the API request.
        source: ApiError,
    },
}

impl Snapshots {
    /// Whether the cache shows the snapshot with this CSI name.
    pub(crate) fn exists(&self, csi_name: &CsiName) -> bool {
        self.get(&self.identity.snapshot_of(csi_name)).is_some()
    }

    /// Creates the snapshot unless it exists, and waits until it is ready to use. At the deadline, a snapshot that is
    /// cut is returned although it is not ready. A class that the cache does not show by `cache_deadline` counts as
    /// missing.
    pub(crate) async fn create(
        &self,
        request: &NewSnapshot,
        cache_deadline: Instant,
        deadline: Instant,
    ) -> Result<Arc<VolumeSnapshot>, SnapshotError> {
        let name = self.identity.snapshot_of(&request.csi_name);
        if self.get(&name).is_none() {
            let usable = self.claims.usable(&request.claim);
            let (claim, _) = usable.ok_or_else(|| SnapshotError::NoClaim(request.claim.clone()))?;
            if !is_bound(&claim) {
                return Err(SnapshotError::NotBound(request.claim.clone()));
            }
            let class = Key::cluster(&request.class);
            if self.classes.wait_for(&class, cache_deadline, |class| class.map(|_| ())).await.is_none() {
                return Err(SnapshotError::NoClass(request.class.clone()));
            }
            let snapshot = self.new_snapshot(&name, request).await;
            match self.api.create(&PostParams::default(), &snapshot).await.map_err(ApiError::from) {
                // If an earlier call created it, it is compared with the request when the informer shows it.
                Ok(_) | Err(ApiError::Exists(_)) => {}
                Err(source) => return Err(SnapshotError::Api { snapshot: name, source }),
            }
        }
        self.wait_ready(&name, request, deadline).await
    }

    async fn wait_ready(
        &self,
        name: &str,
        request: &NewSnapshot,
        deadline: Instant,
    ) -> Result<Arc<VolumeSnapshot>, SnapshotError> {
        let key = self.identity.key(name);
        let final_outcome = |found: &Arc<VolumeSnapshot>| {
            if let Err(difference) = self.check_same(found, request) {
                let (csi_name, snapshot) = (request.csi_name.clone(), name.to_owned());
                return Some(Err(SnapshotError::Differs { csi_name, snapshot, difference }));
            }
            if found.metadata.deletion_timestamp.is_some() {
                return Some(Err(SnapshotError::Deleting(name.to_owned())));
            }
            is_ready(found).then(|| Ok(found.clone()))
        };
        loop {
            let cached = self.informer.wait_for(&key, deadline, |found| {
                let found = found?;
                final_outcome(found).map(Some).or_else(|| failure(found).map(|_| None))
            });
            match cached.await {
                Some(Some(outcome)) => return outcome,
                Some(None) => {}
                None => break,
            }
            let recovered = self.informer.wait_for(
                &key,
                deadline.min(Instant::now() + TRANSIENT_ERROR_WINDOW),
                |found| {
                    let found = found?;
                    final_outcome(found).map(Some).or_else(|| failure(found).is_none().then_some(None))
                },
            );
            match recovered.await {
                Some(Some(outcome)) => return outcome,
                Some(None) => {}
                None => break,
            }
        }
        let found = self.informer.get(&key);
        if let Some(found) = found.as_ref().filter(|found| is_cut(found)) {
            return Ok(found.clone());
        }
        match found.as_deref().and_then(failure) {
            Some(failure) => {
                Err(SnapshotError::Failing { snapshot: name.to_owned(), message: failure.to_owned() })
            }
            None => Err(SnapshotError::Deadline(name.to_owned())),
        }
    }

    async fn new_snapshot(&self, name: &str, request: &NewSnapshot) -> VolumeSnapshot {
        let spec = SnapshotSpec {
            source: SnapshotSource { persistent_volume_claim_name: Some(request.claim.to_string()) },
            volume_snapshot_class_name: Some(request.class.clone()),
        };
        let mut annotations = request.annotations.clone();
        if let Some(context) = operation::trace_parent() {
            annotations.insert(names::ANNOTATION_TRACEPARENT.to_owned(), context.to_string());
        }
        let mut snapshot = VolumeSnapshot::new(name, &self.resource, spec);
        snapshot.metadata = self.owner.new_metadata(name, annotations).await;
        snapshot
    }

    /// Compares an existing snapshot with the request; the error names the difference.
    fn check_same(&self, found: &VolumeSnapshot, request: &NewSnapshot) -> Result<(), String> {
        if self.relation(found) != Some(Relation::Own) {
            return Err("it does not have this guest's label".to_owned());
        }
        let claim = source_claim(found);
        if claim != request.claim.as_str() {
            return Err(format!("its source is volume {claim:?}, not {:?}", request.claim.as_str()));
        }
        let class = found.spec.volume_snapshot_class_name.as_deref().unwrap_or_default();
        if class != request.class {
            return Err(format!("its VolumeSnapshotClass is {class:?}, not {:?}", request.class));
        }
        Ok(())
    }
}

/// The error in the snapshot's status.
fn failure(snapshot: &VolumeSnapshot) -> Option<&str> {
    let failure = snapshot.status.as_ref()?.error.as_ref()?;
    Some(failure.message.as_deref().unwrap_or("no message"))
}
