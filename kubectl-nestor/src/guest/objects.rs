//! What `guest add` applies and `guest remove` deletes, without I/O: the manifests of the chart nestor-management, and a
//! StorageBudget.

use crds::StorageBudget;
use guest_manifests::Guest;
use kube::ResourceExt;
use kube::api::DynamicObject;
use serde_json::{Map, Value, json};

use super::MANAGER;
use super::accounts::Account;
use super::api::{self, MANAGED_BY};
use crate::error::Error;

/// A guest as it is to be.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Request {
    pub(super) manifests: Guest,
    /// Limits of its StorageBudget; None: the objects have none.
    pub(super) limits: Option<Limits>,
    /// Whether the namespace is one of the objects.
    pub(super) has_namespace: bool,
    /// Whether its VMs are those of KubeVirt.
    pub(super) has_kubevirt: bool,
}

/// Limits of a StorageBudget.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Limits {
    pub(super) bytes: Option<String>,
    pub(super) volumes: Option<i64>,
    pub(super) snapshots: Option<i64>,
}

impl Limits {
    /// The limits, unless there are none.
    pub(super) fn any(self) -> Option<Self> {
        Some(self).filter(|limits| *limits != Self::default())
    }

    fn spec(&self, cluster_id: &str) -> Value {
        let bytes = self.bytes.as_ref().map(|bytes| ("bytes", json!(bytes)));
        let volumes = self.volumes.map(|volumes| ("volumes", json!(volumes)));
        let snapshots = self.snapshots.map(|snapshots| ("snapshots", json!(snapshots)));
        let limits = [bytes, volumes, snapshots].into_iter().flatten();
        let all = std::iter::once(("clusterId", json!(cluster_id))).chain(limits);
        Value::Object(all.map(|(key, value)| (key.to_owned(), value)).collect::<Map<_, _>>())
    }
}

/// Name of the StorageBudget of a guest, as in the chart.
pub(super) fn budget_name(guest: &Guest) -> String {
    format!("{}.{}", guest.namespace, guest.account)
}

/// The objects of a guest, in the order in which they are applied: the account has no rights before the policies and limits exist.
pub(super) fn objects(request: &Request) -> Result<Vec<DynamicObject>, Error> {
    let account = parse(&request.manifests.account_objects())?;
    let is_namespace = |object: &DynamicObject| api::kind(object) == "Namespace";
    let (namespace, account): (Vec<_>, Vec<_>) = account.into_iter().partition(is_namespace);
    let namespace = namespace.into_iter().filter(|_| request.has_namespace);
    let mut policies = parse(&request.manifests.admission_policies())?;
    let mut rights = Vec::new();
    if request.has_kubevirt {
        policies.extend(parse(&request.manifests.kubevirt_policies())?);
        rights = parse(&request.manifests.kubevirt_account_objects())?;
    }
    let budget = request.limits.as_ref().map(|limits| budget(&request.manifests, limits));
    let all = namespace.chain(policies).chain(budget).chain(account).chain(rights);
    Ok(all.map(labelled).collect())
}

fn parse(yaml: &str) -> Result<Vec<DynamicObject>, Error> {
    let documents: Vec<Value> =
        serde_saphyr::from_multiple(yaml).map_err(|error| Error::Encode(error.to_string()))?;
    let objects = documents.into_iter().map(serde_json::from_value);
    objects.collect::<Result<_, _>>().map_err(|error| Error::Encode(error.to_string()))
}

fn budget(guest: &Guest, limits: &Limits) -> DynamicObject {
    let mut budget = api::named("nestor.dev/v1alpha1", "StorageBudget", None, &budget_name(guest));
    budget.data = json!({"spec": limits.spec(&guest.cluster_id)});
    budget
}

fn labelled(mut object: DynamicObject) -> DynamicObject {
    let labels = object.labels_mut();
    labels.insert(MANAGED_BY.to_owned(), MANAGER.to_owned());
    labels.insert("app.kubernetes.io/part-of".to_owned(), "nestor".to_owned());
    object
}

/// When an object of a guest is deleted: its credential first, so that nothing of it acts during the rest; the account last, because
/// an interrupted removal is found by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    Revoke,
    Rights,
    Policies,
    Account,
}

/// When an object is deleted; None if this is decided by what else exists.
pub(super) fn stage(object: &DynamicObject) -> Option<Stage> {
    match api::kind(object) {
        "Secret" => Some(Stage::Revoke),
        "Role" | "RoleBinding" | "ClusterRoleBinding" => Some(Stage::Rights),
        "ValidatingAdmissionPolicy" | "ValidatingAdmissionPolicyBinding" => Some(Stage::Policies),
        "ServiceAccount" => Some(Stage::Account),
        _ => None,
    }
}

/// What the management cluster has before a guest is added.
pub(super) struct Present<'a> {
    pub(super) accounts: &'a [Account],
    pub(super) budgets: &'a [StorageBudget],
    /// Names of classes of all kinds; None: the request names no class that has to be checked.
    pub(super) classes: Option<&'a [String]>,
    pub(super) may_share_namespace: bool,
}

/// Why a guest can't be added; None if it can.
pub(super) fn reason_to_refuse(request: &Request, present: &Present<'_>) -> Option<String> {
    let guest = &request.manifests;
    identity(guest, present.accounts)
        .or_else(|| neighbour(guest, present))
        .or_else(|| other_budget(request, present.budgets))
        .or_else(|| unknown_class(guest, present.classes?))
}

fn identity(guest: &Guest, accounts: &[Account]) -> Option<String> {
    let is_self = |one: &Account| one.name == guest.account && one.namespace == guest.namespace;
    if let Some(other) = accounts.iter().find(|one| is_self(one) && one.cluster_id != guest.cluster_id) {
        return Some(format!(
            "guest {} has the cluster ID {}, by which its volumes are found, and not {}: leave out --cluster-id, or remove the guest \
             first with `kubectl nestor guest remove`",
            other.key(),
            other.cluster_id,
            guest.cluster_id
        ));
    }
    let other = accounts.iter().find(|one| !is_self(one) && one.cluster_id == guest.cluster_id)?;
    Some(format!(
        "guest {} has the cluster ID {} already: set --cluster-id to another one",
        other.key(),
        guest.cluster_id
    ))
}

/// Another guest of the namespace.
fn neighbour(guest: &Guest, present: &Present<'_>) -> Option<String> {
    let is_other = |one: &&Account| one.namespace == guest.namespace && one.name != guest.account;
    let mut others = present.accounts.iter().filter(is_other);
    if present.may_share_namespace {
        let other = others.find(|one| have_common_names(&one.name, &guest.account))?;
        return Some(format!(
            "objects of guests {} and {} would have the same names in namespace {}: choose another NAME",
            other.name, guest.account, guest.namespace
        ));
    }
    let other = others.next()?;
    Some(format!(
        "namespace {} has guest {} already, and guests of one namespace can read each other's objects: set another --namespace, or \
         --shared-namespace",
        guest.namespace, other.name
    ))
}

/// Whether two accounts of a namespace have Roles or Secrets of the same name.
fn have_common_names(one: &str, other: &str) -> bool {
    let names = |name: &str| ["", "-credential", "-cluster", "-kubevirt"].map(|end| format!("{name}{end}"));
    let others = names(other);
    names(one).iter().any(|name| others.contains(name))
}

fn other_budget(request: &Request, budgets: &[StorageBudget]) -> Option<String> {
    let (guest, name) = (&request.manifests, budget_name(&request.manifests));
    request.limits.as_ref()?;
    let is_other = |one: &&StorageBudget| one.spec.cluster_id == guest.cluster_id && one.name_any() != name;
    let other = budgets.iter().find(is_other)?.name_any();
    Some(format!(
        "StorageBudget {other} limits guest {} already, and only the oldest applies: change that one, or delete it and run the command \
         again",
        guest.account
    ))
}

fn unknown_class(guest: &Guest, known: &[String]) -> Option<String> {
    let unknown = guest.classes.iter().find(|class| !known.contains(class))?;
    Some(format!(
        "no StorageClass, VolumeSnapshotClass or VolumeAttributesClass of the management cluster is named {unknown}: create it, or \
         correct --class; there are {}",
        known.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::accounts::tests::account;
    use super::*;

    fn request(limits: Option<Limits>) -> Request {
        Request {
            manifests: Guest {
                namespace: "guest-shop".into(),
                account: "shop".into(),
                cluster_object: "shop".into(),
                cluster_id: "id-1".into(),
                classes: vec!["gold".into()],
                takes_unlabelled_vms: false,
                system_namespace: "nestor-system".into(),
            },
            limits,
            has_namespace: true,
            has_kubevirt: false,
        }
    }

    fn present<'a>(accounts: &'a [Account], classes: &'a [String]) -> Present<'a> {
        Present { accounts, budgets: &[], classes: Some(classes), may_share_namespace: false }
    }

    #[test]
    fn a_guest_has_policies_and_limits_before_it_has_rights() {
        let limits = Limits { bytes: Some("500Gi".into()), volumes: Some(20), snapshots: None };
        let objects = objects(&request(Some(limits))).unwrap();
        let titles: Vec<String> = objects.iter().map(api::title).collect();
        let place = |title: &str| titles.iter().position(|one| one == title).unwrap();
        assert_eq!(place("Namespace guest-shop"), 0);
        let budget = place("StorageBudget guest-shop.shop");
        assert!(place("ValidatingAdmissionPolicyBinding events.shop.guest-shop.nestor.dev") < budget);
        assert!(budget < place("ServiceAccount guest-shop/shop"));
        let spec = &objects[budget].data["spec"];
        assert_eq!(*spec, json!({"clusterId": "id-1", "bytes": "500Gi", "volumes": 20}));
        assert!(objects.iter().all(|object| object.labels().get(MANAGED_BY).is_some_and(|by| by == MANAGER)));
        assert_eq!(titles.iter().collect::<BTreeSet<_>>().len(), titles.len(), "{titles:?}");
    }

    #[test]
    fn without_a_budget_and_with_another_namespace_there_are_neither() {
        let request = Request { has_namespace: false, ..request(Limits::default().any()) };
        let titles: Vec<String> = objects(&request).unwrap().iter().map(api::title).collect();
        assert!(!titles.iter().any(|title| title.starts_with("Namespace ") || title.contains("Budget")));
    }

    #[test]
    fn with_kubevirt_there_are_policies_before_there_are_rights() {
        let titles = |has_kubevirt| {
            let objects = objects(&Request { has_kubevirt, ..request(None) }).unwrap();
            objects.iter().map(api::title).collect::<Vec<_>>()
        };
        let with = titles(true);
        let place = |title: &str| with.iter().position(|one| one == title).unwrap();
        let last = "ValidatingAdmissionPolicyBinding kubevirt-instances.shop.guest-shop.nestor.dev";
        assert!(place(last) < place("ServiceAccount guest-shop/shop"));
        assert!(place(last) < place("RoleBinding guest-shop/shop-kubevirt"));
        assert!(!titles(false).iter().any(|title| title.contains("kubevirt")));
    }

    #[test]
    fn the_credential_is_deleted_first_and_the_account_last() {
        let mut all = objects(&Request { has_kubevirt: true, ..request(None) }).unwrap();
        all.retain(|object| stage(object).is_some());
        all.sort_by_key(stage);
        let titles: Vec<String> = all.iter().map(api::title).collect();
        assert_eq!(titles[0], "Secret guest-shop/shop-credential");
        assert_eq!(titles.last().unwrap(), "ServiceAccount guest-shop/shop");
    }

    #[test]
    fn an_identity_is_unique_and_never_changes() {
        let gold = ["gold".to_owned()];
        let refused = |accounts: &[Account]| reason_to_refuse(&request(None), &present(accounts, &gold));
        assert_eq!(refused(&[account("shop", "guest-shop", "id-1"), account("a", "b", "c")]), None);
        let why = refused(&[account("shop", "guest-shop", "id-2")]).unwrap();
        assert!(why.contains("id-2") && why.contains("guest remove"), "{why}");
        let why = refused(&[account("other", "elsewhere", "id-1")]).unwrap();
        assert!(why.contains("elsewhere/other"), "{why}");
    }

    #[test]
    fn a_namespace_is_shared_only_on_request_and_without_common_names() {
        let gold = ["gold".to_owned()];
        let accounts = [account("other", "guest-shop", "id-2")];
        let mut present = present(&accounts, &gold);
        let why = reason_to_refuse(&request(None), &present).unwrap();
        assert!(why.contains("--shared-namespace") && why.contains("guest other"), "{why}");
        present.may_share_namespace = true;
        assert_eq!(reason_to_refuse(&request(None), &present), None);
        let accounts = [account("shop-cluster", "guest-shop", "id-2")];
        present.accounts = &accounts;
        let why = reason_to_refuse(&request(None), &present).unwrap();
        assert!(why.contains("same names"), "{why}");
    }

    #[test]
    fn classes_must_exist_and_a_guest_has_one_budget() {
        let iron = ["iron".to_owned()];
        let why = reason_to_refuse(&request(None), &present(&[], &iron)).unwrap();
        assert!(why.contains("named gold") && why.contains("there are iron"), "{why}");

        let gold = ["gold".to_owned()];
        let budget: StorageBudget = serde_json::from_value(json!({
            "apiVersion": "nestor.dev/v1alpha1", "kind": "StorageBudget",
            "metadata": {"name": "earlier"}, "spec": {"clusterId": "id-1"},
        }))
        .unwrap();
        let budgets = [budget];
        let mut present = present(&[], &gold);
        present.budgets = &budgets;
        assert_eq!(reason_to_refuse(&request(None), &present), None);
        let limits = Limits { volumes: Some(1), ..Limits::default() };
        let why = reason_to_refuse(&request(Some(limits)), &present).unwrap();
        assert!(why.contains("StorageBudget earlier"), "{why}");
    }
}
