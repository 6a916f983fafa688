//! Numbers that only grow, replaced by their ranks: what differs in history alone is the same state.

use std::collections::{BTreeSet, VecDeque};

use super::*;

impl State {
    /// Every UID of a machine's orders that is known to anybody who may still use it.
    fn uids(&mut self, machine: Machine) -> Vec<&mut Uid> {
        let mut uids: Vec<&mut Uid> = Vec::new();
        let mgmt = self.mgmt.iter_mut().flat_map(|mgmt| [mgmt.orders[machine].as_mut()]);
        let orders = [self.api.orders[machine].as_mut(), self.shim.orders[machine].as_mut()];
        uids.extend(orders.into_iter().chain(mgmt).flatten().map(|order| &mut order.uid));
        uids.extend(self.given[machine].as_mut());
        let standby = self.standby.as_mut().and_then(|standby| standby.orders[machine].as_mut());
        uids.extend(standby.map(|order| &mut order.uid));
        if let Some((of, ShimWrite::Delete(uid))) = &mut self.late
            && *of == machine
        {
            uids.push(uid);
        }
        uids
    }

    /// Replaces what only grows by ranks, puts replicas that do the same work in one order, and forgets what the second
    /// replica of mgmt-csi saw of what it doesn't work on.
    pub fn normalize(&mut self) {
        for machine in 0..MACHINES {
            if self.mgmt[1].passes[machine].is_none() {
                self.mgmt[1].orders[machine] = None;
            }
        }
        if self.budget.replicas == REPLICAS {
            self.gc.sort_unstable();
        }
        for machine in 0..MACHINES {
            self.rank_uids(machine);
            self.rank_generations(machine);
        }
    }

    fn rank_uids(&mut self, machine: Machine) {
        let mut passes: VecDeque<Pass> = self.mgmt.iter().filter_map(|mgmt| mgmt.passes[machine]).collect();
        let mut known: BTreeSet<Uid> = self.uids(machine).into_iter().map(|uid| *uid).collect();
        for pass in &passes {
            known.insert(pass.uid);
            known.extend(other_of(pass));
        }
        for request in self.infra.requests.iter().filter(|request| request.machine == machine) {
            known.insert(request.uid);
            if let Ask::Put(Some(earlier)) = request.ask {
                known.insert(earlier);
            }
        }
        known.extend(self.infra.rows.iter().filter(|row| row.machine == machine).map(|row| row.uid));
        if let Some((of, uid)) = self.infra.working
            && of == machine
        {
            known.insert(uid);
        }
        // An id that is the same for all orders (a broken rule) stays what it is.
        known.remove(&0);
        // That an id is over which nobody knows any more matters to nobody.
        self.infra.ended.retain(|(of, uid)| *of != machine || known.contains(uid));
        let rank = |uid: Uid| known.iter().position(|one| *one == uid).map_or(uid, |at| at as Uid + 1);
        if known.iter().all(|uid| rank(*uid) == *uid) {
            return;
        }
        for uid in self.uids(machine) {
            *uid = rank(*uid);
        }
        for mgmt in &mut self.mgmt {
            if mgmt.passes[machine].is_some() {
                mgmt.passes[machine] = passes.pop_front().map(|mut pass| {
                    pass.uid = rank(pass.uid);
                    pass.learned = match pass.learned {
                        Learned::Namesake(uid) => Learned::Namesake(rank(uid)),
                        Learned::Over(uid) => Learned::Over(rank(uid)),
                        same => same,
                    };
                    if let Doing::Confirm(uid) = pass.doing {
                        pass.doing = Doing::Confirm(rank(uid));
                    }
                    pass
                });
            }
        }
        let Infra { rows, ended, working, requests, .. } = &mut self.infra;
        let of = |row: Row| if row.machine == machine { Row { uid: rank(row.uid), ..row } } else { row };
        *rows = rows.iter().copied().map(of).collect();
        *ended =
            ended.iter().map(|(of, uid)| (*of, if *of == machine { rank(*uid) } else { *uid })).collect();
        if let Some((of, uid)) = working
            && *of == machine
        {
            *uid = rank(*uid);
        }
        let of = |mut request: Request| {
            if request.machine == machine {
                request.uid = rank(request.uid);
                if let Ask::Put(Some(earlier)) = &mut request.ask {
                    *earlier = rank(*earlier);
                }
            }
            request
        };
        *requests = requests.iter().copied().map(of).collect();
    }

    fn rank_generations(&mut self, machine: Machine) {
        // The VM Operator doesn't look at it.
        self.shim.vms[machine].vm = Vm { generation: 0, confirmed: 0, ..self.shim.vms[machine].vm };
        if let Some(standby) = &mut self.standby {
            standby.vms[machine].vm = Vm { generation: 0, confirmed: 0, ..standby.vms[machine].vm };
        }
        self.rank_confirmations(machine);
        let mut all: Vec<&mut u8> = vec![&mut self.api.vms[machine].generation];
        for gc in &mut self.gc {
            all.push(&mut gc.vms[machine].vm.generation);
            match gc.calls[machine].as_mut().map(|call| &mut call.stage) {
                Some(Stage::Commit { base, .. }) => all.push(&mut base.vm.generation),
                Some(Stage::Wait { since, .. }) => all.push(since),
                Some(Stage::Begins | Stage::ToAdd) | None => {}
            }
        }
        let known: BTreeSet<u8> = all.iter().map(|one| **one).collect();
        for one in all {
            *one = known.iter().position(|known| *known == *one).map_or(*one, |at| at as u8);
        }
    }

    /// It never comes to an earlier value, and is tested together with the generation: so all that counts is which copies
    /// have both as they are now.
    fn rank_confirmations(&mut self, machine: Machine) {
        let now = self.api.vms[machine];
        let rank = |vm: &mut Vm| {
            let is_present = (vm.generation, vm.confirmed) == (now.generation, now.confirmed);
            vm.confirmed = is_present.into();
        };
        for gc in &mut self.gc {
            rank(&mut gc.vms[machine].vm);
            if let Some(Stage::Commit { base, .. }) = gc.calls[machine].as_mut().map(|call| &mut call.stage) {
                rank(&mut base.vm);
            }
        }
        rank(&mut self.api.vms[machine]);
    }

    /// A UID that nobody knows.
    pub fn new_uid(&mut self, machine: Machine) -> Uid {
        let mut known: Vec<Uid> = self.uids(machine).into_iter().map(|uid| *uid).collect();
        known.extend(
            self.mgmt
                .iter()
                .filter_map(|mgmt| mgmt.passes[machine])
                .flat_map(|pass| std::iter::once(pass.uid).chain(other_of(&pass))),
        );
        known.extend(self.infra.requests.iter().map(|request| request.uid));
        known.extend(self.infra.rows.iter().map(|row| row.uid));
        known.extend(self.infra.ended.iter().map(|(_, uid)| *uid));
        known.extend(self.infra.working.map(|(_, uid)| uid));
        known.into_iter().max().unwrap_or(0) + 1
    }
}

/// The other order that a pass knows of.
fn other_of(pass: &Pass) -> Option<Uid> {
    match (pass.learned, pass.doing) {
        (Learned::Namesake(uid) | Learned::Over(uid), _) | (_, Doing::Confirm(uid)) => Some(uid),
        _ => None,
    }
}
