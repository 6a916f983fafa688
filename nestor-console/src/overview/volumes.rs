//! Volumes: the claims of guests, and Nestor's PersistentVolumes without a claim.

use std::collections::HashMap;

use crds::names::{ANNOTATION_GUEST_NAMESPACE, ANNOTATION_GUEST_PVC, MANAGEMENT_DRIVER};
use kube_kit::informer::Key;
use kube_kit::partial::{PersistentVolume, PersistentVolumeClaim};

use super::{Clock, Inputs, Known, Row, guest, name, namespace};
use crate::decide::volume::{of_claim, of_released};
use crate::decide::{State, Verdict};

/// A volume.
#[derive(Debug, Clone, PartialEq)]
pub struct VolumeRow {
    /// The claim; None for a PersistentVolume without one.
    pub claim: Option<Key>,
    /// The guest.
    pub guest: Option<String>,
    /// Namespace and name of the claim in the guest.
    pub guest_claim: Option<String>,
    /// Size in bytes.
    pub bytes: Option<u64>,
    /// StorageClass.
    pub class: Option<String>,
    /// PersistentVolume.
    pub volume: Option<String>,
    /// The VMs that have the disk.
    pub on: Vec<String>,
    /// State.
    pub verdict: Verdict,
}

impl Row for VolumeRow {
    fn state(&self) -> State {
        self.verdict.state
    }

    fn texts(&self) -> Vec<&str> {
        let claim = self.claim.iter().flat_map(|claim| [&claim.namespace, &claim.name]);
        let more = [&self.guest, &self.guest_claim, &self.class, &self.volume, &self.verdict.cause];
        let all = claim.chain(more.into_iter().flatten()).chain(&self.on).chain([&self.verdict.summary]);
        all.map(String::as_str).collect()
    }
}

/// The rows of all volumes, those in the worst state first.
pub(super) fn rows(inputs: &Inputs, known: &Known<'_>, clock: Clock) -> Vec<VolumeRow> {
    let on = attached(inputs, known);
    let claims = inputs.claims.iter().filter(|claim| is_ours(known, claim));
    let claims = claims.map(|claim| of(inputs, known, claim, &on, clock));
    let released = inputs.volumes.iter().filter(|volume| is_nestors(volume) && !is_bound(known, volume));
    let mut rows: Vec<VolumeRow> =
        claims.chain(released.map(|volume| without_claim(inputs, volume, clock))).collect();
    rows.sort_by(|a, b| {
        let by_state = b.verdict.state.cmp(&a.verdict.state);
        by_state.then_with(|| (&a.claim, &a.volume).cmp(&(&b.claim, &b.volume)))
    });
    rows
}

/// The VMs that have the disk of each claim.
fn attached(inputs: &Inputs, known: &Known<'_>) -> HashMap<Key, Vec<String>> {
    let mut on: HashMap<Key, Vec<String>> = HashMap::new();
    let is_attached = |status: &crds::VolumeAttachmentStatus| status.attached;
    for attachment in inputs.attachments.iter().filter(|one| one.status.as_ref().is_some_and(is_attached)) {
        let vm = known.vm_of(attachment).map_or(attachment.spec.node_uuid.as_str(), |vm| name(&vm.metadata));
        let claim = Key::new(namespace(&attachment.metadata), attachment.spec.volume_name.as_str());
        on.entry(claim).or_default().push(vm.to_owned());
    }
    on.values_mut().for_each(|vms| vms.sort_unstable());
    on
}

/// Whether the claim belongs to a guest, or its volume to Nestor.
fn is_ours(known: &Known<'_>, claim: &PersistentVolumeClaim) -> bool {
    guest(&claim.metadata).is_some() || volume_of(known, claim).is_some_and(is_nestors)
}

fn volume_of<'a>(known: &Known<'a>, claim: &PersistentVolumeClaim) -> Option<&'a PersistentVolume> {
    known.volumes.get(claim.spec.volume_name.as_deref()?).copied()
}

fn is_nestors(volume: &PersistentVolume) -> bool {
    volume.spec.csi.as_ref().is_some_and(|csi| csi.driver == MANAGEMENT_DRIVER)
}

/// Whether the claim that the volume names exists and names the volume.
fn is_bound(known: &Known<'_>, volume: &PersistentVolume) -> bool {
    let claim = volume
        .spec
        .claim_ref
        .as_ref()
        .and_then(|claim| known.claims.get(&Key::new(claim.namespace.clone()?, claim.name.clone()?)));
    claim.is_some_and(|claim| claim.spec.volume_name.as_deref() == Some(name(&volume.metadata)))
}

fn of(
    inputs: &Inputs,
    known: &Known<'_>,
    claim: &PersistentVolumeClaim,
    on: &HashMap<Key, Vec<String>>,
    clock: Clock,
) -> VolumeRow {
    let key = Key::of(claim);
    let on = on.get(&key).cloned().unwrap_or_default();
    let warning = inputs.warnings.about("PersistentVolumeClaim", &key);
    let verdict =
        of_claim(claim, &on).explained_by(warning, clock.now).late_after(clock.late_after, clock.now);
    let capacity = volume_of(known, claim).and_then(|volume| volume.spec.capacity);
    VolumeRow {
        guest: guest(&claim.metadata).cloned(),
        guest_claim: guest_claim(claim),
        bytes: claim.status.capacity.or(capacity).or(claim.spec.requested),
        class: claim.spec.storage_class_name.clone().filter(|class| !class.is_empty()),
        volume: claim.spec.volume_name.clone(),
        claim: Some(key),
        on,
        verdict,
    }
}

fn guest_claim(claim: &PersistentVolumeClaim) -> Option<String> {
    let annotations = claim.metadata.annotations.as_ref()?;
    let name = annotations.get(ANNOTATION_GUEST_PVC)?;
    Some(match annotations.get(ANNOTATION_GUEST_NAMESPACE) {
        Some(namespace) => format!("{namespace}/{name}"),
        None => name.clone(),
    })
}

fn without_claim(inputs: &Inputs, volume: &PersistentVolume, clock: Clock) -> VolumeRow {
    let warning = inputs.warnings.about("PersistentVolume", &Key::of(volume));
    VolumeRow {
        claim: None,
        guest: guest(&volume.metadata).cloned(),
        guest_claim: None,
        bytes: volume.spec.capacity,
        class: None,
        volume: volume.metadata.name.clone(),
        on: Vec::new(),
        verdict: of_released(volume).explained_by(warning, clock.now).late_after(clock.late_after, clock.now),
    }
}
