//! `StorageBudget` of `nestor.dev`: how much of the storage infra one guest may use. Written by the platform team;
//! mgmt-csi applies it in the storage infra and reports what is used.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, ResourceExt};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Limits of what one guest may use. An absent limit does not apply. Volumes count from their creation until their data is
/// removed, also while their PersistentVolume is Released; snapshots count too.
#[derive(CustomResource, Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[kube(
    group = "nestor.dev",
    version = "v1alpha1",
    kind = "StorageBudget",
    doc = "How much of the storage infra one guest may use, and what it uses.",
    plural = "storagebudgets",
    status = "StorageBudgetStatus",
    derive = "PartialEq",
    shortname = "nsb",
    category = "nestor",
    selectable = ".spec.clusterId",
    printcolumn = r#"{"name":"Guest","type":"string","jsonPath":".spec.clusterId"}"#,
    printcolumn = r#"{"name":"Used","type":"string","jsonPath":".status.used.bytes"}"#,
    printcolumn = r#"{"name":"Limit","type":"string","jsonPath":".spec.bytes"}"#,
    printcolumn = r#"{"name":"Volumes","type":"integer","jsonPath":".status.used.volumes"}"#,
    printcolumn = r#"{"name":"Max-Volumes","type":"integer","jsonPath":".spec.volumes"}"#,
    printcolumn = r#"{"name":"Snapshots","type":"integer","jsonPath":".status.used.snapshots"}"#,
    printcolumn = r#"{"name":"Max-Snapshots","type":"integer","jsonPath":".spec.snapshots"}"#,
    printcolumn = r#"{"name":"Applied","type":"string","jsonPath":".status.conditions[?(@.type==\"Applied\")].status"}"#,
    printcolumn = r#"{"name":"Message","type":"string","jsonPath":".status.conditions[?(@.type==\"Applied\")].message","priority":1}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct StorageBudgetSpec {
    /// Cluster ID of the guest. Immutable. Of several StorageBudgets of one guest, only the oldest applies. Example:
    /// `6f9c1b2a-0d3e-4f5a-8b7c-1234567890ab`.
    pub cluster_id: String,
    /// Maximum bytes of all volumes and snapshots, as a quantity. Example: `2Ti`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub bytes: Option<Quantity>,
    /// Maximum number of volumes. Example: `200`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volumes: Option<i64>,
    /// Maximum number of snapshots. Example: `400`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshots: Option<i64>,
    /// Maximum number of snapshots of one volume. Example: `10`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshots_per_volume: Option<i64>,
    /// Limits per StorageClass of the management cluster.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub classes: Vec<ClassBudget>,
}

impl StorageBudget {
    /// Of several objects of one guest, the one with the least precedence applies: the oldest.
    pub fn precedence(&self) -> impl Ord + use<> {
        (self.creation_timestamp(), self.name_any())
    }

    /// The condition `Applied`; None before mgmt-csi has seen the object.
    pub fn applied(&self) -> Option<&Condition> {
        self.status.as_ref()?.conditions.iter().find(|one| one.type_ == "Applied")
    }
}

/// Limits for one StorageClass.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClassBudget {
    /// Name of the StorageClass in the management cluster. Example: `nestor`.
    pub name: String,
    /// Maximum bytes of volumes of the class and of their snapshots, as a quantity. Example: `500Gi`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub bytes: Option<Quantity>,
    /// Maximum number of volumes of the class. Example: `50`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volumes: Option<i64>,
}

/// What the guest uses, and whether the limits apply. Only mgmt-csi writes it.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct StorageBudgetStatus {
    /// What the guest uses, as the storage infra counts it; at most some seconds old. Absent if another StorageBudget of
    /// the guest applies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used: Option<BudgetUsage>,
    /// `metadata.generation` that mgmt-csi last reconciled. Example: `1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Conditions. mgmt-csi sets type `Applied`: `True` while the storage infra enforces the limits. Example of a reason:
    /// `Applied`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// What a guest uses.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BudgetUsage {
    /// Bytes of volumes and snapshots, as a quantity. Example: `1536Gi`.
    #[schemars(with = "String")]
    pub bytes: Quantity,
    /// Number of volumes. Example: `120`.
    pub volumes: i64,
    /// Number of snapshots. Example: `31`.
    pub snapshots: i64,
    /// The same per StorageClass.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub classes: Vec<ClassUsage>,
}

/// What a guest uses of one StorageClass.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClassUsage {
    /// Name of the StorageClass; empty for volumes without one. Example: `nestor`.
    pub name: String,
    /// Bytes of volumes of the class and of their snapshots, as a quantity. Example: `320Gi`.
    #[schemars(with = "String")]
    pub bytes: Quantity,
    /// Number of volumes of the class. Example: `40`.
    pub volumes: i64,
    /// Number of snapshots of volumes of the class. Example: `12`.
    pub snapshots: i64,
}

reasons! {
    /// Reasons of the condition `Applied`.
    pub enum BudgetReason {
        /// The storage infra enforces the limits.
        Applied,
        /// An older StorageBudget of the same guest applies.
        Superseded,
        /// A value is not valid.
        Invalid,
        /// The storage infra did not accept the limits; mgmt-csi retries.
        ApplyFailed,
    }
}
