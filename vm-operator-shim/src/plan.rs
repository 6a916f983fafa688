//! What one machine needs, without I/O: from the machine and the `VolumeAttachment`s that carry its names,
//! to what must be created, deleted and told.
//!
//! The plan is made of what should be, not of what changed, so that it comes to the same end from any
//! state, after any crash, and from a copy of the objects that is a little old.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crds::names::{self, FINALIZER_DETACH, LABEL_CLUSTER_ID};
use crds::{VirtualMachineVolume, VolumeAttachment, VolumeAttachmentSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::{Resource, ResourceExt};
use process_kit::text::one_line;
use serde_json::{Value, json};

use crate::machine::{Machine, MachineStatus};

/// Annotation on a `VolumeAttachment`: name of the entry in `spec.volumes` that it was made for, by which
/// the disk is told of after that entry has left.
pub const ANNOTATION_ENTRY: &str = "nestor.dev/volume-entry";

/// The fields of a status entry that the shim writes.
const OWN_FIELDS: [&str; 6] = ["name", "attached", "diskUUID", "blankAttestation", "formatToken", "error"];

/// Those that say of a disk that is plugged how its machine finds it and what it may do with it.
const DISK_FIELDS: [&str; 3] = ["diskUUID", "blankAttestation", "formatToken"];

/// How many entries of one machine are attached: as many disks as a virtual SCSI controller has, and as the schema of
/// [`crds::VirtualMachine`] takes.
pub const MOST_ENTRIES: usize = crds::MOST_VOLUMES;

/// What keeps an entry from being attached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Obstacle {
    /// Its claim is not there: nothing is made for it.
    ClaimMissing,
    /// Nothing is made or told of it yet.
    Waits,
    /// The attachment could not be created, and why.
    Refused(String),
}

/// What to do for one machine.
#[derive(Debug, Default)]
pub struct Plan {
    /// Attachments to create.
    pub create: Vec<VolumeAttachment>,
    /// Attachments to delete, as they are known.
    pub delete: Vec<VolumeAttachment>,
    /// The list to write to `status.volumes`, where it differs from what is there.
    pub status: Option<Vec<Value>>,
    /// Whether there will be more to tell soon: orders are being carried out.
    pub under_way: bool,
    /// Whether the list says nothing new but the names of disks that are leaving.
    pub only_renames: bool,
}

/// The plan for `vm`, given all attachments in its namespace that name it as their owner or have a name
/// that one of its claims takes. `obstacles` tells, by claim, what keeps one that has no attachment from having it.
/// `api_version` is the one under which the machine is served.
pub fn plan(
    vm: &Machine,
    api_version: &str,
    attachments: &[impl AsRef<VolumeAttachment>],
    obstacles: &BTreeMap<String, Obstacle>,
) -> Plan {
    let mut plan = Plan::default();
    let by_name: BTreeMap<String, &VolumeAttachment> =
        attachments.iter().map(|one| (one.as_ref().name_any(), one.as_ref())).collect();
    let status = vm.status.clone().unwrap_or_default();
    let node_uuid = status.node_uuid();
    let before = &status.entries()[..];
    let attached: BTreeSet<&str> = before.iter().filter(|one| one["attached"] == true).map(name_of).collect();
    let mut told: Vec<(String, Value)> = Vec::new();
    let mut wanted = BTreeSet::new();

    // A machine that is being deleted wants nothing any more.
    let entries = if vm.metadata.deletion_timestamp.is_some() { &[][..] } else { &vm.spec.volumes[..] };
    let holders = holders(vm, entries, &by_name);
    for (number, entry) in entries.iter().enumerate() {
        let Some(claim) = &entry.persistent_volume_claim else { continue };
        let holder = holders.get(&*claim.claim_name).copied().unwrap_or(&entry.name);
        if holder != entry.name {
            let text = format!(
                "ClaimAttachedTwice: claim {} is attached to this VirtualMachine by entry {holder}, and a claim can have \
                 one: take one of the two entries out",
                claim.claim_name
            );
            told.push((entry.name.clone(), failed(&entry.name, &text)));
            continue;
        }
        let name = names::volume_attachment(&vm.name_any(), &claim.claim_name);
        wanted.insert(name.clone());
        match by_name.get(&name) {
            Some(found) if !is_owned(found, vm) => {
                let text = format!(
                    "AttachmentNotOwned: VolumeAttachment {name} belongs to {}, not to this VirtualMachine; the disk is \
                     plugged once that is gone",
                    owner(found)
                );
                told.push((entry.name.clone(), failed(&entry.name, &text)));
            }
            Some(found) => {
                // The order can't be changed: another machine UUID or mode is another order.
                let stale = found.spec.read_only != claim.read_only
                    || node_uuid
                        .as_ref()
                        .is_some_and(|uuid| *uuid != found.spec.node_uuid.to_ascii_lowercase());
                if stale || is_deleting(found) {
                    told.push(detaching(found));
                } else {
                    told.extend(mirror(&entry.name, found).map(|value| (entry.name.clone(), value)));
                }
                if stale && !is_deleting(found) {
                    plan.delete.push((*found).clone());
                }
            }
            // One that has its disk keeps it.
            None if number >= MOST_ENTRIES => {
                let text = format!(
                    "TooManyVolumes: a VirtualMachine can have {MOST_ENTRIES} entries in spec.volumes, and this one has {}: take \
                     entries out",
                    entries.len()
                );
                told.push((entry.name.clone(), failed(&entry.name, &text)));
            }
            None => {
                // A disk that is there is carried on with, whatever became of its claim: only so can it be taken out.
                let obstacle = obstacles.get(&claim.claim_name).filter(|obstacle| {
                    matches!(obstacle, Obstacle::Refused(_)) || !attached.contains(&*entry.name)
                });
                if let Some(text) =
                    obstacle.and_then(|obstacle| obstacle_text(vm, &claim.claim_name, obstacle))
                {
                    told.push((entry.name.clone(), failed(&entry.name, &text)));
                }
                // Without a UUID there is nothing to say to the infra yet: the machine's next change counts.
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

    // What leaves stays in the status until it is really gone.
    for found in by_name.values().filter(|found| is_owned(found, vm) && !wanted.contains(&found.name_any())) {
        if !is_deleting(found) {
            plan.delete.push((*found).clone());
        }
        told.push(detaching(found));
    }

    plan.under_way = by_name.values().any(|found| is_owned(found, vm) && is_under_way(found));
    let after = merge(vm, before, told);
    plan.only_renames = after.len() == before.len() && says_nothing_new(&after, before);
    plan.status = (after != before).then_some(after);
    plan
}

/// Whether a plan is carried out only as the VM is now, by one read for all of it. A deletion takes a disk away, and the
/// watch may be behind an entry that was put in again.
pub fn must_be_confirmed(vm: &Machine, plan: &Plan) -> bool {
    !plan.delete.is_empty() || plan.create.iter().any(|order| was_told(vm, order))
}

/// Whether a machine was told that the disk of an order is there. An order that is not there any more though its disk is
/// has gone by itself: where the API server has forgotten it, as after a restore from a backup, it has forgotten the
/// entry too, and what is known of the machine is from before. An order that is made from that, and deleted as soon as
/// the machine is read anew, would unplug the disk.
fn was_told(vm: &Machine, order: &VolumeAttachment) -> bool {
    let Some(entry) = order.annotations().get(ANNOTATION_ENTRY) else { return false };
    let told = vm.status.as_ref().map(MachineStatus::entries).unwrap_or_default();
    let shown = [entry.clone(), names::detaching_entry(entry)];
    told.iter().any(|one| one["attached"] == true && shown.iter().any(|name| one["name"] == name.as_str()))
}

/// Whether each entry was told of in the same words, if by the name that it had before its disk began to leave.
fn says_nothing_new(after: &[Value], before: &[Value]) -> bool {
    let mut names = HashMap::new();
    for (at, told) in before.iter().enumerate() {
        names.insert(name_of(told).to_owned(), at);
        names.entry(names::detaching_entry(name_of(told))).or_insert(at);
    }
    after.iter().all(|entry| {
        names.get(name_of(entry)).is_some_and(|at| {
            let mut told = before[*at].clone();
            told["name"] = entry["name"].clone();
            told == *entry
        })
    })
}

fn name_of(entry: &Value) -> &str {
    entry["name"].as_str().unwrap_or_default()
}

/// The new list: entries of others as they are, ours as told, each where it was.
fn merge(vm: &Machine, before: &[Value], told: Vec<(String, Value)>) -> Vec<Value> {
    let wanted: HashMap<&str, &VirtualMachineVolume> =
        vm.spec.volumes.iter().map(|volume| (volume.name.as_str(), volume)).collect();
    let mut places: HashMap<String, Vec<usize>> = HashMap::new();
    // The first comes first out of each list.
    for (at, (name, _)) in told.iter().enumerate().rev() {
        places.entry(name.clone()).or_default().push(at);
    }
    let mut told: Vec<Option<Value>> = told.into_iter().map(|(_, value)| Some(value)).collect();
    let mut after = Vec::new();
    for entry in before {
        let place = places.get_mut(name_of(entry)).and_then(Vec::pop);
        match place.and_then(|at| told[at].take()) {
            Some(value) => after.push(value),
            None if is_foreign(wanted.get(name_of(entry)).copied(), entry) => after.push(entry.clone()),
            None => {}
        }
    }
    after.extend(told.into_iter().flatten());
    after
}

/// Whether an entry of the status is somebody else's: its volume is not a claim, or it has fields that the
/// shim doesn't write.
fn is_foreign(wanted: Option<&VirtualMachineVolume>, entry: &Value) -> bool {
    match wanted {
        Some(volume) => volume.persistent_volume_claim.is_none(),
        None => entry
            .as_object()
            .is_none_or(|fields| fields.keys().any(|key| !OWN_FIELDS.contains(&key.as_str()))),
    }
}

/// What is told of an entry that has no attachment; None where that is nothing yet.
fn obstacle_text(vm: &Machine, claim: &str, obstacle: &Obstacle) -> Option<String> {
    match obstacle {
        Obstacle::Waits => None,
        Obstacle::Refused(text) => Some(text.clone()),
        Obstacle::ClaimMissing => Some(format!(
            "ClaimNotFound: PersistentVolumeClaim {}/{claim} is not in the management cluster; the attach goes on once it \
             is there",
            vm.namespace().unwrap_or_default()
        )),
    }
}

/// A status entry from the answer to an order; None while there is none.
fn mirror(entry: &str, attachment: &VolumeAttachment) -> Option<Value> {
    let status = attachment.status.as_ref()?;
    let mut value = json!({"name": entry, "attached": status.attached});
    let disk = [&status.disk_uuid, &status.blank_attestation, &status.format_token];
    for (field, told) in DISK_FIELDS.into_iter().zip(disk) {
        if let Some(told) = told {
            value[field] = json!(told);
        }
    }
    if let Some(error) = &status.error {
        value["error"] = json!(one_line(&format!("{}: {}", error.reason, error.message)));
    }
    Some(value)
}

/// The same of an order that ends, under the name that the upstream VM Operator gives such a disk: it must not look like
/// the answer to an entry that was put in again since.
fn detaching(attachment: &VolumeAttachment) -> (String, Value) {
    let entry = names::detaching_entry(&entry_of(attachment));
    let value = mirror(&entry, attachment).unwrap_or_else(|| json!({"name": entry, "attached": false}));
    (entry, value)
}

/// The entry that an order was made for.
fn entry_of(attachment: &VolumeAttachment) -> String {
    let named = attachment.annotations().get(ANNOTATION_ENTRY).cloned();
    named.unwrap_or_else(|| names::volume_entry(&attachment.spec.volume_name))
}

/// The entry that has each claim: where several name one, that which its order was made for, or else the first. A disk
/// must not change its mode, or leave, because somebody put in another entry.
fn holders<'a>(
    vm: &Machine,
    entries: &'a [VirtualMachineVolume],
    by_name: &BTreeMap<String, &VolumeAttachment>,
) -> BTreeMap<&'a str, &'a str> {
    let mut holders = BTreeMap::new();
    for entry in entries {
        let Some(claim) = &entry.persistent_volume_claim else { continue };
        let found = by_name.get(&names::volume_attachment(&vm.name_any(), &claim.claim_name));
        if found.is_some_and(|found| is_owned(found, vm) && entry_of(found) == entry.name) {
            holders.insert(&*claim.claim_name, &*entry.name);
        } else {
            holders.entry(&*claim.claim_name).or_insert(&entry.name);
        }
    }
    holders
}

fn failed(entry: &str, text: &str) -> Value {
    json!({"name": entry, "attached": false, "error": one_line(text)})
}

fn attachment(
    vm: &Machine,
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
    let cluster = vm.labels().get(LABEL_CLUSTER_ID).map(|id| (LABEL_CLUSTER_ID.to_owned(), id.clone()));
    let metadata = ObjectMeta {
        name: Some(name),
        namespace: vm.namespace(),
        labels: cluster.map(|label| [label].into()),
        annotations: Some([(ANNOTATION_ENTRY.to_owned(), entry.to_owned())].into()),
        owner_references: Some(vec![owner]),
        // Set here, so that mgmt-csi needs no write of its own before it begins.
        finalizers: Some(vec![FINALIZER_DETACH.to_owned()]),
        ..Default::default()
    };
    VolumeAttachment { metadata, spec, status: None }
}

fn is_owned(attachment: &VolumeAttachment, vm: &Machine) -> bool {
    vm.metadata.uid.is_some()
        && attachment.owner_references().iter().any(|owner| Some(&owner.uid) == vm.metadata.uid.as_ref())
}

fn is_deleting(attachment: &VolumeAttachment) -> bool {
    attachment.meta().deletion_timestamp.is_some()
}

/// Whether an order is being carried out: it has no answer yet, or its disk leaves and nothing is known to keep it.
fn is_under_way(attachment: &VolumeAttachment) -> bool {
    match &attachment.status {
        None => true,
        Some(status) => is_deleting(attachment) && status.error.is_none(),
    }
}

fn owner(attachment: &VolumeAttachment) -> String {
    attachment.owner_references().first().map_or_else(
        || "nobody".to_owned(),
        |owner| format!("{} {} with UID {}", owner.kind, owner.name, owner.uid),
    )
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
