//! The documentation: its pages, and what they refer to.

mod page;
mod terminal;

#[cfg(test)]
mod links;
#[cfg(test)]
mod names;
#[cfg(test)]
mod words;

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use lab::run::repository;

pub use page::{Block, Directive, Page};
pub use terminal::Terminal;

/// Paths of the repository's files, without those that git ignores.
pub fn files() -> Result<BTreeSet<String>> {
    let mut git = Command::new("git");
    git.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]).current_dir(repository());
    let output = git.output().context("cannot run git")?;
    ensure!(output.status.success(), "git ls-files: {}", String::from_utf8_lossy(&output.stderr));
    let listed = String::from_utf8(output.stdout).context("a path that is not UTF-8")?;
    let exists = |path: &&str| repository().join(path).symlink_metadata().is_ok();
    Ok(listed.split('\0').filter(|path| !path.is_empty()).filter(exists).map(str::to_owned).collect())
}

/// All Markdown pages of the repository.
pub fn pages() -> Result<Vec<Page>> {
    files()?.iter().filter(|path| path.ends_with(".md")).map(|path| Page::read(path)).collect()
}
