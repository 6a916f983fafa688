//! Management claims: guest volumes in the management cluster. This module reads the claims that this guest may use,
//! and changes those that it owns; [`super::provisioner`] creates and deletes them.

mod compatible;
mod expand;
mod metadata;
mod modify;
mod provisioned;

use std::sync::Arc;

use crds::names;
use csi::request::Size;
use k8s_openapi::api::core::v1;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Api, Client};
use kube_kit::events::Events;
use kube_kit::health::Health;
use kube_kit::informer::Informer;
use kube_kit::mutation_cache::catch_up;
use kube_kit::partial::PersistentVolumeClaim;
use serde_json::Value;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::error::ApiError;
use super::identity::{GuestIdentity, Relation};
use super::objects::{ChangeHandler, is_object_name, retain_keys};
use super::warnings::Warnings;
use crate::vm_volumes::VmApi;
use crds::names::ClaimName;

pub(crate) use expand::ExpandError;
pub(crate) use metadata::DesiredMetadata;
pub(crate) use modify::ModifyError;
pub(crate) use provisioned::{ProvisionedClaim, pending_for};

/// Volumes have whole MiB, which every layer can provide exactly.
const GRANULARITY: u64 = 1 << 20;

/// Claims of the guest's namespace, and the warnings about them.
#[derive(Clone, Debug)]
pub(crate) struct Claims {
    identity: GuestIdentity,
    api: Api<PersistentVolumeClaim>,
    informer: Informer<PersistentVolumeClaim>,
    warnings: Warnings,
    vm_api: VmApi,
}

impl Claims {
    /// Watches the claims of the guest's namespace, and the warning events about them.
    pub(super) fn start(
        client: &Client,
        identity: GuestIdentity,
        vm_api: VmApi,
        ready: &Health,
        stop: &CancellationToken,
        changed: ChangeHandler<PersistentVolumeClaim>,
    ) -> Self {
        let api = Api::namespaced(client.clone(), &identity.namespace);
        let informer = Informer::builder("management PersistentVolumeClaims", api.clone())
            .trim(trim)
            .on_change(changed)
            .start(ready.check("watch of management PersistentVolumeClaims", "not synced yet"), stop.clone());
        let check = ready.check("watch of warnings about management claims", "not synced yet");
        let warnings = Warnings::start(client, &identity.namespace, informer.clone(), check, stop);
        Self { identity, api, informer, warnings, vm_api }
    }

    /// Waits for the first list.
    pub(super) async fn synced(&self) {
        self.informer.synced().await;
    }

    pub(super) fn is_synced(&self) -> bool {
        self.informer.is_synced()
    }

    /// The watch error while claims can't be watched, so that the cache may be stale; None while connected.
    pub(super) fn watch_error(&self) -> Option<String> {
        self.informer.watch_error()
    }

    /// Warnings about the claims.
    pub(super) fn warnings(&self) -> &Warnings {
        &self.warnings
    }

    /// Recorder of events in the management cluster.
    pub(crate) fn events(&self) -> Events {
        Events::new(self.api.clone().into_client(), names::GUEST_DRIVER)
    }

    /// Namespaced name of a claim, for messages.
    pub(crate) fn full_name(&self, name: &ClaimName) -> String {
        self.identity.key(name).to_string()
    }

    /// Names of all claims in this guest's namespace.
    pub(crate) fn names(&self) -> Vec<ClaimName> {
        self.informer.list().iter().filter_map(|claim| name_of(claim)).collect()
    }

    /// All claims that this guest may use.
    pub(super) fn list_usable(&self) -> Vec<Arc<PersistentVolumeClaim>> {
        let all = self.informer.list().into_iter();
        all.filter(|claim| self.relation(claim).is_some()).collect()
    }

    /// The claim of this name, whoever owns it.
    pub(super) fn get(&self, name: &ClaimName) -> Option<Arc<PersistentVolumeClaim>> {
        self.informer.get(&self.identity.key(name))
    }

    /// The claim of this name, if this guest may use it, and its relation.
    pub(crate) fn usable(&self, name: &ClaimName) -> Option<(Arc<PersistentVolumeClaim>, Relation)> {
        let claim = self.get(name)?;
        let relation = self.relation(&claim)?;
        Some((claim, relation))
    }

    /// The claim of this name, if this guest owns it.
    pub(super) fn own(&self, name: &ClaimName) -> Option<Arc<PersistentVolumeClaim>> {
        self.usable(name).filter(|(_, relation)| *relation == Relation::Own).map(|(claim, _)| claim)
    }

    /// Relation of a claim to this guest; None if the guest may not use it.
    pub(super) fn relation(&self, claim: &PersistentVolumeClaim) -> Option<Relation> {
        self.identity.relation(claim.metadata.labels.as_ref())
    }

    /// Name of the guest PersistentVolume in the claim's annotation.
    pub(crate) fn guest_volume_of(&self, name: &ClaimName) -> Option<String> {
        let (claim, _) = self.usable(name)?;
        annotation(&claim, names::ANNOTATION_GUEST_PV)
    }

    /// Waits until `check` returns a value for the cached claim, at most until `deadline`.
    pub(super) async fn wait_for<T>(
        &self,
        name: &ClaimName,
        deadline: Instant,
        check: impl FnMut(Option<&Arc<PersistentVolumeClaim>>) -> Option<T>,
    ) -> Option<T> {
        self.informer.wait_for(&self.identity.key(name), deadline, check).await
    }

    /// The claim as the API server returns it now; None if it does not exist.
    pub(super) async fn read(&self, name: &ClaimName) -> Result<Option<PersistentVolumeClaim>, ApiError> {
        // The guest chooses this name, and it becomes part of a URL: no object can have an invalid name.
        if !is_object_name(name) {
            return Ok(None);
        }
        Ok(self.api.get_opt(name).await?)
    }

    /// Waits until the cache is as new as the claim in the API server; false if it is still older at the deadline.
    pub(super) async fn catch_up(&self, name: &ClaimName, deadline: Instant) -> Result<bool, ApiError> {
        // The guest chooses this name, and it becomes part of a URL: no object can have an invalid name.
        if !is_object_name(name) {
            return Ok(true);
        }
        let live = self.api.get_opt(name).await?;
        Ok(catch_up(&self.informer, &self.identity.key(name), live.as_ref(), deadline).await)
    }

    /// Creates a claim.
    pub(super) async fn create(&self, claim: &v1::PersistentVolumeClaim) -> Result<(), ApiError> {
        let client = self.api.clone().into_client();
        let api: Api<v1::PersistentVolumeClaim> = Api::namespaced(client, &self.identity.namespace);
        api.create(&PostParams::default(), claim).await?;
        Ok(())
    }

    /// Sends a merge patch.
    pub(super) async fn patch(
        &self,
        name: &ClaimName,
        patch: Value,
    ) -> Result<PersistentVolumeClaim, ApiError> {
        Ok(self.api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await?)
    }

    /// Sends a JSON Patch.
    pub(super) async fn json_patch(
        &self,
        name: &ClaimName,
        operations: Vec<json_patch::PatchOperation>,
    ) -> Result<PersistentVolumeClaim, ApiError> {
        let patch = Patch::Json::<()>(json_patch::Patch(operations));
        Ok(self.api.patch(name, &PatchParams::default(), &patch).await?)
    }

    /// Deletes the claim if it meets the preconditions. Succeeds if no claim of this name exists.
    pub(super) async fn delete(
        &self,
        name: &ClaimName,
        preconditions: Preconditions,
    ) -> Result<(), ApiError> {
        let parameters = DeleteParams { preconditions: Some(preconditions), ..Default::default() };
        match self.api.delete(name, &parameters).await.map_err(ApiError::from) {
            Ok(_) | Err(ApiError::NotFound(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// The largest size that can be requested: Kubernetes can't represent a larger one.
const MAX_BYTES: u64 = i64::MAX.cast_unsigned() / GRANULARITY * GRANULARITY;

/// Why a range has no valid size.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// The limit is too small.
    #[error(
        "no volume of whole MiB has between {required} and {limit} bytes: leave at least 1 MiB between request and limit"
    )]
    Between {
        /// Bytes required.
        required: u64,
        /// Bytes allowed.
        limit: u64,
    },
    /// The required size is too large.
    #[error("no volume can have {required} bytes: the largest that can be requested has {MAX_BYTES} bytes")]
    TooLarge {
        /// Bytes required.
        required: u64,
    },
}

/// The smallest whole number of MiB in the range, in bytes.
pub(super) fn whole_mebibytes(size: Size) -> Result<u64, SizeError> {
    if size.required > MAX_BYTES {
        return Err(SizeError::TooLarge { required: size.required });
    }
    let bytes = size.required.max(1).next_multiple_of(GRANULARITY);
    match size.limit {
        Some(limit) if limit < bytes => Err(SizeError::Between { required: size.required, limit }),
        _ => Ok(bytes),
    }
}

/// The message of a claim's condition that is True.
fn condition<'a>(claim: &'a PersistentVolumeClaim, type_: &str) -> Option<&'a str> {
    let found = claim.status.conditions.iter().find(|one| one.type_ == type_ && one.status == "True")?;
    let message = found.message.as_deref().unwrap_or("no message");
    // csi-resizer puts the operation and the status code before the driver's message.
    Some(message.split_once(" desc = ").map_or(message, |(_, words)| words))
}

/// Name of a claim.
pub(super) fn name_of(claim: &PersistentVolumeClaim) -> Option<ClaimName> {
    claim.metadata.name.clone().map(ClaimName::new)
}

/// Whether a claim is bound to a volume.
pub fn is_bound(claim: &PersistentVolumeClaim) -> bool {
    phase(claim) == "Bound"
}

/// Whether a claim has a volume, or names one that it will be bound to, as after a restore from a backup.
pub(super) fn has_volume(claim: &PersistentVolumeClaim) -> bool {
    phase(claim) != "Pending" || claim.spec.volume_name.as_ref().is_some_and(|name| !name.is_empty())
}

/// Whether a claim is for a raw block volume.
pub fn is_block(claim: &PersistentVolumeClaim) -> bool {
    claim.spec.volume_mode.as_deref() == Some("Block")
}

pub(super) fn phase(claim: &PersistentVolumeClaim) -> &str {
    claim.status.phase.as_deref().unwrap_or("Pending")
}

pub(super) fn volume_mode(block: bool) -> &'static str {
    if block { "Block" } else { "Filesystem" }
}

/// The PersistentVolume that a claim is or will be bound to.
pub(super) fn bound_to(claim: &PersistentVolumeClaim) -> Option<String> {
    claim.spec.volume_name.clone().filter(|name| !name.is_empty())
}

fn annotation(claim: &PersistentVolumeClaim, key: &str) -> Option<String> {
    claim.metadata.annotations.as_ref()?.get(key).cloned()
}

/// Keeps identity, owners, sizes, classes, phase and the conditions that gc-csi reads.
fn trim(claim: &mut PersistentVolumeClaim) {
    retain_keys(&mut claim.metadata.annotations, |key| {
        key.starts_with("nestor.dev/") || key.starts_with(names::ANNOTATION_CONSUMER_PREFIX)
    });
    let read = [names::CONDITION_HEALTHY, expand::CONDITION_FAILED, modify::CONDITION_FAILED];
    claim.status.conditions.retain(|condition| read.contains(&condition.type_.as_str()));
    claim.status.conditions.shrink_to_fit();
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn trimming_a_claim_keeps_only_what_is_read() {
        let trimmed = |annotations: Value| {
            let mut claim: PersistentVolumeClaim = serde_json::from_value(json!({
                "metadata": {"name": "c", "annotations": annotations, "finalizers": ["f"], "labels": {"team": "a"}},
                "status": {"conditions": [
                    {"type": "FileSystemResizePending", "status": "True"},
                    {"type": names::CONDITION_HEALTHY, "status": "False"},
                ]},
            }))
            .unwrap();
            trim(&mut claim);
            claim
        };
        let kept = trimmed(json!({"nestor.dev/guest-pv": "a", "consumer.nestor.dev/g": "b", "other": "c"}));
        let annotations = kept.metadata.annotations.unwrap_or_default();
        assert_eq!(
            annotations.into_keys().collect::<Vec<_>>(),
            ["consumer.nestor.dev/g", "nestor.dev/guest-pv"]
        );
        assert_eq!(kept.metadata.labels.unwrap_or_default()["team"], "a");
        assert_eq!(kept.metadata.finalizers.unwrap_or_default(), ["f"]);
        let conditions: Vec<_> = kept.status.conditions.iter().map(|one| one.type_.as_str()).collect();
        assert_eq!(conditions, [names::CONDITION_HEALTHY]);
        assert_eq!(trimmed(json!({"other": "c"})).metadata.annotations, None);
    }

    #[test]
    fn sizes_are_whole_mebibytes_within_the_limit() {
        let size = |required, limit| whole_mebibytes(Size { required, limit });
        assert_eq!(size(1, None), Ok(GRANULARITY));
        assert_eq!(size(GRANULARITY, Some(GRANULARITY)), Ok(GRANULARITY));
        assert_eq!(size(1, Some(1000)), Err(SizeError::Between { required: 1, limit: 1000 }));
        assert_eq!(size(MAX_BYTES, None), Ok(9_223_372_036_853_727_232));
        for more in [MAX_BYTES + 1, i64::MAX.cast_unsigned()] {
            assert_eq!(size(more, Some(more)), Err(SizeError::TooLarge { required: more }));
        }
    }
}
