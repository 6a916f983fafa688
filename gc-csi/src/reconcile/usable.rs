//! Whether a volume fits the management claim that it names: told on the guest's claim, or on the volume while it has
//! none.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};

use k8s_openapi::api::core::v1::PersistentVolumeClaimCondition;
use kube_kit::lean::PersistentVolume;

use super::conditions::{Event, Finding, State, holds};
use crate::fit::Misfit;
use crate::guest::{Guest, reference};

/// Type of the condition.
pub(super) const CONDITION: &str = "nestor.dev/Usable";

/// What the guest's claim should say; None where there is nothing new, as with a volume that always fitted.
pub(super) fn find(
    misfit: Option<&Misfit>,
    shown: Option<&PersistentVolumeClaimCondition>,
) -> Option<Finding> {
    let state = match misfit {
        Some(misfit) => State {
            holds: false,
            reason: reason(misfit).to_owned(),
            message: misfit.to_string(),
            event: Event { warning: true, action: "Check", reason: reason(misfit) },
        },
        None if shown.is_some_and(|shown| !holds(shown)) => State {
            holds: true,
            reason: "Fits".to_owned(),
            message: "the volume fits its management PersistentVolumeClaim now".to_owned(),
            event: Event { warning: false, action: "Check", reason: "VolumeFits" },
        },
        None => return None,
    };
    Some(Finding { condition: CONDITION, state: Some(state), concerns_pods: true })
}

fn reason(misfit: &Misfit) -> &'static str {
    match misfit {
        Misfit::Unknown(..) => "ManagementClaimNotFound",
        Misfit::Differs(..) => "ManagementClaimDiffers",
        Misfit::Replaced { .. } => "ManagementVolumeReplaced",
    }
}

/// What was told of volumes that have no claim, by handle and name: they have no conditions that would remember it.
#[derive(Debug, Default)]
pub(super) struct Told(Mutex<HashMap<String, Misfits>>);

/// What does not fit, by the volume's name.
pub(super) type Misfits = BTreeMap<String, Misfit>;

impl Told {
    /// Takes all that there is to tell of volumes of this handle, and answers with what is new.
    pub(super) fn news(&self, handle: &str, misfits: &Misfits) -> Misfits {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = match misfits.is_empty() {
            true => told.remove(handle),
            false => told.insert(handle.to_owned(), misfits.clone()),
        };
        let before = before.unwrap_or_default();
        let is_new = |(name, misfit): &(&String, &Misfit)| before.get(*name) != Some(*misfit);
        misfits.iter().filter(is_new).map(|(name, misfit)| (name.clone(), misfit.clone())).collect()
    }
}

/// Tells on a volume what does not fit.
pub(super) fn tell(guest: &Guest, volume: &PersistentVolume, misfit: &Misfit) {
    guest.events.warning(reference(volume), "Check", reason(misfit), misfit.to_string());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn misfit(what: &str) -> Misfit {
        Misfit::Unknown(what.to_owned(), "c".to_owned(), "l".to_owned())
    }

    #[test]
    fn a_finding_about_a_volume_without_a_claim_is_told_when_it_changes() {
        let told = Told::default();
        let one = |what| Misfits::from([("pv-1".to_owned(), misfit(what))]);
        assert_eq!(told.news("h", &one("a")), one("a"));
        assert_eq!(told.news("h", &one("a")), Misfits::new());
        assert_eq!(told.news("h", &one("b")), one("b"));
        assert_eq!(told.news("h", &Misfits::new()), Misfits::new());
        assert_eq!(told.news("h", &one("b")), one("b"));
    }

    #[test]
    fn a_claim_learns_that_its_volume_fits_only_after_it_did_not() {
        let before = |status: &str| PersistentVolumeClaimCondition {
            type_: CONDITION.to_owned(),
            status: status.to_owned(),
            ..Default::default()
        };
        assert_eq!(find(None, None), None);
        assert_eq!(find(None, Some(&before("True"))), None);
        assert!(find(None, Some(&before("False"))).unwrap().state.unwrap().holds);
        assert!(find(Some(&misfit("a")), None).unwrap().state.unwrap().event.warning);
    }
}
