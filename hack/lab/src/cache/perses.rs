//! Perses, a dashboard server that reads Grafana's dashboards. It is built from its Go module; npm builds its pages.
//! 0.50 is the last minor version whose panels are part of the module.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::{Key, entry, packages};
use crate::process::{command, run};
use crate::run::repository;
use crate::ui::Ui;

/// What to run in the module's folder.
const BUILD: [(&str, &[&str]); 5] = [
    (
        "installing the packages of Perses with npm",
        &["sh", "-ec", "cd ui && npm ci --ignore-scripts --no-audit --no-fund"],
    ),
    (
        "building the pages of Perses with npm (takes minutes the first time)",
        &["sh", "-ec", "cd ui && npx --no-install turbo run build --filter=@perses-dev/app --concurrency=1"],
    ),
    ("packing the pages of Perses", &["bash", "scripts/compress_assets.sh"]),
    (
        "building Perses with Go (takes minutes the first time)",
        &[
            "go",
            "build",
            "-trimpath",
            "-buildvcs=false",
            "-ldflags",
            "-s -w",
            "-o",
            "../",
            "./cmd/perses",
            "./cmd/percli",
        ],
    ),
    ("copying the schemas of Perses", &["cp", "--recursive", "cue", "cue.mod", "../"]),
];

/// Returns the folder with the programs perses and percli, and with Perses' schemas. Only the test of the dashboards needs
/// them, so they are built on demand.
pub async fn perses(ui: &Ui) -> Result<PathBuf> {
    let module = repository().join("hack/tools/perses");
    let key = Key::new("perses").with_file(&module.join("go.sum"))?.with("version", &[1]);
    entry(&format!("perses-{}", key.hex()), async |out: &Path| {
        node_is_there(ui).await?;
        let sources = out.join("sources");
        copy_module(&module, &sources).await?;
        for (what, words) in BUILD {
            let step = ui.step(what);
            let mut build = command(words[0], &words[1..]);
            build.current_dir(&sources).env("CGO_ENABLED", "0").env("TURBO_TELEMETRY_DISABLED", "1");
            run(&mut build).await.context(what)?;
            step.done();
        }
        Ok(fs::remove_dir_all(&sources)?)
    })
    .await
}

/// Copies a module's sources, which Go verifies by the digest in our `go.sum`; those in Go's cache are read-only.
async fn copy_module(module: &Path, sources: &Path) -> Result<()> {
    let mut download = command("go", ["mod", "download", "-json", "github.com/perses/perses"]);
    let printed = run(download.current_dir(module)).await?;
    let described: Value = serde_json::from_str(&printed).context("go mod download")?;
    let folder = described["Dir"].as_str().context("go mod download names no folder")?;
    let mut copy = command("cp", ["--recursive", "--no-preserve=mode,ownership"]);
    run(copy.arg(folder).arg(sources)).await.map(drop)
}

/// Installs Node.js and npm from Debian if there is none.
async fn node_is_there(ui: &Ui) -> Result<()> {
    if run(&mut command("npm", ["--version"])).await.is_err() {
        packages::ensure_node(ui).await?;
    }
    let version = run(&mut command("node", ["--version"])).await?;
    match major(&version) {
        Some(20..) => Ok(()),
        _ => bail!(
            "the pages of Perses need Node.js 20 or later, but this is {}: install a newer one",
            version.trim()
        ),
    }
}

/// The major version in a line such as `v20.11.1`.
fn major(version: &str) -> Option<u32> {
    version.trim().strip_prefix('v')?.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_major_version_of_node_is_read() {
        assert_eq!(major("v20.11.1\n"), Some(20));
        assert_eq!(major("20"), None);
    }
}
