//! Creation of management claims, and the wait until they are bound.

use std::sync::Arc;

use crds::names::{self, ClaimName, CsiName};
use csi::request::Size;
use k8s_openapi::api::core::v1::{self, TypedLocalObjectReference, VolumeResourceRequirements};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube_kit::partial::PersistentVolumeClaim;
use kube_kit::quantity;
use process_kit::operation;
use tokio::time::Instant;
use uuid::Uuid;

use super::{BoundClaim, DeleteError, NewClaim, Provisioner, Source};
use crate::compatibility::Incompatible;
use crate::management::claims::{self, SizeError, bound_to, is_block, is_bound, phase, volume_mode};
use crate::management::error::ApiError;
use crate::management::identity::Relation;
use crate::management::{recent_outcomes, snapshots};

/// Why a claim was not created or bound.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CreateError {
    /// The management StorageClass does not exist.
    #[error(
        "StorageClass {class:?} does not exist in the management cluster: correct the parameter {} of the guest's StorageClass, or ask the platform team for that class",
        names::PARAMETER_MANAGEMENT_CLASS
    )]
    NoClass {
        /// The requested class.
        class: String,
    },
    /// The management VolumeAttributesClass does not exist.
    #[error(
        "VolumeAttributesClass {class:?} does not exist in the management cluster: correct the parameter {} of the guest's VolumeAttributesClass, or ask the platform team for that class",
        names::PARAMETER_MANAGEMENT_ATTRIBUTES_CLASS
    )]
    NoAttributesClass {
        /// The requested class.
        class: String,
    },
    /// The class does not allow several VMs to write to a volume.
    #[error(
        "access mode ReadWriteMany is not possible: StorageClass {class} of the management cluster does not allow several VMs to write to a volume; use a class with parameter {}: \"true\", or ReadWriteOnce",
        names::PARAMETER_SHAREABLE
    )]
    NotShareable {
        /// The management class.
        class: String,
    },
    /// The source does not exist for this guest.
    #[error(
        "{origin} does not exist, or is neither this guest's nor shared with it: it can't be used as a source"
    )]
    NoSource {
        /// The source.
        origin: Source,
    },
    /// The source is not complete.
    #[error("{origin} is not {state} yet: it can't be used as a source")]
    SourceNotReady {
        /// The source.
        origin: Source,
        /// The required state.
        state: &'static str,
    },
    /// The source has other data than the guest's PersistentVolume is pinned to.
    #[error("the source was replaced: {0}")]
    SourceReplaced(Incompatible),
    /// The source has another volumeMode.
    #[error("{origin} has volumeMode {has}: it can't be the source of a volume with volumeMode {request}")]
    SourceMode {
        /// The source.
        origin: Source,
        /// Its volumeMode.
        has: &'static str,
        /// The requested volumeMode.
        request: &'static str,
    },
    /// The source is larger than the requested volume.
    #[error("{origin} has {has}, more than the requested {request}: request at least {has}")]
    SourceTooLarge {
        /// The source.
        origin: Source,
        /// Its size.
        has: String,
        /// The requested size.
        request: String,
    },
    /// The range contains no whole number of MiB.
    #[error(transparent)]
    InvalidSize(SizeError),
    /// More zones than a management claim can request.
    #[error(
        "the volume was requested in {zones} zones, but at most {} are possible: allow fewer in allowedTopologies of \
         the guest's StorageClass",
        names::MAX_REQUESTED_ZONES
    )]
    TooManyZones {
        /// Number of requested zones.
        zones: usize,
    },
    /// A volume of this name exists with other properties.
    #[error("volume {csi_name:?} exists as management PersistentVolumeClaim {claim}, but {difference}")]
    Differs {
        /// CSI name of the volume.
        csi_name: CsiName,
        /// Name of the management claim.
        claim: ClaimName,
        /// The difference.
        difference: String,
    },
    /// The claim is larger than the limit.
    #[error(
        "management PersistentVolumeClaim {claim} has {capacity} bytes, more than the limit of {limit}; {outcome}"
    )]
    TooLarge {
        /// Name of the management claim.
        claim: ClaimName,
        /// Its capacity.
        capacity: u64,
        /// The limit.
        limit: u64,
        /// What happened to the claim.
        outcome: &'static str,
    },
    /// The management cluster reports an error and retries.
    #[error("management PersistentVolumeClaim {claim} is not bound yet: {warning}")]
    Failing {
        /// Name of the management claim.
        claim: ClaimName,
        /// The reported warning.
        warning: String,
    },
    /// The claim lost its volume.
    #[error(
        "management PersistentVolumeClaim {claim} lost its PersistentVolume: the platform team must restore it"
    )]
    Lost {
        /// Name of the management claim.
        claim: ClaimName,
    },
    /// The claim is being deleted.
    #[error("management PersistentVolumeClaim {claim} is being deleted: wait until it is gone")]
    Deleting {
        /// Name of the management claim.
        claim: ClaimName,
    },
    /// The deadline passed; provisioning continues.
    #[error("timed out waiting until management PersistentVolumeClaim {claim} is bound{detail}")]
    Deadline {
        /// Name of the management claim.
        claim: ClaimName,
        /// The latest warning, or empty.
        detail: String,
    },
    /// The API request failed.
    #[error("failed to create management PersistentVolumeClaim {claim}: {source}")]
    Api {
        /// Name of the management claim.
        claim: ClaimName,
        /// Error of the API request.
        source: ApiError,
    },
}

impl Provisioner {
    /// Creates the claim unless it exists, and waits until it is bound. Classes and sources that the cache does not
    /// show by `cache_deadline` count as missing.
    pub(crate) async fn create(
        &self,
        request: &NewClaim,
        cache_deadline: Instant,
        deadline: Instant,
    ) -> Result<BoundClaim, CreateError> {
        let name = self.identity.claim_of(&request.csi_name);
        let _suppressed = self.deleted.suppress(recent_outcomes::claim_key(&name));
        let mark = self.claims.warnings().mark();
        let bytes = whole_mebibytes(request.size)?;
        if self.claims.get(&name).is_none() {
            check_zones(&request.zones)?;
            self.check_classes(request, cache_deadline).await?;
            if let Some(source) = &request.source {
                self.check_source(source, request, bytes, cache_deadline).await?;
            }
            let claim = self.new_claim(&name, request, bytes).await;
            match self.claims.create(&claim).await {
                // If an earlier call created it, it is compared with the request when the informer shows it.
                Ok(()) | Err(ApiError::Exists(_)) => {}
                Err(source) => return Err(CreateError::Api { claim: name, source }),
            }
        }
        let bound = self.wait_bound(&name, request, bytes, mark, deadline).await?;
        if let Some(limit) = request.size.limit.filter(|limit| bound.capacity > *limit) {
            let outcome = match self.delete(&name, &[], deadline).await {
                Ok(()) => "the claim was deleted",
                Err(DeleteError::Retained { .. }) => {
                    "the claim stays because of its class's reclaim policy Retain: delete it manually"
                }
                Err(error) => {
                    let warning = format!("it is larger than the limit, but could not be deleted: {error}");
                    return Err(CreateError::Failing { claim: name, warning });
                }
            };
            return Err(CreateError::TooLarge { claim: name, capacity: bound.capacity, limit, outcome });
        }
        Ok(bound)
    }

    /// Checks that the requested classes exist and support the request.
    async fn check_classes(&self, request: &NewClaim, cache_deadline: Instant) -> Result<(), CreateError> {
        let shareable = self.classes.is_shareable(&request.class, cache_deadline).await;
        let shareable = shareable.ok_or_else(|| CreateError::NoClass { class: request.class.clone() })?;
        if request.access_modes.contains(&"ReadWriteMany") && !shareable {
            return Err(CreateError::NotShareable { class: request.class.clone() });
        }
        if let Some(class) = &request.attributes_class
            && !self.classes.has_attributes_class(class, cache_deadline).await
        {
            return Err(CreateError::NoAttributesClass { class: class.clone() });
        }
        Ok(())
    }

    /// Checks that the guest may read the source, and that it is complete and not larger than the claim.
    async fn check_source(
        &self,
        source: &Source,
        request: &NewClaim,
        bytes: u64,
        cache_deadline: Instant,
    ) -> Result<(), CreateError> {
        let origin = || source.clone();
        let missing = || CreateError::NoSource { origin: origin() };
        let has = match source {
            Source::Snapshot(name) => {
                let Some(snapshots) = &self.snapshots else { return Err(missing()) };
                let snapshot = snapshots.wait_for(name, cache_deadline).await.ok_or_else(missing)?;
                if !snapshots::is_ready(&snapshot) {
                    return Err(CreateError::SourceNotReady { origin: origin(), state: "ready to use" });
                }
                snapshots::restore_size(&snapshot).unwrap_or(0)
            }
            Source::Volume(name) => {
                let usable = |claim: Option<&Arc<PersistentVolumeClaim>>| {
                    claim.filter(|claim| self.claims.relation(claim).is_some()).cloned()
                };
                let claim = self.claims.wait_for(name, cache_deadline, usable).await.ok_or_else(missing)?;
                if !is_bound(&claim) {
                    return Err(CreateError::SourceNotReady { origin: origin(), state: "bound" });
                }
                self.claims
                    .check_pins(name, &claim, &request.source_volumes)
                    .map_err(CreateError::SourceReplaced)?;
                let block = self.is_block(request);
                if is_block(&claim) != block {
                    let (has, request) = (volume_mode(!block), volume_mode(block));
                    return Err(CreateError::SourceMode { origin: origin(), has, request });
                }
                // The management cluster's csi-provisioner compares the requested size.
                claim.status.capacity.max(claim.spec.requested).unwrap_or(0)
            }
        };
        if has > bytes {
            let (has, request) = (quantity::of(has).0, quantity::of(bytes).0);
            return Err(CreateError::SourceTooLarge { origin: origin(), has, request });
        }
        Ok(())
    }

    async fn wait_bound(
        &self,
        name: &ClaimName,
        request: &NewClaim,
        bytes: u64,
        mark: u64,
        deadline: Instant,
    ) -> Result<BoundClaim, CreateError> {
        let outcome = self
            .claims
            .wait_for(name, deadline, |claim| {
                let claim = claim?;
                if let Err(difference) = self.check_same_claim(claim, request, bytes) {
                    let (csi_name, claim) = (request.csi_name.clone(), name.to_owned());
                    return Some(Err(CreateError::Differs { csi_name, claim, difference }));
                }
                if claim.metadata.deletion_timestamp.is_some() {
                    return Some(Err(CreateError::Deleting { claim: name.to_owned() }));
                }
                match phase(claim) {
                    "Bound" => {
                        let (capacity, volume) = (claim.status.capacity?, bound_to(claim)?);
                        let zones = accessible_zones(claim);
                        Some(Ok(BoundClaim { name: name.to_owned(), volume, capacity, zones }))
                    }
                    "Lost" => Some(Err(CreateError::Lost { claim: name.to_owned() })),
                    _ => self
                        .claims
                        .warnings()
                        .since(mark, name)
                        .map(|warning| Err(CreateError::Failing { claim: name.to_owned(), warning })),
                }
            })
            .await;
        outcome.unwrap_or_else(|| {
            let warning = self.claims.warnings().latest(name);
            let detail = warning.map(|warning| format!(": {warning}")).unwrap_or_default();
            Err(CreateError::Deadline { claim: name.to_owned(), detail })
        })
    }

    async fn new_claim(&self, name: &ClaimName, request: &NewClaim, bytes: u64) -> v1::PersistentVolumeClaim {
        let requests = [("storage".to_owned(), quantity::of(bytes))];
        let mut annotations = request.annotations.clone();
        if !request.zones.is_empty() {
            annotations.insert(names::ANNOTATION_REQUESTED_ZONES.to_owned(), request.zones.join(","));
        }
        if self.classes.is_retained(&request.class) {
            // mgmt-csi updates the annotation once the volume exists.
            annotations.insert(names::ANNOTATION_RECLAIM_POLICY.to_owned(), "Retain".to_owned());
        }
        if self.attests_blank(request) {
            annotations.insert(names::ANNOTATION_NEVER_ATTACHED.to_owned(), "true".to_owned());
            annotations.insert(names::ANNOTATION_FORMAT_TOKEN.to_owned(), Uuid::new_v4().to_string());
        }
        if let Some(context) = operation::trace_parent() {
            annotations.insert(names::ANNOTATION_TRACEPARENT.to_owned(), context.to_string());
        }
        let has_finalizer = self.classes.has_claim_finalizer(&request.class);
        v1::PersistentVolumeClaim {
            metadata: ObjectMeta {
                finalizers: has_finalizer.then(|| vec![names::FINALIZER_ATTACHED.to_owned()]),
                ..self.owner.new_metadata(name, annotations).await
            },
            spec: Some(v1::PersistentVolumeClaimSpec {
                access_modes: Some(request.access_modes.iter().map(|mode| (*mode).to_owned()).collect()),
                storage_class_name: Some(request.class.clone()),
                volume_mode: Some(volume_mode(self.is_block(request)).to_owned()),
                data_source: request.source.as_ref().map(Source::reference),
                volume_attributes_class_name: request.attributes_class.clone(),
                resources: Some(VolumeResourceRequirements { requests: Some(requests.into()), limits: None }),
                ..Default::default()
            }),
            status: None,
        }
    }

    /// Whether [`crate::vm_volumes::blank`] may attest later that the volume is blank.
    fn attests_blank(&self, request: &NewClaim) -> bool {
        self.vms.vm_api().has_holders()
            && request.source.is_none()
            && !request.access_modes.contains(&"ReadWriteMany")
            && self.classes.has_blank_volumes(&request.class)
    }

    /// Whether the claim is for a raw block volume.
    fn is_block(&self, request: &NewClaim) -> bool {
        request.block || !self.vms.vm_api().keeps_volume_mode()
    }

    /// Compares an existing claim with the request; the error names the difference.
    fn check_same_claim(
        &self,
        claim: &PersistentVolumeClaim,
        request: &NewClaim,
        bytes: u64,
    ) -> Result<(), String> {
        if self.claims.relation(claim) != Some(Relation::Own) {
            return Err("it does not have this guest's label".to_owned());
        }
        let spec = &claim.spec;
        let requested = spec.requested.unwrap_or_default();
        if requested != bytes {
            return Err(format!("it was created with {requested} bytes, not {bytes}"));
        }
        let class = spec.storage_class_name.as_deref().unwrap_or_default();
        if class != request.class {
            return Err(format!("its StorageClass is {class:?}, not {:?}", request.class));
        }
        let mode = spec.volume_mode.as_deref().unwrap_or("Filesystem");
        let wanted_mode = volume_mode(self.is_block(request));
        if mode != wanted_mode {
            return Err(format!("its volumeMode is {mode}, not {wanted_mode}"));
        }
        let mut modes: Vec<&str> = spec.access_modes.iter().map(String::as_str).collect();
        let mut wanted_modes = request.access_modes.clone();
        modes.sort_unstable();
        wanted_modes.sort_unstable();
        if modes != wanted_modes {
            let (modes, request) = (modes.join(", "), wanted_modes.join(", "));
            return Err(format!("its access modes are {modes}, not {request}"));
        }
        let (has, source) = (spec.data_source.as_deref(), request.source.as_ref().map(Source::reference));
        if has != source.as_ref() {
            let created_from = |source: Option<&TypedLocalObjectReference>| match source {
                Some(source) => format!("from {} {}", source.kind, source.name),
                None => "empty".to_owned(),
            };
            let (was, request) = (created_from(has), created_from(source.as_ref()));
            return Err(format!("it was created {was}, not {request}"));
        }
        Ok(())
    }
}

/// The smallest whole number of MiB in the range, in bytes.
fn whole_mebibytes(size: Size) -> Result<u64, CreateError> {
    claims::whole_mebibytes(size).map_err(CreateError::InvalidSize)
}

fn check_zones(zones: &[String]) -> Result<(), CreateError> {
    let zones = zones.len();
    if zones > names::MAX_REQUESTED_ZONES { Err(CreateError::TooManyZones { zones }) } else { Ok(()) }
}

/// The zones that mgmt-csi wrote to the claim before it was bound.
pub(in crate::management) fn accessible_zones(claim: &PersistentVolumeClaim) -> Vec<String> {
    let written =
        claim.metadata.annotations.as_ref().and_then(|all| all.get(names::ANNOTATION_ACCESSIBLE_ZONES));
    let zones = written.map(String::as_str).unwrap_or_default().split(',').map(str::trim);
    zones.filter(|zone| !zone.is_empty()).map(str::to_owned).collect()
}
