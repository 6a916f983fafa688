//! Whose a claim is. A guest has the claims that carry its own label, and may use those that the platform team shares
//! with it; to this guest no other claim exists.

use std::collections::BTreeMap;
use std::sync::Arc;

use crds::{VirtualMachine, names};
use kube_kit::lean::PersistentVolumeClaim;

use super::{Management, claims};
use crate::compatibility::{self, ClaimProperties, Incompatible, PvRequirements};

/// What a claim is to this guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Relation {
    /// It carries this guest's label.
    Own,
    /// It is shared with this guest, for reading only or for writing too.
    Shared {
        /// Whether this guest may only read.
        read_only: bool,
    },
}

impl Management {
    /// What a claim is to this guest; None when it is nothing to it.
    pub fn relation(&self, claim: &PersistentVolumeClaim) -> Option<Relation> {
        self.relation_of(claim.metadata.labels.as_ref())
    }

    /// What an object with these labels is to this guest.
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

    /// The claim of this name that this guest may use, and what it is to it.
    pub fn usable_claim(&self, name: &str) -> Option<(Arc<PersistentVolumeClaim>, Relation)> {
        let claim = self.claims.get(&self.key(name))?;
        let relation = self.relation(&claim)?;
        Some((claim, relation))
    }

    /// The guest's own claim of this name.
    pub fn claim(&self, name: &str) -> Option<Arc<PersistentVolumeClaim>> {
        self.usable_claim(name).filter(|(_, relation)| *relation == Relation::Own).map(|(claim, _)| claim)
    }

    /// Whether what a guest's volume wants of the claim of this name can be had of it.
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

    /// Whether one of the guest's volumes that name this claim can be had of it. A call doesn't say for which of them it
    /// is, and one that a person got wrong must not stand in the way of another.
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

    /// Whether the claim of this name has the bytes that the guest's volumes which name it stand for: all of them, since a
    /// call doesn't say for which it is. Of a claim that is nothing to this guest, others tell.
    pub(crate) fn check_pins_of(&self, name: &str, volumes: &[PvRequirements]) -> Result<(), Incompatible> {
        let Some((claim, _)) = self.usable_claim(name) else { return Ok(()) };
        self.check_pins(name, &claim, volumes)
    }

    /// Whether this very claim has the bytes that all of these volumes stand for.
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

    /// Whether the disk that a VM has of a claim is another guest's: the VM's label says so, or, where it has
    /// none, the claim.
    pub(super) fn is_other_guests_disk(&self, vm: &VirtualMachine, claim: &str) -> bool {
        let labels = vm.metadata.labels.as_ref();
        match labels.and_then(|labels| labels.get(names::LABEL_CLUSTER_ID)) {
            Some(guest) => guest != self.identity.cluster.as_str(),
            None => self.claims.get(&self.key(claim)).is_some_and(|claim| self.is_other_guests(&claim)),
        }
    }

    /// Whether a claim is another guest's, and this one neither made it nor may use it, nor still does since it could. One
    /// that is gone, or that lost its label, is not known to be: it can still be taken out of VMs.
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

/// The PersistentVolume that a claim is bound to, or is to be.
pub(super) fn bound_to(claim: &PersistentVolumeClaim) -> Option<String> {
    claim.spec.volume_name.clone().filter(|name| !name.is_empty())
}
