//! Rights of the account in the kubeconfig, by SelfSubjectAccessReview: what this program reads, and if the account is that
//! of a guest's gc-csi, what gc-csi needs.

use futures::future::try_join_all;
use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use kube::api::PostParams;

use super::finding::Finding;
use crate::clusters::{Cluster, Tier};
use crate::error::Error;

/// Group, resource, and whether it is in the namespace of the claims.
type Target = (&'static str, &'static str, bool);

/// What a trace reads in the guest.
const GUEST_READS: [Target; 7] = [
    ("", "persistentvolumeclaims", true),
    ("", "pods", true),
    ("", "events", true),
    ("", "persistentvolumes", false),
    ("", "nodes", false),
    ("storage.k8s.io", "volumeattachments", false),
    ("storage.k8s.io", "csinodes", false),
];
/// What a trace reads in the management cluster. A guest's account may not read PersistentVolumes.
const MANAGEMENT_READS: [Target; 6] = [
    ("", "persistentvolumeclaims", true),
    ("", "events", true),
    ("nestor.dev", "volumeattachments", true),
    ("vmoperator.vmware.com", "virtualmachines", true),
    ("storage.k8s.io", "storageclasses", false),
    ("", "persistentvolumes", false),
];
/// What gc-csi writes in the management cluster.
const GC_CSI_WRITES: [(&str, Target); 4] = [
    ("create", ("", "persistentvolumeclaims", true)),
    ("delete", ("", "persistentvolumeclaims", true)),
    ("patch", ("", "persistentvolumeclaims", true)),
    ("patch", ("vmoperator.vmware.com", "virtualmachines", true)),
];

/// Checks the rights in a cluster.
pub async fn check(cluster: &Cluster) -> Result<Vec<Finding>, Error> {
    let user = user(cluster).await?;
    let reads: &[Target] = match cluster.tier {
        Tier::Guest => &GUEST_READS,
        Tier::Management => &MANAGEMENT_READS,
    };
    let verbs =
        |target: &Target| -> &[&str] { if target.1 == "events" { &["list"] } else { &["get", "list"] } };
    let mut wanted: Vec<(&str, Target)> =
        reads.iter().flat_map(|target| verbs(target).iter().map(move |verb| (*verb, *target))).collect();
    let is_driver = cluster.tier == Tier::Management
        && user.rsplit(':').next().is_some_and(|name| name.starts_with("gc-csi"));
    if is_driver {
        wanted.extend(GC_CSI_WRITES);
    }
    let answers = try_join_all(wanted.into_iter().map(|(verb, target)| ask(cluster, verb, target))).await?;
    let denied: Vec<String> = answers.into_iter().flatten().collect();
    Ok(judge(cluster.tier, &user, is_driver, &denied))
}

fn judge(tier: Tier, user: &str, is_driver: bool, denied: &[String]) -> Vec<Finding> {
    let what = format!("rights of {user}");
    // A guest's account is not meant to see PersistentVolumes.
    let (expected, missing): (Vec<&String>, Vec<&String>) =
        denied.iter().partition(|text| is_driver && text.ends_with(" persistentvolumes"));
    let text = |list: &[&String]| list.iter().map(|one| one.as_str()).collect::<Vec<_>>().join(", ");
    match (missing.is_empty(), expected.is_empty()) {
        (true, true) => vec![Finding::ok(tier, what)],
        (true, false) => {
            vec![
                Finding::ok(tier, what)
                    .because(format!("not: {}, as it should be for a guest", text(&expected))),
            ]
        }
        (false, _) if is_driver => {
            vec![Finding::error(tier, what).because(format!("it may not {}", text(&missing))).next(
                "apply the guest's Role and bindings again (charts/nestor-management/files/guest.yaml)",
            )]
        }
        (false, _) => vec![
            Finding::warning(tier, what)
                .because(format!("it may not {}", text(&missing)))
                .next("traces show these objects as not readable; use another account to see them"),
        ],
    }
}

async fn user(cluster: &Cluster) -> Result<String, Error> {
    let answer = cluster.all::<SelfSubjectReview>().create(&PostParams::default(), &Default::default()).await;
    let answer = answer.map_err(|error| Error::request(cluster.tier.name(), "the own account", &error))?;
    let info = answer.status.and_then(|status| status.user_info);
    Ok(info.and_then(|info| info.username).unwrap_or_default())
}

/// Asks whether the account may do this. Returns the request as text if not.
async fn ask(
    cluster: &Cluster,
    verb: &str,
    (group, resource, namespaced): Target,
) -> Result<Option<String>, Error> {
    let attributes = ResourceAttributes {
        group: Some(group.to_owned()),
        resource: Some(resource.to_owned()),
        verb: Some(verb.to_owned()),
        namespace: namespaced.then(|| cluster.namespace.clone()),
        ..Default::default()
    };
    let review = SelfSubjectAccessReview {
        spec: SelfSubjectAccessReviewSpec { resource_attributes: Some(attributes), ..Default::default() },
        ..Default::default()
    };
    let answer = cluster.all::<SelfSubjectAccessReview>().create(&PostParams::default(), &review).await;
    let answer = answer.map_err(|error| Error::request(cluster.tier.name(), "the own rights", &error))?;
    let is_allowed = answer.status.is_some_and(|status| status.allowed);
    Ok((!is_allowed).then(|| format!("{verb} {resource}")))
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::*;

    #[test]
    fn a_guests_account_must_write_claims_and_need_not_read_volumes() {
        let level = |is_driver, denied: &[&str]| {
            let denied: Vec<String> = denied.iter().map(|text| (*text).to_owned()).collect();
            judge(Tier::Management, "u", is_driver, &denied)[0].level
        };
        assert_eq!(level(true, &["get persistentvolumes"]), Level::Ok);
        assert_eq!(level(true, &["create persistentvolumeclaims"]), Level::Error);
        assert_eq!(level(false, &["get persistentvolumes"]), Level::Warning);
        assert_eq!(level(false, &[]), Level::Ok);
    }
}
