//! Debian packages that the lab needs on the host.

use std::process::Stdio;

use anyhow::{Context, Result, bail};

use crate::process::{command, run};
use crate::ui::Ui;

/// Package names, and what each is needed for.
const PACKAGES: [(&str, &str); 21] = [
    ("libvirt-daemon", "runs the virtual machines"),
    ("libvirt-daemon-driver-qemu", "runs the virtual machines"),
    ("libvirt-clients", "virsh, which storage-infra uses to set disk limits"),
    ("libvirt-dev", "storage-infra links to libvirt"),
    ("pkg-config", "storage-infra's build finds libvirt with it"),
    ("qemu-system-x86", "emulator of the virtual machines"),
    ("qemu-utils", "disks of the virtual machines"),
    ("linux-image-cloud-amd64", "kernel of the virtual machines"),
    ("mmdebstrap", "root filesystem of the virtual machines"),
    ("busybox-static", "initramfs and container images of the virtual machines"),
    ("cpio", "initramfs of the virtual machines"),
    ("e2fsprogs", "root disk of the virtual machines"),
    ("xfsprogs", "storage pools"),
    ("btrfs-progs", "a filesystem type of volumes"),
    ("util-linux", "losetup, fsfreeze, unshare, setsid"),
    ("libfaketime", "a wall clock that jumps, in tests of storage-infra"),
    ("postgresql", "the catalog of several storage-infra servers"),
    ("iproute2", "network of the virtual machines"),
    ("kmod", "module dependencies"),
    ("runc", "test of the container images"),
    ("systemd", "test of storage-infra's unit"),
];

/// What only the tests in a browser need.
const BROWSER: [(&str, &str); 2] =
    [("chromium", "tests of web pages"), ("fonts-liberation2", "text in the tests of web pages")];

/// What only programs and images for arm64 need.
const ARM64: [(&str, &str); 3] = [
    ("gcc-aarch64-linux-gnu", "compiler and linker for arm64"),
    ("libc6-dev-arm64-cross", "headers of the C library for arm64"),
    ("qemu-user-static", "starts programs of arm64 in the test of the images"),
];

/// What only the test of the dashboards needs.
const NODE: [(&str, &str); 2] =
    [("nodejs", "builds the pages of Perses"), ("npm", "fetches the packages of these pages")];

/// What only schemathesis needs.
const PYTHON: [(&str, &str); 1] = [("python3-venv", "schemathesis, which tests storage-infra's API")];

/// What only a lab with KubeVirt needs.
const KUBEVIRT: [(&str, &str); 4] = [
    ("gcc", "compiler of KubeVirt's virt-launcher and container-disk"),
    ("syslinux", "boot disk of KubeVirt's virtual machines"),
    ("mtools", "boot disk of KubeVirt's virtual machines"),
    ("dosfstools", "boot disk of KubeVirt's virtual machines"),
];

/// What only the tests with a Ceph cluster need.
const CEPH: [(&str, &str); 5] = [
    ("ceph-mon", "monitor of the Ceph cluster"),
    ("ceph-mgr", "manager of the Ceph cluster"),
    ("ceph-osd", "disks of the Ceph cluster"),
    ("ceph-common", "rbd and the Python bindings, which storage-infra uses for pools of the engine rbd"),
    ("qemu-block-extra", "QEMU opens RBD images with it"),
];

/// What only the bench `io` needs.
const FIO: [(&str, &str); 1] = [("fio", "reads and writes disks in the bench io")];

/// Ensures that all packages of a lab are installed: runs apt-get as root, otherwise fails with the command to run.
pub async fn ensure(ui: &Ui) -> Result<()> {
    ensure_all(ui, &PACKAGES).await
}

/// Ensures that a browser is installed.
pub async fn ensure_browser(ui: &Ui) -> Result<()> {
    ensure_all(ui, &BROWSER).await
}

/// Ensures that a compiler and an emulator for arm64 are installed.
pub(crate) async fn ensure_arm64(ui: &Ui) -> Result<()> {
    ensure_all(ui, &ARM64).await
}

/// Ensures that the programs of a Ceph cluster and of the VMs that use it are installed.
pub(crate) async fn ensure_ceph(ui: &Ui) -> Result<()> {
    ensure(ui).await?;
    ensure_all(ui, &CEPH).await
}

/// Ensures that fio is installed.
pub async fn ensure_fio(ui: &Ui) -> Result<()> {
    ensure_all(ui, &FIO).await
}

/// Ensures that what builds KubeVirt and the boot disk of its VMs is installed.
pub(crate) async fn ensure_kubevirt(ui: &Ui) -> Result<()> {
    ensure(ui).await?;
    ensure_all(ui, &KUBEVIRT).await
}

/// Ensures that Node.js and npm are installed.
pub(crate) async fn ensure_node(ui: &Ui) -> Result<()> {
    ensure_all(ui, &NODE).await
}

/// Ensures that Python with its module venv is installed.
pub(crate) async fn ensure_python(ui: &Ui) -> Result<()> {
    ensure_all(ui, &PYTHON).await
}

async fn ensure_all(ui: &Ui, packages: &[(&'static str, &'static str)]) -> Result<()> {
    let missing = missing(packages).await?;
    if missing.is_empty() {
        return Ok(());
    }
    let words = missing.iter().map(|(name, why)| format!("{name} ({why})")).collect::<Vec<_>>().join(", ");
    let names: Vec<&str> = missing.iter().map(|(name, _)| *name).collect();
    let install = format!("apt-get install --yes --no-install-recommends {}", names.join(" "));
    if !rustix::process::geteuid().is_root() {
        bail!(
            "Debian packages are missing: {words}. Install them with: sudo apt-get update && sudo {install}"
        );
    }
    ui.line(format!("missing Debian packages: {words}"));
    for line in ["apt-get update", &install] {
        ui.line(format!("running: {line}"));
        let step = ui.step(line);
        let mut words = line.split(' ');
        let mut apt = command(words.next().unwrap_or_default(), words);
        apt.env("DEBIAN_FRONTEND", "noninteractive");
        run(&mut apt).await?;
        step.done();
    }
    Ok(())
}

async fn missing(packages: &[(&'static str, &'static str)]) -> Result<Vec<(&'static str, &'static str)>> {
    let mut query = command("dpkg-query", ["--show", "--showformat", "${Package} ${db:Status-Status}\n"]);
    query.args(packages.iter().map(|(name, _)| name));
    // dpkg-query fails if a package is unknown, but still lists the others.
    let output = query.stdin(Stdio::null()).output().await;
    let output = output.context("cannot run dpkg-query: the lab needs Debian (12 or later)")?;
    let listed = String::from_utf8_lossy(&output.stdout).into_owned();
    let installed: Vec<&str> = listed.lines().filter_map(|line| line.strip_suffix(" installed")).collect();
    Ok(packages.iter().copied().filter(|(name, _)| !installed.contains(name)).collect())
}
