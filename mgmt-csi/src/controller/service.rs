//! gRPC methods of the Controller service.

use std::time::Duration;

use csi::capability::{self, Capability};
use csi::deadline;
use csi::proto;
use csi::proto::controller_service_capability::rpc::Type as Rpc;
use csi::request::required;
use infra_api::{CapacityQuery, SnapshotId, Volume, VolumeId, ZONE_LABEL};
use tonic::{Request, Response, Status};

use super::convert::{bytes, condition, to_proto};
use super::parameters::Parameters;
use super::{Controller, access, pages, snapshots};

/// Timeout of a call without a deadline.
const TIMEOUT: Duration = Duration::from_secs(10);

// GetSnapshot is implemented but not announced: no sidecar calls it yet, and csi-sanity 5.4 fails on unknown capabilities.
const CAPABILITIES: [Rpc; 11] = [
    Rpc::CreateDeleteVolume,
    Rpc::CloneVolume,
    Rpc::ExpandVolume,
    Rpc::ModifyVolume,
    Rpc::ListVolumes,
    Rpc::GetVolume,
    Rpc::VolumeCondition,
    Rpc::CreateDeleteSnapshot,
    Rpc::ListSnapshots,
    Rpc::GetCapacity,
    // Lets csi-provisioner pass ReadWriteOncePod, which needs no support from the storage infra.
    Rpc::SingleNodeMultiWriter,
];

/// Capabilities with volumes on hosts.
const ON_HOSTS: [Rpc; 2] = [Rpc::PublishUnpublishVolume, Rpc::PublishReadonly];

#[tonic::async_trait]
impl proto::controller_server::Controller for Controller {
    async fn create_volume(
        &self,
        request: Request<proto::CreateVolumeRequest>,
    ) -> Result<Response<proto::CreateVolumeResponse>, Status> {
        let volume = self.create(request.get_ref(), deadline::of(&request, TIMEOUT)).await?;
        Ok(Response::new(proto::CreateVolumeResponse { volume: Some(volume) }))
    }

    async fn delete_volume(
        &self,
        request: Request<proto::DeleteVolumeRequest>,
    ) -> Result<Response<proto::DeleteVolumeResponse>, Status> {
        let deadline = deadline::of(&request, TIMEOUT);
        let request = request.into_inner();
        let handle = required("volume_id", &request.volume_id)?;
        // A volume with an invalid ID does not exist, so its deletion succeeds.
        if let Ok(id) = VolumeId::new(handle) {
            let _guard = self.locks.acquire(id.as_str())?;
            let volumes = self.deletion_guard.caught_up(&id, deadline).await;
            self.traces.continue_volume_deletion(&volumes);
            if volumes.is_empty() && self.is_deleted(&id, deadline).await? {
                tracing::debug!(volume = %id, "already deleted");
                return Ok(Response::new(proto::DeleteVolumeResponse {}));
            }
            self.deletion_guard.refuse_if_kept(&id, deadline).await?;
            self.infra.delete_volume(&id, deadline).await?;
            tracing::info!(volume = %id, "deleted");
        }
        Ok(Response::new(proto::DeleteVolumeResponse {}))
    }

    async fn controller_publish_volume(
        &self,
        request: Request<proto::ControllerPublishVolumeRequest>,
    ) -> Result<Response<proto::ControllerPublishVolumeResponse>, Status> {
        self.check_on_hosts()?;
        let publish_context = self.publish(request.get_ref(), deadline::of(&request, TIMEOUT)).await?;
        Ok(Response::new(proto::ControllerPublishVolumeResponse { publish_context }))
    }

    async fn controller_unpublish_volume(
        &self,
        request: Request<proto::ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<proto::ControllerUnpublishVolumeResponse>, Status> {
        self.check_on_hosts()?;
        self.unpublish(request.get_ref(), deadline::of(&request, TIMEOUT)).await?;
        Ok(Response::new(proto::ControllerUnpublishVolumeResponse {}))
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<proto::ValidateVolumeCapabilitiesRequest>,
    ) -> Result<Response<proto::ValidateVolumeCapabilitiesResponse>, Status> {
        let handle = required("volume_id", &request.get_ref().volume_id)?;
        let capabilities = capability::required_all(&request.get_ref().volume_capabilities)?;
        let volume = self.find(handle, deadline::of(&request, TIMEOUT)).await?;
        let answer =
            capability::validated(request.into_inner(), access::refusal(&capabilities, volume.shareable));
        Ok(Response::new(answer))
    }

    async fn list_volumes(
        &self,
        request: Request<proto::ListVolumesRequest>,
    ) -> Result<Response<proto::ListVolumesResponse>, Status> {
        let deadline = deadline::of(&request, TIMEOUT);
        let request = request.into_inner();
        let page = |limit, after: Option<String>| async move {
            self.infra.list_volumes(limit, after.as_deref(), deadline).await
        };
        let (volumes, next_token) =
            pages::collect("volumes", request.max_entries, &request.starting_token, page).await?;
        let entry = |volume: &Volume| proto::list_volumes_response::Entry {
            volume: Some(to_proto(volume)),
            status: Some(proto::list_volumes_response::VolumeStatus {
                // Not announced: VMs have volumes through VolumeAttachments, which are no published nodes.
                published_node_ids: Vec::new(),
                volume_condition: Some(condition(volume)),
            }),
        };
        let entries = volumes.iter().map(entry).collect();
        Ok(Response::new(proto::ListVolumesResponse { entries, next_token }))
    }

    async fn controller_get_volume(
        &self,
        request: Request<proto::ControllerGetVolumeRequest>,
    ) -> Result<Response<proto::ControllerGetVolumeResponse>, Status> {
        let handle = required("volume_id", &request.get_ref().volume_id)?;
        let volume = self.find(handle, deadline::of(&request, TIMEOUT)).await?;
        let status = proto::controller_get_volume_response::VolumeStatus {
            published_node_ids: Vec::new(),
            volume_condition: Some(condition(&volume)),
        };
        Ok(Response::new(proto::ControllerGetVolumeResponse {
            volume: Some(to_proto(&volume)),
            status: Some(status),
        }))
    }

    async fn controller_expand_volume(
        &self,
        request: Request<proto::ControllerExpandVolumeRequest>,
    ) -> Result<Response<proto::ControllerExpandVolumeResponse>, Status> {
        let deadline = deadline::of(&request, TIMEOUT);
        let request = request.into_inner();
        let (volume, capacity) = self.expand(&request, deadline).await?;
        Ok(Response::new(proto::ControllerExpandVolumeResponse {
            capacity_bytes: bytes(capacity),
            // In a VM, the guest driver expands the filesystem.
            node_expansion_required: self
                .needs_node_expansion(&volume, request.volume_capability.as_ref(), deadline)
                .await?,
        }))
    }

    async fn controller_modify_volume(
        &self,
        request: Request<proto::ControllerModifyVolumeRequest>,
    ) -> Result<Response<proto::ControllerModifyVolumeResponse>, Status> {
        self.modify(request.get_ref(), deadline::of(&request, TIMEOUT)).await?;
        Ok(Response::new(proto::ControllerModifyVolumeResponse {}))
    }

    async fn create_snapshot(
        &self,
        request: Request<proto::CreateSnapshotRequest>,
    ) -> Result<Response<proto::CreateSnapshotResponse>, Status> {
        let snapshot = self.take_snapshot(request.get_ref(), deadline::of(&request, TIMEOUT)).await?;
        Ok(Response::new(proto::CreateSnapshotResponse { snapshot: Some(snapshot) }))
    }

    async fn delete_snapshot(
        &self,
        request: Request<proto::DeleteSnapshotRequest>,
    ) -> Result<Response<proto::DeleteSnapshotResponse>, Status> {
        let handle = required("snapshot_id", &request.get_ref().snapshot_id)?;
        // As with volumes, deleting an invalid ID succeeds.
        if let Ok(id) = SnapshotId::new(handle) {
            let deadline = deadline::of(&request, TIMEOUT);
            self.traces.continue_snapshot_deletion(self.infra.clone(), id.clone(), deadline).await;
            self.infra.delete_snapshot(&id, deadline).await?;
            tracing::info!(snapshot = %id, "deleted");
        }
        Ok(Response::new(proto::DeleteSnapshotResponse {}))
    }

    async fn list_snapshots(
        &self,
        request: Request<proto::ListSnapshotsRequest>,
    ) -> Result<Response<proto::ListSnapshotsResponse>, Status> {
        let (found, next_token) = self.snapshots(request.get_ref(), deadline::of(&request, TIMEOUT)).await?;
        let entry = |snapshot| {
            Ok(proto::list_snapshots_response::Entry { snapshot: Some(snapshots::to_proto(snapshot)?) })
        };
        let entries = found.iter().map(entry).collect::<Result<_, Status>>()?;
        Ok(Response::new(proto::ListSnapshotsResponse { entries, next_token }))
    }

    async fn get_snapshot(
        &self,
        request: Request<proto::GetSnapshotRequest>,
    ) -> Result<Response<proto::GetSnapshotResponse>, Status> {
        let handle = required("snapshot_id", &request.get_ref().snapshot_id)?;
        let found = self.find_snapshot(handle, deadline::of(&request, TIMEOUT)).await?;
        let snapshot = found
            .ok_or_else(|| Status::not_found(format!("the storage infra has no snapshot {handle:?}")))?;
        let snapshot = Some(snapshots::to_proto(&snapshot)?);
        Ok(Response::new(proto::GetSnapshotResponse { snapshot }))
    }

    async fn get_capacity(
        &self,
        request: Request<proto::GetCapacityRequest>,
    ) -> Result<Response<proto::GetCapacityResponse>, Status> {
        let deadline = deadline::of(&request, TIMEOUT);
        let request = request.into_inner();
        let wanted: Vec<Capability> =
            request.volume_capabilities.iter().map(Capability::try_from).collect::<Result<_, _>>()?;
        let Parameters { placement, shareable, .. } = Parameters::read(&request.parameters)?;
        if access::refusal(&wanted, shareable).is_some() {
            // CSI specification: capacity for volumes with these capabilities, which cannot exist.
            return Ok(Response::new(proto::GetCapacityResponse {
                maximum_volume_size: Some(0),
                ..Default::default()
            }));
        }
        let zone =
            request.accessible_topology.and_then(|topology| topology.segments.get(ZONE_LABEL).cloned());
        let query = CapacityQuery { pool: placement.pool, zone, labels: placement.pool_labels };
        let capacity = self.infra.capacity(&query, deadline).await?;
        Ok(Response::new(proto::GetCapacityResponse {
            available_capacity: bytes(capacity.free_bytes),
            maximum_volume_size: Some(bytes(capacity.max_volume_bytes)),
            minimum_volume_size: None,
        }))
    }

    async fn controller_get_capabilities(
        &self,
        _: Request<proto::ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<proto::ControllerGetCapabilitiesResponse>, Status> {
        use proto::controller_service_capability::{Rpc as Wire, Type};
        let capability = |rpc: Rpc| proto::ControllerServiceCapability {
            r#type: Some(Type::Rpc(Wire { r#type: rpc as i32 })),
        };
        let on_hosts = ON_HOSTS.into_iter().filter(|_| self.on_hosts);
        let capabilities = CAPABILITIES.into_iter().chain(on_hosts).map(capability).collect();
        Ok(Response::new(proto::ControllerGetCapabilitiesResponse { capabilities }))
    }
}
