//! Bindings between claims and volumes of this driver.

use std::collections::HashSet;
use std::sync::Arc;

use infra_api::VolumeId;
use kube_kit::informer::Key;
use kube_kit::mutation_cache::MutationCache;
use kube_kit::partial::{PersistentVolume, PersistentVolumeClaim};

use crate::cluster::{self, Volumes};

/// Caches of claims and volumes.
#[derive(Debug, Clone)]
pub(super) struct Bindings {
    pub(super) claims: Arc<MutationCache<PersistentVolumeClaim>>,
    pub(super) volumes: Volumes,
}

impl Bindings {
    /// The claims bound to a volume of the storage infra: normally one.
    pub(super) fn claims_of(&self, id: &VolumeId) -> Vec<Key> {
        self.volumes.of_volume(id).iter().filter_map(|volume| self.claim_of(volume)).collect()
    }

    /// IDs of all volumes that are bound to claims.
    pub(super) fn ids(&self) -> HashSet<VolumeId> {
        let bindings = |volume: &Arc<PersistentVolume>| {
            self.claim_of(volume).and(VolumeId::new(cluster::handle(&volume.spec)?).ok())
        };
        self.volumes.informer().list().iter().filter_map(bindings).collect()
    }

    /// Namespaces of all claims bound to a volume of the storage infra, also of those that are being deleted.
    pub(super) fn namespaces_of(&self, id: &VolumeId) -> Vec<String> {
        let claims = self.volumes.of_volume(id);
        claims.iter().filter_map(|volume| Some(self.bound_claim(volume)?.0.namespace)).collect()
    }

    /// The claim of a volume, if both are bound to each other and the claim is not being deleted.
    pub(super) fn claim_of(&self, volume: &PersistentVolume) -> Option<Key> {
        self.bound_claim(volume).filter(|(_, claim)| !cluster::is_terminating(claim)).map(|(key, _)| key)
    }

    fn bound_claim(&self, volume: &PersistentVolume) -> Option<(Key, Arc<PersistentVolumeClaim>)> {
        let key = cluster::claim_of(&volume.spec)?;
        let claim = self.claims.get(&key).filter(|claim| cluster::is_bound_back(claim, &volume.spec))?;
        Some((key, claim))
    }
}
