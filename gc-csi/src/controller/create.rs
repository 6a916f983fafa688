//! CreateVolume.

use std::collections::{BTreeMap, HashMap};

use crds::anti_affinity::{AntiAffinity, ClassParameters};
use crds::names::{self, ClaimName, CsiName};
use csi::Status;
use csi::capability::{self, Access, Capability};
use csi::locks::VolumeLocks;
use csi::proto;
use csi::request::{self, Size};
use kube_kit::informer::Key;
use tokio::time::Instant;
use tonic::Request;

use super::errors;
use super::parameters::{Kind, anti_affinity, extra, management_class};
use super::pinned::PinnedVolumes;
use super::service::{CACHE_LAG, Controller};
use crate::events::Event;
use crate::guest::reference;
use crate::management::provisioner::{Abandoned, BoundClaim, CreateError, DeleteError, NewClaim, Source};

/// Size of a volume without a requested size: 1 GiB, as most drivers use.
const DEFAULT_BYTES: u64 = 1 << 30;

/// What CreateVolume needs of both clusters.
pub(super) trait CreatableVolumes: PinnedVolumes {
    /// Refuses capabilities that this driver or the VM Operator does not support.
    fn supports(&self, capabilities: &[Capability]) -> Result<(), Status>;

    /// StorageClass (may be empty) of the guest claim of a volume; None if the claim does not appear.
    async fn class_of(&self, claim: &Key, csi_name: &CsiName, deadline: Instant) -> Option<String>;

    /// Whether the guest claim of a volume exists, read from the API server.
    async fn has_claim_for(&self, claim: &Key, csi_name: &CsiName) -> Result<bool, String>;

    /// Reclaim policies of a guest StorageClass and a management StorageClass; None if one does not appear.
    async fn reclaim_policies(
        &self,
        guest_class: &str,
        management_class: &str,
        deadline: Instant,
    ) -> Option<(String, String)>;

    /// Refuses different reclaim policies, or reports them on the guest claim.
    fn on_policy_mismatch(&self, claim: &Key, text: String) -> Result<(), Status>;

    /// Creates the claim unless it exists, and waits until it is bound.
    async fn create_claim(
        &self,
        request: &NewClaim,
        cache_deadline: Instant,
        deadline: Instant,
    ) -> Result<BoundClaim, CreateError>;

    /// Deletes the claim of a volume that was never returned to the caller, unless it has a volume.
    async fn abandon_claim(&self, csi_name: &CsiName, deadline: Instant) -> Result<Abandoned, DeleteError>;
}

impl CreatableVolumes for Controller {
    fn supports(&self, capabilities: &[Capability]) -> Result<(), Status> {
        self.management.vm_operator.supports(capabilities)
    }

    async fn class_of(&self, claim: &Key, csi_name: &CsiName, deadline: Instant) -> Option<String> {
        self.guest.class_of(claim, csi_name, deadline).await
    }

    async fn has_claim_for(&self, claim: &Key, csi_name: &CsiName) -> Result<bool, String> {
        self.guest.has_claim_for(claim, csi_name).await
    }

    async fn reclaim_policies(
        &self,
        guest_class: &str,
        management_class: &str,
        deadline: Instant,
    ) -> Option<(String, String)> {
        let guest = self.guest.reclaim_policy(guest_class, deadline).await;
        let management = self.management.classes.reclaim_policy(management_class, deadline).await;
        guest.zip(management)
    }

    fn on_policy_mismatch(&self, claim: &Key, text: String) -> Result<(), Status> {
        if self.refuse_mismatch {
            return Err(Status::failed_precondition(text));
        }
        tracing::warn!(%claim, "{text}");
        if let Some(claim) = self.guest.claims.get(claim) {
            Event::ReclaimPolicyMismatch.report(&self.guest.events, reference(&*claim), text);
        }
        Ok(())
    }

    async fn create_claim(
        &self,
        request: &NewClaim,
        cache_deadline: Instant,
        deadline: Instant,
    ) -> Result<BoundClaim, CreateError> {
        self.management.provisioner.create(request, cache_deadline, deadline).await
    }

    async fn abandon_claim(&self, csi_name: &CsiName, deadline: Instant) -> Result<Abandoned, DeleteError> {
        self.management.provisioner.abandon(csi_name, deadline).await
    }
}

impl Controller {
    pub(super) async fn create(
        &self,
        request: Request<proto::CreateVolumeRequest>,
    ) -> Result<proto::CreateVolumeResponse, Status> {
        let (request, deadline) = self.begin(request)?;
        create(self, &self.locks, request, deadline).await
    }
}

pub(super) async fn create(
    volumes: &impl CreatableVolumes,
    locks: &VolumeLocks,
    request: proto::CreateVolumeRequest,
    deadline: Instant,
) -> Result<proto::CreateVolumeResponse, Status> {
    // Every name is valid: the management claim's name contains its hash.
    if request.name.is_empty() {
        return Err(Status::invalid_argument("name is missing in the request"));
    }
    let capabilities = capability::required_all(&request.volume_capabilities)?;
    volumes.supports(&capabilities)?;
    let class = management_class(Kind::Storage, &request.parameters)?.to_owned();
    let anti_affinity = anti_affinity(&request.parameters)?;
    let attributes_class = attributes_class(&request.mutable_parameters)?;
    let source = request.volume_content_source.as_ref().map(source).transpose()?;
    let zones = requested_zones(request.accessibility_requirements.as_ref());
    let size = Size::from_range(request.capacity_range.as_ref(), DEFAULT_BYTES)?;
    let csi_name = CsiName::new(request.name);
    let _guard = locks.acquire(&csi_name)?;
    // csi-provisioner treats a missing class as final, so a new class must not be reported as missing.
    let cache_deadline = deadline.min(Instant::now() + CACHE_LAG);
    let mut annotations = annotations(volumes, &csi_name, &request.parameters, &class, deadline).await?;
    if let Some(spread) = anti_affinity.and_then(|class| anti_affinity_of(&class, &request.parameters)) {
        annotations.insert(names::ANNOTATION_ANTI_AFFINITY.to_owned(), spread.to_string());
    }
    let source_volumes = match &source {
        Some(Source::Volume(handle)) => volumes.requirements_of(handle),
        Some(Source::Snapshot(_)) | None => Vec::new(),
    };
    let claim = NewClaim {
        csi_name,
        size,
        class,
        block: capabilities.iter().any(|one| one.access == Access::Block),
        access_modes: access_modes(&capabilities),
        source,
        source_volumes,
        attributes_class,
        zones,
        annotations,
    };
    let bound = volumes.create_claim(&claim, cache_deadline, deadline).await;
    let bound = bound.map_err(|error| errors::create(&error))?;
    Ok(proto::CreateVolumeResponse {
        volume: Some(proto::Volume {
            volume_id: bound.name.into(),
            capacity_bytes: i64::try_from(bound.capacity).unwrap_or(i64::MAX),
            volume_context: HashMap::from([(names::MANAGEMENT_VOLUME.to_owned(), bound.volume)]),
            content_source: request.volume_content_source,
            accessible_topology: bound.zones.into_iter().map(segment).collect(),
        }),
    })
}

/// Annotations for the management cluster that name the guest objects of a claim.
async fn annotations(
    volumes: &impl CreatableVolumes,
    csi_name: &CsiName,
    parameters: &HashMap<String, String>,
    management_class: &str,
    deadline: Instant,
) -> Result<BTreeMap<String, String>, Status> {
    let mut annotations = BTreeMap::new();
    if let (Some(name), Some(namespace)) = (extra(parameters, "pvc/name"), extra(parameters, "pvc/namespace"))
    {
        let claim = Key::new(namespace.clone(), name.clone());
        let cache_deadline = deadline.min(Instant::now() + CACHE_LAG);
        match volumes.class_of(&claim, csi_name, cache_deadline).await {
            Some(class) if class.is_empty() => {}
            Some(class) => {
                check_policies(volumes, &claim, &class, management_class, cache_deadline).await?;
                annotations.insert(names::ANNOTATION_GUEST_STORAGE_CLASS.to_owned(), class);
            }
            None => abandon_unclaimed(volumes, csi_name, &claim, deadline).await?,
        }
        annotations.insert(names::ANNOTATION_GUEST_PVC.to_owned(), name);
        annotations.insert(names::ANNOTATION_GUEST_NAMESPACE.to_owned(), namespace);
    }
    if let Some(volume) = extra(parameters, "pv/name") {
        annotations.insert(names::ANNOTATION_GUEST_PV.to_owned(), volume);
    }
    Ok(annotations)
}

/// The anti-affinity of a claim's volume.
fn anti_affinity_of(class: &ClassParameters, parameters: &HashMap<String, String>) -> Option<AntiAffinity> {
    match (extra(parameters, "pvc/namespace"), extra(parameters, "pvc/name")) {
        (Some(namespace), Some(name)) => Some(class.of_claim(&namespace, &name)),
        _ => class.of_unknown_claim(),
    }
}

/// Aborts the creation of a volume whose guest claim was deleted: csi-provisioner repeats the call until it gets a
/// final error, and nothing may then be left in the management cluster. A volume that exists already is returned,
/// because csi-provisioner then deletes it.
async fn abandon_unclaimed(
    volumes: &impl CreatableVolumes,
    csi_name: &CsiName,
    claim: &Key,
    deadline: Instant,
) -> Result<(), Status> {
    let uncertainty = match volumes.has_claim_for(claim, csi_name).await {
        Ok(false) => None,
        Ok(true) => Some(format!("the watch of the guest cluster does not show claim {claim} yet")),
        Err(why) => Some(why),
    };
    if let Some(why) = uncertainty {
        return Err(Status::unavailable(why));
    }
    match volumes.abandon_claim(csi_name, deadline).await {
        Ok(Abandoned::HasVolume) => Ok(()),
        Ok(Abandoned::Gone) => Err(Status::not_found(format!(
            "guest PersistentVolumeClaim {claim}, for which volume {csi_name} was requested, no longer exists: \
             nothing is left in the management cluster"
        ))),
        Err(error) => Err(errors::delete(&error)),
    }
}

/// The reclaim policies of both StorageClasses must match.
async fn check_policies(
    volumes: &impl CreatableVolumes,
    claim: &Key,
    guest_class: &str,
    management_class: &str,
    cache_deadline: Instant,
) -> Result<(), Status> {
    let policies = volumes.reclaim_policies(guest_class, management_class, cache_deadline).await;
    let Some((guest, management)) = policies else { return Ok(()) };
    if guest == management {
        return Ok(());
    }
    let text = format!(
        "guest StorageClass {guest_class} has reclaimPolicy {guest}, but its management StorageClass \
         {management_class} has {management}: use classes with the same policy"
    );
    volumes.on_policy_mismatch(claim, text)
}

/// All access modes of the capabilities, as Kubernetes names them.
fn access_modes(capabilities: &[Capability]) -> Vec<&'static str> {
    let mut modes: Vec<&str> = capabilities.iter().map(|one| one.mode.kubernetes_name()).collect();
    modes.sort_unstable();
    modes.dedup();
    modes
}

/// The management VolumeAttributesClass in the mutable parameters, if any.
fn attributes_class(parameters: &HashMap<String, String>) -> Result<Option<String>, Status> {
    if parameters.is_empty() {
        return Ok(None);
    }
    management_class(Kind::VolumeAttributes, parameters).map(|class| Some(class.to_owned()))
}

/// The source of the volume. Handles of volumes and snapshots are names in the management cluster.
fn source(source: &proto::VolumeContentSource) -> Result<Source, Status> {
    use proto::volume_content_source::Type;
    match &source.r#type {
        Some(Type::Snapshot(snapshot)) => {
            request::required("snapshot_id of volume_content_source", &snapshot.snapshot_id)
                .map(|name| Source::Snapshot(name.to_owned()))
        }
        Some(Type::Volume(volume)) => {
            request::required("volume_id of volume_content_source", &volume.volume_id)
                .map(|name| Source::Volume(ClaimName::new(name)))
        }
        None => Err(Status::invalid_argument("volume_content_source names neither a snapshot nor a volume")),
    }
}

/// The requested zones in the order of preference.
fn requested_zones(requirement: Option<&proto::TopologyRequirement>) -> Vec<String> {
    let mut zones: Vec<String> = Vec::new();
    let Some(requirement) = requirement else { return zones };
    for topology in requirement.preferred.iter().chain(&requirement.requisite) {
        match topology.segments.get(names::LABEL_ZONE) {
            Some(zone) if !zones.contains(zone) => zones.push(zone.clone()),
            _ => {}
        }
    }
    zones
}

fn segment(zone: String) -> proto::Topology {
    proto::Topology { segments: [(names::LABEL_ZONE.to_owned(), zone)].into() }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;
    use crate::controller::testing::{InMemory, Outcomes, deadline};

    #[test]
    fn preferred_zones_come_first_without_duplicates() {
        let list = |zones: &[&str]| zones.iter().map(|zone| segment((*zone).to_owned())).collect();
        let mut requirement =
            proto::TopologyRequirement { requisite: list(&["a", "b", "c"]), preferred: list(&["b", "a"]) };
        assert_eq!(requested_zones(Some(&requirement)), ["b", "a", "c"]);
        requirement.preferred =
            vec![proto::Topology { segments: [("rack".to_owned(), "1".to_owned())].into() }];
        assert_eq!(requested_zones(Some(&requirement)), ["a", "b", "c"]);
        assert!(requested_zones(None).is_empty());
    }

    fn request() -> proto::CreateVolumeRequest {
        use proto::volume_capability::{AccessMode, AccessType, BlockVolume, access_mode};
        let mode = AccessMode { mode: access_mode::Mode::SingleNodeWriter as i32 };
        let parameters = [
            (names::PARAMETER_MANAGEMENT_CLASS, "gold"),
            ("csi.storage.k8s.io/pvc/name", "data"),
            ("csi.storage.k8s.io/pvc/namespace", "shop"),
        ];
        proto::CreateVolumeRequest {
            name: "pvc-1".to_owned(),
            volume_capabilities: vec![proto::VolumeCapability {
                access_mode: Some(mode),
                access_type: Some(AccessType::Block(BlockVolume {})),
            }],
            parameters: parameters.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
            ..Default::default()
        }
    }

    async fn answer(volumes: &InMemory, request: proto::CreateVolumeRequest) -> Result<String, Status> {
        let answer = create(volumes, &VolumeLocks::default(), request, deadline()).await?;
        Ok(answer.volume.unwrap_or_default().volume_id)
    }

    fn creating() -> InMemory {
        let (name, volume) = (ClaimName::new("c"), "pv-1".to_owned());
        let bound = BoundClaim { name, volume, capacity: 1 << 30, zones: Vec::new() };
        InMemory { creations: Outcomes::of([Ok(bound)]), ..InMemory::default() }
    }

    #[tokio::test]
    async fn a_volume_is_named_after_its_claim() {
        assert_eq!(answer(&creating(), request()).await.unwrap(), "c");
    }

    #[tokio::test]
    async fn the_anti_affinity_of_the_class_is_on_the_management_claim() {
        let annotated = async |parameters: &[(&str, &str)]| {
            let (volumes, mut request) = (creating(), request());
            request.parameters.extend(parameters.iter().map(|(key, value)| ((*key).into(), (*value).into())));
            answer(&volumes, request).await?;
            let created = volumes.created.lock().unwrap().pop().unwrap();
            Ok::<_, Status>(created.annotations.get(names::ANNOTATION_ANTI_AFFINITY).cloned())
        };
        assert_eq!(annotated(&[]).await.unwrap(), None);
        let (mode, group) = (("antiAffinity", "preferred"), ("antiAffinityGroup", "db"));
        assert_eq!(annotated(&[mode]).await.unwrap().unwrap(), "preferred:shop/data");
        let ordinal = ("csi.storage.k8s.io/pvc/name", "data-db-1");
        assert_eq!(annotated(&[mode, ordinal]).await.unwrap().unwrap(), "preferred:shop/data-db");
        assert_eq!(annotated(&[mode, group]).await.unwrap().unwrap(), "preferred:db");
        let refused = annotated(&[group]).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
    }

    #[tokio::test]
    async fn different_reclaim_policies_are_refused() {
        let policies = |guest: &str, management: &str| Some((guest.to_owned(), management.to_owned()));
        let class = Some("fast".to_owned());
        let same = InMemory { class: class.clone(), policies: policies("Delete", "Delete"), ..creating() };
        assert!(answer(&same, request()).await.is_ok());
        let different = InMemory { class, policies: policies("Delete", "Retain"), ..InMemory::default() };
        let status = answer(&different, request()).await.unwrap_err();
        assert_eq!((status.code(), different.creations.taken()), (Code::FailedPrecondition, 0));
        assert!(["fast", "gold", "Retain"].iter().all(|text| status.message().contains(text)), "{status}");
    }

    #[tokio::test]
    async fn nothing_is_created_for_a_claim_that_is_gone() {
        let abandons = Outcomes::of([Ok(Abandoned::Gone)]);
        let gone = InMemory { class: None, has_claim: Ok(false), abandons, ..InMemory::default() };
        assert_eq!(answer(&gone, request()).await.unwrap_err().code(), Code::NotFound);
        assert_eq!(gone.creations.taken(), 0);
    }

    #[tokio::test]
    async fn a_volume_that_exists_is_returned_although_its_claim_is_gone() {
        let abandons = Outcomes::of([Ok(Abandoned::HasVolume)]);
        let gone = InMemory { class: None, has_claim: Ok(false), abandons, ..creating() };
        assert_eq!(answer(&gone, request()).await.unwrap(), "c");
    }

    #[tokio::test]
    async fn nothing_is_deleted_while_it_is_unknown_whether_the_claim_exists() {
        for has_claim in [Ok(true), Err("no answer".to_owned())] {
            let volumes = InMemory { class: None, has_claim, ..InMemory::default() };
            assert_eq!(answer(&volumes, request()).await.unwrap_err().code(), Code::Unavailable);
            assert_eq!((volumes.abandons.taken(), volumes.creations.taken()), (0, 0));
        }
    }

    #[tokio::test]
    async fn invalid_requests_are_refused() {
        let nameless = proto::CreateVolumeRequest { name: String::new(), ..request() };
        let mut unknown = request();
        unknown.parameters.insert("size".to_owned(), "9".to_owned());
        let classless = proto::CreateVolumeRequest { parameters: HashMap::new(), ..request() };
        for request in [nameless, unknown, classless] {
            let status = answer(&InMemory::default(), request).await.unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        }
    }

    #[tokio::test]
    async fn errors_of_the_management_cluster_have_their_codes() {
        let missing = CreateError::NoClass { class: "gold".to_owned() };
        let volumes = InMemory { creations: Outcomes::of([Err(missing)]), ..InMemory::default() };
        assert_eq!(answer(&volumes, request()).await.unwrap_err().code(), Code::InvalidArgument);
    }
}
