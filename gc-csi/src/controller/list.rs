//! What the driver says of volumes that are there: ListVolumes, ControllerGetVolume and ValidateVolumeCapabilities. All
//! of it is from what the informers show: csi-attacher asks for the whole list every minute.

use csi::page::page;
use csi::{Status, capability, proto, request};
use tonic::Request;

use super::publish;
use super::service::Controller;
use crate::fit::{Asked, Misfit};
use crate::management::inventory::Volume;

impl Controller {
    pub(super) fn list(
        &self,
        request: Request<proto::ListVolumesRequest>,
    ) -> Result<proto::ListVolumesResponse, Status> {
        let (request, _) = self.begin(request)?;
        let volumes = self.management.volumes();
        let page =
            page(volumes, |volume| volume.claim.clone(), request.max_entries, &request.starting_token)?;
        let entries = page.entries.into_iter().map(|volume| {
            let status = proto::list_volumes_response::VolumeStatus {
                volume_condition: Some(condition(&volume)),
                published_node_ids: volume.machines.clone(),
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
        let handle = request::required("volume_id", &request.volume_id)?;
        let found = self.management.volume(handle);
        let volume =
            found.ok_or_else(|| Status::not_found(format!("there is no volume {handle} of this guest")))?;
        let status = proto::controller_get_volume_response::VolumeStatus {
            volume_condition: Some(condition(&volume)),
            published_node_ids: volume.machines.clone(),
        };
        Ok(proto::ControllerGetVolumeResponse { volume: Some(about(volume)), status: Some(status) })
    }

    pub(super) fn validate(
        &self,
        request: Request<proto::ValidateVolumeCapabilitiesRequest>,
    ) -> Result<proto::ValidateVolumeCapabilitiesResponse, Status> {
        let (request, _) = self.begin(request)?;
        let handle = request::required("volume_id", &request.volume_id)?;
        let wanted = capability::required_all(&request.volume_capabilities)?;
        let pin = self.pin(&request.volume_context, &self.guest.asked_of(handle));
        let pin = match pin {
            Ok(pin) => pin,
            Err(ambiguous) => {
                return Ok(capability::validated(request, Some(ambiguous.message().to_owned())));
            }
        };
        let asked = |one| Asked { pin: pin.clone(), ..publish::asked(one, false) };
        let misfit = wanted.iter().find_map(|one| self.management.fits(handle, &asked(one)).err());
        let refused = match misfit {
            Some(Misfit::Unknown(..)) => {
                return Err(Status::not_found(format!("there is no volume {handle} of this guest")));
            }
            Some(differs) => Some(differs.to_string()),
            None => self.supports(&wanted).err().map(|status| status.message().to_owned()),
        };
        Ok(capability::validated(request, refused))
    }
}

fn about(volume: Volume) -> proto::Volume {
    proto::Volume {
        volume_id: volume.claim,
        capacity_bytes: i64::try_from(volume.capacity).unwrap_or(i64::MAX),
        ..proto::Volume::default()
    }
}

fn condition(volume: &Volume) -> proto::VolumeCondition {
    proto::VolumeCondition {
        abnormal: volume.illness.is_some(),
        message: volume.illness.clone().unwrap_or_else(|| "the volume is well".to_owned()),
    }
}
