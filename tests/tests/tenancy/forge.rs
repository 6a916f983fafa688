//! Attempts to forge what Nestor's programs and operators read: annotations, events, and marks of formatted disks.

use crds::names;
use serde_json::{Value, json};

use super::attempt::Outcome::{Bounded, NotPrevented, Refused};
use super::attempt::{Act, Attempt, By, Outcome, everywhere, foreign, own, request};
use super::request::{Kind, Request, annotation};
use super::site::Site;

const POLICY: Outcome = Refused(By::Policy);
const RBAC: Outcome = Refused(By::Rbac);

const EVENTS: Outcome = NotPrevented("a guest may write Events in its namespace, which have no owner");

pub(super) fn attempts() -> Vec<Attempt<Act>> {
    [annotations(), events_and_marks()].into_iter().flatten().collect()
}

fn annotations() -> Vec<Attempt<Act>> {
    vec![
        request(
            "declare another guest's VirtualMachine out of service",
            |site| {
                let forged = annotation(names::ANNOTATION_OUT_OF_SERVICE, "forged");
                site.victims(Kind::Vm).patch(&site.victim.node.name, forged)
            },
            foreign(
                POLICY,
                NotPrevented(
                    "RBAC permits it, and mgmt-csi powers the VM off when it does not release a disk",
                ),
            ),
        ),
        request(
            "forge the proof that the own VirtualMachine is off",
            |site| {
                let forged = annotation(names::ANNOTATION_PROVEN_OFF, "2026-01-01T00:00:00Z");
                site.own(Kind::Vm).patch(&site.attacker.node.name, forged)
            },
            own(
                POLICY,
                Bounded("only the guest's own gc-csi reads it, and it taints only the guest's own Nodes"),
            ),
        ),
        request(
            "forge the confirmation of entries of another guest's VirtualMachine",
            |site| {
                let forged = annotation(names::ANNOTATION_VOLUMES_CONFIRMED, "0");
                site.victims(Kind::Vm).patch(&site.victim.node.name, forged)
            },
            foreign(
                POLICY,
                NotPrevented("RBAC permits it. The owner's gc-csi repeats a write that conflicts"),
            ),
        ),
        request(
            "forge the origin of another guest's claim",
            |site| {
                let forged = annotation(names::ANNOTATION_MADE_BY, &site.attacker.tenant.cluster_id);
                site.victims(Kind::Claim).patch(&site.victim.idle, forged)
            },
            foreign(POLICY, NotPrevented("RBAC does not distinguish the fields of an object")),
        ),
        request(
            "forge the zones of an own claim",
            |site| {
                let forged = annotation(names::ANNOTATION_ACCESSIBLE_ZONES, "a,b");
                site.own(Kind::Claim).patch(&site.attacker.claim, forged)
            },
            own(POLICY, Bounded("only the guest's own scheduler reads it")),
        ),
        request(
            "forge the reclaim policy of an own claim",
            |site| {
                let forged = annotation(names::ANNOTATION_RECLAIM_POLICY, "Delete");
                site.own(Kind::Claim).patch(&site.attacker.claim, forged)
            },
            own(POLICY, Bounded("the PersistentVolume decides, and mgmt-csi restores the annotation")),
        ),
        request(
            "choose the provisioner of an own claim by an annotation",
            |site| {
                let forged = annotation("volume.kubernetes.io/storage-provisioner", "other.example");
                site.own(Kind::Claim).create(site.claim(forged))
            },
            own(POLICY, Bounded("the claim stays pending, because its StorageClass has another provisioner")),
        ),
        request(
            "write a long annotation",
            |site| {
                let long = annotation(names::ANNOTATION_GUEST_PV, &"x".repeat(10_000));
                site.own(Kind::Claim).patch(&site.attacker.claim, long)
            },
            own(POLICY, Bounded("the API server limits the annotations of an object to 256 KiB")),
        ),
        request(
            "write thousands of trace contexts",
            traces,
            own(POLICY, Bounded("the API server limits the annotations of an object to 256 KiB")),
        ),
    ]
}

fn traces(site: &Site) -> Request {
    let traces = (0..2000).map(|number| (names::trace_annotation(&format!("t{number}")), json!("00-1-2-01")));
    let traces: serde_json::Map<String, Value> = traces.collect();
    site.own(Kind::Vm).patch(&site.attacker.node.name, json!({"metadata": {"annotations": traces}}))
}

fn events_and_marks() -> Vec<Attempt<Act>> {
    vec![
        request(
            "forge an event about another guest's claim",
            |site| {
                let about = json!({
                    "kind": "PersistentVolumeClaim", "namespace": site.victim.namespace.name,
                    "name": site.victim.idle,
                });
                site.victims(Kind::Event).create(json!({
                    "metadata": {"name": "attempt"}, "type": "Warning", "reason": "Forged", "action": "Forge",
                    "reportingController": names::MANAGEMENT_DRIVER, "reportingInstance": "x",
                    "eventTime": "2026-01-01T00:00:00.000000Z", "note": "forged", "regarding": about,
                }))
            },
            foreign(POLICY, EVENTS),
        ),
        request(
            "change an event about another guest's claim",
            |site| {
                let forged = json!({"metadata": {"labels": {"forged": "true"}}});
                site.victims(Kind::Event).patch(&site.victim.event, forged)
            },
            foreign(POLICY, EVENTS),
        ),
        request(
            "attest another guest's disk as blank in its VolumeAttachment",
            |site| {
                let forged = json!({"blankAttestation": "11111111-1111-4111-8111-111111111111"});
                site.victims(Kind::Attachment).status(&site.victim.attachment, forged)
            },
            everywhere(RBAC),
        ),
        request(
            "attest another guest's disk as blank in its VirtualMachine",
            |site| site.victims(Kind::Vm).status(&site.victim.node.name, forged_disk(&site.victim.claim)),
            everywhere(RBAC),
        ),
        request(
            "write the status of an own VirtualMachine, with another VM's UUID",
            |site| {
                let forged = json!({"instanceUUID": site.victim.node.uuid});
                site.own(Kind::Vm).status(&site.attacker.node.name, forged)
            },
            everywhere(RBAC),
        ),
    ]
}

fn forged_disk(claim: &str) -> Value {
    let attestation = "11111111-1111-4111-8111-111111111111";
    json!({"volumes": [{"name": claim, "attached": true, "blankAttestation": attestation}]})
}
