//! Attempts with crafted names, and with very many or very large objects.

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::attempt::Outcome::{Bounded, NotPrevented, Refused};
use super::attempt::{Act, Attempt, By, Outcome, Seen, by_namespace, everywhere, request, steps};
use super::request::{Kind, annotation, entry, spec};
use super::site::Site;

const API_SERVER: Outcome = Refused(By::ApiServer);

pub(super) fn attempts() -> Vec<Attempt<Act>> {
    vec![
        request(
            "add thousands of entries to an own VirtualMachine",
            |site| {
                site.own(Kind::Vm).patch(&site.attacker.node.name, spec(json!({"volumes": entries(5000)})))
            },
            everywhere(API_SERVER),
        ),
        steps(
            "add as many entries as the schema allows, with claims that do not exist",
            |site| Box::pin(fill_the_entries(site)),
            everywhere(Bounded(
                "vm-operator-shim creates no VolumeAttachment for a claim that does not exist",
            )),
        ),
        request(
            "create claims until the quota of the namespace is used up",
            |site| site.own(Kind::Claim).create(site.claim(json!({}))),
            by_namespace(
                Bounded("the ResourceQuotas of its namespace limit it, if the platform team sets them"),
                NotPrevented("the guests of a namespace share its ResourceQuotas"),
            ),
        ),
        request(
            "add two entries of one name",
            |site| {
                let twice = json!([entry("twice"), entry("twice")]);
                site.own(Kind::Vm).patch(&site.attacker.node.name, spec(json!({"volumes": twice})))
            },
            everywhere(API_SERVER),
        ),
        steps(
            "add entries with crafted claim names",
            |site| Box::pin(craft_names(site)),
            everywhere(Refused(By::VmOperator)),
        ),
        request(
            "create a claim with a crafted name",
            |site| {
                let name = json!({"metadata": {"name": "..%2f..%2fetc"}});
                site.own(Kind::Claim).create(site.claim(name))
            },
            everywhere(API_SERVER),
        ),
        request(
            "create a claim of 2 MiB",
            |site| {
                let long = annotation("nestor.dev/guest-pv", &"x".repeat(2 << 20));
                site.own(Kind::Claim).create(site.claim(long))
            },
            everywhere(API_SERVER),
        ),
        request(
            "send malformed JSON to the API server",
            |site| site.own(Kind::Claim).post("{\"metadata\": {"),
            everywhere(API_SERVER),
        ),
        request(
            "send deeply nested JSON to the API server",
            |site| {
                let deep = format!("{{\"metadata\": {}{}}}", "[".repeat(100_000), "]".repeat(100_000));
                site.own(Kind::Claim).post(&deep)
            },
            everywhere(API_SERVER),
        ),
    ]
}

fn entries(count: usize) -> Vec<Value> {
    (0..count).map(|number| entry(&format!("absent-{number}"))).collect()
}

async fn fill_the_entries(site: &Site) -> Result<Seen> {
    let seen = site.set_entries(&entries(crds::MAX_VOLUMES)).await?;
    let errors = site.errors_of_disks(crds::MAX_VOLUMES).await?;
    ensure!(errors.iter().all(|error| error.starts_with("ClaimNotFound")), "{errors:?}");
    let attachments = site.attacker.namespace.attachments().list(&Default::default()).await?;
    let uuid = site.attacker.node.uuid.to_string();
    let made = attachments.iter().filter(|one| one.spec.node_uuid.eq_ignore_ascii_case(&uuid)).count();
    ensure!(made == 0, "{made} VolumeAttachments were created");
    site.remove_entries().await?;
    Ok(seen)
}

async fn craft_names(site: &Site) -> Result<Seen> {
    let long = "x".repeat(300);
    let crafted = ["../../etc/passwd", "a b", "Ünï", "a\nb", "", long.as_str()];
    let entry = |(number, claim): (usize, &&str)| json!({"name": format!("crafted-{number}"), "persistentVolumeClaim": {"claimName": claim}});
    let entries: Vec<Value> = crafted.iter().enumerate().map(entry).collect();
    if let refused @ Seen::Refused(..) = site.set_entries(&entries).await? {
        return Ok(refused);
    }
    let errors = site.errors_of_disks(crafted.len()).await?;
    ensure!(errors.iter().all(|error| error.starts_with("ClaimNotFound")), "{errors:?}");
    site.remove_entries().await?;
    Ok(Seen::Refused(By::VmOperator, errors.join(", ")))
}
