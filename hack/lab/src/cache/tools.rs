//! Go tools built from pinned modules: Kubernetes, etcd, the sidecars, csi-sanity, containerd, CNI plugins, helm,
//! Prometheus, and an OpenTelemetry collector.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tokio::process::Command;

use super::{Key, Kubernetes, entry};
use crate::process::{SHOWN, command, run, run_watched};
use crate::run::repository;
use crate::ui::Ui;

/// The module folders under `hack/tools` that a lab needs.
const MODULES: [&str; 2] = ["kubernetes", "containerd"];

/// Name of what is built from them.
const TOOLS: &str = "tools";

/// The module folder of KubeVirt.
const KUBEVIRT: &str = "kubevirt";

/// Minutes that one core works for everything that the first lab of a host builds.
const FIRST_RUN: usize = 30;

/// Returns the folder with all tools of a lab with this version of Kubernetes.
pub async fn tools(ui: &Ui, kubernetes: Kubernetes) -> Result<PathBuf> {
    let tools = modules(ui, TOOLS, &MODULES).await?;
    let Some(module) = kubernetes.module() else { return Ok(tools) };
    let programs = modules(ui, module, &[module]).await?;
    combined(&tools, &programs).await
}

/// Returns a folder with the programs of two folders. Those of the second replace those of the first.
async fn combined(first: &Path, second: &Path) -> Result<PathBuf> {
    let key = [first, second]
        .iter()
        .fold(Key::new("combined"), |key, folder| key.with("folder", folder.as_os_str().as_encoded_bytes()));
    entry(&format!("tools-{}", key.hex()), async |out: &Path| {
        for folder in [second, first] {
            link_missing(folder, out)?;
        }
        Ok(())
    })
    .await
}

/// Links the programs of a folder into another, except those that it has.
fn link_missing(from: &Path, to: &Path) -> Result<()> {
    for program in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let program = program?;
        let link = to.join(program.file_name());
        if !link.exists() {
            fs::hard_link(program.path(), &link)
                .with_context(|| format!("cannot make {}", link.display()))?;
        }
    }
    Ok(())
}

/// Returns the helm program. Only the chart tests need it, so it is built on demand.
pub async fn helm(ui: &Ui) -> Result<PathBuf> {
    Ok(modules(ui, "helm", &["helm"]).await?.join("helm"))
}

/// Returns the folder with the programs prometheus and promtool. Only the tests of alerts need them, so they are built
/// on demand.
pub async fn prometheus(ui: &Ui) -> Result<PathBuf> {
    modules(ui, "prometheus", &["prometheus"]).await
}

/// Returns the folder with the core controllers of Cluster API, the program `core`. Built on demand.
pub async fn cluster_api(ui: &Ui) -> Result<PathBuf> {
    modules(ui, "cluster-api", &["cluster-api"]).await
}

/// Returns the folder with KubeVirt's components, and the program `kubevirt`, which prints what they need. Built on demand.
pub(super) async fn kubevirt(ui: &Ui) -> Result<PathBuf> {
    modules(ui, "kubevirt", &[KUBEVIRT]).await
}

/// Returns the folder with the source of KubeVirt.
pub(super) async fn kubevirt_source() -> Result<PathBuf> {
    let module = repository().join("hack/tools").join(KUBEVIRT);
    let folder = run(&mut go(&module, &["list", "-m", "-f", "{{.Dir}}", "kubevirt.io/kubevirt"])).await?;
    Ok(PathBuf::from(folder.trim()))
}

/// Returns the OpenTelemetry collector. Only the tests of traces need it, so it is built on demand.
pub async fn otelcol(ui: &Ui) -> Result<PathBuf> {
    Ok(modules(ui, "otelcol", &["otelcol"]).await?.join("otelcol"))
}

async fn modules(ui: &Ui, kind: &str, modules: &[&str]) -> Result<PathBuf> {
    let go = run(&mut command("go", ["version"])).await.context(
        "the lab builds Kubernetes from source and needs Go (see the go line in hack/tools/*/go.mod)",
    )?;
    let mut key = Key::new(kind).with("go", go.trim().as_bytes()).with("version", &[1]);
    for module in modules {
        let dir = repository().join("hack/tools").join(module);
        // Most modules only name tools of others.
        let sources = ["main.go"].into_iter().filter(|file| dir.join(file).exists());
        for file in ["go.mod", "go.sum"].into_iter().chain(sources) {
            let bytes = fs::read(dir.join(file))
                .with_context(|| format!("cannot read {}", dir.join(file).display()))?;
            key = key.with(&format!("{module}/{file}"), &bytes);
        }
    }
    entry(&format!("{kind}-{}", key.hex()), async |out: &Path| {
        if kind == TOOLS {
            ui.line(first_run(std::thread::available_parallelism()?.get()));
        }
        for module in modules {
            build(ui, &repository().join("hack/tools").join(module), out).await?;
        }
        Ok(())
    })
    .await
}

async fn build(ui: &Ui, module: &Path, out: &Path) -> Result<()> {
    let manifest = fs::read_to_string(module.join("go.mod"))?;
    let name = module.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut step = ui.step(format!("building {name} tools with Go (takes minutes the first time)"));
    let tags = build_tags(&name);
    let mut list = go(module, &["list", "-deps", "-tags", tags, "tool"]);
    let packages = run_watched(&mut list, SHOWN, |line| step.message(line)).await?.lines().count();
    let started = Instant::now();
    let mut compiled = 0;
    let flags = linker_flags(&manifest);
    // With -v, each compiled package is a line. To leave out DWARF, which nobody reads here, takes an eighth less CPU time.
    let args =
        ["build", "-v", "-trimpath", "-buildvcs=false", "-gcflags=all=-dwarf=false", "-ldflags", &flags];
    let mut build = go(module, &args);
    build.args(["-tags", tags, "-o"]);
    run_watched(build.arg(out).arg("tool"), SHOWN, |line| {
        compiled += 1;
        let progress = progress(compiled, packages, started.elapsed());
        step.message(format!("{progress}, now {line}"));
    })
    .await?;
    step.done();
    Ok(())
}

fn go(module: &Path, args: &[&str]) -> Command {
    let mut go = command("go", args);
    // virt-launcher links to libvirt.
    let cgo = if module.ends_with(KUBEVIRT) { "1" } else { "0" };
    go.current_dir(module).env("CGO_ENABLED", cgo).env("GOFLAGS", "-mod=readonly");
    // Each compiler lives for seconds: collecting its garbage only near 1 GiB takes a quarter less CPU time.
    go.env("GOGC", "off").env("GOMEMLIMIT", "1GiB");
    go
}

fn first_run(cores: usize) -> String {
    let minutes = FIRST_RUN.div_ceil(cores);
    format!(
        "the first lab of this host needs Kubernetes, containerd and an image of the VMs: about {minutes} min on {cores} cores"
    )
}

/// How far a build is, and how long it still takes at its rate so far. Packages that are already built are not compiled
/// again: it can end early.
fn progress(compiled: usize, packages: usize, elapsed: Duration) -> String {
    let left = elapsed.mul_f64(packages.saturating_sub(compiled) as f64 / compiled.max(1) as f64);
    format!("{compiled} of {packages} packages, at most {} min left", left.as_secs().div_ceil(60))
}

/// Build tags of a module: without the service discovery of clouds, Prometheus has a fifth fewer packages.
fn build_tags(module: &str) -> &'static str {
    match module {
        "prometheus" => "remove_all_sd",
        _ => "",
    }
}

/// Linker flags that set Kubernetes' version, which clients compare; without them it is v0.0.0.
fn linker_flags(manifest: &str) -> String {
    let mut flags = "-s -w".to_owned();
    if let Some(version) = required_version(manifest, "k8s.io/kubernetes") {
        let mut parts = version.trim_start_matches('v').split('.');
        let (major, minor) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        for (field, value) in
            [("gitVersion", version), ("gitMajor", major), ("gitMinor", minor), ("gitTreeState", "clean")]
        {
            flags.push_str(&format!(" -X k8s.io/component-base/version.{field}={value}"));
        }
    }
    flags
}

fn required_version<'a>(manifest: &'a str, module: &str) -> Option<&'a str> {
    manifest.lines().find_map(|line| {
        let mut words = line.trim().trim_start_matches("require ").split_whitespace();
        (words.next()? == module).then(|| words.next()).flatten().filter(|version| version.starts_with('v'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kubernetes_is_built_with_the_version_in_go_mod() {
        let manifest = "require (\n\tk8s.io/kubernetes/x v9.9.9\n\tk8s.io/kubernetes v1.36.3 // indirect\n)";
        assert!(linker_flags(manifest).ends_with(
            "gitVersion=v1.36.3 -X k8s.io/component-base/version.gitMajor=1 \
             -X k8s.io/component-base/version.gitMinor=36 -X k8s.io/component-base/version.gitTreeState=clean"
        ));
        assert_eq!(linker_flags("module a"), "-s -w");
    }

    #[test]
    fn the_first_run_is_faster_with_more_cores() {
        assert!(first_run(2).ends_with("about 15 min on 2 cores"));
        assert!(first_run(12).ends_with("about 3 min on 12 cores"));
    }

    #[test]
    fn the_progress_of_a_build_has_its_rest_at_the_rate_so_far() {
        let at = |compiled| progress(compiled, 300, Duration::from_secs(120));
        assert_eq!(at(100), "100 of 300 packages, at most 4 min left");
        assert_eq!(at(300), "300 of 300 packages, at most 0 min left");
        // Lines that are no packages count too.
        assert_eq!(at(301), "301 of 300 packages, at most 0 min left");
    }
}
