//! `StoragePool` of `nestor.dev`: a pool of the storage infra, shown in the management cluster. Only mgmt-csi writes it.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What the pool is, as it is registered in the storage infra. mgmt-csi reverts other changes: use `storage-infra pool`.
#[derive(CustomResource, Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[kube(
    group = "nestor.dev",
    version = "v1alpha1",
    kind = "StoragePool",
    doc = "A pool of the storage infra. Only mgmt-csi writes it; `storage-infra pool` changes the pool.",
    plural = "storagepools",
    status = "StoragePoolStatus",
    derive = "PartialEq",
    shortname = "nsp",
    category = "nestor",
    printcolumn = r#"{"name":"Capacity","type":"string","jsonPath":".status.capacity"}"#,
    printcolumn = r#"{"name":"Free","type":"string","jsonPath":".status.free"}"#,
    printcolumn = r#"{"name":"Used-Percent","type":"integer","jsonPath":".status.usedPercent"}"#,
    printcolumn = r#"{"name":"Healthy","type":"string","jsonPath":".status.conditions[?(@.type==\"Healthy\")].status"}"#,
    printcolumn = r#"{"name":"Schedulable","type":"string","jsonPath":".status.conditions[?(@.type==\"Schedulable\")].status"}"#,
    printcolumn = r#"{"name":"Cordoned","type":"boolean","jsonPath":".spec.cordoned"}"#,
    printcolumn = r#"{"name":"Zone","type":"string","jsonPath":".spec.zone"}"#,
    printcolumn = r#"{"name":"Message","type":"string","jsonPath":".status.conditions[?(@.type==\"Schedulable\")].message","priority":1}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct StoragePoolSpec {
    /// Storage engine. Example: `file`.
    pub engine: String,
    /// Whether the pool accepts no new volumes, because an operator cordoned it. Example: `false`.
    pub cordoned: bool,
    /// What happens when a VM writes while the pool is full: `pause` or `fail`. Example: `pause`.
    pub on_full: String,
    /// Zone that can reach the pool. Absent: all zones. Example: `zone-a`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
    /// Labels on which StorageClasses select.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

/// What the storage infra measured. Sizes are written again when they changed by a hundredth of the capacity; while the pool is
/// unhealthy, they are the last known ones.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct StoragePoolStatus {
    /// Size of the pool's filesystem, as a quantity. Example: `2Ti`.
    #[schemars(with = "String")]
    pub capacity: Quantity,
    /// What new volumes can still reserve, as a quantity. Example: `512Gi`.
    #[schemars(with = "String")]
    pub free: Quantity,
    /// What volumes and snapshots reserve, as a quantity. Example: `1536Gi`.
    #[schemars(with = "String")]
    pub reserved: Quantity,
    /// What is in use in the filesystem, as a quantity. Example: `800Gi`.
    #[schemars(with = "String")]
    pub used: Quantity,
    /// `used` in percent of `capacity`. Example: `39`.
    pub used_percent: i64,
    /// Conditions. Types: `Healthy`, and `Schedulable`: whether the pool accepts new volumes. Example of a reason: `Cordoned`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

reasons! {
    /// Reasons of the conditions of a StoragePool.
    pub enum PoolReason {
        /// The pool's directory is there and can be written to; it accepts new volumes.
        Available,
        /// An operator cordoned the pool: it accepts no new volumes.
        Cordoned,
        /// An operator suspended the pool: it accepts no new volumes, and the VMs with its disks are paused.
        Suspended,
        /// The pool's directory is missing, not the registered one, or does not answer.
        Unavailable,
        /// The pool has no free space for a new volume.
        Full,
    }
}
