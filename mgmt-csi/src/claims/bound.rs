//! Which claims are bound to which volumes of this driver.

use std::collections::HashSet;
use std::sync::Arc;

use infra_api::VolumeId;
use kube_kit::informer::Key;
use kube_kit::latest::Latest;
use kube_kit::lean::{PersistentVolume, PersistentVolumeClaim};

use crate::cluster::{self, Volumes};

/// Claims and volumes.
#[derive(Debug, Clone)]
pub(super) struct Bound {
    pub(super) claims: Arc<Latest<PersistentVolumeClaim>>,
    pub(super) volumes: Volumes,
}

impl Bound {
    /// The claims that a volume of the infra is bound to: one, unless several PersistentVolumes name it.
    pub(super) fn claims_of(&self, id: &VolumeId) -> Vec<Key> {
        self.volumes.of_handle(id.as_str()).iter().filter_map(|volume| self.claim_of(volume)).collect()
    }

    /// The volumes of the infra that claims are bound to.
    pub(super) fn ids(&self) -> HashSet<VolumeId> {
        let bound = |volume: &Arc<PersistentVolume>| {
            self.claim_of(volume).and(VolumeId::new(cluster::handle(&volume.spec)?).ok())
        };
        self.volumes.informer().list().iter().filter_map(bound).collect()
    }

    /// The claim that a volume is bound to, and that is bound to it.
    pub(super) fn claim_of(&self, volume: &PersistentVolume) -> Option<Key> {
        let key = cluster::claim_of(&volume.spec)?;
        let claim = self.claims.get(&key).filter(|claim| claim.metadata.deletion_timestamp.is_none())?;
        cluster::is_bound_back(&volume.spec, &claim).then_some(key)
    }
}
