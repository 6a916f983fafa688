//! Virtual machines under libvirt that join a guest cluster as nodes.

mod accel;
pub(crate) mod account;
pub mod libvirtd;
pub mod network;
mod nodes;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use uuid::Uuid;

pub use nodes::{join_without_kubelet, joins_soon, leave_guest, wait_for_driver, wait_for_node};

use crate::cache::BaseImage;
use crate::cluster::{KubeletFiles, SERVER_ADDRESS_FROM_VM};
use crate::host::Host;
use crate::kubeconfig::{self, User};
use crate::kubevirt::{self, VmManager};
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
--guest-kubeconfig=/config/kubeconfig
";
const TOPOLOGY: &str = "--topology\n";
/// With KubeVirt, gc-csi-node serves the volumes of kubevirt-csi too.
const LEGACY: &str = "--legacy-driver-name=csi.kubevirt.io
--legacy-endpoint=unix:///var/lib/kubelet/plugins/guest.csi.nestor.dev/legacy.sock
";

/// What a VM runs beside containerd and kubelet.
#[derive(Debug, Clone, Copy)]
pub enum Payload<'a> {
    /// gc-csi-node, which the VM's init starts.
    Plugin {
        /// The program.
        program: &'a Path,
        /// Whether the VM is one of KubeVirt. Else gc-csi-node waits for the zone of its Node, which gc-csi takes from the VM.
        is_kubevirt: bool,
    },
    /// Pods with the images on this disk. They reach the API server at this port of the host.
    Pods {
        /// An ext4 filesystem with the folder of a containerd.
        images: &'a Path,
        /// The API server's port.
        api_server: u16,
    },
}

impl Payload<'_> {
    /// MiB of memory. Controllers with their sidecars take up to 700 MiB.
    fn memory(self) -> u32 {
        match self {
            Self::Plugin { .. } => 1024,
            Self::Pods { .. } => 2560,
        }
    }

    /// The third disk, for the domain's XML.
    fn disk(self, dir: &Path) -> String {
        let Self::Pods { .. } = self else { return String::new() };
        format!(
            "<disk type='file' device='disk'>\n      <driver name='qemu' type='qcow2' cache='unsafe'/>\
             <source file='{}'/><target dev='vdc' bus='virtio'/>\n    </disk>",
            escape(&images_disk(dir).display().to_string())
        )
    }
}

/// The accelerator settings of a domain.
struct Hardware {
    domain_type: &'static str,
    cpus: u8,
    cpu: &'static str,
    cmdline: &'static str,
}

const KVM: Hardware =
    Hardware { domain_type: "kvm", cpus: 2, cpu: "<cpu mode='host-passthrough'/>", cmdline: "" };
/// Emulation: the simplest CPU is the fastest. The kernel calibrates the TSC wrongly while the host is busy, and then the
/// VM's clock runs many times too fast: the TSC must not be used at all. Two emulated CPUs on a busy host can wait for each
/// other until the kernel reports a soft lockup: one CPU cannot.
const TCG: Hardware = Hardware {
    domain_type: "qemu",
    cpus: 1,
    cpu: "<cpu mode='custom' match='exact'><model>qemu64</model></cpu>",
    cmdline: "tsc=unstable no_timer_check",
};

/// The accelerator of this host: `kvm` or `tcg`.
pub async fn accelerator(image: &BaseImage) -> &'static str {
    accel::accelerator(&image.kernel).await
}

/// Allocates the identity and port of a VM and records them in the state.
pub fn plan(
    run: &Run,
    name: &str,
    guest: &str,
    zone: &str,
    host: Host,
    accelerator: &str,
) -> Result<VmRecord> {
    let vm = VmRecord { host, ..record(guest, zone, accelerator, ports::free(1)?[0]) };
    run.update(|state| state.vms.insert(name.to_owned(), vm.clone()))?;
    Ok(vm)
}

/// A new VM, on the first host.
pub fn record(guest: &str, zone: &str, accelerator: &str, kubelet_port: u16) -> VmRecord {
    VmRecord {
        guest: guest.to_owned(),
        uuid: Uuid::new_v4().to_string(),
        zone: zone.to_owned(),
        host: Host::default(),
        accelerator: accelerator.to_owned(),
        kubelet_port,
    }
}

/// The kernel's arguments that an accelerator needs.
pub(crate) fn kernel_arguments(accelerator: &str) -> &'static str {
    if accelerator == "kvm" { KVM.cmdline } else { TCG.cmdline }
}

/// The provider ID of a VM's node.
pub fn provider_id(vm: &VmRecord) -> String {
    format!("lab:///{}", vm.uuid)
}

/// Stops a VM at once and removes its domain and its files. Succeeds if it does not exist.
pub async fn remove(run: &Run, name: &str) -> Result<()> {
    let domains = virsh_of(run, name, ["list", "--all", "--name"]).await?;
    if domains.lines().any(|domain| domain == name) {
        if virsh_of(run, name, ["domstate", name]).await?.trim() != "shut off" {
            virsh_of(run, name, ["destroy", name]).await?;
        }
        virsh_of(run, name, ["undefine", name]).await?;
    }
    let dir = run.path("vms").join(name);
    if dir.exists() {
        fs::remove_dir_all(&dir).with_context(|| format!("cannot remove {}", dir.display()))?;
    }
    run.update(|state| state.vms.remove(name)).map(drop)
}

/// Creates a VM's disks, defines the domain and starts it.
pub async fn boot(
    run: &Run,
    name: &str,
    vm: &VmRecord,
    image: &BaseImage,
    kubelet: &KubeletFiles,
    payload: Payload<'_>,
) -> Result<()> {
    let dir = run.path("vms").join(name);
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let root = dir.join("root.qcow2");
    overlay(&image.root, &root).await?;
    if let Payload::Pods { images, .. } = payload {
        overlay(images, &images_disk(&dir)).await?;
    }
    let config = config_disk(&dir, name, vm, kubelet, payload, "").await?;
    write_kubelet_kubeconfig(run, name, vm, kubelet)?;
    let hardware = if vm.accelerator == "kvm" { &KVM } else { &TCG };
    let mut xml = DOMAIN.to_owned();
    for (key, value) in [
        ("CPUS", hardware.cpus.to_string()),
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
        ("MEMORY", payload.memory().to_string()),
    ] {
        xml = xml.replace(&format!("${{{key}}}"), &escape(&value));
    }
    let xml = xml.replace("${CPU}", hardware.cpu).replace("${IMAGES}", &payload.disk(&dir));
    let file = dir.join("domain.xml");
    fs::write(&file, xml).with_context(|| format!("cannot write {}", file.display()))?;
    virsh_on(run, vm.host, ["define", &file.display().to_string()]).await?;
    start(run, name).await
}

/// Writes the kubeconfig for a VM's kubelet.
pub(crate) fn write_kubelet_kubeconfig(
    run: &Run,
    name: &str,
    vm: &VmRecord,
    kubelet: &KubeletFiles,
) -> Result<()> {
    let server = format!("https://127.0.0.1:{}", vm.kubelet_port);
    let user = User::Certificate(&kubelet.client);
    kubeconfig::write(&kubelet_kubeconfig(run, name), &server, &kubelet.ca, &user)
}

/// Starts a defined domain.
pub async fn start(run: &Run, name: &str) -> Result<()> {
    virsh_of(run, name, ["start", name])
        .await
        .map(drop)
        .with_context(|| format!("cannot start virtual machine {name}"))
}

/// Resets a domain, as the button of a machine does.
pub async fn reset(run: &Run, name: &str) -> Result<()> {
    virsh_of(run, name, ["reset", name])
        .await
        .map(drop)
        .with_context(|| format!("cannot reset virtual machine {name}"))
}

/// Migrates a running VM to another host. The data of its memory goes through the libvirt daemons, because the networks of the
/// hosts are separate. libvirt calls a migration of cached disks unsafe, because the hosts could have different caches; here
/// both are this machine.
pub async fn migrate(run: &Run, name: &str, to: Host) -> Result<()> {
    let uri = libvirtd::uri(run, to);
    let how = ["migrate", "--live", "--persistent", "--undefinesource", "--unsafe", "--p2p", "--tunnelled"];
    let args = how.into_iter().chain([name, uri.as_str()]);
    virsh_of(run, name, args)
        .await
        .with_context(|| format!("cannot migrate virtual machine {name} to {}", to.name()))?;
    run.update(|state| {
        if let Some(vm) = state.vms.get_mut(name) {
            vm.host = to;
        }
    })
}

/// Runs virsh on the libvirt of the first host.
pub async fn virsh<'a>(run: &Run, args: impl IntoIterator<Item = &'a str>) -> Result<String> {
    virsh_on(run, Host::default(), args).await
}

/// Runs virsh on the host of a VM.
pub async fn virsh_of<'a>(run: &Run, vm: &str, args: impl IntoIterator<Item = &'a str>) -> Result<String> {
    virsh_on(run, Host::of_vm(run, vm)?, args).await
}

/// Runs virsh on a host.
pub async fn virsh_on<'a>(run: &Run, host: Host, args: impl IntoIterator<Item = &'a str>) -> Result<String> {
    let uri = libvirtd::uri(run, host);
    run_helper(command("virsh", ["--connect", &uri, "--quiet"]).args(args)).await
}

/// The QEMU process of a VM, on whichever host it is.
pub(crate) fn process(run: &Run, name: &str, vm: &VmRecord) -> Option<Process> {
    if run.state().is_ok_and(|state| state.vm_manager == VmManager::KubeVirt) {
        return kubevirt::qemu(&vm.uuid);
    }
    Host::ALL.into_iter().find_map(|host| process_on(run, host, name, vm))
}

/// The QEMU process of a VM on a host, from libvirt's PID file.
fn process_on(run: &Run, host: Host, name: &str, vm: &VmRecord) -> Option<Process> {
    let file = libvirtd::folder(run, host).join("run/qemu").join(format!("{name}.pid"));
    let process = Process::current(fs::read_to_string(file).ok()?.trim().parse().ok()?)?;
    // The PID file may be stale and the PID reused: the command line must contain the VM's UUID.
    let words = fs::read(format!("/proc/{}/cmdline", process.pid)).ok()?;
    String::from_utf8_lossy(&words).contains(&vm.uuid).then_some(process)
}

/// Creates a disk that records the changes to another one.
async fn overlay(base: &Path, disk: &Path) -> Result<()> {
    let mut create = command("qemu-img", ["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]);
    run_helper(create.arg(base).arg(disk)).await.map(drop)
}

/// A VM's disk with container images.
fn images_disk(dir: &Path) -> PathBuf {
    dir.join("images.qcow2")
}

/// Builds the second disk: the VM's name and credentials, and gc-csi-node unless it runs in a pod. `network` has variables of
/// a network that is not QEMU's own.
pub(crate) async fn config_disk(
    dir: &Path,
    name: &str,
    vm: &VmRecord,
    kubelet: &KubeletFiles,
    payload: Payload<'_>,
    network: &str,
) -> Result<PathBuf> {
    let files = dir.join("config");
    fs::create_dir_all(&files)?;
    let mut env = format!("NODE_NAME={name}\n{network}");
    if let Payload::Pods { api_server, .. } = payload {
        env.push_str(&format!("API_SERVER={SERVER_ADDRESS_FROM_VM}:{api_server}\n"));
    }
    write_private(&files.join("env"), &env)?;
    write_private(&files.join("kubeconfig"), &kubelet.kubeconfig)?;
    write_private(&files.join("ca.crt"), &kubelet.ca)?;
    let settings = KUBELET.replace("${PORT}", &vm.kubelet_port.to_string());
    write_private(&files.join("kubelet.yaml"), &settings.replace("${PROVIDER_ID}", &provider_id(vm)))?;
    kubelet.serving.write(&files, "kubelet")?;
    if let Payload::Plugin { program, is_kubevirt } = payload {
        let args = PLUGIN_ARGS.replace("${NAME}", name) + if is_kubevirt { LEGACY } else { TOPOLOGY };
        write_private(&files.join("plugin.args"), &args)?;
        run_helper(command("strip", ["-o"]).arg(files.join("gc-csi-node")).arg(program)).await?;
    }
    let disk = dir.join("config.raw");
    write_disk(&files, &disk, 0).await?;
    Ok(disk)
}

/// Writes an ext4 filesystem with the files of a folder, and some free space.
pub(crate) async fn write_disk(files: &Path, disk: &Path, spare: u64) -> Result<()> {
    let usage = run_helper(command("du", ["--summarize", "--block-size=1M"]).arg(files)).await?;
    let used: u64 = usage.split_whitespace().next().and_then(|number| number.parse().ok()).context("du")?;
    // Space for the filesystem's metadata; the file is sparse.
    let megabytes = used * 21 / 20 + 16 + spare;
    let mut make = command("mke2fs", ["-q", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-d"]);
    run_helper(make.arg(files).arg(disk).arg(format!("{megabytes}M"))).await.map(drop)
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
