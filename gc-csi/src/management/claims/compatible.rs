//! Compatibility of claims with the guest PersistentVolumes that name them.

use crds::names::ClaimName;
use kube_kit::partial::PersistentVolumeClaim;

use super::{Claims, bound_to, is_block};
use crate::compatibility::{self, ClaimProperties, Incompatible, PvRequirements};
use crate::management::identity::Relation;

impl Claims {
    /// Checks whether the claim of this name meets the requirements of a guest PersistentVolume.
    pub(crate) fn check_compatible(
        &self,
        name: &ClaimName,
        requirements: &PvRequirements,
    ) -> Result<(), Incompatible> {
        let claim_properties = self.usable(name).map(|(claim, relation)| ClaimProperties {
            capacity: claim.status.capacity,
            block: self.vm_api.keeps_volume_mode().then(|| is_block(&claim)),
            modes: claim.spec.access_modes.clone(),
            read_only: relation == Relation::Shared { read_only: true },
            volume: bound_to(&claim),
        });
        let share_label = self.identity.share_label();
        compatibility::check(requirements, &self.full_name(name), &share_label, claim_properties.as_ref())
    }

    /// Checks that the claim is not being deleted. Its disk may still be attached and in use.
    pub(crate) fn check_not_terminating(&self, name: &ClaimName) -> Result<(), Incompatible> {
        match self.usable(name) {
            Some((claim, _)) if claim.metadata.deletion_timestamp.is_some() => {
                Err(Incompatible::ClaimTerminating(self.full_name(name)))
            }
            _ => Ok(()),
        }
    }

    /// Checks whether the claim meets the requirements of at least one of these PersistentVolumes: a call does not name
    /// its PersistentVolume, and a misconfigured one must not block the others.
    pub(crate) fn check_any_compatible(
        &self,
        name: &ClaimName,
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
    pub(crate) fn check_pins_of(
        &self,
        name: &ClaimName,
        volumes: &[PvRequirements],
    ) -> Result<(), Incompatible> {
        let Some((claim, _)) = self.usable(name) else { return Ok(()) };
        self.check_pins(name, &claim, volumes)
    }

    /// Checks the pins of all of these PersistentVolumes against this claim.
    pub(in crate::management) fn check_pins(
        &self,
        name: &ClaimName,
        claim: &PersistentVolumeClaim,
        volumes: &[PvRequirements],
    ) -> Result<(), Incompatible> {
        let (name, bound) = (self.full_name(name), bound_to(claim));
        volumes
            .iter()
            .try_for_each(|requirements| compatibility::check_pin(requirements, &name, bound.as_deref()))
    }
}
