//! Steps of the VM Operator: writes of VolumeAttachments and statuses.

use super::rules::Rules;
use crate::objects;
use crate::state::*;

/// The next write, planned on the cached VM, or on the present one if a read is required.
pub(super) fn shim_decides(state: &State, vm_index: VmIndex, rules: Rules) -> Option<ShimWrite> {
    let attachment = state.shim.attachments[vm_index];
    let (write, needs_fresh_read) = objects::shim_write(vm_index, state.shim.vms[vm_index], attachment)?;
    match needs_fresh_read && rules.read_before_deletions {
        true => Some(objects::shim_write(vm_index, state.current_vm(vm_index), attachment)?.0),
        false => Some(write),
    }
}

pub(super) fn shim_writes(state: &mut State, vm_index: VmIndex, write: ShimWrite, rules: Rules) {
    match write {
        ShimWrite::Create if state.api.attachments[vm_index].is_none() => {
            let uid = state.new_uid(vm_index);
            let status = objects::no_status();
            state.api.attachments[vm_index] =
                Some(Attachment { uid, deleting: false, has_finalizer: true, status });
        }
        // AlreadyExists; the watch will show the existing one.
        ShimWrite::Create => {}
        ShimWrite::Delete(uid) => delete_attachment(state, vm_index, uid),
        ShimWrite::WriteStatus { status, is_current } if is_current || !rules.guard_status => {
            state.write_vm(vm_index, |vm| vm.status = status);
        }
        ShimWrite::WriteStatus { .. } => {}
    }
}

/// Deletes a VolumeAttachment with its UID as precondition.
pub(super) fn delete_attachment(state: &mut State, vm_index: VmIndex, uid: Uid) {
    let attachment = &mut state.api.attachments[vm_index];
    *attachment = attachment.and_then(|attachment| match attachment.uid == uid {
        true => attachment.has_finalizer.then_some(Attachment { deleting: true, ..attachment }),
        false => Some(attachment),
    });
}

/// Removes the finalizer, which completes a pending deletion.
pub(super) fn remove_finalizer(state: &mut State, vm_index: VmIndex) {
    let attachment = &mut state.api.attachments[vm_index];
    *attachment = attachment
        .filter(|attachment| !attachment.deleting)
        .map(|attachment| Attachment { has_finalizer: false, ..attachment });
}
