//! Attempts to delete.

use serde_json::json;
use tests::management::VM_GUESTS;

use super::attempt::Outcome::{NotPrevented, Refused};
use super::attempt::{Act, Attempt, By, Outcome, everywhere, foreign, request};
use super::request::{Kind, cluster, spec, system};
use super::site::Site;

const POLICY: Outcome = Refused(By::Policy);
const RBAC: Outcome = Refused(By::Rbac);

const DELETABLE: Outcome = NotPrevented("RBAC does not distinguish the guests of a namespace");

pub(super) fn attempts() -> Vec<Attempt<Act>> {
    [of_guests(), of_the_platform()].into_iter().flatten().collect()
}

fn of_guests() -> Vec<Attempt<Act>> {
    vec![
        request(
            "delete a claim",
            |site| site.victims(Kind::Claim).delete(&site.victim.idle),
            foreign(POLICY, DELETABLE),
        ),
        request(
            "delete a claim whose disk is attached",
            |site| site.victims(Kind::Claim).delete(&site.victim.claim),
            foreign(POLICY, DELETABLE),
        ),
        request(
            "delete a VolumeSnapshot",
            |site| site.victims(Kind::Snapshot).delete(&site.victim.snapshot),
            foreign(POLICY, DELETABLE),
        ),
        request(
            "delete all claims of the namespace at once",
            |site| site.victims(Kind::Claim).delete_all(),
            everywhere(RBAC),
        ),
        request(
            "delete a VirtualMachine",
            |site| site.victims(Kind::Vm).delete(&site.victim.node.name),
            everywhere(RBAC),
        ),
        request(
            "delete a VolumeAttachment",
            |site| site.victims(Kind::Attachment).delete(&site.victim.attachment),
            everywhere(RBAC),
        ),
        request(
            "detach a disk: remove the entry of another guest's VirtualMachine",
            |site| {
                let none = spec(json!({"volumes": []}));
                site.victims(Kind::Vm).patch(&site.victim.node.name, none)
            },
            foreign(POLICY, DELETABLE),
        ),
        request(
            "delete the events of another guest",
            |site| site.victims(Kind::Event).delete(&site.victim.event),
            everywhere(RBAC),
        ),
    ]
}

fn of_the_platform() -> Vec<Attempt<Act>> {
    vec![
        request(
            "delete a PersistentVolume",
            |site| cluster(Kind::Volume).delete(&site.victim.volume),
            everywhere(RBAC),
        ),
        request(
            "delete a VolumeSnapshotContent",
            |site| cluster(Kind::Content).delete(&site.victim.content),
            everywhere(RBAC),
        ),
        request(
            "delete a namespace",
            |site| cluster(Kind::Namespace).delete(&site.victim.namespace.name),
            everywhere(RBAC),
        ),
        request(
            "delete its own policy",
            |site| cluster(Kind::Policy).delete(&policy(site)),
            everywhere(RBAC),
        ),
        request("grant itself more rights", grant, everywhere(RBAC)),
        request(
            "delete the record of VMs' guests",
            |_| system(Kind::ConfigMap).delete(VM_GUESTS),
            everywhere(RBAC),
        ),
        request(
            "run a pod in the management cluster",
            |site| {
                let containers = json!([{"name": "a", "image": "a"}]);
                let pod = json!({"metadata": {"name": "attempt"}, "spec": {"containers": containers}});
                site.own(Kind::Pod).create(pod)
            },
            everywhere(RBAC),
        ),
    ]
}

fn policy(site: &Site) -> String {
    format!("claims.{}.{}.nestor.dev", site.attacker.tenant.account, site.attacker.namespace.name)
}

fn grant(site: &Site) -> super::request::Request {
    let namespace = &site.attacker.namespace.name;
    site.own(Kind::RoleBinding).create(json!({
        "metadata": {"name": "attempt"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [
            {"kind": "ServiceAccount", "name": site.attacker.tenant.account, "namespace": namespace},
        ],
    }))
}
