//! Steps of the node in the guest and of the pod.

use crds::names::{GUEST_DRIVER, TAINT_OUT_OF_SERVICE, TAINT_PROVEN_OFF};
use k8s_openapi::api::core::v1::{Node, Pod, Taint};

use super::attachments::is_attached;
use super::step::{State, Step, created, deleted};
use crate::clusters::Tier;
use crate::gather::snapshot::{Placement, Snapshot, found};

/// Steps of a node that uses or has the volume.
pub fn steps(snapshot: &Snapshot, placement: &Placement) -> Vec<Step> {
    let is_needed = placement.is_used || is_attached(placement);
    if !is_needed || !snapshot.sees_guest {
        return Vec::new();
    }
    [node(placement), csi_node(placement)].into_iter().flatten().collect()
}

fn node(placement: &Placement) -> Option<Step> {
    let object = placement.node.as_ref()?;
    let (step, found) = Step::of(Tier::Guest, "Node", object);
    Some(match found {
        Some(node) => judge_node(node, step),
        None if object.is_missing() && !placement.is_used => {
            step.is(State::Warning, "does not exist, but its VM has the disk")
        }
        None => step,
    })
}

fn judge_node(node: &Node, step: Step) -> Step {
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let ready = conditions.clone().find(|condition| condition.type_ == "Ready");
    let since = ready.and_then(|ready| ready.last_transition_time.as_ref()).map(|time| time.0);
    let mut taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    if let Some(taint) = taints.find(|taint| taint.key == TAINT_OUT_OF_SERVICE) {
        return out_of_service(taint, step);
    }
    match ready {
        Some(ready) if ready.status == "True" => step.is(State::Ok, "Ready").since(since),
        Some(ready) => step
            .is(State::Warning, "NotReady")
            .since(since)
            .because(ready.message.clone().unwrap_or_default())
            .next("recover the node; if it is lost, see docs/guides/node-loss.md"),
        None => step.is(State::Unknown, "kubelet has not reported").since(created(&node.metadata)),
    }
}

fn out_of_service(taint: &Taint, step: Step) -> Step {
    let step = step.is(State::Warning, "out of service");
    match taint.value.as_deref() {
        Some(TAINT_PROVEN_OFF) => step
            .because("gc-csi has set the taint, because the VM is proven off")
            .next("start the VM, and gc-csi removes the taint; or delete the Node"),
        _ => step.next("remove the taint when the node is repaired"),
    }
}

/// Shown only if the driver is not registered.
fn csi_node(placement: &Placement) -> Option<Step> {
    let object = placement.csi_node.as_ref()?;
    let (step, found) = Step::of(Tier::Guest, "CSINode", object);
    let is_registered =
        found.is_some_and(|found| found.spec.drivers.iter().any(|one| one.name == GUEST_DRIVER));
    let is_readable = found.is_some() || object.is_missing();
    (is_readable && !is_registered && placement.is_used).then(|| {
        step.is(State::Stuck, format!("{GUEST_DRIVER} is not registered"))
            .because("the node plugin has not registered with kubelet on this node")
            .next("check the gc-csi-node pod of this node")
    })
}

/// The pod that the trace started from.
pub fn pod(snapshot: &Snapshot) -> Option<Step> {
    let object = snapshot.pod.as_ref()?;
    let (step, found) = Step::of(Tier::Guest, "Pod", object);
    Some(match found {
        Some(pod) => judge_pod(snapshot, pod, step),
        None => step,
    })
}

fn judge_pod(snapshot: &Snapshot, pod: &Pod, step: Step) -> Step {
    let status = pod.status.clone().unwrap_or_default();
    let phase = status.phase.clone().unwrap_or_else(|| "Pending".to_owned());
    let since = status.start_time.as_ref().map(|time| time.0).or_else(|| created(&pod.metadata));
    let step = step.since(since).detail("node", pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref()));
    if let Some(time) = deleted(&pod.metadata) {
        return step
            .is(State::Waiting, "being deleted")
            .since(Some(time))
            .next("wait: kubelet unmounts its volumes");
    }
    let unscheduled =
        status.conditions.iter().flatten().find(|one| one.type_ == "PodScheduled" && one.status == "False");
    match (phase.as_str(), unscheduled) {
        ("Pending", Some(condition)) => step
            .is(State::Stuck, "not scheduled")
            .because(condition.message.clone().unwrap_or_default())
            .next(
                "see the message: capacity, zone or volume limit (docs/guides/topology.md), or the claim \
             is not bound",
            ),
        ("Pending", None) => waiting(snapshot, step),
        _ => step.is(State::Ok, phase),
    }
}

/// A scheduled pod that does not run: it waits for its volumes, or for something else.
fn waiting(snapshot: &Snapshot, step: Step) -> Step {
    let is_attached = snapshot.placements.iter().filter(|one| one.is_used).any(|one| {
        let above = found(&one.guest_attachment).and_then(|attachment| attachment.status.as_ref());
        above.is_some_and(|status| status.attached)
    });
    let step =
        step.is(State::Waiting, if is_attached { "waits for the mount" } else { "waits for the attach" });
    match is_attached {
        true => {
            step.next("wait; if it takes long, see the pod's events and the log of gc-csi-node on its node")
        }
        false => step.next("see the steps above"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn it_says_who_removes_the_out_of_service_taint() {
        let action = |value: &str| {
            let taint = json!({"key": TAINT_OUT_OF_SERVICE, "value": value, "effect": "NoExecute"});
            let node = serde_json::from_value(json!({"metadata": {}, "spec": {"taints": [taint]}})).unwrap();
            let step = judge_node(&node, Step::new(Tier::Guest, "Node", "n"));
            (step.state, step.action.unwrap_or_default())
        };
        let (state, own) = action("proven-off");
        assert!(state == State::Warning && own.contains("gc-csi removes the taint"), "{own}");
        let (state, persons) = action("nodeshutdown");
        assert!(state == State::Warning && persons.starts_with("remove the taint"), "{persons}");
    }
}
