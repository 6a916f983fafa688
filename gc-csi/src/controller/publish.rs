//! ControllerPublishVolume and ControllerUnpublishVolume.

use std::collections::HashMap;

use crds::names;
use csi::capability::{Access, Capability, Mode};
use csi::{Status, capability, proto, request};
use tokio::time::Instant;
use tonic::Request;

use super::errors;
use super::service::Controller;
use crate::compatibility::PvRequirements;
use crate::management::volume_entries::{Attach, AttachError, Attached, CommitError};
use crate::names::{ClaimName, VmName};
use crate::pin::Pin;
use crate::vm_volumes::AttachedDisk;

impl Controller {
    pub(super) async fn publish(
        &self,
        request: Request<proto::ControllerPublishVolumeRequest>,
    ) -> Result<proto::ControllerPublishVolumeResponse, Status> {
        let (request, deadline) = self.begin(request)?;
        let volume = &ClaimName::new(request::required("volume_id", &request.volume_id)?);
        let node = VmName::new(request::required("node_id", &request.node_id)?);
        let capability = capability::required(request.volume_capability.as_ref())?;
        self.supports(std::slice::from_ref(&capability))?;
        let _guard = self.locks.acquire(&format!("{volume} on {node}"))?;
        let volumes = self.guest.requirements_of(volume);
        let pin = self.pin(&request.volume_context, &volumes)?;
        let attach = Attach {
            claim: volume.clone(),
            vm_name: node,
            read_only: request.readonly || capability.mode.is_read_only(),
            exclusive: !capability.mode.is_multi_node(),
            requirements: PvRequirements { pin, ..requirements(&capability, request.readonly) },
            volumes,
        };
        let attached = self.attach(&attach, deadline).await.map_err(|error| errors::attach(&error))?;
        let publish_context = context(attached, &attach.requirements.pin);
        Ok(proto::ControllerPublishVolumeResponse { publish_context })
    }

    /// Before it refuses, waits for a current cache: another replica may have answered the previous call.
    async fn attach(&self, attach: &Attach, deadline: Instant) -> Result<Attached, AttachError> {
        let refusal = match self.management.entries.attach(attach, deadline).await {
            Ok(disk) => return Ok(disk),
            Err(refusal) => refusal,
        };
        let Attach { claim, vm_name, .. } = attach;
        let vms = match &refusal {
            AttachError::VmNotFound(_) | AttachError::Incompatible(_) | AttachError::NotBound(_) => {
                vec![vm_name]
            }
            AttachError::InUse { vm_name: other, .. } => vec![vm_name, other],
            _ => return Err(refusal),
        };
        let failed = |source| AttachError::Commit(CommitError::Api { vm_name: vm_name.clone(), source });
        self.management.entries.refresh(claim, &vms, deadline).await.map_err(failed)?;
        self.management.entries.attach(attach, deadline).await
    }

    pub(super) async fn unpublish(
        &self,
        request: Request<proto::ControllerUnpublishVolumeRequest>,
    ) -> Result<proto::ControllerUnpublishVolumeResponse, Status> {
        let (request, deadline) = self.begin(request)?;
        let volume = &ClaimName::new(request::required("volume_id", &request.volume_id)?);
        // Without a node, the volume is detached from all nodes (CSI specification, ControllerUnpublishVolume).
        let nodes = match request.node_id.is_empty() {
            true => self.management.vms.using(volume),
            false => vec![VmName::new(request::required("node_id", &request.node_id)?)],
        };
        for node in nodes {
            let _guard = self.locks.acquire(&format!("{volume} on {node}"))?;
            let driver = self.legacy.as_deref().unwrap_or(names::GUEST_DRIVER);
            let elsewhere = self.guest.is_attached_under_another_name(volume, &node, driver).await;
            if elsewhere.map_err(Status::unavailable)? {
                tracing::info!(
                    volume = volume.as_str(),
                    node = node.as_str(),
                    driver,
                    "attached under another driver name: the disk stays attached"
                );
                continue;
            }
            let may_remove = self.k8s_attachments.may_remove(volume, &node);
            let detached = self.management.entries.detach(volume, &node, may_remove, deadline).await;
            detached.map_err(|error| errors::detach(&error))?;
        }
        Ok(proto::ControllerUnpublishVolumeResponse {})
    }
}

/// Publish context for the node plugin: the identity of the disk, and whether it may be formatted. It is stored in the
/// guest's VolumeAttachment, which pods cannot read.
fn context(Attached { disk, volume }: Attached, pin: &Pin) -> HashMap<String, String> {
    let AttachedDisk { uuid, blank_attestation, format_token } = disk;
    let entries = [
        (names::CONTEXT_DISK_UUID, Some(uuid)),
        (names::CONTEXT_MANAGEMENT_VOLUME, Some(volume)),
        (names::CONTEXT_OVERRIDDEN_PIN, pin.overridden().map(str::to_owned)),
        (names::CONTEXT_BLANK_ATTESTATION, blank_attestation),
        (names::CONTEXT_FORMAT_TOKEN, format_token),
    ];
    entries.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect()
}

/// Requirements of a call on the management claim.
pub(super) fn requirements(capability: &Capability, read_only: bool) -> PvRequirements {
    // A single reader is compatible with every access mode.
    let modes = match capability.mode {
        Mode::SingleNodeReaderOnly => Vec::new(),
        mode => vec![mode.kubernetes_name().to_owned()],
    };
    let read_only = read_only || capability.mode.is_read_only();
    PvRequirements {
        block: capability.access == Access::Block,
        modes,
        read_only,
        ..PvRequirements::default()
    }
}
