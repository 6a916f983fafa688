//! PersistentVolume.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::{Deserialize, Deserializer};

use super::{list, metadata, or_default, quantities};

/// A PersistentVolume.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub struct PersistentVolume {
    /// Its metadata, without managed fields.
    #[serde(default, deserialize_with = "metadata::read")]
    pub metadata: ObjectMeta,
    /// What it is.
    #[serde(default, deserialize_with = "or_default")]
    pub spec: PersistentVolumeSpec,
    /// How it is.
    #[serde(default, deserialize_with = "or_default")]
    pub status: PersistentVolumeStatus,
}

super::resource!(PersistentVolume, v1::PersistentVolume);

/// What a volume is.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PersistentVolumeSpec {
    /// Access modes, as Kubernetes writes them.
    #[serde(default, deserialize_with = "list")]
    pub access_modes: Vec<String>,
    /// `capacity.storage`, in bytes.
    #[serde(default, deserialize_with = "quantities::storage")]
    pub capacity: Option<u64>,
    /// The claim that it is bound to, or is for.
    pub claim_ref: Option<ClaimReference>,
    /// The CSI driver's volume; none where it is of another kind.
    pub csi: Option<CsiSource>,
    /// `Delete` or `Retain`.
    pub persistent_volume_reclaim_policy: Option<String>,
    /// `Filesystem` or `Block`.
    pub volume_mode: Option<String>,
}

/// How a volume is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct PersistentVolumeStatus {
    /// `Available`, `Bound`, `Released` and such.
    pub phase: Option<String>,
}

/// The claim that a volume is bound to, or is for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct ClaimReference {
    /// Its name.
    pub name: Option<String>,
    /// Its namespace.
    pub namespace: Option<String>,
    /// Its UID, once it is bound.
    pub uid: Option<String>,
}

/// A volume of a CSI driver.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CsiSource {
    /// The driver.
    pub driver: String,
    /// What the driver calls it.
    pub volume_handle: String,
    /// Whether it is only ever attached for reading.
    #[serde(default, deserialize_with = "or_default")]
    pub read_only: bool,
    /// What the driver is told of it, in the order of the keys: a map of one would take up half a KiB.
    #[serde(default, deserialize_with = "attributes")]
    pub volume_attributes: Vec<(String, String)>,
}

impl CsiSource {
    /// What the driver is told of it under this key.
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
    fn a_volume_of_a_driver_and_one_of_another_kind_are_read() {
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
