//! Images of the sidecars, built from the lab's own builds of them under their official names: VMs cannot pull images.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::json;

use super::NOBODY;
use super::files::put;
use crate::oci::Layout;

/// A sidecar and where a chart pulls it from.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Sidecar {
    /// The program, which is also the image's entry point.
    pub(crate) program: String,
    /// The image with its tag.
    pub(crate) image: String,
}

/// Writes one archive with the images of these sidecars.
pub(crate) async fn write(tools: &Path, sidecars: &[Sidecar], archive: &Path) -> Result<()> {
    let work = tempfile::tempdir_in(archive.parent().context("the archive has no folder")?)?;
    let mut layout = Layout::create(work.path().join("layout"))?;
    for Sidecar { program, image } in sidecars {
        let root = work.path().join(program);
        let bytes = read(&tools.join(program))?;
        put(&root.join(program), &bytes, 0o755)?;
        let layer = layout.layer(&root).await?;
        let config = json!({
            "architecture": "amd64", "os": "linux",
            "config": {"Entrypoint": [format!("/{program}")], "User": NOBODY, "WorkingDir": "/"},
        });
        layout.image(image, config, &[layer])?;
    }
    layout.archive(archive).await
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}
