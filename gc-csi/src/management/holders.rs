//! Holders of claims: the VM that may have the disk of a single-writer volume, as an annotation of the claim. Only where the VM API
//! does not ensure a single writer. The rules are in [`crate::vm_volumes::holder`].

use std::time::Duration;

use crds::names::{ANNOTATION_ATTACHED_TO, ANNOTATION_NEVER_ATTACHED, ClaimName};
use json_patch::{PatchOperation, RemoveOperation, TestOperation, jsonptr::PointerBuf};
use kube_kit::partial::PersistentVolumeClaim;
use serde_json::{Value, json};
use uuid::Uuid;

use super::claims::Claims;
use super::classes::Classes;
use super::error::ApiError;
use super::virtual_machines::VirtualMachines;
use crate::vm_volumes::blank::{self, Blank, Evidence};
use crate::vm_volumes::holder::{self, Holder, Take, Taken};

/// Repetitions of a take after conflicts with other changes of the claim.
const MAX_CONFLICTS: u32 = 6;

/// Admission policies of the management cluster that check records, by the beginning of their names.
const POLICIES: [&str; 3] = ["kubevirt-claims.", "kubevirt-records.", "kubevirt-instances."];

/// Whether a policy refused a request by its view of claims, VMs and instances. That view is a cache of the API server, which may be
/// older than what gc-csi has read, so the request is repeated a few times.
pub(super) fn may_be_outdated(error: &ApiError) -> bool {
    let ApiError::Forbidden(message) = error else { return false };
    POLICIES.iter().any(|policy| message.contains(&format!("ValidatingAdmissionPolicy '{policy}")))
}

/// Waits before a repetition.
pub(super) async fn back_off(repetition: u32) {
    let longest = Duration::from_millis(10 << repetition);
    tokio::time::sleep(longest.mul_f64(fastrand::f64())).await;
}

/// Why a claim was not taken.
#[derive(Debug, Clone, thiserror::Error)]
pub enum TakeError {
    /// Another VM holds it.
    #[error("volume {claim} may be attached to VirtualMachine {}: detach it there first", .holder.vm)]
    Held {
        /// Name of the claim.
        claim: ClaimName,
        /// The other VM.
        holder: Holder,
    },
    /// The record can't be read.
    #[error(
        "the annotation {ANNOTATION_ATTACHED_TO} of management PersistentVolumeClaim {0} is not one that gc-csi wrote, so it is \
         unknown which VM has the disk: when no VM has it, remove the annotation"
    )]
    Unreadable(ClaimName),
    /// The API request failed.
    #[error("failed to record on management PersistentVolumeClaim {claim} which VM has its disk: {source}")]
    Api {
        /// Name of the claim.
        claim: ClaimName,
        /// Error of the API request.
        source: ApiError,
    },
}

/// Takes claims and gives them back.
#[derive(Debug, Clone)]
pub(super) struct Holders {
    claims: Claims,
    classes: Classes,
    vms: VirtualMachines,
}

impl Holders {
    pub(super) fn new(claims: Claims, classes: Classes, vms: VirtualMachines) -> Self {
        Self { claims, classes, vms }
    }

    /// Takes a claim for a VM, whose node has this boot ID if it is known, and returns the record. The claim must be taken after the
    /// VM was read to which the PATCH applies that adds the entry. A VM that shares a shareable claim with others takes nothing.
    pub(super) async fn take(
        &self,
        name: &ClaimName,
        vm: &Holder,
        boot: Option<&str>,
        shares: bool,
    ) -> Result<Option<Taken>, TakeError> {
        let api = |source| TakeError::Api { claim: name.clone(), source };
        let mut cached = self.claims.get(name);
        for repetition in 0..=MAX_CONFLICTS {
            let is_cached = cached.is_some();
            let live = if is_cached { None } else { self.claims.read(name).await.map_err(api)? };
            let Some(claim) = cached.take().as_deref().or(live.as_ref()).cloned() else {
                return Err(api(ApiError::NotFound(format!("PersistentVolumeClaim {name}"))));
            };
            let (record, is_shared) = (holder::recorded(&claim.metadata), shares && is_shareable(&claim));
            match holder::decide_take(record, vm) {
                Take::Allowed if is_shared => return Ok(None),
                Take::Allowed => {}
                // The cache may be older than the detach that gave the claim back.
                _ if is_cached => continue,
                Take::Unreadable => return Err(TakeError::Unreadable(name.clone())),
                Take::IfOff(other) if self.vms.is_proven_off(&other).await.map_err(api)? => {
                    tracing::info!(
                        claim = name.as_str(),
                        vm = other.vm,
                        "the VM that held the volume is proven off"
                    );
                    if let Some(record) = record.filter(|_| is_shared) {
                        self.give_back(name, record).await.map_err(api)?;
                        continue;
                    }
                }
                Take::IfOff(holder) => return Err(TakeError::Held { claim: name.clone(), holder }),
            }
            match self.write(name, &claim, vm, boot).await {
                Err(ApiError::Conflict(_)) => {}
                Err(error) if may_be_outdated(&error) && repetition < MAX_CONFLICTS => {
                    back_off(repetition).await;
                }
                written => return written.map(Some).map_err(api),
            }
        }
        Err(api(ApiError::Conflict("every attempt conflicted with another change of the claim".to_owned())))
    }

    /// Replaces the record, if the claim has not changed since it was read.
    async fn write(
        &self,
        name: &ClaimName,
        read: &PersistentVolumeClaim,
        vm: &Holder,
        boot: Option<&str>,
    ) -> Result<Taken, ApiError> {
        let new = || Some(Blank { id: Uuid::new_v4().to_string(), boot: boot?.to_owned() });
        let blank = blank::attest(holder::recorded(&read.metadata), vm, self.evidence(read), new);
        let taken = Taken { holder: vm.clone(), take: format!("{:016x}", fastrand::u64(..)), blank };
        let mut annotations = json!({ANNOTATION_ATTACHED_TO: taken.to_text()});
        if blank::is_unused(&read.metadata) {
            annotations[ANNOTATION_NEVER_ATTACHED] = Value::Null;
        }
        let metadata = json!({
            "uid": read.metadata.uid, "resourceVersion": read.metadata.resource_version,
            "annotations": annotations,
        });
        self.claims.patch(name, json!({"metadata": metadata})).await?;
        Ok(taken)
    }

    fn evidence<'a>(&self, claim: &'a PersistentVolumeClaim) -> Evidence<'a> {
        let class = claim.spec.storage_class_name.as_deref().unwrap_or_default();
        Evidence {
            claim: &claim.metadata,
            volume: claim.spec.volume_name.as_deref(),
            has_source: claim.spec.data_source.is_some() || claim.spec.has_data_source_ref,
            is_shareable: is_shareable(claim),
            is_class_blank: self.classes.has_blank_volumes(class),
        }
    }

    /// The record on a claim now, if this VM holds it.
    pub(super) async fn current(&self, name: &ClaimName, vm: &Holder) -> Result<Option<Taken>, TakeError> {
        let read = self.claims.read(name).await;
        let read = read.map_err(|source| TakeError::Api { claim: name.clone(), source })?;
        let record = read.as_ref().and_then(|claim| holder::recorded(&claim.metadata));
        let taken = record.and_then(|text| serde_json::from_str::<Taken>(text).ok());
        Ok(taken.filter(|taken| taken.holder == *vm))
    }

    /// The record of a VM on a claim, to give back later. Read from the API server if the cache shows none.
    pub(super) async fn held_by(
        &self,
        name: &ClaimName,
        vm_name: &str,
    ) -> Result<Option<(String, Holder)>, ApiError> {
        let of = |claim: &PersistentVolumeClaim| {
            let (text, holder) = holder::held_by(holder::recorded(&claim.metadata), vm_name)?;
            Some((text.to_owned(), holder))
        };
        match self.claims.get(name).and_then(|claim| of(&claim)) {
            Some(found) => Ok(Some(found)),
            None => Ok(self.claims.read(name).await?.and_then(|claim| of(&claim))),
        }
    }

    /// Removes a record that was read before the disk was proven detached. False if it has changed since.
    pub(super) async fn give_back(&self, name: &ClaimName, record: &str) -> Result<bool, ApiError> {
        let test = TestOperation { path: record_path(), value: json!(record) };
        let remove = RemoveOperation { path: record_path() };
        let patch = [PatchOperation::Test(test), PatchOperation::Remove(remove)];
        let mut repetition = 0;
        loop {
            match self.claims.json_patch(name, patch.to_vec()).await {
                Ok(_) | Err(ApiError::NotFound(_)) => return Ok(true),
                Err(ApiError::Invalid(_) | ApiError::Conflict(_)) => return Ok(false),
                Err(error) if may_be_outdated(&error) && repetition < MAX_CONFLICTS => {
                    back_off(repetition).await;
                    repetition += 1;
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// Whether several VMs may write to the disk of a claim at once.
pub(super) fn is_shareable(claim: &PersistentVolumeClaim) -> bool {
    crds::kubevirt::is_shareable(&claim.spec.access_modes, claim.spec.volume_mode.as_deref())
}

fn record_path() -> PointerBuf {
    let path = format!("/metadata/annotations/{}", ANNOTATION_ATTACHED_TO.replace('/', "~1"));
    PointerBuf::parse(path).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_repeated_if_a_policy_with_a_cache_refused_it() {
        let refused = |policy: &str| {
            let policy = format!("ValidatingAdmissionPolicy '{policy}.gc-csi-one.tenant-one.nestor.dev'");
            ApiError::Forbidden(format!("virtualmachines \"vm-1\" is forbidden: {policy} with binding ..."))
        };
        assert!(
            may_be_outdated(&refused("kubevirt-claims")) && may_be_outdated(&refused("kubevirt-instances"))
        );
        assert!(!may_be_outdated(&refused("kubevirt")) && !may_be_outdated(&refused("claims")));
        assert!(!may_be_outdated(&ApiError::Invalid("kubevirt-claims.".to_owned())));
    }
}
