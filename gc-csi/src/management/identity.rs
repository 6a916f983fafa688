//! Identity of this guest in the management cluster: the names of its objects, and its relation to an object by the
//! object's labels. A guest owns the objects with its own label and may use those that the platform team shares with
//! it. Other objects do not exist for it.

use std::collections::BTreeMap;

use crds::names::{self, ClaimName, ClusterId, CsiName};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube_kit::informer::Key;

/// Identity of this guest in the management cluster.
#[derive(Debug, Clone)]
pub struct GuestIdentity {
    /// Namespace of the guest.
    pub namespace: String,
    /// ID of the guest, in the label of everything it owns.
    pub cluster: ClusterId,
    /// Name prefix of its claims.
    pub prefix: String,
}

/// Relation of an object to this guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Relation {
    /// The object has this guest's label.
    Own,
    /// The object is shared with this guest.
    Shared {
        /// Whether it is shared read-only.
        read_only: bool,
    },
}

impl GuestIdentity {
    /// Key of an object in this guest's namespace.
    pub(super) fn key(&self, name: &str) -> Key {
        Key::new(self.namespace.clone(), name)
    }

    /// Name of the management claim of a volume.
    pub(super) fn claim_of(&self, csi_name: &CsiName) -> ClaimName {
        ClaimName::new(names::management_pvc(&self.prefix, self.cluster.as_str(), csi_name))
    }

    /// Name of the management snapshot of a snapshot.
    pub(super) fn snapshot_of(&self, csi_name: &CsiName) -> String {
        names::management_snapshot(self.cluster.as_str(), csi_name)
    }

    /// Key of the label that shares an object with this guest.
    pub(super) fn share_label(&self) -> String {
        format!("{}{}", names::LABEL_SHARE_PREFIX, self.cluster)
    }

    /// Key of the annotation that records this guest as a consumer.
    pub(super) fn consumer_annotation(&self) -> String {
        format!("{}{}", names::ANNOTATION_CONSUMER_PREFIX, self.cluster)
    }

    /// Relation of an object with these labels to this guest; None if the guest may not use it.
    pub(super) fn relation(&self, labels: Option<&BTreeMap<String, String>>) -> Option<Relation> {
        let labels = labels?;
        if labels.get(names::LABEL_CLUSTER_ID).map(String::as_str) == Some(self.cluster.as_str()) {
            return Some(Relation::Own);
        }
        let read_only = is_read_only_share(labels.get(&self.share_label())?)?;
        Some(Relation::Shared { read_only })
    }

    /// Whether this guest created an object with this metadata.
    pub(super) fn has_created(&self, metadata: &ObjectMeta) -> bool {
        let made_by = metadata.annotations.as_ref().and_then(|all| all.get(names::ANNOTATION_MADE_BY));
        made_by.map(String::as_str) == Some(self.cluster.as_str())
    }
}

/// Whether the value of a share's label is for reading only; None if it shares nothing.
pub(super) fn is_read_only_share(mode: &str) -> Option<bool> {
    match mode {
        "rw" => Some(false),
        "ro" => Some(true),
        _ => None,
    }
}
