//! Archives of container images, and how to see that their programs start.

use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use lab::images::Built;
use serde_json::Value;
use tokio::process::Command;

/// The programs of each image, with arguments that print their version.
pub const STARTS: [(&str, &[&[&str]]); 7] = [
    ("gc-csi", &[&["/usr/local/bin/gc-csi", "--version"]]),
    ("mgmt-csi", &[&["/usr/local/bin/mgmt-csi", "--version"]]),
    ("vm-operator-shim", &[&["/usr/local/bin/vm-operator-shim", "--version"]]),
    ("nestor-console", &[&["/usr/local/bin/nestor-console", "--version"]]),
    (
        "gc-csi-node",
        &[
            &["/usr/local/bin/gc-csi-node", "--version"],
            &["blkid", "--version"],
            &["mkfs.ext4", "-V"],
            &["e2fsck", "-V"],
            &["mkfs.xfs", "-V"],
            &["xfs_growfs", "-V"],
            &["xfs_repair", "-V"],
            &["mkfs.btrfs", "--version"],
            &["btrfs", "--version"],
            &["modprobe", "--version"],
            &["mount", "--version"],
        ],
    ),
    (
        "mgmt-csi-node",
        &[
            &["/usr/local/bin/mgmt-csi-node", "--version"],
            &["blkid", "--version"],
            &["mkfs.ext4", "-V"],
            &["e2fsck", "-V"],
            &["mkfs.xfs", "-V"],
            &["xfs_growfs", "-V"],
            &["xfs_repair", "-V"],
            &["mkfs.btrfs", "--version"],
            &["btrfs", "--version"],
            &["modprobe", "--version"],
            &["mount", "--version"],
        ],
    ),
    (
        "storage-infra",
        &[&["/usr/local/bin/storage-infra", "--version"], &["virsh", "--version"], &["losetup", "--version"]],
    ),
];

/// The command lines that start the programs of an image.
pub fn starts(image: &Built) -> Result<&'static [&'static [&'static str]]> {
    let name = image.name.rsplit('/').next().and_then(|name| name.split(':').next()).unwrap_or_default();
    let (_, starts) =
        STARTS.iter().find(|(known, _)| *known == name).with_context(|| format!("unknown image {name}"))?;
    Ok(starts)
}

/// The manifest and the configuration of an image.
pub async fn description(image: &Built) -> Result<(Value, Value)> {
    let manifest: Value = serde_json::from_slice(&blob(&image.archive, &image.digest).await?)?;
    let digest = manifest["config"]["digest"].as_str().context("no configuration")?;
    let config = serde_json::from_slice(&blob(&image.archive, digest).await?)?;
    Ok((manifest, config))
}

/// Unpacks the layers of an image into a folder.
pub async fn unpack(image: &Built, root: &Path) -> Result<()> {
    let (manifest, _) = description(image).await?;
    for layer in manifest["layers"].as_array().context("no layers")? {
        let archive = root.with_extension("layer");
        let digest = layer["digest"].as_str().context("a layer without digest")?;
        std::fs::write(&archive, blob(&image.archive, digest).await?)?;
        let mut tar = Command::new("tar");
        tar.args(["--extract", "--keep-directory-symlink", "--file"]).arg(&archive);
        output(tar.arg("--directory").arg(root)).await?;
        std::fs::remove_file(&archive)?;
    }
    Ok(())
}

/// A blob of an archive.
async fn blob(archive: &Path, digest: &str) -> Result<Vec<u8>> {
    let path = format!("./blobs/sha256/{}", digest.trim_start_matches("sha256:"));
    let mut tar = Command::new("tar");
    output(tar.args(["--extract", "--to-stdout", "--file"]).arg(archive).arg(path)).await
}

/// What a command prints; an error if it fails.
async fn output(command: &mut Command) -> Result<Vec<u8>> {
    let output = command.stdin(Stdio::null()).kill_on_drop(true).output().await?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {error}");
    Ok(output.stdout)
}
