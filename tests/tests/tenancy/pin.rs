//! Attempts to keep objects from being deleted, or to have them deleted, by finalizers, owners and sources.

use anyhow::Result;
use crds::names::{self, FINALIZER_ATTACHED};
use kube::ResourceExt;
use serde_json::{Value, json};
use tests::{PATIENCE, eventually, from_claim};

use super::attempt::Outcome::{Bounded, NotPrevented, Refused};
use super::attempt::{
    Act, Attempt, By, Outcome, Seen, by_namespace, everywhere, foreign, own, request, steps,
};
use super::request::{Kind, annotation, cluster, finalizers, spec};
use super::site::Site;

const POLICY: Outcome = Refused(By::Policy);
const RBAC: Outcome = Refused(By::Rbac);

const FIELDS: Outcome = NotPrevented("RBAC does not distinguish the fields of an object");
const KEEP: &str = "example.com/keep";

fn owners(owner: Value) -> Value {
    json!({"metadata": {"ownerReferences": [owner]}})
}

pub(super) fn attempts() -> Vec<Attempt<Act>> {
    [finalizer_attempts(), dropped_finalizers(), owners_and_sources()].into_iter().flatten().collect()
}

fn finalizer_attempts() -> Vec<Attempt<Act>> {
    vec![
        request(
            "pin a claim by a finalizer",
            |site| site.victims(Kind::Claim).patch(&site.victim.idle, finalizers(&[KEEP])),
            foreign(POLICY, FIELDS),
        ),
        request(
            "pin a VolumeSnapshot by a finalizer",
            |site| site.victims(Kind::Snapshot).patch(&site.victim.snapshot, finalizers(&[KEEP])),
            foreign(POLICY, FIELDS),
        ),
        request(
            "pin a VirtualMachine by a finalizer",
            |site| site.victims(Kind::Vm).patch(&site.victim.node.name, finalizers(&[KEEP])),
            foreign(POLICY, FIELDS),
        ),
        request(
            "pin a PersistentVolume by a finalizer",
            |site| cluster(Kind::Volume).patch(&site.victim.volume, finalizers(&[KEEP])),
            everywhere(RBAC),
        ),
        request(
            "create an own claim with a finalizer",
            |site| site.own(Kind::Claim).create(site.claim(finalizers(&[KEEP]))),
            own(POLICY, Bounded("the claim counts in the guest's own quotas until the finalizer is removed")),
        ),
        request(
            "record its use of a claim that is not shared with it",
            |site| {
                let key = format!("{}{}", names::ANNOTATION_CONSUMER_PREFIX, site.attacker.tenant.cluster_id);
                site.victims(Kind::Claim).patch(&site.victim.idle, annotation(&key, "{}"))
            },
            foreign(POLICY, FIELDS),
        ),
        request(
            "record the use of a claim by a third guest",
            |site| {
                let key = format!("{}third", names::ANNOTATION_CONSUMER_PREFIX);
                site.victims(Kind::Claim).patch(&site.victim.idle, annotation(&key, "{}"))
            },
            foreign(POLICY, FIELDS),
        ),
    ]
}

fn dropped_finalizers() -> Vec<Attempt<Act>> {
    vec![
        steps(
            "drop mgmt-csi's finalizer of a claim",
            |site| Box::pin(drop_the_finalizer(site)),
            foreign(POLICY, Bounded("mgmt-csi adds it again, unless the claim is being deleted")),
        ),
        request(
            "drop the finalizers of a VolumeSnapshot",
            |site| site.victims(Kind::Snapshot).patch(&site.victim.snapshot, finalizers(&[])),
            foreign(POLICY, FIELDS),
        ),
        request(
            "drop the finalizers of a VirtualMachine",
            |site| site.victims(Kind::Vm).patch(&site.victim.node.name, finalizers(&[])),
            foreign(POLICY, FIELDS),
        ),
        request(
            "drop the finalizer of a VolumeAttachment",
            |site| site.victims(Kind::Attachment).patch(&site.victim.attachment, finalizers(&[])),
            everywhere(RBAC),
        ),
        request(
            "drop the finalizers of an own claim, to hold a volume that no quota counts",
            |site| site.own(Kind::Claim).patch(&site.attacker.claim, finalizers(&[])),
            own(
                POLICY,
                NotPrevented("mgmt-csi adds its finalizer again, but not to a claim that is being deleted"),
            ),
        ),
    ]
}

fn owners_and_sources() -> Vec<Attempt<Act>> {
    vec![
        request(
            "have a claim deleted by an ownerReference to an object that does not exist",
            |site| {
                let stranger =
                    json!({"apiVersion": "v1", "kind": "ConfigMap", "name": "stranger", "uid": "1-2-3"});
                site.victims(Kind::Claim).patch(&site.victim.idle, owners(stranger))
            },
            foreign(POLICY, FIELDS),
        ),
        request(
            "block the deletion of another guest's VirtualMachine by an ownerReference of an own claim",
            |site| {
                let owner = json!({
                    "apiVersion": Kind::Vm.resource().api_version, "kind": "VirtualMachine",
                    "name": site.victim.node.name, "uid": "1-2-3", "blockOwnerDeletion": true,
                });
                site.own(Kind::Claim).create(site.claim(owners(owner)))
            },
            [
                POLICY,
                Bounded("owners are of the same namespace"),
                POLICY,
                NotPrevented(
                    "RBAC does not distinguish the fields of an object. Only a deletion in the foreground waits",
                ),
            ],
        ),
        request(
            "pin a claim by a copy that never ends",
            |site| site.own(Kind::Claim).create(site.claim(spec(from_claim(&site.victim.idle)))),
            by_namespace(
                Bounded("the source of a copy is of the same namespace"),
                NotPrevented(
                    "csi-provisioner sets a finalizer on the source before it asks mgmt-csi, which refuses the copy. The claim \
                     can be deleted once the pending copy is deleted",
                ),
            ),
        ),
        request(
            "pin a claim by a VolumeSnapshot that never becomes ready",
            |site| site.own(Kind::Snapshot).create(site.snapshot(&site.victim.idle, json!({}))),
            by_namespace(
                Bounded("the source of a snapshot is of the same namespace"),
                NotPrevented(
                    "snapshot-controller sets a finalizer on the source before mgmt-csi refuses the snapshot. The claim can be \
                     deleted once the VolumeSnapshot is deleted",
                ),
            ),
        ),
    ]
}

async fn drop_the_finalizer(site: &Site) -> Result<Seen> {
    let claims = site.victim.namespace.claims();
    let kept: Vec<String> = claims.get(&site.victim.claim).await?.finalizers().to_vec();
    let kept: Vec<&str> = kept.iter().map(String::as_str).filter(|one| *one != FINALIZER_ATTACHED).collect();
    let dropped = site.victims(Kind::Claim).patch(&site.victim.claim, finalizers(&kept));
    let seen = dropped.make(site, false).await?;
    eventually("mgmt-csi's finalizer is there", PATIENCE, || async {
        let found = claims.get(&site.victim.claim).await?.finalizers().to_vec();
        Ok(if found.iter().any(|one| one == FINALIZER_ATTACHED) { Ok(()) } else { Err(format!("{found:?}")) })
    })
    .await?;
    Ok(seen)
}
