//! ControllerPublishVolume and ControllerUnpublishVolume.

use std::collections::HashMap;

use crds::names::{self, ClaimName, VmName};
use csi::capability::{Access, Capability, Mode};
use csi::locks::VolumeLocks;
use csi::{Status, capability, proto, request};
use tokio::time::Instant;
use tonic::Request;

use super::errors;
use super::pinned::{PinnedVolumes, pin_of_call};
use super::service::Controller;
use crate::compatibility::PvRequirements;
use crate::management::volume_entries::{Attach, AttachError, Attached, CommitError, DetachError};
use crate::pin::Pin;
use crate::vm_volumes::AttachedDisk;

/// What ControllerPublishVolume and ControllerUnpublishVolume need of both clusters.
pub(super) trait AttachableVolumes: PinnedVolumes {
    /// Refuses capabilities that this driver or the VM Operator does not support.
    fn supports(&self, capability: &Capability) -> Result<(), Status>;

    /// ID of the boot of a Node, if the disk of the volume may be attested blank and the Node is known.
    async fn boot_of(&self, claim: &ClaimName, vm_name: &VmName) -> Result<Option<String>, String>;

    /// Attaches a disk and waits for its identity.
    async fn attach(&self, request: &Attach, deadline: Instant) -> Result<Attached, AttachError>;

    /// Names of the VMs that have the claim in their spec, or its disk attached.
    fn vms_using(&self, claim: &ClaimName) -> Vec<VmName>;

    /// Whether the guest attaches the volume under another name of this driver than this instance serves.
    async fn is_attached_under_another_name(
        &self,
        claim: &ClaimName,
        vm_name: &VmName,
    ) -> Result<bool, String>;

    /// Detaches a disk that no VolumeAttachment requests, and waits until it is gone.
    async fn detach(&self, claim: &ClaimName, vm_name: &VmName, deadline: Instant)
    -> Result<(), DetachError>;
}

impl AttachableVolumes for Controller {
    fn supports(&self, capability: &Capability) -> Result<(), Status> {
        self.management.vm_operator.supports(std::slice::from_ref(capability))
    }

    async fn boot_of(&self, claim: &ClaimName, vm_name: &VmName) -> Result<Option<String>, String> {
        match self.management.entries.is_unused(claim) {
            true => self.guest.boot_of(vm_name).await,
            false => Ok(None),
        }
    }

    async fn attach(&self, request: &Attach, deadline: Instant) -> Result<Attached, AttachError> {
        self.management.entries.attach(request, deadline).await
    }

    fn vms_using(&self, claim: &ClaimName) -> Vec<VmName> {
        self.management.vms.using(claim)
    }

    async fn is_attached_under_another_name(
        &self,
        claim: &ClaimName,
        vm_name: &VmName,
    ) -> Result<bool, String> {
        let driver = self.legacy.as_deref().unwrap_or(names::GUEST_DRIVER);
        let elsewhere = self.guest.is_attached_under_another_name(claim, vm_name, driver).await?;
        if elsewhere {
            tracing::info!(
                volume = claim.as_str(),
                node = vm_name.as_str(),
                driver,
                "attached under another driver name: the disk stays attached"
            );
        }
        Ok(elsewhere)
    }

    async fn detach(
        &self,
        claim: &ClaimName,
        vm_name: &VmName,
        deadline: Instant,
    ) -> Result<(), DetachError> {
        let may_remove = self.k8s_attachments.may_remove(claim, vm_name);
        self.management.entries.detach(claim, vm_name, may_remove, deadline).await
    }
}

impl Controller {
    pub(super) async fn publish(
        &self,
        request: Request<proto::ControllerPublishVolumeRequest>,
    ) -> Result<proto::ControllerPublishVolumeResponse, Status> {
        let (request, deadline) = self.begin(request)?;
        publish(self, &self.locks, &request, deadline).await
    }

    pub(super) async fn unpublish(
        &self,
        request: Request<proto::ControllerUnpublishVolumeRequest>,
    ) -> Result<proto::ControllerUnpublishVolumeResponse, Status> {
        let (request, deadline) = self.begin(request)?;
        unpublish(self, &self.locks, &request, deadline).await
    }
}

pub(super) async fn publish(
    volumes: &impl AttachableVolumes,
    locks: &VolumeLocks,
    request: &proto::ControllerPublishVolumeRequest,
    deadline: Instant,
) -> Result<proto::ControllerPublishVolumeResponse, Status> {
    let volume = ClaimName::new(request::required("volume_id", &request.volume_id)?);
    let node = VmName::new(request::required("node_id", &request.node_id)?);
    let capability = capability::required(request.volume_capability.as_ref())?;
    volumes.supports(&capability)?;
    let _guard = locks.acquire(&format!("{volume} on {node}"))?;
    let named = volumes.requirements_of(&volume);
    let pin = pin_of_call(&request.volume_context, &named)?;
    // A first attach without it would use up the attestation.
    let boot = volumes.boot_of(&volume, &node).await.map_err(Status::unavailable)?;
    let attach = Attach {
        claim: volume,
        vm_name: node,
        read_only: request.readonly || capability.mode.is_read_only(),
        exclusive: !capability.mode.is_multi_node(),
        boot,
        requirements: PvRequirements { pin, ..requirements(&capability, request.readonly) },
        volumes: named,
    };
    let attached = attach_with_current_cache(volumes, &attach, deadline).await;
    let attached = attached.map_err(|error| errors::attach(&error))?;
    let publish_context = context(attached, &attach.requirements.pin);
    Ok(proto::ControllerPublishVolumeResponse { publish_context })
}

/// Before it refuses, waits for a current cache: another replica may have answered the previous call.
async fn attach_with_current_cache(
    volumes: &impl AttachableVolumes,
    attach: &Attach,
    deadline: Instant,
) -> Result<Attached, AttachError> {
    let refusal = match volumes.attach(attach, deadline).await {
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
    volumes.refresh(claim, &vms, deadline).await.map_err(failed)?;
    volumes.attach(attach, deadline).await
}

pub(super) async fn unpublish(
    volumes: &impl AttachableVolumes,
    locks: &VolumeLocks,
    request: &proto::ControllerUnpublishVolumeRequest,
    deadline: Instant,
) -> Result<proto::ControllerUnpublishVolumeResponse, Status> {
    let volume = &ClaimName::new(request::required("volume_id", &request.volume_id)?);
    // Without a node, the volume is detached from all nodes (CSI specification, ControllerUnpublishVolume).
    let nodes = match request.node_id.is_empty() {
        true => volumes.vms_using(volume),
        false => vec![VmName::new(request::required("node_id", &request.node_id)?)],
    };
    for node in nodes {
        let _guard = locks.acquire(&format!("{volume} on {node}"))?;
        let elsewhere = volumes.is_attached_under_another_name(volume, &node).await;
        if elsewhere.map_err(Status::unavailable)? {
            continue;
        }
        let detached = volumes.detach(volume, &node, deadline).await;
        detached.map_err(|error| errors::detach(&error))?;
    }
    Ok(proto::ControllerUnpublishVolumeResponse {})
}

/// Publish context for the node plugin: the identity of the disk, and whether it may be formatted. It is stored in the
/// guest's VolumeAttachment, which pods cannot read.
fn context(Attached { disk, volume, shared, boot }: Attached, pin: &Pin) -> HashMap<String, String> {
    let AttachedDisk { uuid, blank_attestation, format_token } = disk;
    let entries = [
        (names::CONTEXT_DISK_UUID, Some(uuid)),
        (names::CONTEXT_MANAGEMENT_VOLUME, Some(volume)),
        (names::CONTEXT_OVERRIDDEN_PIN, pin.overridden().map(str::to_owned)),
        (names::CONTEXT_BLANK_ATTESTATION, blank_attestation),
        (names::CONTEXT_BLANK_BOOT, boot),
        (names::CONTEXT_FORMAT_TOKEN, format_token),
        (names::CONTEXT_SHARED, shared.then(|| "true".to_owned())),
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

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;
    use crate::controller::testing::{InMemory, Outcomes, deadline};
    use crate::management::volume_entries::KeepReason;

    fn attached() -> Attached {
        let disk = AttachedDisk {
            uuid: "u".to_owned(),
            blank_attestation: None,
            format_token: Some("t".to_owned()),
        };
        Attached { disk, volume: "pv-1".to_owned(), shared: false, boot: None }
    }

    fn request() -> proto::ControllerPublishVolumeRequest {
        use proto::volume_capability::{AccessMode, AccessType, MountVolume, access_mode};
        let mode = AccessMode { mode: access_mode::Mode::SingleNodeWriter as i32 };
        let capability = proto::VolumeCapability {
            access_mode: Some(mode),
            access_type: Some(AccessType::Mount(MountVolume::default())),
        };
        proto::ControllerPublishVolumeRequest {
            volume_id: "c".to_owned(),
            node_id: "vm-1".to_owned(),
            volume_capability: Some(capability),
            ..Default::default()
        }
    }

    async fn published(
        outcomes: impl IntoIterator<Item = Result<Attached, AttachError>>,
    ) -> (Result<HashMap<String, String>, Status>, InMemory) {
        let volumes = InMemory { attaches: Outcomes::of(outcomes), ..InMemory::default() };
        let answer = publish(&volumes, &VolumeLocks::default(), &request(), deadline()).await;
        (answer.map(|answer| answer.publish_context), volumes)
    }

    async fn unpublished(volumes: &InMemory, node: &str) -> Result<(), Status> {
        let request = proto::ControllerUnpublishVolumeRequest {
            volume_id: "c".to_owned(),
            node_id: node.to_owned(),
            ..Default::default()
        };
        unpublish(volumes, &VolumeLocks::default(), &request, deadline()).await.map(drop)
    }

    #[tokio::test]
    async fn the_context_has_what_is_known_of_the_disk() {
        let (context, _) = published([Ok(attached())]).await;
        let known = [
            (names::CONTEXT_DISK_UUID, "u"),
            (names::CONTEXT_MANAGEMENT_VOLUME, "pv-1"),
            (names::CONTEXT_FORMAT_TOKEN, "t"),
        ];
        let expected = known.map(|(key, value)| (key.to_owned(), value.to_owned()));
        assert_eq!(context.unwrap(), HashMap::from(expected));
    }

    #[tokio::test]
    async fn an_attestation_has_the_boot_for_which_it_holds() {
        let blank = AttachedDisk { blank_attestation: Some("a".to_owned()), ..attached().disk };
        let new = Attached { disk: blank, boot: Some("b".to_owned()), ..attached() };
        let context = published([Ok(new)]).await.0.unwrap();
        assert_eq!(context[names::CONTEXT_BLANK_ATTESTATION], "a");
        assert_eq!(context[names::CONTEXT_BLANK_BOOT], "b");
    }

    #[tokio::test]
    async fn a_new_disk_is_not_attached_while_the_boot_of_its_node_is_unknown() {
        let volumes = InMemory { boot: Err("no answer".to_owned()), ..InMemory::default() };
        let answer = publish(&volumes, &VolumeLocks::default(), &request(), deadline()).await;
        assert_eq!(answer.unwrap_err().code(), Code::Unavailable);
        assert_eq!(volumes.attaches.taken(), 0);
    }

    #[tokio::test]
    async fn a_refusal_by_a_late_cache_is_not_final() {
        let (claim, other) = (ClaimName::new("c"), VmName::new("vm-2"));
        let in_use = AttachError::InUse {
            claim: claim.clone(),
            vm_name: other.clone(),
            holder: String::new(),
            detail: String::new(),
        };
        let here = VmName::new("vm-1");
        for (refusal, refreshed) in [
            (AttachError::VmNotFound(here.clone()), vec![here.clone()]),
            (AttachError::NotBound(claim), vec![here.clone()]),
            (in_use, vec![here.clone(), other]),
        ] {
            let (answer, volumes) = published([Err(refusal), Ok(attached())]).await;
            assert!(answer.is_ok());
            assert_eq!(volumes.refreshed(), [refreshed]);
        }
    }

    #[tokio::test]
    async fn a_refusal_that_a_current_cache_confirms_is_returned() {
        let missing = || Err(AttachError::VmNotFound(VmName::new("vm-1")));
        let (answer, _) = published([missing(), missing()]).await;
        assert_eq!(answer.unwrap_err().code(), Code::NotFound);
    }

    #[tokio::test]
    async fn an_attach_that_continues_is_not_repeated() {
        let (claim, vm_name) = (ClaimName::new("c"), VmName::new("vm-1"));
        let late = AttachError::Deadline { claim, vm_name, detail: String::new() };
        let (answer, volumes) = published([Err(late)]).await;
        assert_eq!(answer.unwrap_err().code(), Code::DeadlineExceeded);
        assert!(volumes.refreshed().is_empty());
    }

    #[tokio::test]
    async fn a_volume_with_two_pins_is_not_attached() {
        let named = |name: &str, pin: &str| PvRequirements {
            volume: Some(name.to_owned()),
            pin: Pin { attribute: None, annotation: Some(pin.to_owned()) },
            ..PvRequirements::default()
        };
        let requirements = vec![named("a", "one"), named("b", "other")];
        let volumes = InMemory { requirements, ..InMemory::default() };
        let answer = publish(&volumes, &VolumeLocks::default(), &request(), deadline()).await;
        assert_eq!(answer.unwrap_err().code(), Code::FailedPrecondition);
        assert_eq!(volumes.attaches.taken(), 0);
    }

    #[tokio::test]
    async fn without_a_node_a_volume_is_detached_from_all_vms() {
        let using = vec![VmName::new("vm-1"), VmName::new("vm-2")];
        let volumes = InMemory { using, detaches: Outcomes::of([Ok(()), Ok(())]), ..InMemory::default() };
        unpublished(&volumes, "").await.unwrap();
        assert_eq!(volumes.detaches.taken(), 2);
    }

    #[tokio::test]
    async fn a_disk_that_another_driver_name_attached_stays() {
        let volumes = InMemory { attached_elsewhere: Ok(true), ..InMemory::default() };
        unpublished(&volumes, "vm-1").await.unwrap();
        assert_eq!(volumes.detaches.taken(), 0);
        let unknown = InMemory { attached_elsewhere: Err("no answer".to_owned()), ..InMemory::default() };
        assert_eq!(unpublished(&unknown, "vm-1").await.unwrap_err().code(), Code::Unavailable);
    }

    #[tokio::test]
    async fn an_outdated_detach_is_final_and_an_unchecked_one_is_not() {
        for (reason, code) in [
            (KeepReason::Requested("csi-1".to_owned()), Code::FailedPrecondition),
            (KeepReason::Unknown("no answer".to_owned()), Code::Unavailable),
        ] {
            let (claim, vm_name) = (ClaimName::new("c"), VmName::new("vm-1"));
            let kept = DetachError::Kept { claim, vm_name, reason };
            let volumes = InMemory { detaches: Outcomes::of([Err(kept)]), ..InMemory::default() };
            assert_eq!(unpublished(&volumes, "vm-1").await.unwrap_err().code(), code);
        }
    }
}
