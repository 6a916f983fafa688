//! Steps of mgmt-csi: reconciles of VolumeAttachments.

use super::rules::Rules;
use super::shim::{delete_attachment, remove_finalizer};
use crate::objects::{self, Next};
use crate::state::*;

pub(super) fn mgmt_continues(state: &mut State, vm_index: VmIndex, replica: ReplicaIndex, rules: Rules) {
    let cached = state.mgmt[replica].attachments[vm_index];
    let Some(mut reconcile) = state.mgmt[replica].reconciles[vm_index] else {
        let Some(attachment) = cached else { return };
        let begun = Reconcile { uid: attachment.uid, observed: Observed::Unknown, activity: Activity::Infra };
        return mgmt_decides(state, vm_index, replica, begun, rules);
    };
    let there = state.api.attachments[vm_index].filter(|attachment| attachment.uid == reconcile.uid);
    let continues = match reconcile.activity {
        Activity::Infra => return,
        Activity::FindSameName => {
            let found = find_same_name(state, vm_index, reconcile.uid);
            reconcile.observed = found.map_or(Observed::NoneAttached, Observed::SameName);
            true
        }
        Activity::ConfirmPredecessor(other) => {
            reconcile.observed = Observed::Predecessor(other);
            store(state, vm_index, replica, there)
        }
        Activity::WriteStatus(status) => {
            let answered = there.map(|attachment| Attachment { status, ..attachment });
            store_write(state, vm_index, replica, answered)
        }
        Activity::AddFinalizer => {
            let has_finalizer = there.map(|attachment| Attachment { has_finalizer: true, ..attachment });
            store_write(state, vm_index, replica, has_finalizer.filter(|attachment| !attachment.deleting))
        }
        Activity::Recreate => {
            if there.is_some() {
                delete_attachment(state, vm_index, reconcile.uid);
            }
            let left = state.api.attachments[vm_index].filter(|attachment| attachment.uid == reconcile.uid);
            store(state, vm_index, replica, left)
        }
        Activity::RemoveFinalizer => {
            if there.is_some_and(|attachment| attachment.has_finalizer) {
                remove_finalizer(state, vm_index);
            }
            false
        }
    };
    state.mgmt[replica].reconciles[vm_index] = None;
    if continues {
        mgmt_decides(state, vm_index, replica, reconcile, rules);
    } else if state.api.attachments[vm_index].is_none() && reconcile.observed != Observed::Detached {
        // The VolumeAttachment is gone. If another one has its name, the reconcile of that one handles the disk.
        mgmt_decides_on(state, vm_index, replica, reconcile, None, rules);
    }
}

/// Decides with the cached VolumeAttachment.
pub(super) fn mgmt_decides(
    state: &mut State,
    vm_index: VmIndex,
    replica: ReplicaIndex,
    reconcile: Reconcile,
    rules: Rules,
) {
    let own = state.mgmt[replica].attachments[vm_index].filter(|attachment| attachment.uid == reconcile.uid);
    mgmt_decides_on(state, vm_index, replica, reconcile, own, rules);
}

fn mgmt_decides_on(
    state: &mut State,
    vm_index: VmIndex,
    replica: ReplicaIndex,
    mut reconcile: Reconcile,
    own: Option<Attachment>,
    rules: Rules,
) {
    let mut next = objects::decide(vm_index, reconcile, own);
    if !rules.detach_before_finalizer_removal
        && let (Next::Send(_, Operation::Delete), Some(_)) = (next, own)
    {
        next = Next::Do(Activity::RemoveFinalizer);
    }
    let next_reconcile = match next {
        Next::End => None,
        Next::Do(activity) => {
            reconcile.activity = activity;
            Some(reconcile)
        }
        Next::Send(uid, operation) => {
            let uid = if rules.ids_contain_uid { uid } else { 0 };
            // Without a VolumeAttachment, no reconcile waits for the answer.
            let from = own.is_some().then_some(replica);
            state.infra.requests.insert(Request { from, vm_index, uid, operation, accepted: false });
            if matches!(operation, Operation::Put(_)) {
                reconcile.observed = Observed::AttachSent;
            }
            reconcile.activity = Activity::Infra;
            own.is_some().then_some(reconcile)
        }
    };
    state.mgmt[replica].reconciles[vm_index] = next_reconcile;
}

/// Attachment of another VolumeAttachment of the same name for this VM.
pub(super) fn find_same_name(state: &State, vm_index: VmIndex, uid: Uid) -> Option<Uid> {
    let rows = state.infra.rows.iter().filter(|row| row.vm_index == vm_index && row.uid != 0);
    let mut found =
        rows.filter(|row| objects::has_same_name_in_infra(vm_index, uid, (row.vm_index, row.uid)));
    found.next().map(|row| row.uid)
}

fn store_write(
    state: &mut State,
    vm_index: VmIndex,
    replica: ReplicaIndex,
    written: Option<Attachment>,
) -> bool {
    if written.is_some() {
        state.api.attachments[vm_index] = written;
    }
    store(state, vm_index, replica, written)
}

/// Stores the response of a write or read in the cache; false if the VolumeAttachment is gone.
fn store(state: &mut State, vm_index: VmIndex, replica: ReplicaIndex, answer: Option<Attachment>) -> bool {
    if answer.is_some() {
        state.mgmt[replica].attachments[vm_index] = answer;
    }
    answer.is_some()
}

/// Stops waiting for the request of a reconcile.
pub(super) fn abandon(state: &mut State, vm_index: VmIndex, replica: ReplicaIndex) -> Option<Request> {
    let waited = |request: &&Request| request.vm_index == vm_index && request.from == Some(replica);
    let request = *state.infra.requests.iter().find(waited)?;
    state.infra.requests.remove(&request);
    state.infra.requests.insert(Request { from: None, ..request });
    Some(request)
}
