//! OCI image layouts (folders of blobs, named by digest) and their archives.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::process::{command, run};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// Neither times nor process IDs in extended headers.
const PAX: &str = "--pax-option=exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";

/// A layer: its descriptor for the manifest, and its diff ID for the configuration.
#[derive(Debug, Clone)]
pub(crate) struct Layer {
    descriptor: Value,
    diff_id: String,
}

/// An image layout that is being written.
pub(crate) struct Layout {
    dir: PathBuf,
    manifests: Vec<Value>,
}

impl Layout {
    /// Creates an empty layout in a new folder.
    pub(crate) fn create(dir: PathBuf) -> Result<Self> {
        fs::create_dir_all(dir.join("blobs/sha256"))
            .with_context(|| format!("cannot make {}", dir.display()))?;
        Ok(Self { dir, manifests: Vec::new() })
    }

    /// Adds a layer of all files in a folder, owned by root and dated 1970.
    pub(crate) async fn layer(&self, root: &Path) -> Result<Layer> {
        self.layer_with(root, &["--owner=0", "--group=0"]).await
    }

    /// Adds a layer of all files in a folder with their owners and the capabilities of programs, dated 1970.
    pub(crate) async fn layer_with_owners(&self, root: &Path) -> Result<Layer> {
        let capabilities = ["--xattrs", "--xattrs-include=security.capability", "--format=posix", PAX];
        self.layer_with(root, &capabilities).await
    }

    async fn layer_with(&self, root: &Path, options: &[&str]) -> Result<Layer> {
        let archive = self.dir.join("layer.tar");
        tar(root, &archive, options).await?;
        let bytes = fs::read(&archive)?;
        fs::remove_file(&archive)?;
        let descriptor = self.blob(&bytes, "application/vnd.oci.image.layer.v1.tar")?;
        let diff_id = descriptor["digest"].as_str().unwrap_or_default().to_owned();
        Ok(Layer { descriptor, diff_id })
    }

    /// Adds an image. `config` is its configuration without the layers. Returns the manifest's digest.
    pub(crate) fn image(&mut self, name: &str, mut config: Value, layers: &[Layer]) -> Result<String> {
        let diff_ids: Vec<&String> = layers.iter().map(|layer| &layer.diff_id).collect();
        config["rootfs"] = json!({"type": "layers", "diff_ids": diff_ids});
        let annotations = config["config"]["Labels"].clone();
        let config = self.json_blob(&config, CONFIG)?;
        let layers: Vec<&Value> = layers.iter().map(|layer| &layer.descriptor).collect();
        let mut manifest =
            json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers});
        if annotations.is_object() {
            manifest["annotations"] = annotations;
        }
        let mut manifest = self.json_blob(&manifest, MANIFEST)?;
        let digest = manifest["digest"].as_str().unwrap_or_default().to_owned();
        manifest["annotations"] = json!({"io.containerd.image.name": name});
        if let Some((_, tag)) = name.rsplit_once(':') {
            manifest["annotations"]["org.opencontainers.image.ref.name"] = json!(tag);
        }
        self.manifests.push(manifest);
        Ok(digest)
    }

    /// Writes the index and packs the layout into an archive.
    pub(crate) async fn archive(self, archive: &Path) -> Result<()> {
        fs::write(self.dir.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)?;
        let index = json!({"schemaVersion": 2, "manifests": self.manifests});
        fs::write(self.dir.join("index.json"), index.to_string())?;
        tar(&self.dir, archive, &["--owner=0", "--group=0"]).await
    }

    fn json_blob(&self, value: &Value, kind: &str) -> Result<Value> {
        self.blob(value.to_string().as_bytes(), kind)
    }

    /// Stores bytes under their digest and returns the descriptor.
    fn blob(&self, bytes: &[u8], kind: &str) -> Result<Value> {
        let hex = sha256(bytes);
        fs::write(self.dir.join("blobs/sha256").join(&hex), bytes)?;
        Ok(json!({"mediaType": kind, "digest": format!("sha256:{hex}"), "size": bytes.len()}))
    }
}

/// A digest in hexadecimal digits.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

async fn tar(folder: &Path, archive: &Path, options: &[&str]) -> Result<()> {
    let mut tar = command("tar", ["--sort=name", "--mtime=@0", "--numeric-owner"]);
    run(tar.args(options).arg("--directory").arg(folder).arg("--create").arg("--file").arg(archive).arg("."))
        .await
        .map(drop)
}
