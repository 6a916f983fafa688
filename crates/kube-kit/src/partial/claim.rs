//! Partial PersistentVolumeClaim.

use k8s_openapi::api::core::v1;
use k8s_openapi::api::core::v1::{
    ModifyVolumeStatus, PersistentVolumeClaimCondition, TypedLocalObjectReference,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};

use super::{list, metadata, or_default, quantities};

/// A PersistentVolumeClaim.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub struct PersistentVolumeClaim {
    /// Metadata without managed fields.
    #[serde(default, deserialize_with = "metadata::read")]
    pub metadata: ObjectMeta,
    /// Specification.
    #[serde(default, deserialize_with = "or_default")]
    pub spec: PersistentVolumeClaimSpec,
    /// Status.
    #[serde(default, deserialize_with = "or_default")]
    pub status: PersistentVolumeClaimStatus,
}

super::resource!(PersistentVolumeClaim, v1::PersistentVolumeClaim);

/// Specification of a claim.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PersistentVolumeClaimSpec {
    /// Access modes.
    #[serde(default, deserialize_with = "list")]
    pub access_modes: Vec<String>,
    /// Data source.
    pub data_source: Option<Box<TypedLocalObjectReference>>,
    /// Whether it has a `dataSourceRef`.
    #[serde(default, rename = "dataSourceRef", deserialize_with = "is_set")]
    pub has_data_source_ref: bool,
    /// `resources.requests.storage`, in bytes.
    #[serde(default, rename = "resources", deserialize_with = "quantities::requested")]
    pub requested: Option<u64>,
    /// StorageClass.
    pub storage_class_name: Option<String>,
    /// Requested VolumeAttributesClass.
    pub volume_attributes_class_name: Option<String>,
    /// `Filesystem` or `Block`.
    pub volume_mode: Option<String>,
    /// Name of the bound volume, or of the volume to bind.
    pub volume_name: Option<String>,
}

/// Whether a field has a value, which is not kept.
fn is_set<'de, D: Deserializer<'de>>(field: D) -> Result<bool, D::Error> {
    Ok(Option::<IgnoredAny>::deserialize(field)?.is_some())
}

/// Status of a claim.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PersistentVolumeClaimStatus {
    /// `allocatedResources.storage`, in bytes: target size of an expansion.
    #[serde(default, rename = "allocatedResources", deserialize_with = "quantities::storage")]
    pub allocated: Option<u64>,
    /// `allocatedResourceStatuses.storage`: state of the expansion.
    #[serde(default, rename = "allocatedResourceStatuses", deserialize_with = "quantities::state")]
    pub allocated_state: Option<String>,
    /// `capacity.storage`, in bytes.
    #[serde(default, deserialize_with = "quantities::storage")]
    pub capacity: Option<u64>,
    /// Conditions.
    #[serde(default, deserialize_with = "list")]
    pub conditions: Vec<PersistentVolumeClaimCondition>,
    /// Current VolumeAttributesClass.
    pub current_volume_attributes_class_name: Option<String>,
    /// State of a change of the VolumeAttributesClass.
    pub modify_volume_status: Option<Box<ModifyVolumeStatus>>,
    /// `Pending`, `Bound` or `Lost`.
    pub phase: Option<String>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_claim_is_decoded_with_sizes_in_bytes() {
        let claim: PersistentVolumeClaim = serde_json::from_value(json!({
            "metadata": {"name": "c", "namespace": "n", "managedFields": [{"manager": "m"}]},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": "fast", "volumeMode": "Block",
                "resources": {"requests": {"storage": "1Gi", "cpu": "1"}, "limits": {"storage": "2Gi"}},
                "dataSource": {"apiGroup": "g", "kind": "VolumeSnapshot", "name": "s"},
                "dataSourceRef": {"apiGroup": "g", "kind": "VolumeSnapshot", "name": "s"},
            },
            "status": {
                "phase": "Bound", "capacity": {"storage": "1536Mi"}, "conditions": null,
                "allocatedResources": {"storage": "2Gi"},
                "allocatedResourceStatuses": {"storage": "ControllerResizeInProgress"},
                "modifyVolumeStatus": {"status": "Pending", "targetVolumeAttributesClassName": "gold"},
            },
        }))
        .unwrap();
        assert_eq!(claim.metadata.managed_fields, None);
        assert_eq!(claim.spec.requested, Some(1 << 30));
        assert!(claim.spec.has_data_source_ref);
        assert_eq!(claim.spec.data_source.unwrap().name, "s");
        assert_eq!((claim.status.capacity, claim.status.allocated), (Some(3 << 29), Some(2 << 30)));
        assert_eq!(claim.status.allocated_state.as_deref(), Some("ControllerResizeInProgress"));
        assert_eq!(claim.status.modify_volume_status.unwrap().status, "Pending");
        let new: PersistentVolumeClaim = serde_json::from_value(json!({"metadata": {"name": "c"}})).unwrap();
        assert_eq!((new.spec.requested, new.status.phase), (None, None));
        assert!(!new.spec.has_data_source_ref);
    }
}
