//! Diagnosis of a volume: from a [`Snapshot`] to a list of steps and a verdict. Pure: no I/O.

mod attachments;
pub mod claims;
mod management;
mod nodes;
pub mod step;
#[cfg(test)]
mod tests;

use jiff::SignedDuration;
use remedies::remedy_or_reference;
use serde::Serialize;

use crate::gather::snapshot::{About, Event, Placement, Snapshot};
use step::{State, Step};

/// Age of a warning that no longer explains the state: sidecars retry and repeat it every five minutes at the latest.
const MAX_EVENT_AGE: SignedDuration = SignedDuration::from_mins(15);

/// Result of a diagnosis.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// Whether nothing is stuck or in progress.
    pub healthy: bool,
    /// The conclusion in one sentence.
    pub verdict: String,
    /// Why, in the words of the tier that failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    /// The next thing to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub action: Option<String>,
    /// The objects, from the guest's claim down to the VM.
    pub steps: Vec<Step>,
    /// What could not be seen.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unseen: Vec<String>,
}

/// Diagnoses a volume.
pub fn diagnose(snapshot: &Snapshot) -> Report {
    let steps = steps(snapshot);
    let root = root(&steps);
    let verdict = match root {
        Some(step) if step.state == State::Stuck => format!("stuck at {}: {}", step.title(), step.summary),
        Some(step) => format!("in progress at {}: {}", step.title(), step.summary),
        None => healthy(snapshot),
    };
    Report {
        healthy: root.is_none(),
        verdict,
        cause: root.and_then(|step| step.cause.clone()),
        action: root.and_then(|step| step.action.clone()),
        unseen: unseen(snapshot),
        steps,
    }
}

/// Objects whose events can explain the diagnosis.
pub fn suspects(snapshot: &Snapshot) -> Vec<About> {
    let steps = steps(snapshot);
    let is_suspect = |step: &&Step| step.state >= State::Warning;
    let mut suspects: Vec<About> = steps.iter().filter(is_suspect).filter_map(Step::about).collect();
    suspects.sort_unstable();
    suspects.dedup();
    suspects
}

fn steps(snapshot: &Snapshot) -> Vec<Step> {
    let mut steps = claims::steps(snapshot);
    steps.extend(management::steps(snapshot));
    for placement in &snapshot.placements {
        steps.extend(attachments::steps(snapshot, placement));
        steps.extend(nodes::steps(snapshot, placement));
    }
    steps.extend(nodes::pod(snapshot));
    steps.into_iter().map(|step| explain(snapshot, step)).collect()
}

/// Adds cause and remedy from the newest warning event, if the object itself tells none.
fn explain(snapshot: &Snapshot, mut step: Step) -> Step {
    if step.state < State::Waiting {
        return step;
    }
    let event = step.about().and_then(|about| recent_warning(snapshot, &about));
    if let (None, Some(event)) = (&step.cause, event) {
        step.cause = Some(format!("{}: {}", event.reason, event.message));
        step.state = State::Stuck;
        step.action = None;
    }
    if step.action.is_none() {
        step.action = step.cause.as_deref().map(|cause| remedy_or_reference(cause).to_owned());
    }
    step
}

/// The newest warning, unless it is so old that it would have been repeated.
fn recent_warning<'a>(snapshot: &'a Snapshot, about: &About) -> Option<&'a Event> {
    let is_recent =
        |event: &&Event| event.last.is_none_or(|last| snapshot.now.duration_since(last) < MAX_EVENT_AGE);
    snapshot.warning(about).filter(is_recent)
}

/// The step that explains the others: the deepest that is stuck, or else in progress. A node or pod only reflects what is
/// below it.
fn root(steps: &[Step]) -> Option<&Step> {
    let depth = |step: &Step| match step.kind {
        "Pod" => 0,
        "Node" => 1,
        _ => 2,
    };
    let candidates = steps.iter().enumerate().filter(|(_, step)| step.state >= State::Waiting);
    candidates.max_by_key(|(index, step)| (step.state, depth(step), *index)).map(|(_, step)| step)
}

fn healthy(snapshot: &Snapshot) -> String {
    let attached = |placement: &&Placement| attachments::is_attached(placement);
    let vms: Vec<&str> =
        snapshot.placements.iter().filter(attached).map(|placement| placement.vm_name.as_str()).collect();
    match (snapshot.pod_without_claim, vms.is_empty()) {
        (true, _) => "the pod uses no PersistentVolumeClaim".to_owned(),
        (_, true) => "healthy, not attached".to_owned(),
        (_, false) => format!("healthy, attached to {}", vms.join(", ")),
    }
}

/// What a missing connection or right hides.
fn unseen(snapshot: &Snapshot) -> Vec<String> {
    let mut unseen = Vec::new();
    if !snapshot.sees_guest {
        unseen.push(
            "guest cluster not connected: its claim, PersistentVolume, VolumeAttachments, nodes \
         and pods are not seen (--guest-kubeconfig, --guest-context)"
                .to_owned(),
        );
    }
    if !snapshot.sees_management {
        unseen.push(
            "management cluster not connected: its claim, PersistentVolume, VirtualMachine and \
         VolumeAttachment are not seen (--management-kubeconfig, --management-context)"
                .to_owned(),
        );
    }
    unseen
        .extend(snapshot.vms_unknown.iter().map(|reason| format!("VirtualMachines are not seen: {reason}")));
    if !snapshot.other_claims.is_empty() {
        unseen.push(format!(
            "other claims of the pod: {}; trace each of them",
            snapshot.other_claims.join(", ")
        ));
    }
    unseen
}
