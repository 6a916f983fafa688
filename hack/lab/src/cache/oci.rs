//! The one container image of the lab, made from the host's static busybox, since nothing can be pulled.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::process::{command, run};

/// Image names, and what each runs when nothing is said.
const IMAGES: [(&str, &[&str]); 2] =
    [("localhost/busybox:1", &["/bin/sh"]), ("localhost/pause:1", &["/bin/sleep", "infinity"])];

/// Writes an OCI archive with the images to `archive`. `work` is an empty folder to use.
pub(super) async fn write_images(busybox: &Path, work: &Path, archive: &Path) -> Result<()> {
    let root = work.join("root");
    for folder in ["bin", "etc", "tmp", "proc", "sys", "dev", "root"] {
        fs::create_dir_all(root.join(folder))?;
    }
    fs::copy(busybox, root.join("bin/busybox"))
        .with_context(|| format!("cannot copy {}", busybox.display()))?;
    let applets = run(&mut command("busybox", ["--list"])).await?;
    for applet in applets.lines().filter(|name| *name != "busybox") {
        symlink("busybox", root.join("bin").join(applet))?;
    }
    fs::write(
        root.join("etc/passwd"),
        "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    )?;
    fs::write(root.join("etc/group"), "root:x:0:\nnobody:x:65534:\n")?;

    let layout = work.join("layout");
    fs::create_dir_all(layout.join("blobs/sha256"))?;
    let layer = work.join("layer.tar");
    tar(&root, &layer).await?;
    let layer = blob(&layout, &fs::read(&layer)?, "application/vnd.oci.image.layer.v1.tar")?;
    let mut manifests = Vec::new();
    for (name, entrypoint) in IMAGES {
        let config = json!({
            "architecture": "amd64", "os": "linux",
            "config": {"Cmd": entrypoint, "Env": ["PATH=/bin"], "WorkingDir": "/"},
            "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
        });
        let config = json_blob(&layout, &config, "application/vnd.oci.image.config.v1+json")?;
        let kind = "application/vnd.oci.image.manifest.v1+json";
        let manifest = json!({"schemaVersion": 2, "mediaType": kind, "config": config, "layers": [layer]});
        let mut manifest = json_blob(&layout, &manifest, kind)?;
        manifest["annotations"] = json!({"io.containerd.image.name": name});
        manifests.push(manifest);
    }
    fs::write(layout.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)?;
    fs::write(layout.join("index.json"), json!({"schemaVersion": 2, "manifests": manifests}).to_string())?;
    tar(&layout, archive).await
}

async fn tar(folder: &Path, archive: &Path) -> Result<()> {
    let mut tar = command("tar", ["--sort=name", "--mtime=@0", "--owner=0", "--group=0", "--numeric-owner"]);
    run(tar.arg("--directory").arg(folder).arg("--create").arg("--file").arg(archive).arg("."))
        .await
        .map(drop)
}

fn json_blob(layout: &Path, value: &Value, kind: &str) -> Result<Value> {
    blob(layout, value.to_string().as_bytes(), kind)
}

/// Stores bytes under their digest, and gives the descriptor that points to them.
fn blob(layout: &Path, bytes: &[u8], kind: &str) -> Result<Value> {
    let hex = format!("{:x}", Sha256::digest(bytes));
    fs::write(layout.join("blobs/sha256").join(&hex), bytes)?;
    Ok(json!({"mediaType": kind, "digest": format!("sha256:{hex}"), "size": bytes.len()}))
}
