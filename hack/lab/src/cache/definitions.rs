//! Third-party CustomResourceDefinitions: of the snapshot API, from the module of its Go client, of Cluster API with its
//! webhooks, and of the Prometheus Operator.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::{Key, entry};
use crate::process::{command, run};
use crate::run::repository;

const MODULE: &str = "github.com/kubernetes-csi/external-snapshotter/client/v8";
/// Folder of the definitions in the module. Group snapshots have another prefix and are not installed.
const FOLDER: &str = "config/crd";
const PREFIX: &str = "snapshot.storage.k8s.io_";
const OPERATOR: &str = "github.com/prometheus-operator/prometheus-operator@v0.85.0";
/// Checksum of that module, as in a go.sum.
const OPERATOR_SUM: &str = "h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s=";
const OPERATOR_FOLDER: &str = "example/prometheus-operator-crd";
const CLUSTER_API: &str = "sigs.k8s.io/cluster-api";
/// The kinds that the core controllers watch.
const CLUSTER_API_KINDS: [&str; 4] =
    ["cluster.x-k8s.io_", "addons.cluster.x-k8s.io_", "ipam.cluster.x-k8s.io_", "runtime.cluster.x-k8s.io_"];
/// The kinds that the charts create.
const OPERATOR_KINDS: [&str; 3] = [
    "monitoring.coreos.com_podmonitors.",
    "monitoring.coreos.com_prometheusrules.",
    "monitoring.coreos.com_scrapeconfigs.",
];

/// The answer of `go mod download -json`.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Downloaded {
    dir: PathBuf,
    sum: String,
}

/// Returns the folder with the definitions, in the version that the sidecars are built with.
pub async fn snapshot_definitions() -> Result<PathBuf> {
    let tools = repository().join("hack/tools/kubernetes");
    let go_mod =
        fs::read(tools.join("go.mod")).with_context(|| format!("no go.mod in {}", tools.display()))?;
    let key = Key::new("snapshot-definitions").with("go.mod", &go_mod);
    entry(&format!("definitions-{}", key.hex()), async |out: &Path| {
        copy(&module_folder(&tools, MODULE).await?.join(FOLDER), out, &[PREFIX])
    })
    .await
}

/// Returns the folder with the definitions and webhooks of Cluster API's core, in the version of its controllers.
pub async fn cluster_api_manifests() -> Result<PathBuf> {
    let tools = repository().join("hack/tools/cluster-api");
    let go_mod =
        fs::read(tools.join("go.mod")).with_context(|| format!("no go.mod in {}", tools.display()))?;
    let key = Key::new("cluster-api-manifests").with("go.mod", &go_mod);
    entry(&format!("definitions-{}", key.hex()), async |out: &Path| {
        let source = module_folder(&tools, CLUSTER_API).await?;
        copy(&source.join("core/config/crd/bases"), out, &CLUSTER_API_KINDS)?;
        copy(&source.join("core/config/webhook"), out, &["manifests.yaml"])
    })
    .await
}

/// Folder of the sources of a module that another one requires.
async fn module_folder(requiring: &Path, module: &str) -> Result<PathBuf> {
    let go = async |args: &[&str]| run(command("go", args).current_dir(requiring)).await;
    // `go build` also downloads the module, but its build cache may outlive the module cache.
    go(&["mod", "download", module]).await?;
    Ok(PathBuf::from(go(&["list", "-m", "-f", "{{.Dir}}", module]).await?.trim()))
}

/// Returns the folder with the definitions of the Prometheus Operator. Only the chart tests need them, so they are
/// downloaded on demand.
pub async fn monitoring_definitions() -> Result<PathBuf> {
    let key = Key::new("monitoring-definitions").with("module", OPERATOR.as_bytes());
    entry(&format!("definitions-{}", key.hex()), async |out: &Path| {
        let answer = run(&mut command("go", ["mod", "download", "-json", OPERATOR])).await?;
        let module: Downloaded = serde_json::from_str(&answer).context("go mod download -json")?;
        ensure!(module.sum == OPERATOR_SUM, "{OPERATOR} has the checksum {}", module.sum);
        copy(&module.dir.join(OPERATOR_FOLDER), out, &OPERATOR_KINDS)
    })
    .await
}

/// Copies the files whose names start with one of `prefixes`.
fn copy(source: &Path, out: &Path, prefixes: &[&str]) -> Result<()> {
    let entries = fs::read_dir(source).with_context(|| format!("cannot read {}", source.display()))?;
    let mut copied = 0;
    for entry in entries {
        let name = entry?.file_name();
        if prefixes.iter().any(|prefix| name.to_string_lossy().starts_with(prefix)) {
            // Written as new files, because the files of a Go module are read-only.
            let text = fs::read(source.join(&name))?;
            fs::write(out.join(&name), text)
                .with_context(|| format!("cannot write {}", out.join(&name).display()))?;
            copied += 1;
        }
    }
    ensure!(copied > 0, "no definitions {prefixes:?} in {}", source.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn definitions_of_group_snapshots_are_not_copied() {
        let (source, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let names = [
            "snapshot.storage.k8s.io_volumesnapshots.yaml",
            "groupsnapshot.storage.k8s.io_x.yaml",
            "kustomization.yaml",
        ];
        for name in names {
            fs::write(source.path().join(name), "").unwrap();
        }
        copy(source.path(), out.path(), &[PREFIX]).unwrap();
        let taken: Vec<_> =
            fs::read_dir(out.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(taken, [names[0]]);
        assert!(copy(out.path(), source.path(), &[PREFIX]).is_ok());
        fs::remove_file(out.path().join(names[0])).unwrap();
        assert!(
            copy(out.path(), source.path(), &[PREFIX]).unwrap_err().to_string().contains("no definitions")
        );
    }
}
