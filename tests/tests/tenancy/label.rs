//! Attempts to change whose an object is, or with whom it is shared.

use anyhow::Result;
use crds::names;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use super::attempt::Outcome::{Bounded, NotPrevented, Refused};
use super::attempt::{Act, Attempt, By, Outcome, Seen, everywhere, foreign, own, request, steps};
use super::request::{Kind, cluster, label, labels};
use super::site::Site;

const POLICY: Outcome = Refused(By::Policy);
const RBAC: Outcome = Refused(By::Rbac);

const RELABELLED: Outcome = NotPrevented(
    "RBAC permits it. mgmt-csi attaches and copies by its own records all the same, but the owner's gc-csi no longer finds \
     the object",
);

fn share(guest: &str) -> String {
    format!("{}{guest}", names::LABEL_SHARE_PREFIX)
}

pub(super) fn attempts() -> Vec<Attempt<Act>> {
    vec![
        request(
            "take a claim by its label",
            |site| {
                let own = label(names::LABEL_CLUSTER_ID, &site.attacker.tenant.cluster_id);
                site.victims(Kind::Claim).patch(&site.victim.idle, own)
            },
            foreign(POLICY, RELABELLED),
        ),
        request(
            "remove the label of a claim's owner",
            |site| {
                let none = labels(json!({names::LABEL_CLUSTER_ID: null}));
                site.victims(Kind::Claim).patch(&site.victim.idle, none)
            },
            foreign(POLICY, RELABELLED),
        ),
        request(
            "share a claim with itself by a label",
            |site| {
                let shared = label(&share(&site.attacker.tenant.cluster_id), "rw");
                site.victims(Kind::Claim).patch(&site.victim.idle, shared)
            },
            foreign(
                POLICY,
                NotPrevented("RBAC permits it, but mgmt-csi decides by the labels of the PersistentVolume"),
            ),
        ),
        request(
            "take a VolumeSnapshot by its label",
            |site| {
                let own = label(names::LABEL_CLUSTER_ID, &site.attacker.tenant.cluster_id);
                site.victims(Kind::Snapshot).patch(&site.victim.snapshot, own)
            },
            foreign(POLICY, RELABELLED),
        ),
        request(
            "take a VirtualMachine by its label",
            |site| {
                let own = label(names::LABEL_CLUSTER_ID, &site.attacker.tenant.cluster_id);
                site.victims(Kind::Vm).patch(&site.victim.node.name, own)
            },
            foreign(
                POLICY,
                NotPrevented("RBAC permits it, but mgmt-csi keeps to the first label and reports the change"),
            ),
        ),
        request(
            "share a PersistentVolume with itself",
            |site| {
                let shared = label(&share(&site.attacker.tenant.cluster_id), "rw");
                cluster(Kind::Volume).patch(&site.victim.volume, shared)
            },
            everywhere(RBAC),
        ),
        request(
            "share a VolumeSnapshotContent with itself",
            |site| {
                let shared = label(&share(&site.attacker.tenant.cluster_id), "ro");
                cluster(Kind::Content).patch(&site.victim.content, shared)
            },
            everywhere(RBAC),
        ),
        request(
            "label the namespace",
            |site| cluster(Kind::Namespace).patch(&site.victim.namespace.name, label("team", "x")),
            everywhere(RBAC),
        ),
        request(
            "create a claim of another guest",
            |site| {
                let other = label(names::LABEL_CLUSTER_ID, &site.victim.cluster_id);
                site.own(Kind::Claim).create(site.claim(other))
            },
            own(POLICY, Bounded("it gives an empty volume away")),
        ),
        request(
            "give an own claim away by its label",
            |site| {
                let other = label(names::LABEL_CLUSTER_ID, &site.victim.cluster_id);
                site.own(Kind::Claim).patch(&site.attacker.claim, other)
            },
            own(POLICY, Bounded("the volume stays the guest's, by the record in its PersistentVolume")),
        ),
        request(
            "share an own claim by a label",
            |site| {
                let shared = label(&share(&site.victim.cluster_id), "rw");
                site.own(Kind::Claim).patch(&site.attacker.claim, shared)
            },
            own(POLICY, Bounded("the volume is not shared, by the labels of its PersistentVolume")),
        ),
        steps(
            "label an own VirtualMachine as another guest's, and attach that guest's claim",
            |site| Box::pin(attach_as_another(site)),
            [POLICY, Refused(By::VmOperator), POLICY, Refused(By::MgmtCsi)],
        ),
    ]
}

async fn attach_as_another(site: &Site) -> Result<Seen> {
    let vm = &site.attacker.node.name;
    let other = label(names::LABEL_CLUSTER_ID, &site.victim.cluster_id);
    if let refused @ Seen::Refused(..) = site.own(Kind::Vm).patch(vm, other).make(site, false).await? {
        return Ok(refused);
    }
    let seen = site.attach(&site.victim.idle).await?;
    let own = Patch::Merge(label(names::LABEL_CLUSTER_ID, &site.attacker.tenant.cluster_id));
    site.attacker.namespace.vms().patch(vm, &PatchParams::default(), &own).await?;
    Ok(seen)
}
