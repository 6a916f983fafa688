//! Guests as the management cluster knows them: by the ServiceAccounts of their gc-csi, which the chart labels with the cluster
//! ID, and by the same label of their VirtualMachines.

use std::collections::BTreeSet;

use crds::names::{ClusterId, LABEL_CLUSTER_ID};

use crate::clusters::Cluster;
use crate::error::Error;
use crate::guest::accounts::{self, Account};
use crate::lists::read::labelled_machines;

/// The guest that a volume is shared with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Guest {
    /// Its cluster ID.
    pub(super) id: String,
    /// Its management namespace.
    pub(super) namespace: String,
}

/// An object that shows the namespace of a guest.
#[derive(Debug, Clone)]
struct Known {
    id: String,
    namespace: String,
    /// Name of the ServiceAccount; None for a VirtualMachine.
    account: Option<String>,
}

/// Finds the guest with this cluster ID or name of its ServiceAccount. `namespace` overrides what the cluster shows.
pub(super) async fn find(cluster: &Cluster, text: &str, namespace: Option<&str>) -> Result<Guest, Error> {
    let accounts = known_accounts(cluster).await?;
    if accounts.iter().any(|account| account.is(text)) || namespace.is_some() {
        return choose(text, namespace, &accounts).map_err(Error::Refused);
    }
    let vms = vms(cluster, text).await?;
    choose(text, namespace, &vms).map_err(Error::Refused)
}

impl Known {
    fn is(&self, text: &str) -> bool {
        self.id == text || self.account.as_deref() == Some(text)
    }
}

async fn known_accounts(cluster: &Cluster) -> Result<Vec<Known>, Error> {
    let accounts = accounts::list(cluster).await?.into_iter();
    let known = accounts.map(|Account { name, namespace, cluster_id, .. }| Known {
        id: cluster_id,
        namespace,
        account: Some(name),
    });
    Ok(known.collect())
}

async fn vms(cluster: &Cluster, id: &str) -> Result<Vec<Known>, Error> {
    // Any other text is not a valid selector.
    if id.parse::<ClusterId>().is_err() {
        return Ok(Vec::new());
    }
    let vms = labelled_machines(cluster, &format!("{LABEL_CLUSTER_ID}={id}")).await?;
    let known = vms.iter().filter_map(|vm| {
        Some(Known { id: id.to_owned(), namespace: vm.metadata.namespace.clone()?, account: None })
    });
    Ok(known.collect())
}

/// Chooses the guest among those that the cluster shows.
fn choose(text: &str, namespace: Option<&str>, known: &[Known]) -> Result<Guest, String> {
    let found: Vec<&Known> = known.iter().filter(|one| one.is(text)).collect();
    let ids: BTreeSet<&str> = found.iter().map(|one| one.id.as_str()).collect();
    let namespaces: BTreeSet<&str> = found.iter().map(|one| one.namespace.as_str()).collect();
    let join = |all: &BTreeSet<&str>| all.iter().copied().collect::<Vec<_>>().join(", ");
    if ids.len() > 1 {
        return Err(format!(
            "several guests are named {text:?}: set --with to one of the IDs {}",
            join(&ids)
        ));
    }
    let id: ClusterId =
        ids.first().copied().unwrap_or(text).parse().map_err(|invalid| format!("--with: {invalid}"))?;
    let namespace = match (namespace, namespaces.first().copied()) {
        (Some(namespace), _) => namespace,
        (None, Some(namespace)) if namespaces.len() == 1 => namespace,
        (None, Some(_)) => {
            let namespaces = join(&namespaces);
            return Err(format!(
                "guest {text} has the namespaces {namespaces}: set --to-namespace to one of them"
            ));
        }
        (None, None) => {
            return Err(format!(
                "guest {text:?} is not known: the management cluster has neither a ServiceAccount nor a VirtualMachine with the \
                 label {LABEL_CLUSTER_ID}={text}, nor a ServiceAccount of a guest with this name; correct --with, or set \
                 --to-namespace to the guest's namespace"
            ));
        }
    };
    Ok(Guest { id: id.to_string(), namespace: namespace.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account(id: &str, namespace: &str, name: &str) -> Known {
        Known { id: id.to_owned(), namespace: namespace.to_owned(), account: Some(name.to_owned()) }
    }

    #[test]
    fn a_guest_is_found_by_its_id_and_by_the_name_of_its_account() {
        let known = [account("id-1", "guest-1", "gc-csi-one"), account("id-2", "guest-2", "gc-csi-two")];
        let expected = Guest { id: "id-2".to_owned(), namespace: "guest-2".to_owned() };
        for text in ["id-2", "gc-csi-two"] {
            assert_eq!(choose(text, None, &known), Ok(expected.clone()));
        }
        let elsewhere = choose("gc-csi-two", Some("other"), &known).unwrap();
        assert_eq!((elsewhere.id.as_str(), elsewhere.namespace.as_str()), ("id-2", "other"));
    }

    #[test]
    fn an_unknown_guest_needs_a_namespace_and_an_ambiguous_one_a_choice() {
        let known = [
            account("id-1", "a", "gc-csi"),
            account("id-2", "b", "gc-csi"),
            account("id-3", "c", "x"),
            account("id-3", "d", "y"),
        ];
        let refused = |text: &str, word: &str| {
            let why = choose(text, None, &known).unwrap_err();
            assert!(why.contains(text) && why.contains(word), "{why}");
        };
        refused("absent", "--to-namespace");
        refused("gc-csi", "id-1, id-2");
        refused("id-3", "c, d");
        assert_eq!(choose("absent", Some("e"), &known).unwrap().id, "absent");
        assert!(choose("not/an id", Some("e"), &known).unwrap_err().contains("label value"));
    }
}
