//! Deletion of management snapshots, and the wait until they are gone.

use crds::names::CsiName;
use kube::api::{DeleteParams, Preconditions};
use tokio::time::Instant;

use super::{Snapshots, VolumeSnapshot, is_cut};
use crate::management::error::ApiError;
use crate::management::identity::Relation;
use crate::management::objects::{blocking_finalizers, is_object_name};
use crate::management::traces;

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

impl Snapshots {
    /// Deletes a snapshot that was never returned to the caller, unless it is cut, and waits until it is gone.
    pub(crate) async fn abandon(
        &self,
        csi_name: &CsiName,
        deadline: Instant,
    ) -> Result<AbandonedSnapshot, DeleteSnapshotError> {
        let name = self.identity.snapshot_of(csi_name);
        // The call is not repeated, so a snapshot that the cache does not show yet would stay: read it from the API
        // server.
        match self.read(&name).await?.filter(|one| self.relation(one) == Some(Relation::Own)) {
            Some(found) if is_cut(&found) && found.metadata.deletion_timestamp.is_none() => {
                Ok(AbandonedSnapshot::Cut)
            }
            Some(found) => {
                // With the resourceVersion: a snapshot that was cut in between is not deleted.
                let version = found.metadata.resource_version.clone();
                self.delete_observed(&name, &found, version, deadline).await?;
                Ok(AbandonedSnapshot::Gone)
            }
            None => Ok(AbandonedSnapshot::Gone),
        }
    }

    /// Deletes the guest's snapshot and waits until it is gone. Does nothing if the snapshot does not exist for this
    /// guest.
    pub(crate) async fn delete(&self, name: &str, deadline: Instant) -> Result<(), DeleteSnapshotError> {
        let found = match self.get(name) {
            Some(found) => found,
            // Another replica may have just created it, and the deletion is not repeated after success: wait for it.
            None if self.read(name).await?.is_some_and(|live| self.relation(&live).is_some()) => {
                self.wait_for(name, deadline).await.ok_or_else(|| DeleteSnapshotError::Deadline {
                    snapshot: name.to_owned(),
                    detail: ": the watch of the management cluster does not show it yet".to_owned(),
                })?
            }
            None => return Ok(()),
        };
        match self.relation(&found) {
            Some(Relation::Own) => self.delete_observed(name, &found, None, deadline).await,
            Some(Relation::Shared { .. }) => Err(DeleteSnapshotError::Shared(name.to_owned())),
            None => {
                tracing::warn!(snapshot = name, "refused to delete a snapshot that is not this guest's");
                Ok(())
            }
        }
    }

    /// Deletes the snapshot with its UID and this resourceVersion, and waits until it is gone.
    async fn delete_observed(
        &self,
        name: &str,
        found: &VolumeSnapshot,
        resource_version: Option<String>,
        deadline: Instant,
    ) -> Result<(), DeleteSnapshotError> {
        let uid = found.metadata.uid.clone();
        if found.metadata.deletion_timestamp.is_none() {
            let patch = async |patch| Ok(self.patch(name, patch).await?.metadata);
            let resource_version =
                traces::write_before_deletion(&found.metadata, resource_version, patch).await;
            let parameters = DeleteParams {
                preconditions: Some(Preconditions { uid: uid.clone(), resource_version }),
                ..Default::default()
            };
            match self.api.delete(name, &parameters).await.map_err(ApiError::from) {
                Ok(_) | Err(ApiError::NotFound(_)) => {}
                Err(source) => return Err(DeleteSnapshotError::Api { snapshot: name.to_owned(), source }),
            }
        }
        let gone = self
            .informer
            .wait_for(&self.identity.key(name), deadline, |now| {
                now.is_none_or(|now| now.metadata.uid != uid).then_some(())
            })
            .await;
        gone.ok_or_else(|| {
            let cached = self.get(name);
            let detail = blocking_finalizers(cached.as_deref().map(|cached| &cached.metadata));
            DeleteSnapshotError::Deadline { snapshot: name.to_owned(), detail }
        })
    }

    /// The snapshot as the API server returns it now; None if it does not exist.
    async fn read(&self, name: &str) -> Result<Option<VolumeSnapshot>, DeleteSnapshotError> {
        // The guest chooses this name, and it becomes part of a URL: no object can have an invalid name.
        if !is_object_name(name) {
            return Ok(None);
        }
        let answer = self.api.get_opt(name).await;
        answer.map_err(|error| DeleteSnapshotError::Api { snapshot: name.to_owned(), source: error.into() })
    }
}
