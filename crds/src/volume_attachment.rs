//! `VolumeAttachment` of `nestor.dev`: the VM Operator's order to plug one volume into one machine,
//! and mgmt-csi's answer.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The order: which volume, to which machine. It never changes once written; a different order is a
/// different object.
#[derive(CustomResource, Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[kube(
    group = "nestor.dev",
    version = "v1alpha1",
    kind = "VolumeAttachment",
    plural = "volumeattachments",
    namespaced,
    status = "VolumeAttachmentStatus",
    derive = "PartialEq",
    category = "nestor",
    printcolumn = r#"{"name":"Volume","type":"string","jsonPath":".spec.volumeName"}"#,
    printcolumn = r#"{"name":"Node","type":"string","jsonPath":".spec.nodeUUID"}"#,
    printcolumn = r#"{"name":"Attached","type":"boolean","jsonPath":".status.attached"}"#,
    printcolumn = r#"{"name":"Disk","type":"string","jsonPath":".status.diskUUID","priority":1}"#,
    printcolumn = r#"{"name":"Error","type":"string","jsonPath":".status.error.reason"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct VolumeAttachmentSpec {
    /// UUID of the machine in the infra.
    #[serde(rename = "nodeUUID")]
    pub node_uuid: String,
    /// Name of the management PersistentVolumeClaim, in the same namespace.
    pub volume_name: String,
    /// Plug the disk so that the machine can't write to it.
    #[serde(default)]
    pub read_only: bool,
}

/// The answer, written by mgmt-csi alone.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VolumeAttachmentStatus {
    /// Whether the infra said that the disk is plugged.
    #[serde(default)]
    pub attached: bool,
    /// UUID by which the machine finds the disk.
    #[serde(default, rename = "diskUUID", skip_serializing_if = "Option::is_none")]
    pub disk_uuid: Option<String>,
    /// Present where the disk was proven to hold no data before it was plugged: identifies that proof, which permits one
    /// formatting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blank_attestation: Option<String>,
    /// The volume's secret, for the mark of a formatting under way. Not for pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format_token: Option<String>,
    /// Generation of the order that this answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Why the last try failed; absent when it did not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<AttachError>,
    /// `Attached`, with the reason and the text of the last change.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// Why a try to plug or unplug failed.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AttachError {
    /// One CamelCase word for programs.
    pub reason: String,
    /// The whole story, for people.
    pub message: String,
    /// When this failure was first seen.
    pub time: Time,
}
