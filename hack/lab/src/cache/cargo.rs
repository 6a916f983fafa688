//! The system's own binaries, built in the target folder that the lab itself is in.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

use super::entry;
use crate::process::command;
use crate::run::{repository, target_dir};
use crate::ui::Ui;

/// The crates whose binaries a lab runs.
const CRATES: [&str; 5] = ["gc-csi", "gc-csi-node", "mgmt-csi", "vm-operator-shim", "storage-infra"];

/// The folder that a development tool is installed in, built once from the registry.
pub async fn tool(ui: &Ui, name: &str, version: &str) -> Result<PathBuf> {
    entry(&format!("{name}-{version}"), async |out: &Path| {
        let mut install = command(&program(), ["install", "--locked", "--version", version, "--root"]);
        install.arg(out).arg(name);
        finish(ui, &format!("building {name} {version}"), &mut install).await
    })
    .await
}

/// Builds the system, and gives the folder of its binaries.
pub async fn build(ui: &Ui, release: bool) -> Result<PathBuf> {
    let target = target_dir()?;
    let mut cargo = command(&program(), ["build"]);
    cargo.current_dir(repository());
    cargo.args(CRATES.iter().flat_map(|name| ["-p", name])).arg("--target-dir").arg(&target);
    if release {
        cargo.arg("--release");
    }
    finish(ui, "building the system with cargo", &mut cargo).await?;
    Ok(target.join(if release { "release" } else { "debug" }))
}

pub(crate) fn program() -> String {
    std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned())
}

/// Runs cargo to its end, and shows what it is at.
async fn finish(ui: &Ui, what: &str, cargo: &mut Command) -> Result<()> {
    cargo.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut step = ui.step(what);
    let mut child = cargo.spawn().context("cannot run cargo")?;
    let mut said = Vec::new();
    if let Some(stderr) = child.stderr.take() {
        let mut lines = BufReader::new(stderr).lines();
        while let Some(line) = lines.next_line().await? {
            step.message(line.trim());
            said.push(line);
        }
    }
    let status = child.wait().await?;
    if !status.success() {
        bail!("{what} failed ({status}):\n{}", said.join("\n"));
    }
    step.done();
    Ok(())
}
