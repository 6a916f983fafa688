//! The Debian package of storage-infra: the program, its systemd unit and its configuration, built by `dpkg-deb`. The same
//! inputs give the same file.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::cache;
use crate::images::Programs;
use crate::images::files::put;
use crate::process::{command, run};
use crate::run::{repository, target_dir};
use crate::ui::{Ui, say};

/// Name of the package and of its unit.
pub const NAME: &str = "nestor-storage-infra";
const PROGRAM: &str = "storage-infra";
/// The configuration, which dpkg does not overwrite.
const CONFIGURATION: &str = "etc/nestor/storage-infra.env";
/// Packages of libraries that the program is linked to. At least the version of the build's host is required.
const LIBRARIES: [&str; 3] = ["libc6", "libgcc-s1", "libvirt0"];
/// Packages of programs: virsh, which the server runs, and kill, by which systemd reloads it.
const PROGRAMS: [&str; 2] = ["libvirt-clients", "procps"];
const DESCRIPTION: &str = "Nestor storage infra: volumes as files in pools, and disks of libvirt VMs
 A server with a REST API for Nestor's CSI driver of the management cluster. It keeps volumes as files
 in pools on reflink filesystems, and attaches them to the virtual machines of libvirt.
 .
 The service is not started before it is configured: see /etc/nestor/storage-infra.env.";

/// From which binaries to build the package.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Options {
    /// Use the binaries of the debug profile.
    #[arg(long)]
    debug: bool,
    /// Output folder. [default: target/packages]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// `cargo lab package`.
pub async fn package(ui: &Ui, options: &Options) -> Result<()> {
    cache::packages::ensure(ui).await?;
    let binaries = cache::cargo::build(ui, !options.debug).await?;
    let out = match &options.out {
        Some(out) => out.clone(),
        None => target_dir()?.join("packages"),
    };
    let built = build(ui, &binaries, crate::images::VERSION, &out).await?;
    say(built.display().to_string());
    Ok(())
}

/// Builds the package from a folder of our programs; returns its file.
pub async fn build(ui: &Ui, binaries: &Path, version: &str, out: &Path) -> Result<PathBuf> {
    let step = ui.step(format!("building the package {NAME}"));
    fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    let work = tempfile::tempdir_in(out)?;
    let root = work.path().join("root");
    fill(&root, binaries).await?;
    control(&root, version).await?;
    let epoch = epoch().await?;
    let file = out.join(format!("{NAME}_{version}_amd64.deb"));
    settle(&root, &epoch).await?;
    let mut build = command("dpkg-deb", ["--root-owner-group", "--threads-max=1", "-Zxz", "--build"]);
    run(build.arg(&root).arg(&file).env("SOURCE_DATE_EPOCH", &epoch)).await?;
    step.done();
    Ok(file)
}

/// Returns the root filesystem of a host with systemd, on which the package can be installed. It must not be modified.
pub async fn host(ui: &Ui) -> Result<PathBuf> {
    cache::packages::ensure(ui).await?;
    cache::debian_host(ui, &[&LIBRARIES[..], &PROGRAMS].concat()).await
}

/// A file of the package in the repository.
fn source(name: &str) -> Result<Vec<u8>> {
    let path = repository().join("hack/packages").join(PROGRAM).join(name);
    fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
}

async fn fill(root: &Path, binaries: &Path) -> Result<()> {
    let unit = format!("{NAME}.service");
    let docs = root.join("usr/share/doc").join(NAME);
    Programs::in_folder(binaries).copy(PROGRAM, &root.join("usr/bin")).await?;
    put(&root.join("usr/lib/systemd/system").join(&unit), &source(&unit)?, 0o644)?;
    put(&root.join(CONFIGURATION), &source("storage-infra.env")?, 0o640)?;
    put(&docs.join("copyright"), &source("copyright")?, 0o644)
}

async fn control(root: &Path, version: &str) -> Result<()> {
    let control = root.join("DEBIAN");
    let kibibytes =
        run(command("du", ["--summarize", "--apparent-size", "--block-size=1024"]).arg(root)).await?;
    let size = kibibytes.split_whitespace().next().context("du prints no size")?.to_owned();
    let depends = [libraries().await?, PROGRAMS.map(str::to_owned).to_vec()].concat().join(", ");
    let fields = [
        ("Package", NAME),
        ("Version", version),
        ("Architecture", "amd64"),
        ("Maintainer", "Nestor authors <maintainers@nestor.invalid>"),
        ("Section", "admin"),
        ("Priority", "optional"),
        ("Installed-Size", size.as_str()),
        ("Depends", depends.as_str()),
        ("Suggests", "libvirt-daemon-system, qemu-utils, xfsprogs, ceph-common"),
        ("Description", DESCRIPTION),
    ];
    let text: String = fields.iter().map(|(name, value)| format!("{name}: {value}\n")).collect();
    put(&control.join("control"), text.as_bytes(), 0o644)?;
    put(&control.join("conffiles"), format!("/{CONFIGURATION}\n").as_bytes(), 0o644)?;
    put(&control.join("md5sums"), md5sums(root).await?.as_bytes(), 0o644)?;
    for script in ["postinst", "prerm", "postrm"] {
        put(&control.join(script), &source(script)?, 0o755)?;
    }
    Ok(())
}

/// The libraries, with the versions of this host as minimum.
async fn libraries() -> Result<Vec<String>> {
    let mut query = command("dpkg-query", ["--show", "--showformat", "${Package} ${Version}\n"]);
    let listed = run(query.args(LIBRARIES)).await?;
    listed.lines().map(dependency).collect()
}

/// A dependency on at least the upstream version of a package, from a line such as `libc6 2.36-9+deb12u10`.
fn dependency(line: &str) -> Result<String> {
    let (name, version) = line.split_once(' ').with_context(|| format!("{line:?} has no version"))?;
    let upstream = version.rsplit_once('-').map_or(version, |(upstream, _)| upstream);
    Ok(format!("{name} (>= {upstream})"))
}

async fn md5sums(root: &Path) -> Result<String> {
    let line = "find usr -type f -print0 | LC_ALL=C sort --zero-terminated | xargs --null md5sum";
    run(command("sh", ["-ec", line]).current_dir(root)).await
}

/// The time of all files: `SOURCE_DATE_EPOCH`, or that of the commit.
async fn epoch() -> Result<String> {
    if let Ok(epoch) = std::env::var("SOURCE_DATE_EPOCH") {
        return Ok(epoch);
    }
    let mut log = command("git", ["log", "--max-count=1", "--format=%ct"]);
    Ok(run(log.current_dir(repository())).await?.trim().to_owned())
}

/// Gives all files the same time and all folders the same mode, whatever the umask is.
async fn settle(root: &Path, epoch: &str) -> Result<()> {
    fs::set_permissions(root, fs::Permissions::from_mode(0o755))?;
    let line = r#"find "$1" -type d -exec chmod 0755 {} + ; find "$1" -exec touch --date="@$2" {} +"#;
    run(command("sh", ["-ec", line, "sh"]).arg(root).arg(epoch)).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_upstream_version_of_a_library_is_required() {
        assert_eq!(dependency("libc6 2.36-9+deb12u10").unwrap(), "libc6 (>= 2.36)");
        assert_eq!(dependency("x 1:2-3-4").unwrap(), "x (>= 1:2-3)");
        dependency("x").unwrap_err();
    }

    #[test]
    fn the_configuration_sets_only_what_has_no_default_or_a_safer_value_for_a_new_installation() {
        let text = String::from_utf8(source("storage-infra.env").unwrap()).unwrap();
        let set: Vec<&str> = text.lines().filter(|line| line.starts_with("NESTOR_")).collect();
        let expected = [
            "NESTOR_DATA_DIR=/var/lib/nestor",
            "NESTOR_CLIENTS_WITHOUT_ROLE=refuse",
            "NESTOR_BACKUP_DIR=/var/backups/nestor",
        ];
        assert_eq!(set, expected);
        let unit = String::from_utf8(source("nestor-storage-infra.service").unwrap()).unwrap();
        assert!(
            unit.contains(&format!("EnvironmentFile=/{CONFIGURATION}\n")) && unit.contains("Type=notify\n")
        );
    }
}
