//! What each tier gets once its API answers: definitions, drivers, classes, accounts, kubeconfigs.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Namespace;
use kube::{Api, ResourceExt};

use super::objects::{apply, apply_definitions, token};
use crate::kubeconfig::{self, User};
use crate::run::repository;
use crate::state::{Cluster, Guest};

/// The management cluster's own parts, each with an account of its own name in `nestor-system`.
const MANAGEMENT_PARTS: [&str; 3] = ["mgmt-csi", "vm-operator-shim", "csi-provisioner"];
/// The same in a guest's `kube-system`.
const GUEST_PARTS: [&str; 2] = ["gc-csi-controller", "csi-sidecars"];

/// Applies definitions, driver, class and accounts, and writes a kubeconfig for each part.
pub async fn prepare_management(cluster: &Cluster) -> Result<()> {
    let client = kubeconfig::client(&cluster.kubeconfig).await?;
    apply_definitions(&client, &definitions()?).await?;
    apply(&client, "manifests/management.yaml", include_str!("../../manifests/management.yaml")).await?;
    for part in MANAGEMENT_PARTS {
        token_kubeconfig(&client, cluster, "nestor-system", part, part).await?;
    }
    Ok(())
}

/// Makes a guest's namespace in the management cluster, and the kubeconfig its gc-csi uses there.
pub async fn prepare_guest_namespace(management: &Cluster, guest: &Guest) -> Result<()> {
    let client = kubeconfig::client(&management.kubeconfig).await?;
    let yaml = include_str!("../../manifests/guest-namespace.yaml").replace("${NAMESPACE}", &guest.namespace);
    apply(&client, "manifests/guest-namespace.yaml", &yaml).await?;
    token_kubeconfig(&client, management, &guest.namespace, "gc-csi", &guest.namespace).await
}

/// Applies driver, class and accounts to a guest, and gives the cluster's identity: its kube-system's UID.
pub async fn prepare_guest(cluster: &Cluster) -> Result<String> {
    let client = kubeconfig::client(&cluster.kubeconfig).await?;
    apply(&client, "manifests/guest.yaml", include_str!("../../manifests/guest.yaml")).await?;
    for part in GUEST_PARTS {
        token_kubeconfig(&client, cluster, "kube-system", part, part).await?;
    }
    let namespaces: Api<Namespace> = Api::all(client);
    namespaces.get("kube-system").await?.uid().context("namespace kube-system has no UID")
}

impl Cluster {
    /// The kubeconfig of one of our parts (or of a guest, by its namespace) for this cluster.
    pub fn kubeconfig_of(&self, part: &str) -> PathBuf {
        self.kubeconfig.with_file_name(format!("{part}.kubeconfig"))
    }
}

async fn token_kubeconfig(
    client: &kube::Client,
    cluster: &Cluster,
    namespace: &str,
    account: &str,
    file: &str,
) -> Result<()> {
    let token = token(client, namespace, account).await?;
    let ca = std::fs::read_to_string(&cluster.ca)
        .with_context(|| format!("cannot read {}", cluster.ca.display()))?;
    kubeconfig::write(&cluster.kubeconfig_of(file), &cluster.server, &ca, &User::Token(&token))
}

/// The committed definitions: file name and text.
fn definitions() -> Result<Vec<(String, String)>> {
    let folder: &Path = &repository().join("crds").join("yaml");
    let read = || -> std::io::Result<Vec<(String, String)>> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            if path.extension().is_some_and(|ending| ending == "yaml") {
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                found.push((name, std::fs::read_to_string(&path)?));
            }
        }
        found.sort();
        Ok(found)
    };
    let found = read().with_context(|| format!("cannot read {}", folder.display()))?;
    anyhow::ensure!(!found.is_empty(), "no definitions in {}: run `cargo lab generate`", folder.display());
    Ok(found)
}
