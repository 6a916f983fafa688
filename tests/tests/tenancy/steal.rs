//! Attempts to get at data through PersistentVolumes, contents and VolumeAttachments.

use anyhow::{Result, ensure};
use crds::names;
use serde_json::json;
use tests::{PATIENCE, eventually};

use super::attempt::Outcome::{Bounded, Refused};
use super::attempt::{Act, Attempt, By, Outcome, Seen, by_namespace, everywhere, own, request, steps};
use super::request::{Kind, Request, cluster, spec};
use super::site::Site;

const POLICY: Outcome = Refused(By::Policy);
const RBAC: Outcome = Refused(By::Rbac);

pub(super) fn attempts() -> Vec<Attempt<Act>> {
    vec![
        steps(
            "attach a claim that names another guest's PersistentVolume",
            |site| Box::pin(attach_a_claim_that_names_the_volume(site)),
            own(POLICY, Refused(By::MgmtCsi)),
        ),
        steps(
            "forge the completed binding of a claim to another guest's PersistentVolume",
            |site| Box::pin(forge_a_completed_binding(site)),
            own(POLICY, Refused(By::Kubernetes)),
        ),
        request(
            "select a PersistentVolume by labels",
            |site| {
                let selector = spec(json!({"selector": {"matchLabels": {"a": "b"}}}));
                site.own(Kind::Claim).create(site.claim(selector))
            },
            own(
                POLICY,
                Bounded(
                    "a PersistentVolume that is bound is not bound again, and csi-provisioner refuses selectors",
                ),
            ),
        ),
        request(
            "create a PersistentVolume of another guest's volume",
            volume_of_the_victim,
            everywhere(RBAC),
        ),
        steps(
            "bind a VolumeSnapshot to another guest's content",
            |site| Box::pin(bind_the_content(site)),
            own(POLICY, Refused(By::Kubernetes)),
        ),
        request(
            "create a VolumeSnapshotContent of another guest's snapshot",
            content_of_the_victim,
            everywhere(RBAC),
        ),
        request(
            "create a VolumeAttachment of another guest's claim",
            |site| {
                site.own(Kind::Attachment).create(json!({
                    "metadata": {"name": "attempt"},
                    "spec": {"nodeUUID": site.attacker.node.uuid, "volumeName": site.victim.idle},
                }))
            },
            everywhere(RBAC),
        ),
        request(
            "fill a claim by a volume populator",
            |site| {
                let source = json!({"apiGroup": "example.com", "kind": "Populator", "name": "x"});
                site.own(Kind::Claim).create(site.claim(spec(json!({"dataSourceRef": source}))))
            },
            own(POLICY, Bounded("no populator is installed, so the claim stays pending")),
        ),
        steps(
            "attach another guest's claim",
            |site| Box::pin(site.attach(&site.victim.idle)),
            by_namespace(Refused(By::VmOperator), Refused(By::MgmtCsi)),
        ),
        steps(
            "attach another guest's claim that is attached",
            |site| Box::pin(site.attach(&site.victim.claim)),
            by_namespace(Refused(By::VmOperator), Refused(By::MgmtCsi)),
        ),
    ]
}

fn volume_of_the_victim(site: &Site) -> Request {
    cluster(Kind::Volume).create(json!({
        "metadata": {"name": "attempt"},
        "spec": {
            "capacity": {"storage": "4Mi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": "",
            "csi": {"driver": names::MANAGEMENT_DRIVER, "volumeHandle": site.victim.files[1].0},
        },
    }))
}

fn content_of_the_victim(site: &Site) -> Request {
    cluster(Kind::Content).create(json!({
        "metadata": {"name": "attempt"},
        "spec": {
            "driver": names::MANAGEMENT_DRIVER, "deletionPolicy": "Retain",
            "source": {"snapshotHandle": "of-another"},
            "volumeSnapshotRef": {"name": "attempt", "namespace": site.attacker.namespace.name},
        },
    }))
}

async fn attach_a_claim_that_names_the_volume(site: &Site) -> Result<Seen> {
    let claim = site.claim(spec(json!({"volumeName": site.victim.volume})));
    let name = match site.create_own(Kind::Claim, claim).await? {
        Ok(name) => name,
        Err(refused) => return Ok(refused),
    };
    let seen = site.attach(&name).await?;
    site.is_unbound(&name).await?;
    site.delete_own(Kind::Claim, &name).await?;
    Ok(seen)
}

async fn forge_a_completed_binding(site: &Site) -> Result<Seen> {
    let forged = json!({
        "metadata": {"annotations": {"pv.kubernetes.io/bind-completed": "yes"}},
        "spec": {"volumeName": site.victim.volume},
    });
    let name = match site.create_own(Kind::Claim, site.claim(forged)).await? {
        Ok(name) => name,
        Err(refused) => return Ok(refused),
    };
    let claims = site.attacker.namespace.claims();
    eventually(&format!("claim {name} is lost"), PATIENCE, || async {
        let status = claims.get(&name).await?.status.unwrap_or_default();
        Ok(if status.phase.as_deref() == Some("Lost") { Ok(()) } else { Err(format!("{status:?}")) })
    })
    .await?;
    let attached = site.attach(&name).await?;
    ensure!(matches!(attached, Seen::Refused(By::MgmtCsi, _)), "a lost claim: {attached}");
    site.delete_own(Kind::Claim, &name).await?;
    Ok(Seen::Refused(By::Kubernetes, "the claim is lost".to_owned()))
}

async fn bind_the_content(site: &Site) -> Result<Seen> {
    let source = json!({
        "persistentVolumeClaimName": null, "volumeSnapshotContentName": site.victim.content,
    });
    let snapshot = site.snapshot("none", spec(json!({"source": source})));
    let name = match site.create_own(Kind::Snapshot, snapshot).await? {
        Ok(name) => name,
        Err(refused) => return Ok(refused),
    };
    let seen = site.snapshot_fails(&name, &[("", By::Kubernetes)]).await?;
    site.delete_own(Kind::Snapshot, &name).await?;
    Ok(seen)
}
