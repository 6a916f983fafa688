//! Condition `nestor.dev/Usable`: whether a guest PersistentVolume is compatible with its management claim. Without a
//! guest claim, an event on the PersistentVolume reports it.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};

use crds::names::ClaimName;
use k8s_openapi::api::core::v1::PersistentVolumeClaimCondition;
use kube_kit::partial::PersistentVolume;

use super::conditions::{ConditionUpdate, Reason, State, is_true};
use crate::compatibility::Incompatible;
use crate::events::Event;
use crate::guest::{Guest, reference};

/// Type of the condition.
pub(super) const CONDITION: &str = "nestor.dev/Usable";

/// The condition; None if there is nothing to report, as for a volume that was always compatible.
pub(super) fn condition(
    incompatible: Option<&Incompatible>,
    current: Option<&PersistentVolumeClaimCondition>,
) -> Option<ConditionUpdate> {
    let state = match incompatible {
        Some(incompatible) => State {
            is_true: false,
            reason: Reason::OfEvent,
            message: incompatible.to_string(),
            event: event(incompatible),
        },
        None if current.is_some_and(|current| !is_true(current)) => State {
            is_true: true,
            reason: Reason::Compatible,
            message: "the volume is now compatible with its management PersistentVolumeClaim".to_owned(),
            event: Event::VolumeCompatible,
        },
        None => return None,
    };
    Some(ConditionUpdate { condition: CONDITION, state: Some(state), notify_pods: true })
}

fn event(incompatible: &Incompatible) -> Event {
    match incompatible {
        Incompatible::ClaimNotFound(..) => Event::ManagementClaimNotFound,
        Incompatible::ClaimTerminating(_) => Event::ManagementClaimTerminating,
        Incompatible::Differs(..) => Event::ManagementClaimMismatch,
        Incompatible::Replaced { .. } => Event::ManagementVolumeReplaced,
    }
}

/// Incompatibilities reported on PersistentVolumes without a claim, by handle and name: they have no conditions.
#[derive(Debug, Default)]
pub(super) struct ReportedIncompatibilities(Mutex<HashMap<ClaimName, Incompatibilities>>);

/// Incompatibilities by name of the PersistentVolume.
pub(super) type Incompatibilities = BTreeMap<String, Incompatible>;

impl ReportedIncompatibilities {
    /// Stores the incompatibilities of a handle and returns those that changed.
    pub(super) fn take_changed(
        &self,
        handle: &ClaimName,
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

/// Reports an incompatibility as an event on a PersistentVolume.
pub(super) fn report(guest: &Guest, volume: &PersistentVolume, incompatible: &Incompatible) {
    event(incompatible).report(&guest.events, reference(volume), incompatible.to_string());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn incompatible(what: &str) -> Incompatible {
        Incompatible::ClaimNotFound(what.to_owned(), "c".to_owned(), "l".to_owned())
    }

    #[test]
    fn an_incompatibility_without_a_claim_is_reported_when_it_changes() {
        let reported = ReportedIncompatibilities::default();
        let one = |what| Incompatibilities::from([("pv-1".to_owned(), incompatible(what))]);
        assert_eq!(reported.take_changed(&ClaimName::new("h"), &one("a")), one("a"));
        assert_eq!(reported.take_changed(&ClaimName::new("h"), &one("a")), Incompatibilities::new());
        assert_eq!(reported.take_changed(&ClaimName::new("h"), &one("b")), one("b"));
        assert_eq!(
            reported.take_changed(&ClaimName::new("h"), &Incompatibilities::new()),
            Incompatibilities::new()
        );
        assert_eq!(reported.take_changed(&ClaimName::new("h"), &one("b")), one("b"));
    }

    #[test]
    fn compatibility_is_reported_only_after_an_incompatibility() {
        let before = |status: &str| PersistentVolumeClaimCondition {
            type_: CONDITION.to_owned(),
            status: status.to_owned(),
            ..Default::default()
        };
        assert_eq!(condition(None, None), None);
        assert_eq!(condition(None, Some(&before("True"))), None);
        assert!(condition(None, Some(&before("False"))).unwrap().state.unwrap().is_true);
        assert!(condition(Some(&incompatible("a")), None).unwrap().state.unwrap().event.is_warning());
    }
}
