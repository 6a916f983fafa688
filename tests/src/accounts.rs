//! Accounts with the rights of the charts' roles, which a test takes away and gives back.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::authorization::v1::SubjectAccessReview;
use kube::Client;
use kube::api::{Api, PostParams};
use lab::audit::{Audit, Mark};
use lab::cluster::MANAGEMENT_NAMESPACE;
use lab::cluster::objects::token;
use lab::rights::{Right, granted};
use lab::state::Cluster;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::own_namespace::OwnNamespace;
use crate::program::{kubeconfig, management_cluster};
use crate::scenario::GUEST;
use crate::tenants::Tenant;
use crate::{PATIENCE, Scenario, chart, eventually, unique};

const GROUP: &str = "rbac.authorization.k8s.io";

/// Interval of attempts.
const INTERVAL: Duration = Duration::from_millis(200);

/// An account whose rights are those of roles of the charts. It has them by roles of its own.
pub struct Account {
    client: Client,
    audit: Audit,
    /// The user in the audit log.
    user: String,
    /// Its kubeconfig.
    pub kubeconfig: PathBuf,
    roles: Vec<OwnRole>,
    /// What replaces the placeholders in names of objects.
    names: BTreeMap<String, String>,
    _folder: Option<TempDir>,
}

/// A role with the rights of one of the charts.
struct OwnRole {
    /// The role in the charts, as in [`Right::role`].
    of: String,
    /// The role without rules.
    object: Value,
    rights: Vec<Right>,
}

impl OwnRole {
    fn new(of: &str, name: &str, namespace: &str) -> Result<Self> {
        let rights: Vec<Right> = granted()?.into_iter().filter(|right| right.role == of).collect();
        ensure!(!rights.is_empty(), "the charts have no {of}");
        let object = match of.split_once(' ') {
            Some(("ClusterRole", _)) => json!({"kind": "ClusterRole", "metadata": {"name": name}}),
            _ => json!({"kind": "Role", "metadata": {"name": name, "namespace": namespace}}),
        };
        Ok(Self { of: of.to_owned(), object: versioned(object), rights })
    }

    fn namespace(&self) -> &str {
        self.object["metadata"]["namespace"].as_str().unwrap_or_default()
    }

    /// A binding of the role to a ServiceAccount.
    fn binding(&self, namespace: &str, account: &str) -> Value {
        let kind = self.object["kind"].as_str().unwrap_or_default();
        versioned(json!({
            "kind": format!("{kind}Binding"), "metadata": self.object["metadata"],
            "roleRef": {"apiGroup": GROUP, "kind": kind, "name": self.object["metadata"]["name"]},
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
        }))
    }
}

fn versioned(mut object: Value) -> Value {
    object["apiVersion"] = json!(format!("{GROUP}/v1"));
    object
}

/// A cluster whose API server an account uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tier {
    /// The management cluster.
    Management,
    /// The first guest.
    Guest,
}

impl Tier {
    fn client(self, s: &Scenario) -> Client {
        match self {
            Self::Management => s.management.clone(),
            Self::Guest => s.guest.clone(),
        }
    }

    fn audit(self, s: &Scenario) -> Result<Audit> {
        match self {
            Self::Management => s.lab.audit(),
            Self::Guest => s.lab.guest_audit(GUEST),
        }
    }

    fn cluster(self, s: &Scenario) -> Result<&Cluster> {
        match self {
            Self::Management => management_cluster(s),
            Self::Guest => Ok(&s.lab.state().guests.get(GUEST).context("the lab has no such guest")?.cluster),
        }
    }
}

impl Account {
    /// Creates an account in a namespace of a cluster with these roles of the charts, each with the namespace of its objects.
    pub async fn create(s: &Scenario, tier: Tier, namespace: &str, roles: &[(&str, &str)]) -> Result<Self> {
        let (client, cluster, name) = (tier.client(s), tier.cluster(s)?, unique("rights"));
        let account = json!({
            "apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": namespace},
        });
        chart::apply(&client, &account, false).await?;
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("kubeconfig");
        let token = token(&client, namespace, &name).await?;
        kubeconfig(&file, &cluster.server, Some(&cluster.ca), &token)?;
        let mut own = Self {
            audit: tier.audit(s)?,
            client,
            user: format!("system:serviceaccount:{namespace}:{name}"),
            kubeconfig: file,
            roles: Vec::new(),
            names: BTreeMap::new(),
            _folder: Some(folder),
        };
        for (role, objects) in roles {
            own.bind(s, OwnRole::new(role, &unique("rights"), objects)?, (namespace, &name)).await?;
        }
        Ok(own)
    }

    /// The account of a guest of a test. Its roles in the guest's namespace are those that it has, the others copies.
    pub async fn of_tenant(
        s: &Scenario,
        tenant: &Tenant,
        namespace: &OwnNamespace,
        kubeconfig: PathBuf,
    ) -> Result<Self> {
        let (account, place) = (tenant.account.as_str(), namespace.name.as_str());
        let names = [("ACCOUNT", account), ("CLUSTER", tenant.name.as_str())];
        let mut own = Self {
            client: s.management.clone(),
            audit: s.lab.audit()?,
            user: format!("system:serviceaccount:{place}:{account}"),
            kubeconfig,
            roles: vec![
                OwnRole::new("Role ACCOUNT", account, place)?,
                OwnRole::new("Role ACCOUNT-cluster", &format!("{account}-cluster"), place)?,
            ],
            names: names.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
            _folder: None,
        };
        let bound = |role: &str| format!("{role}:{place}:{account}");
        let shared = [
            json!({"kind": "ClusterRoleBinding", "metadata": {"name": bound("nestor:class-reader")}}),
            json!({
                "kind": "RoleBinding",
                "metadata": {"name": bound("nestor:capacity-reader"), "namespace": MANAGEMENT_NAMESPACE},
            }),
        ];
        for binding in shared {
            chart::delete(&own.client, &versioned(binding)).await?;
        }
        for role in ["ClusterRole nestor:class-reader", "Role nestor:capacity-reader"] {
            let role = OwnRole::new(role, &unique("rights"), MANAGEMENT_NAMESPACE)?;
            own.bind(s, role, (place, account)).await?;
        }
        Ok(own)
    }

    /// Name of its ServiceAccount.
    pub fn name(&self) -> &str {
        self.user.rsplit(':').next().unwrap_or_default()
    }

    /// Replaces a placeholder in the names of objects.
    pub async fn named(mut self, placeholder: &str, name: &str) -> Result<Self> {
        self.names.insert(placeholder.to_owned(), name.to_owned());
        for role in &self.roles {
            self.write(role, &[]).await?;
        }
        Ok(self)
    }

    async fn bind(&mut self, s: &Scenario, role: OwnRole, (namespace, name): (&str, &str)) -> Result<()> {
        let binding = role.binding(namespace, name);
        self.write(&role, &[]).await?;
        chart::apply(&self.client, &binding, false).await?;
        for object in [binding, role.object.clone()] {
            s.created().role_objects.push((self.client.clone(), object));
        }
        self.roles.push(role);
        Ok(())
    }

    /// Writes a role without some of its rights.
    async fn write(&self, role: &OwnRole, missing: &[Right]) -> Result<()> {
        let kept = role.rights.iter().filter(|right| !missing.contains(right));
        let mut object = role.object.clone();
        object["rules"] = kept.map(|right| self.rule(right)).collect();
        chart::apply(&self.client, &object, false).await.map(drop)
    }

    fn rule(&self, right: &Right) -> Value {
        let (group, names) = (group(right), self.names_of(right));
        if right.resource.starts_with('/') {
            return json!({"nonResourceURLs": [right.resource], "verbs": [right.verb]});
        }
        json!({
            "apiGroups": [group], "resources": [right.resource], "resourceNames": names, "verbs": [right.verb],
        })
    }

    /// Names of the objects of a right.
    fn names_of(&self, right: &Right) -> Vec<String> {
        let real = |name: &str| {
            let mut real = name.to_owned();
            self.names.iter().for_each(|(placeholder, name)| real = real.replace(placeholder, name));
            real
        };
        right.names.split(", ").filter(|name| !name.is_empty()).map(real).collect()
    }

    fn role_of(&self, right: &Right) -> Option<&OwnRole> {
        self.roles.iter().find(|role| role.of == right.role)
    }

    /// Changes which rights are missing, and waits until the API server applies the changes to these.
    async fn change(&self, missing: &[Right], changed: &[Right]) -> Result<()> {
        let is_changed = |role: &&OwnRole| changed.iter().any(|right| right.role == role.of);
        for role in self.roles.iter().filter(is_changed) {
            self.write(role, missing).await?;
        }
        for right in changed {
            self.has(right, !missing.contains(right)).await?;
        }
        Ok(())
    }

    /// Waits until the account has a right, or not.
    async fn has(&self, right: &Right, expected: bool) -> Result<()> {
        let (resource, subresource) = right.resource.split_once('/').unwrap_or((&right.resource, ""));
        let role = self.role_of(right).context("not a role of the account")?;
        let review: SubjectAccessReview = serde_json::from_value(json!({"spec": {
            "user": self.user,
            "resourceAttributes": {
                "group": group(right), "resource": resource, "subresource": subresource, "verb": right.verb,
                "namespace": role.namespace(), "name": self.names_of(right).first(),
            },
        }}))?;
        let api: Api<SubjectAccessReview> = Api::all(self.client.clone());
        eventually(&format!("{right:?} is permitted: {expected}"), PATIENCE, || async {
            let answer = api.create(&PostParams::default(), &review).await?.status;
            let is_permitted = answer.is_some_and(|answer| answer.allowed);
            Ok(if is_permitted == expected { Ok(()) } else { Err(format!("{is_permitted}")) })
        })
        .await
    }

    /// Those of the rights whose use the API server has refused since `mark`.
    fn refused(&self, mark: Mark, rights: &[Right]) -> Result<Vec<Right>> {
        let mut requests = BTreeSet::new();
        self.audit.visit(mark, |entry| {
            if entry.code == 403 && entry.user == self.user {
                let resource = match entry.subresource.as_str() {
                    "" => entry.resource,
                    subresource => format!("{}/{subresource}", entry.resource),
                };
                requests.insert((
                    entry.namespace.clone(),
                    entry.group.clone(),
                    resource.clone(),
                    entry.verb.clone(),
                ));
                // For rights in all namespaces.
                requests.insert((String::new(), entry.group, resource, entry.verb));
            }
        })?;
        let request = |right: &Right| {
            let namespace = self.role_of(right).map(OwnRole::namespace).unwrap_or_default().to_owned();
            (namespace, group(right).to_owned(), right.resource.clone(), right.verb.clone())
        };
        Ok(rights.iter().filter(|right| requests.contains(&request(right))).cloned().collect())
    }
}

fn group(right: &Right) -> &str {
    if right.group == "core" { "" } else { &right.group }
}

/// Rights that are missing until the API server has refused each of them.
pub struct Withheld<'a> {
    /// Each account with its missing rights, and the place in the audit log from which refusals count.
    accounts: Vec<(&'a Account, Vec<Right>, Mark)>,
    /// The rights that the program must name.
    named: Vec<Right>,
}

impl<'a> Withheld<'a> {
    /// Takes rights from the accounts that have them. The program need not say that it lacks one that `is_silent`.
    pub async fn take(
        accounts: &[&'a Account],
        rights: Vec<Right>,
        is_silent: impl Fn(&Right) -> bool,
    ) -> Result<Self> {
        let mut taken = Vec::new();
        for account in accounts {
            let own: Vec<Right> =
                rights.iter().filter(|right| account.role_of(right).is_some()).cloned().collect();
            account.change(&own, &own).await?;
            taken.push((*account, own, account.audit.mark()?));
        }
        let count: usize = taken.iter().map(|(_, own, _)| own.len()).sum();
        ensure!(count == rights.len(), "not each of these belongs to one account: {rights:?}");
        let named = rights.into_iter().filter(|right| !is_silent(right)).collect();
        Ok(Self { accounts: taken, named })
    }

    /// Repeats `attempt`, and gives back each right when the API server has refused it, until the attempt succeeds with all
    /// rights. The program, whose log is `log`, must have said what it may not do.
    pub async fn until_refused<F, R>(mut self, log: impl Fn() -> String, attempt: F) -> Result<()>
    where
        F: Fn() -> R,
        R: Future<Output = Result<Result<(), String>>>,
    {
        let mut said = String::new();
        let outcome = self.give_back(&mut said, &attempt).await;
        self.restore().await?;
        outcome.with_context(|| format!("log: {}", log()))?;
        said.push_str(&log());
        // Fields of a log line are quoted.
        let said = said.replace("\\\"", "\"");
        for right in &self.named {
            let text = format!("cannot {} resource \"{}\"", right.verb, right.resource);
            ensure!(said.contains(&text), "nothing says {text:?} of {right:?}: {said}");
        }
        Ok(())
    }

    async fn give_back<F, R>(&mut self, said: &mut String, attempt: &F) -> Result<()>
    where
        F: Fn() -> R,
        R: Future<Output = Result<Result<(), String>>>,
    {
        let started = Instant::now();
        loop {
            let outcome = attempt().await?;
            let missing = self.missing();
            if outcome.is_ok() && missing.is_empty() {
                return Ok(());
            }
            let why = outcome.err().unwrap_or_else(|| "it succeeds without these rights".to_owned());
            ensure!(started.elapsed() < PATIENCE, "not refused: {missing:?}; last observed: {why}");
            said.push_str(&why);
            self.return_refused(&why).await?;
            tokio::time::sleep(INTERVAL).await;
        }
    }

    fn missing(&self) -> Vec<&Right> {
        self.accounts.iter().flat_map(|(_, missing, _)| missing).collect()
    }

    #[allow(clippy::print_stdout, reason = "the tests show what each refusal breaks")]
    async fn return_refused(&mut self, why: &str) -> Result<()> {
        for (account, missing, mark) in &mut self.accounts {
            let refused = account.refused(*mark, missing)?;
            if !refused.is_empty() {
                let why: String = why.lines().next().unwrap_or_default().chars().take(160).collect();
                for right in &refused {
                    println!("refused: {} {} of {}: {why}", right.role, right.verb, right.resource);
                }
                missing.retain(|right| !refused.contains(right));
                account.change(missing, &refused).await?;
            }
        }
        Ok(())
    }

    /// Gives back what is still missing.
    async fn restore(&mut self) -> Result<()> {
        for (account, missing, _) in &mut self.accounts {
            let left = std::mem::take(missing);
            account.change(&[], &left).await?;
        }
        Ok(())
    }
}
