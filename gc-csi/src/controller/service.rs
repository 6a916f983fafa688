//! CSI Controller service: one module per kind of call. They translate between CSI and the management client and
//! contain only logic of the protocol.

use std::time::Duration;

use csi::capability::Capability;
use csi::locks::VolumeLocks;
use csi::proto::{self, controller_service_capability::rpc::Type as Rpc};
use csi::{Status, deadline};
use kube_kit::pace::Pace;
use tokio::time::Instant;
use tonic::{Code, Request, Response};

use crate::guest::Guest;
use crate::management::Management;
use crate::reconcile::K8sAttachments;

/// How long to wait for an object that the caller has seen, but the cache does not show yet.
pub(super) const CACHE_LAG: Duration = Duration::from_secs(2);

/// Time after the deadline of its waits at which a call that still waits for an API server is ended.
const ANSWER_GRACE: Duration = Duration::from_millis(20);

/// The Controller service. Clones share all state, so both driver endpoints use the same locks.
#[derive(Clone)]
pub(super) struct Controller {
    pub(super) management: Management,
    pub(super) guest: Guest,
    pub(super) k8s_attachments: K8sAttachments,
    pub(super) refuse_mismatch: bool,
    pub(super) default_timeout: Duration,
    pub(super) locks: VolumeLocks,
    /// Background writes yield to calls.
    pub(super) pace: Pace,
    /// The legacy driver name that this instance serves, if any; it creates no volumes.
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
        pace: Pace,
    ) -> Self {
        let legacy = None;
        Self { management, guest, k8s_attachments, refuse_mismatch, default_timeout, locks, pace, legacy }
    }

    /// Refuses capabilities that this driver or the VM Operator does not support.
    pub(super) fn supports(&self, capabilities: &[Capability]) -> Result<(), Status> {
        self.management.vm_operator.supports(capabilities)
    }

    /// Starts a call; refuses it until both clusters are synced.
    pub(super) fn begin<T>(&self, request: Request<T>) -> Result<(T, Instant), Status> {
        let deadline = self.deadline(&request);
        if !self.management.is_synced() || !self.guest.is_synced() {
            return Err(Status::unavailable(
                "the driver is still reading the state of the clusters: try again in a moment",
            ));
        }
        Ok((request.into_inner(), deadline))
    }

    /// Answers before the deadline in any case. A pending API request is abandoned; it may still take effect, and a
    /// repeated call finds the result. Adds the watch error while the management cluster is disconnected.
    async fn answer<R>(
        &self,
        deadline: Instant,
        call: impl Future<Output = Result<R, Status>>,
    ) -> Result<Response<R>, Status> {
        let _call = self.pace.call();
        let answer = tokio::time::timeout_at(deadline + ANSWER_GRACE, call).await.unwrap_or_else(|_| {
            Err(Status::deadline_exceeded(
                "the API server of the management cluster did not answer in time; the request may still take effect, \
                 and a retry finds the result",
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
        if self.management.vm_operator.supports_read_only() {
            announced.push(Rpc::PublishReadonly);
        }
        // Capabilities depend on what the management cluster serves.
        if self.management.snapshots.is_some() {
            // GET_SNAPSHOT is served, but not announced: no sidecar uses it, and csi-sanity reports it as an error.
            announced.extend([Rpc::CreateDeleteSnapshot, Rpc::ListSnapshots]);
        }
        if self.management.classes.has_attributes() {
            announced.push(Rpc::ModifyVolume);
        }
        if self.management.capacities.is_some() {
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
