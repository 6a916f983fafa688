//! Attestation that a new volume is blank, where the storage below does not attest it: with KubeVirt.
//!
//! A disk is attested blank only under its first attachment, and only if all of this holds:
//!
//! - This driver created the claim without a source, and the volume was provisioned for this very claim: its name contains the claim's
//!   UID. A claim that was restored from a backup, or bound to an existing volume, has another UID.
//! - No VM has ever taken the claim: the take removes the annotation that says so, in the same write.
//! - The platform team states that new volumes of the claim's class are blank.
//! - The claim is not shareable: VMs that share it do not take it.
//!
//! The attestation is part of the [holder's](super::holder) record, and ends with it: a detach gives the claim back before csi-attacher
//! attaches it again. Until then, gc-csi-node knows whether it has used the attestation.

use crds::names::{ANNOTATION_FORMAT_TOKEN, ANNOTATION_NEVER_ATTACHED};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::{Deserialize, Serialize};

use super::holder::{Holder, Taken};

/// An attestation that a disk is blank.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Blank {
    /// UUID of the attestation.
    pub id: String,
    /// ID of the boot of the node for which it holds. gc-csi-node records on the VM's own disk that it has used an attestation, and a
    /// VM of KubeVirt may get a new disk when it starts.
    pub boot: String,
}

/// What is known of a claim when it is taken.
#[derive(Debug, Clone, Copy)]
pub struct Evidence<'a> {
    /// Metadata of the claim.
    pub claim: &'a ObjectMeta,
    /// The volume that it is bound to.
    pub volume: Option<&'a str>,
    /// Whether it has a source of its data.
    pub has_source: bool,
    /// Whether several VMs may have its disk.
    pub is_shareable: bool,
    /// Whether new volumes of its class are blank, as the platform team states.
    pub is_class_blank: bool,
}

fn annotation<'a>(claim: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    claim.annotations.as_ref()?.get(key).map(String::as_str)
}

/// Whether no VM has taken a claim yet, by its annotation.
pub fn is_unused(claim: &ObjectMeta) -> bool {
    annotation(claim, ANNOTATION_NEVER_ATTACHED).is_some()
}

/// The volume's secret for marks of interrupted formats.
pub fn format_token(claim: &ObjectMeta) -> Option<&str> {
    annotation(claim, ANNOTATION_FORMAT_TOKEN)
}

impl Evidence<'_> {
    /// Whether the volume is blank, provided that no VM holds it.
    fn is_blank(&self) -> bool {
        let uid = self.claim.uid.as_deref().filter(|uid| !uid.is_empty());
        let is_provisioned_for_it = self.volume.zip(uid).is_some_and(|(volume, uid)| volume.ends_with(uid));
        is_unused(self.claim)
            && format_token(self.claim).is_some()
            && is_provisioned_for_it
            && !self.has_source
            && !self.is_shareable
            && self.is_class_blank
    }
}

/// The attestation of a take that replaces this record. The same VM keeps the one that it has, because it asks again under the same
/// attachment.
pub fn attest(
    recorded: Option<&str>,
    vm: &Holder,
    evidence: Evidence<'_>,
    new: impl FnOnce() -> Option<Blank>,
) -> Option<Blank> {
    match recorded {
        None if evidence.is_blank() => new(),
        None => None,
        Some(text) => {
            let taken: Taken = serde_json::from_str(text).ok()?;
            taken.blank.filter(|_| taken.holder == *vm)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "6f9e";

    fn claim(annotations: &[(&str, &str)]) -> ObjectMeta {
        let annotations = annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        ObjectMeta {
            uid: Some(UID.to_owned()),
            annotations: Some(annotations.collect()),
            ..ObjectMeta::default()
        }
    }

    fn new_claim() -> ObjectMeta {
        claim(&[(ANNOTATION_NEVER_ATTACHED, "true"), (ANNOTATION_FORMAT_TOKEN, "t")])
    }

    fn evidence(claim: &ObjectMeta) -> Evidence<'_> {
        let (has_source, is_shareable) = (false, false);
        Evidence { claim, volume: Some("pvc-6f9e"), has_source, is_shareable, is_class_blank: true }
    }

    fn vm(uid: &str) -> Holder {
        Holder { vm: "vm".to_owned(), uid: uid.to_owned() }
    }

    fn blank() -> Blank {
        Blank { id: "a".to_owned(), boot: "b".to_owned() }
    }

    fn record(uid: &str, blank: Option<Blank>) -> String {
        Taken { holder: vm(uid), take: "1".to_owned(), blank }.to_text()
    }

    fn attested(recorded: Option<&str>, evidence: Evidence<'_>) -> bool {
        attest(recorded, &vm("u"), evidence, || Some(blank())).is_some()
    }

    #[test]
    fn only_the_first_take_of_a_new_volume_is_attested_blank() {
        let new = new_claim();
        assert!(attested(None, evidence(&new)));
        let used = claim(&[(ANNOTATION_FORMAT_TOKEN, "t")]);
        assert!(!attested(None, evidence(&used)), "it was attached before");
        let foreign = claim(&[(ANNOTATION_NEVER_ATTACHED, "true")]);
        assert!(!attested(None, evidence(&foreign)), "an interrupted format could not be recognized");
        assert!(!attested(None, Evidence { has_source: true, ..evidence(&new) }), "a copy");
        assert!(!attested(None, Evidence { is_shareable: true, ..evidence(&new) }), "a VM that shares it");
        assert!(!attested(None, Evidence { is_class_blank: false, ..evidence(&new) }), "no statement");
        for volume in [None, Some("pvc-other"), Some("by-hand")] {
            assert!(!attested(None, Evidence { volume, ..evidence(&new) }), "{volume:?}");
        }
        let without_uid = ObjectMeta { uid: None, ..new.clone() };
        assert!(!attested(None, evidence(&without_uid)));
    }

    #[test]
    fn an_attestation_ends_with_its_record() {
        let new = new_claim();
        assert!(attested(Some(&record("u", Some(blank()))), evidence(&new)), "the same attachment");
        assert!(!attested(Some(&record("u", None)), evidence(&new)), "a later attachment");
        assert!(!attested(Some(&record("other", Some(blank()))), evidence(&new)), "another VM had it");
        assert!(!attested(Some("?"), evidence(&new)));
    }
}
