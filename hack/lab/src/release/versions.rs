//! One version in all programs and charts.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::fs;

use crate::architecture::Architecture;
use crate::images::{Programs, VERSION};
use crate::process::{command, run};
use crate::run::repository;

const PROGRAMS: [&str; 8] = [
    "gc-csi",
    "gc-csi-node",
    "mgmt-csi",
    "mgmt-csi-node",
    "vm-operator-shim",
    "nestor-console",
    "storage-infra",
    "kubectl-nestor",
];

/// Fails if a program has another version than this build. Programs of another architecture than the host's do not start:
/// cargo has just built them from this tree.
pub(super) async fn check_programs(programs: &Programs) -> Result<()> {
    if programs.architecture != Architecture::default() {
        return Ok(());
    }
    for program in PROGRAMS {
        let path = programs.folder.join(program).display().to_string();
        let shown = run(&mut command(&path, ["--version"])).await?;
        let version = shown.split_whitespace().last().unwrap_or_default();
        ensure!(version == VERSION, "{program} has version {version}, not {VERSION}");
    }
    Ok(())
}

/// Fails if a chart has another version than this build.
pub(super) fn check_charts() -> Result<()> {
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
        super::check_charts().unwrap();
    }
}
