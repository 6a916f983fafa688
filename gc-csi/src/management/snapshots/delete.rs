//! Snapshots deleted, and waited for until they are gone.

use crds::names;
use kube::api::{DeleteParams, Preconditions};
use tokio::time::Instant;

use super::{VolumeSnapshot, is_cut};
use crate::management::sharing::Relation;
use crate::management::{ApiError, Management, blocking_finalizers, is_object_name};

/// Why a snapshot was not deleted.
#[derive(Debug, thiserror::Error)]
pub enum DeleteSnapshotError {
    /// It belongs to somebody else.
    #[error(
        "management VolumeSnapshot {0} is shared with this guest, not its own: set the deletionPolicy of the guest's VolumeSnapshotContent to Retain"
    )]
    Shared(String),
    /// Time ran out; the deletion goes on.
    #[error("management VolumeSnapshot {snapshot} was not gone in time{detail}")]
    Deadline {
        /// The management snapshot.
        snapshot: String,
        /// What holds it, as far as is known.
        detail: String,
    },
    /// The request failed.
    #[error("cannot delete management VolumeSnapshot {snapshot}: {source}")]
    Api {
        /// The management snapshot.
        snapshot: String,
        /// What the API said.
        source: ApiError,
    },
}

/// What became of a snapshot that nobody waits for any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AbandonedSnapshot {
    /// It is not there.
    Gone,
    /// It is cut, so that it has a handle by which its deletion is asked for; it was left alone.
    Cut,
}

impl Management {
    /// Deletes a snapshot that was never given out, and waits until it is gone; unless it is cut.
    pub async fn abandon_snapshot(
        &self,
        csi_name: &str,
        deadline: Instant,
    ) -> Result<AbandonedSnapshot, DeleteSnapshotError> {
        let name = names::management_snapshot(self.identity.cluster.as_str(), csi_name);
        // Nobody asks again, so what the informer has not seen yet would stay: the API is read.
        match self.read_snapshot(&name).await?.filter(|one| self.owns_snapshot(one)) {
            Some(found) if is_cut(&found) && found.metadata.deletion_timestamp.is_none() => {
                Ok(AbandonedSnapshot::Cut)
            }
            Some(found) => {
                // Only as it was seen: one that was cut in between is not deleted.
                let seen = found.metadata.resource_version.clone();
                self.delete_observed_snapshot(&name, &found, seen, deadline).await?;
                Ok(AbandonedSnapshot::Gone)
            }
            None => Ok(AbandonedSnapshot::Gone),
        }
    }

    /// Deletes the guest's snapshot and waits until it is gone. One that is not there, or nothing to this guest,
    /// is left as it is: to this guest it does not exist.
    pub async fn delete_snapshot(&self, name: &str, deadline: Instant) -> Result<(), DeleteSnapshotError> {
        let Some(snapshots) = &self.snapshots else { return Ok(()) };
        let found = match snapshots.informer.get(&self.key(name)) {
            Some(found) => found,
            // Another replica may just have made it, and what is called gone now is not asked for again. It is waited
            // for, so that its end is seen, too.
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
                tracing::warn!(
                    snapshot = name,
                    "asked to delete a snapshot that is not this guest's: left alone"
                );
                Ok(())
            }
        }
    }

    /// Deletes this very snapshot, if it is still in the version that is given, and waits until it is gone.
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
            let seen = snapshots.informer.get(&self.key(name));
            let detail = blocking_finalizers(seen.as_deref().map(|seen| &seen.metadata));
            DeleteSnapshotError::Deadline { snapshot: name.to_owned(), detail }
        })
    }

    /// The snapshot as it is now; None when there is none.
    async fn read_snapshot(&self, name: &str) -> Result<Option<VolumeSnapshot>, DeleteSnapshotError> {
        // The name is the guest's word and becomes part of a URL: one that no object can have, has none.
        let Some(snapshots) = self.snapshots.as_ref().filter(|_| is_object_name(name)) else {
            return Ok(None);
        };
        let answer = snapshots.api.get_opt(name).await;
        answer.map_err(|error| DeleteSnapshotError::Api { snapshot: name.to_owned(), source: error.into() })
    }
}
