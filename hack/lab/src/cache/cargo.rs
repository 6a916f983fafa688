//! Cargo builds: Nestor's programs, in the target folder that the lab itself is in, and development tools.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

use super::entry;
use crate::process::command;
use crate::run::{repository, target_dir};
use crate::ui::Ui;

/// The crates whose programs a lab runs.
const CRATES: [&str; 7] = [
    "gc-csi",
    "gc-csi-node",
    "mgmt-csi",
    "vm-operator-shim",
    "nestor-console",
    "storage-infra",
    "kubectl-nestor",
];

/// Installs a development tool once and returns its folder.
pub async fn tool(ui: &Ui, name: &str, version: &str) -> Result<PathBuf> {
    tool_with(ui, name, version, &[]).await
}

/// The same, with further arguments of `cargo install`.
pub(crate) async fn tool_with(ui: &Ui, name: &str, version: &str, more: &[&str]) -> Result<PathBuf> {
    entry(&format!("{name}-{version}"), async |out: &Path| {
        let mut install = command(&program(), ["install", "--locked", "--version", version, "--root"]);
        install.arg(out).arg(name).args(more);
        finish(ui, &format!("building {name} {version}"), &mut install).await
    })
    .await
}

/// Builds Nestor's programs and returns their folder.
pub async fn build(ui: &Ui, release: bool) -> Result<PathBuf> {
    build_in(ui, &repository(), &CRATES, &target_dir()?, release).await
}

/// Builds crates of a checkout into a target folder, and returns the folder of their programs.
pub(crate) async fn build_in(
    ui: &Ui,
    sources: &Path,
    crates: &[&str],
    target: &Path,
    release: bool,
) -> Result<PathBuf> {
    let mut cargo = command(&program(), ["build"]);
    cargo.current_dir(sources);
    cargo.args(crates.iter().flat_map(|name| ["-p", name])).arg("--target-dir").arg(target);
    if release {
        cargo.arg("--release");
    }
    finish(ui, "building Nestor with cargo", &mut cargo).await?;
    Ok(target.join(if release { "release" } else { "debug" }))
}

pub(crate) fn program() -> String {
    std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned())
}

/// Runs cargo until it exits and shows its progress.
async fn finish(ui: &Ui, what: &str, cargo: &mut Command) -> Result<()> {
    cargo.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut step = ui.step(what);
    let mut child = cargo.spawn().context("cannot run cargo")?;
    let mut output = Vec::new();
    if let Some(stderr) = child.stderr.take() {
        let mut lines = BufReader::new(stderr).lines();
        while let Some(line) = lines.next_line().await? {
            step.message(line.trim());
            output.push(line);
        }
    }
    let status = child.wait().await?;
    if !status.success() {
        bail!("{what} failed ({status}):\n{}", output.join("\n"));
    }
    step.done();
    Ok(())
}
