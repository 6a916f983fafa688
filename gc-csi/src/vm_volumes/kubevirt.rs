//! KubeVirt: a VM as the rules see it, from its `VirtualMachine` and its `VirtualMachineInstance` (`kubevirt.io/v1`).
//!
//! The entries are in the VirtualMachine, the state of their disks is in the instance. virt-controller copies the entries to the
//! instance, and shows in `status.desiredGeneration` of the VirtualMachine which generation of them it has handled.

use std::collections::BTreeMap;

pub use crds::kubevirt::GROUP;
use crds::names::detaching_entry;
use crds::{
    PersistentVolumeClaimSource, VirtualMachineStatus, VirtualMachineVolume, VirtualMachineVolumeStatus,
};
use kube::core::{ApiResource, GroupVersionKind, Object, TypeMeta};
use kube_kit::resource_version;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::holder::Holder;
use super::observe::Revision;
use super::vm::{Vm, VmSpec};

/// API version.
pub const VERSION: &str = "v1";
/// Phase of a volume that the guest OS has.
const READY: &str = "Ready";
/// Condition of an instance that does not run on, and its reason after an I/O error.
const PAUSED: &str = "Paused";
const PAUSED_IO_ERROR: &str = "PausedIOError";
/// Reason of the phase Failed when nobody knows whether the instance runs.
const NODE_UNRESPONSIVE: &str = "NodeUnresponsive";
/// Namespace of the serials of disks.
const SERIALS: Uuid = Uuid::from_u128(0x1bd8_9c1e_6c53_4f0e_9a3b_d2f7_40c6_8e15);

/// `VirtualMachine` of KubeVirt.
pub type VirtualMachine = Object<Spec, Status>;
/// `VirtualMachineInstance` of KubeVirt.
pub type Instance = Object<InstanceSpec, InstanceStatus>;

/// Desired state of a VM.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Spec {
    /// Template of the instance.
    #[serde(default)]
    pub template: Template,
}

/// Template of an instance.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Template {
    /// Spec of the instance.
    #[serde(default)]
    pub spec: InstanceSpec,
}

/// Observed state of a VM.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// Generation of the spec that virt-controller has handled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub desired_generation: Option<i64>,
}

/// Desired state of an instance.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct InstanceSpec {
    /// Volumes.
    #[serde(default)]
    pub volumes: Vec<Volume>,
    /// Devices.
    #[serde(default)]
    pub domain: Domain,
}

/// A volume.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Volume {
    /// Name.
    pub name: String,
    /// The claim, if the volume is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent_volume_claim: Option<PersistentVolumeClaimSource>,
    /// The DataVolume of CDI, if the volume is one: its claim has the same name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_volume: Option<DataVolume>,
}

/// A DataVolume of CDI.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct DataVolume {
    /// Name.
    pub name: String,
}

/// Hardware of an instance.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Domain {
    /// Devices.
    #[serde(default)]
    pub devices: Devices,
    /// Firmware.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub firmware: Option<Firmware>,
}

/// Firmware of an instance.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Firmware {
    /// DMI product UUID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
}

/// Devices of an instance.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Devices {
    /// Disks.
    #[serde(default)]
    pub disks: Vec<Disk>,
}

/// A disk of an instance.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Disk {
    /// Name of its volume.
    pub name: String,
    /// Serial that the guest OS sees.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
}

/// Observed state of an instance.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InstanceStatus {
    /// Phase of the instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// Reason of the phase.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Its volumes, including those that are being detached.
    #[serde(default)]
    pub volume_status: Vec<VolumeStatus>,
    /// Its conditions.
    #[serde(default)]
    pub conditions: Vec<Condition>,
    /// Its last live migration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migration_state: Option<MigrationState>,
}

/// A live migration of an instance.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct MigrationState {
    /// Whether it failed.
    #[serde(default)]
    pub failed: bool,
}

/// Condition of an instance.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Condition {
    /// Type.
    #[serde(rename = "type")]
    pub type_: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// Reason of the status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Message about the status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// Observed state of a volume.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct VolumeStatus {
    /// Name of the volume.
    pub name: String,
    /// Phase of a volume that was hot-plugged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// Reason of the phase.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Message about the phase.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// API resource of VirtualMachines.
pub fn virtual_machines() -> ApiResource {
    resource("VirtualMachine", "virtualmachines")
}

/// API resource of VirtualMachineInstances.
pub fn instances() -> ApiResource {
    resource("VirtualMachineInstance", "virtualmachineinstances")
}

fn resource(kind: &str, plural: &str) -> ApiResource {
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(GROUP, VERSION, kind), plural)
}

/// Serial of a volume's disk: derived from the name of the volume's PersistentVolume, so it is the same at every attach and in
/// every VM.
pub fn serial(volume: &str) -> String {
    Uuid::new_v5(&SERIALS, volume.as_bytes()).to_string()
}

/// The VM as the rules see it.
pub fn view(vm: &VirtualMachine, instance: Option<&Instance>) -> Vm {
    let template = &vm.spec.template.spec;
    let status = instance.map(|instance| VirtualMachineStatus {
        bios_uuid: instance.spec.domain.firmware.as_ref().and_then(|firmware| firmware.uuid.clone()),
        power_state: power_state(instance).map(str::to_owned),
        volumes: disks(template, instance),
        ..Default::default()
    });
    let spec = VmSpec {
        volumes: template.volumes.iter().map(entry).collect(),
        disks: template.domain.devices.disks.iter().map(|disk| disk.name.clone()).collect(),
        failures: instance.map(|instance| failures(template, instance)).unwrap_or_default(),
    };
    let types =
        Some(TypeMeta { api_version: format!("{GROUP}/{VERSION}"), kind: "VirtualMachine".to_owned() });
    Vm { types, metadata: vm.metadata.clone(), spec, status }
}

/// Whether an instance runs, if that is known.
fn power_state(instance: &Instance) -> Option<&'static str> {
    let phase = instance.status.as_ref().and_then(|status| status.phase.as_deref());
    match phase {
        Some("Running") => Some("PoweredOn"),
        _ => has_ended(instance).then_some("PoweredOff"),
    }
}

fn entry(volume: &Volume) -> VirtualMachineVolume {
    let of_data_volume = |volume: &DataVolume| PersistentVolumeClaimSource {
        claim_name: volume.name.as_str().into(),
        read_only: false,
    };
    let persistent_volume_claim =
        volume.persistent_volume_claim.clone().or_else(|| volume.data_volume.as_ref().map(of_data_volume));
    VirtualMachineVolume { name: volume.name.clone(), persistent_volume_claim, ..Default::default() }
}

/// The disks of an instance. One whose entry is gone has it until neither its spec nor its status shows it; an instance that has ended
/// has none.
fn disks(template: &InstanceSpec, instance: &Instance) -> Vec<VirtualMachineVolumeStatus> {
    if has_ended(instance) {
        return Vec::new();
    }
    let statuses = instance.status.iter().flat_map(|status| &status.volume_status);
    let mut names: Vec<&str> = statuses.map(|status| status.name.as_str()).collect();
    names.extend(instance.spec.volumes.iter().map(|volume| volume.name.as_str()));
    names.sort_unstable();
    names.dedup();
    names.into_iter().map(|name| disk(template, instance, name)).collect()
}

fn has_volume(spec: &InstanceSpec, name: &str) -> bool {
    spec.volumes.iter().any(|volume| volume.name == name)
}

fn status_of<'a>(instance: &'a Instance, name: &str) -> Option<&'a VolumeStatus> {
    let mut statuses = instance.status.iter().flat_map(|status| &status.volume_status);
    statuses.find(|status| status.name == name)
}

/// Whether the guest OS has a volume of the instance's spec.
fn is_ready(instance: &Instance, name: &str) -> bool {
    let phase = status_of(instance, name).and_then(|status| status.phase.as_deref());
    phase == Some(READY) && has_volume(&instance.spec, name)
}

fn disk(template: &InstanceSpec, instance: &Instance, name: &str) -> VirtualMachineVolumeStatus {
    let disks = &instance.spec.domain.devices.disks;
    let leaves = !has_volume(template, name);
    let is_ready = is_ready(instance, name);
    VirtualMachineVolumeStatus {
        name: if leaves { detaching_entry(name) } else { name.to_owned() },
        // A disk that leaves counts as attached until it is gone. One that left the instance's spec and was requested again does not
        // count as attached yet: it is still on its way out.
        attached: leaves || is_ready,
        disk_uuid: disks.iter().find(|disk| disk.name == name).and_then(|disk| disk.serial.clone()),
        error: status_of(instance, name).filter(|_| leaves || !is_ready).and_then(failure),
        ..Default::default()
    }
}

/// What is wrong with the attached disks of an instance.
fn failures(template: &InstanceSpec, instance: &Instance) -> BTreeMap<String, String> {
    let has_entry = |name: &&str| has_volume(template, name) && is_ready(instance, name);
    let names = instance.spec.volumes.iter().map(|volume| volume.name.as_str()).filter(has_entry);
    let paused = paused_by_io_error(instance);
    let failure = |name: &str| status_of(instance, name).and_then(failure).or_else(|| paused.clone());
    names.filter_map(|name| Some((name.to_owned(), failure(name)?))).collect()
}

/// QEMU pauses a VM that can't write to one of its disks. KubeVirt does not tell which.
fn paused_by_io_error(instance: &Instance) -> Option<String> {
    let mut conditions = instance.status.iter().flat_map(|status| &status.conditions);
    let paused = conditions.find(|one| {
        one.type_ == PAUSED && one.status == "True" && one.reason.as_deref() == Some(PAUSED_IO_ERROR)
    })?;
    let message = paused.message.as_deref().unwrap_or("no message");
    Some(format!("{PAUSED_IO_ERROR}: the VM is paused after an I/O error of one of its disks: {message}"))
}

/// Why KubeVirt can't attach a volume, such as `FailedPvcNotFound: PVC data not found`. It retries.
fn failure(status: &VolumeStatus) -> Option<String> {
    let reason = status.reason.as_deref().filter(|reason| reason.starts_with("Failed"))?;
    Some(format!("{reason}: {}", status.message.as_deref().unwrap_or("no message")))
}

/// Whether an instance is in a final phase, so that its VM does not run. Nobody knows on a node that does not answer, or after a live
/// migration that failed: KubeVirt also gives up an instance that runs on a host where it does not look for it.
fn has_ended(instance: &Instance) -> bool {
    let Some(status) = &instance.status else { return false };
    let is_lost = status.reason.as_deref() == Some(NODE_UNRESPONSIVE)
        || status.migration_state.as_ref().is_some_and(|migration| migration.failed);
    match status.phase.as_deref() {
        Some("Succeeded") => true,
        Some("Failed") => !is_lost,
        _ => false,
    }
}

/// What a VM and its instance prove about a change of the entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// virt-controller has not handled the change yet, or the VM is gone and its instance is not.
    Open,
    /// virt-controller has handled the change: what the instance shows from now on is its result.
    Handled,
    /// The instance has ended.
    Ended,
    /// There is no instance. Whether the VM is off depends on the pods.
    NoInstance,
}

/// What a VM and its instance prove about a change.
pub fn standing(vm: Option<&VirtualMachine>, instance: Option<&Instance>, since: &Revision) -> Standing {
    let Some(instance) = instance else { return Standing::NoInstance };
    if has_ended(instance) {
        return Standing::Ended;
    }
    let handled = vm.filter(|vm| vm.metadata.uid.as_deref() == Some(since.uid.as_str()));
    let handled = handled.and_then(|vm| vm.status.as_ref()?.desired_generation);
    if handled.is_some_and(|handled| handled >= since.generation) {
        Standing::Handled
    } else {
        Standing::Open
    }
}

/// Whether a cached instance was written after this version of its VM. Custom resources of one API server have one sequence of
/// resource versions.
pub fn is_after(instance: &Instance, version: u64) -> bool {
    resource_version::of(instance).is_some_and(|written| written > version)
}

/// A pod in which an instance runs, or may run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launcher {
    /// Name of the VM.
    pub vm_name: String,
    /// UID of the instance.
    pub instance_uid: String,
}

/// Whether the VM that has a volume is proven off: its instance has ended, or there is neither its instance nor a pod of it. An
/// instance of a new VM of the same name is another one.
pub fn is_proven_off(holder: &Holder, instance: Option<&Instance>, launchers: &[Launcher]) -> bool {
    let owner = |instance: &Instance| {
        let owners = instance.metadata.owner_references.iter().flatten();
        owners.into_iter().find(|owner| owner.kind == "VirtualMachine").map(|owner| owner.uid.clone())
    };
    let own = instance.filter(|instance| owner(instance).is_none_or(|uid| uid == holder.uid));
    if let Some(own) = own {
        return has_ended(own);
    }
    let successor = instance.and_then(|instance| instance.metadata.uid.as_deref());
    launchers.iter().all(|pod| pod.vm_name != holder.vm || successor == Some(pod.instance_uid.as_str()))
}

/// Whether nothing runs under the name of a VM, whatever VirtualMachine it belongs to: the instance has ended, and no pod of another one
/// is left.
pub fn is_off(instance: Option<&Instance>, launchers: &[Launcher]) -> bool {
    let ended = instance.and_then(|instance| instance.metadata.uid.as_deref());
    instance.is_none_or(has_ended) && launchers.iter().all(|pod| Some(pod.instance_uid.as_str()) == ended)
}

#[cfg(test)]
#[path = "kubevirt_tests.rs"]
mod tests;
