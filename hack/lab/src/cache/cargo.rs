//! Cargo builds: Nestor's programs, in the target folder that the lab itself is in, and development tools.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use tokio::process::Command;

use super::entry;
use crate::architecture::{Architecture, Cross};
use crate::images::Base;
use crate::process::{command, run, run_watched};
use crate::run::{repository, target_dir};
use crate::ui::Ui;

/// The crates whose programs a lab runs.
const CRATES: [&str; 8] = [
    "gc-csi",
    "gc-csi-node",
    "mgmt-csi",
    "mgmt-csi-node",
    "vm-operator-shim",
    "nestor-console",
    "storage-infra",
    "kubectl-nestor",
];

/// Those of a lab without virtual machines, where csi-sanity and a bench start node plugins. Each release build of a program
/// takes minutes.
const WITHOUT_VMS: [&str; 5] = ["gc-csi", "gc-csi-node", "mgmt-csi", "vm-operator-shim", "storage-infra"];

/// The crate with the features of the lab's dependencies: the lab depends on it, the programs do not.
const FEATURE_UNION: &str = "feature-union";

/// Installs a development tool once and returns its folder.
pub async fn tool(ui: &Ui, name: &str, version: &str) -> Result<PathBuf> {
    tool_with(ui, name, version, &[]).await
}

/// The same, with further arguments of `cargo install`.
pub(crate) async fn tool_with(ui: &Ui, name: &str, version: &str, more: &[&str]) -> Result<PathBuf> {
    entry(&format!("{name}-{version}"), async |out: &Path| {
        let mut install = command(&program(), ["install", "--locked", "--version", version, "--root"]);
        install.arg(out).arg(name).args(more);
        finish(ui, &format!("building {name} {version}"), &mut install).await
    })
    .await
}

/// Builds Nestor's programs and returns their folder.
pub async fn build(ui: &Ui, release: bool) -> Result<PathBuf> {
    if release { build_release(ui, &CRATES).await } else { build_debug(ui, &CRATES).await }
}

/// The same for a lab without virtual machines: of the release, only the programs that it runs. [`build_more`] builds others.
pub(crate) async fn build_without_vms(ui: &Ui, release: bool) -> Result<PathBuf> {
    if release { build_release(ui, &WITHOUT_VMS).await } else { build_debug(ui, &CRATES).await }
}

/// Builds a program into the folder with the programs of a lab, if that lab was started without it.
pub(crate) async fn build_more(ui: &Ui, binaries: &Path, program: &str) -> Result<()> {
    if *binaries == target_dir()?.join(profile(true)) {
        // With the others, because the features of the dependencies, which are compiled already, are those of all crates.
        build_release(ui, &[&WITHOUT_VMS[..], &[program]].concat()).await?;
    }
    Ok(())
}

async fn build_release(ui: &Ui, crates: &[&str]) -> Result<PathBuf> {
    build_in(ui, &repository(), crates, &target_dir()?, true).await
}

/// Builds crates of this repository so that they share the dependencies that are compiled for the lab.
pub(crate) async fn build_debug(ui: &Ui, crates: &[&str]) -> Result<PathBuf> {
    let crates = [crates, &[FEATURE_UNION]].concat();
    build_in(ui, &repository(), &crates, &target_dir()?, false).await
}

/// Builds storage-infra with the release profile.
pub(crate) async fn build_storage_infra(ui: &Ui) -> Result<PathBuf> {
    build_release(ui, &["storage-infra"]).await
}

/// Builds the lab's own CSI driver and returns its program.
pub(crate) async fn build_file_csi(ui: &Ui) -> Result<PathBuf> {
    Ok(build_debug(ui, &["file-csi"]).await?.join("file-csi"))
}

/// Builds Nestor's programs for an architecture and returns their folder.
pub async fn build_for(ui: &Ui, release: bool, architecture: Architecture) -> Result<PathBuf> {
    match architecture.cross() {
        None => build(ui, release).await,
        Some(cross) => cross_build(ui, release, architecture, cross).await,
    }
}

/// Cross-compiles with Debian's compiler, and links to the libraries of Debian packages of the architecture.
async fn cross_build(ui: &Ui, release: bool, architecture: Architecture, cross: Cross) -> Result<PathBuf> {
    super::packages::ensure_arm64(ui).await?;
    standard_library(ui, cross).await?;
    let libraries = Base::of(ui, architecture, &["libvirt-dev"]).await?.root;
    let folder = libraries.join("usr/lib").join(cross.gnu);
    let target = target_dir()?;
    let mut cargo = build_command(&repository(), &CRATES, &target, release);
    cargo.args(["--target", cross.target]);
    cargo.env(cross.variable("CC"), cross.tool("gcc")).env(cross.variable("AR"), cross.tool("ar"));
    cargo.env(architecture.setting("LINKER"), cross.tool("gcc"));
    // Libraries that libvirt is linked to.
    let mut flags = vec![format!("-Clink-arg=-Wl,-rpath-link,{}", folder.display())];
    if release {
        flags.extend(without_paths(&repository(), &target)?);
    }
    cargo.env(architecture.setting("RUSTFLAGS"), flags.join(" "));
    cargo.env("PKG_CONFIG_ALLOW_CROSS", "1").env("PKG_CONFIG_SYSROOT_DIR", &libraries);
    cargo.env("PKG_CONFIG_LIBDIR", folder.join("pkgconfig"));
    finish(ui, &format!("building Nestor for {} with cargo", architecture.name()), &mut cargo).await?;
    Ok(target.join(cross.target).join(profile(release)))
}

/// Ensures that Rust's standard library for the target is installed: rustup installs it.
async fn standard_library(ui: &Ui, cross: Cross) -> Result<()> {
    let printed = run(&mut command("rustc", ["--print", "target-libdir", "--target", cross.target])).await?;
    if Path::new(printed.trim()).is_dir() {
        return Ok(());
    }
    let step = ui.step(format!("installing Rust's standard library for {}", cross.target));
    run(&mut command("rustup", ["target", "add", cross.target])).await.with_context(|| {
        format!(
            "Rust's standard library for {} is missing, and rustup cannot install it: use a toolchain of rustup, or \
             install the library as your toolchain was installed",
            cross.target
        )
    })?;
    step.done();
    Ok(())
}

/// Builds crates of a checkout into a target folder, and returns the folder of their programs.
pub(crate) async fn build_in(
    ui: &Ui,
    sources: &Path,
    crates: &[&str],
    target: &Path,
    release: bool,
) -> Result<PathBuf> {
    let mut cargo = build_command(sources, crates, target, release);
    if release {
        let (name, flags) = release_flags(sources, target)?;
        cargo.env(name, flags);
    }
    finish(ui, "building Nestor with cargo", &mut cargo).await?;
    Ok(target.join(profile(release)))
}

fn build_command(sources: &Path, crates: &[&str], target: &Path, release: bool) -> Command {
    let mut cargo = command(&program(), ["build"]);
    cargo.current_dir(sources);
    cargo.args(crates.iter().flat_map(|name| ["-p", name])).arg("--target-dir").arg(target);
    if release {
        cargo.arg("--release");
    }
    cargo
}

/// The variable with the compiler's flags for programs of the release profile for this host.
fn release_flags(sources: &Path, target: &Path) -> Result<(String, String)> {
    let flags = without_paths(sources, target)?.join(" ");
    Ok((Architecture::default().setting("RUSTFLAGS"), flags))
}

/// Flags of rustc by which programs do not contain the folders of the build, so that builds in different folders give the
/// same bytes. Of several prefixes that match a path, rustc uses the last.
fn without_paths(sources: &Path, target: &Path) -> Result<[String; 3]> {
    let cargo_home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let cargo_home = cargo_home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let cargo_home = cargo_home.context("neither CARGO_HOME nor HOME is set")?;
    Ok([(sources, "/nestor"), (target, "/nestor/target"), (cargo_home.as_path(), "/cargo")]
        .map(|(folder, name)| format!("--remap-path-prefix={}={name}", folder.display())))
}

/// The folder of a profile's programs.
fn profile(release: bool) -> &'static str {
    if release { "release" } else { "debug" }
}

pub(crate) fn program() -> String {
    std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned())
}

/// Runs cargo until it exits and shows its progress.
async fn finish(ui: &Ui, what: &str, cargo: &mut Command) -> Result<()> {
    let mut step = ui.step(what);
    // All of its output: errors of the compiler are long.
    run_watched(cargo, usize::MAX, |line| step.message(line.trim())).await.context(what.to_owned())?;
    step.done();
    Ok(())
}
