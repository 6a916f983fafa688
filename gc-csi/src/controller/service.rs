//! CSI Controller calls, translated to and from the management room. No logic of its own beyond what the
//! protocol asks for.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use crds::names;
use csi::capability::{self, Access, Capability, Mode};
use csi::locks::VolumeLocks;
use csi::proto::{self, controller_service_capability::rpc::Type as Rpc};
use csi::request::{self, Size};
use csi::{Status, deadline};
use kube_kit::informer::Key;
use tokio::time::Instant;
use tonic::{Request, Response};

use super::errors;
use crate::guest::Guest;
use crate::management::Management;
use crate::management::claims::{self, Abandoned, NewClaim};
use crate::management::disks::Attach;

/// Size of a volume for which none was asked: 1 GiB, as most drivers give.
const DEFAULT_BYTES: u64 = 1 << 30;

/// How long an object is waited for that csi-provisioner, or whoever made it, saw before this process did.
const BEHIND: Duration = Duration::from_secs(2);

/// Keys that csi-provisioner adds to the StorageClass's parameters.
const EXTRA_PREFIX: &str = "csi.storage.k8s.io/";

/// Serves the Controller service.
pub(super) struct Controller {
    management: Management,
    guest: Guest,
    refuse_mismatch: bool,
    default_timeout: Duration,
    locks: VolumeLocks,
}

impl Controller {
    pub(super) fn new(
        management: Management,
        guest: Guest,
        refuse_mismatch: bool,
        default_timeout: Duration,
    ) -> Self {
        Self { management, guest, refuse_mismatch, default_timeout, locks: VolumeLocks::default() }
    }

    /// Starts a call: nothing is answered before both clusters were read once.
    fn begin<T>(&self, request: Request<T>) -> Result<(T, Instant), Status> {
        let deadline = deadline::of(&request, self.default_timeout);
        if !self.management.is_synced() || !self.guest.is_synced() {
            return Err(Status::unavailable(
                "the driver is still reading the clusters' state: try again in a moment",
            ));
        }
        Ok((request.into_inner(), deadline))
    }

    /// Annotations that tell people in the management cluster whom a claim is for.
    async fn annotations(
        &self,
        csi_name: &str,
        parameters: &HashMap<String, String>,
        management_class: &str,
        deadline: Instant,
    ) -> Result<BTreeMap<String, String>, Status> {
        let extra = |key: &str| parameters.get(&format!("{EXTRA_PREFIX}{key}")).cloned();
        let mut annotations = BTreeMap::new();
        if let (Some(name), Some(namespace)) = (extra("pvc/name"), extra("pvc/namespace")) {
            let claim = Key::new(namespace.clone(), name.clone());
            let behind = deadline.min(Instant::now() + BEHIND);
            match self.guest.class_of(&claim, csi_name, behind).await {
                Some(class) if class.is_empty() => {}
                Some(class) => {
                    self.check_policies(&class, management_class, behind).await?;
                    annotations.insert(names::ANNOTATION_GUEST_STORAGE_CLASS.to_owned(), class);
                }
                None => self.give_up(csi_name, &claim, deadline).await?,
            }
            annotations.insert(names::ANNOTATION_GUEST_PVC.to_owned(), name);
            annotations.insert(names::ANNOTATION_GUEST_NAMESPACE.to_owned(), namespace);
        }
        if let Some(volume) = extra("pv/name") {
            annotations.insert(names::ANNOTATION_GUEST_PV.to_owned(), volume);
        }
        Ok(annotations)
    }

    /// Ends the making of a volume whose guest claim is gone: csi-provisioner asks for it until it hears a
    /// final code, and nothing of it may stay below. One that is bound already is given out all the same,
    /// since csi-provisioner then deletes it.
    async fn give_up(&self, csi_name: &str, claim: &Key, deadline: Instant) -> Result<(), Status> {
        match self.management.abandon_claim(csi_name, deadline).await {
            Ok(Abandoned::Bound) => Ok(()),
            Ok(Abandoned::Gone) => Err(Status::not_found(format!(
                "there is no PersistentVolumeClaim {claim} in the guest any more for which volume {csi_name} was to \
                 be made: nothing of it is left in the management cluster"
            ))),
            Err(error) => Err(errors::delete(&error)),
        }
    }

    /// Both tiers must agree on what becomes of a volume when its claim goes.
    async fn check_policies(
        &self,
        guest_class: &str,
        management_class: &str,
        behind: Instant,
    ) -> Result<(), Status> {
        let guest = self.guest.reclaim_policy(guest_class, behind).await;
        let management = self.management.reclaim_policy(management_class, behind).await;
        let (Some(guest), Some(management)) = (guest, management) else { return Ok(()) };
        if guest == management {
            return Ok(());
        }
        let text = format!(
            "StorageClass {guest_class} of the guest says reclaimPolicy {guest}, but its management StorageClass \
             {management_class} says {management}: use classes with the same policy"
        );
        if self.refuse_mismatch {
            return Err(Status::failed_precondition(text));
        }
        tracing::warn!("{text}");
        Ok(())
    }
}

#[tonic::async_trait]
impl proto::controller_server::Controller for Controller {
    async fn create_volume(
        &self,
        request: Request<proto::CreateVolumeRequest>,
    ) -> Result<Response<proto::CreateVolumeResponse>, Status> {
        let (request, deadline) = self.begin(request)?;
        // Any name is taken: it is hashed into the management claim's.
        if request.name.is_empty() {
            return Err(Status::invalid_argument("name is missing in the request"));
        }
        let wanted = capability::required_all(&request.volume_capabilities)?;
        supported(&wanted)?;
        if request.volume_content_source.is_some() {
            return Err(Status::invalid_argument(
                "this driver makes empty volumes only: a volume_content_source is not supported",
            ));
        }
        let class = management_class(&request.parameters)?.to_owned();
        let size = Size::from_range(request.capacity_range.as_ref(), DEFAULT_BYTES)?;
        let _guard = self.locks.acquire(&request.name)?;
        // A class that was made just now must not be called missing: csi-provisioner takes that for hopeless.
        let behind = deadline.min(Instant::now() + BEHIND);
        self.management.reclaim_policy(&class, behind).await;
        let annotations = self.annotations(&request.name, &request.parameters, &class, deadline).await?;
        let claim = NewClaim {
            csi_name: request.name,
            size,
            class,
            block: wanted.iter().any(|one| one.access == Access::Block),
            read_only_many: wanted.iter().all(|one| one.mode == Mode::MultiNodeReaderOnly),
            annotations,
        };
        let bound =
            self.management.create_claim(&claim, deadline).await.map_err(|error| errors::create(&error))?;
        Ok(Response::new(proto::CreateVolumeResponse {
            volume: Some(proto::Volume {
                volume_id: bound.name,
                capacity_bytes: i64::try_from(bound.capacity).unwrap_or(i64::MAX),
                ..proto::Volume::default()
            }),
        }))
    }

    async fn delete_volume(
        &self,
        request: Request<proto::DeleteVolumeRequest>,
    ) -> Result<Response<proto::DeleteVolumeResponse>, Status> {
        let (request, deadline) = self.begin(request)?;
        let volume = request::required("volume_id", &request.volume_id)?;
        let _guard = self.locks.acquire(volume)?;
        self.management.delete_claim(volume, deadline).await.map_err(|error| errors::delete(&error))?;
        Ok(Response::new(proto::DeleteVolumeResponse {}))
    }

    async fn controller_publish_volume(
        &self,
        request: Request<proto::ControllerPublishVolumeRequest>,
    ) -> Result<Response<proto::ControllerPublishVolumeResponse>, Status> {
        let (request, deadline) = self.begin(request)?;
        let volume = request::required("volume_id", &request.volume_id)?;
        let node = request::required("node_id", &request.node_id)?;
        let wanted = capability::required(request.volume_capability.as_ref())?;
        supported(std::slice::from_ref(&wanted))?;
        let _guard = self.locks.acquire(&format!("{volume} on {node}"))?;
        let attach = Attach {
            claim: volume.to_owned(),
            machine: node.to_owned(),
            read_only: request.readonly || wanted.mode.is_read_only(),
            exclusive: !wanted.mode.is_multi_node(),
        };
        let disk = self.management.attach(&attach, deadline).await.map_err(|error| errors::attach(&error))?;
        let publish_context = HashMap::from([(names::CONTEXT_DISK_UUID.to_owned(), disk)]);
        Ok(Response::new(proto::ControllerPublishVolumeResponse { publish_context }))
    }

    async fn controller_unpublish_volume(
        &self,
        request: Request<proto::ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<proto::ControllerUnpublishVolumeResponse>, Status> {
        let (request, deadline) = self.begin(request)?;
        let volume = request::required("volume_id", &request.volume_id)?;
        // Without a node, the volume leaves every node (CSI specification, ControllerUnpublishVolume).
        let nodes = match request.node_id.is_empty() {
            true => self.management.machines_with(volume),
            false => vec![request::required("node_id", &request.node_id)?.to_owned()],
        };
        for node in nodes {
            let _guard = self.locks.acquire(&format!("{volume} on {node}"))?;
            self.management.detach(volume, &node, deadline).await.map_err(|error| errors::detach(&error))?;
        }
        Ok(Response::new(proto::ControllerUnpublishVolumeResponse {}))
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<proto::ValidateVolumeCapabilitiesRequest>,
    ) -> Result<Response<proto::ValidateVolumeCapabilitiesResponse>, Status> {
        let (request, _) = self.begin(request)?;
        let volume = request::required("volume_id", &request.volume_id)?;
        let wanted = capability::required_all(&request.volume_capabilities)?;
        let claim = self
            .management
            .claim(volume)
            .ok_or_else(|| Status::not_found(format!("there is no volume {volume} of this guest")))?;
        let block = claims::is_block(&claim);
        let verdict = supported(&wanted).map_err(|status| status.message().to_owned()).and_then(|()| {
            match wanted.iter().all(|one| (one.access == Access::Block) == block) {
                true => Ok(()),
                false => Err(format!("volume {volume} is for {}", if block { "block" } else { "mount" })),
            }
        });
        let response = match verdict {
            Ok(()) => proto::ValidateVolumeCapabilitiesResponse {
                confirmed: Some(proto::validate_volume_capabilities_response::Confirmed {
                    volume_context: request.volume_context,
                    volume_capabilities: request.volume_capabilities,
                    parameters: request.parameters,
                    mutable_parameters: request.mutable_parameters,
                }),
                message: String::new(),
            },
            Err(message) => proto::ValidateVolumeCapabilitiesResponse { confirmed: None, message },
        };
        Ok(Response::new(response))
    }

    async fn controller_get_capabilities(
        &self,
        _: Request<proto::ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<proto::ControllerGetCapabilitiesResponse>, Status> {
        use proto::controller_service_capability::{Rpc as RpcCapability, Type};
        let announced = [
            Rpc::CreateDeleteVolume,
            Rpc::PublishUnpublishVolume,
            Rpc::PublishReadonly,
            Rpc::SingleNodeMultiWriter,
        ];
        let capabilities = announced
            .map(|rpc| proto::ControllerServiceCapability {
                r#type: Some(Type::Rpc(RpcCapability { r#type: rpc as i32 })),
            })
            .into();
        Ok(Response::new(proto::ControllerGetCapabilitiesResponse { capabilities }))
    }
}

/// The management class that a StorageClass names; anything that is not understood is refused, since it
/// would be silently without effect.
fn management_class(parameters: &HashMap<String, String>) -> Result<&str, Status> {
    let known = names::PARAMETER_MANAGEMENT_CLASS;
    let mut unknown: Vec<&str> = parameters
        .keys()
        .map(String::as_str)
        .filter(|key| *key != known && !key.starts_with(EXTRA_PREFIX))
        .collect();
    unknown.sort_unstable();
    if !unknown.is_empty() {
        return Err(Status::invalid_argument(format!(
            "StorageClass parameter {} is not known: the guest's class takes {known} only",
            unknown.join(", ")
        )));
    }
    parameters.get(known).map(String::as_str).filter(|class| !class.is_empty()).ok_or_else(|| {
        Status::invalid_argument(format!(
            "StorageClass parameter {known} is missing: name the management cluster's StorageClass in it"
        ))
    })
}

/// Refuses what no volume of this driver can do.
fn supported(wanted: &[Capability]) -> Result<(), Status> {
    let refused = wanted
        .iter()
        .find(|one| matches!(one.mode, Mode::MultiNodeSingleWriter | Mode::MultiNodeMultiWriter));
    match refused {
        None => Ok(()),
        Some(one) => Err(Status::invalid_argument(format!(
            "access mode {} is not supported: a disk that several machines write to would be corrupted; \
             use ReadWriteOnce, ReadWriteOncePod or ReadOnlyMany",
            one.mode.kubernetes_name()
        ))),
    }
}
