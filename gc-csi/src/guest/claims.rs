//! Guest claims: whether a volume's claim still exists, and whether it is bound.

use std::collections::HashSet;

use kube::Api;
use kube::api::ListParams;
use kube_kit::client::chain;
use kube_kit::informer::Key;
use kube_kit::partial::{PersistentVolume, PersistentVolumeClaim};

use super::{Guest, is_volume_for};

/// Page size of lists.
const PAGE: u32 = 500;

impl Guest {
    /// Whether the claim for which the volume `csi_name` was requested exists. If the cache has no such claim, the API
    /// server is asked, because the volume is deleted otherwise.
    pub(crate) async fn has_claim_for(&self, claim: &Key, csi_name: &str) -> Result<bool, String> {
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
    pub(crate) async fn claim_state(&self, claim: &Key, csi_name: &str) -> Result<ClaimState, String> {
        match self.claims.get(claim) {
            Some(cached) => Ok(state_of(&cached, csi_name)),
            None => self.claim_state_live(claim, csi_name).await,
        }
    }

    /// State of the claim for which the volume `csi_name` was created, read from the API server.
    pub(crate) async fn claim_state_live(&self, claim: &Key, csi_name: &str) -> Result<ClaimState, String> {
        let api: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), &claim.namespace);
        let found = api.get_opt(&claim.name).await.map_err(|error| {
            format!("failed to read guest PersistentVolumeClaim {claim}: {}", chain(&error))
        })?;
        Ok(found.map_or(ClaimState::Gone, |found| state_of(&found, csi_name)))
    }

    /// Handles of all our PersistentVolumes, read from the API server.
    pub(crate) async fn live_handles(&self) -> Result<HashSet<String>, String> {
        let api = Api::<PersistentVolume>::all(self.client.clone());
        let mut parameters = ListParams::default().limit(PAGE);
        let mut handles = HashSet::new();
        loop {
            let page = api.list(&parameters).await;
            let page = page.map_err(|error| {
                format!("failed to list the guest's PersistentVolumes: {}", chain(&error))
            })?;
            let csi = page.items.into_iter().filter_map(|volume| volume.spec.csi);
            handles.extend(csi.filter(|csi| self.drivers.contains(&csi.driver)).map(|csi| csi.volume_handle));
            // All pages are from one snapshot.
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => parameters = parameters.continue_token(&token),
                None => return Ok(handles),
            }
        }
    }
}

/// State of a claim for which the volume `csi_name` was created.
fn state_of(claim: &PersistentVolumeClaim, csi_name: &str) -> ClaimState {
    let named = claim.spec.volume_name.as_deref().unwrap_or_default();
    match is_volume_for(csi_name, claim.metadata.uid.as_deref()) {
        false => ClaimState::Gone,
        true if named.is_empty() => ClaimState::Pending,
        true => ClaimState::Bound,
    }
}

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
