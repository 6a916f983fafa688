//! Snapshots taken, and waited for until a volume can be made from them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crds::names;
use kube::api::{ApiResource, PostParams};
use kube_kit::informer::Key;
use tokio::time::Instant;

use super::{
    GROUP_VERSION, SnapshotSource, SnapshotSpec, Snapshots, VolumeSnapshot, is_cut, is_ready, source_claim,
};
use crate::management::claims::is_bound;
use crate::management::{ApiError, Management};

/// How long a failure may take to heal before it is reported: the cluster's snapshot-controller writes one for each race
/// for an object that it lost, and tries again a second later.
const TRANSIENT_ERROR_WINDOW: Duration = Duration::from_secs(3);

/// A snapshot to take.
#[derive(Debug, Clone)]
pub struct NewSnapshot {
    /// The name that the caller gave it.
    pub csi_name: String,
    /// The management claim to take it of.
    pub claim: String,
    /// Management VolumeSnapshotClass.
    pub class: String,
    /// Whom it is for, as annotations.
    pub annotations: BTreeMap<String, String>,
}

/// Why there is no snapshot, or none that is cut.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The management cluster has no snapshots at all.
    #[error(
        "the management cluster does not serve {GROUP_VERSION}: its platform team must install the CustomResourceDefinitions and the controller of external-snapshotter, and start gc-csi's controller again"
    )]
    NotServed,
    /// There is no such volume.
    #[error("there is no volume {0} of this guest to take a snapshot of")]
    NoClaim(String),
    /// The volume is not there yet.
    #[error("management PersistentVolumeClaim {0} is not bound yet: no snapshot can be taken of it")]
    NotBound(String),
    /// The management class is unknown.
    #[error(
        "VolumeSnapshotClass {0:?} does not exist in the management cluster: correct the parameter {parameter} of the guest's VolumeSnapshotClass, or ask the platform team for that class",
        parameter = names::PARAMETER_MANAGEMENT_SNAPSHOT_CLASS
    )]
    NoClass(String),
    /// The name is taken by a snapshot that differs.
    #[error("snapshot {csi_name:?} exists as management VolumeSnapshot {snapshot}, but {difference}")]
    Differs {
        /// The caller's name.
        csi_name: String,
        /// The management snapshot.
        snapshot: String,
        /// What differs.
        difference: String,
    },
    /// The management tier reports a failure; it goes on trying.
    #[error("management VolumeSnapshot {snapshot} is not ready yet: {message}")]
    Failing {
        /// The management snapshot.
        snapshot: String,
        /// The tier's own words.
        message: String,
    },
    /// The snapshot is being deleted.
    #[error("management VolumeSnapshot {0} of this name is being deleted: wait until it is gone")]
    Deleting(String),
    /// Time ran out; the work goes on.
    #[error("management VolumeSnapshot {0} was not ready in time: it is still being taken")]
    Deadline(String),
    /// The request failed.
    #[error("cannot create management VolumeSnapshot {snapshot}: {source}")]
    Api {
        /// The management snapshot.
        snapshot: String,
        /// What the API said.
        source: ApiError,
    },
}

impl Management {
    /// Whether the snapshot of this CSI name was begun, as far as is seen.
    pub fn snapshot_exists(&self, csi_name: &str) -> bool {
        let key = self.key(&names::management_snapshot(self.identity.cluster.as_str(), csi_name));
        self.snapshots.as_ref().is_some_and(|snapshots| snapshots.informer.get(&key).is_some())
    }

    /// Takes the snapshot unless it is there, and waits until a volume can be made from it; one that is cut by
    /// the deadline but still being worked on is answered as it is. A class that is not seen by `cache_deadline` is
    /// called missing.
    pub async fn create_snapshot(
        &self,
        request: &NewSnapshot,
        cache_deadline: Instant,
        deadline: Instant,
    ) -> Result<Arc<VolumeSnapshot>, SnapshotError> {
        let snapshots = self.snapshots.as_ref().ok_or(SnapshotError::NotServed)?;
        let name = names::management_snapshot(self.identity.cluster.as_str(), &request.csi_name);
        let key = self.key(&name);
        if snapshots.informer.get(&key).is_none() {
            let (claim, _) = self
                .usable_claim(&request.claim)
                .ok_or_else(|| SnapshotError::NoClaim(request.claim.clone()))?;
            if !is_bound(&claim) {
                return Err(SnapshotError::NotBound(request.claim.clone()));
            }
            let class = Key::cluster(&request.class);
            if snapshots.classes.wait_for(&class, cache_deadline, |class| class.map(|_| ())).await.is_none() {
                return Err(SnapshotError::NoClass(request.class.clone()));
            }
            let snapshot = self.new_snapshot(&snapshots.resource, &name, request).await;
            match snapshots.api.create(&PostParams::default(), &snapshot).await.map_err(ApiError::from) {
                // An earlier call made it; the informer will show it, and it is compared then.
                Ok(_) | Err(ApiError::Exists(_)) => {}
                Err(source) => return Err(SnapshotError::Api { snapshot: name, source }),
            }
        }
        self.wait_ready(snapshots, &name, request, deadline).await
    }

    async fn wait_ready(
        &self,
        snapshots: &Snapshots,
        name: &str,
        request: &NewSnapshot,
        deadline: Instant,
    ) -> Result<Arc<VolumeSnapshot>, SnapshotError> {
        let key = self.key(name);
        let final_outcome = |found: &Arc<VolumeSnapshot>| {
            if let Err(difference) = self.check_same_snapshot(found, request) {
                let (csi_name, snapshot) = (request.csi_name.clone(), name.to_owned());
                return Some(Err(SnapshotError::Differs { csi_name, snapshot, difference }));
            }
            if found.metadata.deletion_timestamp.is_some() {
                return Some(Err(SnapshotError::Deleting(name.to_owned())));
            }
            is_ready(found).then(|| Ok(found.clone()))
        };
        loop {
            let seen = snapshots.informer.wait_for(&key, deadline, |found| {
                let found = found?;
                final_outcome(found).map(Some).or_else(|| failure(found).map(|_| None))
            });
            match seen.await {
                Some(Some(outcome)) => return outcome,
                Some(None) => {}
                None => break,
            }
            let recovered = snapshots.informer.wait_for(
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
        let found = snapshots.informer.get(&key);
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

    async fn new_snapshot(
        &self,
        resource: &ApiResource,
        name: &str,
        request: &NewSnapshot,
    ) -> VolumeSnapshot {
        let spec = SnapshotSpec {
            source: SnapshotSource { persistent_volume_claim_name: Some(request.claim.clone()) },
            volume_snapshot_class_name: Some(request.class.clone()),
        };
        let mut snapshot = VolumeSnapshot::new(name, resource, spec);
        snapshot.metadata = self.new_metadata(name, request.annotations.clone()).await;
        snapshot
    }

    /// Whether a snapshot that is there is the one that is wanted; if not, what differs.
    fn check_same_snapshot(&self, found: &VolumeSnapshot, request: &NewSnapshot) -> Result<(), String> {
        if !self.owns_snapshot(found) {
            return Err("it is not labelled as this guest's".to_owned());
        }
        let claim = source_claim(found);
        if claim != request.claim {
            return Err(format!("it is of volume {claim:?}, not {:?}", request.claim));
        }
        let class = found.spec.volume_snapshot_class_name.as_deref().unwrap_or_default();
        if class != request.class {
            return Err(format!("it is of VolumeSnapshotClass {class:?}, not {:?}", request.class));
        }
        Ok(())
    }
}

/// The failure that its cluster reports of a snapshot, in that cluster's words.
fn failure(snapshot: &VolumeSnapshot) -> Option<&str> {
    let failure = snapshot.status.as_ref()?.error.as_ref()?;
    Some(failure.message.as_deref().unwrap_or("no message"))
}
