//! Release: packed twice it has the same bytes, and its parts are usable.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use lab::cache;
use lab::images::{Programs, VERSION};
use lab::release::{SUMS, pack};
use lab::ui::Ui;
use tests::{Scenario, run};
use tokio::process::Command;

async fn packed(s: &Scenario, out: &Path) -> Result<Vec<(String, String)>> {
    pack(&Ui::default(), &[Programs::in_folder(&s.lab.state().binaries)], out).await
}

async fn output(command: &mut Command) -> Result<String> {
    let output = command.kill_on_drop(true).output().await?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    ensure!(output.status.success(), "{command:?}: {}{}", text(&output.stdout), text(&output.stderr));
    Ok(text(&output.stdout))
}

#[tokio::test]
async fn a_release_is_reproducible_and_complete() -> Result<()> {
    run(|s| async move {
        let (one, two) = (tempfile::tempdir()?, tempfile::tempdir()?);
        let files = packed(&s, one.path()).await?;
        assert_eq!(files, packed(&s, two.path()).await?);
        let names: Vec<&str> = files.iter().map(|(name, _)| name.as_str()).collect();
        for expected in [
            format!("gc-csi-{VERSION}-amd64.tar"),
            format!("gc-csi-{VERSION}-amd64.cdx.json"),
            format!("nestor-guest-{VERSION}.tgz"),
            format!("nestor-management-{VERSION}.tgz"),
            format!("nestor-crds-{VERSION}.yaml"),
            format!("kubectl-nestor-{VERSION}-linux-amd64.tar.gz"),
            format!("storage-infra-{VERSION}-linux-amd64.tar.gz"),
            "RELEASE_NOTES.md".to_owned(),
        ] {
            ensure!(names.contains(&expected.as_str()), "no {expected} in {names:?}");
        }
        output(Command::new("sha256sum").args(["--check", "--strict", SUMS]).current_dir(one.path())).await?;
        programs_start(one.path()).await?;
        charts_render(one.path()).await
    })
    .await
}

async fn programs_start(release: &Path) -> Result<()> {
    for program in ["kubectl-nestor", "storage-infra"] {
        let name = format!("{program}-{VERSION}-linux-amd64");
        let mut tar = Command::new("tar");
        output(tar.args(["--extract", "--file", &format!("{name}.tar.gz")]).current_dir(release)).await?;
        let shown = output(Command::new(release.join(name).join(program)).arg("--version")).await?;
        ensure!(shown.trim().ends_with(VERSION), "{shown}");
    }
    Ok(())
}

async fn charts_render(release: &Path) -> Result<()> {
    let helm = cache::helm(&Ui::default()).await?;
    for chart in ["nestor-management", "nestor-guest"] {
        let values = lab::run::repository().join("charts").join(chart).join("ci/smallest-values.yaml");
        let mut template = Command::new(&helm);
        template.args(["template", "test", &format!("{chart}-{VERSION}.tgz"), "--kube-version", "1.36.0"]);
        let objects =
            output(template.arg("--values").arg(values).current_dir(release)).await.context(chart)?;
        ensure!(objects.contains(&format!("/{}:{VERSION}", first_program(chart))), "{objects}");
    }
    Ok(())
}

fn first_program(chart: &str) -> &'static str {
    if chart == "nestor-guest" { "gc-csi" } else { "mgmt-csi" }
}
