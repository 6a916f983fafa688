//! Decision what is done next with a volume of kubevirt-csi, without I/O.
//!
//! A PersistentVolume keeps its driver's name, which cannot be changed: gc-csi serves that name too. What changes is whose the claim
//! is in the management cluster: its DataVolume, with which it would be deleted, goes, and it gets the guest's label and the record of
//! the VM that has the disk. Until that is complete, both PersistentVolumes are retained.

use crds::names::{
    ANNOTATION_ATTACHED_TO, ANNOTATION_GUEST_NAMESPACE, ANNOTATION_GUEST_PV, ANNOTATION_GUEST_PVC,
    CONTEXT_DISK_UUID, CONTEXT_MANAGEMENT_VOLUME, LABEL_CLUSTER_ID, volume_entry,
};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::ResourceExt;
use kube::api::DynamicObject;
use serde_json::{Value, json};

use crate::clusters::Tier;

/// Annotation of a claim that was migrated: its DataVolume, as JSON.
pub(super) const MIGRATED_FROM: &str = "nestor.dev/migrated-from";
/// Annotation of a PersistentVolume that is retained meanwhile: its own reclaim policy.
pub(super) const OWN_POLICY: &str = "nestor.dev/reclaim-policy-before-migration";
/// Annotation that tells CDI that a claim has its data, so that it fills it with nothing.
const POPULATED_FOR: &str = "cdi.kubevirt.io/storage.populatedFor";
/// The same on a DataVolume.
const PRE_POPULATED: &str = "cdi.kubevirt.io/storage.prePopulated";
/// Buses on which gc-csi-node finds a disk by its serial.
const BUSES: [&str; 2] = ["scsi", "virtio"];

/// Which driver gets the volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    /// gc-csi.
    Forth,
    /// kubevirt-csi.
    Back,
}

/// The guest.
#[derive(Debug, Clone)]
pub(super) struct Guest {
    pub(super) cluster_id: String,
    /// Its namespace in the management cluster.
    pub(super) namespace: String,
}

/// A VM that has a volume, or may have it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Plugged {
    pub(super) vm: String,
    pub(super) uid: String,
    /// The guest whose VM it is.
    pub(super) guest: Option<String>,
    /// Name of the volume in the VM.
    pub(super) entry: String,
    /// Whether the template of the VM has it.
    pub(super) in_template: bool,
    /// Serial of the disk.
    pub(super) serial: Option<String>,
}

/// The objects of a volume.
#[derive(Debug, Clone, Default)]
pub(super) struct Volume {
    pub(super) guest_volume: PersistentVolume,
    /// VolumeAttachments of the guest.
    pub(super) attachments: Vec<VolumeAttachment>,
    pub(super) claim: Option<PersistentVolumeClaim>,
    pub(super) management_volume: Option<PersistentVolume>,
    pub(super) data_volume: Option<DynamicObject>,
    pub(super) plugged: Vec<Plugged>,
}

/// One change.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Step {
    /// Retain the PersistentVolume of a tier.
    Retain(Tier),
    /// Patch the claim: whose it is changes.
    Claim(&'static str, Value),
    /// Patch the status of a VolumeAttachment: which disk it is about.
    ShowDisk(String, Value),
    /// Delete the DataVolume, without what it owns.
    Orphan,
    /// Create the DataVolume.
    Create(Value),
    /// Give the PersistentVolume of a tier its own reclaim policy again.
    Restore(Tier, String),
}

impl Step {
    /// Name of its fail point.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Retain(_) => "retain",
            Self::Claim(name, _) => name,
            Self::ShowDisk(..) => "show-disk",
            Self::Orphan => "orphan",
            Self::Create(_) => "create",
            Self::Restore(..) => "restore",
        }
    }

    /// What it does.
    pub(super) fn describe(&self) -> String {
        match self {
            Self::Retain(tier) => format!("retain the PersistentVolume of the {} cluster", tier.name()),
            Self::Claim("take", _) => "take the management claim over for Nestor".to_owned(),
            Self::Claim("mark", _) => "mark the management claim as filled, for CDI".to_owned(),
            Self::Claim(..) => "give the management claim back to its DataVolume".to_owned(),
            Self::ShowDisk(name, _) => format!("record the disk in VolumeAttachment {name}"),
            Self::Orphan => "delete the DataVolume, and keep its claim".to_owned(),
            Self::Create(_) => "create the DataVolume for the claim".to_owned(),
            Self::Restore(tier, policy) => {
                format!("reclaim policy of the PersistentVolume of the {} cluster: {policy}", tier.name())
            }
        }
    }
}

/// Handle of a volume, which is the name of its claim and DataVolume.
pub(super) fn handle(volume: &PersistentVolume) -> &str {
    let csi = volume.spec.as_ref().and_then(|spec| spec.csi.as_ref());
    csi.map_or("", |csi| csi.volume_handle.as_str())
}

fn policy(volume: &PersistentVolume) -> &str {
    let spec = volume.spec.as_ref();
    spec.and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref()).unwrap_or("Delete")
}

fn is_taken(claim: &PersistentVolumeClaim) -> bool {
    claim.annotations().contains_key(MIGRATED_FROM)
}

/// The steps that are left, in their order; none if the volume is migrated. Or why it can't be.
pub(super) fn steps(volume: &Volume, guest: &Guest, direction: Direction) -> Result<Vec<Step>, String> {
    let (claim, management) = bound(volume)?;
    let changing = match direction {
        Direction::Forth => forth(volume, claim, guest)?,
        Direction::Back => back(volume, claim, guest)?,
    };
    let both = [(Tier::Guest, &volume.guest_volume), (Tier::Management, management)];
    let retain = both.iter().filter(|(_, one)| !changing.is_empty() && policy(one) != "Retain");
    let mut steps: Vec<Step> = retain.map(|(tier, _)| Step::Retain(*tier)).collect();
    let own = |(tier, one): &(Tier, &PersistentVolume)| {
        let annotated = one.annotations().get(OWN_POLICY).cloned();
        let own = annotated
            .or_else(|| (!changing.is_empty() && policy(one) != "Retain").then(|| policy(one).to_owned()));
        own.map(|own| Step::Restore(*tier, own))
    };
    let restore: Vec<Step> = both.iter().filter_map(own).collect();
    steps.extend(changing);
    steps.extend(restore);
    Ok(steps)
}

/// The claim and its PersistentVolume, which must be bound to each other.
fn bound(volume: &Volume) -> Result<(&PersistentVolumeClaim, &PersistentVolume), String> {
    let name = handle(&volume.guest_volume);
    let claim = volume.claim.as_ref().ok_or_else(|| {
        format!("there is no PersistentVolumeClaim {name} in the guest's namespace of the management cluster")
    })?;
    if claim.metadata.deletion_timestamp.is_some() {
        return Err(format!("management PersistentVolumeClaim {name} is being deleted"));
    }
    let unbound = || format!("management PersistentVolumeClaim {name} is not bound: wait until it is");
    let management = volume.management_volume.as_ref().ok_or_else(unbound)?;
    let reference = management.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
    let is_bound = reference.is_some_and(|reference| reference.uid == claim.metadata.uid);
    if is_bound { Ok((claim, management)) } else { Err(unbound()) }
}

fn forth(volume: &Volume, claim: &PersistentVolumeClaim, guest: &Guest) -> Result<Vec<Step>, String> {
    let plugged = plugged_once(volume, guest)?;
    let mut steps = Vec::new();
    if !is_taken(claim) {
        refuse_unsuitable(volume, claim, plugged)?;
        steps.push(Step::Claim("take", take(volume, claim, guest, plugged)));
    }
    steps.extend(plugged.and_then(|plugged| shown(volume, claim, plugged)));
    match &volume.data_volume {
        Some(_) => steps.push(Step::Orphan),
        None if owner(claim).is_some() => {
            return Err(format!(
                "management PersistentVolumeClaim {} is owned by a DataVolume that does not exist: remove its ownerReference",
                claim.name_any()
            ));
        }
        None => {}
    }
    Ok(steps)
}

/// The VM that has the volume; at most one, of this guest.
fn plugged_once<'a>(volume: &'a Volume, guest: &Guest) -> Result<Option<&'a Plugged>, String> {
    let name = handle(&volume.guest_volume);
    if let [one, other, ..] = &volume.plugged[..] {
        return Err(format!(
            "VirtualMachines {} and {} both have claim {name}: detach it from one of them",
            one.vm, other.vm
        ));
    }
    let Some(one) = volume.plugged.first() else { return Ok(None) };
    if one.guest.as_deref() != Some(guest.cluster_id.as_str()) {
        return Err(format!(
            "VirtualMachine {} has the volume, and not the label {LABEL_CLUSTER_ID}={}: set the label",
            one.vm, guest.cluster_id
        ));
    }
    if !one.in_template {
        return Err(format!(
            "the instance of VirtualMachine {} has the volume and its template does not, so KubeVirt may detach it at any time: \
             detach it first, by deleting the pods that use it",
            one.vm
        ));
    }
    if one.entry != volume_entry(name) {
        return Err(format!(
            "VirtualMachine {} has the volume under the name {:?}, and gc-csi would look for {:?}: detach it first",
            one.vm,
            one.entry,
            volume_entry(name)
        ));
    }
    Ok(Some(one))
}

fn refuse_unsuitable(
    volume: &Volume,
    claim: &PersistentVolumeClaim,
    plugged: Option<&Plugged>,
) -> Result<(), String> {
    let spec = volume.guest_volume.spec.clone().unwrap_or_default();
    let modes = spec.access_modes.unwrap_or_default();
    if let Some(mode) = modes.iter().find(|mode| !mode.starts_with("ReadWriteOnce")) {
        return Err(format!("it has the access mode {mode}, which gc-csi does not support with KubeVirt"));
    }
    let bus = spec.csi.and_then(|csi| csi.volume_attributes?.get("bus").cloned()).unwrap_or_default();
    if plugged.is_some() && !BUSES.contains(&bus.as_str()) {
        return Err(format!(
            "its disk is on the bus {bus:?}, where gc-csi-node does not find it: detach it first"
        ));
    }
    if plugged.is_some_and(|plugged| plugged.serial.is_none()) {
        return Err(
            "its disk has no serial in the VM, so that gc-csi-node can't find it: detach it first".to_owned()
        );
    }
    let owners = claim.metadata.owner_references.iter().flatten();
    if let Some(other) = owners.into_iter().find(|owner| owner.kind != "DataVolume") {
        return Err(format!(
            "its management claim is owned by {} {}, which is not kubevirt-csi's",
            other.kind, other.name
        ));
    }
    if let Some(label) = claim.labels().get(LABEL_CLUSTER_ID) {
        return Err(format!(
            "its management claim has the label {LABEL_CLUSTER_ID}={label} already: it is Nestor's"
        ));
    }
    let phase = volume.data_volume.as_ref().map(|one| one.data["status"]["phase"].clone());
    match phase {
        Some(phase) if phase != "Succeeded" => {
            Err(format!("its DataVolume is in the phase {phase}, not Succeeded"))
        }
        _ => Ok(()),
    }
}

/// The patch that takes the claim over, if it has not changed since it was read.
fn take(volume: &Volume, claim: &PersistentVolumeClaim, guest: &Guest, plugged: Option<&Plugged>) -> Value {
    let reference = volume.guest_volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
    let record = plugged.map(|one| {
        let take = uuid::Uuid::new_v4().simple().to_string();
        json!({"take": take[..16], "uid": one.uid, "vm": one.vm}).to_string()
    });
    json!({"metadata": {
        "uid": claim.metadata.uid, "resourceVersion": claim.metadata.resource_version,
        "labels": {LABEL_CLUSTER_ID: guest.cluster_id},
        "annotations": {
            MIGRATED_FROM: volume.data_volume.as_ref().map_or(Value::Null, saved).to_string(),
            ANNOTATION_ATTACHED_TO: record,
            ANNOTATION_GUEST_PV: volume.guest_volume.name_any(),
            ANNOTATION_GUEST_PVC: reference.and_then(|one| one.name.clone()),
            ANNOTATION_GUEST_NAMESPACE: reference.and_then(|one| one.namespace.clone()),
        },
    }})
}

/// A DataVolume as it is created again.
fn saved(data_volume: &DynamicObject) -> Value {
    json!({
        "apiVersion": data_volume.types.as_ref().map_or("cdi.kubevirt.io/v1beta1", |types| &types.api_version),
        "labels": data_volume.metadata.labels, "annotations": data_volume.metadata.annotations,
        "spec": data_volume.data["spec"],
    })
}

/// kubelet passes the disk of a VolumeAttachment to gc-csi-node when it mounts the volume. kubevirt-csi records none.
fn shown(volume: &Volume, claim: &PersistentVolumeClaim, plugged: &Plugged) -> Option<Step> {
    let serial = plugged.serial.as_ref()?;
    let of_vm = |one: &&VolumeAttachment| {
        one.spec.node_name == plugged.vm && one.status.as_ref().is_some_and(|status| status.attached)
    };
    let attachment = volume.attachments.iter().find(of_vm)?;
    let metadata = attachment.status.as_ref().and_then(|status| status.attachment_metadata.as_ref());
    if metadata.is_some_and(|metadata| metadata.contains_key(CONTEXT_DISK_UUID)) {
        return None;
    }
    let bound = claim.spec.as_ref().and_then(|spec| spec.volume_name.clone());
    let metadata = json!({CONTEXT_DISK_UUID: serial, CONTEXT_MANAGEMENT_VOLUME: bound});
    Some(Step::ShowDisk(attachment.name_any(), json!({"status": {"attachmentMetadata": metadata}})))
}

fn owner(claim: &PersistentVolumeClaim) -> Option<&str> {
    let owners = claim.metadata.owner_references.iter().flatten();
    owners.into_iter().find(|owner| owner.kind == "DataVolume").map(|owner| owner.uid.as_str())
}

fn back(volume: &Volume, claim: &PersistentVolumeClaim, guest: &Guest) -> Result<Vec<Step>, String> {
    let Some(saved) = claim.annotations().get(MIGRATED_FROM) else { return Ok(Vec::new()) };
    let name = claim.name_any();
    let saved: Value = serde_json::from_str(saved).map_err(|error| {
        format!("the annotation {MIGRATED_FROM} of claim {name} is not readable: {error}")
    })?;
    let mut steps = Vec::new();
    if !saved.is_null() && claim.annotations().get(POPULATED_FOR) != Some(&name) {
        let mark = json!({"metadata": {
            "uid": claim.metadata.uid, "resourceVersion": claim.metadata.resource_version,
            "annotations": {POPULATED_FOR: name},
        }});
        steps.push(Step::Claim("mark", mark));
    }
    match &volume.data_volume {
        Some(one) if one.metadata.deletion_timestamp.is_some() => {
            return Err(format!("DataVolume {name} is being deleted: run the command again when it is gone"));
        }
        None if !saved.is_null() => steps.push(Step::Create(data_volume(&saved, &name, guest))),
        _ => {}
    }
    steps.push(Step::Claim("give-back", give_back(volume, claim)));
    Ok(steps)
}

fn data_volume(saved: &Value, name: &str, guest: &Guest) -> Value {
    let mut annotations = saved["annotations"].clone();
    if !annotations.is_object() {
        annotations = json!({});
    }
    annotations[PRE_POPULATED] = json!(name);
    json!({
        "apiVersion": saved["apiVersion"], "kind": "DataVolume",
        "metadata": {
            "name": name, "namespace": guest.namespace, "labels": saved["labels"], "annotations": annotations,
        },
        "spec": saved["spec"],
    })
}

/// The patch that makes the claim the DataVolume's again.
fn give_back(volume: &Volume, claim: &PersistentVolumeClaim) -> Value {
    let owner = volume.data_volume.as_ref().map(|one| {
        json!([{
            "apiVersion": one.types.as_ref().map_or("cdi.kubevirt.io/v1beta1", |types| &types.api_version),
            "kind": "DataVolume", "name": one.name_any(), "uid": one.metadata.uid,
            "controller": true, "blockOwnerDeletion": true,
        }])
    });
    let mut metadata = json!({
        "uid": claim.metadata.uid, "resourceVersion": claim.metadata.resource_version,
        "labels": {LABEL_CLUSTER_ID: null},
        "annotations": {
            MIGRATED_FROM: null, ANNOTATION_ATTACHED_TO: null, ANNOTATION_GUEST_PV: null,
            ANNOTATION_GUEST_PVC: null, ANNOTATION_GUEST_NAMESPACE: null,
        },
    });
    if let Some(owner) = owner {
        metadata["ownerReferences"] = owner;
    }
    json!({"metadata": metadata})
}

/// What has to be known about a volume that is given back.
pub(super) fn note(volume: &Volume, direction: Direction) -> Option<String> {
    let plugged = volume.plugged.first().filter(|_| direction == Direction::Back)?;
    let csi = volume.guest_volume.spec.as_ref()?.csi.as_ref()?;
    let known = csi.volume_attributes.as_ref().and_then(|all| all.get("serial"));
    if known == plugged.serial.as_ref() {
        return None;
    }
    Some(format!(
        "gc-csi attached its disk to VirtualMachine {} under another serial: kubevirt-csi mounts it for new pods only after it was \
         detached, so delete the pods that use it once kubevirt-csi runs",
        plugged.vm
    ))
}

#[cfg(test)]
#[path = "decide_tests.rs"]
mod tests;
