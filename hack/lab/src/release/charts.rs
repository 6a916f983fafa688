//! Charts as packages, which `helm push` uploads to an OCI registry.

use std::path::Path;

use anyhow::{Context, Result};

use super::archive;
use crate::images::VERSION;
use crate::process::{command, run};
use crate::run::repository;

const CHARTS: [&str; 2] = ["nestor-management", "nestor-guest"];

/// Packs both charts.
pub(super) async fn pack(helm: &Path, out: &Path, date: &str) -> Result<()> {
    for chart in CHARTS {
        pack_one(helm, chart, out, date).await.with_context(|| format!("chart {chart}"))?;
    }
    Ok(())
}

/// helm decides what belongs to the package. It dates the files with the time of the build, so they are packed again.
async fn pack_one(helm: &Path, chart: &str, out: &Path, date: &str) -> Result<()> {
    let work = tempfile::tempdir()?;
    let name = format!("{chart}-{VERSION}.tgz");
    let mut package = command(&helm.display().to_string(), ["package", "--version", VERSION]);
    package.args(["--app-version", VERSION, "--destination"]).arg(work.path());
    run(package.arg(repository().join("charts").join(chart))).await?;
    let mut tar = command("tar", ["--extract", "--no-same-owner", "--directory"]);
    run(tar.arg(work.path()).arg("--file").arg(work.path().join(&name))).await?;
    archive::pack(work.path(), chart, &out.join(&name), date).await
}
