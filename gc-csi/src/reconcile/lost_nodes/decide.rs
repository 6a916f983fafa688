//! Whether gc-csi taints a guest Node as out of service, or takes its taint back. Pure.
//!
//! The taint lets Kubernetes delete the Node's pods and start them elsewhere, so it needs a proof: the Node is not ready, and
//! the storage infra has just proven that its VM does not run. With KubeVirt, gc-csi reads the proof itself: the instance has ended, or
//! there is neither an instance nor a pod of one. gc-csi recognizes its own taint by the value, and leaves all
//! others alone.

use std::fmt;

use crds::node_uuid;
use kube_kit::partial::Node;
use uuid::Uuid;

use crate::reconcile::taints::{is_out_of_service, is_own};
use crate::vm_volumes::{Vm, VmApi};

/// When gc-csi taints a Node by itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum TaintPolicy {
    /// Only people declare a Node out of service.
    Never,
    /// When its VM is proven off or gone: by the storage infra, or by KubeVirt.
    #[default]
    Proven,
}

/// The proof that a VM is off, as observed by this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Proof {
    /// There is none.
    None,
    /// It was not renewed yet since this process first saw it, so its age is unknown.
    Unconfirmed,
    /// It was renewed recently.
    Fresh,
    /// It was not renewed for too long.
    Stale,
    /// Its time differs from this clock by more than clocks may differ.
    OtherClock,
}

/// What is known about a Node.
#[derive(Debug, Clone, Copy)]
pub(super) struct Facts<'a> {
    pub(super) policy: TaintPolicy,
    pub(super) node: &'a Node,
    /// The VirtualMachine of the same name.
    pub(super) vm: Option<&'a Vm>,
    /// Whether that is another guest's.
    pub(super) is_other_guests: bool,
    pub(super) vm_api: VmApi,
    pub(super) proof: Proof,
}

/// What to do with a Node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Decision {
    Nothing,
    /// Taint it as out of service.
    Taint,
    /// Take gc-csi's taint back.
    Untaint,
    /// Report that it is not ready, and why it is not tainted.
    Report(Obstacle),
}

/// Why a Node that is not ready is not tainted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Obstacle {
    NoVm,
    OtherGuests,
    OtherUuid,
    NotProven,
    MayRun,
    Stale,
    OtherClock,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoVm => {
                "it has no VirtualMachine, so nothing can prove that its VM is off; if the VM was deleted for good, delete the Node"
            }
            Self::OtherGuests => {
                "its VirtualMachine is another guest's; ask the platform team whose VM it is"
            }
            Self::OtherUuid => {
                "its systemUUID is not the UUID in the status of its VirtualMachine; ask the platform team which VM it is"
            }
            Self::NotProven => {
                "the storage infra has not proven that its VM is off: the VM runs, is saved, cannot be inspected, or had no volume"
            }
            Self::MayRun => {
                "its VM may run: it has an instance that has not ended, or whose host does not answer, or a pod virt-launcher; if their \
                 host is lost, fence it, and then delete them"
            }
            Self::Stale => {
                "the proof that its VM is off is no longer renewed; ask the platform team whether mgmt-csi runs and reaches the \
                 storage infra"
            }
            Self::OtherClock => {
                "the time of the proof that its VM is off differs from the clock of gc-csi by more than 10 minutes; correct the clocks \
                 of both clusters"
            }
        })
    }
}

/// Whether the decision about a Node depends on the proof.
pub(super) fn needs_proof(policy: TaintPolicy, node: &Node) -> bool {
    let is_declared = || node.taints.iter().any(is_out_of_service);
    node.taints.iter().any(is_own) || policy == TaintPolicy::Proven && is_lost(node) && !is_declared()
}

/// What to do with a Node.
pub(super) fn decide(facts: &Facts<'_>) -> Decision {
    let taints = &facts.node.taints;
    if taints.iter().any(is_own) {
        return if has_returned(facts) { Decision::Untaint } else { Decision::Nothing };
    }
    let is_declared = taints.iter().any(is_out_of_service);
    if is_declared || facts.policy == TaintPolicy::Never || !is_lost(facts.node) {
        return Decision::Nothing;
    }
    match obstacle(facts) {
        Some(obstacle) => Decision::Report(obstacle),
        None if facts.proof == Proof::Fresh => Decision::Taint,
        None => Decision::Nothing,
    }
}

/// Whether a Node has stopped to report. One that has never reported has no condition, and one that is being deleted goes
/// without a taint.
fn is_lost(node: &Node) -> bool {
    node.metadata.deletion_timestamp.is_none() && matches!(node.ready.as_deref(), Some("False" | "Unknown"))
}

/// Whether the VM runs again. Pods that the Node needs to become ready may not tolerate the taint, so a VM that is powered on
/// suffices. The taint is not true any more then, and without it nothing is detached or deleted.
fn has_returned(facts: &Facts<'_>) -> bool {
    let power = || facts.vm?.status.as_ref()?.power_state.as_deref();
    let is_ended = matches!(facts.proof, Proof::None | Proof::Stale | Proof::OtherClock);
    is_ended && (facts.node.ready.as_deref() == Some("True") || power() == Some("PoweredOn"))
}

fn obstacle(facts: &Facts<'_>) -> Option<Obstacle> {
    let Some(vm) = facts.vm else { return Some(Obstacle::NoVm) };
    if facts.is_other_guests {
        return Some(Obstacle::OtherGuests);
    }
    match facts.proof {
        Proof::None if facts.vm_api == VmApi::KubeVirt => Some(Obstacle::MayRun),
        Proof::None => Some(Obstacle::NotProven),
        Proof::Stale => Some(Obstacle::Stale),
        Proof::OtherClock => Some(Obstacle::OtherClock),
        Proof::Fresh | Proof::Unconfirmed => (!is_same_vm(facts.node, vm)).then_some(Obstacle::OtherUuid),
    }
}

/// Whether a Node is this VM, as far as both report a UUID. Old firmware has the first three fields in another byte order.
fn is_same_vm(node: &Node, vm: &Vm) -> bool {
    let of_vm = || node_uuid(vm.status.as_ref()?);
    let (Some(node), Some(vm)) = (node.system_uuid.as_deref(), of_vm()) else { return true };
    match (node.parse::<Uuid>(), vm.parse::<Uuid>()) {
        (Ok(node), Ok(vm)) => node == vm || Uuid::from_bytes_le(node.into_bytes()) == vm,
        _ => false,
    }
}

#[cfg(test)]
#[path = "decide_tests.rs"]
mod tests;
