//! Nestor in pods: its images on a disk of each VM, and its charts installed with helm, as on a user's clusters.

mod disks;
mod helm;
mod lab;
mod values;
mod version;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use crds::names::credential_secret;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::Client;
use kube::api::Api;
use serde::{Deserialize, Serialize};
use serde_json::json;

pub(crate) use disks::Disks;
pub use helm::Release;
pub(crate) use version::EARLIER;
pub use version::Version;

use crate::cluster::objects::apply_one;
use crate::kubeconfig;
use crate::run::Run;
use crate::state::State;
use crate::ui::Ui;
use crate::wait::eventually;

/// The namespace of both releases.
pub const NAMESPACE: &str = "nestor-system";
/// The Secret with mgmt-csi's certificate for the storage infra.
const INFRA_SECRET: &str = "storage-infra-client";
/// The Secret with a guest's token for the management cluster.
const TOKEN_SECRET: &str = "management";
/// The cluster whose node `MANAGEMENT_NODE` is.
pub(crate) const MANAGEMENT: &str = "mgmt";
/// The VM that runs the pods of the management cluster.
pub(crate) const MANAGEMENT_NODE: &str = "mgmt-1";

/// What a lab whose Nestor runs in pods is deployed with. The images of both versions are on the VMs' disks.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Deployment {
    /// The program.
    pub helm: PathBuf,
    /// The version that was installed first.
    pub installed: Version,
    /// The version of this tree.
    pub current: Version,
}

impl Deployment {
    /// The different versions.
    pub(crate) fn versions(&self) -> Vec<Version> {
        let mut versions = vec![self.current.clone(), self.installed.clone()];
        versions.dedup();
        versions
    }
}

/// Installs the management chart of a version; returns when all its pods are ready.
pub(crate) async fn install_management(ui: &Ui, run: &Run, version: &Version) -> Result<()> {
    let step = ui.step(format!("chart nestor-management {} (helm install)", version.tag));
    let state = run.state()?;
    let client = kubeconfig::client(&cluster(&state)?.kubeconfig).await?;
    namespace(&client).await?;
    let pki = &state.infra.as_ref().context("no storage infra")?.pki;
    let files = [("ca.crt", "ca.crt"), ("tls.crt", "driver.crt"), ("tls.key", "driver.key")];
    let data = files.map(|(key, file)| Ok((key, read(&pki.join(file))?)));
    secret(&client, INFRA_SECRET, data.into_iter().collect::<Result<Vec<_>>>()?).await?;
    management_release(run)?.install(version).await?;
    step.done();
    Ok(())
}

/// Installs the chart of a guest; returns when all its pods are ready.
pub(crate) async fn install_guest(ui: &Ui, run: &Run, name: &str, version: &Version) -> Result<()> {
    let step = ui.step(format!("chart nestor-guest {} in {name} (helm install)", version.tag));
    let state = run.state()?;
    let guest = state.guests.get(name).with_context(|| format!("no guest {name}"))?;
    let management = kubeconfig::client(&cluster(&state)?.kubeconfig).await?;
    let token = token(&management, &guest.namespace, &guest.account()).await?;
    let client = kubeconfig::client(&guest.cluster.kubeconfig).await?;
    namespace(&client).await?;
    let ca = read(&cluster(&state)?.ca)?;
    secret(&client, TOKEN_SECRET, vec![("token", token), ("ca.crt", ca)]).await?;
    guest_release(run, name)?.install(version).await?;
    step.done();
    Ok(())
}

/// The release of the management tier.
pub(crate) fn management_release(run: &Run) -> Result<Release> {
    let state = run.state()?;
    Release::new(run, &state, cluster(&state)?, "nestor-management", values::management(&state)?)
}

/// The release in a guest.
pub(crate) fn guest_release(run: &Run, name: &str) -> Result<Release> {
    let state = run.state()?;
    let guest = state.guests.get(name).with_context(|| format!("no guest {name}"))?;
    Release::new(run, &state, &guest.cluster, "nestor-guest", values::guest(&state, guest)?)
}

fn cluster(state: &State) -> Result<&crate::state::Cluster> {
    state.management.as_ref().context("no management cluster")
}

/// Creates the namespace, in which the node plugin may be privileged.
async fn namespace(client: &Client) -> Result<()> {
    let labels = json!({"pod-security.kubernetes.io/enforce": "privileged"});
    let object =
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}});
    apply_one(client, object).await.map(drop)
}

async fn secret(client: &Client, name: &str, data: Vec<(&str, Vec<u8>)>) -> Result<()> {
    let data: serde_json::Map<_, _> =
        data.into_iter().map(|(key, bytes)| (key.to_owned(), json!(ByteString(bytes)))).collect();
    let metadata = json!({"name": name, "namespace": NAMESPACE});
    let object = json!({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data});
    apply_one(client, object).await.map(drop)
}

/// A guest's token, which mgmt-csi renews. In an earlier version the cluster created one that does not expire.
async fn token(client: &Client, namespace: &str, account: &str) -> Result<Vec<u8>> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), namespace);
    let renewed = credential_secret(account);
    let name = if secrets.get_opt(&renewed).await?.is_some() { &renewed } else { account };
    eventually(&format!("Secret {namespace}/{name} has a token"), helm::PATIENCE, || async {
        let data = secrets.get(name).await?.data.unwrap_or_default();
        Ok(data.get("token").map(|token| token.0.clone()).ok_or_else(|| "not filled yet".to_owned()))
    })
    .await
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}
