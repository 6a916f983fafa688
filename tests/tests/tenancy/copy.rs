//! Attempts to copy another guest's data: snapshots, clones and restores.

use anyhow::{Result, ensure};
use crds::names;
use serde_json::{Value, json};
use tests::{from_claim, from_snapshot};

use super::attempt::Outcome::{Bounded, Refused};
use super::attempt::{Act, Attempt, By, Outcome, Seen, by_namespace, steps};
use super::request::{Kind, labels, spec, with};
use super::site::{Site, is_bound, is_ready};

const POLICY: Outcome = Refused(By::Policy);
const KUBERNETES: Outcome = Refused(By::Kubernetes);
const MGMT_CSI: Outcome = Refused(By::MgmtCsi);

/// The texts with which a copy is refused: its source is in another namespace, or of another guest.
const REFUSALS: [(&str, By); 3] =
    [("nor shared", By::MgmtCsi), ("not found", By::Kubernetes), ("cannot get claim", By::Kubernetes)];

pub(super) fn attempts() -> Vec<Attempt<Act>> {
    vec![
        steps(
            "take a snapshot of a claim",
            |site| Box::pin(snapshot(site)),
            by_namespace(KUBERNETES, MGMT_CSI),
        ),
        steps(
            "clone a claim",
            |site| Box::pin(copy(site, from_claim(&site.victim.idle))),
            by_namespace(KUBERNETES, MGMT_CSI),
        ),
        steps(
            "clone a claim that is attached",
            |site| Box::pin(copy(site, from_claim(&site.victim.claim))),
            by_namespace(KUBERNETES, MGMT_CSI),
        ),
        steps(
            "restore a VolumeSnapshot",
            |site| Box::pin(copy(site, from_snapshot(&site.victim.snapshot))),
            by_namespace(KUBERNETES, MGMT_CSI),
        ),
        steps(
            "clone a claim without a label, and attach the copy",
            |site| Box::pin(copy_without_a_label(site)),
            [POLICY, KUBERNETES, POLICY, MGMT_CSI],
        ),
        steps(
            "take a snapshot without a label, and restore it",
            |site| Box::pin(snapshot_without_a_label(site)),
            [POLICY, KUBERNETES, POLICY, MGMT_CSI],
        ),
        steps(
            "clone a claim for the other guest",
            |site| Box::pin(copy_for_the_victim(site)),
            [
                POLICY,
                KUBERNETES,
                POLICY,
                Bounded("the copy is the other guest's, who may read the source anyway"),
            ],
        ),
    ]
}

fn unlabelled() -> Value {
    labels(json!({names::LABEL_CLUSTER_ID: null}))
}

/// Tries to copy a source into an own claim.
async fn copy(site: &Site, source: Value) -> Result<Seen> {
    let name = match site.create_own(Kind::Claim, site.claim(spec(source))).await? {
        Ok(name) => name,
        Err(refused) => return Ok(refused),
    };
    let seen = site.warned(&name, &REFUSALS).await?;
    site.is_unbound(&name).await?;
    site.delete_own(Kind::Claim, &name).await?;
    Ok(seen)
}

async fn snapshot(site: &Site) -> Result<Seen> {
    let snapshot = site.snapshot(&site.victim.idle, json!({}));
    let name = match site.create_own(Kind::Snapshot, snapshot).await? {
        Ok(name) => name,
        Err(refused) => return Ok(refused),
    };
    let seen = site.snapshot_fails(&name, &REFUSALS).await?;
    site.delete_own(Kind::Snapshot, &name).await?;
    Ok(seen)
}

async fn copy_without_a_label(site: &Site) -> Result<Seen> {
    let claim = site.claim(with(unlabelled(), &spec(from_claim(&site.victim.idle))));
    let name = match site.create_own(Kind::Claim, claim).await? {
        Ok(name) => name,
        Err(refused) => return Ok(refused),
    };
    let seen = if site.setting.shared {
        is_bound(&site.attacker.namespace, &name).await?;
        site.attach(&name).await?
    } else {
        site.warned(&name, &REFUSALS).await?
    };
    site.delete_own(Kind::Claim, &name).await?;
    Ok(seen)
}

async fn snapshot_without_a_label(site: &Site) -> Result<Seen> {
    let snapshot = site.snapshot(&site.victim.idle, unlabelled());
    let name = match site.create_own(Kind::Snapshot, snapshot).await? {
        Ok(name) => name,
        Err(refused) => return Ok(refused),
    };
    let seen = if site.setting.shared {
        is_ready(&site.attacker.namespace, &name).await?;
        copy(site, from_snapshot(&name)).await?
    } else {
        site.snapshot_fails(&name, &REFUSALS).await?
    };
    site.delete_own(Kind::Snapshot, &name).await?;
    Ok(seen)
}

async fn copy_for_the_victim(site: &Site) -> Result<Seen> {
    let other = labels(json!({names::LABEL_CLUSTER_ID: site.victim.cluster_id}));
    let claim = site.claim(with(other, &spec(from_claim(&site.victim.idle))));
    let name = match site.create_own(Kind::Claim, claim).await? {
        Ok(name) => name,
        Err(refused) => return Ok(refused),
    };
    let seen = if site.setting.shared {
        is_bound(&site.attacker.namespace, &name).await?;
        let attached = site.attach(&name).await?;
        ensure!(matches!(attached, Seen::Refused(By::MgmtCsi, _)), "the copy: {attached}");
        Seen::Permitted
    } else {
        site.warned(&name, &REFUSALS).await?
    };
    site.delete_own(Kind::Claim, &name).await?;
    Ok(seen)
}
