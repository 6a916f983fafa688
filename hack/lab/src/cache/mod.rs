//! Build cache shared by all labs: built tools, the base image of the VMs, third-party API definitions.
//!
//! The name of each entry holds a hash of all its inputs. An entry is built in a temporary folder under a file lock and
//! renamed when complete, so concurrent labs share one build and a crash leaves no partial entry.

pub mod cargo;
mod definitions;
mod host;
mod image;
mod kubernetes;
mod kubevirt;
mod oci;
pub mod packages;
mod perses;
mod schemathesis;
mod tools;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

pub use definitions::{cluster_api_manifests, monitoring_definitions, snapshot_definitions};
pub(crate) use host::debian_host;
pub(crate) use image::debian_suite;
pub use image::{BaseImage, base_image, debian_root};
pub use kubernetes::Kubernetes;
pub(crate) use kubevirt::{KubeVirt, kubevirt};
pub use perses::perses;
pub(crate) use schemathesis::schemathesis;
pub use tools::{cluster_api, helm, otelcol, prometheus, tools};

use crate::run::lock;

/// The cache folder: `NESTOR_CACHE`, else `nestor` in the user's cache folder.
pub fn root() -> Result<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(dir) = set("NESTOR_CACHE") {
        return Ok(dir);
    }
    let user = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
    Ok(user
        .context(
            "none of NESTOR_CACHE, XDG_CACHE_HOME and HOME is set: set one of them to a folder for the cache",
        )?
        .join("nestor"))
}

/// A hash over named inputs.
pub(crate) struct Key(Sha256);

impl Key {
    pub(crate) fn new(kind: &str) -> Self {
        Self(Sha256::new()).with("kind", kind.as_bytes())
    }

    pub(crate) fn with(mut self, name: &str, bytes: &[u8]) -> Self {
        for part in [name.as_bytes(), bytes] {
            self.0.update((part.len() as u64).to_be_bytes());
            self.0.update(part);
        }
        self
    }

    pub(crate) fn with_file(self, path: &Path) -> Result<Self> {
        let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(self.with(&path.to_string_lossy(), &bytes))
    }

    pub(crate) fn hex(self) -> String {
        self.0.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Returns the folder of an entry. If it does not exist, `build` fills an empty folder.
pub(crate) async fn entry<B>(name: &str, build: B) -> Result<PathBuf>
where
    B: AsyncFnOnce(&Path) -> Result<()>,
{
    let root = root()?;
    let path = root.join(name);
    if path.exists() {
        return Ok(path);
    }
    let lock_file = root.join(format!("{name}.lock"));
    let _lock = tokio::task::spawn_blocking(move || lock(&lock_file)).await??;
    if path.exists() {
        return Ok(path);
    }
    let unfinished = root.join(format!("{name}.unfinished"));
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished).with_context(|| format!("cannot remove {}", unfinished.display()))?;
    }
    fs::create_dir_all(&unfinished).with_context(|| format!("cannot create {}", unfinished.display()))?;
    build(&unfinished).await?;
    fs::rename(&unfinished, &path).with_context(|| format!("cannot rename to {}", path.display()))?;
    Ok(path)
}
