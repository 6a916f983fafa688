//! CreateVolume.

use std::collections::{BTreeMap, HashMap};

use crds::names;
use csi::Status;
use csi::capability::{self, Access, Capability};
use csi::proto;
use csi::request::{self, Size};
use kube_kit::informer::Key;
use tokio::time::Instant;
use tonic::Request;

use super::errors;
use super::parameters::{extra, management_class};
use super::service::{CACHE_LAG, Controller};
use crate::events::Event;
use crate::guest::reference;
use crate::management::provisioner::{Abandoned, NewClaim, Source};
use crate::names::{ClaimName, CsiName};

/// Size of a volume without a requested size: 1 GiB, as most drivers use.
const DEFAULT_BYTES: u64 = 1 << 30;

impl Controller {
    pub(super) async fn create(
        &self,
        request: Request<proto::CreateVolumeRequest>,
    ) -> Result<proto::CreateVolumeResponse, Status> {
        let (request, deadline) = self.begin(request)?;
        // Every name is valid: the management claim's name contains its hash.
        if request.name.is_empty() {
            return Err(Status::invalid_argument("name is missing in the request"));
        }
        let capabilities = capability::required_all(&request.volume_capabilities)?;
        self.supports(&capabilities)?;
        let class = management_class("StorageClass", names::PARAMETER_MANAGEMENT_CLASS, &request.parameters)?;
        let class = class.to_owned();
        let attributes_class = attributes_class(&request.mutable_parameters)?;
        let source = request.volume_content_source.as_ref().map(source).transpose()?;
        let zones = requested_zones(request.accessibility_requirements.as_ref());
        let size = Size::from_range(request.capacity_range.as_ref(), DEFAULT_BYTES)?;
        let csi_name = CsiName::new(request.name);
        let _guard = self.locks.acquire(&csi_name)?;
        // csi-provisioner treats a missing class as final, so a new class must not be reported as missing.
        let cache_deadline = deadline.min(Instant::now() + CACHE_LAG);
        let annotations = self.annotations(&csi_name, &request.parameters, &class, deadline).await?;
        let source_volumes = match &source {
            Some(Source::Volume(handle)) => self.guest.requirements_of(handle),
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
        let bound = self.management.provisioner.create(&claim, cache_deadline, deadline).await;
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
        &self,
        csi_name: &CsiName,
        parameters: &HashMap<String, String>,
        management_class: &str,
        deadline: Instant,
    ) -> Result<BTreeMap<String, String>, Status> {
        let mut annotations = BTreeMap::new();
        if let (Some(name), Some(namespace)) =
            (extra(parameters, "pvc/name"), extra(parameters, "pvc/namespace"))
        {
            let claim = Key::new(namespace.clone(), name.clone());
            let cache_deadline = deadline.min(Instant::now() + CACHE_LAG);
            match self.guest.class_of(&claim, csi_name, cache_deadline).await {
                Some(class) if class.is_empty() => {}
                Some(class) => {
                    self.check_policies(&claim, &class, management_class, cache_deadline).await?;
                    annotations.insert(names::ANNOTATION_GUEST_STORAGE_CLASS.to_owned(), class);
                }
                None => self.abandon_unclaimed(csi_name, &claim, deadline).await?,
            }
            annotations.insert(names::ANNOTATION_GUEST_PVC.to_owned(), name);
            annotations.insert(names::ANNOTATION_GUEST_NAMESPACE.to_owned(), namespace);
        }
        if let Some(volume) = extra(parameters, "pv/name") {
            annotations.insert(names::ANNOTATION_GUEST_PV.to_owned(), volume);
        }
        Ok(annotations)
    }

    /// Aborts the creation of a volume whose guest claim was deleted: csi-provisioner repeats the call until it gets a
    /// final error, and nothing may then be left in the management cluster. A volume that exists already is returned,
    /// because csi-provisioner then deletes it.
    async fn abandon_unclaimed(
        &self,
        csi_name: &CsiName,
        claim: &Key,
        deadline: Instant,
    ) -> Result<(), Status> {
        let uncertainty = match self.guest.has_claim_for(claim, csi_name).await {
            Ok(false) => None,
            Ok(true) => Some(format!("the watch of the guest cluster does not show claim {claim} yet")),
            Err(why) => Some(why),
        };
        if let Some(why) = uncertainty {
            return Err(Status::unavailable(why));
        }
        match self.management.provisioner.abandon(csi_name, deadline).await {
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
        &self,
        claim: &Key,
        guest_class: &str,
        management_class: &str,
        cache_deadline: Instant,
    ) -> Result<(), Status> {
        let guest = self.guest.reclaim_policy(guest_class, cache_deadline).await;
        let management = self.management.classes.reclaim_policy(management_class, cache_deadline).await;
        let (Some(guest), Some(management)) = (guest, management) else { return Ok(()) };
        if guest == management {
            return Ok(());
        }
        let text = format!(
            "guest StorageClass {guest_class} has reclaimPolicy {guest}, but its management StorageClass \
             {management_class} has {management}: use classes with the same policy"
        );
        if self.refuse_mismatch {
            return Err(Status::failed_precondition(text));
        }
        tracing::warn!(%claim, "{text}");
        if let Some(claim) = self.guest.claims.get(claim) {
            Event::ReclaimPolicyMismatch.report(&self.guest.events, reference(&*claim), text);
        }
        Ok(())
    }
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
    let known = names::PARAMETER_MANAGEMENT_ATTRIBUTES_CLASS;
    management_class("VolumeAttributesClass", known, parameters).map(|class| Some(class.to_owned()))
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
    use super::*;

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
}
