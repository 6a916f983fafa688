//! From Kubernetes' names to the infra's ids. Deterministic, so that any process after any crash comes to
//! the same id, and a detach needs nothing but the order's own name.

use infra_api::{AttachmentId, VolumeId};
use kube_kit::informer::Key;
use sha2::{Digest, Sha256};

/// The longest CSI name that becomes an id as it stands. Hashed ids are longer than this, so that none of
/// them can be another volume's name.
const LONGEST_PLAIN: usize = 63;

/// The infra's id for the volume of a CSI name: the name itself where it is a legal id, else what of it is
/// legal, with a hash of the whole.
pub fn volume_id(csi_name: &str) -> VolumeId {
    if csi_name.len() <= LONGEST_PLAIN
        && let Ok(id) = VolumeId::new(csi_name)
    {
        return id;
    }
    let readable: String = csi_name
        .to_lowercase()
        .chars()
        .filter(|c| c.is_ascii_lowercase() || c.is_ascii_digit())
        .take(24)
        .collect();
    let id = format!("{readable}{}{}", if readable.is_empty() { "" } else { "-" }, hash(csi_name));
    VolumeId::new(id).expect("letters, digits and a hyphen between them are always an id")
}

/// The infra's id for what one `VolumeAttachment` orders: `<namespace>.<name>`. A namespace has no dot, so
/// no two orders meet in one id.
pub fn attachment_id(order: &Key) -> AttachmentId {
    AttachmentId::new(format!("{}.{}", order.namespace, order.name)).unwrap_or_else(|_| {
        // Only a name of more than 185 characters, which nothing of ours makes, comes here.
        AttachmentId::new(format!("{}.{}", order.namespace, hash(&order.name)))
            .expect("a namespace and a hash are always an id")
    })
}

fn hash(text: &str) -> String {
    Sha256::digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
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

    #[test]
    fn any_order_has_an_attachment_id_of_its_own() {
        assert_eq!(attachment_id(&Key::new("guest-a", "vm-1.x")).as_str(), "guest-a.vm-1.x");
        let long =
            |last: &str| attachment_id(&Key::new("n".repeat(63), format!("{}{last}", "a".repeat(252))));
        assert_ne!(long("b"), long("c"));
    }
}
