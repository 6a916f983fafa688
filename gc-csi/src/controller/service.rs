//! The Controller service: one room for each kind of call. They translate to and from the management room and hold
//! no logic beyond what the protocol asks for.

use std::time::Duration;

use csi::capability::Capability;
use csi::locks::VolumeLocks;
use csi::proto::{self, controller_service_capability::rpc::Type as Rpc};
use csi::{Status, deadline};
use tokio::time::Instant;
use tonic::{Code, Request, Response};

use crate::guest::Guest;
use crate::management::Management;
use crate::reconcile::K8sAttachments;

/// How long an object is waited for that a sidecar, or whoever made it, saw before this process did.
pub(super) const CACHE_LAG: Duration = Duration::from_secs(2);

/// How long after its waits a call is ended that still waits for an API server's answer.
const ANSWER_GRACE: Duration = Duration::from_millis(20);

/// Serves the Controller service. Copies share everything, so that two drivers of one process keep each other's locks.
#[derive(Clone)]
pub(super) struct Controller {
    pub(super) management: Management,
    pub(super) guest: Guest,
    pub(super) k8s_attachments: K8sAttachments,
    pub(super) refuse_mismatch: bool,
    pub(super) default_timeout: Duration,
    pub(super) locks: VolumeLocks,
    /// The earlier driver that this one serves as, if any: it keeps volumes going, and makes none.
    pub(super) legacy: Option<String>,
}

impl Controller {
    pub(super) fn new(
        management: Management,
        guest: Guest,
        k8s_attachments: K8sAttachments,
        refuse_mismatch: bool,
        default_timeout: Duration,
        locks: VolumeLocks,
    ) -> Self {
        Self { management, guest, k8s_attachments, refuse_mismatch, default_timeout, locks, legacy: None }
    }

    /// Refuses what no volume of this driver can do, or none beside this VM Operator.
    pub(super) fn supports(&self, capabilities: &[Capability]) -> Result<(), Status> {
        self.management.vm_operator().supports(capabilities)
    }

    /// Starts a call: nothing is answered before both clusters were read once.
    pub(super) fn begin<T>(&self, request: Request<T>) -> Result<(T, Instant), Status> {
        let deadline = self.deadline(&request);
        if !self.management.is_synced() || !self.guest.is_synced() {
            return Err(Status::unavailable(
                "the driver is still reading the clusters' state: try again in a moment",
            ));
        }
        Ok((request.into_inner(), deadline))
    }

    /// Answers in time in any case. A request to an API server that nobody answers is left behind: what it asks for may
    /// come about, and the same call finds it. Says what is known of a link that is down.
    async fn answer<R>(
        &self,
        deadline: Instant,
        call: impl Future<Output = Result<R, Status>>,
    ) -> Result<Response<R>, Status> {
        let answer = tokio::time::timeout_at(deadline + ANSWER_GRACE, call).await.unwrap_or_else(|_| {
            Err(Status::deadline_exceeded(
                "no answer from the API of the management cluster in time; what was asked for may come about there, \
                 and the same call finds it",
            ))
        });
        answer.map(Response::new).map_err(|status| match (status.code(), self.management.watch_error()) {
            (Code::DeadlineExceeded | Code::Unavailable, Some(watch_error))
                if !status.message().contains(&watch_error) =>
            {
                Status::new(
                    status.code(),
                    format!("{} (management cluster: {watch_error})", status.message()),
                )
            }
            _ => status,
        })
    }

    fn deadline<T>(&self, request: &Request<T>) -> Instant {
        deadline::of(request, self.default_timeout)
    }
}

#[tonic::async_trait]
impl proto::controller_server::Controller for Controller {
    async fn create_volume(
        &self,
        request: Request<proto::CreateVolumeRequest>,
    ) -> Result<Response<proto::CreateVolumeResponse>, Status> {
        self.refuse_as_legacy(request.get_ref())?;
        self.answer(self.deadline(&request), self.create(request)).await
    }

    async fn delete_volume(
        &self,
        request: Request<proto::DeleteVolumeRequest>,
    ) -> Result<Response<proto::DeleteVolumeResponse>, Status> {
        self.answer(self.deadline(&request), self.delete(request)).await
    }

    async fn controller_publish_volume(
        &self,
        request: Request<proto::ControllerPublishVolumeRequest>,
    ) -> Result<Response<proto::ControllerPublishVolumeResponse>, Status> {
        self.answer(self.deadline(&request), self.publish(request)).await
    }

    async fn controller_unpublish_volume(
        &self,
        request: Request<proto::ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<proto::ControllerUnpublishVolumeResponse>, Status> {
        self.answer(self.deadline(&request), self.unpublish(request)).await
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<proto::ValidateVolumeCapabilitiesRequest>,
    ) -> Result<Response<proto::ValidateVolumeCapabilitiesResponse>, Status> {
        self.validate(request).map(Response::new)
    }

    async fn list_volumes(
        &self,
        request: Request<proto::ListVolumesRequest>,
    ) -> Result<Response<proto::ListVolumesResponse>, Status> {
        self.list(request).map(Response::new)
    }

    async fn controller_get_volume(
        &self,
        request: Request<proto::ControllerGetVolumeRequest>,
    ) -> Result<Response<proto::ControllerGetVolumeResponse>, Status> {
        self.get(request).map(Response::new)
    }

    async fn controller_expand_volume(
        &self,
        request: Request<proto::ControllerExpandVolumeRequest>,
    ) -> Result<Response<proto::ControllerExpandVolumeResponse>, Status> {
        self.answer(self.deadline(&request), self.expand(request)).await
    }

    async fn controller_modify_volume(
        &self,
        request: Request<proto::ControllerModifyVolumeRequest>,
    ) -> Result<Response<proto::ControllerModifyVolumeResponse>, Status> {
        self.answer(self.deadline(&request), self.modify(request)).await
    }

    async fn create_snapshot(
        &self,
        request: Request<proto::CreateSnapshotRequest>,
    ) -> Result<Response<proto::CreateSnapshotResponse>, Status> {
        self.answer(self.deadline(&request), self.create_snapshot_of(request)).await
    }

    async fn delete_snapshot(
        &self,
        request: Request<proto::DeleteSnapshotRequest>,
    ) -> Result<Response<proto::DeleteSnapshotResponse>, Status> {
        self.answer(self.deadline(&request), self.delete_snapshot_of(request)).await
    }

    async fn list_snapshots(
        &self,
        request: Request<proto::ListSnapshotsRequest>,
    ) -> Result<Response<proto::ListSnapshotsResponse>, Status> {
        self.snapshots(request).map(Response::new)
    }

    async fn get_snapshot(
        &self,
        request: Request<proto::GetSnapshotRequest>,
    ) -> Result<Response<proto::GetSnapshotResponse>, Status> {
        self.snapshot(request).map(Response::new)
    }

    async fn get_capacity(
        &self,
        request: Request<proto::GetCapacityRequest>,
    ) -> Result<Response<proto::GetCapacityResponse>, Status> {
        self.capacity(request).map(Response::new)
    }

    async fn controller_get_capabilities(
        &self,
        _: Request<proto::ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<proto::ControllerGetCapabilitiesResponse>, Status> {
        use proto::controller_service_capability::{Rpc as RpcCapability, Type};
        let mut announced = vec![
            Rpc::CreateDeleteVolume,
            Rpc::PublishUnpublishVolume,
            Rpc::SingleNodeMultiWriter,
            Rpc::ListVolumes,
            Rpc::ListVolumesPublishedNodes,
            Rpc::GetVolume,
            Rpc::VolumeCondition,
            Rpc::CloneVolume,
            Rpc::ExpandVolume,
        ];
        if self.management.vm_operator().supports_read_only() {
            announced.push(Rpc::PublishReadonly);
        }
        // What the management cluster can't do, and what it does not say, is not promised.
        if self.management.has_snapshots() {
            // GET_SNAPSHOT is served, but no sidecar asks for it yet, and csi-sanity takes it for a mistake.
            announced.extend([Rpc::CreateDeleteSnapshot, Rpc::ListSnapshots]);
        }
        if self.management.has_attributes_classes() {
            announced.push(Rpc::ModifyVolume);
        }
        if self.management.has_capacity_data() {
            announced.push(Rpc::GetCapacity);
        }
        let capabilities = announced
            .into_iter()
            .map(|rpc| proto::ControllerServiceCapability {
                r#type: Some(Type::Rpc(RpcCapability { r#type: rpc as i32 })),
            })
            .collect();
        Ok(Response::new(proto::ControllerGetCapabilitiesResponse { capabilities }))
    }
}
