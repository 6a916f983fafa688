//! VirtualMachines of KubeVirt that are nodes of a guest.

use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::fs::chown;
use std::path::Path;

use anyhow::{Context, Result};
use crds::names::LABEL_CLUSTER_ID;
use kube::Client;
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind};
use serde_json::{Value, json};

use crate::cache::KubeVirt;
use crate::cluster::KubeletFiles;
use crate::cluster::objects::apply_one;
use crate::kubeconfig;
use crate::process::Process;
use crate::run::Run;
use crate::state::{Guest, VmRecord};
use crate::vm::{self, Payload};

/// User and group of QEMU.
const QEMU: u32 = 107;
/// The VM's network behind its pod's: KubeVirt gives it the second address, and the first to the gateway.
const NETWORK: &str = "10.0.3.0/24";
const ADDRESS: &str = "10.0.3.2";
const GATEWAY: &str = "10.0.3.1";
/// A CPU model that QEMU emulates and virt-handler lists.
const EMULATED_CPU: &str = "Nehalem";

/// Creates a VM with its disk of settings.
pub(super) async fn boot(
    run: &Run,
    client: &Client,
    guest: &Guest,
    name: &str,
    vm: &VmRecord,
    kubelet: &KubeletFiles,
) -> Result<()> {
    let dir = run.path("vms").join(name);
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    vm::write_kubelet_kubeconfig(run, name, vm, kubelet)?;
    let plugin = run.state()?.binaries.join("gc-csi-node");
    let network = format!("ADDRESS={ADDRESS}\nGATEWAY={GATEWAY}\n");
    let payload = Payload::Plugin { program: &plugin, is_kubevirt: true };
    let config = vm::config_disk(&dir, name, vm, kubelet, payload, &network).await?;
    chown(&config, Some(QEMU), Some(QEMU))?;
    apply_one(client, object(guest, name, vm, &config)).await.map(drop)
}

fn object(guest: &Guest, name: &str, vm: &VmRecord, config: &Path) -> Value {
    let cpu = if vm.accelerator == "kvm" { "host-passthrough" } else { EMULATED_CPU };
    let disk =
        |path: &str| json!({"image": KubeVirt::DISKS, "path": path, "imagePullPolicy": "IfNotPresent"});
    json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
        "metadata": {
            "name": name, "namespace": guest.namespace, "labels": {LABEL_CLUSTER_ID: guest.cluster_id},
        },
        "spec": {"runStrategy": "Always", "template": {
            "metadata": {"labels": {"kubevirt.io/domain": name}},
            "spec": {
                "terminationGracePeriodSeconds": 0,
                "networks": [{"name": "default", "pod": {"vmNetworkCIDR": NETWORK}}],
                "domain": {
                    "firmware": {"uuid": vm.uuid},
                    "cpu": {"cores": 1, "model": cpu},
                    "memory": {"guest": "1Gi"},
                    "devices": {
                        "autoattachGraphicsDevice": false,
                        "autoattachMemBalloon": false,
                        "logSerialConsole": true,
                        "interfaces": [{"name": "default", "masquerade": {}}],
                        // The VM's init takes them by their order. It has no driver for SATA.
                        "disks": [
                            {"name": "root", "disk": {"bus": "virtio"}},
                            {"name": "config", "disk": {"bus": "virtio", "readonly": true}},
                            {"name": "boot", "bootOrder": 1, "disk": {"bus": "sata"}},
                        ],
                    },
                },
                "volumes": [
                    {"name": "root", "containerDisk": disk("/disk/root.qcow2")},
                    {"name": "config", "hostDisk": {"path": config, "type": "Disk"}},
                    {"name": "boot", "containerDisk": disk("/disk/boot.img")},
                ],
            },
        }},
    })
}

/// The address of a VM's pod now: KubeVirt forwards its ports to the VM.
pub(crate) async fn address(management: &Path, namespace: &str, name: &str) -> Result<Ipv4Addr> {
    let kind = GroupVersionKind::gvk("kubevirt.io", "v1", "VirtualMachineInstance");
    let resource = ApiResource::from_gvk_with_plural(&kind, "virtualmachineinstances");
    let client = kubeconfig::client(management).await?;
    let instances: Api<DynamicObject> = Api::namespaced_with(client, namespace, &resource);
    let instance = instances.get(name).await?;
    let address = instance.data["status"]["interfaces"][0]["ipAddress"].as_str();
    address.with_context(|| format!("virtual machine {name} has no address"))?.parse().context("bad address")
}

/// The QEMU process of the VM with this UUID.
pub fn qemu(uuid: &str) -> Option<Process> {
    let pids = fs::read_dir("/proc").ok()?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(|pid| is_qemu(*pid, uuid)).find_map(Process::current)
}

fn is_qemu(pid: i32, uuid: &str) -> bool {
    let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let mut words = words.split(|byte| *byte == 0);
    words.next().is_some_and(|program| program.ends_with(b"qemu-system-x86_64"))
        && words.any(|word| word == uuid.as_bytes())
}
