//! What the management cluster shows of guests, and the problems that follow from it.

use std::collections::{BTreeMap, BTreeSet};

use crds::names::LABEL_CLUSTER_ID;
use crds::{StorageBudget, VirtualMachine};
use guest_manifests::{CLAIMS, KUBEVIRT_POLICIES, POLICIES};
use jiff::Timestamp;
use k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicy;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::ResourceExt;
use kube_kit::token::Claims;
use serde::Serialize;

use super::accounts::Account;
use super::{present, secret};
use crate::clusters::Cluster;
use crate::error::Error;
use crate::lists::read;

/// A guest.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Guest {
    pub(super) name: String,
    pub(super) namespace: String,
    pub(super) cluster_id: String,
    /// Value of the label `app.kubernetes.io/managed-by`.
    pub(super) managed_by: Option<String>,
    /// Classes that it may use; empty: all. None: there is no admission policy of claims.
    pub(super) classes: Option<Vec<String>>,
    pub(super) budget: Option<Budget>,
    pub(super) claims: usize,
    /// PersistentVolumes with its data.
    pub(super) volumes: usize,
    /// Those of them that are Released.
    pub(super) released: usize,
    /// Its VirtualMachines.
    pub(super) vms: Vec<String>,
    /// Expiry of the token that mgmt-csi has written. None: there is none.
    pub(super) token_expires: Option<Timestamp>,
    /// Admission policies that do not exist.
    pub(super) missing_policies: Vec<String>,
}

/// The StorageBudget of a guest.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Budget {
    pub(super) name: String,
    pub(super) used_bytes: Option<String>,
    pub(super) max_bytes: Option<String>,
    pub(super) used_volumes: Option<i64>,
    pub(super) max_volumes: Option<i64>,
    pub(super) used_snapshots: Option<i64>,
    pub(super) max_snapshots: Option<i64>,
    pub(super) applied: bool,
    /// Of the condition `Applied`.
    pub(super) message: String,
}

impl Budget {
    fn of(object: &StorageBudget) -> Self {
        let (spec, status) = (&object.spec, object.status.as_ref());
        let used = status.and_then(|status| status.used.as_ref());
        let applied = object.applied();
        Self {
            name: object.name_any(),
            used_bytes: used.map(|used| used.bytes.0.clone()),
            max_bytes: spec.bytes.as_ref().map(|bytes| bytes.0.clone()),
            used_volumes: used.map(|used| used.volumes),
            max_volumes: spec.volumes,
            used_snapshots: used.map(|used| used.snapshots),
            max_snapshots: spec.snapshots,
            applied: applied.is_some_and(|one| one.status == "True"),
            message: applied.map_or("mgmt-csi has not seen it yet", |one| &one.message).to_owned(),
        }
    }
}

/// Objects of all guests.
struct Objects {
    claims: Vec<PersistentVolumeClaim>,
    volumes: Vec<PersistentVolume>,
    vms: Vec<VirtualMachine>,
    budgets: Vec<StorageBudget>,
    policies: BTreeMap<String, ValidatingAdmissionPolicy>,
}

impl Objects {
    async fn read(cluster: &Cluster) -> Result<Self, Error> {
        let policies = cluster.all::<ValidatingAdmissionPolicy>();
        let policies = read::list(cluster, policies, "ValidatingAdmissionPolicies", None).await?;
        let claims = cluster.all();
        Ok(Self {
            claims: read::list(cluster, claims, "PersistentVolumeClaims", Some(LABEL_CLUSTER_ID)).await?,
            volumes: read::list(cluster, cluster.all(), "PersistentVolumes", None).await?,
            vms: read::labelled_machines(cluster, LABEL_CLUSTER_ID).await?,
            budgets: read::list(cluster, cluster.all(), "StorageBudgets", None).await?,
            policies: policies.into_iter().map(|policy| (policy.name_any(), policy)).collect(),
        })
    }

    /// Names of the policies that do not exist. With KubeVirt, all of its policies exist, or none.
    fn missing_policies(&self, policy: impl Fn(&str) -> String) -> Vec<String> {
        let exists = |subject: &str| self.policies.contains_key(&policy(subject));
        let has_kubevirt = KUBEVIRT_POLICIES.iter().any(|one| exists(one));
        let of_kubevirt = KUBEVIRT_POLICIES.iter().filter(|_| has_kubevirt);
        let missing = POLICIES.iter().chain(of_kubevirt).filter(|one| !exists(one));
        missing.map(|one| policy(one)).collect()
    }

    fn guest(&self, account: &Account, token_expires: Option<Timestamp>) -> Guest {
        let id = account.cluster_id.as_str();
        let claims =
            self.claims.iter().filter(|one| one.labels().get(LABEL_CLUSTER_ID).is_some_and(|one| one == id));
        let vms =
            self.vms.iter().filter(|one| one.labels().get(LABEL_CLUSTER_ID).is_some_and(|one| one == id));
        let volumes: Vec<_> = self.volumes.iter().filter(|one| read::guest_of(one) == Some(id)).collect();
        let policy = |subject: &str| guest_manifests::policy(subject, &account.name, &account.namespace);
        Guest {
            name: account.name.clone(),
            namespace: account.namespace.clone(),
            cluster_id: id.to_owned(),
            managed_by: account.managed_by.clone(),
            classes: self.policies.get(&policy(CLAIMS)).and_then(present::classes_of),
            budget: self.budget(id),
            claims: claims.count(),
            released: volumes.iter().filter(|volume| is_released(volume)).count(),
            volumes: volumes.len(),
            vms: vms.map(|vm| format!("{}/{}", vm.namespace().unwrap_or_default(), vm.name_any())).collect(),
            token_expires,
            missing_policies: self.missing_policies(policy),
        }
    }

    /// The oldest StorageBudget of a guest, which applies.
    fn budget(&self, cluster_id: &str) -> Option<Budget> {
        let own = self.budgets.iter().filter(|budget| budget.spec.cluster_id == cluster_id);
        own.min_by_key(|budget| budget.precedence()).map(Budget::of)
    }
}

fn is_released(volume: &PersistentVolume) -> bool {
    volume.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Released")
}

/// Reads the guests with these accounts.
pub(super) async fn guests(cluster: &Cluster, accounts: &[Account]) -> Result<Vec<Guest>, Error> {
    let objects = Objects::read(cluster).await?;
    let mut guests = Vec::new();
    for account in accounts {
        let token = secret::token(cluster, &account.namespace, &account.name).await?;
        let expires = token.and_then(|token| Claims::of(&token)?.expires);
        let expires = expires.and_then(|second| Timestamp::from_second(second).ok());
        guests.push(objects.guest(account, expires));
    }
    Ok(guests)
}

/// What keeps a guest from working, each with what to do.
pub(super) fn problems(guest: &Guest, now: Timestamp) -> Vec<String> {
    [no_vm(guest), token(guest, now), policies(guest), budget(guest)].into_iter().flatten().collect()
}

fn no_vm(guest: &Guest) -> Option<String> {
    guest.vms.is_empty().then(|| {
        format!(
            "no VirtualMachine has the label {LABEL_CLUSTER_ID}={}: label the guest's VMs in {}, else no disk is attached to them",
            guest.cluster_id, guest.namespace
        )
    })
}

fn token(guest: &Guest, now: Timestamp) -> Option<String> {
    let secret = crds::names::credential_secret(&guest.name);
    let what = match guest.token_expires {
        None => "has no token".to_owned(),
        Some(expires) if expires <= now => format!("has a token that expired at {expires}"),
        Some(_) => return None,
    };
    Some(format!(
        "Secret {}/{secret} {what}: check that mgmt-csi runs, and see its log for the account",
        guest.namespace
    ))
}

fn policies(guest: &Guest) -> Option<String> {
    (!guest.missing_policies.is_empty()).then(|| {
        format!(
            "the ValidatingAdmissionPolicies {} do not exist, so the guest can write more than its gc-csi needs: run `kubectl nestor \
             guest add {}` again, or set admission.enabled in the values of nestor-management",
            guest.missing_policies.join(", "),
            guest.name
        )
    })
}

fn budget(guest: &Guest) -> Option<String> {
    let budget = guest.budget.as_ref().filter(|budget| !budget.applied)?;
    Some(format!("StorageBudget {} is not applied: {}", budget.name, budget.message))
}

/// Names without repetition, for a cell.
pub(super) fn joined(names: &[String]) -> String {
    let names: BTreeSet<&str> = names.iter().map(String::as_str).collect();
    names.into_iter().collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::accounts::tests::account;
    use super::*;

    fn objects() -> Objects {
        let claim = |guest: &str| json!({"metadata": {"name": "c", "namespace": "guest-shop", "labels": {LABEL_CLUSTER_ID: guest}}});
        let volume = |guest: &str, phase: &str| {
            json!({
                "metadata": {"name": "v", "labels": {LABEL_CLUSTER_ID: guest}},
                "spec": {"csi": {"driver": crds::names::MANAGEMENT_DRIVER, "volumeHandle": "h"}},
                "status": {"phase": phase},
            })
        };
        let policy = json!({
            "metadata": {"name": "claims.shop.guest-shop.nestor.dev"},
            "spec": {"variables": [{"name": "classes", "expression": "['gold']"}]},
        });
        let budget = |name: &str, created: &str| {
            json!({
                "apiVersion": "nestor.dev/v1alpha1", "kind": "StorageBudget",
                "metadata": {"name": name, "creationTimestamp": created},
                "spec": {"clusterId": "id-1", "bytes": "500Gi"},
                "status": {"used": {"bytes": "5Gi", "volumes": 2, "snapshots": 0}},
            })
        };
        let policy: ValidatingAdmissionPolicy = serde_json::from_value(policy).unwrap();
        Objects {
            claims: serde_json::from_value(json!([claim("id-1"), claim("id-2")])).unwrap(),
            volumes: serde_json::from_value(json!([volume("id-1", "Bound"), volume("id-1", "Released")]))
                .unwrap(),
            vms: Vec::new(),
            budgets: serde_json::from_value(json!([
                budget("young", "2026-02-01T00:00:00Z"),
                budget("old", "2026-01-01T00:00:00Z"),
            ]))
            .unwrap(),
            policies: [(policy.name_any(), policy)].into(),
        }
    }

    #[test]
    fn a_guest_is_counted_by_its_cluster_id() {
        let guest = objects().guest(&account("shop", "guest-shop", "id-1"), None);
        assert_eq!((guest.claims, guest.volumes, guest.released), (1, 2, 1));
        assert_eq!(guest.classes, Some(vec!["gold".to_owned()]));
        let budget = guest.budget.unwrap();
        assert_eq!((budget.name.as_str(), budget.used_bytes.as_deref()), ("old", Some("5Gi")));
        assert_eq!(guest.missing_policies.len(), 4);
    }

    #[test]
    fn every_problem_says_what_to_do() {
        let now: Timestamp = "2026-01-10T00:00:00Z".parse().unwrap();
        let mut guest = objects().guest(&account("shop", "guest-shop", "id-1"), None);
        let found = problems(&guest, now).join("\n");
        for text in [
            "nestor.dev/cluster-id=id-1",
            "has no token",
            "guest add shop",
            "StorageBudget old is not applied",
        ] {
            assert!(found.contains(text), "{text:?} is missing: {found}");
        }
        guest.vms = vec!["guest-shop/vm-1".to_owned()];
        guest.missing_policies.clear();
        guest.budget = None;
        guest.token_expires = Some("2026-01-09T00:00:00Z".parse().unwrap());
        assert!(problems(&guest, now)[0].contains("expired at 2026-01-09"));
        guest.token_expires = Some("2026-01-11T00:00:00Z".parse().unwrap());
        assert_eq!(problems(&guest, now), Vec::<String>::new());
    }
}
