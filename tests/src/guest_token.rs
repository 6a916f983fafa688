//! A guest of a scenario's own namespace whose gc-csi has the token that mgmt-csi renews, in a Secret and a file, as in a pod.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use crds::names::credential_secret;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::Client;
use kube::api::{Api, Patch, PatchParams};
use lab::state::Cluster;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::task::JoinHandle;

use crate::chart;
use crate::own_namespace::OwnNamespace;
use crate::program::{Running, binary, management_cluster, run_to_end};
use crate::scenario::GUEST;
use crate::tenants::Tenant;
use crate::{PATIENCE, Scenario, eventually};

/// The Secret in the guest.
pub const SECRET: &str = "management";
/// The keys of Secrets.
const TOKEN: &str = "token";

/// A guest with a renewed token.
pub struct TokenGuest {
    /// The guest.
    pub tenant: Tenant,
    /// Its account in the management cluster.
    pub account: String,
    /// Its namespace in the management cluster.
    pub namespace: String,
    folder: TempDir,
}

/// Updates the file with the token from the guest's Secret until it is dropped, as kubelet does.
pub struct Projection(JoinHandle<()>);

impl Drop for Projection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl TokenGuest {
    /// Creates the guest, and gives it the first token.
    pub async fn create(s: &Scenario, namespace: &OwnNamespace) -> Result<Self> {
        let tenant = s.tenant(namespace).await?;
        let account = format!("gc-csi-{}", tenant.name);
        let folder = tempfile::tempdir()?;
        let guest = Self { tenant, account, namespace: namespace.name.clone(), folder };
        let token = guest.renewed(s).await?;
        guest.store(s, &token).await?;
        guest.grant(s).await?;
        let server = management_cluster(s)?;
        std::fs::write(guest.token_file(), token)?;
        std::fs::write(guest.kubeconfig(), guest.kubeconfig_text(server).to_string())?;
        Ok(guest)
    }

    fn token_file(&self) -> PathBuf {
        self.folder.path().join(TOKEN)
    }

    /// The kubeconfig of its gc-csi, which names the file with the token.
    pub fn kubeconfig(&self) -> PathBuf {
        self.folder.path().join("kubeconfig")
    }

    fn kubeconfig_text(&self, server: &Cluster) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{
                "name": "test", "cluster": {"server": server.server, "certificate-authority": server.ca},
            }],
            "users": [{"name": "test", "user": {"tokenFile": self.token_file()}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        })
    }

    /// The Secret in the management cluster.
    pub fn management_secrets(&self, s: &Scenario) -> Api<Secret> {
        Api::namespaced(s.management.clone(), &self.namespace)
    }

    /// Name of that Secret.
    pub fn secret_name(&self) -> String {
        credential_secret(&self.account)
    }

    /// The token there, once mgmt-csi has written it.
    pub async fn renewed(&self, s: &Scenario) -> Result<String> {
        let (secrets, name) = (self.management_secrets(s), self.secret_name());
        eventually(&format!("mgmt-csi has written a token to Secret {name}"), PATIENCE, || async {
            Ok(token_of(&secrets.get(&name).await?).ok_or_else(|| "none".to_owned()))
        })
        .await
    }

    /// Removes the token there, so that mgmt-csi creates another one at once.
    pub async fn make_due(&self, s: &Scenario) -> Result<()> {
        let patch = Patch::Merge(json!({"data": {TOKEN: null}}));
        let name = self.secret_name();
        self.management_secrets(s).patch(&name, &PatchParams::default(), &patch).await?;
        Ok(())
    }

    fn guest_secrets(&self, s: &Scenario) -> Api<Secret> {
        Api::namespaced(s.guest.clone(), &s.name)
    }

    /// The token in the guest's Secret.
    pub async fn stored(&self, s: &Scenario) -> Result<String> {
        token_of(&self.guest_secrets(s).get(SECRET).await?).context("the guest's Secret has no token")
    }

    /// Writes a token to the guest's Secret, as its administrator.
    pub async fn store(&self, s: &Scenario, token: &str) -> Result<()> {
        let secret = json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET, "namespace": s.name},
            "data": {TOKEN: ByteString(token.as_bytes().to_vec())},
        });
        chart::apply(&s.guest, &secret, false).await.map(drop)
    }

    /// The rights that the chart grants to gc-csi on its Secret.
    async fn grant(&self, s: &Scenario) -> Result<()> {
        let metadata = json!({"name": "management-credential", "namespace": s.name});
        let role = json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": metadata,
            "rules": [{"apiGroups": [""], "resources": ["secrets"], "resourceNames": [SECRET], "verbs": ["get", "patch"]}],
        });
        let binding = json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": metadata,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "management-credential"},
            "subjects": [{
                "kind": "ServiceAccount", "name": "gc-csi-controller", "namespace": lab::cluster::GUEST_NAMESPACE,
            }],
        });
        for object in [role, binding] {
            chart::apply(&s.guest, &object, false).await?;
        }
        Ok(())
    }

    /// Keeps the file up to date, as kubelet does.
    pub fn project(&self, s: &Scenario) -> Projection {
        let (secrets, file) = (self.guest_secrets(s), self.token_file());
        Projection(tokio::spawn(async move {
            loop {
                if let Ok(secret) = secrets.get(SECRET).await {
                    // A failure shows as a token that is never used.
                    let _ = replace(&file, &token_of(&secret).unwrap_or_default());
                }
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }))
    }

    /// The flag with which gc-csi stores renewed tokens.
    pub fn flag(&self, s: &Scenario) -> String {
        format!("--management-token-secret={}/{SECRET}", s.name)
    }

    /// Starts its gc-csi without waiting until it is ready.
    pub async fn start_unready(&self, s: &Scenario) -> Result<Running> {
        let guest = s.lab.state().guests.get(GUEST).context("the lab has no such guest")?;
        let words = [
            format!("--endpoint=unix://{}", self.folder.path().join("csi.sock").display()),
            format!("--guest-kubeconfig={}", guest.cluster.kubeconfig_of("gc-csi-controller").display()),
            format!("--management-kubeconfig={}", self.kubeconfig().display()),
            format!("--management-namespace={}", self.namespace),
            format!("--cluster-id={}", self.tenant.cluster_id),
            self.flag(s),
        ];
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        Running::start(&binary(&s.lab, "gc-csi"), &words).await
    }

    /// Runs `kubectl nestor guest rotate` for it.
    pub async fn rotate(&self, s: &Scenario) -> Result<()> {
        let guest = s.lab.state().guests.get(GUEST).context("the lab has no such guest")?;
        let [guest, management] =
            [&guest.cluster, management_cluster(s)?].map(|cluster| cluster.kubeconfig.display().to_string());
        let words = [
            "guest",
            "rotate",
            &self.account,
            "--secret",
            SECRET,
            "--secret-namespace",
            &s.name,
            "--guest-kubeconfig",
            &guest,
            "--management-kubeconfig",
            &management,
            "--management-namespace",
            &self.namespace,
        ];
        let ended = run_to_end(&binary(&s.lab, "kubectl-nestor"), &words).await?;
        ensure!(ended.code == Some(0), "{}", ended.stderr);
        Ok(())
    }

    /// A client of the management cluster with this token.
    pub async fn client(&self, s: &Scenario, token: &str) -> Result<Client> {
        let server = management_cluster(s)?;
        let file = self.folder.path().join("other.kubeconfig");
        crate::program::kubeconfig(&file, &server.server, Some(&server.ca), token)?;
        lab::kubeconfig::client(&file).await
    }
}

/// The token in a Secret.
fn token_of(secret: &Secret) -> Option<String> {
    let ByteString(bytes) = secret.data.as_ref()?.get(TOKEN)?;
    String::from_utf8(bytes.clone()).ok().filter(|token| !token.is_empty())
}

/// Replaces a file at once, so that no reader sees a part of it.
fn replace(file: &Path, text: &str) -> std::io::Result<()> {
    let written = file.with_extension("new");
    std::fs::write(&written, text)?;
    std::fs::rename(&written, file)
}
