//! Fuzz targets: see CONTRIBUTING.md, "Fuzzing".

use crds::VolumeAttachment;
use infra_api::AttachmentId;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube_kit::informer::Key;
use kube_kit::partial::{PersistentVolume, PersistentVolumeClaim};
use process_kit::text::one_line;
use serde::Deserialize;

use crate::attachment::decide::{Inputs, Observed, Step, decide};
use crate::infra::{ParsedId, attachment_id, parse_attachment_id};
use crate::ownership::{Grants, Permission, UnlabelledVms, VmGuest, may_attach};
use crate::volume_attachment::resolve::{claim_key, target};
use crate::volume_attachment::{is_attached, trim};

pub use crate::controller::fuzzing::management_requests;

/// Objects of an attach.
#[derive(Debug, Deserialize)]
struct Objects {
    attachment: VolumeAttachment,
    claim: Option<PersistentVolumeClaim>,
    volume: Option<PersistentVolume>,
    guest: Option<String>,
}

/// A VolumeAttachment, its claim and its volume, with the labels that say whose they are. Without a grant, nothing is attached
/// for writing; an error has one line; and a status that was written is not written again.
pub fn attachments(data: &[u8]) {
    let Ok(mut objects) = serde_json::from_slice::<Objects>(data) else { return };
    trim(&mut objects.attachment);
    let Objects { attachment, claim, volume, guest } = &objects;
    let (claim, volume) = (claim.as_ref(), volume.as_ref());
    let vm = guest.as_ref().map_or(VmGuest::Unlabelled, |guest| VmGuest::Guest(guest.clone()));
    let permission =
        volume.map(|volume| may_attach(&vm, &Grants::of_volume(volume, claim), UnlabelledVms::Refuse));
    let granted = permission.and_then(Result::ok);
    let permission = granted.unwrap_or(Permission::ReadOnly);
    let attached = is_attached(attachment);
    let desired = target(&attachment.spec, &claim_key(attachment), claim, volume, Ok(permission), attached);
    match &desired {
        Ok(spec) => assert!(spec.read_only || permission == Permission::ReadWrite),
        Err(failure) => {
            let text = failure.for_guest();
            assert_eq!(one_line(&text), text);
        }
    }
    check_ids(attachment);
    let inputs = Inputs {
        deleting: attachment.metadata.deletion_timestamp.is_some(),
        has_finalizer: true,
        generation: attachment.metadata.generation.unwrap_or_default(),
        is_new: false,
        status: attachment.status.clone().unwrap_or_default(),
        desired,
        observed: Observed::Unknown,
    };
    check_decision(inputs);
}

fn check_decision(mut inputs: Inputs) {
    let now = Time(Timestamp::UNIX_EPOCH);
    if let Err(failure) = &inputs.desired {
        inputs.observed = Observed::Failed(failure.clone());
    }
    if let Step::WriteStatus(status) = decide(&inputs, &now) {
        assert_eq!(status.error.is_some(), inputs.desired.is_err());
        inputs.status = status;
        assert!(!matches!(decide(&inputs, &now), Step::WriteStatus(_)));
    }
}

/// The ID of an attachment names its VolumeAttachment, if that has a valid name.
fn check_ids(attachment: &VolumeAttachment) {
    const UID: &str = "6f9c1b2a-0d3e-4f5a-8b7c-1234567890ab";
    let name = attachment.metadata.name.clone().unwrap_or_default();
    if AttachmentId::new(name.as_str()).is_err() {
        return;
    }
    let key = Key::new("guest", name);
    match parse_attachment_id(&attachment_id(&key, UID)) {
        Some(ParsedId::Name(found)) => assert_eq!(found, key),
        Some(ParsedId::Hashed) => {}
        None => panic!("the ID of {key} was not derived by this driver"),
    }
}

/// IDs of attachments in the storage infra, which other clients may have chosen.
pub fn attachment_ids(data: &[u8]) {
    let Ok(id) = AttachmentId::new(String::from_utf8_lossy(data)) else { return };
    if let Some(ParsedId::Name(key)) = parse_attachment_id(&id) {
        let (_, uid) = id.as_str().rsplit_once('.').expect("a derived ID ends with a UID");
        assert_eq!(parse_attachment_id(&attachment_id(&key, uid)), Some(shown(key)));
    }
}

/// What the ID of an attachment tells about its name: a long name is hashed.
fn shown(key: Key) -> ParsedId {
    if key.name.len() > 100 { ParsedId::Hashed } else { ParsedId::Name(key) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn management_requests() {
        fuzz_kit::replay("management_requests", super::management_requests);
    }

    #[test]
    fn attachments() {
        fuzz_kit::replay("attachments", super::attachments);
    }

    #[test]
    fn attachment_ids() {
        fuzz_kit::replay("attachment_ids", super::attachment_ids);
    }
}
