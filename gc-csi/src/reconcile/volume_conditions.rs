//! Reconciler of the conditions of guest claims.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use crds::names::ClaimName;
use kube_kit::pace::Pace;
use kube_kit::partial::{PersistentVolume, PersistentVolumeClaim};
use kube_kit::queue::NextAction;
use prometheus_client::metrics::gauge::Gauge;

use super::conditions::{self, ConditionUpdate, current};
use super::pods::PodLister;
use super::pv_usable::{Incompatibilities, ReportedIncompatibilities};
use super::{attach_state, health, pv_usable, resizable};
use crate::guest::{self, Guest};
use crate::management::{Management, Relation};

/// Updates the conditions of guest claims.
pub(super) struct VolumeConditions {
    guest: Guest,
    management: Management,
    abnormal: Mutex<HashSet<ClaimName>>,
    abnormal_count: Gauge,
    reported: ReportedIncompatibilities,
    pods: PodLister,
    pace: Pace,
}

impl VolumeConditions {
    /// `abnormal_count` is set to the number of abnormal volumes.
    pub(super) fn new(guest: Guest, management: Management, abnormal_count: Gauge, pace: Pace) -> Self {
        let pods = PodLister::new(guest.client.clone());
        Self {
            guest,
            management,
            abnormal: Mutex::default(),
            abnormal_count,
            reported: ReportedIncompatibilities::default(),
            pods,
            pace,
        }
    }

    /// Updates the conditions of all claims of the volume with this handle.
    pub(super) async fn reconcile(&self, handle: &ClaimName) -> Result<NextAction, String> {
        let volumes = self.guest.volumes_of(handle);
        let management_claim = self.management.claims.usable(handle);
        let failure = self.management.vms.disk_failure(handle);
        let is_abnormal = management_claim
            .as_ref()
            .is_some_and(|(claim, _)| health::is_abnormal(claim, failure.as_deref()));
        self.count(handle, is_abnormal && !volumes.is_empty());

        let mut unclaimed = Incompatibilities::new();
        let mut claimed = Vec::new();
        let claims = &self.management.claims;
        for volume in &volumes {
            let compatible = claims.check_compatible(handle, &guest::requirements(volume));
            let incompatible = compatible.and_then(|()| claims.check_not_terminating(handle)).err();
            match self.guest.claim_of(volume) {
                Some(claim) => {
                    let management_claim =
                        management_claim.as_ref().map(|(claim, relation)| (&**claim, *relation));
                    let mut updates =
                        self.volume_updates(handle, volume, &claim, management_claim, failure.as_deref());
                    let before = current(&claim, pv_usable::CONDITION);
                    updates.extend(pv_usable::condition(incompatible.as_ref(), before));
                    claimed.push((claim, updates));
                }
                // The claim was deleted, and the management claim may be deleted too: nothing to report.
                None if self.guest.is_released(volume) => {}
                None => unclaimed.extend(volume.metadata.name.clone().zip(incompatible)),
            }
        }
        for (name, incompatible) in self.reported.take_changed(handle, &unclaimed) {
            if let Some(volume) = volumes.iter().find(|volume| volume.metadata.name.as_ref() == Some(&name)) {
                pv_usable::report(&self.guest, volume, &incompatible);
            }
        }
        for (claim, updates) in claimed {
            conditions::apply(&self.guest, &self.pods, &self.pace, &claim, updates).await?;
        }
        Ok(NextAction::AwaitChange)
    }

    /// Condition updates from the management cluster for a claimed volume.
    fn volume_updates(
        &self,
        handle: &ClaimName,
        volume: &PersistentVolume,
        claim: &PersistentVolumeClaim,
        management_claim: Option<(&PersistentVolumeClaim, Relation)>,
        disk_failure: Option<&str>,
    ) -> Vec<ConditionUpdate> {
        let was_attached = current(claim, attach_state::CONDITION).is_some();
        let mut updates = Vec::new();
        let vms = &self.management.vms;
        updates.extend(attach_state::condition(&vms.referencing(handle), handle, was_attached, |vm| {
            vms.is_other_guests(vm)
        }));
        let Some((management_claim, relation)) = management_claim else { return updates };
        let healthy = current(claim, crds::names::CONDITION_HEALTHY);
        updates.extend(health::condition(management_claim, disk_failure, healthy));
        let sizes = claim.spec.requested.zip(claim.status.capacity);
        // Only the owner can expand a volume.
        if let (Relation::Own, Some(management_capacity), Some(pv_capacity), Some((requested, capacity))) =
            (relation, management_claim.status.capacity, volume.spec.capacity, sizes)
        {
            let sizes = resizable::Sizes { management_capacity, pv_capacity, requested, capacity };
            updates.extend(resizable::condition(sizes, &self.management.claims.full_name(handle)));
        }
        updates
    }

    fn count(&self, handle: &ClaimName, is_abnormal: bool) {
        let mut abnormal = self.abnormal.lock().unwrap_or_else(PoisonError::into_inner);
        match is_abnormal {
            true => abnormal.insert(handle.to_owned()),
            false => abnormal.remove(handle),
        };
        self.abnormal_count.set(i64::try_from(abnormal.len()).unwrap_or(i64::MAX));
    }
}
