//! Accounts of guests: ServiceAccounts with the label `nestor.dev/cluster-id`.

use crds::names::{LABEL_CLUSTER_ID, LABEL_GUEST_ACCOUNT};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::ResourceExt;

use super::api::MANAGED_BY;
use crate::cli::SYSTEM_NAMESPACE;
use crate::clusters::Cluster;
use crate::error::Error;
use crate::lists::read;

/// The account of a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Account {
    pub(crate) name: String,
    pub(crate) namespace: String,
    pub(crate) cluster_id: String,
    /// Namespace of the mgmt-csi that renews its token.
    pub(super) system_namespace: String,
    /// Value of the label `app.kubernetes.io/managed-by`.
    pub(super) managed_by: Option<String>,
}

/// The accounts of all guests.
pub(crate) async fn list(cluster: &Cluster) -> Result<Vec<Account>, Error> {
    let all: Vec<ServiceAccount> =
        read::list(cluster, cluster.all(), "ServiceAccounts", Some(LABEL_CLUSTER_ID)).await?;
    Ok(all.iter().filter_map(Account::of).collect())
}

/// The guest with this name.
pub(crate) async fn find(cluster: &Cluster, name: &str, namespace: Option<&str>) -> Result<Account, Error> {
    choose(name, namespace, &list(cluster).await?)
}

impl Account {
    fn of(account: &ServiceAccount) -> Option<Self> {
        let system = account.labels().get(LABEL_GUEST_ACCOUNT);
        Some(Self {
            name: account.name_any(),
            namespace: account.namespace()?,
            cluster_id: account.labels().get(LABEL_CLUSTER_ID)?.clone(),
            system_namespace: system.cloned().unwrap_or_else(|| SYSTEM_NAMESPACE.to_owned()),
            managed_by: account.labels().get(MANAGED_BY).cloned(),
        })
    }

    /// `namespace/name`.
    pub(super) fn key(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

fn choose(name: &str, namespace: Option<&str>, all: &[Account]) -> Result<Account, Error> {
    let is_meant =
        |one: &&Account| one.name == name && namespace.is_none_or(|namespace| one.namespace == namespace);
    let found: Vec<&Account> = all.iter().filter(is_meant).collect();
    match found[..] {
        [account] => Ok(account.clone()),
        [] => Err(Error::NoSubject(format!("guest {name}"), known(all))),
        ref several => {
            let namespaces: Vec<&str> = several.iter().map(|one| one.namespace.as_str()).collect();
            Err(Error::Refused(format!(
                "several guests are named {name}: set --namespace to one of {}",
                namespaces.join(", ")
            )))
        }
    }
}

fn known(all: &[Account]) -> String {
    let keys: Vec<String> = all.iter().map(Account::key).collect();
    match keys.is_empty() {
        true => format!("; the management cluster has no ServiceAccount with the label {LABEL_CLUSTER_ID}"),
        false => format!("; the guests of the management cluster are {}", keys.join(", ")),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// An account that was not made by Helm.
    pub(in crate::guest) fn account(name: &str, namespace: &str, cluster_id: &str) -> Account {
        let [name, namespace, cluster_id] = [name, namespace, cluster_id].map(str::to_owned);
        let system_namespace = SYSTEM_NAMESPACE.to_owned();
        Account { name, namespace, cluster_id, system_namespace, managed_by: None }
    }

    #[test]
    fn a_guest_is_found_by_name_and_an_ambiguous_name_needs_a_namespace() {
        let all = [account("a", "guest-a", "1"), account("b", "x", "2"), account("b", "y", "3")];
        assert_eq!(choose("a", None, &all).unwrap().cluster_id, "1");
        assert_eq!(choose("b", Some("y"), &all).unwrap().cluster_id, "3");
        let error = choose("b", None, &all).unwrap_err().to_string();
        assert!(error.contains("x, y") && error.contains("--namespace"), "{error}");
        let error = choose("c", None, &all).unwrap_err().to_string();
        assert!(error.contains("guest c does not exist") && error.contains("guest-a/a"), "{error}");
    }
}
