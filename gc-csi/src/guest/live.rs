//! Reads of the guest's API server, for decisions that a lagging cache must not make.

use std::collections::HashSet;

use crds::names::{ClaimName, CsiName, VmName};
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{ApiResource, DynamicObject, ListParams};
use kube::core::GroupVersionKind;
use kube_kit::client::chain;
use kube_kit::informer::Key;
use kube_kit::partial::{CsiSource, PersistentVolume, PersistentVolumeClaim, VolumeAttachment};
use sha2::{Digest, Sha256};

use super::{Guest, is_volume_for};
use crate::management::snapshots::GROUP;

/// Page size of lists.
const PAGE: u32 = 500;

/// State of the guest claim of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClaimState {
    /// The claim was deleted, or replaced by one of the same name.
    Gone,
    /// It is not bound yet.
    Pending,
    /// It is bound to a volume.
    Bound,
}

impl Guest {
    /// Whether the claim for which the volume `csi_name` was requested exists. If the cache has no such claim, the API
    /// server is asked, because the volume is deleted otherwise.
    pub(crate) async fn has_claim_for(&self, claim: &Key, csi_name: &CsiName) -> Result<bool, String> {
        if self
            .claims
            .get(claim)
            .is_some_and(|cached| is_volume_for(csi_name, cached.metadata.uid.as_deref()))
        {
            return Ok(true);
        }
        let api: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), &claim.namespace);
        let found = api.get_metadata_opt(&claim.name).await.map_err(|error| {
            format!("failed to read guest PersistentVolumeClaim {claim}: {}", chain(&error))
        })?;
        Ok(found.is_some_and(|found| is_volume_for(csi_name, found.metadata.uid.as_deref())))
    }

    /// State of the claim for which the volume `csi_name` was created, from the cache or else from the API server.
    pub(crate) async fn claim_state(&self, claim: &Key, csi_name: &CsiName) -> Result<ClaimState, String> {
        match self.claims.get(claim) {
            Some(cached) => Ok(state_of(&cached, csi_name)),
            None => self.claim_state_live(claim, csi_name).await,
        }
    }

    /// State of the claim for which the volume `csi_name` was created, read from the API server.
    pub(crate) async fn claim_state_live(
        &self,
        claim: &Key,
        csi_name: &CsiName,
    ) -> Result<ClaimState, String> {
        let api: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), &claim.namespace);
        let found = api.get_opt(&claim.name).await.map_err(|error| {
            format!("failed to read guest PersistentVolumeClaim {claim}: {}", chain(&error))
        })?;
        Ok(found.map_or(ClaimState::Gone, |found| state_of(&found, csi_name)))
    }

    /// ID of the boot of a Node, which its kubelet reports; None without a Node of this name.
    pub(crate) async fn boot_of(&self, node: &VmName) -> Result<Option<String>, String> {
        let found = Api::<Node>::all(self.client.clone()).get_opt(node).await;
        let found = found.map_err(|error| format!("failed to read guest Node {node}: {}", chain(&error)))?;
        let info = found.and_then(|node| node.status?.node_info);
        Ok(info.map(|info| info.boot_id).filter(|boot| !boot.is_empty()))
    }

    /// Handles of all our PersistentVolumes, read from the API server.
    pub(crate) async fn live_handles(&self) -> Result<HashSet<ClaimName>, String> {
        let api = Api::<PersistentVolume>::all(self.client.clone());
        let mut parameters = ListParams::default().limit(PAGE);
        let mut handles = HashSet::new();
        loop {
            let page = api.list(&parameters).await;
            let page = page.map_err(|error| {
                format!("failed to list the guest's PersistentVolumes: {}", chain(&error))
            })?;
            let csi = page.items.into_iter().filter_map(|volume| volume.spec.csi);
            handles.extend(
                csi.filter(|csi| self.drivers.contains(&csi.driver))
                    .map(|csi| ClaimName::new(csi.volume_handle)),
            );
            // All pages are from one snapshot.
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => parameters = parameters.continue_token(&token),
                None => return Ok(handles),
            }
        }
    }

    /// Whether a VolumeAttachment requests this volume on this node under another of our driver names than `driver`.
    /// Read from the API server, because the disk is detached otherwise.
    pub(crate) async fn is_attached_under_another_name(
        &self,
        handle: &ClaimName,
        node: &VmName,
        driver: &str,
    ) -> Result<bool, String> {
        if self.drivers.len() < 2 {
            return Ok(false);
        }
        let api: Api<VolumeAttachment> = Api::all(self.client.clone());
        let list = api.list(&ListParams::default()).await;
        let list =
            list.map_err(|error| format!("failed to list the guest's VolumeAttachments: {}", chain(&error)))?;
        let is_live = |one: &&VolumeAttachment| {
            one.node_name == node.as_str() && one.metadata.deletion_timestamp.is_none()
        };
        let is_volume = |csi: &CsiSource| {
            csi.volume_handle == handle.as_str() && csi.driver != driver && self.drivers.contains(&csi.driver)
        };
        Ok(list
            .items
            .iter()
            .filter(is_live)
            .any(|one| self.source_of(one).is_some_and(|csi| is_volume(&csi))))
    }

    /// The CSI source of a VolumeAttachment of our drivers.
    fn source_of(&self, attachment: &VolumeAttachment) -> Option<CsiSource> {
        let source = &attachment.source;
        let named = || self.volumes.get(&Key::cluster(source.persistent_volume_name.clone()?));
        source.inline.clone().or_else(|| named()?.spec.csi.clone())
    }

    /// Whether a VolumeSnapshotContent exists and is not being deleted. It is read only when a snapshot is created or
    /// stuck, so there is no watch. If it can't be read, it counts as existing.
    pub(crate) async fn has_live_content(&self, content: &str) -> bool {
        let kind = ApiResource::from_gvk(&GroupVersionKind::gvk(GROUP, "v1", "VolumeSnapshotContent"));
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &kind);
        match api.get_metadata_opt(content).await {
            Ok(found) => found.is_some_and(|found| found.metadata.deletion_timestamp.is_none()),
            Err(error) => {
                tracing::warn!(
                    content,
                    "failed to read the guest's VolumeSnapshotContent: {}",
                    chain(&error)
                );
                true
            }
        }
    }
}

/// State of a claim for which the volume `csi_name` was created.
fn state_of(claim: &PersistentVolumeClaim, csi_name: &CsiName) -> ClaimState {
    let named = claim.spec.volume_name.as_deref().unwrap_or_default();
    match is_volume_for(csi_name, claim.metadata.uid.as_deref()) {
        false => ClaimState::Gone,
        true if named.is_empty() => ClaimState::Pending,
        true => ClaimState::Bound,
    }
}

/// The name that Kubernetes gives the VolumeAttachment of a volume on a node (`getAttachmentName` in
/// `pkg/volume/csi/csi_attacher.go`).
pub(crate) fn attachment_name(handle: &ClaimName, node: &VmName, driver: &str) -> String {
    let mut hasher = Sha256::new();
    for part in [handle.as_str(), driver, node.as_str()] {
        hasher.update(part);
    }
    format!("csi-{:x}", hasher.finalize())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_attachment_name_is_that_of_kubernetes() {
        // printf %s%s%s volume driver node | sha256sum
        assert_eq!(
            attachment_name(&ClaimName::new("volume"), &VmName::new("node"), "driver"),
            "csi-d94279ecba6bb1a4dae95e5f896a0d7b6b60fb3af97abf98fb0c1bb2a80030a5"
        );
    }
}
