//! GetCapacity.

use crds::names;
use csi::{Status, capability, proto};
use tonic::Request;

use super::parameters::{Kind, management_class};
use super::service::Controller;

impl Controller {
    pub(super) fn capacity(
        &self,
        request: Request<proto::GetCapacityRequest>,
    ) -> Result<proto::GetCapacityResponse, Status> {
        let (request, _) = self.begin(request)?;
        let capacities = self.management.capacities.as_ref().ok_or_else(|| {
            Status::unimplemented(
                "capacity is not known: start gc-csi's controller with --capacity-namespace",
            )
        })?;
        // Unsupported capabilities have no capacity.
        if !request.volume_capabilities.is_empty()
            && self.supports(&capability::required_all(&request.volume_capabilities)?).is_err()
        {
            return Ok(proto::GetCapacityResponse::default());
        }
        let class = match request.parameters.is_empty() {
            true => None,
            false => Some(management_class(Kind::Storage, &request.parameters)?),
        };
        let segments = request.accessible_topology.as_ref().map(|topology| &topology.segments);
        let zone = segments.and_then(|segments| segments.get(names::LABEL_ZONE));
        let free = capacities.free(class, zone.map(String::as_str));
        let bytes = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        Ok(proto::GetCapacityResponse {
            available_capacity: bytes(free.available),
            maximum_volume_size: free.largest.map(bytes),
            minimum_volume_size: None,
        })
    }
}
