//! Attempts to expand, to rename and to otherwise change volumes, and to use classes that the guest was not given.

use anyhow::Result;
use serde_json::{Value, json};

use super::attempt::Outcome::{Bounded, NotPrevented, Refused};
use super::attempt::{
    Act, Attempt, By, Outcome, Seen, by_namespace, everywhere, foreign, own, request, steps,
};
use super::request::{Kind, spec};
use super::site::Site;

const POLICY: Outcome = Refused(By::Policy);
const RBAC: Outcome = Refused(By::Rbac);
const API_SERVER: Outcome = Refused(By::ApiServer);

const FIELDS: Outcome = NotPrevented("RBAC does not distinguish the fields of an object");
const CLASSES: Outcome = NotPrevented("only the policies and ResourceQuotas limit classes");

fn size(size: &str) -> Value {
    spec(json!({"resources": {"requests": {"storage": size}}}))
}

pub(super) fn attempts() -> Vec<Attempt<Act>> {
    [of_others(), of_own_claims(), classes()].into_iter().flatten().collect()
}

fn of_others() -> Vec<Attempt<Act>> {
    vec![
        request(
            "expand a claim",
            |site| site.victims(Kind::Claim).patch(&site.victim.idle, size("8Mi")),
            foreign(POLICY, FIELDS),
        ),
        request(
            "change the VolumeAttributesClass of a claim",
            |site| {
                let class = spec(json!({"volumeAttributesClassName": "gold"}));
                site.victims(Kind::Claim).patch(&site.victim.idle, class)
            },
            foreign(POLICY, FIELDS),
        ),
        request(
            "rename a claim",
            |site| {
                let name = json!({"metadata": {"name": "renamed"}});
                site.victims(Kind::Claim).patch(&site.victim.idle, name)
            },
            by_namespace(RBAC, API_SERVER),
        ),
        request(
            "attach an own claim to another guest's VirtualMachine",
            |site| {
                let entries = json!([super::request::entry(&site.attacker.claim)]);
                site.victims(Kind::Vm).patch(&site.victim.node.name, spec(json!({"volumes": entries})))
            },
            foreign(
                POLICY,
                NotPrevented("RBAC permits it. mgmt-csi attaches no disk for the entry, but the entry stays"),
            ),
        ),
        request(
            "power another guest's VirtualMachine off",
            |site| {
                let off = spec(json!({"powerState": "PoweredOff"}));
                site.victims(Kind::Vm).patch(&site.victim.node.name, off)
            },
            foreign(POLICY, FIELDS),
        ),
    ]
}

fn of_own_claims() -> Vec<Attempt<Act>> {
    vec![
        request(
            "shrink an own claim",
            |site| site.own(Kind::Claim).patch(&site.attacker.claim, size("1Mi")),
            everywhere(API_SERVER),
        ),
        request(
            "point an own claim at another guest's PersistentVolume",
            |site| {
                let volume = spec(json!({"volumeName": site.victim.volume}));
                site.own(Kind::Claim).patch(&site.attacker.claim, volume)
            },
            everywhere(API_SERVER),
        ),
        request(
            "give an own claim another UID, from which names of volumes are derived",
            |site| {
                let uid = site.victim.files[1].0.as_str().trim_start_matches("pvc-");
                site.own(Kind::Claim).patch(&site.attacker.claim, json!({"metadata": {"uid": uid}}))
            },
            everywhere(API_SERVER),
        ),
        request(
            "write the status of an own claim",
            |site| {
                let capacity = json!({"capacity": {"storage": "1Ti"}});
                site.own(Kind::Claim).status(&site.attacker.claim, capacity)
            },
            everywhere(RBAC),
        ),
        steps(
            "create a claim that is larger than the pools",
            |site| Box::pin(create_a_huge_claim(site)),
            everywhere(Refused(By::MgmtCsi)),
        ),
        request(
            "create a claim with a negative size",
            |site| site.own(Kind::Claim).create(site.claim(size("-1"))),
            everywhere(API_SERVER),
        ),
        request(
            "create a claim without any size",
            |site| site.own(Kind::Claim).create(site.claim(size("0"))),
            everywhere(API_SERVER),
        ),
        request(
            "change the hardware of an own VirtualMachine",
            |site| {
                let class = spec(json!({"className": "large"}));
                site.own(Kind::Vm).patch(&site.attacker.node.name, class)
            },
            own(
                POLICY,
                Bounded("it is the guest's own VirtualMachine, and no program of Nestor reads the field"),
            ),
        ),
    ]
}

fn classes() -> Vec<Attempt<Act>> {
    vec![
        request(
            "use a StorageClass that the guest was not given",
            |site| {
                let class = spec(json!({"storageClassName": "nestor-retain"}));
                site.own(Kind::Claim).create(site.claim(class))
            },
            own(POLICY, CLASSES),
        ),
        request(
            "use a VolumeAttributesClass that the guest was not given",
            |site| {
                let class = spec(json!({"volumeAttributesClassName": "gold"}));
                site.own(Kind::Claim).create(site.claim(class))
            },
            own(POLICY, CLASSES),
        ),
        request(
            "use a VolumeSnapshotClass that the guest was not given",
            |site| {
                let class = spec(json!({"volumeSnapshotClassName": "other"}));
                site.own(Kind::Snapshot).create(site.snapshot(&site.attacker.claim, class))
            },
            own(POLICY, CLASSES),
        ),
    ]
}

async fn create_a_huge_claim(site: &Site) -> Result<Seen> {
    let name = match site.create_own(Kind::Claim, site.claim(size("7Ei"))).await? {
        Ok(name) => name,
        Err(refused) => return Ok(refused),
    };
    let seen = site.warned(&name, &[("rpc error", By::MgmtCsi)]).await?;
    site.is_unbound(&name).await?;
    site.delete_own(Kind::Claim, &name).await?;
    Ok(seen)
}
