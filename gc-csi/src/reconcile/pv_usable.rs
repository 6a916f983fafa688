//! Whether a volume fits the management claim that it names: told on the guest's claim, or on the volume while it has
//! none.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};

use k8s_openapi::api::core::v1::PersistentVolumeClaimCondition;
use kube_kit::lean::PersistentVolume;

use super::conditions::{ConditionUpdate, Event, State, is_true};
use crate::compatibility::Incompatible;
use crate::guest::{Guest, reference};

/// Type of the condition.
pub(super) const CONDITION: &str = "nestor.dev/Usable";

/// What the guest's claim should say; None where there is nothing new, as with a volume that always fitted.
pub(super) fn condition(
    incompatible: Option<&Incompatible>,
    current: Option<&PersistentVolumeClaimCondition>,
) -> Option<ConditionUpdate> {
    let state = match incompatible {
        Some(incompatible) => State {
            is_true: false,
            reason: reason(incompatible).to_owned(),
            message: incompatible.to_string(),
            event: Event { warning: true, action: "Check", reason: reason(incompatible) },
        },
        None if current.is_some_and(|current| !is_true(current)) => State {
            is_true: true,
            reason: "Fits".to_owned(),
            message: "the volume fits its management PersistentVolumeClaim now".to_owned(),
            event: Event { warning: false, action: "Check", reason: "VolumeFits" },
        },
        None => return None,
    };
    Some(ConditionUpdate { condition: CONDITION, state: Some(state), notify_pods: true })
}

fn reason(incompatible: &Incompatible) -> &'static str {
    match incompatible {
        Incompatible::ClaimNotFound(..) => "ManagementClaimNotFound",
        Incompatible::Differs(..) => "ManagementClaimDiffers",
        Incompatible::Replaced { .. } => "ManagementVolumeReplaced",
    }
}

/// What was told of volumes that have no claim, by handle and name: they have no conditions that would remember it.
#[derive(Debug, Default)]
pub(super) struct ReportedIncompatibilities(Mutex<HashMap<String, Incompatibilities>>);

/// What does not fit, by the volume's name.
pub(super) type Incompatibilities = BTreeMap<String, Incompatible>;

impl ReportedIncompatibilities {
    /// Takes all that there is to tell of volumes of this handle, and answers with what is new.
    pub(super) fn take_changed(
        &self,
        handle: &str,
        incompatibilities: &Incompatibilities,
    ) -> Incompatibilities {
        let mut reported = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = match incompatibilities.is_empty() {
            true => reported.remove(handle),
            false => reported.insert(handle.to_owned(), incompatibilities.clone()),
        };
        let before = before.unwrap_or_default();
        let is_new =
            |(name, incompatible): &(&String, &Incompatible)| before.get(*name) != Some(*incompatible);
        incompatibilities
            .iter()
            .filter(is_new)
            .map(|(name, incompatible)| (name.clone(), incompatible.clone()))
            .collect()
    }
}

/// Tells on a volume what does not fit.
pub(super) fn report(guest: &Guest, volume: &PersistentVolume, incompatible: &Incompatible) {
    guest.events.warning(reference(volume), "Check", reason(incompatible), incompatible.to_string());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn incompatible(what: &str) -> Incompatible {
        Incompatible::ClaimNotFound(what.to_owned(), "c".to_owned(), "l".to_owned())
    }

    #[test]
    fn a_finding_about_a_volume_without_a_claim_is_told_when_it_changes() {
        let reported = ReportedIncompatibilities::default();
        let one = |what| Incompatibilities::from([("pv-1".to_owned(), incompatible(what))]);
        assert_eq!(reported.take_changed("h", &one("a")), one("a"));
        assert_eq!(reported.take_changed("h", &one("a")), Incompatibilities::new());
        assert_eq!(reported.take_changed("h", &one("b")), one("b"));
        assert_eq!(reported.take_changed("h", &Incompatibilities::new()), Incompatibilities::new());
        assert_eq!(reported.take_changed("h", &one("b")), one("b"));
    }

    #[test]
    fn a_claim_learns_that_its_volume_fits_only_after_it_did_not() {
        let before = |status: &str| PersistentVolumeClaimCondition {
            type_: CONDITION.to_owned(),
            status: status.to_owned(),
            ..Default::default()
        };
        assert_eq!(condition(None, None), None);
        assert_eq!(condition(None, Some(&before("True"))), None);
        assert!(condition(None, Some(&before("False"))).unwrap().state.unwrap().is_true);
        assert!(condition(Some(&incompatible("a")), None).unwrap().state.unwrap().event.warning);
    }
}
