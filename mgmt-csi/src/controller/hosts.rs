//! ControllerPublishVolume and ControllerUnpublishVolume: volumes on hosts of the management cluster, for pods that run
//! there. A host is a node of the storage infra like a VM, so the rules of one writer hold between them.
//!
//! The request has no ID of its own, and the storage infra never reuses one. So each attachment gets a new ID, and a repeated
//! request finds the attachment by its volume and node.

use std::collections::HashMap;

use crds::names::{CONTEXT_BLANK_ATTESTATION, CONTEXT_DISK_UUID, CONTEXT_FORMAT_TOKEN};
use csi::capability::{self, Capability, Mode};
use csi::proto;
use csi::request::required;
use host_links::HostId;
use infra_api::{
    Access, Attachment, AttachmentId, AttachmentSpec, AttachmentState, Labels, NodeSpec, Volume, VolumeId,
};
use tokio::time::Instant;
use tonic::{Code, Status};
use uuid::Uuid;

use super::{Controller, access};
use crate::infra::{AttachError, AttachedDisk, RegisterError, host_attachment_id, is_host_attachment};

/// Label of a node that is a host: its kind.
const LABEL_KIND: &str = "nestor.dev/node-kind";
const KIND_HOST: &str = "host";

/// Text of an attach that a host cannot do. The complete one names pools and images.
const NOT_FROM_HERE: &str = "the host of the pod cannot attach the volume: it does not reach the pool, or the pool has no files, as \
                             those of the engine rbd; the log of mgmt-csi has the details for the platform team";

/// What is there for a requested attachment.
#[derive(Debug, PartialEq, Eq)]
enum Existing {
    /// Nothing.
    None,
    /// The same attachment.
    Same(AttachmentId),
    /// One that differs in its mode.
    Different(AttachmentId),
    /// One that is being detached.
    Detaching(AttachmentId),
}

impl Controller {
    /// Fails if this driver does not attach volumes to hosts.
    pub(super) fn check_on_hosts(&self) -> Result<(), Status> {
        if self.on_hosts {
            return Ok(());
        }
        Err(Status::unimplemented(
            "volumes for pods of the management cluster are disabled: see nodeService.enabled of the chart nestor-management",
        ))
    }

    /// Attaches a volume to a host. Idempotent.
    pub(super) async fn publish(
        &self,
        request: &proto::ControllerPublishVolumeRequest,
        deadline: Instant,
    ) -> Result<HashMap<String, String>, Status> {
        let handle = required("volume_id", &request.volume_id)?;
        let node_id = required("node_id", &request.node_id)?;
        let capability = capability::required(request.volume_capability.as_ref())?;
        let volume = self.find(handle, deadline).await?;
        let host = HostId::parse(node_id).ok_or_else(|| no_host(node_id))?;
        let spec = spec(&volume, host.node, &capability, request.readonly)?;
        let _guard = self.locks.acquire(volume.id.as_str())?;
        self.register_host(&host, deadline).await?;
        let attachments = self.infra.attachments_of(&volume.id, deadline).await?;
        let id = match existing(&attachments, &spec) {
            Existing::None => host_attachment_id(Uuid::new_v4()),
            Existing::Same(id) => id,
            Existing::Different(_) => return Err(attached_differently(&spec, &host)),
            Existing::Detaching(id) => {
                return Err(Status::aborted(format!(
                    "volume {} is still being detached from host {} ({id})",
                    spec.volume, host.name
                )));
            }
        };
        let wait = deadline.saturating_duration_since(Instant::now());
        let disk = self.infra.attach(&id, &spec, None, wait).await.map_err(attach_status)?;
        tracing::info!(volume = %spec.volume, host = host.name, node = %host.node, attachment = %id, "attached to a host");
        Ok(context(&disk))
    }

    /// Detaches a volume from a host, or from all hosts. Idempotent. VMs keep the volume.
    pub(super) async fn unpublish(
        &self,
        request: &proto::ControllerUnpublishVolumeRequest,
        deadline: Instant,
    ) -> Result<(), Status> {
        let handle = required("volume_id", &request.volume_id)?;
        // A volume with an invalid ID does not exist, and a host with an invalid ID has no volume.
        let Ok(volume) = VolumeId::new(handle) else { return Ok(()) };
        let host = match request.node_id.as_str() {
            "" => None,
            id => match HostId::parse(id) {
                Some(host) => Some(host.node),
                None => return Ok(()),
            },
        };
        let _guard = self.locks.acquire(volume.as_str())?;
        for id in on_hosts(&self.infra.attachments_of(&volume, deadline).await?, host) {
            let wait = deadline.saturating_duration_since(Instant::now());
            self.infra.detach(&id, false, wait).await.map_err(|error| Status::from(error.0))?;
            tracing::info!(%volume, attachment = %id, "detached from a host");
        }
        Ok(())
    }

    /// Whether kubelet of a host must expand the filesystem of a volume that was expanded. The filesystem of a volume that no
    /// host has is expanded when it is mounted.
    pub(super) async fn needs_node_expansion(
        &self,
        volume: &VolumeId,
        capability: Option<&proto::VolumeCapability>,
        deadline: Instant,
    ) -> Result<bool, Status> {
        let is_block = capability
            .map(Capability::try_from)
            .transpose()?
            .is_some_and(|capability| capability.access == capability::Access::Block);
        if !self.on_hosts || is_block {
            return Ok(false);
        }
        Ok(!on_hosts(&self.infra.attachments_of(volume, deadline).await?, None).is_empty())
    }

    /// Registers a host with the storage infra, which must run there. A VM is not a host.
    async fn register_host(&self, host: &HostId, deadline: Instant) -> Result<(), Status> {
        let labels: Labels = [(LABEL_KIND.to_owned(), KIND_HOST.to_owned())].into();
        match self.infra.get_node(host.node, deadline).await? {
            Some(node) if node.labels.get(LABEL_KIND).is_some_and(|kind| kind == KIND_HOST) => return Ok(()),
            Some(node) => {
                return Err(Status::failed_precondition(format!(
                    "node {} ({}) of the storage infra is not a host of the management cluster; nothing was attached",
                    node.name, node.uuid
                )));
            }
            None => {}
        }
        let spec = NodeSpec { name: host.name.clone(), hypervisor: String::new(), zone: None, labels };
        match self.infra.register_node(host.node, &spec, deadline).await {
            Ok(_) => Ok(()),
            Err(RegisterError::NotFound(_)) => Err(no_host(&host.to_string())),
            Err(RegisterError::Refused(text)) => Err(text.status(Code::FailedPrecondition)),
            Err(RegisterError::Indeterminate(inner)) => Err(inner.into()),
        }
    }
}

fn no_host(id: &str) -> Status {
    Status::not_found(format!(
        "the storage infra has no host {id:?}: it must run on that host, with --hypervisor NAME=host:DIR and the DIR of mgmt-csi-node"
    ))
}

/// The requested attachment.
fn spec(
    volume: &Volume,
    node: Uuid,
    capability: &Capability,
    read_only: bool,
) -> Result<AttachmentSpec, Status> {
    if let Some(why) = access::refusal(std::slice::from_ref(capability), volume.shareable) {
        return Err(Status::invalid_argument(why));
    }
    let access = match capability.mode {
        Mode::MultiNodeReaderOnly => Access::MultiNodeReadOnly,
        Mode::MultiNodeMultiWriter => Access::MultiNode,
        Mode::SingleNodeWriter
        | Mode::SingleNodeSingleWriter
        | Mode::SingleNodeMultiWriter
        | Mode::SingleNodeReaderOnly
        | Mode::MultiNodeSingleWriter => Access::SingleNode,
    };
    let read_only = read_only || capability.mode.is_read_only();
    Ok(AttachmentSpec { volume: volume.id.clone(), node, read_only, access })
}

/// The attachment of the requested volume to the requested host.
fn existing(attachments: &[Attachment], spec: &AttachmentSpec) -> Existing {
    let here = |one: &&Attachment| one.node == spec.node && is_host_attachment(&one.id);
    let Some(found) = attachments.iter().find(here) else { return Existing::None };
    let id = found.id.clone();
    match found.state {
        AttachmentState::Detaching => Existing::Detaching(id),
        _ if found.spec() == *spec => Existing::Same(id),
        _ => Existing::Different(id),
    }
}

/// The attachments to a host, or to all hosts.
fn on_hosts(attachments: &[Attachment], host: Option<Uuid>) -> Vec<AttachmentId> {
    let chosen = |one: &&Attachment| is_host_attachment(&one.id) && host.is_none_or(|host| one.node == host);
    attachments.iter().filter(chosen).map(|one| one.id.clone()).collect()
}

/// The specification's code for a volume that is published to the node in another way.
fn attached_differently(spec: &AttachmentSpec, host: &HostId) -> Status {
    Status::already_exists(format!(
        "volume {} is attached to host {} in another way than {}{}; detach it first",
        spec.volume,
        host.name,
        spec.access,
        if spec.read_only { ", read-only" } else { "" }
    ))
}

/// What the node plugin needs to find the disk, and to format it if it was never written.
fn context(disk: &AttachedDisk) -> HashMap<String, String> {
    let blank = disk.blank_attestation.map(|id| (CONTEXT_BLANK_ATTESTATION, id.to_string()));
    let token = disk.format_token.map(|token| (CONTEXT_FORMAT_TOKEN, token.reveal()));
    let all = [Some((CONTEXT_DISK_UUID, disk.uuid.to_string())), blank, token];
    all.into_iter().flatten().map(|(key, value)| (key.to_owned(), value)).collect()
}

/// The answer to csi-attacher. It has the guest's text: events of a pod in a guest's namespace repeat it.
fn attach_status(error: AttachError) -> Status {
    let code = match &error {
        AttachError::VolumeNotFound(_) | AttachError::NodeNotFound(_) => Code::NotFound,
        // The specification's code for a volume that is published to another node.
        AttachError::InUse { .. } => Code::FailedPrecondition,
        AttachError::NodeNotRunning(_) | AttachError::NotReachable(_) | AttachError::Suspended(_) => {
            Code::FailedPrecondition
        }
        AttachError::TooManyDisks(_) => Code::ResourceExhausted,
        AttachError::Invalid(_) => Code::InvalidArgument,
        // Another request was faster; the next one finds what it did.
        AttachError::Conflict(_) | AttachError::IdDeleted(_) => Code::Aborted,
        AttachError::Indeterminate(inner) => return inner.clone().into(),
    };
    let message = error.message().clone();
    match error {
        AttachError::NotReachable(_) => message.with_guest(NOT_FROM_HERE).status(code),
        _ => message.status(code),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: Uuid = Uuid::from_u128(1);
    const OTHER: Uuid = Uuid::from_u128(2);

    fn attachment(id: AttachmentId, node: Uuid, state: AttachmentState) -> Attachment {
        Attachment {
            id,
            volume: VolumeId::new("v").unwrap(),
            node,
            read_only: false,
            access: Access::SingleNode,
            state,
            disk_uuid: Uuid::from_u128(9),
            blank_attestation: None,
            format_token: None,
            message: None,
            created_at: String::new(),
        }
    }

    fn of_host(number: u128, node: Uuid, state: AttachmentState) -> Attachment {
        attachment(host_attachment_id(Uuid::from_u128(number)), node, state)
    }

    fn of_vm() -> Attachment {
        let id = AttachmentId::new(format!("guest.vm.{OTHER}")).unwrap();
        attachment(id, HOST, AttachmentState::Attached)
    }

    #[test]
    fn a_repeated_request_finds_its_attachment_and_no_other() {
        let attached = of_host(5, HOST, AttachmentState::Attached);
        let same = attached.spec();
        assert_eq!(existing(&[], &same), Existing::None);
        assert_eq!(existing(&[of_vm(), of_host(6, OTHER, AttachmentState::Attached)], &same), Existing::None);
        let id = attached.id.clone();
        for state in [AttachmentState::Attached, AttachmentState::Attaching] {
            let found = [Attachment { state, ..attached.clone() }];
            assert_eq!(existing(&found, &same), Existing::Same(id.clone()));
        }
        let read_only = AttachmentSpec { read_only: true, ..same.clone() };
        assert_eq!(existing(&[attached], &read_only), Existing::Different(id.clone()));
        let leaving = [of_host(5, HOST, AttachmentState::Detaching)];
        assert_eq!(existing(&leaving, &same), Existing::Detaching(id));
    }

    #[test]
    fn only_attachments_to_hosts_are_detached() {
        let (here, there) =
            (of_host(5, HOST, AttachmentState::Attached), of_host(6, OTHER, AttachmentState::Attached));
        let all = [of_vm(), here.clone(), there.clone()];
        assert_eq!(on_hosts(&all, Some(HOST)), std::slice::from_ref(&here.id));
        assert_eq!(on_hosts(&all, None), [here.id, there.id]);
        assert_eq!(on_hosts(&[of_vm()], None), []);
    }

    #[test]
    fn the_context_has_what_permits_a_format_only_if_the_storage_infra_attests_it() {
        let disk = AttachedDisk { uuid: HOST, blank_attestation: None, format_token: None };
        assert_eq!(context(&disk), HashMap::from([(CONTEXT_DISK_UUID.to_owned(), HOST.to_string())]));
        let token = infra_api::FormatToken::random();
        let attested = AttachedDisk { blank_attestation: Some(OTHER), format_token: Some(token), ..disk };
        let context = context(&attested);
        assert_eq!(context[CONTEXT_BLANK_ATTESTATION], OTHER.to_string());
        assert_eq!(context[CONTEXT_FORMAT_TOKEN], token.reveal());
    }
}
