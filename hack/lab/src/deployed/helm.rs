//! Releases: helm, run against the lab's clusters.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{NAMESPACE, Version};
use crate::process::{command, run as run_helper};
use crate::run::Run;
use crate::state::{Cluster, State};

/// The name of both releases.
const NAME: &str = "nestor";
/// Pods start slowly on emulated VMs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1200);

/// A release of one chart in one cluster.
#[derive(Debug)]
pub(crate) struct Release {
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
        let helm = state.helm.clone().context("this lab was not started with --deployed")?;
        let folder = run.path("clusters").join(&cluster.name);
        Ok(Self { helm, kubeconfig: cluster.kubeconfig.clone(), chart, values, folder })
    }

    /// `helm install`, until all pods are ready.
    pub(crate) async fn install(&self, version: &Version) -> Result<()> {
        self.apply("install", version).await
    }

    async fn apply(&self, verb: &str, version: &Version) -> Result<()> {
        let mut values = self.values.clone();
        values["image"] = json!({"tag": version.tag});
        let file = self.folder.join(format!("{}-values.json", self.chart));
        fs::write(&file, serde_json::to_vec_pretty(&values)?)
            .with_context(|| format!("cannot write {}", file.display()))?;
        let chart = version.charts.join(self.chart).display().to_string();
        let file = file.display().to_string();
        self.helm(&[verb, NAME, &chart, "--values", &file, "--wait", &timeout()]).await.map(drop)
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
