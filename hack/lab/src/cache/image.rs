//! Base image of the virtual machines: minimal Debian with its cloud kernel, kubelet, containerd and CNI plugins.
//!
//! It holds nothing that is specific to a lab or a VM; that is on each VM's second disk.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::oci::write_images;
use super::{Key, entry};
use crate::process::{command, run};
use crate::ui::Ui;

/// Debian packages installed in the VM.
const INCLUDE: [&str; 12] = [
    "runc",
    "kmod",
    "procps",
    "iproute2",
    "iptables",
    "mount",
    "util-linux",
    "e2fsprogs",
    "xfsprogs",
    "btrfs-progs",
    "udev",
    "ca-certificates",
];
/// Modules that the initramfs loads to reach the root disk.
const EARLY_MODULES: [&str; 4] = ["virtio_pci", "virtio_blk", "crc32c_generic", "ext4"];
const NODE_TOOLS: [&str; 4] = ["kubelet", "containerd", "containerd-shim-runc-v2", "ctr"];
const CNI_PLUGINS: [&str; 3] = ["bridge", "host-local", "loopback"];
/// Size of the root disk. The file is sparse.
const ROOT_SIZE: &str = "4G";

const INIT: &str = include_str!("../../image/init");
const BOOT: &str = include_str!("../../image/boot");
const FSTAB: &str = include_str!("../../image/fstab");
const CONTAINERD: &str = include_str!("../../image/containerd.toml");
const CNI: &str = include_str!("../../image/cni.conflist");

/// The files of the base image. They are never modified after the build.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BaseImage {
    /// The kernel.
    pub kernel: PathBuf,
    /// The initramfs.
    pub initramfs: PathBuf,
    /// The root disk, raw.
    pub root: PathBuf,
}

/// Returns the Debian system of the base image; installs it if its inputs changed. Needs no tools, so that they can be built at
/// the same time.
pub async fn debian_root(ui: &Ui) -> Result<PathBuf> {
    let suite = debian_suite()?;
    let key =
        Key::new("debian").with("packages", INCLUDE.join(" ").as_bytes()).with("suite", suite.as_bytes());
    let dir = entry(&format!("debian-{}", key.hex()), async |out: &Path| {
        let step = ui.step("installing Debian for the virtual machines");
        install_debian(&suite, &INCLUDE, &out.join("root")).await?;
        step.done();
        Ok(())
    })
    .await?;
    Ok(dir.join("root"))
}

/// Returns the base image with this Debian system; builds it if its inputs changed.
pub async fn base_image(ui: &Ui, debian: &Path, tools: &Path) -> Result<BaseImage> {
    let kernel = newest_cloud_kernel()?;
    let busybox = Path::new("/bin/busybox");
    let key = Key::new("image")
        .with("debian", debian.to_string_lossy().as_bytes())
        .with("kernel", kernel.as_bytes())
        .with("size", ROOT_SIZE.as_bytes())
        .with("modules", EARLY_MODULES.join(" ").as_bytes())
        .with("init", INIT.as_bytes())
        .with("boot", BOOT.as_bytes())
        .with("fstab", FSTAB.as_bytes())
        .with("containerd", CONTAINERD.as_bytes())
        .with("cni", CNI.as_bytes())
        .with("tools", tools.to_string_lossy().as_bytes())
        .with_file(busybox)?;
    let dir = entry(&format!("image-{}", key.hex()), async |out: &Path| {
        let step = ui.step("building the base image of the virtual machines");
        let root = out.join("root");
        copy_tree(debian, &root).await?;
        let modules = root.join("lib/modules");
        fs::create_dir_all(&modules)?;
        copy_tree(&Path::new("/lib/modules").join(&kernel), &modules.join(&kernel)).await?;
        add_tools(tools, &root)?;
        let work = out.join("work");
        fs::create_dir_all(&work)?;
        write_images(busybox, &work.join("images"), &root.join("opt/images.tar")).await?;
        initramfs(&kernel, busybox, &work.join("initramfs"), &out.join("initramfs")).await?;
        fs::copy(format!("/boot/vmlinuz-{kernel}"), out.join("vmlinuz")).context("cannot copy the kernel")?;
        make_disk(&root, &out.join("root.raw")).await?;
        fs::remove_dir_all(&work)?;
        fs::remove_dir_all(&root)?;
        step.done();
        Ok(())
    })
    .await?;
    Ok(BaseImage {
        kernel: dir.join("vmlinuz"),
        initramfs: dir.join("initramfs"),
        root: dir.join("root.raw"),
    })
}

/// Installs a minimal Debian with these packages, without documentation.
pub(super) async fn install_debian(suite: &str, packages: &[&str], root: &Path) -> Result<()> {
    let mut debian = command("mmdebstrap", ["--quiet", "--variant=minbase", "--mode=root"]);
    debian.arg(format!("--include={}", packages.join(",")));
    for excluded in ["man", "doc", "locale", "info"] {
        debian.arg(format!("--dpkgopt=path-exclude=/usr/share/{excluded}/*"));
    }
    run(debian.arg(suite).arg(root)).await.map(drop)
}

fn add_tools(tools: &Path, root: &Path) -> Result<()> {
    let copies =
        NODE_TOOLS.iter().map(|name| (*name, "opt/bin")).chain(CNI_PLUGINS.map(|name| (name, "opt/cni/bin")));
    for (name, folder) in copies {
        fs::create_dir_all(root.join(folder))?;
        fs::copy(tools.join(name), root.join(folder).join(name))
            .with_context(|| format!("cannot copy tool {name}"))?;
    }
    for (path, text, mode) in [
        ("sbin/boot", BOOT, 0o755),
        ("etc/fstab", FSTAB, 0o644),
        ("etc/containerd/config.toml", CONTAINERD, 0o644),
        ("etc/cni/net.d/10-lab.conflist", CNI, 0o644),
    ] {
        write_file(&root.join(path), text, mode)?;
    }
    Ok(())
}

fn write_file(path: &Path, text: &str, mode: u32) -> Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(mode))?)
}

async fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    run(command("cp", ["--archive", "--no-target-directory"]).arg(from).arg(to)).await.map(drop)
}

/// Writes an uncompressed cpio archive: busybox, the modules numbered in load order, and our init.
async fn initramfs(kernel: &str, busybox: &Path, work: &Path, archive: &Path) -> Result<()> {
    for folder in ["bin", "proc", "sys", "dev", "mnt", "modules"] {
        fs::create_dir_all(work.join(folder))?;
    }
    fs::copy(busybox, work.join("bin/busybox"))?;
    symlink("busybox", work.join("bin/sh"))?;
    write_file(&work.join("init"), INIT, 0o755)?;
    let mut query =
        command("modprobe", ["--show-depends", "--ignore-install", "--set-version", kernel, "--all"]);
    let listed = run(query.args(EARLY_MODULES)).await?;
    let mut loaded: Vec<&str> = Vec::new();
    for path in listed.lines().filter_map(|line| line.strip_prefix("insmod ")).map(str::trim) {
        if !loaded.contains(&path) {
            loaded.push(path);
        }
    }
    for (number, path) in loaded.iter().enumerate() {
        let name = Path::new(path).file_name().unwrap_or_default().to_string_lossy().into_owned();
        let copy = work.join("modules").join(format!("{number:02}-{name}"));
        fs::copy(path, &copy).with_context(|| format!("cannot copy {path}"))?;
        if name.ends_with(".xz") {
            run(command("unxz", [&copy]).arg("--force")).await?;
        }
    }
    let line = r#"cd "$1" && find . | LC_ALL=C sort | cpio --quiet --create --format=newc > "$2""#;
    run(command("sh", ["-ec", line, "sh"]).arg(work).arg(archive)).await.map(drop)
}

async fn make_disk(root: &Path, disk: &Path) -> Result<()> {
    let mut make = command("mke2fs", ["-q", "-t", "ext4", "-L", "lab-root", "-d"]);
    run(make.arg(root).arg(disk).arg(ROOT_SIZE)).await.map(drop)
}

/// The newest installed kernel of the cloud flavour.
fn newest_cloud_kernel() -> Result<String> {
    let entries = fs::read_dir("/boot").context("cannot read /boot")?;
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let versions = names.filter_map(|name| Some(name.strip_prefix("vmlinuz-")?.to_owned()));
    versions
        .filter(|version| {
            version.ends_with("-cloud-amd64") && Path::new("/lib/modules").join(version).exists()
        })
        .max_by_key(|version| version_key(version))
        .context("no cloud kernel in /boot (Debian package linux-image-cloud-amd64)")
}

/// The numbers in a version, so that 6.1.0-56 comes after 6.1.0-9.
fn version_key(version: &str) -> Vec<u64> {
    version.split(|c: char| !c.is_ascii_digit()).filter_map(|number| number.parse().ok()).collect()
}

/// The code name of the host's Debian release; the VMs run the same release.
pub(crate) fn debian_suite() -> Result<String> {
    let text = fs::read_to_string("/etc/os-release").context("cannot read /etc/os-release")?;
    let name = text.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    Ok(name
        .context("/etc/os-release has no VERSION_CODENAME: the lab needs Debian (12 or later)")?
        .trim_matches('"')
        .to_owned())
}

#[cfg(test)]
mod tests {
    use super::version_key;

    #[test]
    fn kernel_versions_are_compared_by_number() {
        assert!(version_key("6.1.0-56-cloud-amd64") > version_key("6.1.0-9-cloud-amd64"));
    }
}
