//! Releases: helm, run against the lab's clusters.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::values::retain_known;
use super::{NAMESPACE, Version};
use crate::process::{command, run as run_helper};
use crate::run::Run;
use crate::state::{Cluster, State};

/// The name of both releases.
const NAME: &str = "nestor";
/// Pods start slowly on emulated VMs.
pub(super) const PATIENCE: Duration = Duration::from_secs(1200);

/// A release of one chart in one cluster.
#[derive(Debug)]
pub struct Release {
    helm: PathBuf,
    kubeconfig: PathBuf,
    chart: &'static str,
    values: Value,
    /// Where the values are written.
    folder: PathBuf,
}

impl Release {
    pub(super) fn new(
        run: &Run,
        state: &State,
        cluster: &Cluster,
        chart: &'static str,
        values: Value,
    ) -> Result<Self> {
        let deployment = state.deployment.as_ref().context("this lab was not started with --deployed")?;
        let helm = deployment.helm.clone();
        let folder = run.path("clusters").join(&cluster.name);
        Ok(Self { helm, kubeconfig: cluster.kubeconfig.clone(), chart, values, folder })
    }

    /// `helm install`, until all pods are ready.
    pub async fn install(&self, version: &Version) -> Result<()> {
        self.apply("install", version).await
    }

    /// `helm upgrade` or a downgrade to another version, until all pods are ready.
    pub async fn upgrade(&self, version: &Version) -> Result<()> {
        self.apply("upgrade", version).await
    }

    /// `helm rollback` to the previous revision, until all pods are ready.
    pub async fn roll_back(&self) -> Result<()> {
        self.helm(&["rollback", NAME, "--wait", &timeout()]).await.map(drop)
    }

    /// `helm uninstall`, until its objects are gone. Returns helm's output, which names the objects that it keeps.
    pub async fn uninstall(&self) -> Result<String> {
        self.helm(&["uninstall", NAME, "--wait", &timeout()]).await
    }

    async fn apply(&self, verb: &str, version: &Version) -> Result<()> {
        let chart = version.charts.join(self.chart);
        let file = self.folder.join(format!("{}-values.json", self.chart));
        fs::write(&file, serde_json::to_vec_pretty(&self.values_for(version, &chart)?)?)
            .with_context(|| format!("cannot write {}", file.display()))?;
        let (chart, file) = (chart.display().to_string(), file.display().to_string());
        self.helm(&[verb, NAME, &chart, "--values", &file, "--wait", &timeout()]).await.map(drop)
    }

    /// The values for a version, in its chart's folder.
    fn values_for(&self, version: &Version, chart: &Path) -> Result<Value> {
        let schema = chart.join("values.schema.json");
        let schema =
            fs::read_to_string(&schema).with_context(|| format!("cannot read {}", schema.display()))?;
        let mut values = self.values.clone();
        values["image"] = json!({"tag": version.tag});
        retain_known(&mut values, &serde_json::from_str(&schema)?);
        Ok(values)
    }

    async fn helm(&self, args: &[&str]) -> Result<String> {
        let mut helm = command(&self.helm.display().to_string(), args);
        helm.args(["--namespace", NAMESPACE, "--kubeconfig"]).arg(&self.kubeconfig);
        run_helper(&mut helm).await.with_context(|| format!("helm {} {}", args[0], self.chart))
    }
}

fn timeout() -> String {
    format!("--timeout={}s", PATIENCE.as_secs())
}
