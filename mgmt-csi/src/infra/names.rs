//! IDs in the storage infra, derived from Kubernetes names. Deterministic, so that every process derives the same ID, also
//! after a crash, and a detach needs only the name and the UID of the VolumeAttachment.

use crds::names::CsiName;
use infra_api::{AttachmentId, InvalidId, SnapshotId, VolumeId};
use kube_kit::informer::Key;
use sha2::{Digest, Sha256};

/// Prefix of the IDs of attachments to hosts. No namespace and a dot: so they are no IDs of a `VolumeAttachment`.
const HOST_PREFIX: &str = "host-";

/// Maximum length of a CSI name that is used as ID unchanged. Hashed IDs are longer, so that none of them equals the name of
/// another volume.
const LONGEST_PLAIN: usize = 63;

/// Length of a hash in hex digits.
const HASH: usize = 64;

/// Volume ID for a CSI name: the name itself if it is a valid ID, else its valid characters and a hash of the name.
pub fn volume_id(csi_name: &CsiName) -> VolumeId {
    id(csi_name, VolumeId::new)
}

/// Snapshot ID for a CSI name, by the same rule.
pub fn snapshot_id(csi_name: &CsiName) -> SnapshotId {
    id(csi_name, SnapshotId::new)
}

fn id<T>(csi_name: &CsiName, new: impl Fn(String) -> Result<T, InvalidId>) -> T {
    let csi_name = csi_name.as_str();
    if csi_name.len() <= LONGEST_PLAIN
        && let Ok(id) = new(csi_name.to_owned())
    {
        return id;
    }
    let readable: String = csi_name
        .to_lowercase()
        .chars()
        .filter(|c| c.is_ascii_lowercase() || c.is_ascii_digit())
        .take(24)
        .collect();
    let hashed = format!("{readable}{}{}", if readable.is_empty() { "" } else { "-" }, hash(csi_name));
    new(hashed).expect("letters and digits with a hyphen between them are a valid ID")
}

/// Attachment ID of a `VolumeAttachment`: `<namespace>.<name>.<UID>`. A namespace has no dot, so different names give
/// different IDs. Because of the UID, a late request for a deleted VolumeAttachment cannot affect its successor of the same
/// name.
pub fn attachment_id(attachment: &Key, uid: &str) -> AttachmentId {
    // At most 63 characters of namespace, 64 of hash, 36 of UID: shorter than the maximum length of an ID.
    AttachmentId::new(format!("{}.{uid}", name_part(attachment))).unwrap_or_else(|_| {
        AttachmentId::new(format!("{}.{}", attachment.namespace, hash(&format!("{}.{uid}", attachment.name))))
            .expect("a namespace and a hash are a valid ID")
    })
}

/// Whether an ID belongs to another VolumeAttachment of the same name. Only one object of a name exists at a time: once the
/// API server has returned this one, the other one is gone.
pub fn has_same_name(id: &AttachmentId, attachment: &Key, uid: &str) -> bool {
    let other = id.as_str().strip_prefix(&name_part(attachment)).and_then(|rest| rest.strip_prefix('.'));
    other.is_some_and(|other| is_uid(other) && other != uid)
}

/// Namespace of the VolumeAttachment that an ID was derived from; None for an ID that was not derived by this driver.
pub fn namespace_of(id: &AttachmentId) -> Option<&str> {
    let (rest, uid) = id.as_str().rsplit_once('.')?;
    let (namespace, _) = rest.split_once('.')?;
    is_uid(uid).then_some(namespace)
}

/// The VolumeAttachment that an ID was derived from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ParsedId {
    /// Its namespace and name.
    Name(Key),
    /// Unknown: its name is too long for an ID, which contains a hash instead.
    Hashed,
}

/// The VolumeAttachment that an ID was derived from; None for an ID that was not derived by this driver.
pub fn parse_attachment_id(id: &AttachmentId) -> Option<ParsedId> {
    let namespace = namespace_of(id)?;
    let (rest, _) = id.as_str().rsplit_once('.')?;
    let name = rest.strip_prefix(namespace)?.strip_prefix('.')?;
    if name.len() == HASH && name.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Some(ParsedId::Hashed);
    }
    Some(ParsedId::Name(Key::new(namespace, name)))
}

/// ID of an attachment to a host of the management cluster.
pub fn host_attachment_id(unique: uuid::Uuid) -> AttachmentId {
    AttachmentId::new(format!("{HOST_PREFIX}{unique}")).expect("letters, digits and hyphens are a valid ID")
}

/// Whether an ID is of an attachment to a host, which this driver made.
pub fn is_host_attachment(id: &AttachmentId) -> bool {
    id.as_str().strip_prefix(HOST_PREFIX).is_some_and(is_uid)
}

fn name_part(attachment: &Key) -> String {
    // Names chosen by the shim have at most 61 characters; only VolumeAttachments of other creators exceed this.
    const LONGEST: usize = 100;
    if attachment.name.len() > LONGEST {
        return format!("{}.{}", attachment.namespace, hash(&attachment.name));
    }
    format!("{}.{}", attachment.namespace, attachment.name)
}

fn is_uid(text: &str) -> bool {
    uuid::Uuid::parse_str(text).is_ok_and(|uid| uid.hyphenated().to_string() == text)
}

fn hash(text: &str) -> String {
    format!("{:x}", Sha256::digest(text.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_valid_name_is_its_own_id_and_any_other_gets_an_id_that_no_name_has() {
        let volume_id = |name: &str| volume_id(&name.into());
        assert_eq!(volume_id("pvc-1").as_str(), "pvc-1");
        for odd in ["", "Pvc-1", "../../etc", "ünï", &"a".repeat(64), &"x/".repeat(120)] {
            let id = volume_id(odd);
            assert!(id.as_str().len() > LONGEST_PLAIN && id.as_str().len() <= 128, "{odd}: {id}");
            assert_eq!(id, volume_id(odd));
        }
        assert_ne!(volume_id("A"), volume_id("a"));
        assert_ne!(volume_id("a/b"), volume_id("ab/"));
    }

    const UID: &str = "6f9c1b2a-0d3e-4f5a-8b7c-1234567890ab";
    const NEXT: &str = "6f9c1b2a-0d3e-4f5a-8b7c-1234567890ac";

    #[test]
    fn every_volume_attachment_has_its_own_attachment_id() {
        let id = attachment_id(&Key::new("guest-a", "vm-1.x"), UID);
        assert_eq!(id.as_str(), format!("guest-a.vm-1.x.{UID}"));
        let long = |last: &str, uid| {
            attachment_id(&Key::new("n".repeat(63), format!("{}{last}", "a".repeat(252))), uid)
        };
        assert_ne!(long("b", UID), long("c", UID));
        assert_ne!(long("b", UID), long("b", NEXT));
    }

    #[test]
    fn the_id_of_an_attachment_to_a_host_is_that_of_no_volume_attachment() {
        let id = host_attachment_id(UID.parse().unwrap());
        assert!(is_host_attachment(&id));
        assert_eq!((namespace_of(&id), parse_attachment_id(&id)), (None, None));
        let attachment = attachment_id(&Key::new("host", "vm"), UID);
        assert!(!is_host_attachment(&attachment));
        assert!(!is_host_attachment(&AttachmentId::new("host-1").unwrap()));
    }

    #[test]
    fn an_attachment_id_gives_its_namespace_and_its_name() {
        for name in ["vm-1.x", &"a".repeat(253)] {
            let attachment = Key::new("guest-a", name);
            let id = attachment_id(&attachment, UID);
            assert_eq!(namespace_of(&id), Some("guest-a"));
            assert!(has_same_name(&id, &attachment, NEXT) && !has_same_name(&id, &attachment, UID));
            assert!(!has_same_name(&id, &Key::new("guest-a", "vm-1"), NEXT));
            assert!(!has_same_name(&id, &Key::new("guest", name), NEXT));
            let named = if name.len() > 100 { ParsedId::Hashed } else { ParsedId::Name(attachment) };
            assert_eq!(parse_attachment_id(&id), Some(named));
        }
        for other in ["bench-1", "a.b", "a.b.c"] {
            let id = AttachmentId::new(other).unwrap();
            assert_eq!((namespace_of(&id), parse_attachment_id(&id)), (None, None));
        }
    }
}
