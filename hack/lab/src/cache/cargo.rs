//! The system's own binaries, built in the target folder that the lab itself is in.

use std::path::PathBuf;
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use tokio::io::{AsyncBufReadExt, BufReader};

use crate::process::command;
use crate::run::{repository, target_dir};
use crate::ui::Ui;

/// The crates whose binaries a lab runs.
const CRATES: [&str; 4] = ["gc-csi", "mgmt-csi", "vm-operator-shim", "storage-infra"];

/// Builds the system, and gives the folder of its binaries.
pub async fn build(ui: &Ui, release: bool) -> Result<PathBuf> {
    let target = target_dir()?;
    let program = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let mut cargo = command(&program, ["build"]);
    cargo.current_dir(repository());
    cargo.args(CRATES.iter().flat_map(|name| ["-p", name])).arg("--target-dir").arg(&target);
    if release {
        cargo.arg("--release");
    }
    cargo.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut step = ui.step("building the system with cargo");
    let mut child = cargo.spawn().context("cannot run cargo build")?;
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
        bail!("cargo build of {} failed ({status}):\n{}", CRATES.join(", "), said.join("\n"));
    }
    step.done();
    Ok(target.join(if release { "release" } else { "debug" }))
}
