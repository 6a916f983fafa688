//! One volume's round in the guest: all that its claim should show, found and written together.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use kube_kit::lean::{PersistentVolume, PersistentVolumeClaim};
use kube_kit::queue::Next;
use prometheus_client::metrics::gauge::Gauge;

use super::conditions::{self, Finding, shown};
use super::pods::Lister;
use super::usable::{Misfits, Told};
use super::{attach_state, growth, health, usable};
use crate::guest::{self, Guest};
use crate::management::Management;
use crate::management::sharing::Relation;

/// Shows volumes on guest claims.
pub(super) struct Show {
    guest: Guest,
    management: Management,
    abnormal: Mutex<HashSet<String>>,
    abnormal_count: Gauge,
    told: Told,
    pods: Lister,
}

impl Show {
    /// `abnormal_count` is kept at the number of volumes that are not well.
    pub(super) fn new(guest: Guest, management: Management, abnormal_count: Gauge) -> Self {
        let pods = Lister::new(guest.client.clone());
        Self { guest, management, abnormal: Mutex::default(), abnormal_count, told: Told::default(), pods }
    }

    /// Brings all that is shown of the volume of this handle up to date.
    pub(super) async fn reconcile(&self, handle: &str) -> Result<Next, String> {
        let volumes = self.guest.volumes_of(handle);
        let below = self.management.usable_claim(handle);
        let ill = below.as_ref().is_some_and(|(claim, _)| health::is_abnormal(claim));
        self.count(handle, ill && !volumes.is_empty());

        let mut homeless = Misfits::new();
        let mut claimed = Vec::new();
        for volume in &volumes {
            let misfit = self.management.fits(handle, &guest::asked(volume)).err();
            match self.guest.claim_of(volume) {
                Some(claim) => {
                    let below = below.as_ref().map(|(claim, relation)| (&**claim, *relation));
                    let mut findings = self.find(handle, volume, &claim, below);
                    let before = shown(&claim, usable::CONDITION);
                    findings.extend(usable::find(misfit.as_ref(), before));
                    claimed.push((claim, findings));
                }
                // The claim is gone: so may be all below, and nobody minds.
                None if self.guest.is_released(volume) => {}
                None => homeless.extend(volume.metadata.name.clone().zip(misfit)),
            }
        }
        for (name, misfit) in self.told.news(handle, &homeless) {
            if let Some(volume) = volumes.iter().find(|volume| volume.metadata.name.as_ref() == Some(&name)) {
                usable::tell(&self.guest, volume, &misfit);
            }
        }
        for (claim, findings) in claimed {
            conditions::show(&self.guest, &self.pods, &claim, findings).await?;
        }
        Ok(Next::Wait)
    }

    /// What the management cluster says of a volume that a claim has.
    fn find(
        &self,
        handle: &str,
        volume: &PersistentVolume,
        claim: &PersistentVolumeClaim,
        below: Option<(&PersistentVolumeClaim, Relation)>,
    ) -> Vec<Finding> {
        let was_attached = shown(claim, attach_state::CONDITION).is_some();
        let mut findings = Vec::new();
        findings.extend(attach_state::find(&self.management.machines_around(handle), handle, was_attached));
        let Some((below, relation)) = below else { return findings };
        findings.extend(health::find(below, shown(claim, crds::names::CONDITION_HEALTHY)));
        let sizes = claim.spec.requested.zip(claim.status.capacity);
        // Only its owner can expand a volume.
        if let (Relation::Own, Some(below), Some(volume), Some((requested, got))) =
            (relation, below.status.capacity, volume.spec.capacity, sizes)
        {
            let sizes = growth::Sizes { below, volume, requested, got };
            findings.extend(growth::find(sizes, &self.management.full_name(handle)));
        }
        findings
    }

    fn count(&self, handle: &str, ill: bool) {
        let mut abnormal = self.abnormal.lock().unwrap_or_else(PoisonError::into_inner);
        match ill {
            true => abnormal.insert(handle.to_owned()),
            false => abnormal.remove(handle),
        };
        self.abnormal_count.set(i64::try_from(abnormal.len()).unwrap_or(i64::MAX));
    }
}
