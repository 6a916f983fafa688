//! Helm charts: rendering, and validation of the objects by an API server.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail, ensure};
use kube::api::{
    Api, DeleteParams, DynamicObject, GroupVersionKind, Patch, PatchParams, ValidationDirective,
};
use kube::{Client, ResourceExt};
use lab::cluster::objects::apply_definitions;
use lab::run::repository;
use lab::ui::Ui;
use lab::{Lab, cache};
use serde_json::Value;
use tokio::process::Command;

use crate::program::binary;

/// The Kubernetes version that charts are rendered for: that of the lab's API servers.
const KUBERNETES: &str = "1.36.3";

/// A Helm chart of the repository.
#[derive(Debug, Clone)]
pub struct Chart {
    helm: PathBuf,
    folder: PathBuf,
}

impl Chart {
    /// Both charts. Builds helm if it is not in the cache.
    pub async fn both() -> Result<[Self; 2]> {
        let helm = cache::helm(&Ui::default()).await?;
        Ok(["nestor-management", "nestor-guest"]
            .map(|name| Self { helm: helm.clone(), folder: repository().join("charts").join(name) }))
    }

    /// The management cluster's chart.
    pub async fn management() -> Result<Self> {
        let [management, _] = Self::both().await?;
        Ok(management)
    }

    /// A guest's chart.
    pub async fn guest() -> Result<Self> {
        let [_, guest] = Self::both().await?;
        Ok(guest)
    }

    /// The chart's name.
    pub fn name(&self) -> String {
        self.folder.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// The values files that the chart is tested with.
    pub fn examples(&self) -> Result<Vec<PathBuf>> {
        let entries = std::fs::read_dir(self.folder.join("ci"))?;
        let mut files = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
        files.sort();
        ensure!(!files.is_empty(), "{} has no examples", self.name());
        Ok(files)
    }

    /// A values file by name.
    pub fn example(&self, name: &str) -> PathBuf {
        self.folder.join("ci").join(format!("{name}-values.yaml"))
    }

    /// Output of `helm lint` with these values; fails on any warning.
    pub async fn lint(&self, values: &Path) -> Result<String> {
        let mut helm = Command::new(&self.helm);
        helm.args(["lint", "--strict", "--quiet"]).arg(&self.folder).arg("--values").arg(values);
        output(&mut helm).await
    }

    /// Renders the chart for a namespace. `set` holds values by path, as in `infra.url=https://…`.
    pub async fn render(&self, namespace: &str, values: &[&Path], set: &[&str]) -> Result<Vec<Value>> {
        let mut helm = Command::new(&self.helm);
        helm.args(["template", "test", "--namespace", namespace, "--kube-version", KUBERNETES]);
        helm.arg(&self.folder);
        for file in values {
            helm.arg("--values").arg(file);
        }
        for value in set {
            helm.args(["--set-string", value]);
        }
        let text = output(&mut helm).await?;
        serde_saphyr::from_multiple(&text)
            .with_context(|| format!("{} is not valid YAML:\n{text}", self.name()))
    }
}

async fn output(helm: &mut Command) -> Result<String> {
    let output = helm.stdin(Stdio::null()).kill_on_drop(true).output().await.context("cannot run helm")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        bail!("{text}{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(text)
}

/// Kind and name of an object.
pub fn kind_and_name(object: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
    format!("{} {}", text(&object["kind"]), text(&object["metadata"]["name"]))
}

/// The objects of a kind.
pub fn of_kind<'a>(objects: &'a [Value], kind: &'a str) -> impl Iterator<Item = &'a Value> {
    objects.iter().filter(move |object| object["kind"] == kind)
}

/// The pod templates of Deployments and DaemonSets: name of the owner, and PodSpec.
pub fn pod_specs(objects: &[Value]) -> Vec<(String, &Value)> {
    let with_pods = objects.iter().filter(|object| object["spec"]["template"]["spec"].is_object());
    with_pods.map(|object| (kind_and_name(object), &object["spec"]["template"]["spec"])).collect()
}

/// The init containers and containers of a PodSpec, in start order.
pub fn containers(spec: &Value) -> impl Iterator<Item = &Value> {
    ["initContainers", "containers"].into_iter().filter_map(|list| spec[list].as_array()).flatten()
}

/// The items of a list as strings.
pub fn texts(list: &Value) -> Vec<String> {
    let texts = list.as_array().into_iter().flatten();
    texts.map(|text| text.as_str().map_or_else(|| text.to_string(), str::to_owned)).collect()
}

/// The program of a container, by its image name: one of ours or a sidecar of the lab.
pub fn program(lab: &Lab, container: &Value) -> Result<PathBuf> {
    let image = container["image"].as_str().context("a container without an image")?;
    let name = image.rsplit('/').next().unwrap_or_default();
    let name = name.split([':', '@']).next().unwrap_or_default();
    Ok(match name {
        "gc-csi" | "gc-csi-node" | "mgmt-csi" | "mgmt-csi-node" | "vm-operator-shim" | "nestor-console" => {
            binary(lab, name)
        }
        sidecar => lab.state().tools.join(sidecar),
    })
}

/// Applies an object, or only validates it on the API server (dry run).
pub async fn apply(client: &Client, object: &Value, dry_run: bool) -> Result<DynamicObject> {
    let (api, object) = api(client, object).await?;
    let mut how = PatchParams::apply("charts").force();
    how.field_validation = Some(ValidationDirective::Strict);
    how.dry_run = dry_run;
    let applied = api.patch(&object.name_any(), &how, &Patch::Apply(&object)).await;
    applied.with_context(|| format!("the API server rejects {}", object.name_any()))
}

/// Applies the definitions of the Prometheus Operator, so that the API server validates its objects. They stay in the
/// lab: a test that runs at the same time may list all kinds.
pub async fn apply_monitoring_definitions(client: &Client) -> Result<()> {
    let mut definitions = Vec::new();
    for entry in std::fs::read_dir(cache::monitoring_definitions().await?)? {
        let path = entry?.path();
        definitions.push((path.display().to_string(), std::fs::read_to_string(&path)?));
    }
    apply_definitions(client, &definitions).await
}

/// Deletes an object, if it exists.
pub async fn delete(client: &Client, object: &Value) -> Result<()> {
    let (api, object) = api(client, object).await?;
    match api.delete(&object.name_any(), &DeleteParams::default()).await {
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
        other => Ok(other.map(drop)?),
    }
}

async fn api(client: &Client, object: &Value) -> Result<(Api<DynamicObject>, DynamicObject)> {
    let what = kind_and_name(object);
    let object: DynamicObject =
        serde_json::from_value(object.clone()).with_context(|| format!("{what} is not an object"))?;
    let types = object.types.clone().with_context(|| format!("{what} has no kind"))?;
    let (resource, _) = kube::discovery::pinned_kind(client, &GroupVersionKind::try_from(&types)?).await?;
    let api = match &object.metadata.namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
        None => Api::all_with(client.clone(), &resource),
    };
    Ok((api, object))
}
