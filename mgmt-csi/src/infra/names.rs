//! From Kubernetes' names to the infra's ids. Deterministic, so that any process after any crash comes to
//! the same id, and a detach needs nothing but the order's own name.

use infra_api::{AttachmentId, InvalidId, SnapshotId, VolumeId};
use kube_kit::informer::Key;
use sha2::{Digest, Sha256};

/// The longest CSI name that becomes an id as it stands. Hashed ids are longer than this, so that none of
/// them can be another volume's name.
const LONGEST_PLAIN: usize = 63;

/// How many characters a hash has.
const HASH: usize = 64;

/// The infra's id for the volume of a CSI name: the name itself where it is a legal id, else what of it is
/// legal, with a hash of the whole.
pub fn volume_id(csi_name: &str) -> VolumeId {
    id(csi_name, VolumeId::new)
}

/// The infra's id for the snapshot of a CSI name, by the same rule.
pub fn snapshot_id(csi_name: &str) -> SnapshotId {
    id(csi_name, SnapshotId::new)
}

fn id<T>(csi_name: &str, new: impl Fn(String) -> Result<T, InvalidId>) -> T {
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
    new(hashed).expect("letters, digits and a hyphen between them are always an id")
}

/// The infra's id for what one `VolumeAttachment` orders: `<namespace>.<name>.<UID>`. A namespace has no dot, so no two
/// names meet in one id; and with the UID, nothing that is done for one order, however late, touches the next order of
/// the same name.
pub fn attachment_id(order: &Key, uid: &str) -> AttachmentId {
    // At most 63 characters of namespace, 64 of hash, 36 of UID: shorter than the longest id.
    AttachmentId::new(format!("{}.{uid}", name_part(order))).unwrap_or_else(|_| {
        AttachmentId::new(format!("{}.{}", order.namespace, hash(&format!("{}.{uid}", order.name))))
            .expect("a namespace and a hash are always an id")
    })
}

/// Whether an id is that of another order of the same name. There is one object of a name at a time, so once the API
/// server has shown this order, one that was there before is over.
pub fn is_namesake(id: &AttachmentId, order: &Key, uid: &str) -> bool {
    let other = id.as_str().strip_prefix(&name_part(order)).and_then(|rest| rest.strip_prefix('.'));
    other.is_some_and(|other| is_uid(other) && other != uid)
}

/// The namespace of the order that an id was made of; None for an id that somebody else chose.
pub fn namespace_of(id: &AttachmentId) -> Option<&str> {
    let (rest, uid) = id.as_str().rsplit_once('.')?;
    let (namespace, _) = rest.split_once('.')?;
    is_uid(uid).then_some(namespace)
}

/// What an id says of the order that it was made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Named {
    /// Which one it is.
    Order(Key),
    /// Only that its name is too long for an id.
    Hash,
}

/// The order that an id was made of; None for an id that somebody else chose.
pub fn order_of(id: &AttachmentId) -> Option<Named> {
    let namespace = namespace_of(id)?;
    let (rest, _) = id.as_str().rsplit_once('.')?;
    let name = rest.strip_prefix(namespace)?.strip_prefix('.')?;
    if name.len() == HASH && name.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Some(Named::Hash);
    }
    Some(Named::Order(Key::new(namespace, name)))
}

fn name_part(order: &Key) -> String {
    // Names of ours have at most 61 characters. One of more than this comes from somebody else.
    const LONGEST: usize = 100;
    if order.name.len() > LONGEST {
        return format!("{}.{}", order.namespace, hash(&order.name));
    }
    format!("{}.{}", order.namespace, order.name)
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
    fn a_legal_name_is_its_own_id_and_any_other_gets_one_that_no_name_has() {
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
    fn any_order_has_an_attachment_id_of_its_own() {
        let id = attachment_id(&Key::new("guest-a", "vm-1.x"), UID);
        assert_eq!(id.as_str(), format!("guest-a.vm-1.x.{UID}"));
        let long = |last: &str, uid| {
            attachment_id(&Key::new("n".repeat(63), format!("{}{last}", "a".repeat(252))), uid)
        };
        assert_ne!(long("b", UID), long("c", UID));
        assert_ne!(long("b", UID), long("b", NEXT));
    }

    #[test]
    fn an_id_tells_its_namespace_and_whether_it_is_of_an_order_of_the_same_name() {
        for name in ["vm-1.x", &"a".repeat(253)] {
            let order = Key::new("guest-a", name);
            let id = attachment_id(&order, UID);
            assert_eq!(namespace_of(&id), Some("guest-a"));
            assert!(is_namesake(&id, &order, NEXT) && !is_namesake(&id, &order, UID));
            assert!(!is_namesake(&id, &Key::new("guest-a", "vm-1"), NEXT));
            assert!(!is_namesake(&id, &Key::new("guest", name), NEXT));
            let named = if name.len() > 100 { Named::Hash } else { Named::Order(order) };
            assert_eq!(order_of(&id), Some(named));
        }
        for other in ["bench-1", "a.b", "a.b.c"] {
            let id = AttachmentId::new(other).unwrap();
            assert_eq!((namespace_of(&id), order_of(&id)), (None, None));
        }
    }
}
