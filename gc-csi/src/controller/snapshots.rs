//! CreateSnapshot, DeleteSnapshot, ListSnapshots and GetSnapshot.

use std::collections::{BTreeMap, HashMap};

use crds::names;
use csi::page::page;
use csi::{Status, proto, request};
use prost_types::Timestamp;
use tokio::time::Instant;
use tonic::Request;

use super::errors;
use super::parameters::{extra, management_class};
use super::service::{CACHE_LAG, Controller};
use crate::management::snapshots::{
    AbandonedSnapshot, NewSnapshot, SnapshotError, Snapshots, VolumeSnapshot, is_ready, restore_size,
    source_claim,
};
use crate::names::{ClaimName, CsiName};

impl Controller {
    pub(super) async fn create_snapshot_of(
        &self,
        request: Request<proto::CreateSnapshotRequest>,
    ) -> Result<proto::CreateSnapshotResponse, Status> {
        let (request, deadline) = self.begin(request)?;
        // Every name is valid: the management snapshot's name contains its hash.
        if request.name.is_empty() {
            return Err(Status::invalid_argument("name is missing in the request"));
        }
        let claim = ClaimName::new(request::required("source_volume_id", &request.source_volume_id)?);
        let snapshots = self.served_snapshots()?;
        let class = management_class(
            "VolumeSnapshotClass",
            names::PARAMETER_MANAGEMENT_SNAPSHOT_CLASS,
            &request.parameters,
        )?
        .to_owned();
        let _guard = self.locks.acquire(&format!("snapshot {}", request.name))?;
        let content = extra(&request.parameters, "volumesnapshotcontent/name");
        let new_snapshot = NewSnapshot {
            annotations: annotations(&request.parameters),
            csi_name: CsiName::new(request.name),
            claim,
            class,
        };
        if !snapshots.exists(&new_snapshot.csi_name) {
            // The pin of an existing snapshot was checked when it was created.
            self.check_pin(&new_snapshot.claim, deadline).await.map_err(|error| errors::copy(&error))?;
            self.abandon_without_content(snapshots, &new_snapshot.csi_name, content.as_deref(), deadline)
                .await?;
        }
        let cache_deadline = deadline.min(Instant::now() + CACHE_LAG);
        let outcome = snapshots.create(&new_snapshot, cache_deadline, deadline).await;
        if let Err(SnapshotError::Failing { .. } | SnapshotError::Deleting(_) | SnapshotError::Deadline(_)) =
            &outcome
        {
            self.abandon_without_content(snapshots, &new_snapshot.csi_name, content.as_deref(), deadline)
                .await?;
        }
        let snapshot = outcome.map_err(|error| errors::snapshot(&error))?;
        Ok(proto::CreateSnapshotResponse { snapshot: Some(about(&snapshot)) })
    }

    /// Aborts the creation of a snapshot whose content is being deleted in the guest: csi-snapshotter repeats the call
    /// until it gets a final error, and then deletes nothing without a handle, so nothing may be left in the management
    /// cluster. A snapshot that is already cut is returned, because csi-snapshotter then deletes it.
    async fn abandon_without_content(
        &self,
        snapshots: &Snapshots,
        csi_name: &CsiName,
        content: Option<&str>,
        deadline: Instant,
    ) -> Result<(), Status> {
        let Some(content) = content else { return Ok(()) };
        if self.guest.has_live_content(content).await {
            return Ok(());
        }
        match snapshots.abandon(csi_name, deadline).await {
            Ok(AbandonedSnapshot::Cut) => Ok(()),
            Ok(AbandonedSnapshot::Gone) => Err(Status::not_found(format!(
                "VolumeSnapshotContent {content} of the guest, for which snapshot {csi_name} was requested, is gone or \
                 being deleted: nothing is left in the management cluster"
            ))),
            Err(error) => Err(errors::delete_snapshot(&error)),
        }
    }

    pub(super) async fn delete_snapshot_of(
        &self,
        request: Request<proto::DeleteSnapshotRequest>,
    ) -> Result<proto::DeleteSnapshotResponse, Status> {
        let (request, deadline) = self.begin(request)?;
        let snapshot = request::required("snapshot_id", &request.snapshot_id)?;
        let snapshots = self.served_snapshots()?;
        let _guard = self.locks.acquire(&format!("snapshot {snapshot}"))?;
        let deleted = snapshots.delete(snapshot, deadline).await;
        deleted.map_err(|error| errors::delete_snapshot(&error))?;
        Ok(proto::DeleteSnapshotResponse {})
    }

    pub(super) fn snapshots(
        &self,
        request: Request<proto::ListSnapshotsRequest>,
    ) -> Result<proto::ListSnapshotsResponse, Status> {
        let (request, _) = self.begin(request)?;
        let snapshots = self.served_snapshots()?;
        let mut found = match request.snapshot_id.as_str() {
            "" => snapshots.list_usable(),
            name => snapshots.usable(name).into_iter().collect(),
        };
        let source = &request.source_volume_id;
        found.retain(|one| source.is_empty() || source_claim(one) == source);
        let name = |one: &std::sync::Arc<VolumeSnapshot>| one.metadata.name.clone().unwrap_or_default();
        let page = page(found, name, request.max_entries, &request.starting_token)?;
        let entry =
            |one: &VolumeSnapshot| proto::list_snapshots_response::Entry { snapshot: Some(about(one)) };
        Ok(proto::ListSnapshotsResponse {
            entries: page.entries.iter().map(|one| entry(one)).collect(),
            next_token: page.next,
        })
    }

    pub(super) fn snapshot(
        &self,
        request: Request<proto::GetSnapshotRequest>,
    ) -> Result<proto::GetSnapshotResponse, Status> {
        let (request, _) = self.begin(request)?;
        let name = request::required("snapshot_id", &request.snapshot_id)?;
        let snapshots = self.served_snapshots()?;
        let found = snapshots.usable(name);
        let found =
            found.ok_or_else(|| Status::not_found(format!("there is no snapshot {name} of this guest")))?;
        Ok(proto::GetSnapshotResponse { snapshot: Some(about(&found)) })
    }

    fn served_snapshots(&self) -> Result<&Snapshots, Status> {
        self.management.snapshots.as_ref().ok_or_else(|| errors::snapshot(&SnapshotError::NotServed))
    }
}

/// Annotations for the management cluster that name the guest objects of a snapshot.
fn annotations(parameters: &HashMap<String, String>) -> BTreeMap<String, String> {
    let known = [
        ("volumesnapshot/name", names::ANNOTATION_GUEST_SNAPSHOT),
        ("volumesnapshot/namespace", names::ANNOTATION_GUEST_NAMESPACE),
    ];
    known
        .into_iter()
        .filter_map(|(key, annotation)| Some((annotation.to_owned(), extra(parameters, key)?)))
        .collect()
}

fn about(snapshot: &VolumeSnapshot) -> proto::Snapshot {
    let cut = snapshot.status.as_ref().and_then(|status| status.creation_time.as_ref());
    // A time is required and the first one is kept; a missing one would be read as 1970.
    let time = cut.or(snapshot.metadata.creation_timestamp.as_ref());
    proto::Snapshot {
        size_bytes: i64::try_from(restore_size(snapshot).unwrap_or(0)).unwrap_or(i64::MAX),
        snapshot_id: snapshot.metadata.name.clone().unwrap_or_default(),
        source_volume_id: source_claim(snapshot).to_owned(),
        creation_time: time
            .map(|time| Timestamp { seconds: time.0.as_second(), nanos: time.0.subsec_nanosecond() }),
        ready_to_use: is_ready(snapshot),
        group_snapshot_id: String::new(),
    }
}
