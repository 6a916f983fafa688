//! What is known about the saved state of a VM, and what follows for its power state.

use infra_api::NodeState;

use crate::catalog::NodeRow;
use crate::hypervisor::Power;

/// Known saved state of a VM, in addition to what its hypervisor reports now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct SavedState {
    /// It was saved and has not run since. Stored in the catalog.
    pub(super) saved: bool,
    /// Its saved state was discarded, and it has not run since.
    pub(super) discarded: bool,
    /// Recently the hypervisor itself kept the saved memory (managed save).
    pub(super) kept: bool,
}

impl SavedState {
    /// The state after an observation.
    pub(super) fn after(self, power: Power) -> Self {
        match power {
            Power::Running { executing: true } | Power::Off { shut_down: true } => Self::default(),
            // Loading the saved memory may still fail.
            Power::Running { executing: false } => Self { kept: false, ..self },
            Power::Saved { managed: true } => Self { saved: true, discarded: false, kept: true },
            // The managed save that was there a moment ago was restored or removed through the hypervisor.
            _ if self.kept => Self { saved: false, discarded: true, kept: false },
            Power::Saved { managed: false } => Self { saved: !self.discarded, ..self },
            Power::Off { shut_down: false } | Power::Gone => self,
        }
    }

    /// The node's state.
    pub(super) fn state(self, power: Power) -> NodeState {
        match power {
            Power::Saved { managed: false } if self.discarded => NodeState::Off,
            Power::Off { shut_down: false } | Power::Gone if self.saved => NodeState::Saved,
            _ => power.state(),
        }
    }
}

/// Message: why a saved VM keeps its disks, and what to do.
pub(super) fn saved_message(node: &NodeRow, power: Power) -> String {
    let (name, uuid) = (&node.spec.name, node.uuid);
    let discard = match power {
        Power::Saved { managed: true } => format!("virsh managedsave-remove {uuid}"),
        _ => format!(
            "remove the file that it was saved to, then run storage-infra node discard-saved-state {uuid}"
        ),
    };
    format!(
        "the VM {name} ({uuid}) is saved and will resume with the disks that it had: start or restore it, or discard its \
         saved state ({discard})"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUNS: Power = Power::Running { executing: true };
    const LOADS: Power = Power::Running { executing: false };
    const ENDED: Power = Power::Off { shut_down: true };
    const OFF: Power = Power::Off { shut_down: false };
    const IN_FILE: Power = Power::Saved { managed: false };
    const KEPT: Power = Power::Saved { managed: true };

    /// The node's state after these observations.
    fn state(observations: &[Power]) -> NodeState {
        let known = observations.iter().fold(SavedState::default(), |known, power| known.after(*power));
        known.state(*observations.last().unwrap())
    }

    #[test]
    fn a_saved_vm_stays_saved_until_it_runs_even_if_libvirt_forgets() {
        for later in [&[][..], &[OFF], &[Power::Gone], &[OFF, LOADS, OFF], &[LOADS, IN_FILE]] {
            let observations = [&[RUNS, IN_FILE], later].concat();
            assert_eq!(state(&observations), NodeState::Saved, "{observations:?}");
            assert_eq!(state(&[&observations[..], &[RUNS]].concat()), NodeState::Running);
            assert_eq!(state(&[&observations[..], &[RUNS, OFF]].concat()), NodeState::Off);
            assert_eq!(state(&[&observations[..], &[ENDED]].concat()), NodeState::Off);
            assert_eq!(state(&[&observations[..], &[RUNS, Power::Gone]].concat()), NodeState::Gone);
        }
    }

    #[test]
    fn a_removed_managed_save_counts_as_discarded_only_if_it_was_observed_recently() {
        // The reason persists after the saved memory is removed.
        assert_eq!(state(&[RUNS, KEPT]), NodeState::Saved);
        for after in [IN_FILE, OFF] {
            assert_eq!(state(&[RUNS, KEPT, after]), NodeState::Off);
            assert_eq!(state(&[RUNS, KEPT, after, after]), NodeState::Off);
        }
        assert_eq!(state(&[RUNS, KEPT, Power::Gone]), NodeState::Gone);
        assert_eq!(state(&[RUNS, KEPT, IN_FILE, RUNS, IN_FILE]), NodeState::Saved);
        // There was no recent observation, or the server was restarted.
        let known = SavedState { kept: false, ..SavedState::default().after(KEPT) };
        assert_eq!(known.after(IN_FILE).state(IN_FILE), NodeState::Saved);
        assert_eq!(known.after(OFF).state(OFF), NodeState::Saved);
    }

    #[test]
    fn a_vm_that_was_never_saved_has_the_state_that_its_hypervisor_reports() {
        for (power, expected) in [
            (RUNS, NodeState::Running),
            (LOADS, NodeState::Running),
            (OFF, NodeState::Off),
            (ENDED, NodeState::Off),
            (Power::Gone, NodeState::Gone),
        ] {
            assert_eq!(state(&[power]), expected);
        }
    }
}
