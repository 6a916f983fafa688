//! Attempts to read.

use serde_json::json;
use tests::management::VM_GUESTS;

use super::attempt::Outcome::{NotPrevented, Refused};
use super::attempt::{Act, Attempt, By, Outcome, Setting, by_namespace, everywhere, request};
use super::request::{Kind, cluster, read_path, system};

/// RBAC decides about reads, and it does not look at labels.
const READABLE: Outcome = NotPrevented(
    "the guest's Role permits it to read these objects of its namespace, and policies apply to writes only",
);

const RBAC: Outcome = Refused(By::Rbac);

pub(super) fn attempts() -> Vec<Attempt<Act>> {
    let readable = by_namespace(RBAC, READABLE);
    vec![
        request("read a claim", |site| site.victims(Kind::Claim).get(&site.victim.claim), readable),
        request(
            "read a VolumeSnapshot",
            |site| site.victims(Kind::Snapshot).get(&site.victim.snapshot),
            readable,
        ),
        request("read a VirtualMachine", |site| site.victims(Kind::Vm).get(&site.victim.node.name), readable),
        request(
            "read a VolumeAttachment, with the format token of its volume",
            |site| site.victims(Kind::Attachment).get(&site.victim.attachment),
            readable,
        ),
        request("list the claims of all namespaces", |_| cluster(Kind::Claim).list(), everywhere(RBAC)),
        request("list the VirtualMachines of all namespaces", |_| cluster(Kind::Vm).list(), everywhere(RBAC)),
        request(
            "read a PersistentVolume",
            |site| cluster(Kind::Volume).get(&site.victim.volume),
            everywhere(RBAC),
        ),
        request(
            "read a VolumeSnapshotContent",
            |site| cluster(Kind::Content).get(&site.victim.content),
            everywhere(RBAC),
        ),
        request(
            "read the Secrets of the other guest's namespace",
            |site| site.victims(Kind::Secret).list(),
            everywhere(RBAC),
        ),
        request("read the Secrets of mgmt-csi", |_| system(Kind::Secret).list(), everywhere(RBAC)),
        request(
            "read the record of VMs' guests",
            |_| system(Kind::ConfigMap).get(VM_GUESTS),
            everywhere(RBAC),
        ),
        request(
            "request a token of another account",
            |site| {
                let body = json!({
                    "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": []},
                });
                site.victims(Kind::Namespace).token("default", &body.to_string())
            },
            everywhere(RBAC),
        ),
        request(
            "impersonate the administrator",
            |site| site.victims(Kind::Claim).list_as("kubernetes-admin"),
            everywhere(RBAC),
        ),
        request("read the metrics of the API server", |_| read_path("/metrics"), everywhere(RBAC)),
    ]
}

#[test]
fn the_order_of_outcomes_is_that_of_the_settings() {
    let outcomes = by_namespace(RBAC, READABLE);
    for policies in [true, false] {
        assert_eq!(Setting { shared: false, policies }.of(outcomes), RBAC);
        assert_eq!(Setting { shared: true, policies }.of(outcomes), READABLE);
    }
}
