//! `cargo lab generate`: files that are derived from the code.

mod alerts;
mod chart_values;
mod definitions;
mod flags;
mod markdown;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::cache;
use crate::run::repository;
use crate::ui::{Ui, say};

pub use flags::page as flags;

/// Folder of the CustomResourceDefinitions. It contains nothing else.
const DEFINITIONS: &str = "crds/yaml";

/// A generated file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generated {
    /// Its path in the repository.
    pub path: String,
    /// Its text.
    pub text: String,
}

impl Generated {
    fn page(name: &str, text: String) -> Self {
        Self { path: format!("docs/reference/{name}.md"), text }
    }

    /// Fails if the file in the repository differs.
    pub fn check(&self) -> Result<()> {
        let committed = fs::read_to_string(repository().join(&self.path)).unwrap_or_default();
        anyhow::ensure!(committed == self.text, "{} is stale: run `cargo lab generate`", self.path);
        Ok(())
    }

    fn write(&self) -> Result<()> {
        let path = repository().join(&self.path);
        let changed = fs::read_to_string(&path).ok().as_ref() != Some(&self.text);
        if changed {
            fs::write(&path, &self.text).with_context(|| format!("cannot write {}", path.display()))?;
        }
        say(format!("{} {}", if changed { "wrote    " } else { "unchanged" }, self.path));
        Ok(())
    }
}

/// Writes all generated files. Builds the programs first, whose flags are read from their help.
pub async fn generate(ui: &Ui) -> Result<()> {
    let definitions = definitions();
    let folder = repository().join(DEFINITIONS);
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    remove_others(&folder, &definitions)?;
    for file in definitions.into_iter().chain(pages()?) {
        file.write()?;
    }
    cache::packages::ensure(ui).await?;
    flags(&cache::cargo::build(ui, false).await?).await?.write()
}

fn definitions() -> Vec<Generated> {
    let files = crds::generate::all().into_iter();
    files.map(|(name, text)| Generated { path: format!("{DEFINITIONS}/{name}"), text }).collect()
}

/// The pages that are generated without the programs.
fn pages() -> Result<Vec<Generated>> {
    Ok(vec![definitions::page()?, chart_values::page()?, alerts::page()?])
}

/// Removes the files of a folder that are not generated.
fn remove_others(folder: &Path, generated: &[Generated]) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if !generated.iter().any(|file| repository().join(&file.path) == path) {
            fs::remove_file(&path)?;
            say(format!("removed   {}", path.display()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_pages_are_those_of_the_code() {
        for page in pages().unwrap() {
            page.check().unwrap();
        }
    }
}
