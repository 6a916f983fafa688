//! Rules of the implementation that a test can break.

/// Rules of the implementation. Tests break single rules, to prove that the properties detect it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rules {
    /// The finalizer is removed only after the storage infra has detached the disk.
    pub detach_before_finalizer_removal: bool,
    /// An attachment ID contains the UID of its VolumeAttachment and is never reused.
    pub ids_contain_uid: bool,
    /// The storage infra refuses deleted IDs.
    pub remember_deleted_ids: bool,
    /// The storage infra attaches the volume to one VM only.
    pub attach_to_one_vm: bool,
    /// The VM Operator writes the status with the `resourceVersion` on which it was planned.
    pub guard_status: bool,
    /// A removal patch applies only to the spec on which it was planned.
    pub guard_removals: bool,
    /// An attach that finds its entry updates the annotation `volumes-confirmed`.
    pub confirm_entries: bool,
    /// Before each removal, gc-csi checks that the guest does not request the disk.
    pub check_guest_before_removals: bool,
    /// Dangling attachments are detached.
    pub detach_dangling: bool,
    /// A new leader starts with a list of all objects.
    pub list_on_lease: bool,
    /// The VM Operator reads the VM before it deletes a VolumeAttachment.
    pub read_before_deletions: bool,
}

impl Rules {
    /// All rules.
    pub const ALL: Self = Self {
        detach_before_finalizer_removal: true,
        ids_contain_uid: true,
        remember_deleted_ids: true,
        attach_to_one_vm: true,
        guard_status: true,
        guard_removals: true,
        confirm_entries: true,
        check_guest_before_removals: true,
        detach_dangling: true,
        list_on_lease: true,
        read_before_deletions: true,
    };
}
