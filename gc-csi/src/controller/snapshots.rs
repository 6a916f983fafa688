//! CreateSnapshot, DeleteSnapshot, ListSnapshots and GetSnapshot.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use csi::locks::VolumeLocks;
use csi::page::page;
use csi::{Status, proto, request};
use prost_types::Timestamp;
use tokio::time::Instant;
use tonic::Request;

use super::errors;
use super::parameters::{Kind, extra, management_class};
use super::pinned::{PinnedVolumes, check_pin};
use super::service::{CACHE_LAG, Controller};
use crate::management::snapshots::{
    AbandonedSnapshot, DeleteSnapshotError, NewSnapshot, SnapshotError, Snapshots, VolumeSnapshot, is_ready,
    restore_size, source_claim,
};
use crds::names::{self, ClaimName, CsiName};

/// What CreateSnapshot needs of the guest.
pub(super) trait SnapshotSources: PinnedVolumes {
    /// Whether a VolumeSnapshotContent exists and is not being deleted.
    async fn has_live_content(&self, content: &str) -> bool;
}

/// What CreateSnapshot and DeleteSnapshot need of the management cluster.
pub(super) trait SnapshotStore {
    /// Whether the cache shows the snapshot with this CSI name.
    fn exists(&self, csi_name: &CsiName) -> bool;

    /// Creates the snapshot unless it exists, and waits until it is ready to use.
    async fn create(
        &self,
        request: &NewSnapshot,
        cache_deadline: Instant,
        deadline: Instant,
    ) -> Result<Arc<VolumeSnapshot>, SnapshotError>;

    /// Deletes a snapshot that was never returned to the caller, unless it is cut.
    async fn abandon(
        &self,
        csi_name: &CsiName,
        deadline: Instant,
    ) -> Result<AbandonedSnapshot, DeleteSnapshotError>;

    /// Deletes the guest's snapshot and waits until it is gone.
    async fn delete(&self, name: &str, deadline: Instant) -> Result<(), DeleteSnapshotError>;
}

impl SnapshotSources for Controller {
    async fn has_live_content(&self, content: &str) -> bool {
        self.guest.has_live_content(content).await
    }
}

impl SnapshotStore for Snapshots {
    fn exists(&self, csi_name: &CsiName) -> bool {
        Self::exists(self, csi_name)
    }

    async fn create(
        &self,
        request: &NewSnapshot,
        cache_deadline: Instant,
        deadline: Instant,
    ) -> Result<Arc<VolumeSnapshot>, SnapshotError> {
        Self::create(self, request, cache_deadline, deadline).await
    }

    async fn abandon(
        &self,
        csi_name: &CsiName,
        deadline: Instant,
    ) -> Result<AbandonedSnapshot, DeleteSnapshotError> {
        Self::abandon(self, csi_name, deadline).await
    }

    async fn delete(&self, name: &str, deadline: Instant) -> Result<(), DeleteSnapshotError> {
        Self::delete(self, name, deadline).await
    }
}

impl Controller {
    pub(super) async fn create_snapshot_of(
        &self,
        request: Request<proto::CreateSnapshotRequest>,
    ) -> Result<proto::CreateSnapshotResponse, Status> {
        let (request, deadline) = self.begin(request)?;
        create(self, self.management.snapshots.as_ref(), &self.locks, request, deadline).await
    }

    pub(super) async fn delete_snapshot_of(
        &self,
        request: Request<proto::DeleteSnapshotRequest>,
    ) -> Result<proto::DeleteSnapshotResponse, Status> {
        let (request, deadline) = self.begin(request)?;
        delete(self.management.snapshots.as_ref(), &self.locks, &request, deadline).await
    }

    pub(super) fn snapshots(
        &self,
        request: Request<proto::ListSnapshotsRequest>,
    ) -> Result<proto::ListSnapshotsResponse, Status> {
        let (request, _) = self.begin(request)?;
        let snapshots = served(self.management.snapshots.as_ref())?;
        let mut found = match request.snapshot_id.as_str() {
            "" => snapshots.list_usable(),
            name => snapshots.usable(name).into_iter().collect(),
        };
        let source = &request.source_volume_id;
        found.retain(|one| source.is_empty() || source_claim(one) == source);
        let name = |one: &Arc<VolumeSnapshot>| one.metadata.name.clone().unwrap_or_default();
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
        let snapshots = served(self.management.snapshots.as_ref())?;
        let found = snapshots.usable(name);
        let found =
            found.ok_or_else(|| Status::not_found(format!("there is no snapshot {name} of this guest")))?;
        Ok(proto::GetSnapshotResponse { snapshot: Some(about(&found)) })
    }
}

pub(super) async fn create(
    sources: &impl SnapshotSources,
    snapshots: Option<&impl SnapshotStore>,
    locks: &VolumeLocks,
    request: proto::CreateSnapshotRequest,
    deadline: Instant,
) -> Result<proto::CreateSnapshotResponse, Status> {
    // Every name is valid: the management snapshot's name contains its hash.
    if request.name.is_empty() {
        return Err(Status::invalid_argument("name is missing in the request"));
    }
    let claim = ClaimName::new(request::required("source_volume_id", &request.source_volume_id)?);
    let snapshots = served(snapshots)?;
    let class = management_class(Kind::VolumeSnapshot, &request.parameters)?.to_owned();
    let _guard = locks.acquire(&format!("snapshot {}", request.name))?;
    let content = extra(&request.parameters, "volumesnapshotcontent/name");
    let new_snapshot = NewSnapshot {
        annotations: annotations(&request.parameters),
        csi_name: CsiName::new(request.name),
        claim,
        class,
    };
    let abandon =
        || abandon_without_content(sources, snapshots, &new_snapshot.csi_name, content.as_deref(), deadline);
    if !snapshots.exists(&new_snapshot.csi_name) {
        // The pin of an existing snapshot was checked when it was created.
        let checked = check_pin(sources, &new_snapshot.claim, deadline).await;
        checked.map_err(|error| errors::copy(&error))?;
        abandon().await?;
    }
    let cache_deadline = deadline.min(Instant::now() + CACHE_LAG);
    let outcome = snapshots.create(&new_snapshot, cache_deadline, deadline).await;
    if let Err(SnapshotError::Failing { .. } | SnapshotError::Deleting(_) | SnapshotError::Deadline(_)) =
        &outcome
    {
        abandon().await?;
    }
    let snapshot = outcome.map_err(|error| errors::snapshot(&error))?;
    Ok(proto::CreateSnapshotResponse { snapshot: Some(about(&snapshot)) })
}

/// Aborts the creation of a snapshot whose content is being deleted in the guest: csi-snapshotter repeats the call until
/// it gets a final error, and then deletes nothing without a handle, so nothing may be left in the management cluster. A
/// snapshot that is already cut is returned, because csi-snapshotter then deletes it.
async fn abandon_without_content(
    sources: &impl SnapshotSources,
    snapshots: &impl SnapshotStore,
    csi_name: &CsiName,
    content: Option<&str>,
    deadline: Instant,
) -> Result<(), Status> {
    let Some(content) = content else { return Ok(()) };
    if sources.has_live_content(content).await {
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

pub(super) async fn delete(
    snapshots: Option<&impl SnapshotStore>,
    locks: &VolumeLocks,
    request: &proto::DeleteSnapshotRequest,
    deadline: Instant,
) -> Result<proto::DeleteSnapshotResponse, Status> {
    let snapshot = request::required("snapshot_id", &request.snapshot_id)?;
    let snapshots = served(snapshots)?;
    let _guard = locks.acquire(&format!("snapshot {snapshot}"))?;
    let deleted = snapshots.delete(snapshot, deadline).await;
    deleted.map_err(|error| errors::delete_snapshot(&error))?;
    Ok(proto::DeleteSnapshotResponse {})
}

/// The snapshots, if the management cluster serves them.
fn served<S>(snapshots: Option<&S>) -> Result<&S, Status> {
    snapshots.ok_or_else(|| errors::snapshot(&SnapshotError::NotServed))
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

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;
    use crate::controller::testing::{InMemory, Outcomes, deadline, replaced};

    fn request() -> proto::CreateSnapshotRequest {
        let parameters = [
            (names::PARAMETER_MANAGEMENT_SNAPSHOT_CLASS, "gold"),
            ("csi.storage.k8s.io/volumesnapshotcontent/name", "content-1"),
        ];
        proto::CreateSnapshotRequest {
            name: "snapshot-1".to_owned(),
            source_volume_id: "c".to_owned(),
            parameters: parameters.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
            ..Default::default()
        }
    }

    async fn answer(of: &InMemory, request: proto::CreateSnapshotRequest) -> Result<String, Status> {
        let answer = create(of, Some(of), &VolumeLocks::default(), request, deadline()).await?;
        Ok(answer.snapshot.unwrap_or_default().snapshot_id)
    }

    fn made() -> Result<Arc<VolumeSnapshot>, SnapshotError> {
        let snapshot = serde_json::json!({"metadata": {"name": "snap-1"}, "spec": {}});
        Ok(Arc::new(serde_json::from_value(snapshot).unwrap()))
    }

    fn making(outcome: Result<Arc<VolumeSnapshot>, SnapshotError>) -> InMemory {
        InMemory { snapshot_creations: Outcomes::of([outcome]), ..InMemory::default() }
    }

    #[tokio::test]
    async fn a_snapshot_is_created_for_a_content_that_exists() {
        assert_eq!(answer(&making(made()), request()).await.unwrap(), "snap-1");
    }

    #[tokio::test]
    async fn nothing_is_created_for_a_content_that_is_gone() {
        let gone = || Outcomes::of([Ok(AbandonedSnapshot::Gone)]);
        let of = InMemory { is_content_gone: true, snapshot_abandons: gone(), ..InMemory::default() };
        assert_eq!(answer(&of, request()).await.unwrap_err().code(), Code::NotFound);
        assert_eq!(of.snapshot_creations.taken(), 0);
        let failing = SnapshotError::Deadline("snap-1".to_owned());
        let of = InMemory {
            is_content_gone: true,
            has_snapshot: true,
            snapshot_abandons: gone(),
            ..making(Err(failing))
        };
        assert_eq!(answer(&of, request()).await.unwrap_err().code(), Code::NotFound);
    }

    #[tokio::test]
    async fn a_cut_snapshot_is_returned_although_its_content_is_gone() {
        let snapshot_abandons = Outcomes::of([Ok(AbandonedSnapshot::Cut)]);
        let of = InMemory { is_content_gone: true, snapshot_abandons, ..making(made()) };
        assert_eq!(answer(&of, request()).await.unwrap(), "snap-1");
    }

    #[tokio::test]
    async fn the_pin_is_checked_only_for_a_new_snapshot() {
        let replaced = || [Some(replaced()), Some(replaced())];
        let of = InMemory { replaced: replaced(), ..InMemory::default() };
        assert_eq!(answer(&of, request()).await.unwrap_err().code(), Code::FailedPrecondition);
        let of = InMemory { replaced: replaced(), has_snapshot: true, ..making(made()) };
        assert!(answer(&of, request()).await.is_ok());
    }

    #[tokio::test]
    async fn invalid_requests_are_refused() {
        let nameless = proto::CreateSnapshotRequest { name: String::new(), ..request() };
        let classless = proto::CreateSnapshotRequest { parameters: HashMap::new(), ..request() };
        for request in [nameless, classless] {
            let status = answer(&InMemory::default(), request).await.unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument);
        }
        let unserved = None::<&InMemory>;
        let answer =
            create(&InMemory::default(), unserved, &VolumeLocks::default(), request(), deadline()).await;
        assert_eq!(answer.unwrap_err().code(), Code::Unimplemented);
    }

    #[tokio::test]
    async fn a_shared_snapshot_is_not_deleted() {
        let shared = Err(DeleteSnapshotError::Shared("snap-1".to_owned()));
        let of = InMemory { snapshot_deletions: Outcomes::of([shared, Ok(())]), ..InMemory::default() };
        let request = proto::DeleteSnapshotRequest { snapshot_id: "snap-1".to_owned(), ..Default::default() };
        let answer = async || delete(Some(&of), &VolumeLocks::default(), &request, deadline()).await;
        assert_eq!(answer().await.unwrap_err().code(), Code::FailedPrecondition);
        assert!(answer().await.is_ok());
    }
}
