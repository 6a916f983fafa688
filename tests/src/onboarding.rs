//! Guests that `kubectl nestor guest` adds and removes.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Namespace, Secret, ServiceAccount};
use kube::Client;
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind};
use serde_json::Value;
use tempfile::TempDir;
use uuid::Uuid;

use crate::kubectl_plugin::{Answer, execute};
use crate::own_namespace::OwnNamespace;
use crate::program::{Controller, binary, kubeconfig, management_cluster};
use crate::{Scenario, unique};

/// A guest with names of its own. What exists of it is removed when the scenario ends.
pub struct Onboarded {
    /// Its name, which is that of its account.
    pub name: String,
    /// Its namespace in the management cluster.
    pub namespace: OwnNamespace,
    /// Its cluster ID.
    pub cluster_id: String,
    folder: TempDir,
}

impl Scenario {
    /// Chooses the names of a guest with a namespace of its own; creates nothing.
    pub fn onboarded(&self) -> Result<Onboarded> {
        let namespace = OwnNamespace::named(&self.management, unique(&self.name));
        self.created().namespaces.push(namespace.clone());
        self.onboarded_in(&namespace)
    }

    /// Chooses the names of a guest in this namespace.
    pub fn onboarded_in(&self, namespace: &OwnNamespace) -> Result<Onboarded> {
        let guest = self.new_guest(&namespace.name, &Uuid::new_v4().to_string())?;
        let name = guest.account();
        self.created().budgets.push(format!("{}.{name}", namespace.name));
        let (namespace, cluster_id) = (namespace.clone(), guest.cluster_id);
        Ok(Onboarded { name, namespace, cluster_id, folder: tempfile::tempdir()? })
    }
}

impl Onboarded {
    /// Runs `kubectl nestor guest COMMAND` for it.
    pub async fn run(&self, s: &Scenario, command: &str, more: &[&str]) -> Result<Answer> {
        let management = management_cluster(s)?.kubeconfig.display().to_string();
        let words = [
            "guest",
            command,
            &self.name,
            "--namespace",
            &self.namespace.name,
            "--management-kubeconfig",
            &management,
        ];
        execute(&binary(&s.lab, "kubectl-nestor"), &[&words[..], more].concat()).await
    }

    /// Runs `guest add` with its cluster ID.
    pub async fn add(&self, s: &Scenario, more: &[&str]) -> Result<Answer> {
        let out = self.folder.path().display().to_string();
        let words = ["--cluster-id", &self.cluster_id, "--out", &out];
        self.run(s, "add", &[&words[..], more].concat()).await
    }

    /// Adds the guest; returns what `-o json` prints.
    pub async fn added(&self, s: &Scenario, more: &[&str]) -> Result<Value> {
        let answer = self.add(s, &[more, &["-o", "json"]].concat()).await?;
        answer.expect(0, &[]);
        Ok(serde_json::from_str(&answer.out)?)
    }

    /// Path of a file that `guest add` writes.
    pub fn file(&self, suffix: &str) -> PathBuf {
        self.folder.path().join(format!("{}-{suffix}.yaml", self.name))
    }

    /// The written file as data.
    pub fn written(&self, suffix: &str) -> Result<Value> {
        let text = std::fs::read_to_string(self.file(suffix))?;
        Ok(serde_saphyr::from_str(&text)?)
    }

    /// The token in the written Secret.
    pub fn token(&self) -> Result<String> {
        let secret: Secret = serde_json::from_value(self.written("management-secret")?)?;
        let data = secret.data.context("the Secret has no data")?;
        ensure!(data.contains_key("ca.crt"), "the Secret has no CA certificate");
        let ByteString(token) = data.get("token").context("the Secret has no token")?;
        Ok(String::from_utf8(token.clone())?)
    }

    /// The kubeconfig of its gc-csi, with the written token.
    fn kubeconfig(&self, s: &Scenario) -> Result<PathBuf> {
        let server = management_cluster(s)?;
        let file = self.folder.path().join("kubeconfig");
        kubeconfig(&file, &server.server, Some(&server.ca), &self.token()?)?;
        Ok(file)
    }

    /// A client of the management cluster with the written token.
    pub async fn client(&self, s: &Scenario) -> Result<Client> {
        lab::kubeconfig::client(&self.kubeconfig(s)?).await
    }

    /// Starts its gc-csi with the written token.
    pub async fn start(&self, s: &Scenario) -> Result<Controller> {
        Controller::start_in(s, &self.namespace.name, &self.kubeconfig(s)?, &self.cluster_id, &[]).await
    }

    /// Whether its account exists.
    pub async fn has_account(&self, s: &Scenario) -> Result<bool> {
        let accounts: Api<ServiceAccount> = Api::namespaced(s.management.clone(), &self.namespace.name);
        Ok(accounts.get_opt(&self.name).await?.is_some())
    }

    /// Its namespace; None if it does not exist.
    pub async fn found_namespace(&self, s: &Scenario) -> Result<Option<Namespace>> {
        Ok(Api::<Namespace>::all(s.management.clone()).get_opt(&self.namespace.name).await?)
    }

    /// Name of its StorageBudget.
    pub fn budget(&self) -> String {
        format!("{}.{}", self.namespace.name, self.name)
    }
}

/// The object of the management cluster with the kind and name of a manifest; None if it does not exist.
pub async fn live(s: &Scenario, manifest: &Value) -> Result<Option<DynamicObject>> {
    let object: DynamicObject = serde_json::from_value(manifest.clone())?;
    let kind = GroupVersionKind::try_from(object.types.as_ref().context("no kind")?)?;
    let (resource, name) = (ApiResource::from_gvk(&kind), object.metadata.name.unwrap_or_default());
    let api: Api<DynamicObject> = match &object.metadata.namespace {
        Some(namespace) => Api::namespaced_with(s.management.clone(), namespace, &resource),
        None => Api::all_with(s.management.clone(), &resource),
    };
    Ok(api.get_opt(&name).await?)
}
