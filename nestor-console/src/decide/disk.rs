//! One disk of a VM on its way from `spec.volumes` over the VolumeAttachment to `status.volumes`: where it waits, and why.

use crds::{
    AttachError, VirtualMachine, VirtualMachineVolumeStatus, VolumeAttachment, VolumeAttachmentStatus,
};

use super::{Since, State, Verdict, created, deleted};

/// What to do if the VM Operator does not act.
const CHECK_OPERATOR: &str = "if it takes long, check that the VM Operator (or vm-operator-shim) runs. Upstream VM Operators \
                              use objects of their own (docs/reference/vm-operators.md)";
/// What to do if mgmt-csi does not act.
const CHECK_DRIVER: &str = "if it takes long, check that mgmt-csi runs and reaches the storage infra";

/// What the objects show about one disk.
#[derive(Debug, Clone, Copy, Default)]
pub struct Facts<'a> {
    /// The VM, if it exists.
    pub vm: Option<&'a VirtualMachine>,
    /// `spec.volumes` has the entry.
    pub requested: bool,
    /// The VolumeAttachment.
    pub attachment: Option<&'a VolumeAttachment>,
    /// The entry in `status.volumes`.
    pub reported: Option<&'a VirtualMachineVolumeStatus>,
    /// When the console first saw that something is left to do.
    pub first_seen: Option<Since>,
}

/// State of one of the three stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stage {
    /// The state.
    pub state: State,
    /// In one or two words.
    pub word: &'static str,
}

/// The stages of a disk, in the order in which a request passes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stages {
    /// The entry in `spec.volumes`.
    pub requested: Stage,
    /// The VolumeAttachment.
    pub attachment: Stage,
    /// The entry in `status.volumes`.
    pub reported: Stage,
}

const fn stage(state: State, word: &'static str) -> Stage {
    Stage { state, word }
}

impl Facts<'_> {
    fn status(&self) -> Option<&VolumeAttachmentStatus> {
        self.attachment?.status.as_ref()
    }

    fn is_attached(&self) -> bool {
        self.status().is_some_and(|status| status.attached)
    }

    fn error(&self) -> Option<&AttachError> {
        self.status()?.error.as_ref()
    }

    /// When the deletion of the VolumeAttachment was requested.
    fn ending(&self) -> Option<Since> {
        deleted(&self.attachment?.metadata)
    }

    /// Last transition of the VolumeAttachment, or its creation.
    fn changed(&self) -> Option<Since> {
        let conditions = self.status().map(|status| status.conditions.as_slice()).unwrap_or_default();
        let attached = conditions.iter().find(|condition| condition.type_ == "Attached");
        let transition = attached.map(|condition| Since::at(condition.last_transition_time.0));
        transition.or_else(|| created(&self.attachment?.metadata))
    }
}

/// The three stages.
pub fn stages(facts: &Facts<'_>) -> Stages {
    Stages { requested: requested(facts), attachment: attachment(facts), reported: reported(facts) }
}

fn requested(facts: &Facts<'_>) -> Stage {
    match (facts.requested, facts.vm) {
        (true, _) => stage(State::Ok, "requested"),
        (false, Some(_)) => stage(State::Idle, "removed"),
        (false, None) => stage(State::Idle, "no VM"),
    }
}

fn attachment(facts: &Facts<'_>) -> Stage {
    let absent = if facts.requested { State::Waiting } else { State::Idle };
    match (facts.attachment, facts.ending(), facts.error(), facts.is_attached()) {
        (None, ..) => stage(absent, "none"),
        (_, Some(_), Some(_), _) => stage(State::Failed, "detach failed"),
        (_, None, Some(_), _) => stage(State::Failed, "attach failed"),
        (_, Some(_), None, _) => stage(State::Waiting, "detaching"),
        (_, None, None, true) if facts.requested => stage(State::Ok, "attached"),
        (_, None, None, true) => stage(State::Waiting, "attached"),
        (_, None, None, false) => stage(State::Waiting, "attaching"),
    }
}

fn reported(facts: &Facts<'_>) -> Stage {
    match facts.reported.map(|disk| (disk.error.is_some(), disk.attached)) {
        None if facts.requested => stage(State::Waiting, "none"),
        None => stage(State::Idle, "none"),
        Some((true, _)) => stage(State::Failed, "error"),
        Some((false, true)) if facts.requested => stage(State::Ok, "attached"),
        Some((false, true)) => stage(State::Waiting, "attached"),
        Some((false, false)) if facts.requested => stage(State::Waiting, "not attached"),
        Some((false, false)) => stage(State::Waiting, "detaching"),
    }
}

/// Where the disk is, why, and what to do next.
pub fn decide(facts: &Facts<'_>) -> Verdict {
    match (facts.requested, facts.attachment, facts.ending()) {
        (true, None, _) => not_created(facts),
        (true, Some(_), None) => attach(facts),
        (true, Some(_), Some(_)) => before_recreation(facts),
        (false, Some(_), Some(_)) => detach(facts),
        (false, Some(_), None) => unrequested(facts),
        (false, None, _) => Verdict::new(State::Waiting, "waits for status.volumes")
            .since(facts.first_seen)
            .next(CHECK_OPERATOR),
    }
}

/// With an error in `status.volumes`, the VM Operator did not create the VolumeAttachment for that reason.
fn not_created(facts: &Facts<'_>) -> Verdict {
    if let Some(error) = facts.reported.and_then(|disk| disk.error.as_ref()) {
        return Verdict::new(State::Failed, "VolumeAttachment not created")
            .since(facts.first_seen)
            .because(error)
            .with_remedy();
    }
    let waits = Verdict::new(State::Waiting, "waits for the VolumeAttachment").since(facts.first_seen);
    let uuid = facts.vm.and_then(|vm| vm.status.as_ref()).and_then(crds::node_uuid);
    match uuid {
        None => waits.because("the VirtualMachine reports no UUID").next("check the VM Operator"),
        Some(_) => waits.next(CHECK_OPERATOR),
    }
}

fn attach(facts: &Facts<'_>) -> Verdict {
    if let Some(error) = facts.error() {
        return failed("attach failed", error);
    }
    if !facts.is_attached() {
        return attaching(facts);
    }
    match facts.reported {
        Some(disk) if disk.attached && disk.error.is_none() => {
            Verdict::new(State::Ok, "attached").since(facts.changed())
        }
        _ => Verdict::new(State::Waiting, "waits for status.volumes")
            .since(facts.changed())
            .next(CHECK_OPERATOR),
    }
}

fn attaching(facts: &Facts<'_>) -> Verdict {
    let waits = Verdict::new(State::Waiting, "waits for the disk").since(facts.changed());
    let power = facts.vm.and_then(|vm| vm.status.as_ref()?.power_state.as_deref());
    match power {
        Some("PoweredOff" | "Suspended") => waits.because("the VM does not run").next(
            "start the VM; if it will not return, taint its Node out-of-service (docs/guides/node-loss.md)",
        ),
        _ => waits.next(CHECK_DRIVER),
    }
}

fn failed(what: &str, error: &AttachError) -> Verdict {
    Verdict::new(State::Failed, what)
        .since(Some(Since::at(error.time.0)))
        .because(format!("{}: {}", error.reason, error.message))
        .with_remedy()
}

fn before_recreation(facts: &Facts<'_>) -> Verdict {
    match facts.error() {
        Some(error) => failed("detach failed", error),
        None => Verdict::new(State::Waiting, "waits for the earlier VolumeAttachment")
            .since(facts.ending())
            .next(CHECK_DRIVER),
    }
}

fn detach(facts: &Facts<'_>) -> Verdict {
    match facts.error() {
        Some(error) => failed("detach failed", error),
        None => Verdict::new(State::Waiting, "waits for the detach").since(facts.ending()).next(CHECK_DRIVER),
    }
}

/// A VolumeAttachment that no entry requests.
fn unrequested(facts: &Facts<'_>) -> Verdict {
    let what = match facts.vm {
        Some(_) => "the entry was removed from spec.volumes",
        None => "its VirtualMachine does not exist",
    };
    Verdict::new(State::Waiting, "waits for deletion of the VolumeAttachment")
        .since(facts.first_seen)
        .because(what)
        .next(CHECK_OPERATOR)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn vm(power: &str) -> VirtualMachine {
        serde_json::from_value(json!({
            "apiVersion": "vmoperator.vmware.com/v1alpha6", "kind": "VirtualMachine",
            "metadata": {"name": "vm-1", "namespace": "n"}, "spec": {},
            "status": {"biosUUID": "u-1", "powerState": power},
        }))
        .unwrap()
    }

    fn attachment(deleted: Option<&str>, status: Value) -> VolumeAttachment {
        serde_json::from_value(json!({
            "apiVersion": "nestor.dev/v1alpha1", "kind": "VolumeAttachment",
            "metadata": {"name": "a", "creationTimestamp": "2026-01-01T00:00:00Z", "deletionTimestamp": deleted},
            "spec": {"nodeUUID": "u-1", "volumeName": "pvc-1"},
            "status": status,
        }))
        .unwrap()
    }

    fn disk(value: Value) -> VirtualMachineVolumeStatus {
        serde_json::from_value(value).unwrap()
    }

    fn states(facts: &Facts<'_>) -> [State; 3] {
        let stages = stages(facts);
        [stages.requested.state, stages.attachment.state, stages.reported.state]
    }

    fn time(text: &str) -> Since {
        Since::at(text.parse().unwrap())
    }

    #[test]
    fn an_attach_passes_the_stages_in_order() {
        use State::{Ok, Waiting};
        let vm = vm("PoweredOn");
        let seen = Since::at_least(time("2026-01-01T00:00:00Z").time);
        let mut facts = Facts { vm: Some(&vm), requested: true, first_seen: Some(seen), ..Facts::default() };
        assert_eq!(states(&facts), [Ok, Waiting, Waiting]);
        let verdict = decide(&facts);
        assert_eq!((verdict.state, verdict.since), (Waiting, Some(seen)));
        assert_eq!(verdict.summary, "waits for the VolumeAttachment");

        let new = attachment(None, json!({}));
        facts.attachment = Some(&new);
        assert_eq!(states(&facts), [Ok, Waiting, Waiting]);
        assert_eq!(decide(&facts).summary, "waits for the disk");
        assert_eq!(decide(&facts).since, Some(time("2026-01-01T00:00:00Z")));

        let attached = attachment(
            None,
            json!({"attached": true, "conditions": [{
                "type": "Attached", "status": "True", "reason": "Attached", "message": "",
                "lastTransitionTime": "2026-01-01T00:00:05Z",
            }]}),
        );
        facts.attachment = Some(&attached);
        assert_eq!(states(&facts), [Ok, Ok, Waiting]);
        assert_eq!(decide(&facts).summary, "waits for status.volumes");

        let shown = disk(json!({"name": "pvc-1", "attached": true}));
        facts.reported = Some(&shown);
        assert_eq!(states(&facts), [Ok, Ok, Ok]);
        assert_eq!(decide(&facts).state, Ok);
        assert_eq!(decide(&facts).since, Some(time("2026-01-01T00:00:05Z")));
    }

    #[test]
    fn a_failed_attach_has_cause_time_and_remedy() {
        let vm = vm("PoweredOn");
        let error =
            json!({"reason": "VolumeInUse", "message": "it is on vm-2", "time": "2026-01-01T00:00:09Z"});
        let failed = attachment(None, json!({"error": error}));
        let shown = disk(json!({"name": "pvc-1", "attached": false, "error": "VolumeInUse: it is on vm-2"}));
        let facts = Facts {
            vm: Some(&vm),
            requested: true,
            attachment: Some(&failed),
            reported: Some(&shown),
            ..Facts::default()
        };
        assert_eq!(states(&facts), [State::Ok, State::Failed, State::Failed]);
        let verdict = decide(&facts);
        assert_eq!((verdict.state, verdict.since), (State::Failed, Some(time("2026-01-01T00:00:09Z"))));
        assert_eq!(verdict.cause.as_deref(), Some("VolumeInUse: it is on vm-2"));
        assert!(verdict.next.unwrap().contains("other VM"));
    }

    #[test]
    fn a_vm_that_cannot_take_the_disk_is_the_cause() {
        let (off, new) = (vm("PoweredOff"), attachment(None, json!({})));
        let facts = Facts { vm: Some(&off), requested: true, attachment: Some(&new), ..Facts::default() };
        assert_eq!(decide(&facts).cause.as_deref(), Some("the VM does not run"));
        let mut nameless = vm("PoweredOn");
        nameless.status = None;
        let facts = Facts { vm: Some(&nameless), requested: true, ..Facts::default() };
        assert!(decide(&facts).cause.unwrap().contains("UUID"));
        let refused = disk(json!({"name": "pvc-1", "attached": false, "error": "ClaimNotFound: pvc-1"}));
        let facts = Facts { reported: Some(&refused), ..facts };
        assert_eq!(decide(&facts).state, State::Failed);
    }

    #[test]
    fn a_detach_waits_for_the_operator_then_for_the_disk_then_for_the_status() {
        let vm = vm("PoweredOn");
        let attached = attachment(None, json!({"attached": true}));
        let shown = disk(json!({"name": "pvc-1:detaching", "attached": true}));
        let mut facts =
            Facts { vm: Some(&vm), attachment: Some(&attached), reported: Some(&shown), ..Facts::default() };
        assert_eq!(states(&facts), [State::Idle, State::Waiting, State::Waiting]);
        assert!(decide(&facts).cause.unwrap().contains("removed"));
        let ending = attachment(Some("2026-01-01T00:01:00Z"), json!({"attached": true}));
        facts.attachment = Some(&ending);
        assert_eq!(decide(&facts).summary, "waits for the detach");
        assert_eq!(decide(&facts).since, Some(time("2026-01-01T00:01:00Z")));
        facts.requested = true;
        assert_eq!(decide(&facts).summary, "waits for the earlier VolumeAttachment");
        facts = Facts { requested: false, attachment: None, ..facts };
        assert_eq!(decide(&facts).summary, "waits for status.volumes");
    }

    #[test]
    fn a_failed_detach_and_a_missing_vm_are_shown() {
        let error = json!({"reason": "DetachFailed", "message": "busy", "time": "2026-01-01T00:02:00Z"});
        let ending = attachment(Some("2026-01-01T00:01:00Z"), json!({"attached": true, "error": error}));
        let facts = Facts { attachment: Some(&ending), ..Facts::default() };
        assert_eq!(stages(&facts).attachment.word, "detach failed");
        assert_eq!(stages(&facts).requested.word, "no VM");
        assert!(decide(&facts).next.unwrap().contains("power off"));
        let left = attachment(None, json!({"attached": true}));
        let facts = Facts { attachment: Some(&left), ..Facts::default() };
        assert!(decide(&facts).cause.unwrap().contains("does not exist"));
    }
}
