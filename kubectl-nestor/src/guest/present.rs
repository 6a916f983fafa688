//! Reads what the management cluster has before a guest is added.

use guest_manifests::from_cel;
use k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicy;
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::rbac::v1::Role;
use kube::ResourceExt;
use kube::api::{Api, DynamicObject, ListParams};
use kube::core::{ApiResource, GroupVersionKind};

use super::api::MANAGED_BY;
use super::{MANAGEMENT, MANAGER};
use crate::clusters::Cluster;
use crate::error::Error;

/// Kinds of classes: group, version and kind. Not every cluster serves all of them.
const CLASSES: [(&str, &str, &str); 4] = [
    ("storage.k8s.io", "v1", "StorageClass"),
    ("snapshot.storage.k8s.io", "v1", "VolumeSnapshotClass"),
    ("storage.k8s.io", "v1", "VolumeAttributesClass"),
    ("storage.k8s.io", "v1beta1", "VolumeAttributesClass"),
];

/// Whether `guest add` applies the namespace: it does not exist, or was created by it.
pub(super) async fn is_own_namespace(cluster: &Cluster, name: &str) -> Result<bool, Error> {
    let found = cluster.all::<Namespace>().get_metadata_opt(name).await;
    let found = found.map_err(|error| Error::request(MANAGEMENT, format!("Namespace {name}"), &error))?;
    let is_own = |by: &String| by == MANAGER;
    Ok(found.is_none_or(|namespace| namespace.labels().get(MANAGED_BY).is_some_and(is_own)))
}

/// The classes that an admission policy allows; None if it does not exist.
pub(super) async fn allowed_classes(cluster: &Cluster, policy: &str) -> Result<Option<Vec<String>>, Error> {
    let found = cluster.all::<ValidatingAdmissionPolicy>().get_opt(policy).await;
    let what = || format!("ValidatingAdmissionPolicy {policy}");
    Ok(found.map_err(|error| Error::request(MANAGEMENT, what(), &error))?.and_then(|one| classes_of(&one)))
}

/// The classes that an admission policy of claims allows.
pub(super) fn classes_of(policy: &ValidatingAdmissionPolicy) -> Option<Vec<String>> {
    let variables = policy.spec.as_ref()?.variables.as_ref()?;
    let classes = variables.iter().find(|variable| variable.name == "classes")?;
    Some(from_cel(&classes.expression))
}

/// Name of the Cluster object that a guest may read; None without its Role.
pub(super) async fn cluster_object(
    cluster: &Cluster,
    namespace: &str,
    account: &str,
) -> Result<Option<String>, Error> {
    let roles: Api<Role> = Api::namespaced(cluster.client.clone(), namespace);
    let name = format!("{account}-cluster");
    let found = roles.get_opt(&name).await;
    let found =
        found.map_err(|error| Error::request(MANAGEMENT, format!("Role {namespace}/{name}"), &error))?;
    let rules = found.and_then(|role| role.rules).unwrap_or_default();
    Ok(rules.into_iter().find_map(|rule| rule.resource_names?.into_iter().next()))
}

/// Names of the classes of all kinds.
pub(super) async fn classes(cluster: &Cluster) -> Result<Vec<String>, Error> {
    let mut names = Vec::new();
    for (group, version, kind) in CLASSES {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
        let api: Api<DynamicObject> = Api::all_with(cluster.client.clone(), &resource);
        match api.list_metadata(&ListParams::default()).await {
            Ok(list) => names.extend(list.iter().filter_map(|class| class.metadata.name.clone())),
            Err(kube::Error::Api(status)) if status.is_not_found() => {}
            Err(error) => return Err(Error::request(MANAGEMENT, format!("objects of kind {kind}"), &error)),
        }
    }
    names.sort();
    names.dedup();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_classes_are_read_from_the_policy() {
        let policy = |variables| {
            serde_json::from_value(json!({"metadata": {"name": "claims"}, "spec": {"variables": variables}}))
                .unwrap()
        };
        let other = json!({"name": "isCreation", "expression": "true"});
        let classes = json!({"name": "classes", "expression": "['gold', 'silver']"});
        assert_eq!(classes_of(&policy(json!([other, classes]))), Some(vec!["gold".into(), "silver".into()]));
        assert_eq!(classes_of(&policy(json!([other]))), None);
    }
}
