//! Modules of the black-box tests.

use std::fs;

use anyhow::{Context, Result, ensure};

use crate::run::repository;

/// The modules of the black-box tests, one per file.
pub(super) fn capabilities() -> Result<Vec<String>> {
    let folder = repository().join("tests/tests");
    let main = folder.join("main.rs");
    let listed = fs::read_to_string(&main).with_context(|| format!("cannot read {}", main.display()))?;
    let mut found = Vec::new();
    for entry in fs::read_dir(&folder)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let Some(module) = name.strip_suffix(".rs").filter(|module| *module != "main") else { continue };
        let line = format!("mod {module};");
        ensure!(listed.contains(&line), "{} has no {line:?}: {name} would never run", main.display());
        found.push(module.to_owned());
    }
    found.sort();
    Ok(found)
}
