//! Normalization of states: counters are replaced by their ranks, so that states with different histories are equal.

use std::collections::{BTreeSet, VecDeque};

use super::*;

impl State {
    /// All UIDs of VolumeAttachments of a VM that any component still knows.
    fn uids(&mut self, vm_index: VmIndex) -> Vec<&mut Uid> {
        let mut uids: Vec<&mut Uid> = Vec::new();
        let mgmt = self.mgmt.iter_mut().flat_map(|mgmt| [mgmt.attachments[vm_index].as_mut()]);
        let attachments = [self.api.attachments[vm_index].as_mut(), self.shim.attachments[vm_index].as_mut()];
        uids.extend(attachments.into_iter().chain(mgmt).flatten().map(|attachment| &mut attachment.uid));
        uids.extend(self.reported_attached[vm_index].as_mut());
        let standby = self.standby.as_mut().and_then(|standby| standby.attachments[vm_index].as_mut());
        uids.extend(standby.map(|attachment| &mut attachment.uid));
        if let Some((of, ShimWrite::Delete(uid))) = &mut self.in_flight
            && *of == vm_index
        {
            uids.push(uid);
        }
        uids
    }

    /// Replaces counters by ranks, sorts equivalent replicas, and clears caches of the second replica of mgmt-csi that it does
    /// not use.
    pub fn normalize(&mut self) {
        for vm_index in 0..VMS {
            if self.mgmt[1].reconciles[vm_index].is_none() {
                self.mgmt[1].attachments[vm_index] = None;
            }
        }
        if self.budget.replicas == REPLICAS {
            self.gc.sort_unstable();
        }
        for vm_index in 0..VMS {
            self.rank_uids(vm_index);
            self.rank_generations(vm_index);
        }
    }

    fn rank_uids(&mut self, vm_index: VmIndex) {
        let mut reconciles: VecDeque<Reconcile> =
            self.mgmt.iter().filter_map(|mgmt| mgmt.reconciles[vm_index]).collect();
        let mut known: BTreeSet<Uid> = self.uids(vm_index).into_iter().map(|uid| *uid).collect();
        for reconcile in &reconciles {
            known.insert(reconcile.uid);
            known.extend(other_of(reconcile));
        }
        for request in self.infra.requests.iter().filter(|request| request.vm_index == vm_index) {
            known.insert(request.uid);
            if let Operation::Put(Some(earlier)) = request.operation {
                known.insert(earlier);
            }
        }
        known.extend(self.infra.rows.iter().filter(|row| row.vm_index == vm_index).map(|row| row.uid));
        if let Some((of, uid)) = self.infra.unrecorded
            && of == vm_index
        {
            known.insert(uid);
        }
        // The common ID of all VolumeAttachments (a broken rule) stays 0.
        known.remove(&0);
        // A deleted ID that no component knows any more has no effect.
        self.infra.deleted_ids.retain(|(of, uid)| *of != vm_index || known.contains(uid));
        let rank = |uid: Uid| known.iter().position(|one| *one == uid).map_or(uid, |at| at as Uid + 1);
        if known.iter().all(|uid| rank(*uid) == *uid) {
            return;
        }
        for uid in self.uids(vm_index) {
            *uid = rank(*uid);
        }
        for mgmt in &mut self.mgmt {
            if mgmt.reconciles[vm_index].is_some() {
                mgmt.reconciles[vm_index] = reconciles.pop_front().map(|mut reconcile| {
                    reconcile.uid = rank(reconcile.uid);
                    reconcile.observed = match reconcile.observed {
                        Observed::SameName(uid) => Observed::SameName(rank(uid)),
                        Observed::Predecessor(uid) => Observed::Predecessor(rank(uid)),
                        same => same,
                    };
                    if let Activity::ConfirmPredecessor(uid) = reconcile.activity {
                        reconcile.activity = Activity::ConfirmPredecessor(rank(uid));
                    }
                    reconcile
                });
            }
        }
        let Infra { rows, deleted_ids, unrecorded, requests, .. } = &mut self.infra;
        let of = |row: Row| if row.vm_index == vm_index { Row { uid: rank(row.uid), ..row } } else { row };
        *rows = rows.iter().copied().map(of).collect();
        *deleted_ids = deleted_ids
            .iter()
            .map(|(of, uid)| (*of, if *of == vm_index { rank(*uid) } else { *uid }))
            .collect();
        if let Some((of, uid)) = unrecorded
            && *of == vm_index
        {
            *uid = rank(*uid);
        }
        let of = |mut request: Request| {
            if request.vm_index == vm_index {
                request.uid = rank(request.uid);
                if let Operation::Put(Some(earlier)) = &mut request.operation {
                    *earlier = rank(*earlier);
                }
            }
            request
        };
        *requests = requests.iter().copied().map(of).collect();
    }

    fn rank_generations(&mut self, vm_index: VmIndex) {
        // The VM Operator does not use them.
        self.shim.vms[vm_index].vm = Vm { generation: 0, confirmed: 0, ..self.shim.vms[vm_index].vm };
        if let Some(standby) = &mut self.standby {
            standby.vms[vm_index].vm = Vm { generation: 0, confirmed: 0, ..standby.vms[vm_index].vm };
        }
        self.rank_confirmations(vm_index);
        let mut all: Vec<&mut u8> = vec![&mut self.api.vms[vm_index].generation];
        for gc in &mut self.gc {
            all.push(&mut gc.vms[vm_index].vm.generation);
            match gc.calls[vm_index].as_mut().map(|call| &mut call.stage) {
                Some(Stage::Commit { base, .. }) => all.push(&mut base.vm.generation),
                Some(Stage::Wait { since, .. }) => all.push(since),
                Some(Stage::Start | Stage::WaitToAdd) | None => {}
            }
        }
        let known: BTreeSet<u8> = all.iter().map(|one| **one).collect();
        for one in all {
            *one = known.iter().position(|known| *known == *one).map_or(*one, |at| at as u8);
        }
    }

    /// The annotation never returns to an earlier value and is tested together with the generation, so it only matters which
    /// copies have both current values.
    fn rank_confirmations(&mut self, vm_index: VmIndex) {
        let now = self.api.vms[vm_index];
        let rank = |vm: &mut Vm| {
            let is_present = (vm.generation, vm.confirmed) == (now.generation, now.confirmed);
            vm.confirmed = is_present.into();
        };
        for gc in &mut self.gc {
            rank(&mut gc.vms[vm_index].vm);
            if let Some(Stage::Commit { base, .. }) = gc.calls[vm_index].as_mut().map(|call| &mut call.stage)
            {
                rank(&mut base.vm);
            }
        }
        rank(&mut self.api.vms[vm_index]);
    }

    /// A UID that no component knows.
    pub fn new_uid(&mut self, vm_index: VmIndex) -> Uid {
        let mut known: Vec<Uid> = self.uids(vm_index).into_iter().map(|uid| *uid).collect();
        known.extend(
            self.mgmt
                .iter()
                .filter_map(|mgmt| mgmt.reconciles[vm_index])
                .flat_map(|reconcile| std::iter::once(reconcile.uid).chain(other_of(&reconcile))),
        );
        known.extend(self.infra.requests.iter().map(|request| request.uid));
        known.extend(self.infra.rows.iter().map(|row| row.uid));
        known.extend(self.infra.deleted_ids.iter().map(|(_, uid)| *uid));
        known.extend(self.infra.unrecorded.map(|(_, uid)| uid));
        known.into_iter().max().unwrap_or(0) + 1
    }
}

/// The other VolumeAttachment that a reconcile knows.
fn other_of(reconcile: &Reconcile) -> Option<Uid> {
    match (reconcile.observed, reconcile.activity) {
        (Observed::SameName(uid) | Observed::Predecessor(uid), _)
        | (_, Activity::ConfirmPredecessor(uid)) => Some(uid),
        _ => None,
    }
}
