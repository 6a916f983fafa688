//! Modules of the black-box tests.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::run::repository;

/// The modules of the black-box tests, one per file. A module inside another has its path as name: `rights::metrics`.
pub(super) fn capabilities() -> Result<Vec<String>> {
    let folder = repository().join("tests/tests");
    let mut found = modules(&folder, &folder.join("main.rs"))?;
    found.sort();
    Ok(found)
}

/// Whether a module has a file of its own directly in the folder of the black-box tests.
pub(super) fn is_outermost(module: &str) -> bool {
    !module.contains("::")
}

/// The modules with files in a folder, each of which the file `parent` has to declare, and the modules inside them.
fn modules(folder: &Path, parent: &Path) -> Result<Vec<String>> {
    let declared = fs::read_to_string(parent).with_context(|| format!("cannot read {}", parent.display()))?;
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let Some(file) = path.file_name().and_then(|name| name.to_str()) else { continue };
        let Some(module) = file.strip_suffix(".rs").filter(|_| path != parent) else { continue };
        let line = format!("mod {module};");
        ensure!(declared.contains(&line), "{} has no {line:?}: {file} would never run", parent.display());
        let inner = folder.join(module);
        if inner.is_dir() {
            let names = modules(&inner, &path)?;
            found.extend(names.iter().map(|name| format!("{module}::{name}")));
        }
        found.push(module.to_owned());
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_inside_another_is_named_by_its_path() {
        let found = capabilities().unwrap();
        for name in ["crash", "kubevirt", "kubevirt::crash", "rights::metrics"] {
            assert!(found.iter().any(|module| module == name), "{name}: {found:?}");
        }
        assert!(!is_outermost("kubevirt::crash") && is_outermost("kubevirt"));
    }
}
