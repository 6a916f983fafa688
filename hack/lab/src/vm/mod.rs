//! Virtual machines under libvirt that join a guest cluster as nodes.

mod accel;
pub mod libvirtd;
mod nodes;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use uuid::Uuid;

pub use nodes::{join_without_kubelet, leave_guest, wait_for_driver, wait_for_node};

use crate::cache::BaseImage;
use crate::cluster::KubeletFiles;
use crate::kubeconfig::{self, User};
use crate::pki::write_private;
use crate::ports;
use crate::process::{Process, command, run as run_helper};
use crate::run::Run;
use crate::state::VmRecord;

const DOMAIN: &str = include_str!("../../image/domain.xml");
const KUBELET: &str = include_str!("../../image/kubelet.yaml");

/// Arguments of gc-csi-node, one per line. It reads its own Node with the kubelet's credentials.
const PLUGIN_ARGS: &str = "--endpoint=unix:///var/lib/kubelet/plugins/guest.csi.nestor.dev/csi.sock
--node-name=${NAME}
--topology
--guest-kubeconfig=/config/kubeconfig
";

/// The accelerator settings of a domain.
struct Hardware {
    domain_type: &'static str,
    cpu: &'static str,
    cmdline: &'static str,
}

const KVM: Hardware = Hardware { domain_type: "kvm", cpu: "<cpu mode='host-passthrough'/>", cmdline: "" };
/// Emulation: the simplest CPU is the fastest. The kernel calibrates the TSC wrongly while the host is busy, and then the
/// VM's clock runs many times too fast: the TSC must not be used at all.
const TCG: Hardware = Hardware {
    domain_type: "qemu",
    cpu: "<cpu mode='custom' match='exact'><model>qemu64</model></cpu>",
    cmdline: "tsc=unstable no_timer_check",
};

/// The accelerator of this host: `kvm` or `tcg`.
pub async fn accelerator(image: &BaseImage) -> &'static str {
    accel::accelerator(&image.kernel).await
}

/// Allocates the identity and port of a VM and records them in the state.
pub fn plan(run: &Run, name: &str, guest: &str, zone: &str, accelerator: &str) -> Result<VmRecord> {
    let vm = VmRecord {
        guest: guest.to_owned(),
        uuid: Uuid::new_v4().to_string(),
        zone: zone.to_owned(),
        accelerator: accelerator.to_owned(),
        kubelet_port: ports::free(1)?[0],
    };
    run.update(|state| state.vms.insert(name.to_owned(), vm.clone()))?;
    Ok(vm)
}

/// Creates a VM's disks, defines the domain and starts it.
pub async fn boot(
    run: &Run,
    name: &str,
    vm: &VmRecord,
    image: &BaseImage,
    kubelet: &KubeletFiles,
    plugin: &Path,
) -> Result<()> {
    let dir = run.path("vms").join(name);
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let root = dir.join("root.qcow2");
    let mut overlay = command("qemu-img", ["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]);
    run_helper(overlay.arg(&image.root).arg(&root)).await?;
    let config = config_disk(&dir, name, vm, kubelet, plugin).await?;
    let server = format!("https://127.0.0.1:{}", vm.kubelet_port);
    kubeconfig::write(
        &kubelet_kubeconfig(run, name),
        &server,
        &kubelet.ca,
        &User::Certificate(&kubelet.client),
    )?;
    let hardware = if vm.accelerator == "kvm" { &KVM } else { &TCG };
    let mut xml = DOMAIN.to_owned();
    for (key, value) in [
        ("TYPE", hardware.domain_type.to_owned()),
        ("CMDLINE", hardware.cmdline.to_owned()),
        ("NAME", name.to_owned()),
        ("UUID", vm.uuid.clone()),
        ("KERNEL", image.kernel.display().to_string()),
        ("INITRAMFS", image.initramfs.display().to_string()),
        ("ROOT", root.display().to_string()),
        ("CONFIG", config.display().to_string()),
        ("LOGS", run.path("logs").join(name).display().to_string()),
        ("PORT", vm.kubelet_port.to_string()),
    ] {
        xml = xml.replace(&format!("${{{key}}}"), &escape(&value));
    }
    let xml = xml.replace("${CPU}", hardware.cpu);
    let file = dir.join("domain.xml");
    fs::write(&file, xml).with_context(|| format!("cannot write {}", file.display()))?;
    virsh(run, ["define", &file.display().to_string()]).await?;
    start(run, name).await
}

/// Starts a defined domain.
pub async fn start(run: &Run, name: &str) -> Result<()> {
    virsh(run, ["start", name])
        .await
        .map(drop)
        .with_context(|| format!("cannot start virtual machine {name}"))
}

/// Runs virsh on the run's libvirt.
pub async fn virsh<'a>(run: &Run, args: impl IntoIterator<Item = &'a str>) -> Result<String> {
    let uri = libvirtd::uri(run);
    run_helper(command("virsh", ["--connect", &uri, "--quiet"]).args(args)).await
}

/// The QEMU process of a VM, from libvirt's PID file.
pub(crate) fn process(run: &Run, name: &str, vm: &VmRecord) -> Option<Process> {
    let file = libvirtd::folder(run).join("run/qemu").join(format!("{name}.pid"));
    let process = Process::current(fs::read_to_string(file).ok()?.trim().parse().ok()?)?;
    // The PID file may be stale and the PID reused: the command line must contain the VM's UUID.
    let words = fs::read(format!("/proc/{}/cmdline", process.pid)).ok()?;
    String::from_utf8_lossy(&words).contains(&vm.uuid).then_some(process)
}

/// Builds the second disk: the VM's name and credentials, and the current gc-csi-node.
async fn config_disk(
    dir: &Path,
    name: &str,
    vm: &VmRecord,
    kubelet: &KubeletFiles,
    plugin: &Path,
) -> Result<PathBuf> {
    let files = dir.join("config");
    fs::create_dir_all(&files)?;
    write_private(&files.join("env"), &format!("NODE_NAME={name}\n"))?;
    write_private(&files.join("kubeconfig"), &kubelet.kubeconfig)?;
    write_private(&files.join("ca.crt"), &kubelet.ca)?;
    write_private(&files.join("kubelet.yaml"), &KUBELET.replace("${PORT}", &vm.kubelet_port.to_string()))?;
    kubelet.serving.write(&files, "kubelet")?;
    write_private(&files.join("plugin.args"), &PLUGIN_ARGS.replace("${NAME}", name))?;
    run_helper(command("strip", ["-o"]).arg(files.join("gc-csi-node")).arg(plugin)).await?;
    let bytes: u64 = fs::metadata(files.join("gc-csi-node"))?.len();
    let disk = dir.join("config.raw");
    // Space for the filesystem's metadata; the file is sparse.
    let megabytes = bytes / (1024 * 1024) + 16;
    let mut make = command("mke2fs", ["-q", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-d"]);
    run_helper(make.arg(&files).arg(&disk).arg(format!("{megabytes}M"))).await?;
    Ok(disk)
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('\'', "&apos;")
}

/// Path of the kubeconfig for a VM's kubelet.
pub(crate) fn kubelet_kubeconfig(run: &Run, name: &str) -> PathBuf {
    run.path("vms").join(name).join("kubelet.kubeconfig")
}

/// The serials of the hot-plugged disks in a domain's XML. The VM's own disks have none.
pub(crate) fn serials(xml: &str) -> Vec<String> {
    xml.split("<serial>")
        .skip(1)
        .filter_map(|rest| rest.split_once("</serial>"))
        .map(|(serial, _)| serial.to_owned())
        .collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn serials_are_those_of_disks() {
        let xml =
            "<serial type='file'><target/></serial><disk><serial>a-1</serial></disk><disk><serial>b</serial>";
        assert_eq!(super::serials(xml), ["a-1", "b"]);
    }
}
