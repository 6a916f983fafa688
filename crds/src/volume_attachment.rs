//! `VolumeAttachment` of `nestor.dev`: the request to attach one volume to one VM, created by the VM Operator and
//! reconciled by mgmt-csi.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::names::ClaimName;

/// Requests that one volume be attached to one VM. The VM Operator creates the object; mgmt-csi attaches the disk and
/// reports in the status. The spec is immutable.
#[derive(CustomResource, Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[kube(
    group = "nestor.dev",
    version = "v1alpha1",
    kind = "VolumeAttachment",
    doc = "Request to attach one volume to one VM, and its observed state.",
    plural = "volumeattachments",
    namespaced,
    status = "VolumeAttachmentStatus",
    derive = "PartialEq",
    shortname = "nva",
    category = "nestor",
    selectable = ".spec.volumeName",
    printcolumn = r#"{"name":"Claim","type":"string","jsonPath":".spec.volumeName"}"#,
    printcolumn = r#"{"name":"Node","type":"string","jsonPath":".spec.nodeUUID"}"#,
    printcolumn = r#"{"name":"Attached","type":"boolean","jsonPath":".status.attached"}"#,
    printcolumn = r#"{"name":"Disk","type":"string","jsonPath":".status.diskUUID","priority":1}"#,
    printcolumn = r#"{"name":"Error","type":"string","jsonPath":".status.error.reason"}"#,
    printcolumn = r#"{"name":"Message","type":"string","jsonPath":".status.conditions[?(@.type==\"Attached\")].message","priority":1}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct VolumeAttachmentSpec {
    /// UUID of the VM in the storage infra: `status.biosUUID` of the VirtualMachine, or else its `status.instanceUUID`,
    /// in lower case. Example: `42103d4a-9a5f-4b51-8f5c-0c9f7a4c1e11`.
    #[serde(rename = "nodeUUID")]
    pub node_uuid: String,
    /// Name of the PersistentVolumeClaim in the namespace of this object. It must be bound to a PersistentVolume of driver
    /// `mgmt.csi.nestor.dev`. Example: `pvc-0a1b2c3d`.
    pub volume_name: ClaimName,
    /// Whether the disk is attached read-only. Default: `false`. Example: `true`.
    #[serde(default)]
    pub read_only: bool,
}

/// Observed state of the attachment. Only mgmt-csi writes it.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VolumeAttachmentStatus {
    /// Whether the disk is attached to the VM, as last reported by the storage infra: the status of the condition `Attached`,
    /// for clients that do not read conditions. Example: `true`.
    #[serde(default)]
    pub attached: bool,
    /// UUID under which the guest finds the disk, for instance as its serial or WWN in `/dev/disk/by-id`. Present while
    /// attached. Example: `6f9c1b2a-0d3e-4f5a-8b7c-1234567890ab`.
    #[serde(default, rename = "diskUUID", skip_serializing_if = "Option::is_none")]
    pub disk_uuid: Option<String>,
    /// ID of the storage infra's attestation that the disk held no data before it was attached. It permits the node plugin
    /// to format the disk once; without it, a disk is never formatted. Example: `0d3e6f9c-4f5a-4b7c-8123-567890abcdef`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blank_attestation: Option<String>,
    /// Secret of the volume with which the node plugin marks a disk that it is formatting. Do not expose it to pods.
    /// Example: `5c0c9f7a-4c1e-4110-8d4a-9a5f8f519c10`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format_token: Option<String>,
    /// `metadata.generation` that mgmt-csi last reconciled. Example: `1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Failure of the last attach or detach; absent if it succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<AttachError>,
    /// Conditions. mgmt-csi sets type `Attached`: `True` while the disk is attached; its reason says why the disk is or is
    /// not attached. Example of a reason: `VolumeInUse`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

reasons! {
    /// Reasons in `status.error` and of the condition `Attached`.
    pub enum AttachReason {
        /// The disk is attached. Only in the condition.
        Attached,
        /// The claim does not exist.
        ClaimNotFound,
        /// The claim is being deleted.
        ClaimTerminating,
        /// The claim and its PersistentVolume are not bound to each other.
        ClaimNotBound,
        /// The PersistentVolume, or its volume in the storage infra, does not exist.
        VolumeNotFound,
        /// The PersistentVolume belongs to another driver.
        ForeignVolume,
        /// The VM has no label `nestor.dev/cluster-id`, or it is not recorded, so its guest is unknown.
        GuestUnknown,
        /// The volume is neither the VM's guest's own nor shared with it.
        NotShared,
        /// The storage infra has no node with the UUID.
        NodeNotFound,
        /// The volume is attached to another VM.
        VolumeInUse,
        /// The attachment ID exists with another volume or node.
        AttachmentConflict,
        /// The attachment ID was deleted and cannot be reused.
        AttachmentDeleted,
        /// The VM is not running.
        NodeNotRunning,
        /// The VM has the maximum number of disks.
        TooManyDisks,
        /// The host of the VM does not reach the pool of the volume.
        VolumeNotReachable,
        /// The platform team suspended the volume or its pool.
        VolumeSuspended,
        /// The storage infra considers the request invalid.
        AttachRefused,
        /// The attach failed; its result may be unknown.
        AttachFailed,
        /// The detach failed; the disk may still be attached.
        DetachFailed,
    }
}

/// Failure of an attach or detach.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AttachError {
    /// Machine-readable reason in CamelCase. Example: `VolumeInUse`.
    pub reason: String,
    /// Human-readable failure message: the object, the cause and what to do. Example: `volume pvc-0a1b2c3d is attached to
    /// node worker-2`.
    pub message: String,
    /// Time at which this failure first occurred (RFC 3339). Example: `2026-01-01T00:00:00Z`.
    pub time: Time,
}
