//! Search for orphans in the inventory, without I/O. Each orphan is either removable, or has the reason why an operator must
//! decide.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::time::Duration;

use crds::names::{
    ANNOTATION_ATTACHED_TO, ANNOTATION_CONSUMER_PREFIX, ANNOTATION_ORPHANED_REASON,
    ANNOTATION_ORPHANED_SINCE, ANNOTATION_RETAINED_SINCE,
};
use infra_api::{Attachment, Labels, Snapshot, Volume as InfraVolume, VolumeId};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube_kit::informer::Key;
use kube_kit::partial::PersistentVolumeClaim;

use super::inventory::{Inventory, Volume};
use super::reason::{OrphanReason, Reason};
use crate::cluster::{self, is_bound_back, volume_name};
use crate::infra::volume_id;
use crate::repair::decide::{ClaimedVolume, Decision, Inputs, decide};

/// Kind of the orphaned object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// PersistentVolumeClaim of a guest.
    Claim,
    /// Released PersistentVolume.
    Volume,
    InfraVolume,
    InfraSnapshot,
    InfraAttachment,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Claim => "PersistentVolumeClaim",
            Self::Volume => "PersistentVolume",
            Self::InfraVolume => "InfraVolume",
            Self::InfraSnapshot => "InfraSnapshot",
            Self::InfraAttachment => "InfraAttachment",
        })
    }
}

/// Whether an orphan can be removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Removal {
    Delete,
    /// It cannot, for this reason.
    Keep(String),
}

/// An unused object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Orphan {
    pub(super) kind: Kind,
    pub(super) namespace: Option<String>,
    pub(super) name: String,
    pub(super) uid: Option<String>,
    pub(super) resource_version: Option<String>,
    pub(super) bytes: Option<u64>,
    /// Time since it became an orphan, or since its creation if that is not recorded.
    pub(super) age: Option<Duration>,
    pub(super) reason: Reason,
    /// Why it is an orphan.
    pub(super) message: String,
    pub(super) removal: Removal,
}

impl Orphan {
    /// `<namespace>/<name>`, or the name alone.
    pub(super) fn full_name(&self) -> String {
        Key::new(self.namespace.clone().unwrap_or_default(), self.name.clone()).to_string()
    }

    /// Whether both describe the same object.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.kind == other.kind && self.full_name() == other.full_name() && self.uid == other.uid
    }
}

/// All orphans, sorted by kind and name. Unless the storage infra is `exclusive` to this cluster, unknown volumes and
/// snapshots are kept: they may belong to another cluster.
pub(super) fn find(inventory: &Inventory, exclusive: bool) -> Vec<Orphan> {
    let mut found: Vec<Orphan> =
        inventory.claims.iter().filter_map(|claim| of_claim(inventory, claim)).collect();
    found.extend(inventory.volumes.iter().filter_map(|volume| of_volume(inventory, volume)));
    let named: HashSet<&str> =
        inventory.volumes.iter().filter_map(|volume| cluster::handle(&volume.spec)).collect();
    let coming: HashSet<VolumeId> = inventory.claims.iter().filter_map(pending_volume).collect();
    found.extend(inventory.infra_volumes.iter().filter_map(|volume| {
        let is_known = named.contains(volume.id.as_str()) || coming.contains(&volume.id);
        (!is_known).then(|| of_infra_volume(inventory, volume))
    }));
    let unknown = inventory.infra_snapshots.iter().filter(|one| !inventory.known_snapshots.contains(&one.id));
    found.extend(unknown.map(|snapshot| of_infra_snapshot(inventory, snapshot)));
    let mut claimed: HashMap<&str, Vec<ClaimedVolume>> = HashMap::new();
    for volume in &inventory.volumes {
        if let (Some(handle), Some(claim)) = (cluster::handle(&volume.spec), cluster::claim_of(&volume.spec))
        {
            let created = creation_time(volume);
            claimed.entry(handle).or_default().push(ClaimedVolume { claim, created });
        }
    }
    found.extend(inventory.infra_attachments.iter().filter_map(|infra_attachment| {
        let volumes = claimed.get(infra_attachment.volume.as_str()).map(Vec::as_slice);
        of_infra_attachment(inventory, infra_attachment, volumes.unwrap_or_default())
    }));
    for orphan in found.iter_mut().filter(|_| !exclusive) {
        if [Kind::InfraVolume, Kind::InfraSnapshot].contains(&orphan.kind)
            && orphan.removal == Removal::Delete
        {
            orphan.removal = Removal::Keep(
                "another cluster may use it; if no other cluster uses this storage infra, set --exclusive-infra"
                    .to_owned(),
            );
        }
    }
    found.sort_by_key(|orphan| (orphan.kind, orphan.full_name()));
    found
}

/// ID of the volume that is being created for a pending claim. csi-provisioner derives the name from the UID of the claim,
/// with the default `--volume-name-prefix`.
fn pending_volume(claim: &PersistentVolumeClaim) -> Option<VolumeId> {
    let phase = claim.status.phase.as_deref().unwrap_or("Pending");
    (phase == "Pending").then(|| volume_id(&format!("pvc-{}", claim.uid().unwrap_or_default()).into()))
}

fn age_of(now: Timestamp, text: Option<&str>) -> Option<Duration> {
    let then: Timestamp = text?.parse().ok()?;
    Duration::try_from(now.duration_since(then)).ok()
}

fn creation_time(volume: &Volume) -> Option<Timestamp> {
    volume.metadata.creation_timestamp.as_ref().map(|time| time.0)
}

/// The other PersistentVolumes of the same volume.
fn others<'a>(inventory: &'a Inventory, volume: &'a Volume) -> impl Iterator<Item = &'a Volume> {
    let handle = cluster::handle(&volume.spec);
    let is_other = move |one: &&Volume| {
        handle.is_some() && cluster::handle(&one.spec) == handle && one.metadata.name != volume.metadata.name
    };
    inventory.volumes.iter().filter(is_other)
}

fn of_claim(inventory: &Inventory, claim: &PersistentVolumeClaim) -> Option<Orphan> {
    let key = Key::of(claim);
    let marked = |mark: &str| claim.annotations().get(mark).map(String::as_str);
    let (time, reason, message) = match (marked(ANNOTATION_ORPHANED_SINCE), marked(ANNOTATION_RETAINED_SINCE))
    {
        (Some(age_of), _) => {
            let reason = Reason::of_annotation(marked(ANNOTATION_ORPHANED_REASON));
            (age_of, reason, "no PersistentVolume of its guest refers to it any more")
        }
        (None, Some(age_of)) => {
            let reason = Reason::Orphan(OrphanReason::Retained);
            (age_of, reason, "its guest PersistentVolume with reclaim policy Retain was deleted")
        }
        (None, None) => return None,
    };
    let volume = inventory.volumes.iter().find(|volume| {
        volume.metadata.name.as_deref() == volume_name(claim) && is_bound_back(claim, &volume.spec)
    });
    let policy = volume.and_then(|volume| volume.spec.persistent_volume_reclaim_policy.as_deref());
    let consumers: Vec<&str> =
        claim.annotations().keys().filter_map(|key| key.strip_prefix(ANNOTATION_CONSUMER_PREFIX)).collect();
    let attachment = inventory.attachments.iter().find(|attachment| {
        attachment.spec.volume_name.as_str() == key.name
            && attachment.metadata.namespace.as_ref() == Some(&key.namespace)
    });
    let handle = volume.and_then(|volume| cluster::handle(&volume.spec));
    let attached = handle.and_then(|handle| {
        inventory.infra_attachments.iter().find(|infra_attachment| infra_attachment.volume.as_str() == handle)
    });
    let sharing = volume.and_then(|volume| others(inventory, volume).next());
    let requester = inventory.vms.iter().flatten().find(|vm| {
        let mut entries = vm.spec.volumes.iter().filter_map(|entry| entry.persistent_volume_claim.as_ref());
        vm.metadata.namespace.as_ref() == Some(&key.namespace)
            && entries.any(|entry| entry.claim_name.as_str() == key.name)
    });
    let removal = if reason == Reason::Orphan(OrphanReason::Retained) {
        Removal::Keep("reclaim policy Retain in its guest: delete the claim manually".to_owned())
    } else if reason != Reason::Orphan(OrphanReason::VolumeGone) {
        Removal::Keep("the guest PVC still refers to this volume".to_owned())
    } else if claim.metadata.deletion_timestamp.is_some() {
        Removal::Keep("it is being deleted".to_owned())
    } else if policy != Some("Delete") {
        Removal::Keep(
            "its PersistentVolume is gone or has reclaim policy Retain: delete the claim manually".to_owned(),
        )
    } else if let Some(attachment) = attachment {
        Removal::Keep(format!("VolumeAttachment {} refers to it", attachment.name_any()))
    } else if let Some(vm) = requester {
        Removal::Keep(format!("VirtualMachine {} lists it in spec.volumes", vm.name_any()))
    } else if marked(ANNOTATION_ATTACHED_TO).is_some() {
        Removal::Keep(format!(
            "a VirtualMachine of KubeVirt may have it: annotation {ANNOTATION_ATTACHED_TO}"
        ))
    } else if let Some(infra_attachment) = attached {
        Removal::Keep(format!("it is attached to node {} in the storage infra", infra_attachment.node))
    } else if !consumers.is_empty() {
        Removal::Keep(format!("other guests use it: {}", consumers.join(", ")))
    } else if let Some(sharing) = sharing {
        Removal::Keep(format!("PersistentVolume {} shares its volume", sharing.name_any()))
    } else {
        Removal::Delete
    };
    Some(Orphan {
        kind: Kind::Claim,
        namespace: Some(key.namespace),
        name: key.name,
        uid: claim.uid(),
        resource_version: claim.resource_version(),
        bytes: claim.status.capacity,
        age: age_of(inventory.now, Some(time)),
        reason,
        message: message.to_owned(),
        removal,
    })
}

fn of_volume(inventory: &Inventory, volume: &Volume) -> Option<Orphan> {
    let spec = &volume.spec;
    let handle = cluster::handle(spec)?;
    let status = volume.status.as_ref()?;
    let retains = spec.persistent_volume_reclaim_policy.as_deref() == Some("Retain");
    if !retains || status.phase.as_deref() != Some("Released") {
        return None;
    }
    let released = status.last_phase_transition_time.as_ref().map(|time| time.0);
    let creation_time = creation_time(volume);
    let was = cluster::claim_of(spec).map_or_else(String::new, |claim| format!(" {claim}"));
    let then = match others(inventory, volume).next() {
        Some(other) => {
            format!("PersistentVolume {} keeps volume {handle} of the storage infra", other.name_any())
        }
        None => format!("then volume {handle} of the storage infra is listed"),
    };
    Some(Orphan {
        kind: Kind::Volume,
        namespace: None,
        name: volume.name_any(),
        uid: volume.uid(),
        resource_version: volume.resource_version(),
        bytes: spec.capacity,
        age: released
            .or(creation_time)
            .and_then(|then| Duration::try_from(inventory.now.duration_since(then)).ok()),
        reason: Reason::Orphan(OrphanReason::Released),
        message: format!("its claim{was} is gone"),
        removal: Removal::Keep(format!(
            "reclaim policy Retain: delete the PersistentVolume manually; {then}"
        )),
    })
}

/// The object for which a volume or snapshot was created, from the labels that mgmt-csi set.
fn created_for(labels: &Labels, of: &str) -> Option<Key> {
    Some(Key::new(labels.get("namespace")?.clone(), labels.get(of)?.clone()))
}

fn of_infra_volume(inventory: &Inventory, volume: &InfraVolume) -> Orphan {
    let claim = created_for(&volume.labels, "pvc");
    let is_there =
        claim.as_ref().is_some_and(|claim| inventory.claims.iter().any(|one| Key::of(one) == *claim));
    let removal = match &claim {
        None => Removal::Keep("its labels do not name a claim for which mgmt-csi created it".to_owned()),
        Some(claim) if is_there => Removal::Keep(format!(
            "claim {claim}, for which it was created, exists: restore the PersistentVolume"
        )),
        Some(_) if !volume.attached_to.is_empty() => Removal::Keep("it is attached".to_owned()),
        Some(_) => Removal::Delete,
    };
    let created_for = claim.map_or_else(String::new, |claim| format!("; it was created for claim {claim}"));
    Orphan {
        kind: Kind::InfraVolume,
        namespace: None,
        name: volume.id.to_string(),
        uid: None,
        resource_version: None,
        bytes: Some(volume.capacity_bytes),
        age: age_of(inventory.now, Some(&volume.created_at)),
        reason: Reason::Orphan(OrphanReason::NoPersistentVolume),
        message: format!("no PersistentVolume of this cluster refers to it{created_for}"),
        removal,
    }
}

fn of_infra_snapshot(inventory: &Inventory, snapshot: &Snapshot) -> Orphan {
    let created_for = created_for(&snapshot.labels, "snapshot");
    let removal = match &created_for {
        Some(_) => Removal::Delete,
        None => {
            Removal::Keep("its labels do not name a VolumeSnapshot for which mgmt-csi created it".to_owned())
        }
    };
    let created_for =
        created_for.map_or_else(String::new, |name| format!("; it was created for VolumeSnapshot {name}"));
    Orphan {
        kind: Kind::InfraSnapshot,
        namespace: None,
        name: snapshot.id.to_string(),
        uid: None,
        resource_version: None,
        bytes: Some(snapshot.capacity_bytes),
        age: age_of(inventory.now, Some(&snapshot.created_at)),
        reason: Reason::Orphan(OrphanReason::NoSnapshotContent),
        message: format!("no VolumeSnapshotContent of this cluster refers to it{created_for}"),
        removal,
    }
}

fn of_infra_attachment(
    inventory: &Inventory,
    infra_attachment: &Attachment,
    volumes: &[ClaimedVolume],
) -> Option<Orphan> {
    let inputs = Inputs {
        infra_attachment,
        volumes,
        clock_skew: inventory.clock_skew,
        attachments: &inventory.attachments,
        vms: inventory.vms.as_deref(),
    };
    let (reason, removal) = match decide(&inputs) {
        Decision::HasAttachment => return None,
        Decision::Detach => (Reason::Orphan(OrphanReason::NoVolumeAttachment), Removal::Delete),
        Decision::Leave(reason, why) => (Reason::Leave(reason), Removal::Keep(why)),
    };
    Some(Orphan {
        kind: Kind::InfraAttachment,
        namespace: None,
        name: infra_attachment.id.to_string(),
        uid: None,
        resource_version: None,
        bytes: None,
        age: age_of(inventory.now, Some(&infra_attachment.created_at)),
        reason,
        message: format!(
            "volume {} is attached to node {} without a VolumeAttachment",
            infra_attachment.volume, infra_attachment.node
        ),
        removal,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn inventory() -> Inventory {
        Inventory {
            now: "2026-01-02T00:00:00Z".parse().unwrap(),
            clock_skew: Duration::ZERO,
            claims: Vec::new(),
            volumes: Vec::new(),
            attachments: Vec::new(),
            vms: Some(Vec::new()),
            known_snapshots: HashSet::new(),
            infra_volumes: Vec::new(),
            infra_snapshots: Vec::new(),
            infra_attachments: Vec::new(),
        }
    }

    fn claim(annotations: Value, phase: &str) -> PersistentVolumeClaim {
        serde_json::from_value(json!({
            "metadata": {"name": "data", "namespace": "guest", "uid": "u1", "annotations": annotations},
            "spec": {"volumeName": "pv1"},
            "status": {"phase": phase, "capacity": {"storage": "4Mi"}},
        }))
        .unwrap()
    }

    fn volume(policy: &str, phase: &str) -> Volume {
        serde_json::from_value(json!({
            "metadata": {"name": "pv1", "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {
                "persistentVolumeReclaimPolicy": policy, "capacity": {"storage": "4Mi"},
                "csi": {"driver": crds::names::MANAGEMENT_DRIVER, "volumeHandle": "pvc-u1"},
                "claimRef": {"namespace": "guest", "name": "data", "uid": "u1"},
            },
            "status": {"phase": phase},
        }))
        .unwrap()
    }

    fn infra_volume(labels: Value) -> InfraVolume {
        serde_json::from_value(json!({
            "id": "pvc-u1", "capacityBytes": 4 << 20, "pool": "a",
            "diskUuid": "6f9c1b2a-0d3e-4f5a-8b7c-1234567890ab", "state": "ready",
            "labels": labels, "createdAt": "2026-01-01T22:00:00Z",
        }))
        .unwrap()
    }

    fn is_kept(orphans: &[Orphan]) -> bool {
        assert_eq!(orphans.len(), 1, "{orphans:?}");
        matches!(orphans[0].removal, Removal::Keep(_))
    }

    #[test]
    fn an_orphaned_claim_is_removable_unless_its_policy_or_a_guest_keeps_it() {
        let orphaned = json!({ANNOTATION_ORPHANED_SINCE: "2026-01-01T00:00:00Z", ANNOTATION_ORPHANED_REASON: "VolumeGone"});
        let with = |more: Value| {
            let mut all = orphaned.clone();
            json_patch::merge(&mut all, &more);
            all
        };
        let found = |annotations: Value, policy: &str| {
            let claims = vec![claim(annotations, "Bound")];
            find(&Inventory { claims, volumes: vec![volume(policy, "Bound")], ..inventory() }, true)
        };
        let gone = found(orphaned.clone(), "Delete");
        assert!(!is_kept(&gone));
        assert_eq!((gone[0].age, gone[0].bytes), (Some(Duration::from_secs(86_400)), Some(4 << 20)));
        assert!(is_kept(&found(orphaned.clone(), "Retain")));
        assert!(is_kept(&found(with(json!({ANNOTATION_ORPHANED_REASON: "ClaimLost"})), "Delete")));
        assert!(is_kept(&found(with(json!({"consumer.nestor.dev/other": "{}"})), "Delete")));
        assert!(is_kept(&found(with(json!({ANNOTATION_ATTACHED_TO: "{}"})), "Delete")));
        assert!(is_kept(&found(json!({ANNOTATION_RETAINED_SINCE: "2026-01-01T00:00:00Z"}), "Delete")));
        assert!(found(json!({}), "Delete").is_empty());
    }

    #[test]
    fn an_orphaned_claim_that_a_vm_has_or_requests_is_kept() {
        let orphaned = json!({ANNOTATION_ORPHANED_SINCE: "2026-01-01T00:00:00Z", ANNOTATION_ORPHANED_REASON: "VolumeGone"});
        let bound = || Inventory {
            claims: vec![claim(orphaned.clone(), "Bound")],
            volumes: vec![volume("Delete", "Bound")],
            ..inventory()
        };
        let vm = |claim: &str| {
            serde_json::from_value(json!({
                "metadata": {"name": "vm-1", "namespace": "guest"},
                "spec": {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": claim}}]},
            }))
            .unwrap()
        };
        let with_machine = |claim: &str| Inventory { vms: Some(vec![vm(claim)]), ..bound() };
        assert!(is_kept(&find(&with_machine("data"), true)));
        assert!(!is_kept(&find(&with_machine("other"), true)));
        let infra_attachment = json!({
            "id": "by-hand", "volume": "pvc-u1", "node": "6f9c1b2a-0d3e-4f5a-8b7c-1234567890ab", "readOnly": false,
            "access": "single-node", "state": "attached", "diskUuid": "7f9c1b2a-0d3e-4f5a-8b7c-1234567890ab",
            "createdAt": "2026-01-01T12:00:00Z",
        });
        let infra_attachments = vec![serde_json::from_value(infra_attachment).unwrap()];
        let found = find(&Inventory { infra_attachments, ..bound() }, true);
        assert!(is_kept(&found[..1]));
    }

    #[test]
    fn an_infra_volume_is_an_orphan_only_if_no_volume_and_no_pending_claim_needs_it() {
        let labels = json!({"namespace": "guest", "pvc": "data"});
        let found = |claims: Vec<PersistentVolumeClaim>, volumes: Vec<Volume>, labels: &Value| {
            let infra_volumes = vec![infra_volume(labels.clone())];
            find(&Inventory { claims, volumes, infra_volumes, ..inventory() }, true)
        };
        assert!(found(Vec::new(), vec![volume("Delete", "Bound")], &labels).is_empty());
        assert!(found(vec![claim(json!({}), "Pending")], Vec::new(), &labels).is_empty());
        assert!(!is_kept(&found(Vec::new(), Vec::new(), &labels)));
        assert!(is_kept(&found(vec![claim(json!({}), "Lost")], Vec::new(), &labels)));
        assert!(is_kept(&found(Vec::new(), Vec::new(), &json!({}))));
        let infra_volumes = vec![infra_volume(labels)];
        assert!(
            is_kept(&find(&Inventory { infra_volumes, ..inventory() }, false)),
            "it may belong to another cluster"
        );
    }

    #[test]
    fn a_released_volume_with_policy_retain_is_listed_and_never_removable() {
        let found =
            |policy, phase| find(&Inventory { volumes: vec![volume(policy, phase)], ..inventory() }, true);
        assert!(is_kept(&found("Retain", "Released")));
        assert!(found("Retain", "Bound").is_empty() && found("Delete", "Released").is_empty());
    }

    #[test]
    fn an_orphaned_claim_whose_volume_is_shared_is_kept() {
        let orphaned = json!({ANNOTATION_ORPHANED_SINCE: "2026-01-01T00:00:00Z", ANNOTATION_ORPHANED_REASON: "VolumeGone"});
        let mut sibling = volume("Retain", "Bound");
        sibling.metadata.name = Some("share-1".to_owned());
        let volumes = vec![volume("Delete", "Bound"), sibling];
        let shared = Inventory { claims: vec![claim(orphaned, "Bound")], volumes, ..inventory() };
        assert!(is_kept(&find(&shared, true)));
    }
}
