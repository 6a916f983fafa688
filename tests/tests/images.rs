//! Container images: builds are reproducible, containerd can import them, and their programs start.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use lab::containerd::Containerd;
use lab::images::{self, Built};
use lab::ui::Ui;
use serde_json::Value;
use tests::chart::{Chart, containers, pod_specs};
use tests::{Scenario, run};
use tokio::process::Command;

/// The programs of each image, with arguments that print their version.
const STARTS: [(&str, &[&[&str]]); 6] = [
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
    ("storage-infra", &[&["/usr/local/bin/storage-infra", "--version"], &["virsh", "--version"]]),
];

async fn build(s: &Scenario, out: &Path) -> Result<Vec<Built>> {
    images::build(&Ui::default(), &s.lab.state().binaries, images::VERSION, out, &[]).await
}

#[tokio::test]
async fn images_are_reproducible_and_their_programs_start_in_containerd() -> Result<()> {
    run(|s| async move {
        let (one, two) = (tempfile::tempdir()?, tempfile::tempdir()?);
        let built = build(&s, one.path()).await?;
        for (first, second) in built.iter().zip(build(&s, two.path()).await?) {
            assert_eq!(first.digest, second.digest, "{}", first.name);
            ensure!(std::fs::read(&first.archive)? == std::fs::read(&second.archive)?, "{}", first.name);
            ensure!(std::fs::read(&first.sbom)? == std::fs::read(&second.sbom)?, "{}", first.name);
        }
        assert_eq!(built.len(), STARTS.len());
        let mut containerd = Containerd::start(&s.lab.state().tools).await?;
        let outcome = all_start(&containerd, &built).await;
        containerd.stop().await?;
        outcome
    })
    .await
}

async fn all_start(containerd: &Containerd, built: &[Built]) -> Result<()> {
    for image in built {
        let archive = image.archive.to_str().context("a path that is not UTF-8")?;
        containerd.ctr(&["images", "import", "--local", "--snapshotter", "native", archive]).await?;
        let short = image.name.rsplit('/').next().and_then(|name| name.split(':').next()).unwrap_or_default();
        let (_, starts) = STARTS.iter().find(|(name, _)| *name == short).context("an unknown image")?;
        for words in *starts {
            let output = containerd.run(&image.name, words).await.with_context(|| image.name.clone())?;
            ensure!(output.contains(|c: char| c.is_ascii_digit()), "{}: {words:?}: {output}", image.name);
        }
        is_described(image).await.with_context(|| image.name.clone())?;
    }
    Ok(())
}

/// A blob of an archive.
async fn blob(archive: &Path, digest: &str) -> Result<Value> {
    let path = format!("./blobs/sha256/{}", digest.trim_start_matches("sha256:"));
    let tar = Command::new("tar")
        .args(["--extract", "--to-stdout", "--file"])
        .arg(archive)
        .arg(path)
        .output()
        .await?;
    Ok(serde_json::from_slice(&tar.stdout)?)
}

/// Checks the labels and user of an image, and its SBOM.
async fn is_described(image: &Built) -> Result<()> {
    let manifest = blob(&image.archive, &image.digest).await?;
    let digest = manifest["config"]["digest"].as_str().context("no configuration")?;
    let config = blob(&image.archive, digest).await?;
    let labels = &config["config"]["Labels"];
    for label in ["title", "description", "version", "revision", "licenses", "base.name"] {
        ensure!(labels[format!("org.opencontainers.image.{label}")].is_string(), "{label}: {labels}");
    }
    let needs_root =
        ["gc-csi-node", "storage-infra"].iter().any(|name| image.name.contains(&format!("/{name}:")));
    assert_eq!(config["config"]["User"], if needs_root { "0:0" } else { "65532:65532" });
    let sbom: Value = serde_json::from_slice(&std::fs::read(&image.sbom)?)?;
    let components = sbom["components"].as_array().context("no components")?;
    let has = |start: &str| {
        components.iter().any(|one| one["purl"].as_str().is_some_and(|url| url.starts_with(start)))
    };
    ensure!(
        sbom["specVersion"] == "1.5" && has("pkg:deb/debian/libc6@") && has("pkg:cargo/tokio@"),
        "{sbom}"
    );
    Ok(())
}

#[tokio::test]
async fn the_charts_use_images_that_are_built() -> Result<()> {
    let built: Vec<&str> = STARTS.iter().map(|(name, _)| *name).collect();
    for chart in Chart::both().await? {
        for values in chart.examples()? {
            let objects =
                chart.render("nestor-system", &[&values], &["image.registry=localhost/nestor"]).await?;
            for container in pod_specs(&objects).into_iter().flat_map(|(_, spec)| containers(spec)) {
                let image = container["image"].as_str().context("no image")?;
                let Some(own) = image.strip_prefix("localhost/nestor/") else { continue };
                let name = own.split([':', '@']).next().unwrap_or_default();
                ensure!(built.contains(&name), "{}: no image {name}", chart.name());
            }
        }
    }
    Ok(())
}
