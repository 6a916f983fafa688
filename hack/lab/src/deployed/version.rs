//! Versions of Nestor: programs and charts of this tree, or of an earlier commit.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::cache;
use crate::images::VERSION;
use crate::process::{command, run};
use crate::run::{lock, repository, target_dir};
use crate::ui::Ui;

/// The crates whose programs are deployed.
const PROGRAMS: [&str; 5] = ["gc-csi", "gc-csi-node", "mgmt-csi", "vm-operator-shim", "storage-infra"];

/// The commit from which upgrades are tested, until there is a release.
pub(crate) const EARLIER: &str = "bfcf36d";

/// Programs and charts that belong together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    /// Tag of its images.
    pub tag: String,
    /// Folder of its charts.
    pub charts: PathBuf,
    /// Folder of its programs.
    pub binaries: PathBuf,
}

impl Version {
    /// This tree, whose programs are built.
    pub(crate) fn current(binaries: &Path) -> Self {
        let charts = repository().join("charts");
        Self { tag: VERSION.to_owned(), charts, binaries: binaries.to_owned() }
    }

    /// An earlier commit or tag, built from a worktree in the target folder.
    pub(crate) async fn of_commit(ui: &Ui, commit: &str, release: bool) -> Result<Self> {
        let revision = format!("{commit}^{{commit}}");
        let id = git(&["rev-parse", "--verify", "--end-of-options", &revision]).await;
        let id = id.with_context(|| format!("{commit:?} is no commit of this repository"))?;
        let tag: String = id.trim().chars().take(12).collect();
        let folder = target_dir()?.join("versions");
        let _one = lock(&folder.join("lock"))?;
        let sources = folder.join(&tag);
        if !sources.exists() {
            git(&["worktree", "prune"]).await?;
            git(&["worktree", "add", "--detach", &sources.display().to_string(), &tag]).await?;
        }
        let binaries =
            cache::cargo::build_in(ui, &sources, &PROGRAMS, &folder.join("target"), release).await?;
        // The build of another version would overwrite the programs.
        let kept = sources.join("target/programs");
        fs::create_dir_all(&kept).with_context(|| format!("cannot make {}", kept.display()))?;
        for program in PROGRAMS {
            fs::copy(binaries.join(program), kept.join(program))
                .with_context(|| format!("commit {tag} has no program {program}"))?;
        }
        Ok(Self { tag, charts: sources.join("charts"), binaries: kept })
    }
}

async fn git(args: &[&str]) -> Result<String> {
    run(command("git", args).current_dir(repository())).await
}
