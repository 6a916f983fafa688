//! The system's own binaries, built where the lab itself was built.

use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::run::{repository, target_dir};
use crate::ui::Ui;

/// The crates whose binaries a lab runs.
const CRATES: [&str; 4] = ["gc-csi", "mgmt-csi", "vm-operator-shim", "storage-infra"];

/// Builds the system and gives the folder of its binaries. Cargo's own progress is shown as it is.
pub async fn build(ui: &Ui) -> Result<PathBuf> {
    let exe = std::env::current_exe().context("cannot tell where this program is")?;
    let target = target_dir()?;
    let release = exe.starts_with(target.join("release"));
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = tokio::process::Command::new(cargo);
    command.arg("build").current_dir(repository()).arg("--target-dir").arg(&target);
    for name in CRATES {
        command.args(["-p", name]);
    }
    if release {
        command.arg("--release");
    }
    let step = ui.step("building the system with cargo");
    let status = command.kill_on_drop(true).status().await.context("cannot run cargo build")?;
    anyhow::ensure!(status.success(), "cargo build of {} failed ({status})", CRATES.join(", "));
    step.done();
    Ok(target.join(if release { "release" } else { "debug" }))
}
