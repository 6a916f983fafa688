//! Reasons of the Events that mgmt-csi emits, and of the condition on claims.

crds::reasons! {
    pub(crate) enum EventReason {
        /// On a claim or VolumeAttachment: an attach failed.
        VolumeAttachFailed,
        /// On a claim or VolumeAttachment: a detach failed.
        VolumeDetachFailed,
        /// On a claim: the storage infra lost an attachment.
        AttachmentLost,
        /// On a claim: an attachment without a VolumeAttachment was left alone.
        DanglingAttachment,
        /// On a claim: an attachment without a VolumeAttachment was detached.
        DanglingAttachmentRemoved,
        /// On a claim: its volume is unhealthy. Also the reason of the condition.
        VolumeConditionAbnormal,
        /// On a claim: its volume is healthy again. Also the reason of the condition.
        VolumeConditionNormal,
        /// On a claim that is being deleted: it stays until its disk is detached.
        WaitForDetach,
        /// On a claim that is being deleted: whether its disk is attached is unknown, so it stays.
        DetachCheckFailed,
        /// On a PersistentVolume: a file of the storage infra's host became its volume.
        VolumeAdopted,
        /// On a PersistentVolume: the file that should become its volume did not.
        AdoptionFailed,
        /// On a PersistentVolume: the adopted file has another size than the PersistentVolume.
        AdoptedSizeDiffers,
        /// On a VirtualMachine: its label `nestor.dev/cluster-id` was changed, which has no effect.
        GuestLabelChanged,
        /// On a VirtualMachine: it could not be registered as a node of the storage infra.
        NodeNotRegistered,
        /// On a deleted VirtualMachine: its node is kept, because its disks are not known to be free.
        NodeKept,
        /// On a VirtualMachine: another one with the same UUID is older.
        DuplicateUuid,
        /// On a VirtualMachine: it runs again.
        Running,
        /// On a VirtualMachine: it is powered off.
        PoweredOff,
        /// On a VirtualMachine: it is saved to disk.
        Saved,
        /// On a VirtualMachine: it no longer exists on its hypervisor.
        Gone,
        /// On a VirtualMachine: the hypervisor reports an unknown state.
        StateUnknown,
    }
}
