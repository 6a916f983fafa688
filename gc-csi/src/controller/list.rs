//! ListVolumes, ControllerGetVolume and ValidateVolumeCapabilities. Answered from the cache: csi-attacher lists all
//! volumes every minute.

use crds::names::ClaimName;
use csi::page::page;
use csi::{Status, capability, proto, request};
use tonic::Request;

use super::pinned::pin_of_call;
use super::publish;
use super::service::Controller;
use crate::compatibility::{Incompatible, PvRequirements};
use crate::management::inventory::{self, Volume};

impl Controller {
    pub(super) fn list(
        &self,
        request: Request<proto::ListVolumesRequest>,
    ) -> Result<proto::ListVolumesResponse, Status> {
        let (request, _) = self.begin(request)?;
        let volumes = inventory::volumes(&self.management.claims, &self.management.vms);
        let page =
            page(volumes, |volume| volume.claim.to_string(), request.max_entries, &request.starting_token)?;
        let entries = page.entries.into_iter().map(|volume| {
            let status = proto::list_volumes_response::VolumeStatus {
                volume_condition: Some(condition(&volume)),
                published_node_ids: node_ids(&volume),
            };
            proto::list_volumes_response::Entry { volume: Some(about(volume)), status: Some(status) }
        });
        Ok(proto::ListVolumesResponse { entries: entries.collect(), next_token: page.next })
    }

    pub(super) fn get(
        &self,
        request: Request<proto::ControllerGetVolumeRequest>,
    ) -> Result<proto::ControllerGetVolumeResponse, Status> {
        let (request, _) = self.begin(request)?;
        let handle = &ClaimName::new(request::required("volume_id", &request.volume_id)?);
        let found = inventory::volume(&self.management.claims, &self.management.vms, handle);
        let volume =
            found.ok_or_else(|| Status::not_found(format!("there is no volume {handle} of this guest")))?;
        let status = proto::controller_get_volume_response::VolumeStatus {
            volume_condition: Some(condition(&volume)),
            published_node_ids: node_ids(&volume),
        };
        Ok(proto::ControllerGetVolumeResponse { volume: Some(about(volume)), status: Some(status) })
    }

    pub(super) fn validate(
        &self,
        request: Request<proto::ValidateVolumeCapabilitiesRequest>,
    ) -> Result<proto::ValidateVolumeCapabilitiesResponse, Status> {
        let (request, _) = self.begin(request)?;
        let handle = &ClaimName::new(request::required("volume_id", &request.volume_id)?);
        let capabilities = capability::required_all(&request.volume_capabilities)?;
        let pin = pin_of_call(&request.volume_context, &self.guest.requirements_of(handle));
        let pin = match pin {
            Ok(pin) => pin,
            Err(ambiguous) => {
                return Ok(capability::validated(request, Some(ambiguous.message().to_owned())));
            }
        };
        let requirements = |one| PvRequirements { pin: pin.clone(), ..publish::requirements(one, false) };
        let incompatible = capabilities
            .iter()
            .find_map(|one| self.management.claims.check_compatible(handle, &requirements(one)).err());
        let refused = match incompatible {
            Some(Incompatible::ClaimNotFound(..)) => {
                return Err(Status::not_found(format!("there is no volume {handle} of this guest")));
            }
            Some(differs) => Some(differs.to_string()),
            None => self.supports(&capabilities).err().map(|status| status.message().to_owned()),
        };
        Ok(capability::validated(request, refused))
    }
}

fn about(volume: Volume) -> proto::Volume {
    proto::Volume {
        volume_id: volume.claim.into(),
        capacity_bytes: i64::try_from(volume.capacity).unwrap_or(i64::MAX),
        ..proto::Volume::default()
    }
}

fn node_ids(volume: &Volume) -> Vec<String> {
    volume.vms.iter().map(ToString::to_string).collect()
}

fn condition(volume: &Volume) -> proto::VolumeCondition {
    proto::VolumeCondition {
        abnormal: volume.abnormal.is_some(),
        message: volume.abnormal.clone().unwrap_or_else(|| "the volume is healthy".to_owned()),
    }
}
