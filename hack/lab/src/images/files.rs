//! Files of the root filesystem of an image or a package.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result};

use crate::architecture::Architecture;
use crate::process::{command, run};

/// Writes a file with this mode, whatever the umask is, and creates its directory.
pub(crate) fn put(path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(mode))?)
}

/// Copies a program without its debug information, which release builds do not have.
pub(crate) async fn strip(architecture: Architecture, program: &Path, copy: &Path) -> Result<()> {
    put(copy, b"", 0o755)?;
    let mut strip = command(&architecture.strip(), ["--strip-debug", "-o"]);
    run(strip.arg(copy).arg(program)).await?;
    Ok(fs::set_permissions(copy, fs::Permissions::from_mode(0o755))?)
}
