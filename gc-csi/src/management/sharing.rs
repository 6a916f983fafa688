//! Ownership and sharing of claims. A guest owns the claims with its own label and may use claims that the platform
//! team shares with it. Other claims do not exist for it.

use std::collections::BTreeMap;
use std::sync::Arc;

use crds::{VirtualMachine, names};
use kube_kit::partial::PersistentVolumeClaim;

use super::{Management, claims};
use crate::compatibility::{self, ClaimProperties, Incompatible, PvRequirements};

/// Relation of a claim to this guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Relation {
    /// The claim has this guest's label.
    Own,
    /// The claim is shared with this guest.
    Shared {
        /// Whether it is shared read-only.
        read_only: bool,
    },
}

impl Management {
    /// Relation of a claim to this guest; None if the guest may not use it.
    pub fn relation(&self, claim: &PersistentVolumeClaim) -> Option<Relation> {
        self.relation_of(claim.metadata.labels.as_ref())
    }

    /// Relation of an object with these labels to this guest.
    pub(super) fn relation_of(&self, labels: Option<&BTreeMap<String, String>>) -> Option<Relation> {
        let labels = labels?;
        let cluster = self.identity.cluster.as_str();
        if labels.get(names::LABEL_CLUSTER_ID).map(String::as_str) == Some(cluster) {
            return Some(Relation::Own);
        }
        match labels.get(&format!("{}{cluster}", names::LABEL_SHARE_PREFIX)).map(String::as_str) {
            Some("rw") => Some(Relation::Shared { read_only: false }),
            Some("ro") => Some(Relation::Shared { read_only: true }),
            _ => None,
        }
    }

    /// The claim of this name, if this guest may use it, and its relation.
    pub fn usable_claim(&self, name: &str) -> Option<(Arc<PersistentVolumeClaim>, Relation)> {
        let claim = self.claims.get(&self.key(name))?;
        let relation = self.relation(&claim)?;
        Some((claim, relation))
    }

    /// The claim of this name, if this guest owns it.
    pub fn claim(&self, name: &str) -> Option<Arc<PersistentVolumeClaim>> {
        self.usable_claim(name).filter(|(_, relation)| *relation == Relation::Own).map(|(claim, _)| claim)
    }

    /// Checks whether the claim of this name meets the requirements of a guest PersistentVolume.
    pub(crate) fn check_compatible(
        &self,
        name: &str,
        requirements: &PvRequirements,
    ) -> Result<(), Incompatible> {
        let claim_properties = self.usable_claim(name).map(|(claim, relation)| ClaimProperties {
            capacity: claim.status.capacity,
            block: claims::is_block(&claim),
            modes: claim.spec.access_modes.clone(),
            read_only: relation == Relation::Shared { read_only: true },
            volume: bound_to(&claim),
        });
        let share_label = format!("{}{}", names::LABEL_SHARE_PREFIX, self.identity.cluster);
        compatibility::check(requirements, &self.full_name(name), &share_label, claim_properties.as_ref())
    }

    /// Checks whether the claim meets the requirements of at least one of these PersistentVolumes: a call does not name
    /// its PersistentVolume, and a misconfigured one must not block the others.
    pub(crate) fn check_any_compatible(
        &self,
        name: &str,
        volumes: &[PvRequirements],
    ) -> Result<(), Incompatible> {
        let mut incompatible = None;
        for requirements in volumes {
            match self.check_compatible(name, requirements) {
                Ok(()) => return Ok(()),
                Err(found) => incompatible = incompatible.or(Some(found)),
            }
        }
        incompatible.map_or(Ok(()), Err)
    }

    /// Checks whether the claim is bound to the management PersistentVolume that all of these PersistentVolumes are
    /// pinned to. Succeeds if the guest may not use the claim; other checks report that.
    pub(crate) fn check_pins_of(&self, name: &str, volumes: &[PvRequirements]) -> Result<(), Incompatible> {
        let Some((claim, _)) = self.usable_claim(name) else { return Ok(()) };
        self.check_pins(name, &claim, volumes)
    }

    /// Checks the pins of all of these PersistentVolumes against this claim.
    pub(super) fn check_pins(
        &self,
        name: &str,
        claim: &PersistentVolumeClaim,
        volumes: &[PvRequirements],
    ) -> Result<(), Incompatible> {
        let (name, bound) = (self.full_name(name), bound_to(claim));
        volumes
            .iter()
            .try_for_each(|requirements| compatibility::check_pin(requirements, &name, bound.as_deref()))
    }

    /// Whether a VM's disk belongs to another guest, by the VM's label or, without one, by the claim's.
    pub(super) fn is_other_guests_disk(&self, vm: &VirtualMachine, claim: &str) -> bool {
        let labels = vm.metadata.labels.as_ref();
        match labels.and_then(|labels| labels.get(names::LABEL_CLUSTER_ID)) {
            Some(guest) => guest != self.identity.cluster.as_str(),
            None => self.claims.get(&self.key(claim)).is_some_and(|claim| self.is_other_guests(&claim)),
        }
    }

    /// Whether a claim belongs to another guest, and this guest neither created it nor uses or may use it. A claim that
    /// is missing or has no label does not count: its disk can still be detached.
    fn is_other_guests(&self, claim: &PersistentVolumeClaim) -> bool {
        let of = |map: Option<&BTreeMap<String, String>>, key| map.and_then(|map| map.get(key).cloned());
        let has_owner = of(claim.metadata.labels.as_ref(), names::LABEL_CLUSTER_ID).is_some();
        let made_by = of(claim.metadata.annotations.as_ref(), names::ANNOTATION_MADE_BY);
        let is_created_here = made_by.as_deref() == Some(self.identity.cluster.as_str());
        has_owner && !is_created_here && self.relation(claim).is_none() && !self.is_consumer(claim)
    }

    pub(super) fn owns(&self, claim: &PersistentVolumeClaim) -> bool {
        self.relation(claim) == Some(Relation::Own)
    }
}

/// The PersistentVolume that a claim is or will be bound to.
pub(super) fn bound_to(claim: &PersistentVolumeClaim) -> Option<String> {
    claim.spec.volume_name.clone().filter(|name| !name.is_empty())
}
