//! Cluster contents of each tier: definitions, drivers, classes, accounts, kubeconfigs.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Namespace;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use super::objects::{apply, apply_definitions, apply_one, apply_without, delete_all, token};
use crate::kubeconfig::{self, User};
use crate::run::repository;
use crate::state::{Cluster, Guest};

/// The namespace of Nestor's components in the management cluster.
pub const MANAGEMENT_NAMESPACE: &str = "nestor-system";
/// The namespace of Nestor's components in a guest.
pub const GUEST_NAMESPACE: &str = "kube-system";
/// Components of the management cluster. A component's ServiceAccount has its name.
const MANAGEMENT_PARTS: [&str; 3] = ["mgmt-csi", "vm-operator-shim", "nestor-console"];
/// Components of a guest.
const GUEST_PARTS: [&str; 2] = ["gc-csi-controller", ATTACHER];
/// The sidecar of tiers whose volumes are attached through Kubernetes.
const ATTACHER: &str = "csi-attacher";
/// Components of both tiers.
const SIDECARS: [&str; 4] = ["csi-provisioner", "csi-resizer", "csi-snapshotter", "snapshot-controller"];

// The files of the charts: a lab needs no helm.
const MANAGEMENT: &str = include_str!("../../../../charts/nestor-management/files/management.yaml");
const NODE_SERVICE: &str = include_str!("../../../../charts/nestor-management/files/node-service.yaml");
const MANAGEMENT_CLASSES: &str = include_str!("../../../../charts/nestor-management/files/classes.yaml");
const GUEST: &str = include_str!("../../../../charts/nestor-guest/files/guest.yaml");
const GUEST_CLASSES: &str = include_str!("../../../../charts/nestor-guest/files/classes.yaml");
const SIDECAR_ACCOUNTS: &str = include_str!("../../../../charts/shared/sidecars.yaml");

fn namespace(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
}

/// Creates a namespace of a guest in the management cluster.
pub async fn create_namespace(management: &Cluster, name: &str) -> Result<()> {
    apply_one(&kubeconfig::client(&management.kubeconfig).await?, namespace(name)).await.map(drop)
}

/// Applies the definitions of the snapshot API from a folder.
pub async fn apply_snapshot_api(cluster: &Cluster, folder: &Path) -> Result<()> {
    apply_definitions(&kubeconfig::client(&cluster.kubeconfig).await?, &definitions(folder)?).await
}

/// Applies the definition of Cluster API's `Cluster`.
pub async fn apply_cluster_api(cluster: &Cluster) -> Result<()> {
    let yaml = include_str!("../../manifests/cluster-api.yaml").to_owned();
    let definitions = [("manifests/cluster-api.yaml".to_owned(), yaml)];
    apply_definitions(&kubeconfig::client(&cluster.kubeconfig).await?, &definitions).await
}

/// Applies definitions, driver, classes and accounts to the management cluster, and writes a kubeconfig for each
/// component.
pub async fn prepare_management(cluster: &Cluster) -> Result<()> {
    let client = kubeconfig::client(&cluster.kubeconfig).await?;
    apply_definitions(&client, &definitions(&repository().join("crds").join("yaml"))?).await?;
    apply_management(&client, None).await?;
    apply(&client, "nestor-management/files/classes.yaml", MANAGEMENT_CLASSES).await?;
    prepare_parts(&client, cluster, MANAGEMENT_NAMESPACE, &MANAGEMENT_PARTS).await
}

/// The same for a cluster without VirtualMachines of a VM Operator, whose pods use volumes. Classes are left out.
pub(crate) async fn prepare_management_for_pods(cluster: &Cluster) -> Result<()> {
    let client = kubeconfig::client(&cluster.kubeconfig).await?;
    let mut definitions = definitions(&repository().join("crds").join("yaml"))?;
    definitions.retain(|(file, _)| !file.contains(crds::VIRTUAL_MACHINE_GROUP));
    apply_definitions(&client, &definitions).await?;
    // The CSIDriver is that of the node service.
    apply_management(&client, Some("CSIDriver")).await?;
    let node_service = in_management_namespace(NODE_SERVICE);
    apply(&client, "nestor-management/files/node-service.yaml", &node_service).await?;
    let attacher = json!({"name": ATTACHER, "namespace": MANAGEMENT_NAMESPACE});
    apply_one(&client, json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": attacher})).await?;
    prepare_parts(&client, cluster, MANAGEMENT_NAMESPACE, &["mgmt-csi", ATTACHER]).await
}

/// Applies Nestor's namespace, driver and roles to the management cluster, except objects of this kind.
async fn apply_management(client: &kube::Client, without: Option<&str>) -> Result<()> {
    apply_one(client, namespace(MANAGEMENT_NAMESPACE)).await?;
    let objects = in_management_namespace(MANAGEMENT);
    apply_without(client, "nestor-management/files/management.yaml", &objects, without).await
}

fn in_management_namespace(yaml: &str) -> String {
    yaml.replace("${NAMESPACE}", MANAGEMENT_NAMESPACE)
}

/// Applies manifests of the lab.
pub(crate) async fn apply_manifests(cluster: &Cluster, what: &str, manifests: &str) -> Result<()> {
    apply(&kubeconfig::client(&cluster.kubeconfig).await?, what, manifests).await
}

/// Applies the sidecars' accounts, and writes a kubeconfig for each sidecar and each component in `own`.
async fn prepare_parts(
    client: &kube::Client,
    cluster: &Cluster,
    namespace: &str,
    own: &[&str],
) -> Result<()> {
    let accounts = SIDECAR_ACCOUNTS.replace("${NAMESPACE}", namespace);
    apply(client, "shared/sidecars.yaml", &accounts).await?;
    for component in own.iter().chain(&SIDECARS) {
        token_kubeconfig(client, cluster, namespace, component).await?;
    }
    Ok(())
}

/// Creates a guest's namespace and account in the management cluster, with its admission policies, and the kubeconfig that
/// its gc-csi uses.
pub async fn prepare_guest_namespace(management: &Cluster, guest: &Guest) -> Result<()> {
    prepare_guest_with_classes(management, guest, &[]).await
}

/// The same for a guest that may use the classes of these names only, of any driver, unless there are none.
pub(crate) async fn prepare_guest_with_classes(
    management: &Cluster,
    guest: &Guest,
    classes: &[&str],
) -> Result<()> {
    anyhow::ensure!(!guest.cluster_id.is_empty(), "guest {} has no cluster ID yet", guest.cluster.name);
    let client = kubeconfig::client(&management.kubeconfig).await?;
    let classes = classes.iter().map(|class| (*class).to_owned()).collect();
    let policies = guest_manifests::Guest { classes, ..manifests(guest) }.admission_policies();
    apply(&client, "nestor-management/files/admission.yaml", &policies).await?;
    prepare_guest_account(management, guest).await
}

/// The same without admission policies.
pub async fn prepare_guest_account(management: &Cluster, guest: &Guest) -> Result<()> {
    let client = kubeconfig::client(&management.kubeconfig).await?;
    let account = manifests(guest).account_objects();
    apply(&client, "nestor-management/files/guest.yaml", &account).await?;
    token_kubeconfig(&client, management, &guest.namespace, &guest.account()).await
}

/// Gives a guest's account its rights on VMs of KubeVirt, with the admission policy.
pub async fn prepare_guest_kubevirt(management: &Cluster, guest: &Guest) -> Result<()> {
    let client = kubeconfig::client(&management.kubeconfig).await?;
    apply(&client, "nestor-management/files/kubevirt.yaml", &manifests(guest).kubevirt_objects()).await
}

/// Deletes a guest's account in the management cluster with its rights and admission policies, but not its namespace.
pub async fn remove_guest_account(management: &Cluster, guest: &Guest) -> Result<()> {
    let client = kubeconfig::client(&management.kubeconfig).await?;
    let manifests = manifests(guest);
    for objects in [manifests.account_objects(), manifests.admission_policies(), manifests.kubevirt_objects()]
    {
        delete_all(&client, &objects, "Namespace").await?;
    }
    Ok(())
}

/// The manifests of a guest that may use all classes.
fn manifests(guest: &Guest) -> guest_manifests::Guest {
    guest_manifests::Guest {
        namespace: guest.namespace.clone(),
        account: guest.account(),
        cluster_object: guest.cluster.name.clone(),
        cluster_id: guest.cluster_id.clone(),
        classes: Vec::new(),
        takes_unlabelled_vms: false,
        system_namespace: MANAGEMENT_NAMESPACE.to_owned(),
    }
}

/// Applies driver, classes and accounts to a guest.
pub async fn prepare_guest(cluster: &Cluster) -> Result<()> {
    let client = kubeconfig::client(&cluster.kubeconfig).await?;
    let accounts = GUEST.replace("${NAMESPACE}", GUEST_NAMESPACE);
    apply(&client, "nestor-guest/files/guest.yaml", &accounts).await?;
    apply(&client, "nestor-guest/files/classes.yaml", GUEST_CLASSES).await?;
    prepare_parts(&client, cluster, GUEST_NAMESPACE, &GUEST_PARTS).await
}

/// The ID of a cluster: the UID of kube-system.
pub async fn cluster_id(cluster: &Cluster) -> Result<String> {
    let namespaces: Api<Namespace> = Api::all(kubeconfig::client(&cluster.kubeconfig).await?);
    namespaces.get("kube-system").await?.uid().context("namespace kube-system has no UID")
}

impl Cluster {
    /// Path of the kubeconfig of an account, which has the name of its component.
    pub fn kubeconfig_of(&self, account: &str) -> PathBuf {
        self.kubeconfig.with_file_name(format!("{account}.kubeconfig"))
    }
}

impl Guest {
    /// The account of its gc-csi in the management cluster. Each guest has its own, even in a shared namespace.
    pub fn account(&self) -> String {
        format!("gc-csi-{}", self.cluster.name)
    }
}

/// Writes the kubeconfig of a ServiceAccount.
pub async fn token_kubeconfig(
    client: &kube::Client,
    cluster: &Cluster,
    namespace: &str,
    account: &str,
) -> Result<()> {
    let token = token(client, namespace, account).await?;
    let ca = std::fs::read_to_string(&cluster.ca)
        .with_context(|| format!("cannot read {}", cluster.ca.display()))?;
    kubeconfig::write(&cluster.kubeconfig_of(account), &cluster.server, &ca, &User::Token(&token))
}

/// Reads the definitions in a folder: file name and text.
fn definitions(folder: &Path) -> Result<Vec<(String, String)>> {
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
