//! Plan for one VM, without I/O: from the VM and its `VolumeAttachment`s to the VolumeAttachments to create and delete, and
//! the status to write.
//!
//! The plan is level-triggered: it is computed from the desired state, not from changes, so that it converges from any
//! state, after a crash, and from slightly stale caches.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crds::names::{self, ANNOTATION_TRACEPARENT, ClaimName, FINALIZER_DETACH, LABEL_CLUSTER_ID};
use crds::{VirtualMachineVolume, VolumeAttachment, VolumeAttachmentSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::{Resource, ResourceExt};
use kube_kit::labels;
use process_kit::text::one_line;
use process_kit::trace::TraceParent;
use serde_json::{Value, json};

use crate::vm::{Vm, VmStatus, trace_context};

/// Annotation on a `VolumeAttachment`: name of its entry in `spec.volumes`, for `status.volumes` after that entry was removed.
pub const ANNOTATION_ENTRY: &str = "nestor.dev/volume-entry";

/// Fields of a status entry that the shim writes.
const OWN_FIELDS: [&str; 6] = ["name", "attached", "diskUUID", "blankAttestation", "formatToken", "error"];

/// Fields that are copied from the status of the VolumeAttachment.
const DISK_FIELDS: [&str; 3] = ["diskUUID", "blankAttestation", "formatToken"];

/// Maximum number of entries that are attached per VM, as in the schema of [`crds::VirtualMachine`].
pub const MAX_ENTRIES: usize = crds::MAX_VOLUMES;

crds::reasons! {
    /// Reasons in the errors of `status.volumes`, and of Events on the VirtualMachine.
    pub enum Reason {
        /// The claim does not exist.
        ClaimNotFound,
        /// Another entry attaches the claim.
        ClaimAttachedTwice,
        /// The VolumeAttachment of the claim belongs to another object.
        AttachmentNotOwned,
        /// The VolumeAttachment could not be created.
        AttachmentRefused,
        /// The VM has more entries than can be attached.
        TooManyVolumes,
        /// The attach rate limit of the VM is exceeded. In the status only if the VM flaps.
        AttachDelayed,
    }
}

/// Why an entry has no VolumeAttachment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Obstacle {
    /// Its claim does not exist, so no VolumeAttachment is created.
    ClaimMissing,
    /// Its claim may not be in the cache yet: nothing is created or reported.
    CacheLag,
    /// Creating the VolumeAttachment failed, with this message.
    Refused(String),
    /// The VM flaps, with this message: the VolumeAttachment is created later.
    Delayed(String),
}

/// Writes for one VM.
#[derive(Debug, Default)]
pub struct Plan {
    /// VolumeAttachments to create.
    pub create: Vec<VolumeAttachment>,
    /// VolumeAttachments to delete, as cached.
    pub delete: Vec<VolumeAttachment>,
    /// New `status.volumes`, if it differs from the present one.
    pub status: Option<Vec<Value>>,
    /// Whether attaches or detaches are in progress, so that the status will change again soon.
    pub in_progress: bool,
    /// Whether the status differs only in the `:detaching` suffix of entries.
    pub only_renames: bool,
}

/// Computes the plan for `vm`. `attachments` are all VolumeAttachments that have the VM as owner, or the name for one of its
/// claims. `obstacles` are, by claim, the reasons why an entry has no VolumeAttachment. `api_version` is that of the VM.
pub fn plan(
    vm: &Vm,
    api_version: &str,
    attachments: &[impl AsRef<VolumeAttachment>],
    obstacles: &BTreeMap<ClaimName, Obstacle>,
) -> Plan {
    let mut plan = Plan::default();
    let by_name: BTreeMap<String, &VolumeAttachment> =
        attachments.iter().map(|one| (one.as_ref().name_any(), one.as_ref())).collect();
    let status = vm.status.clone().unwrap_or_default();
    let node_uuid = status.node_uuid();
    let before = &status.entries()[..];
    let attached: BTreeSet<&str> = before.iter().filter(|one| one["attached"] == true).map(name_of).collect();
    let mut reported: Vec<(String, Value)> = Vec::new();
    let mut desired = BTreeSet::new();

    // A VM that is being deleted requests no disks.
    let entries = if vm.metadata.deletion_timestamp.is_some() { &[][..] } else { &vm.spec.volumes[..] };
    let vm_name = crate::vm::name(vm);
    let attaching_entries = attaching_entries(vm, entries, &by_name);
    for (number, entry) in entries.iter().enumerate() {
        let Some(claim) = &entry.persistent_volume_claim else { continue };
        let attaching_entry = attaching_entries.get(&claim.claim_name).copied().unwrap_or(&entry.name);
        if attaching_entry != entry.name {
            let text = format!(
                "claim {} is already attached to this VirtualMachine by entry {attaching_entry}; remove one of the \
                 two entries",
                claim.claim_name
            );
            reported.push((entry.name.clone(), failed(&entry.name, Reason::ClaimAttachedTwice, &text)));
            continue;
        }
        let name = names::volume_attachment(&vm_name, &claim.claim_name);
        desired.insert(name.clone());
        match by_name.get(&name) {
            Some(found) if !is_owned(found, vm) => {
                let text = format!(
                    "VolumeAttachment {name} belongs to {}, not to this VirtualMachine; the disk is \
                     attached once that VolumeAttachment is deleted",
                    owner(found)
                );
                reported.push((entry.name.clone(), failed(&entry.name, Reason::AttachmentNotOwned, &text)));
            }
            Some(found) => {
                // The spec is immutable: a changed VM UUID or read-only mode needs a new VolumeAttachment.
                let stale = found.spec.read_only != claim.read_only
                    || node_uuid
                        .as_ref()
                        .is_some_and(|uuid| *uuid != found.spec.node_uuid.to_ascii_lowercase());
                if stale || is_deleting(found) {
                    reported.push(detaching(found));
                } else {
                    reported.extend(mirror(&entry.name, found).map(|value| (entry.name.clone(), value)));
                }
                if stale && !is_deleting(found) {
                    plan.delete.push((*found).clone());
                }
            }
            // An entry beyond the limit that is attached already stays attached.
            None if number >= MAX_ENTRIES => {
                let text = format!(
                    "spec.volumes has {} entries, but at most {MAX_ENTRIES} can be attached; remove entries",
                    entries.len()
                );
                reported.push((entry.name.clone(), failed(&entry.name, Reason::TooManyVolumes, &text)));
            }
            None => {
                // An attached disk gets its VolumeAttachment even if its claim is gone; without one, it could not be detached.
                let obstacle = obstacles.get(&claim.claim_name).filter(|obstacle| {
                    matches!(obstacle, Obstacle::Refused(_)) || !attached.contains(&*entry.name)
                });
                let problem = obstacle.and_then(|obstacle| problem(vm, &claim.claim_name, obstacle));
                if let Some((reason, text)) = problem {
                    reported.push((entry.name.clone(), failed(&entry.name, reason, &text)));
                }
                // Without a UUID, the VM cannot be identified yet; its next change triggers another plan.
                if let Some(node_uuid) = &node_uuid
                    && matches!(obstacle, None | Some(Obstacle::Refused(_)))
                {
                    let spec = VolumeAttachmentSpec {
                        node_uuid: node_uuid.clone(),
                        volume_name: claim.claim_name.clone(),
                        read_only: claim.read_only,
                    };
                    plan.create.push(attachment(vm, api_version, name, &entry.name, spec));
                }
            }
        }
    }

    // A disk that is being detached stays in the status until its VolumeAttachment is gone.
    for found in by_name.values().filter(|found| is_owned(found, vm) && !desired.contains(&found.name_any()))
    {
        if !is_deleting(found) {
            plan.delete.push((*found).clone());
        }
        reported.push(detaching(found));
    }

    plan.in_progress = by_name.values().any(|found| is_owned(found, vm) && is_in_progress(found));
    let after = merge(vm, before, reported);
    plan.only_renames = after.len() == before.len() && has_only_renames(&after, before);
    plan.status = (after != before).then_some(after);
    plan
}

/// Whether the VM must be read from the API server before the plan is executed. A deletion detaches a disk, and the cache may
/// not show yet that its entry was added again.
pub fn needs_fresh_read(vm: &Vm, plan: &Plan) -> bool {
    !plan.delete.is_empty() || plan.create.iter().any(|attachment| was_reported_attached(vm, attachment))
}

/// Whether the status of the VM reports the disk of a VolumeAttachment to create as attached. If so, the VolumeAttachment was
/// lost, as after a restore of the API server from a backup. The restore may have removed the entry too, and the cached VM is
/// from before. Creating the VolumeAttachment from a stale entry, and deleting it after the next read, would detach the disk.
fn was_reported_attached(vm: &Vm, attachment: &VolumeAttachment) -> bool {
    let Some(entry) = attachment.annotations().get(ANNOTATION_ENTRY) else { return false };
    let reported = vm.status.as_ref().map(VmStatus::entries).unwrap_or_default();
    let possible_names = [entry.clone(), names::detaching_entry(entry)];
    reported
        .iter()
        .any(|one| one["attached"] == true && possible_names.iter().any(|name| one["name"] == name.as_str()))
}

/// Whether all entries are unchanged except for the `:detaching` suffix of their names.
fn has_only_renames(after: &[Value], before: &[Value]) -> bool {
    let mut names = HashMap::new();
    for (at, reported) in before.iter().enumerate() {
        names.insert(name_of(reported).to_owned(), at);
        names.entry(names::detaching_entry(name_of(reported))).or_insert(at);
    }
    after.iter().all(|entry| {
        names.get(name_of(entry)).is_some_and(|at| {
            let mut reported = before[*at].clone();
            reported["name"] = entry["name"].clone();
            reported == *entry
        })
    })
}

fn name_of(entry: &Value) -> &str {
    entry["name"].as_str().unwrap_or_default()
}

/// Merges the shim's entries with those of other writers, which stay unchanged; each keeps its position.
fn merge(vm: &Vm, before: &[Value], reported: Vec<(String, Value)>) -> Vec<Value> {
    let desired: HashMap<&str, &VirtualMachineVolume> =
        vm.spec.volumes.iter().map(|volume| (volume.name.as_str(), volume)).collect();
    let mut places: HashMap<String, Vec<usize>> = HashMap::new();
    // Reversed, so that `pop` returns the first position.
    for (at, (name, _)) in reported.iter().enumerate().rev() {
        places.entry(name.clone()).or_default().push(at);
    }
    let mut reported: Vec<Option<Value>> = reported.into_iter().map(|(_, value)| Some(value)).collect();
    let mut after = Vec::new();
    for entry in before {
        let place = places.get_mut(name_of(entry)).and_then(Vec::pop);
        match place.and_then(|at| reported[at].take()) {
            Some(value) => after.push(value),
            None if is_foreign(desired.get(name_of(entry)).copied(), entry) => after.push(entry.clone()),
            None => {}
        }
    }
    after.extend(reported.into_iter().flatten());
    after
}

/// Whether a status entry belongs to another writer: its volume is not a claim, or it has fields that the shim does not
/// write.
fn is_foreign(desired: Option<&VirtualMachineVolume>, entry: &Value) -> bool {
    match desired {
        Some(volume) => volume.persistent_volume_claim.is_none(),
        None => entry
            .as_object()
            .is_none_or(|fields| fields.keys().any(|key| !OWN_FIELDS.contains(&key.as_str()))),
    }
}

/// Reason and text of the error of an entry without a VolumeAttachment; None if there is nothing to report yet.
fn problem(vm: &Vm, claim: &ClaimName, obstacle: &Obstacle) -> Option<(Reason, String)> {
    match obstacle {
        Obstacle::CacheLag => None,
        Obstacle::Refused(text) => Some((Reason::AttachmentRefused, text.clone())),
        Obstacle::Delayed(text) => Some((Reason::AttachDelayed, text.clone())),
        Obstacle::ClaimMissing => {
            let text = format!(
                "PersistentVolumeClaim {}/{claim} does not exist in the management cluster; the disk is attached once it \
                 exists",
                vm.namespace().unwrap_or_default()
            );
            Some((Reason::ClaimNotFound, text))
        }
    }
}

/// Status entry from the status of a VolumeAttachment; None without a status.
fn mirror(entry: &str, attachment: &VolumeAttachment) -> Option<Value> {
    let status = attachment.status.as_ref()?;
    let mut value = json!({"name": entry, "attached": status.attached});
    let disk = [&status.disk_uuid, &status.blank_attestation, &status.format_token];
    for (field, reported) in DISK_FIELDS.into_iter().zip(disk) {
        if let Some(reported) = reported {
            value[field] = json!(reported);
        }
    }
    if let Some(error) = &status.error {
        value["error"] = json!(one_line(&format!("{}: {}", error.reason, error.message)));
    }
    Some(value)
}

/// Status entry of a VolumeAttachment that is being deleted, under the name that the upstream VM Operator uses. The suffix
/// distinguishes it from the status of an entry that was added again.
fn detaching(attachment: &VolumeAttachment) -> (String, Value) {
    let entry = names::detaching_entry(&entry_of(attachment));
    let value = mirror(&entry, attachment).unwrap_or_else(|| json!({"name": entry, "attached": false}));
    (entry, value)
}

/// Name of the entry for which a VolumeAttachment was created.
pub(crate) fn entry_of(attachment: &VolumeAttachment) -> String {
    let named = attachment.annotations().get(ANNOTATION_ENTRY).cloned();
    named.unwrap_or_else(|| names::volume_entry(attachment.spec.volume_name.as_str()))
}

/// The entry that attaches each claim. If several entries name a claim, it is the one for which its VolumeAttachment was
/// created, or else the first: adding an entry must not detach the disk or change its mode.
fn attaching_entries<'a>(
    vm: &Vm,
    entries: &'a [VirtualMachineVolume],
    by_name: &BTreeMap<String, &VolumeAttachment>,
) -> BTreeMap<&'a ClaimName, &'a str> {
    let vm_name = crate::vm::name(vm);
    let mut attaching_entries = BTreeMap::new();
    for entry in entries {
        let Some(claim) = &entry.persistent_volume_claim else { continue };
        let found = by_name.get(&names::volume_attachment(&vm_name, &claim.claim_name));
        if found.is_some_and(|found| is_owned(found, vm) && entry_of(found) == entry.name) {
            attaching_entries.insert(&claim.claim_name, &*entry.name);
        } else {
            attaching_entries.entry(&claim.claim_name).or_insert(&entry.name);
        }
    }
    attaching_entries
}

fn failed(entry: &str, reason: Reason, text: &str) -> Value {
    json!({"name": entry, "attached": false, "error": one_line(&format!("{reason}: {text}"))})
}

fn attachment(
    vm: &Vm,
    api_version: &str,
    name: String,
    entry: &str,
    spec: VolumeAttachmentSpec,
) -> VolumeAttachment {
    let owner = OwnerReference {
        api_version: api_version.to_owned(),
        kind: "VirtualMachine".to_owned(),
        name: vm.name_any(),
        uid: vm.uid().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(false),
    };
    let mut labels = labels::managed_by("vm-operator-shim");
    let context = trace_context(vm, entry).and_then(TraceParent::parse);
    let context = context.map(|context| (ANNOTATION_TRACEPARENT.to_owned(), context.to_string()));
    let named = (ANNOTATION_ENTRY.to_owned(), entry.to_owned());
    labels.extend(vm.labels().get(LABEL_CLUSTER_ID).map(|id| (LABEL_CLUSTER_ID.to_owned(), id.clone())));
    let metadata = ObjectMeta {
        name: Some(name),
        namespace: vm.namespace(),
        labels: Some(labels),
        annotations: Some([named].into_iter().chain(context).collect()),
        owner_references: Some(vec![owner]),
        // Set at creation, which saves mgmt-csi a write.
        finalizers: Some(vec![FINALIZER_DETACH.to_owned()]),
        ..Default::default()
    };
    VolumeAttachment { metadata, spec, status: None }
}

fn is_owned(attachment: &VolumeAttachment, vm: &Vm) -> bool {
    vm.metadata.uid.is_some()
        && attachment.owner_references().iter().any(|owner| Some(&owner.uid) == vm.metadata.uid.as_ref())
}

fn is_deleting(attachment: &VolumeAttachment) -> bool {
    attachment.meta().deletion_timestamp.is_some()
}

/// Whether an attach or detach is in progress: there is no status yet, or the detach has not failed so far.
fn is_in_progress(attachment: &VolumeAttachment) -> bool {
    match &attachment.status {
        None => true,
        Some(status) => is_deleting(attachment) && status.error.is_none(),
    }
}

fn owner(attachment: &VolumeAttachment) -> String {
    attachment.owner_references().first().map_or_else(
        || "no owner".to_owned(),
        |owner| format!("{} {} with UID {}", owner.kind, owner.name, owner.uid),
    )
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
