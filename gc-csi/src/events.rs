//! Events that gc-csi reports about guest and management objects.

use k8s_openapi::api::core::v1::ObjectReference;
use kube_kit::events::Events;

/// An event, named by its reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// A disk was attached.
    VolumeAttached,
    /// A disk could not be attached.
    VolumeAttachFailed,
    /// A disk was detached.
    VolumeDetached,
    /// A disk could not be detached.
    VolumeDetachFailed,
    /// A volume is abnormal.
    VolumeConditionAbnormal,
    /// A volume is healthy again.
    VolumeConditionNormal,
    /// A volume has more capacity than the guest uses.
    VolumeCapacityAvailable,
    /// A volume is compatible with its management claim again.
    VolumeCompatible,
    /// The management claim of a volume does not exist for this guest.
    ManagementClaimNotFound,
    /// The management claim of a volume is being deleted.
    ManagementClaimTerminating,
    /// A volume differs from its management claim.
    ManagementClaimMismatch,
    /// The management claim of a volume has other data.
    ManagementVolumeReplaced,
    /// The StorageClasses of guest and management cluster have different reclaim policies.
    ReclaimPolicyMismatch,
    /// An entry without a VolumeAttachment was removed.
    StaleEntryRemoved,
    /// The missing entry of a VolumeAttachment was restored.
    LostEntryRestored,
    /// The missing entry of a VolumeAttachment can't be restored.
    LostEntryNotRestored,
    /// A management claim is orphaned.
    Orphaned,
    /// A management claim is no longer orphaned.
    NotOrphaned,
    /// An orphaned claim was deleted.
    OrphanRemoved,
    /// An orphaned claim was not deleted.
    OrphanNotRemoved,
    /// A Node's zone label differs from the zone of its VM.
    ZoneMismatch,
    /// A Node whose VM is proven off was tainted as out of service.
    OutOfServiceTaintAdded,
    /// The taint that gc-csi had set on a Node was taken back.
    OutOfServiceTaintRemoved,
    /// A Node is not ready, and its VM is not proven off.
    NodeNotProvenOff,
}

impl Event {
    /// Reason of the event.
    pub(crate) fn reason(self) -> &'static str {
        match self {
            Self::VolumeAttached => "VolumeAttached",
            Self::VolumeAttachFailed => "VolumeAttachFailed",
            Self::VolumeDetached => "VolumeDetached",
            Self::VolumeDetachFailed => "VolumeDetachFailed",
            Self::VolumeConditionAbnormal => "VolumeConditionAbnormal",
            Self::VolumeConditionNormal => "VolumeConditionNormal",
            Self::VolumeCapacityAvailable => "VolumeCapacityAvailable",
            Self::VolumeCompatible => "VolumeCompatible",
            Self::ManagementClaimNotFound => "ManagementClaimNotFound",
            Self::ManagementClaimTerminating => "ManagementClaimTerminating",
            Self::ManagementClaimMismatch => "ManagementClaimMismatch",
            Self::ManagementVolumeReplaced => "ManagementVolumeReplaced",
            Self::ReclaimPolicyMismatch => "ReclaimPolicyMismatch",
            Self::StaleEntryRemoved => "StaleEntryRemoved",
            Self::LostEntryRestored => "LostEntryRestored",
            Self::LostEntryNotRestored => "LostEntryNotRestored",
            Self::Orphaned => "Orphaned",
            Self::NotOrphaned => "NotOrphaned",
            Self::OrphanRemoved => "OrphanRemoved",
            Self::OrphanNotRemoved => "OrphanNotRemoved",
            Self::ZoneMismatch => "ZoneMismatch",
            Self::OutOfServiceTaintAdded => "OutOfServiceTaintAdded",
            Self::OutOfServiceTaintRemoved => "OutOfServiceTaintRemoved",
            Self::NodeNotProvenOff => "NodeNotProvenOff",
        }
    }

    /// Whether it is a warning.
    pub(crate) fn is_warning(self) -> bool {
        !matches!(
            self,
            Self::VolumeAttached
                | Self::VolumeDetached
                | Self::VolumeConditionNormal
                | Self::VolumeCapacityAvailable
                | Self::VolumeCompatible
                | Self::NotOrphaned
                | Self::OutOfServiceTaintRemoved
                | Self::NodeNotProvenOff
        )
    }

    fn action(self) -> &'static str {
        match self {
            Self::VolumeAttached
            | Self::VolumeAttachFailed
            | Self::LostEntryRestored
            | Self::LostEntryNotRestored => "Attach",
            Self::VolumeDetached | Self::VolumeDetachFailed | Self::StaleEntryRemoved => "Detach",
            Self::VolumeConditionAbnormal | Self::VolumeConditionNormal | Self::VolumeCapacityAvailable => {
                "Watch"
            }
            Self::VolumeCompatible
            | Self::ManagementClaimNotFound
            | Self::ManagementClaimTerminating
            | Self::ManagementClaimMismatch
            | Self::ManagementVolumeReplaced
            | Self::Orphaned
            | Self::NotOrphaned => "Check",
            Self::ReclaimPolicyMismatch => "Provision",
            Self::OrphanRemoved | Self::OrphanNotRemoved => "Delete",
            Self::ZoneMismatch => "Label",
            Self::OutOfServiceTaintAdded | Self::OutOfServiceTaintRemoved | Self::NodeNotProvenOff => "Taint",
        }
    }

    /// Reports the event about an object.
    pub(crate) fn report(self, events: &Events, about: ObjectReference, note: String) {
        let (action, reason) = (self.action(), self.reason());
        match self.is_warning() {
            true => events.warning(about, action, reason, note),
            false => events.normal(about, action, reason, note),
        }
    }
}
