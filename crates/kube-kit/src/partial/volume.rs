//! Partial PersistentVolume.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::{Deserialize, Deserializer};

use super::{list, metadata, or_default, quantities};

/// A PersistentVolume.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub struct PersistentVolume {
    /// Metadata without managed fields.
    #[serde(default, deserialize_with = "metadata::read")]
    pub metadata: ObjectMeta,
    /// Specification.
    #[serde(default, deserialize_with = "or_default")]
    pub spec: PersistentVolumeSpec,
    /// Status.
    #[serde(default, deserialize_with = "or_default")]
    pub status: PersistentVolumeStatus,
}

super::resource!(PersistentVolume, v1::PersistentVolume);

/// Specification of a volume.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PersistentVolumeSpec {
    /// Access modes.
    #[serde(default, deserialize_with = "list")]
    pub access_modes: Vec<String>,
    /// `capacity.storage`, in bytes.
    #[serde(default, deserialize_with = "quantities::storage")]
    pub capacity: Option<u64>,
    /// Bound claim, or the claim for which the volume is reserved.
    pub claim_ref: Option<ClaimReference>,
    /// CSI volume source; None for other volume types.
    pub csi: Option<CsiSource>,
    /// `Delete` or `Retain`.
    pub persistent_volume_reclaim_policy: Option<String>,
    /// StorageClass.
    pub storage_class_name: Option<String>,
    /// `Filesystem` or `Block`.
    pub volume_mode: Option<String>,
}

/// Status of a volume.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct PersistentVolumeStatus {
    /// `Available`, `Bound`, `Released` etc.
    pub phase: Option<String>,
}

/// Reference to a claim.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct ClaimReference {
    /// Name.
    pub name: Option<String>,
    /// Namespace.
    pub namespace: Option<String>,
    /// UID, once bound.
    pub uid: Option<String>,
}

/// CSI volume source.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CsiSource {
    /// Driver name.
    pub driver: String,
    /// Volume handle.
    pub volume_handle: String,
    /// Whether the volume is read-only.
    #[serde(default, deserialize_with = "or_default")]
    pub read_only: bool,
    /// Volume attributes, sorted by key. A map with one entry would use half a KiB.
    #[serde(default, deserialize_with = "attributes")]
    pub volume_attributes: Vec<(String, String)>,
}

impl CsiSource {
    /// Returns a volume attribute.
    pub fn attribute(&self, key: &str) -> Option<&str> {
        self.volume_attributes.iter().find(|(there, _)| there == key).map(|(_, value)| value.as_str())
    }
}

fn attributes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<(String, String)>, D::Error> {
    let attributes: BTreeMap<String, String> = or_default(deserializer)?;
    Ok(attributes.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn csi_volumes_and_other_volumes_are_decoded() {
        let volume: PersistentVolume = serde_json::from_value(json!({
            "metadata": {"name": "pv-1"},
            "spec": {
                "capacity": {"storage": "1Mi"}, "persistentVolumeReclaimPolicy": "Delete",
                "claimRef": {"kind": "PersistentVolumeClaim", "name": "c", "namespace": "n", "uid": "u"},
                "csi": {"driver": "d", "volumeHandle": "h", "volumeAttributes": {"a": "b"}},
            },
            "status": {"phase": "Bound"},
        }))
        .unwrap();
        let csi = volume.spec.csi.unwrap();
        assert_eq!((csi.driver.as_str(), csi.volume_handle.as_str(), csi.read_only), ("d", "h", false));
        assert_eq!((csi.attribute("a"), csi.attribute("b")), (Some("b"), None));
        assert_eq!(volume.spec.capacity, Some(1 << 20));
        assert_eq!(volume.spec.claim_ref.unwrap().uid.as_deref(), Some("u"));
        assert_eq!(volume.status.phase.as_deref(), Some("Bound"));
        let other = json!({"metadata": {"name": "pv-2"}, "spec": {"nfs": {"path": "/", "server": "s"}}});
        assert_eq!(serde_json::from_value::<PersistentVolume>(other).unwrap().spec.csi, None);
    }
}
