//! The record on a VirtualMachine that the storage infra has proven it off: gc-csi taints its guest Node because of it. Pure.

use std::time::Duration;

use crds::VirtualMachine;
use crds::names::ANNOTATION_PROVEN_OFF;
use infra_api::{Node, NodeState};
use k8s_openapi::jiff::Timestamp;

/// Age at which the record is renewed. gc-csi believes a record for three times as long.
pub(super) const RENEWAL: Duration = Duration::from_secs(30);
/// Interval between checks of a VM that is off without a proof, although it has disks: its QEMU may still be closing them.
pub(super) const RETRY: Duration = Duration::from_secs(10);

/// What to do with the record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    None,
    Write,
    Remove,
}

/// The time of the last proof that a VM is off.
pub(super) fn recorded(vm: &VirtualMachine) -> Option<&str> {
    vm.metadata.annotations.as_ref()?.get(ANNOTATION_PROVEN_OFF).map(String::as_str)
}

/// The change of the record by what the storage infra reports now.
pub(super) fn change(recorded: Option<&str>, proven_off: bool, now: Timestamp) -> Change {
    match (recorded, proven_off) {
        (None, false) => Change::None,
        (Some(_), false) => Change::Remove,
        (Some(time), true) if is_recent(time, now) => Change::None,
        (_, true) => Change::Write,
    }
}

/// Whether a record need not be renewed yet. One from the future is of another clock, or of no mgmt-csi.
fn is_recent(time: &str, now: Timestamp) -> bool {
    let age = time.parse().ok().and_then(|time: Timestamp| Duration::try_from(now.duration_since(time)).ok());
    age.is_some_and(|age| age < RENEWAL)
}

/// When a VM must be checked again although nothing has changed. The storage infra reports changes of the power state, but not
/// when a process closes the image of a VM that is off.
pub(super) fn next_check(node: &Node, has_disks: bool) -> Option<Duration> {
    match node.state {
        _ if node.proven_off => Some(RENEWAL),
        NodeState::Off | NodeState::Gone if has_disks => Some(RETRY),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use infra_api::Labels;
    use uuid::Uuid;

    use super::*;

    #[test]
    fn the_record_is_written_and_renewed_while_the_proof_holds_and_removed_with_it() {
        let now: Timestamp = "2026-01-01T00:01:00Z".parse().unwrap();
        let times = [None, Some("2026-01-01T00:00:31Z"), Some("2026-01-01T00:00:30Z"), Some("no time")];
        let changes = |proven| times.map(|time| change(time, proven, now));
        assert_eq!(changes(true), [Change::Write, Change::None, Change::Write, Change::Write]);
        assert_eq!(changes(false), [Change::None, Change::Remove, Change::Remove, Change::Remove]);
        assert_eq!(change(Some("2026-01-01T00:01:01Z"), true, now), Change::Write, "it is from the future");
    }

    #[test]
    fn a_vm_is_checked_again_while_it_is_proven_off_or_could_be() {
        let next = |state, proven_off, has_disks| {
            let node = Node {
                uuid: Uuid::from_u128(1),
                name: "vm".into(),
                hypervisor: "kvm".into(),
                zone: None,
                labels: Labels::new(),
                state,
                proven_off,
                max_disks: None,
                message: None,
            };
            next_check(&node, has_disks)
        };
        for state in [NodeState::Off, NodeState::Gone] {
            assert_eq!(next(state, true, false), Some(RENEWAL));
            assert_eq!(next(state, false, true), Some(RETRY));
            assert_eq!(next(state, false, false), None);
        }
        for state in [NodeState::Running, NodeState::Saved, NodeState::Unknown] {
            assert_eq!(next(state, false, true), None, "{state}");
        }
    }
}
