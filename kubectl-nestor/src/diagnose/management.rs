//! Steps of the management cluster: claim, StorageClass, PersistentVolume.

use crds::names::{self, MANAGEMENT_DRIVER};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt;

use super::claims::{CLAIM, VOLUME, phase, phase_of_volume, transition, unhealthy};
use super::step::{State, Step, created, deleted};
use crate::clusters::Tier;
use crate::gather::snapshot::{Object, Snapshot, found};

/// Steps of claim, class and PersistentVolume in the management cluster.
pub fn steps(snapshot: &Snapshot) -> Vec<Step> {
    [claim(snapshot), class(snapshot), volume(snapshot)].into_iter().flatten().collect()
}

fn claim(snapshot: &Snapshot) -> Option<Step> {
    let object = snapshot.management_claim.as_ref()?;
    let (step, claim) = Step::of(Tier::Management, CLAIM, object);
    Some(match claim {
        Some(claim) => judge_claim(snapshot, claim, step),
        None if object.is_missing() => missing(snapshot, step),
        None => step,
    })
}

fn missing(snapshot: &Snapshot, step: Step) -> Step {
    match found(&snapshot.guest_volume) {
        Some(volume) if deleted(&volume.metadata).is_some() => {
            step.is(State::Ok, "deleted, like the guest's volume")
        }
        Some(_) => step
            .because(
                "the guest's PersistentVolume names it: the claim was deleted, or the volumeHandle or \
             --management-namespace is wrong",
            )
            .next(
                "restore the claim (docs/guides/static-volumes.md): bind a new claim of this name to the \
             management PersistentVolume, if that was retained; otherwise restore a snapshot",
            ),
        None if snapshot.computed_name => step.is(State::Waiting, "not created yet").next(
            "see the guest claim; if it shows no error, check that gc-csi and csi-provisioner run in \
             the guest, and --cluster-id and --volume-prefix of this command",
        ),
        None => step.is(State::Idle, "does not exist"),
    }
}

fn judge_claim(snapshot: &Snapshot, claim: &PersistentVolumeClaim, step: Step) -> Step {
    let step = step
        .traced(trace_context(claim))
        .detail("class", claim.spec.as_ref().and_then(|spec| spec.storage_class_name.as_ref()))
        .detail("cluster-id", claim.labels().get(names::LABEL_CLUSTER_ID));
    if let Some(time) = deleted(&claim.metadata) {
        return step
            .is(State::Stuck, "being deleted")
            .since(Some(time))
            .because(
                "it stays while a VirtualMachine has the disk; afterwards the volume goes with it, or \
             is kept by policy Retain",
            )
            .next(
                "if it was deleted by mistake: set the management PersistentVolume's policy to Retain \
             now, and restore the claim later",
            );
    }
    let since = created(&claim.metadata);
    match phase(claim) {
        "Bound" => bound(snapshot, claim, step.is(State::Ok, "Bound").since(since)),
        "Lost" => {
            step.is(State::Stuck, "Lost").since(since).because("its PersistentVolume is gone").next(
                "restore the PersistentVolume; `storage-infra volume list` shows whether the bytes exist",
            )
        }
        phase => step.is(State::Waiting, phase).since(since).next(
            "wait; if it takes long, check that csi-provisioner and mgmt-csi run in the management cluster",
        ),
    }
}

/// Trace context of the operation that last wrote the claim, or of its deletion.
fn trace_context(claim: &PersistentVolumeClaim) -> Option<&String> {
    let deletion = claim.annotations().get(names::ANNOTATION_DELETION_TRACEPARENT);
    let deletion = deletion.filter(|_| claim.metadata.deletion_timestamp.is_some());
    deletion.or_else(|| claim.annotations().get(names::ANNOTATION_TRACEPARENT))
}

/// A bound claim: pin, label and marks are compared with the guest.
fn bound(snapshot: &Snapshot, claim: &PersistentVolumeClaim, step: Step) -> Step {
    let volume = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default();
    if let Some(pin) = pin(snapshot).filter(|pin| pin != volume) {
        return step.is(State::Stuck, "Bound to other bytes").because(format!(
            "the guest's PersistentVolume is pinned to {pin}, but the claim is bound to {volume}"
        ));
    }
    if !is_owned(claim) {
        return step
            .is(State::Stuck, "Bound, but not available to any guest")
            .because(format!(
                "it has neither the label {} nor a label {}<ID>",
                names::LABEL_CLUSTER_ID,
                names::LABEL_SHARE_PREFIX
            ))
            .next(
                "platform team: restore the label, or share the claim with the guest \
             (docs/guides/static-volumes.md)",
            );
    }
    let step = unhealthy(claim, step);
    match claim.annotations().get(names::ANNOTATION_ORPHANED_SINCE) {
        Some(since) if step.state == State::Ok => step
            .is(State::Warning, "Bound, orphaned")
            .because(format!("no PersistentVolume of the guest names it since {since}"))
            .next("recreate the guest's PersistentVolume, or delete the claim (docs/guides/repair.md)"),
        _ => step,
    }
}

fn is_owned(claim: &PersistentVolumeClaim) -> bool {
    let is_share = |key: &String| key.starts_with(names::LABEL_SHARE_PREFIX);
    claim.labels().contains_key(names::LABEL_CLUSTER_ID) || claim.labels().keys().any(is_share)
}

/// Management PersistentVolume to which the guest's is pinned.
fn pin(snapshot: &Snapshot) -> Option<String> {
    let volume = found(&snapshot.guest_volume)?;
    let attributes = volume.spec.as_ref().and_then(|spec| spec.csi.as_ref()?.volume_attributes.as_ref());
    let annotated = volume.annotations().get(names::MANAGEMENT_VOLUME);
    annotated.or_else(|| attributes?.get(names::MANAGEMENT_VOLUME)).cloned()
}

/// The class of a claim that is not bound.
fn class(snapshot: &Snapshot) -> Option<Step> {
    let object = snapshot.management_class.as_ref()?;
    let (step, class) = Step::of(Tier::Management, "StorageClass", object);
    Some(match class {
        Some(class) => judge_class(class, step),
        None if object.is_missing() => step.next(
            "platform team: create the StorageClass in the management cluster, or correct \
             managementStorageClass in the guest's",
        ),
        None => step,
    })
}

fn judge_class(class: &StorageClass, step: Step) -> Step {
    let policy = class.reclaim_policy.as_deref().unwrap_or("Delete");
    match class.provisioner == MANAGEMENT_DRIVER {
        true => step.is(State::Ok, policy),
        false => step.is(State::Stuck, format!("provisioner {}", class.provisioner)).because(format!(
            "it is not a class of {MANAGEMENT_DRIVER}, whose volumes only can be attached to VMs"
        )),
    }
}

fn volume(snapshot: &Snapshot) -> Option<Step> {
    let object = snapshot.management_volume.as_ref()?;
    let (step, volume) = Step::of(Tier::Management, VOLUME, object);
    Some(match volume {
        Some(volume) => judge_volume(snapshot, volume, step),
        None if object.is_missing() => step
            .next("restore the PersistentVolume; `storage-infra volume list` shows whether the bytes exist"),
        None => unreadable(object, step),
    })
}

/// The account of a guest may not read PersistentVolumes of the management cluster: this is expected.
fn unreadable(object: &Object<PersistentVolume>, step: Step) -> Step {
    match object.lookup {
        crate::gather::snapshot::Lookup::Refused(_) => {
            step.next("use an account of the platform team to see it")
        }
        _ => step,
    }
}

fn judge_volume(snapshot: &Snapshot, volume: &PersistentVolume, step: Step) -> Step {
    let spec = volume.spec.clone().unwrap_or_default();
    let csi = spec.csi.as_ref();
    let policy = spec.persistent_volume_reclaim_policy.as_deref().unwrap_or("Delete");
    let step = step
        .detail("infra-volume", csi.map(|csi| &csi.volume_handle))
        .detail("driver", csi.map(|csi| &csi.driver))
        .since(transition(volume));
    let claim = found(&snapshot.management_claim).and_then(ResourceExt::uid);
    let bound_to = spec.claim_ref.as_ref().and_then(|reference| reference.uid.clone());
    match phase_of_volume(volume) {
        _ if csi.is_none_or(|csi| csi.driver != MANAGEMENT_DRIVER) => step
            .is(State::Stuck, "ForeignVolume")
            .because(format!("it does not belong to {MANAGEMENT_DRIVER}, so it cannot be attached to a VM")),
        _ if claim.is_some() && bound_to != claim => step
            .is(State::Stuck, "bound to another claim")
            .because("its claimRef does not name this claim")
            .next("correct the claimRef; another claim may use the same bytes"),
        "Bound" => mismatch(snapshot, policy, step.is(State::Ok, format!("Bound, {policy}"))),
        phase => step.is(State::Stuck, phase).next("see the events of the PersistentVolume"),
    }
}

/// A guest's Delete above a management Retain: the deletion will be refused.
fn mismatch(snapshot: &Snapshot, policy: &str, step: Step) -> Step {
    let above = found(&snapshot.guest_volume)
        .and_then(|volume| volume.spec.as_ref()?.persistent_volume_reclaim_policy.as_deref());
    match (above, policy) {
        (Some("Delete"), "Retain") => step
            .is(State::Warning, "Bound, Retain")
            .because(
                "the guest's PersistentVolume has policy Delete, this one Retain: its deletion will \
             be refused",
            )
            .next("use the same policy on both (docs/guides/reclaim-policy.md)"),
        _ => step,
    }
}
