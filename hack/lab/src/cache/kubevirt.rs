//! KubeVirt: its components from their Go modules, the root filesystem of the management cluster's node, which is that of
//! virt-launcher's image too, and the image with the disks of the guests' VMs.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::json;

use super::image::install_debian;
use super::oci::write_images;
use super::{BaseImage, Key, cargo, entry, packages, tools};
use crate::oci::Layout;
use crate::process::{command, run};
use crate::ui::Ui;

/// The release of Debian with the versions of libvirt and QEMU that KubeVirt needs.
const SUITE: &str = "trixie";
/// Debian packages of virt-launcher's image and of the node.
const PACKAGES: [&str; 15] = [
    "libvirt-daemon",
    "libvirt-daemon-driver-qemu",
    "libvirt-daemon-log",
    "libvirt-clients",
    "qemu-system-x86",
    "qemu-utils",
    "seabios",
    "iproute2",
    "kmod",
    "libcap2-bin",
    "mount",
    "nftables",
    "procps",
    "runc",
    "xorriso",
];
/// Programs in virt-launcher's image, and virt-chroot, which virt-handler runs on the node.
const PROGRAMS: [&str; 6] =
    ["virt-launcher", "virt-launcher-monitor", "virt-probe", "virt-freezer", "virt-tail", "virt-chroot"];
/// Files of virt-launcher's image in the source of KubeVirt, with their modes.
const SETTINGS: [(&str, &str, u32); 4] = [
    ("qemu.conf", "etc/libvirt/qemu.conf", 0o644),
    ("virtqemud.conf", "etc/libvirt/virtqemud.conf", 0o644),
    ("nsswitch.conf", "etc/nsswitch.conf", 0o644),
    ("qemu", "etc/libvirt/hooks/qemu", 0o755),
];
/// Debian has libvirtd instead.
const VIRTQEMUD: &str = include_str!("../../kubevirt/virtqemud");
const SYSLINUX: &str = include_str!("../../kubevirt/syslinux.cfg");
/// User and group of QEMU in virt-launcher's image.
const QEMU: u32 = 107;
const BOOT_DISK: &str = "24M";
/// Name of virt-launcher's image.
const LAUNCHER: &str = "localhost/virt-launcher:1";
/// Name of the image with the disks of the VMs.
const DISKS: &str = "localhost/node-disks:1";

/// What a lab with KubeVirt is made from.
#[derive(Debug, Clone)]
pub(crate) struct KubeVirt {
    /// The folder with its components, and the program `kubevirt`.
    pub(crate) programs: PathBuf,
    /// The node's root filesystem.
    pub(crate) root: PathBuf,
    /// The CSI driver of the management cluster.
    pub(crate) file_csi: PathBuf,
    /// Archives of container images.
    pub(crate) archives: [PathBuf; 3],
}

impl KubeVirt {
    /// The name of virt-launcher's image.
    pub(crate) const LAUNCHER: &str = LAUNCHER;
    /// The name of the image with a VM's disks: `/disk/boot.img` and `/disk/root.qcow2`.
    pub(crate) const DISKS: &str = DISKS;
}

/// Returns what KubeVirt needs, with VMs that boot this image with these further arguments of the kernel.
pub(crate) async fn kubevirt(ui: &Ui, image: &BaseImage, cmdline: &str) -> Result<KubeVirt> {
    packages::ensure_kubevirt(ui).await?;
    let programs = tools::kubevirt(ui).await?;
    let node = node(ui, &programs).await?;
    let disks = disks(ui, image, cmdline).await?;
    Ok(KubeVirt {
        programs,
        file_csi: cargo::build_file_csi(ui).await?,
        root: node.join("root"),
        archives: [node.join("images.tar"), node.join("launcher.tar"), disks.join("disks.tar")],
    })
}

async fn node(ui: &Ui, programs: &Path) -> Result<PathBuf> {
    let busybox = Path::new("/bin/busybox");
    let key = Key::new("kubevirt-node")
        .with("packages", PACKAGES.join(" ").as_bytes())
        .with("suite", SUITE.as_bytes())
        .with("programs", programs.as_os_str().as_encoded_bytes())
        .with("virtqemud", VIRTQEMUD.as_bytes())
        .with_file(busybox)?;
    entry(&format!("kubevirt-node-{}", key.hex()), async |out: &Path| {
        let step = ui.step("root filesystem of KubeVirt's node and of virt-launcher");
        let (root, work) = (out.join("root"), out.join("work"));
        install_debian(SUITE, &PACKAGES, &root).await?;
        add_programs(programs, &root).await?;
        add_files(&root).await?;
        let mut layout = Layout::create(work.join("layout"))?;
        let layer = layout.layer_with_owners(&root).await?;
        let path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
        let config = json!({
            "architecture": "amd64", "os": "linux",
            "config": {"Entrypoint": ["/usr/bin/virt-launcher"], "Env": [path]},
        });
        layout.image(LAUNCHER, config, &[layer])?;
        layout.archive(&out.join("launcher.tar")).await?;
        write_images(busybox, &work.join("images"), &out.join("images.tar")).await?;
        fs::remove_dir_all(&work)?;
        step.done();
        Ok(())
    })
    .await
}

async fn add_programs(programs: &Path, root: &Path) -> Result<()> {
    let folder = root.join("usr/bin");
    for name in PROGRAMS {
        fs::copy(programs.join(name), folder.join(name)).with_context(|| format!("cannot copy {name}"))?;
    }
    // It runs in containers without a C library.
    let source = tools::kubevirt_source().await?.join("cmd/container-disk-v2alpha/main.c");
    run(command("gcc", ["-static", "-O2", "-o"]).arg(folder.join("container-disk")).arg(source)).await?;
    // As QEMU's user it serves DHCP.
    let setcap = ["/usr/sbin/setcap", "cap_net_bind_service=+ep", "/usr/bin/virt-launcher-monitor"];
    run(command("chroot", [root]).args(setcap)).await.map(drop)
}

async fn add_files(root: &Path) -> Result<()> {
    for (file, line) in [
        ("etc/passwd", format!("qemu:x:{QEMU}:{QEMU}::/:/bin/sh\n")),
        ("etc/group", format!("qemu:x:{QEMU}:\n")),
    ] {
        fs::File::options().append(true).open(root.join(file))?.write_all(line.as_bytes())?;
    }
    let source = tools::kubevirt_source().await?.join("cmd/virt-launcher");
    for (from, to, mode) in SETTINGS {
        let text = fs::read(source.join(from)).with_context(|| format!("KubeVirt has no {from}"))?;
        write(&root.join(to), &text, mode)?;
    }
    write(&root.join("usr/sbin/virtqemud"), VIRTQEMUD.as_bytes(), 0o755)?;
    // containerd and kubelet give pods copies.
    write(&root.join("etc/hosts"), b"127.0.0.1 localhost\n", 0o644)?;
    write(&root.join("etc/resolv.conf"), b"", 0o644)
}

fn write(path: &Path, text: &[u8], mode: u32) -> Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let _ = fs::remove_file(path);
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(mode))?)
}

async fn disks(ui: &Ui, image: &BaseImage, cmdline: &str) -> Result<PathBuf> {
    let settings = SYSLINUX.replace("${CMDLINE}", cmdline);
    let key = Key::new("kubevirt-disks")
        .with("image", image.root.as_os_str().as_encoded_bytes())
        .with("settings", settings.as_bytes());
    entry(&format!("kubevirt-disks-{}", key.hex()), async |out: &Path| {
        let step = ui.step("image with the disks of KubeVirt's virtual machines");
        let (root, work) = (out.join("root"), out.join("work"));
        let folder = root.join("disk");
        fs::create_dir_all(&folder)?;
        boot_disk(image, &settings, &work, &folder.join("boot.img")).await?;
        let mut convert = command("qemu-img", ["convert", "-f", "raw", "-O", "qcow2"]);
        run(convert.arg(&image.root).arg(folder.join("root.qcow2"))).await?;
        for disk in fs::read_dir(&folder)? {
            let disk = disk?.path();
            chown(&disk, Some(QEMU), Some(QEMU))?;
            fs::set_permissions(&disk, fs::Permissions::from_mode(0o440))?;
        }
        let mut layout = Layout::create(work.join("layout"))?;
        let layer = layout.layer_with_owners(&root).await?;
        layout.image(DISKS, json!({"architecture": "amd64", "os": "linux", "config": {}}), &[layer])?;
        layout.archive(&out.join("disks.tar")).await?;
        fs::remove_dir_all(&work)?;
        fs::remove_dir_all(&root)?;
        step.done();
        Ok(())
    })
    .await
}

/// A FAT filesystem with a boot loader, the kernel and the initramfs: KubeVirt does not plug disks into VMs whose kernel it
/// is given.
async fn boot_disk(image: &BaseImage, settings: &str, work: &Path, disk: &Path) -> Result<()> {
    fs::create_dir_all(work)?;
    let file = work.join("syslinux.cfg");
    fs::write(&file, settings)?;
    run(command("truncate", ["--size", BOOT_DISK]).arg(disk)).await?;
    run(command("mkfs.vfat", ["-F", "16"]).arg(disk)).await?;
    for (from, to) in
        [(&image.kernel, "::vmlinuz"), (&image.initramfs, "::initramfs"), (&file, "::syslinux.cfg")]
    {
        run(command("mcopy", ["-i"]).arg(disk).arg(from).arg(to)).await?;
    }
    run(command("syslinux", ["--install"]).arg(disk)).await.map(drop)
}
