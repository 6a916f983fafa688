//! Whether a namespace has objects that are not of a guest that is removed.

use kube::api::{Api, DynamicObject, ListParams};
use kube::core::ApiResource;
use kube::discovery::{ApiCapabilities, ApiGroup, Discovery, Scope, verbs};

use super::MANAGEMENT;
use crate::clusters::Cluster;
use crate::error::Error;

/// Objects per kind that are read.
const READ: u32 = 10;

/// Objects of all kinds in a namespace, except those that every namespace has, Events, and the account.
pub(super) async fn foreign(cluster: &Cluster, namespace: &str, account: &str) -> Result<Vec<String>, Error> {
    let failed = |error: &kube::Error| Error::request(MANAGEMENT, "the kinds of objects", error);
    let discovered = Discovery::new(cluster.client.clone()).run().await.map_err(|error| failed(&error))?;
    let groups = discovered.groups_alphabetical().into_iter();
    let kinds = groups.flat_map(ApiGroup::recommended_resources);
    let mut found = Vec::new();
    for (resource, _) in kinds.filter(is_listed) {
        let names = names(cluster, namespace, &resource).await?;
        let is_foreign = |name: &&String| !is_expected(&resource.kind, name, account);
        found.extend(names.iter().filter(is_foreign).map(|name| format!("{} {name}", resource.kind)));
    }
    Ok(found)
}

fn is_listed((resource, capabilities): &(ApiResource, ApiCapabilities)) -> bool {
    let is_namespaced = capabilities.scope == Scope::Namespaced;
    is_namespaced && capabilities.supports_operation(verbs::LIST) && resource.kind != "Event"
}

/// What the control plane creates in every namespace, and the account.
fn is_expected(kind: &str, name: &str, account: &str) -> bool {
    match kind {
        "ServiceAccount" => name == "default" || name == account,
        "ConfigMap" => name == "kube-root-ca.crt",
        _ => false,
    }
}

async fn names(cluster: &Cluster, namespace: &str, resource: &ApiResource) -> Result<Vec<String>, Error> {
    let api: Api<DynamicObject> = Api::namespaced_with(cluster.client.clone(), namespace, resource);
    let listed = api.list_metadata(&ListParams::default().limit(READ)).await;
    let what = || format!("objects of kind {} in {namespace}", resource.kind);
    let listed = listed.map_err(|error| Error::request(MANAGEMENT, what(), &error))?;
    Ok(listed.iter().filter_map(|one| one.metadata.name.clone()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_every_namespace_has_is_expected() {
        assert!(
            is_expected("ServiceAccount", "default", "shop") && is_expected("ServiceAccount", "shop", "shop")
        );
        assert!(is_expected("ConfigMap", "kube-root-ca.crt", "shop"));
        assert!(
            !is_expected("ServiceAccount", "other", "shop") && !is_expected("ConfigMap", "settings", "shop")
        );
        assert!(!is_expected("PersistentVolumeClaim", "shop", "shop"));
    }
}
