//! Deletion of management snapshots, and the wait until they are gone.

use crds::names;
use kube::api::{DeleteParams, Preconditions};
use tokio::time::Instant;

use super::{VolumeSnapshot, is_cut};
use crate::management::sharing::Relation;
use crate::management::{ApiError, Management, blocking_finalizers, is_object_name};

/// Why a snapshot was not deleted.
#[derive(Debug, thiserror::Error)]
pub enum DeleteSnapshotError {
    /// The snapshot is only shared with this guest.
    #[error(
        "management VolumeSnapshot {0} is shared with this guest, not its own: set the deletionPolicy of the guest's VolumeSnapshotContent to Retain"
    )]
    Shared(String),
    /// The deadline passed; the deletion continues.
    #[error("timed out waiting until management VolumeSnapshot {snapshot} is deleted{detail}")]
    Deadline {
        /// Name of the management snapshot.
        snapshot: String,
        /// The finalizers that block the deletion, if known.
        detail: String,
    },
    /// The API request failed.
    #[error("failed to delete management VolumeSnapshot {snapshot}: {source}")]
    Api {
        /// Name of the management snapshot.
        snapshot: String,
        /// Error of the API request.
        source: ApiError,
    },
}

/// Result of deleting an abandoned snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AbandonedSnapshot {
    /// The snapshot does not exist.
    Gone,
    /// The snapshot is cut and has a handle, so csi-snapshotter can delete it; it was not deleted.
    Cut,
}

impl Management {
    /// Deletes a snapshot that was never returned to the caller, unless it is cut, and waits until it is gone.
    pub async fn abandon_snapshot(
        &self,
        csi_name: &str,
        deadline: Instant,
    ) -> Result<AbandonedSnapshot, DeleteSnapshotError> {
        let name = names::management_snapshot(self.identity.cluster.as_str(), csi_name);
        // The call is not repeated, so a snapshot that the cache does not show yet would stay: read it from the API
        // server.
        match self.read_snapshot(&name).await?.filter(|one| self.owns_snapshot(one)) {
            Some(found) if is_cut(&found) && found.metadata.deletion_timestamp.is_none() => {
                Ok(AbandonedSnapshot::Cut)
            }
            Some(found) => {
                // With the resourceVersion: a snapshot that was cut in between is not deleted.
                let version = found.metadata.resource_version.clone();
                self.delete_observed_snapshot(&name, &found, version, deadline).await?;
                Ok(AbandonedSnapshot::Gone)
            }
            None => Ok(AbandonedSnapshot::Gone),
        }
    }

    /// Deletes the guest's snapshot and waits until it is gone. Does nothing if the snapshot does not exist for this
    /// guest.
    pub async fn delete_snapshot(&self, name: &str, deadline: Instant) -> Result<(), DeleteSnapshotError> {
        let Some(snapshots) = &self.snapshots else { return Ok(()) };
        let found = match snapshots.informer.get(&self.key(name)) {
            Some(found) => found,
            // Another replica may have just created it, and the deletion is not repeated after success: wait for it.
            None if self.read_snapshot(name).await?.is_some_and(|live| self.may_read(&live)) => {
                self.wait_for_snapshot(name, deadline).await.ok_or_else(|| DeleteSnapshotError::Deadline {
                    snapshot: name.to_owned(),
                    detail: ": the watch of the management cluster does not show it yet".to_owned(),
                })?
            }
            None => return Ok(()),
        };
        match self.relation_of(found.metadata.labels.as_ref()) {
            Some(Relation::Own) => self.delete_observed_snapshot(name, &found, None, deadline).await,
            Some(Relation::Shared { .. }) => Err(DeleteSnapshotError::Shared(name.to_owned())),
            None => {
                tracing::warn!(snapshot = name, "refused to delete a snapshot that is not this guest's");
                Ok(())
            }
        }
    }

    /// Deletes the snapshot with its UID and this resourceVersion, and waits until it is gone.
    async fn delete_observed_snapshot(
        &self,
        name: &str,
        found: &VolumeSnapshot,
        resource_version: Option<String>,
        deadline: Instant,
    ) -> Result<(), DeleteSnapshotError> {
        let Some(snapshots) = &self.snapshots else { return Ok(()) };
        let uid = found.metadata.uid.clone();
        if found.metadata.deletion_timestamp.is_none() {
            let parameters = DeleteParams {
                preconditions: Some(Preconditions { uid: uid.clone(), resource_version }),
                ..Default::default()
            };
            match snapshots.api.delete(name, &parameters).await.map_err(ApiError::from) {
                Ok(_) | Err(ApiError::NotFound(_)) => {}
                Err(source) => return Err(DeleteSnapshotError::Api { snapshot: name.to_owned(), source }),
            }
        }
        let gone = snapshots
            .informer
            .wait_for(&self.key(name), deadline, |now| {
                now.is_none_or(|now| now.metadata.uid != uid).then_some(())
            })
            .await;
        gone.ok_or_else(|| {
            let cached = snapshots.informer.get(&self.key(name));
            let detail = blocking_finalizers(cached.as_deref().map(|cached| &cached.metadata));
            DeleteSnapshotError::Deadline { snapshot: name.to_owned(), detail }
        })
    }

    /// The snapshot as the API server returns it now; None if it does not exist.
    async fn read_snapshot(&self, name: &str) -> Result<Option<VolumeSnapshot>, DeleteSnapshotError> {
        // The guest chooses this name, and it becomes part of a URL: no object can have an invalid name.
        let Some(snapshots) = self.snapshots.as_ref().filter(|_| is_object_name(name)) else {
            return Ok(None);
        };
        let answer = snapshots.api.get_opt(name).await;
        answer.map_err(|error| DeleteSnapshotError::Api { snapshot: name.to_owned(), source: error.into() })
    }
}
