//! The Debian package of storage-infra: its build is reproducible, its unit is valid, the program in it starts with the
//! capabilities that the unit leaves, and the service works on a host with systemd.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use lab::package::{self, NAME};
use lab::ui::Ui;
use tests::program::Running;
use tests::{Scenario, run};
use tokio::process::Command;

mod installed;

/// Highest exposure that `systemd-analyze security` may find, in tenths: 30 of 100.
const EXPOSURE: &str = "30";

async fn build(s: &Scenario, out: &Path) -> Result<PathBuf> {
    package::build(&Ui::default(), &s.lab.state().binaries, lab::images::VERSION, out).await
}

/// Runs a program; returns its output, and fails unless it succeeds without a word on standard error.
async fn output(command: &mut Command) -> Result<String> {
    let output = command.kill_on_drop(true).output().await?;
    let (out, err) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
    ensure!(output.status.success() && err.is_empty(), "{command:?}: {out}{err}");
    Ok(out)
}

async fn unpacked(package: &Path, into: &Path) -> Result<()> {
    output(Command::new("dpkg-deb").arg("--raw-extract").arg(package).arg(into)).await.map(drop)
}

/// The value of a setting in a unit.
fn setting<'a>(unit: &'a str, name: &str) -> Result<&'a str> {
    let value = unit.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    value.with_context(|| format!("the unit has no {name}"))
}

#[tokio::test]
async fn the_package_is_reproducible_and_its_unit_is_valid() -> Result<()> {
    run(|s| async move {
        let (one, two) = (tempfile::tempdir()?, tempfile::tempdir()?);
        let built = build(&s, one.path()).await?;
        ensure!(fs::read(&built)? == fs::read(build(&s, two.path()).await?)?, "two builds differ");
        let info = output(Command::new("dpkg-deb").arg("--info").arg(&built)).await?;
        for part in
            [&format!("Package: {NAME}"), "Depends: libc6 (>= ", "libvirt-clients", "conffiles", "postinst"]
        {
            ensure!(info.contains(part), "{part}: {info}");
        }
        let contents = output(Command::new("dpkg-deb").arg("--contents").arg(&built)).await?;
        for (mode, path) in [
            ("-rwxr-xr-x root/root", "./usr/bin/storage-infra"),
            ("-rw-r-----", "./etc/nestor/storage-infra.env"),
            ("-rw-r--r--", "./usr/lib/systemd/system/nestor-storage-infra.service"),
        ] {
            let line = contents.lines().find(|line| line.ends_with(path)).unwrap_or_default();
            ensure!(line.starts_with(mode), "{path}: {contents}");
        }

        let root = one.path().join("unpacked");
        unpacked(&built, &root).await?;
        for script in ["postinst", "prerm", "postrm"] {
            output(Command::new("sh").arg("-n").arg(root.join("DEBIAN").join(script))).await?;
            // Where systemd does not run, the scripts do nothing.
            if !Path::new("/run/systemd/system").exists() {
                output(Command::new(root.join("DEBIAN").join(script)).arg("configure")).await?;
            }
        }
        let unit = fs::read_to_string(root.join("usr/lib/systemd/system/nestor-storage-infra.service"))?;
        let here = one.path().join("nestor-storage-infra.service");
        let program = root.join("usr/bin/storage-infra");
        fs::write(&here, unit.replace("/usr/bin/storage-infra", &program.display().to_string()))?;
        output(Command::new("systemd-analyze").arg("verify").arg(&here)).await?;
        let threshold = format!("--threshold={EXPOSURE}");
        let mut security = Command::new("systemd-analyze");
        output(security.args(["security", "--offline=true", "--no-pager", &threshold]).arg(&here))
            .await
            .map(drop)
    })
    .await
}

#[tokio::test]
async fn the_packaged_program_serves_with_the_units_capabilities_and_configuration() -> Result<()> {
    run(|s| async move {
        let folder = tempfile::tempdir()?;
        let built = build(&s, folder.path()).await?;
        let root = folder.path().join("unpacked");
        unpacked(&built, &root).await?;
        let unit = fs::read_to_string(root.join("usr/lib/systemd/system/nestor-storage-infra.service"))?;
        let capabilities = setting(&unit, "CapabilityBoundingSet")?.to_lowercase().replace("cap_", "+");
        let bounding = format!("--bounding-set=-all,{}", capabilities.replace(' ', ","));
        let program = root.join("usr/bin/storage-infra");
        let infra = s.lab.state().infra.as_ref().context("the lab has no infra")?;
        let flag = |name: &str, value: PathBuf| format!("--{name}={}", value.display());
        let words = [
            bounding,
            "--no-new-privs".to_owned(),
            program.display().to_string(),
            "serve".to_owned(),
            "--listen=127.0.0.1:0".to_owned(),
            flag("data-dir", folder.path().join("data")),
            flag("backup-dir", folder.path().join("backups")),
            flag("tls-cert", infra.pki.join("server.crt")),
            flag("tls-key", infra.pki.join("server.key")),
            flag("client-ca", infra.pki.join("ca.crt")),
            format!("--hypervisor=libvirt=libvirt:{}", infra.libvirt_uri),
        ];
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let server = Running::start(Path::new("setpriv"), &words).await?;
        server.ready().await?;
        server.has_logged("backed up the catalog").await?;
        ensure!(server.stop().await?.success(), "it failed");

        // As installed, without the settings that have no default, it ends with the exit code that prevents restarts.
        let configuration = fs::read_to_string(root.join("etc/nestor/storage-infra.env"))?;
        let set = configuration
            .lines()
            .filter(|line| !line.starts_with('#'))
            .filter_map(|line| line.split_once('='));
        let unconfigured = Command::new(&program).arg("serve").envs(set).output().await?;
        let said = String::from_utf8_lossy(&unconfigured.stderr).into_owned();
        let code = unconfigured.status.code().map(|code| code.to_string()).unwrap_or_default();
        ensure!(code == setting(&unit, "RestartPreventExitStatus")?, "{code}: {said}");
        ensure!(said.contains("--tls-cert") && said.contains("--listen"), "{said}");
        Ok(())
    })
    .await
}
