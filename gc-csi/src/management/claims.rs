//! Guest volumes as claims in the management cluster.

use std::collections::BTreeMap;

use crds::names;
use csi::request::Size;
use k8s_openapi::api::core::v1::{
    PersistentVolumeClaim, PersistentVolumeClaimSpec, PersistentVolumeClaimStatus, VolumeResourceRequirements,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{DeleteParams, PostParams, Preconditions};
use kube_kit::informer::Key;
use tokio::time::Instant;

use super::{ApiError, Management};
use crate::quantity;

/// Volumes are made in whole mebibytes, since that is what every tier below can give exactly.
const GRANULARITY: u64 = 1 << 20;

/// A claim to make.
#[derive(Debug, Clone)]
pub struct NewClaim {
    /// The name that the caller gave the volume.
    pub csi_name: String,
    /// How large it must and may be.
    pub size: Size,
    /// Management StorageClass.
    pub class: String,
    /// Whether it is used as a raw block device.
    pub block: bool,
    /// Whether many machines will read it and none write.
    pub read_only_many: bool,
    /// Whom it is for, as annotations.
    pub annotations: BTreeMap<String, String>,
}

/// A claim that is bound.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoundClaim {
    /// The claim's name, which is the volume's handle.
    pub name: String,
    /// What it really has, in bytes.
    pub capacity: u64,
}

/// What became of a claim that nobody waits for any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Abandoned {
    /// It is not there.
    Gone,
    /// It is bound, so it may be in use; it was left alone.
    Bound,
}

/// Why no claim was made or bound.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// The management StorageClass is unknown.
    #[error(
        "StorageClass {class:?} does not exist in the management cluster: correct the parameter {} of the guest's StorageClass, or ask the platform team for that class",
        names::PARAMETER_MANAGEMENT_CLASS
    )]
    NoClass {
        /// The name that was asked for.
        class: String,
    },
    /// No whole number of mebibytes lies in the range.
    #[error(
        "no volume of whole MiB has between {required} and {limit} bytes: leave at least 1 MiB between request and limit"
    )]
    NoSuchSize {
        /// Bytes required.
        required: u64,
        /// Bytes allowed.
        limit: u64,
    },
    /// The name is taken by a volume that differs.
    #[error("volume {csi_name:?} exists as management PersistentVolumeClaim {claim}, but {difference}")]
    Differs {
        /// The caller's name.
        csi_name: String,
        /// The management claim.
        claim: String,
        /// What differs.
        difference: String,
    },
    /// The claim came out larger than the caller allows.
    #[error(
        "management PersistentVolumeClaim {claim} has {capacity} bytes, more than the limit of {limit}; it was deleted again"
    )]
    TooLarge {
        /// The management claim.
        claim: String,
        /// Its capacity.
        capacity: u64,
        /// The limit.
        limit: u64,
    },
    /// The management tier reports a failure; it goes on trying.
    #[error("management PersistentVolumeClaim {claim} is not bound yet: {warning}")]
    Failing {
        /// The management claim.
        claim: String,
        /// The tier's own words.
        warning: String,
    },
    /// The claim lost its volume.
    #[error(
        "management PersistentVolumeClaim {claim} lost its PersistentVolume: the platform team must restore it"
    )]
    Lost {
        /// The management claim.
        claim: String,
    },
    /// The claim is being deleted.
    #[error("management PersistentVolumeClaim {claim} of this name is being deleted: wait until it is gone")]
    Deleting {
        /// The management claim.
        claim: String,
    },
    /// Time ran out; the work goes on.
    #[error("management PersistentVolumeClaim {claim} was not bound in time{because}")]
    Deadline {
        /// The management claim.
        claim: String,
        /// The latest warning, or nothing.
        because: String,
    },
    /// The request failed.
    #[error("cannot create management PersistentVolumeClaim {claim}: {source}")]
    Api {
        /// The management claim.
        claim: String,
        /// What the API said.
        source: ApiError,
    },
}

/// Why a claim was not deleted.
#[derive(Debug, thiserror::Error)]
pub enum DeleteError {
    /// It is plugged into a machine.
    #[error("volume {claim} is attached to VirtualMachine {machine}: detach it first")]
    Attached {
        /// The management claim.
        claim: String,
        /// The machine.
        machine: String,
    },
    /// Time ran out; the deletion goes on.
    #[error("management PersistentVolumeClaim {claim} was not gone in time{because}")]
    Deadline {
        /// The management claim.
        claim: String,
        /// What holds it, as far as is known.
        because: String,
    },
    /// The request failed.
    #[error("cannot delete management PersistentVolumeClaim {claim}: {source}")]
    Api {
        /// The management claim.
        claim: String,
        /// What the API said.
        source: ApiError,
    },
}

impl Management {
    /// The guest's own claim of this name; anybody else's is as good as absent.
    pub fn claim(&self, name: &str) -> Option<std::sync::Arc<PersistentVolumeClaim>> {
        self.claims.get(&self.key(name)).filter(|claim| self.owns(claim))
    }

    /// The reclaim policy of a management StorageClass. One that was made just now is waited for until
    /// `deadline`; None when it does not come.
    pub async fn reclaim_policy(&self, class: &str, deadline: Instant) -> Option<String> {
        self.classes
            .wait_for(&Key::cluster(class), deadline, |class| {
                Some(class?.reclaim_policy.clone().unwrap_or_else(|| "Delete".to_owned()))
            })
            .await
    }

    /// Makes the claim unless it is there, and waits until it is bound.
    pub async fn create_claim(
        &self,
        wanted: &NewClaim,
        deadline: Instant,
    ) -> Result<BoundClaim, CreateError> {
        let name = names::management_pvc(&self.home.prefix, self.home.cluster.as_str(), &wanted.csi_name);
        let mark = self.warnings.mark();
        let bytes = whole_mebibytes(wanted.size)?;
        if self.claims.get(&self.key(&name)).is_none() {
            if self.classes.get(&Key::cluster(&wanted.class)).is_none() {
                return Err(CreateError::NoClass { class: wanted.class.clone() });
            }
            let claim = self.new_claim(&name, wanted, bytes);
            match self.claims_api.create(&PostParams::default(), &claim).await.map_err(ApiError::from) {
                // An earlier call made it; the informer will show it, and it is compared then.
                Ok(_) | Err(ApiError::Exists(_)) => {}
                Err(source) => return Err(CreateError::Api { claim: name, source }),
            }
        }
        let bound = self.wait_bound(&name, wanted, bytes, mark, deadline).await?;
        if let Some(limit) = wanted.size.limit.filter(|limit| bound.capacity > *limit) {
            self.delete_claim(&name, deadline).await.map_err(|error| CreateError::Failing {
                claim: name.clone(),
                warning: format!("it is larger than the limit and could not be deleted: {error}"),
            })?;
            return Err(CreateError::TooLarge { claim: name, capacity: bound.capacity, limit });
        }
        Ok(bound)
    }

    async fn wait_bound(
        &self,
        name: &str,
        wanted: &NewClaim,
        bytes: u64,
        mark: u64,
        deadline: Instant,
    ) -> Result<BoundClaim, CreateError> {
        let outcome = self
            .claims
            .wait_for(&self.key(name), deadline, |claim| {
                let claim = claim?;
                if let Err(difference) = self.same(claim, wanted, bytes) {
                    let (csi_name, claim) = (wanted.csi_name.clone(), name.to_owned());
                    return Some(Err(CreateError::Differs { csi_name, claim, difference }));
                }
                if claim.metadata.deletion_timestamp.is_some() {
                    return Some(Err(CreateError::Deleting { claim: name.to_owned() }));
                }
                match phase(claim) {
                    "Bound" => Some(Ok(BoundClaim { name: name.to_owned(), capacity: capacity(claim)? })),
                    "Lost" => Some(Err(CreateError::Lost { claim: name.to_owned() })),
                    _ => self
                        .warnings
                        .since(mark, name)
                        .map(|warning| Err(CreateError::Failing { claim: name.to_owned(), warning })),
                }
            })
            .await;
        outcome.unwrap_or_else(|| {
            let because =
                self.warnings.latest(name).map(|warning| format!(": {warning}")).unwrap_or_default();
            Err(CreateError::Deadline { claim: name.to_owned(), because })
        })
    }

    /// Deletes the claim of a volume that was never given out, and waits until it is gone; unless it is
    /// bound.
    pub async fn abandon_claim(&self, csi_name: &str, deadline: Instant) -> Result<Abandoned, DeleteError> {
        let name = names::management_pvc(&self.home.prefix, self.home.cluster.as_str(), csi_name);
        // Nobody asks again, so what the informer has not seen yet would stay: the API is read.
        let found = self.claims_api.get_opt(&name).await;
        let found = found.map_err(|error| DeleteError::Api { claim: name.clone(), source: error.into() })?;
        match found.filter(|claim| self.owns(claim)) {
            Some(claim) if is_bound(&claim) => Ok(Abandoned::Bound),
            // Only as it was seen: one that was bound in between is not deleted.
            Some(claim) => {
                let seen = claim.metadata.resource_version.clone();
                self.delete_seen(&name, &claim, seen, deadline).await.map(|()| Abandoned::Gone)
            }
            None => Ok(Abandoned::Gone),
        }
    }

    /// Deletes the guest's claim and waits until it is gone. A claim that is not there, or not this
    /// guest's, is left as it is: to this guest it does not exist.
    pub async fn delete_claim(&self, name: &str, deadline: Instant) -> Result<(), DeleteError> {
        let Some(claim) = self.claim(name) else {
            if self.claims.get(&self.key(name)).is_some() {
                tracing::warn!(claim = name, "asked to delete a claim that is not this guest's: left alone");
            }
            return Ok(());
        };
        if let Some(machine) = self.machines_with(name).first() {
            return Err(DeleteError::Attached { claim: name.to_owned(), machine: machine.clone() });
        }
        self.delete_seen(name, &claim, None, deadline).await
    }

    /// Deletes this very claim, if it is still in the version that is given, and waits until it is gone.
    async fn delete_seen(
        &self,
        name: &str,
        claim: &PersistentVolumeClaim,
        resource_version: Option<String>,
        deadline: Instant,
    ) -> Result<(), DeleteError> {
        let uid = claim.metadata.uid.clone();
        if claim.metadata.deletion_timestamp.is_none() {
            let parameters = DeleteParams {
                preconditions: Some(Preconditions { uid: uid.clone(), resource_version }),
                ..Default::default()
            };
            match self.claims_api.delete(name, &parameters).await.map_err(ApiError::from) {
                Ok(_) | Err(ApiError::NotFound(_)) => {}
                Err(source) => return Err(DeleteError::Api { claim: name.to_owned(), source }),
            }
        }
        let gone = self
            .claims
            .wait_for(&self.key(name), deadline, |now| {
                now.is_none_or(|now| now.metadata.uid != uid).then_some(())
            })
            .await;
        gone.ok_or_else(|| {
            let finalizers =
                self.claim(name).and_then(|claim| claim.metadata.finalizers.clone()).unwrap_or_default();
            let because = match finalizers.is_empty() {
                true => String::new(),
                false => format!(": held by finalizers {}", finalizers.join(", ")),
            };
            DeleteError::Deadline { claim: name.to_owned(), because }
        })
    }

    fn owns(&self, claim: &PersistentVolumeClaim) -> bool {
        let labels = claim.metadata.labels.as_ref();
        labels.and_then(|labels| labels.get(names::LABEL_CLUSTER_ID)).map(String::as_str)
            == Some(self.home.cluster.as_str())
    }

    fn new_claim(&self, name: &str, wanted: &NewClaim, bytes: u64) -> PersistentVolumeClaim {
        let labels = [(names::LABEL_CLUSTER_ID.to_owned(), self.home.cluster.to_string())];
        let mode = if wanted.read_only_many { "ReadOnlyMany" } else { "ReadWriteOnce" };
        let requests = [("storage".to_owned(), quantity::of(bytes))];
        PersistentVolumeClaim {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                labels: Some(labels.into()),
                annotations: Some(wanted.annotations.clone()),
                ..ObjectMeta::default()
            },
            spec: Some(PersistentVolumeClaimSpec {
                access_modes: Some(vec![mode.to_owned()]),
                storage_class_name: Some(wanted.class.clone()),
                volume_mode: Some(volume_mode(wanted.block).to_owned()),
                resources: Some(VolumeResourceRequirements { requests: Some(requests.into()), limits: None }),
                ..PersistentVolumeClaimSpec::default()
            }),
            status: None,
        }
    }

    /// Whether a claim that is there is the one that is wanted; if not, what differs.
    fn same(&self, claim: &PersistentVolumeClaim, wanted: &NewClaim, bytes: u64) -> Result<(), String> {
        if !self.owns(claim) {
            return Err("it is not labelled as this guest's".to_owned());
        }
        let Some(spec) = &claim.spec else { return Err("it has no spec".to_owned()) };
        let requested =
            spec.resources.as_ref().and_then(|r| quantity::bytes(r.requests.as_ref()?.get("storage")?));
        if requested != Some(bytes) {
            return Err(format!("it was made with {} bytes, not {bytes}", requested.unwrap_or_default()));
        }
        let class = spec.storage_class_name.as_deref().unwrap_or_default();
        if class != wanted.class {
            return Err(format!("it is of StorageClass {class:?}, not {:?}", wanted.class));
        }
        let mode = spec.volume_mode.as_deref().unwrap_or("Filesystem");
        if mode != volume_mode(wanted.block) {
            return Err(format!("its volumeMode is {mode}, not {}", volume_mode(wanted.block)));
        }
        Ok(())
    }
}

/// What a bound claim really has, in bytes.
pub fn capacity(claim: &PersistentVolumeClaim) -> Option<u64> {
    quantity::bytes(claim.status.as_ref()?.capacity.as_ref()?.get("storage")?)
}

/// Whether a claim is bound to a volume.
pub fn is_bound(claim: &PersistentVolumeClaim) -> bool {
    phase(claim) == "Bound"
}

/// Whether a claim is for a raw block device.
pub fn is_block(claim: &PersistentVolumeClaim) -> bool {
    claim.spec.as_ref().and_then(|spec| spec.volume_mode.as_deref()) == Some("Block")
}

fn phase(claim: &PersistentVolumeClaim) -> &str {
    claim
        .status
        .as_ref()
        .and_then(|PersistentVolumeClaimStatus { phase, .. }| phase.as_deref())
        .unwrap_or("Pending")
}

fn volume_mode(block: bool) -> &'static str {
    if block { "Block" } else { "Filesystem" }
}

/// The smallest whole number of mebibytes in the range.
fn whole_mebibytes(size: Size) -> Result<u64, CreateError> {
    let bytes = size.required.max(1).div_ceil(GRANULARITY).saturating_mul(GRANULARITY);
    match size.limit {
        Some(limit) if limit < bytes => Err(CreateError::NoSuchSize { required: size.required, limit }),
        _ => Ok(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_whole_mebibytes_within_the_limit() {
        let size = |required, limit| whole_mebibytes(Size { required, limit });
        assert_eq!(size(1, None).unwrap(), GRANULARITY);
        assert_eq!(size(GRANULARITY, Some(GRANULARITY)).unwrap(), GRANULARITY);
        assert!(matches!(size(1, Some(1000)), Err(CreateError::NoSuchSize { .. })));
    }
}
