//! Sources of a bundle: which objects are read, and the logs of Nestor's pods.

use crds::names::{GUEST_DRIVER, MANAGEMENT_DRIVER};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DynamicObject, ListParams, LogParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Api, ResourceExt};
use kube_kit::client::chain;
use serde_json::Value;

use crate::clusters::{Cluster, Tier};
use crate::error::Error;
use crate::gather::read::{is_answer, vm_resource};

/// Objects per page.
const PAGE: u32 = 500;
/// Label of the charts' objects.
const PART_OF_NESTOR: &str = "app.kubernetes.io/part-of=nestor";

/// Where objects are read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scope {
    /// In the namespace of the claims.
    Namespace,
    /// In all namespaces, or cluster-scoped.
    All,
}

/// A kind of objects.
pub struct Source {
    /// File name.
    pub name: String,
    resource: ApiResource,
    scope: Scope,
    labels: Option<&'static str>,
    fields: Option<String>,
}

/// Log of a container.
pub struct Logs {
    /// Namespace and name of the pod.
    pub pod: String,
    /// Container.
    pub container: String,
    /// Text.
    pub text: String,
}

impl Source {
    fn new(group: &str, version: &str, kind: &str, plural: &str, scope: Scope) -> Self {
        let gvk = GroupVersionKind::gvk(group, version, kind);
        Self {
            name: plural.to_owned(),
            resource: ApiResource::from_gvk_with_plural(&gvk, plural),
            scope,
            labels: None,
            fields: None,
        }
    }

    fn labelled(mut self, labels: &'static str) -> Self {
        self.labels = Some(labels);
        self
    }

    /// Events about one kind of objects.
    fn events(kind: &str) -> Self {
        let scope = if kind == "PersistentVolume" { Scope::All } else { Scope::Namespace };
        let mut source = Self::new("", "v1", "Event", "events", scope);
        source.name = format!("events-{}", kind.to_lowercase());
        source.fields = Some(format!("involvedObject.kind={kind}"));
        source
    }

    /// All sources of a cluster.
    pub async fn all(cluster: &Cluster) -> Vec<Self> {
        let mut sources = Self::of_both();
        match cluster.tier {
            Tier::Guest => sources.extend(Self::of_guest()),
            Tier::Management => {
                sources.extend(Self::of_management());
                if let Ok(resource) = vm_resource(&cluster.client).await {
                    let name = resource.plural.clone();
                    sources.push(Self {
                        name,
                        resource,
                        scope: Scope::Namespace,
                        labels: None,
                        fields: None,
                    });
                }
            }
        }
        sources
    }

    fn of_both() -> Vec<Self> {
        vec![
            Self::new("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims", Scope::Namespace),
            Self::new("", "v1", "PersistentVolume", "persistentvolumes", Scope::All),
            Self::new("storage.k8s.io", "v1", "StorageClass", "storageclasses", Scope::All),
            Self::new("storage.k8s.io", "v1", "CSIDriver", "csidrivers", Scope::All),
            Self::new("apps", "v1", "Deployment", "deployments", Scope::All).labelled(PART_OF_NESTOR),
            Self::new("apps", "v1", "DaemonSet", "daemonsets", Scope::All).labelled(PART_OF_NESTOR),
            Self::new("", "v1", "Pod", "pods", Scope::All).labelled(PART_OF_NESTOR),
            Self::events("PersistentVolumeClaim"),
            Self::events("PersistentVolume"),
        ]
    }

    fn of_guest() -> Vec<Self> {
        vec![
            Self::new("storage.k8s.io", "v1", "VolumeAttachment", "volumeattachments", Scope::All),
            Self::new("storage.k8s.io", "v1", "CSINode", "csinodes", Scope::All),
            Self::new("", "v1", "Node", "nodes", Scope::All),
            Self::events("Pod"),
        ]
    }

    fn of_management() -> Vec<Self> {
        vec![
            Self::new("nestor.dev", "v1alpha1", "VolumeAttachment", "volumeattachments", Scope::Namespace),
            Self::new("nestor.dev", "v1alpha1", "StorageBudget", "storagebudgets", Scope::All),
            Self::new("nestor.dev", "v1alpha1", "StoragePool", "storagepools", Scope::All),
            Self::new("", "v1", "ResourceQuota", "resourcequotas", Scope::Namespace),
            Self::new("storage.k8s.io", "v1", "CSIStorageCapacity", "csistoragecapacities", Scope::All)
                .labelled("nestor.dev/managed-by=mgmt-csi"),
            Self::events("VirtualMachine"),
            Self::events("VolumeAttachment"),
        ]
    }

    /// Reads the objects. The inner error is an answer of the API server, such as a missing right.
    pub async fn read(&self, cluster: &Cluster) -> Result<Result<Vec<Value>, String>, Error> {
        let api: Api<DynamicObject> = match self.scope {
            Scope::Namespace => {
                Api::namespaced_with(cluster.client.clone(), &cluster.namespace, &self.resource)
            }
            Scope::All => Api::all_with(cluster.client.clone(), &self.resource),
        };
        let mut parameters = ListParams::default().limit(PAGE);
        (parameters.label_selector, parameters.field_selector) =
            (self.labels.map(str::to_owned), self.fields.clone());
        let mut items = Vec::new();
        loop {
            match api.list(&parameters).await {
                Ok(page) => {
                    items.extend(page.items.iter().filter(|object| is_ours(object)).filter_map(to_value));
                    match page.metadata.continue_.filter(|token| !token.is_empty()) {
                        Some(token) => parameters.continue_token = Some(token),
                        None => return Ok(Ok(items)),
                    }
                }
                Err(error) if is_answer(&error) => return Ok(Err(chain(&error))),
                Err(error) => return Err(Error::request(cluster.tier.name(), &self.name, &error)),
            }
        }
    }
}

/// PersistentVolumes and attachments of other drivers stay out.
fn is_ours(object: &DynamicObject) -> bool {
    let spec = &object.data["spec"];
    let driver = spec["csi"]["driver"].as_str().or_else(|| spec["attacher"].as_str());
    driver.is_none_or(|driver| [GUEST_DRIVER, MANAGEMENT_DRIVER].contains(&driver))
}

fn to_value(object: &DynamicObject) -> Option<Value> {
    serde_json::to_value(object).ok()
}

/// Logs of Nestor's pods, the previous container's included.
pub async fn logs(cluster: &Cluster, lines: i64) -> Result<Vec<Logs>, Error> {
    let pods = cluster.all::<Pod>().list(&ListParams::default().labels(PART_OF_NESTOR)).await;
    let pods = match pods {
        Ok(pods) => pods.items,
        Err(error) if is_answer(&error) => return Ok(Vec::new()),
        Err(error) => return Err(Error::request(cluster.tier.name(), "pods", &error)),
    };
    let mut logs = Vec::new();
    for pod in &pods {
        for (container, is_previous) in containers(pod) {
            logs.push(log(cluster, pod, &container, is_previous, lines).await);
        }
    }
    Ok(logs)
}

/// Containers of a pod, and once more those that have restarted.
fn containers(pod: &Pod) -> Vec<(String, bool)> {
    let status = pod.status.clone().unwrap_or_default();
    let all = status.init_container_statuses.into_iter().chain(status.container_statuses).flatten();
    all.flat_map(|one| {
        let previous = (one.restart_count > 0).then(|| (one.name.clone(), true));
        [Some((one.name, false)), previous].into_iter().flatten()
    })
    .collect()
}

/// The log of a container, or why it cannot be read.
async fn log(cluster: &Cluster, pod: &Pod, container: &str, previous: bool, lines: i64) -> Logs {
    let namespace = pod.namespace().unwrap_or_default();
    let api: Api<Pod> = Api::namespaced(cluster.client.clone(), &namespace);
    let parameters = LogParams {
        container: Some(container.to_owned()),
        previous,
        tail_lines: Some(lines),
        timestamps: true,
        ..Default::default()
    };
    let text = api.logs(&pod.name_any(), &parameters).await;
    let suffix = if previous { ".previous" } else { "" };
    Logs {
        pod: format!("{namespace}/{}", pod.name_any()),
        container: format!("{container}{suffix}"),
        text: text.unwrap_or_else(|error| format!("not readable: {}\n", chain(&error))),
    }
}
