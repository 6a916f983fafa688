//! Snapshot calls: create, get and list.

use crds::names::CsiName;
use csi::proto;
use csi::request::required;
use infra_api::{GUEST_LABEL, Labels, List, Snapshot, SnapshotId, SnapshotSpec, VolumeId, VolumeState};
use k8s_openapi::jiff::Timestamp;
use tokio::time::Instant;
use tonic::Status;

use super::convert::bytes;
use super::{Controller, pages};
use crate::budgets::account;
use crate::infra::snapshot_id;
use crate::traces::{LABEL_NAMESPACE, LABEL_SNAPSHOT};

/// Prefix of the parameters that csi-snapshotter adds.
const SNAPSHOTTER: &str = "csi.storage.k8s.io/";

impl Controller {
    pub(super) async fn take_snapshot(
        &self,
        request: &proto::CreateSnapshotRequest,
        deadline: Instant,
    ) -> Result<proto::Snapshot, Status> {
        let name = CsiName::from(required("name", &request.name)?);
        let source = required("source_volume_id", &request.source_volume_id)?;
        let volume = VolumeId::new(source)
            .map_err(|_| Status::not_found(format!("the storage infra has no volume {source:?}")))?;
        let mut labels = Labels::new();
        for (key, value) in &request.parameters {
            match key.strip_prefix(SNAPSHOTTER) {
                Some("volumesnapshot/name") => labels.insert(LABEL_SNAPSHOT.to_owned(), value.clone()),
                Some("volumesnapshot/namespace") => labels.insert(LABEL_NAMESPACE.to_owned(), value.clone()),
                Some(_) => None,
                None => {
                    return Err(Status::invalid_argument(format!(
                        "unknown parameter {key:?}: a VolumeSnapshotClass of {} has no parameters",
                        crds::names::MANAGEMENT_DRIVER
                    )));
                }
            };
        }
        self.traces.continue_snapshot_creation(&labels, deadline).await;
        let guest = self.guest_of_snapshot(&volume, &labels, deadline).await?;
        let account = account(guest.as_deref())?;
        if let Some(guest) = guest {
            labels.insert(GUEST_LABEL.to_owned(), guest);
        }
        let id = snapshot_id(&name);
        let spec = SnapshotSpec { volume, account, labels };
        let snapshot = self.infra.create_snapshot(&id, &spec, deadline).await?;
        tracing::info!(snapshot = %id, name = name.as_str(), volume = %snapshot.volume, "created");
        to_proto(&snapshot)
    }

    pub(super) async fn find_snapshot(
        &self,
        handle: &str,
        deadline: Instant,
    ) -> Result<Option<Snapshot>, Status> {
        match SnapshotId::new(handle) {
            Ok(id) => Ok(self.infra.get_snapshot(&id, deadline).await?),
            Err(_) => Ok(None),
        }
    }

    /// A page of snapshots, and the token of the next page.
    pub(super) async fn snapshots(
        &self,
        request: &proto::ListSnapshotsRequest,
        deadline: Instant,
    ) -> Result<(Vec<Snapshot>, String), Status> {
        let of = request.source_volume_id.as_str();
        if !request.snapshot_id.is_empty() {
            let found = self.find_snapshot(&request.snapshot_id, deadline).await?;
            let found = found.filter(|snapshot| of.is_empty() || snapshot.volume.as_str() == of);
            return Ok((found.into_iter().collect(), String::new()));
        }
        let volume = match of {
            "" => None,
            of => match VolumeId::new(of) {
                Ok(volume) => Some(volume),
                // An invalid volume ID has no snapshots.
                Err(_) => return Ok((Vec::new(), String::new())),
            },
        };
        let volume = volume.as_ref();
        let page = |limit, after: Option<String>| async move {
            let page: List<Snapshot> =
                self.infra.list_snapshots(volume, limit, after.as_deref(), deadline).await?;
            Ok(page)
        };
        pages::collect("snapshots", request.max_entries, &request.starting_token, page).await
    }
}

pub(super) fn to_proto(snapshot: &Snapshot) -> Result<proto::Snapshot, Status> {
    let taken: Timestamp = snapshot.created_at.parse().map_err(|error| {
        Status::internal(format!(
            "the storage infra returned an invalid creation time of snapshot {}: {:?}: {error}",
            snapshot.id, snapshot.created_at
        ))
    })?;
    Ok(proto::Snapshot {
        size_bytes: bytes(snapshot.capacity_bytes),
        snapshot_id: snapshot.id.to_string(),
        source_volume_id: snapshot.volume.to_string(),
        creation_time: Some(prost_types::Timestamp {
            seconds: taken.as_second(),
            nanos: taken.subsec_nanosecond(),
        }),
        ready_to_use: snapshot.state == VolumeState::Ready,
        group_snapshot_id: String::new(),
    })
}
