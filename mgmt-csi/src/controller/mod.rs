//! The CSI Controller service: turns requests into operations on the infra, and their results into answers.

mod parameters;

use std::sync::Arc;
use std::time::Duration;

use csi::capability::{self, Capability, Mode};
use csi::deadline;
use csi::locks::VolumeLocks;
use csi::proto;
use csi::proto::controller_service_capability::rpc::Type as Rpc;
use csi::request::{Size, required};
use infra_api::{CapacityQuery, Volume, VolumeId, VolumeSpec, ZONE_LABEL};
use tonic::{Request, Response, Status};

use crate::infra::{ReadError, StorageInfra, volume_id};
use parameters::Parameters;

/// What a caller that sets no timeout of its own gets.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The size of a volume for which none is asked, in bytes.
const DEFAULT_SIZE: u64 = 1 << 30;
/// Begins every page token, so that a text from elsewhere is not taken for one.
const TOKEN: &str = "volumes-after:";

// With SINGLE_NODE_MULTI_WRITER csi-provisioner may pass ReadWriteOncePod, which asks nothing more of the infra.
const CAPABILITIES: [Rpc; 5] =
    [Rpc::CreateDeleteVolume, Rpc::ListVolumes, Rpc::GetCapacity, Rpc::GetVolume, Rpc::SingleNodeMultiWriter];

/// The service, over any infra.
#[derive(Clone)]
pub struct Controller {
    infra: Arc<dyn StorageInfra>,
    locks: VolumeLocks,
}

impl std::fmt::Debug for Controller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Controller").finish_non_exhaustive()
    }
}

impl Controller {
    /// The service over `infra`.
    pub fn new(infra: Arc<dyn StorageInfra>) -> Self {
        Self { infra, locks: VolumeLocks::default() }
    }

    /// The volume of an id that came from a caller; an id that can't be one has no volume.
    async fn find<T>(&self, request: &Request<T>, id: &str) -> Result<Volume, Status> {
        let found = match VolumeId::new(id) {
            Ok(id) => self.infra.get_volume(&id, deadline::of(request, TIMEOUT)).await?,
            Err(_) => None,
        };
        found.ok_or_else(|| Status::not_found(format!("the storage infra has no volume {id:?}")))
    }
}

#[tonic::async_trait]
impl proto::controller_server::Controller for Controller {
    async fn create_volume(
        &self,
        request: Request<proto::CreateVolumeRequest>,
    ) -> Result<Response<proto::CreateVolumeResponse>, Status> {
        let deadline = deadline::of(&request, TIMEOUT);
        let request = request.into_inner();
        let name = required("name", &request.name)?;
        let capabilities = capability::required_all(&request.volume_capabilities)?;
        if let Some(why) = unsupported(&capabilities) {
            return Err(Status::invalid_argument(why));
        }
        if request.volume_content_source.is_some() {
            return Err(Status::invalid_argument(
                "volume content source: this driver makes empty volumes only, not from snapshots or other volumes",
            ));
        }
        if let Some(key) = request.mutable_parameters.keys().next() {
            return Err(Status::invalid_argument(format!(
                "mutable parameter {key:?}: this driver has no parameters that can change"
            )));
        }
        let size = Size::from_range(request.capacity_range.as_ref(), DEFAULT_SIZE)?;
        let parameters = Parameters::read(&request.parameters)?;
        let id = volume_id(name);
        let _guard = self.locks.acquire(id.as_str())?;
        let spec = VolumeSpec {
            capacity_bytes: size.required,
            limit_bytes: size.limit,
            placement: parameters.placement,
            labels: parameters.labels,
        };
        let volume = self.infra.create_volume(&id, &spec, deadline).await?;
        if !size.admits(volume.capacity_bytes) {
            return Err(Status::already_exists(format!(
                "volume {id} exists with {} bytes, which is not what is asked for: {} bytes at least{}",
                volume.capacity_bytes,
                size.required,
                size.limit.map(|limit| format!(", {limit} at most")).unwrap_or_default(),
            )));
        }
        tracing::info!(volume = %id, name, bytes = volume.capacity_bytes, pool = %volume.pool, "created");
        Ok(Response::new(proto::CreateVolumeResponse { volume: Some(to_proto(&volume)) }))
    }

    async fn delete_volume(
        &self,
        request: Request<proto::DeleteVolumeRequest>,
    ) -> Result<Response<proto::DeleteVolumeResponse>, Status> {
        let deadline = deadline::of(&request, TIMEOUT);
        let request = request.into_inner();
        let handle = required("volume_id", &request.volume_id)?;
        // An id that the infra can't have is the id of nothing, and to delete nothing succeeds.
        if let Ok(id) = VolumeId::new(handle) {
            let _guard = self.locks.acquire(id.as_str())?;
            self.infra.delete_volume(&id, deadline).await?;
            tracing::info!(volume = %id, "deleted");
        }
        Ok(Response::new(proto::DeleteVolumeResponse {}))
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<proto::ValidateVolumeCapabilitiesRequest>,
    ) -> Result<Response<proto::ValidateVolumeCapabilitiesResponse>, Status> {
        let handle = required("volume_id", &request.get_ref().volume_id)?;
        let capabilities = capability::required_all(&request.get_ref().volume_capabilities)?;
        self.find(&request, handle).await?;
        let request = request.into_inner();
        let answer = match unsupported(&capabilities) {
            Some(message) => proto::ValidateVolumeCapabilitiesResponse { confirmed: None, message },
            None => proto::ValidateVolumeCapabilitiesResponse {
                confirmed: Some(proto::validate_volume_capabilities_response::Confirmed {
                    volume_context: request.volume_context,
                    volume_capabilities: request.volume_capabilities,
                    parameters: request.parameters,
                    mutable_parameters: request.mutable_parameters,
                }),
                message: String::new(),
            },
        };
        Ok(Response::new(answer))
    }

    async fn list_volumes(
        &self,
        request: Request<proto::ListVolumesRequest>,
    ) -> Result<Response<proto::ListVolumesResponse>, Status> {
        let deadline = deadline::of(&request, TIMEOUT);
        let request = request.into_inner();
        let most = u32::try_from(request.max_entries).map_err(|_| {
            Status::invalid_argument(format!("max_entries is {}, and can't be negative", request.max_entries))
        })?;
        let token = request.starting_token.as_str();
        let invalid_token = || {
            Status::aborted(format!(
                "starting_token {token:?} is not one of this driver's: start again without one"
            ))
        };
        let after = match token {
            "" => None,
            token => Some(token.strip_prefix(TOKEN).ok_or_else(invalid_token)?),
        };
        let mut entries = Vec::new();
        let mut next = after.map(str::to_owned);
        // Without a limit the caller wants everything; the infra gives pages all the same.
        loop {
            let left =
                (most > 0).then(|| most.saturating_sub(u32::try_from(entries.len()).unwrap_or(u32::MAX)));
            let page = match self.infra.list_volumes(left, next.as_deref(), deadline).await {
                Err(ReadError::Invalid(_)) if after.is_some() => return Err(invalid_token()),
                answer => answer?,
            };
            entries.extend(page.items.iter().map(|volume| proto::list_volumes_response::Entry {
                volume: Some(to_proto(volume)),
                status: None,
            }));
            next = page.next;
            if next.is_none() || (most > 0 && entries.len() >= most as usize) {
                break;
            }
        }
        let next_token = next.map(|next| format!("{TOKEN}{next}")).unwrap_or_default();
        Ok(Response::new(proto::ListVolumesResponse { entries, next_token }))
    }

    async fn controller_get_volume(
        &self,
        request: Request<proto::ControllerGetVolumeRequest>,
    ) -> Result<Response<proto::ControllerGetVolumeResponse>, Status> {
        let handle = required("volume_id", &request.get_ref().volume_id)?;
        let volume = self.find(&request, handle).await?;
        // Machines are not published through this driver's Controller service, so it names none.
        let status = proto::controller_get_volume_response::VolumeStatus::default();
        Ok(Response::new(proto::ControllerGetVolumeResponse {
            volume: Some(to_proto(&volume)),
            status: Some(status),
        }))
    }

    async fn get_capacity(
        &self,
        request: Request<proto::GetCapacityRequest>,
    ) -> Result<Response<proto::GetCapacityResponse>, Status> {
        let deadline = deadline::of(&request, TIMEOUT);
        let request = request.into_inner();
        let wanted: Vec<Capability> =
            request.volume_capabilities.iter().map(Capability::try_from).collect::<Result<_, _>>()?;
        if unsupported(&wanted).is_some() {
            // The specification: capacity for volumes as described, and there can be none of these.
            return Ok(Response::new(proto::GetCapacityResponse {
                maximum_volume_size: Some(0),
                ..Default::default()
            }));
        }
        let placement = Parameters::read(&request.parameters)?.placement;
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
        let capabilities = CAPABILITIES.into_iter().map(capability).collect();
        Ok(Response::new(proto::ControllerGetCapabilitiesResponse { capabilities }))
    }
}

/// Why the capabilities can't be had, if they can't.
fn unsupported(capabilities: &[Capability]) -> Option<String> {
    capabilities.iter().find_map(|capability| match capability.mode {
        Mode::MultiNodeSingleWriter | Mode::MultiNodeMultiWriter => Some(format!(
            "access mode {}: a volume of this driver has one writing node at most; use ReadWriteOnce, ReadWriteOncePod \
             or ReadOnlyMany",
            capability.mode.kubernetes_name()
        )),
        Mode::SingleNodeWriter
        | Mode::SingleNodeSingleWriter
        | Mode::SingleNodeMultiWriter
        | Mode::SingleNodeReaderOnly
        | Mode::MultiNodeReaderOnly => None,
    })
}

fn to_proto(volume: &Volume) -> proto::Volume {
    proto::Volume {
        capacity_bytes: bytes(volume.capacity_bytes),
        volume_id: volume.id.to_string(),
        ..Default::default()
    }
}

fn bytes(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
