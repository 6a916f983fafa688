//! Whether the guest still wants a volume that is being made, or was.

use std::collections::HashSet;

use kube::Api;
use kube::api::ListParams;
use kube_kit::client::chain;
use kube_kit::informer::Key;
use kube_kit::lean::{PersistentVolume, PersistentVolumeClaim};

use super::{Guest, is_volume_for};

/// How many volumes are read at once.
const PAGE: u32 = 500;

impl Guest {
    /// Whether this is the claim for which the volume `csi_name` was asked for, and is there. Where the watch does not show
    /// it, the claim is read: what is not wanted is deleted.
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
            format!("cannot read the guest's PersistentVolumeClaim {claim}: {}", chain(&error))
        })?;
        Ok(found.is_some_and(|found| is_volume_for(csi_name, found.metadata.uid.as_deref())))
    }

    /// How the claim stands for which the volume `csi_name` was made, by the watch or else as the API says now.
    pub(crate) async fn claim_state(&self, claim: &Key, csi_name: &str) -> Result<ClaimState, String> {
        match self.claims.get(claim) {
            Some(cached) => Ok(state_of(&cached, csi_name)),
            None => self.claim_state_live(claim, csi_name).await,
        }
    }

    /// The same as the API says now.
    pub(crate) async fn claim_state_live(&self, claim: &Key, csi_name: &str) -> Result<ClaimState, String> {
        let api: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), &claim.namespace);
        let found = api.get_opt(&claim.name).await.map_err(|error| {
            format!("cannot read the guest's PersistentVolumeClaim {claim}: {}", chain(&error))
        })?;
        Ok(found.map_or(ClaimState::Gone, |found| state_of(&found, csi_name)))
    }

    /// The handles of all volumes of ours, as the API says now.
    pub(crate) async fn live_handles(&self) -> Result<HashSet<String>, String> {
        let api = Api::<PersistentVolume>::all(self.client.clone());
        let mut parameters = ListParams::default().limit(PAGE);
        let mut handles = HashSet::new();
        loop {
            let page = api.list(&parameters).await;
            let page = page
                .map_err(|error| format!("cannot read the guest's PersistentVolumes: {}", chain(&error)))?;
            let csi = page.items.into_iter().filter_map(|volume| volume.spec.csi);
            handles.extend(csi.filter(|csi| self.drivers.contains(&csi.driver)).map(|csi| csi.volume_handle));
            // The pages that follow are of the same moment as the first.
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => parameters = parameters.continue_token(&token),
                None => return Ok(handles),
            }
        }
    }
}

/// How a claim stands for which the volume `csi_name` was made.
fn state_of(claim: &PersistentVolumeClaim, csi_name: &str) -> ClaimState {
    let named = claim.spec.volume_name.as_deref().unwrap_or_default();
    match is_volume_for(csi_name, claim.metadata.uid.as_deref()) {
        false => ClaimState::Gone,
        true if named.is_empty() => ClaimState::Pending,
        true => ClaimState::Bound,
    }
}

/// What a guest's claim still wants of the volume that was made for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClaimState {
    /// The claim is gone, or another has its name.
    Gone,
    /// It waits for a volume.
    Pending,
    /// It says that it has one.
    Bound,
}
