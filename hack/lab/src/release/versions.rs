//! One version in all programs and charts.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::images::VERSION;
use crate::process::{command, run};
use crate::run::repository;

const PROGRAMS: [&str; 7] = [
    "gc-csi",
    "gc-csi-node",
    "mgmt-csi",
    "vm-operator-shim",
    "nestor-console",
    "storage-infra",
    "kubectl-nestor",
];

/// Fails if a program or a chart has another version than this build.
pub(super) async fn check(binaries: &Path) -> Result<()> {
    for program in PROGRAMS {
        let path = binaries.join(program).display().to_string();
        let shown = run(&mut command(&path, ["--version"])).await?;
        let version = shown.split_whitespace().last().unwrap_or_default();
        ensure!(version == VERSION, "{program} has version {version}, not {VERSION}");
    }
    for chart in ["nestor-management", "nestor-guest"] {
        check_chart(chart)?;
    }
    Ok(())
}

fn check_chart(chart: &str) -> Result<()> {
    let path = repository().join("charts").join(chart).join("Chart.yaml");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let metadata: Value = serde_saphyr::from_str(&text).with_context(|| format!("{}", path.display()))?;
    for field in ["version", "appVersion"] {
        ensure!(metadata[field] == VERSION, "chart {chart}: {field} is {}, not {VERSION}", metadata[field]);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_charts_have_the_version_of_the_programs() {
        for chart in ["nestor-management", "nestor-guest"] {
            super::check_chart(chart).unwrap();
        }
    }
}
