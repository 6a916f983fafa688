//! Container images: builds are reproducible, containerd can import them, and their programs start.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use lab::containerd::Containerd;
use lab::images::{self, Built, Programs};
use lab::ui::Ui;
use serde_json::Value;
use tests::chart::{Chart, containers, pod_specs};
use tests::images::{STARTS, description, starts};
use tests::{Scenario, run};

async fn build(s: &Scenario, out: &Path) -> Result<Vec<Built>> {
    images::build(&Ui::default(), &Programs::in_folder(&s.lab.state().binaries), images::VERSION, out, &[])
        .await
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
        for words in starts(image)? {
            let output = containerd.run(&image.name, words).await.with_context(|| image.name.clone())?;
            ensure!(output.contains(|c: char| c.is_ascii_digit()), "{}: {words:?}: {output}", image.name);
        }
        is_described(image).await.with_context(|| image.name.clone())?;
    }
    Ok(())
}

/// Checks the labels and user of an image, and its SBOM.
async fn is_described(image: &Built) -> Result<()> {
    let (_, config) = description(image).await?;
    let labels = &config["config"]["Labels"];
    for label in ["title", "description", "version", "revision", "licenses", "base.name"] {
        ensure!(labels[format!("org.opencontainers.image.{label}")].is_string(), "{label}: {labels}");
    }
    let needs_root = ["gc-csi-node", "mgmt-csi-node", "storage-infra"]
        .iter()
        .any(|name| image.name.contains(&format!("/{name}:")));
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
