//! State of the model. Every write of an object gets the next version of one sequence, as in an API server.

pub use crate::state::Kind;

/// Index of a VM.
pub type VmIndex = usize;
/// Index of a replica of gc-csi.
pub type ReplicaIndex = usize;
/// Version of an object.
pub type Version = u8;

/// Events and faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Budget {
    /// Guest VolumeAttachments that may be created.
    pub attachments: u8,
    /// Calls whose caller leaves: a write may be in flight.
    pub timeouts: u8,
    /// Leader changes of csi-attacher: calls of the former leader continue.
    pub leader_changes: u8,
    /// VMs that end.
    pub ends: u8,
    /// Replicas of gc-csi.
    pub replicas: usize,
    /// Whether the VMs share the disk: its claim is [shareable](gc_csi::vm_volumes::holder::is_shareable), and all attaches ask for it
    /// so.
    pub shared: bool,
}

/// Rules of the implementation. Tests break single rules, to prove that the properties detect it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rules {
    /// An attach takes the claim before it adds the entry.
    pub take_claims: bool,
    /// An attach takes the claim again before it repeats its PATCH.
    pub take_again: bool,
    /// A detach that finds no entry changes the VM, so that earlier PATCHes do not apply.
    pub outdate_additions: bool,
    /// A detach gives back only the record that it read before it changed the VM.
    pub give_back_what_was_read: bool,
    /// Only a claim that no VM ever took is attested blank.
    pub attest_unused: bool,
    /// A result counts only if virt-controller had handled the change, and the instance was written or read after that.
    pub prove_results: bool,
}

impl Rules {
    /// All rules.
    pub const ALL: Self = Self {
        take_claims: true,
        take_again: true,
        outdate_additions: true,
        give_back_what_was_read: true,
        attest_unused: true,
        prove_results: true,
    };
}

/// A guest VolumeAttachment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Attachment {
    /// There is none.
    None,
    /// It is to be attached.
    Pending,
    /// It was reported as attached.
    Attached,
    /// It is to be detached.
    Deleting,
}

/// A `VirtualMachine`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Vm {
    /// Whether it has the entry.
    pub entry: bool,
    /// Generation of its spec.
    pub generation: u8,
    /// The annotation `volumes-confirmed`.
    pub confirmed: u8,
    /// The generation that virt-controller has handled.
    pub handled: u8,
    /// Its version.
    pub version: Version,
}

/// A `VirtualMachineInstance`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Instance {
    /// Whether its spec has the volume.
    pub volume: bool,
    /// Whether its status shows the volume as Ready.
    pub ready: bool,
    /// Its version.
    pub version: Version,
}

/// A VM, its instance and what runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Machine {
    /// The guest VolumeAttachment for it.
    pub attachment: Attachment,
    /// Its VirtualMachine.
    pub vm: Vm,
    /// Its instance; None once it has ended.
    pub instance: Option<Instance>,
    /// Whether the guest OS has the disk.
    pub plugged: bool,
    /// Whether it has ended.
    pub ended: bool,
    /// Whether the disk was ever reported as attached to it.
    pub was_attached: bool,
    /// virt-controller's copy of the VirtualMachine.
    pub known: Vm,
    /// Whether virt-controller has handled its copy.
    pub synced: bool,
}

/// Record on the claim: VM, number of the take, and whether it attests that the disk is blank.
pub type Record = Option<(VmIndex, u8, bool)>;

/// Copies of a VM's objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Seen {
    /// The VirtualMachine.
    pub vm: Vm,
    /// The instance.
    pub instance: Option<Instance>,
}

/// Who waits for the result of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Caller {
    /// csi-attacher.
    Leader,
    /// A csi-attacher that lost its lease: the call goes on, and its result is discarded.
    Former,
    /// Nobody: only what is in flight goes on.
    Gone,
}

/// Stage of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stage {
    /// Before its first decision.
    Start,
    /// It takes the claim, and then sends a PATCH that was planned on these objects.
    Take(Seen),
    /// Its PATCH, planned on these objects, is on its way.
    Patch(Seen),
    /// It waits for the result of this generation; since a version, virt-controller is known to have handled it.
    Wait(u8, Option<Version>),
    /// It gives back the claim.
    GiveBack,
}

/// A call of csi-attacher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Call {
    /// Its kind.
    pub kind: Kind,
    /// Who waits for its result.
    pub caller: Caller,
    /// Its stage.
    pub stage: Stage,
    /// The record that a detach read, or an attach wrote.
    pub held: Record,
}

/// A replica of gc-csi.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Replica {
    /// Its caches of VirtualMachines.
    pub vms: [Vm; 2],
    /// Its caches of instances, which lag independently.
    pub instances: [Option<Instance>; 2],
    /// Its cache of the claim's record.
    pub record: Record,
    /// Its calls, by VM.
    pub calls: [Option<Call>; 2],
}

/// The whole state.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct State {
    /// The VMs.
    pub vms: [Machine; 2],
    /// Record on the claim.
    pub record: Record,
    /// Whether no VM ever took the claim.
    pub unused: bool,
    /// Whether the disk was ever reported as attached.
    pub was_used: bool,
    /// Number of takes so far.
    pub takes: u8,
    /// Last version.
    pub version: Version,
    /// The replicas of gc-csi.
    pub replicas: [Replica; 2],
    /// Remaining budget.
    pub budget: Budget,
    /// Whether a call ever returned a false result.
    pub false_result: bool,
    /// Whether a disk was ever attested blank that had been attached before.
    pub false_attestation: bool,
}

impl State {
    /// The initial state: two VMs without the disk.
    pub fn new(budget: Budget) -> Self {
        let vm = Vm { entry: false, generation: 1, confirmed: 0, handled: 1, version: 1 };
        let instance = Some(Instance { volume: false, ready: false, version: 1 });
        let machine = Machine {
            attachment: Attachment::None,
            vm,
            instance,
            plugged: false,
            ended: false,
            was_attached: false,
            known: vm,
            synced: true,
        };
        let replica = Replica { vms: [vm; 2], instances: [instance; 2], record: None, calls: [None; 2] };
        Self {
            vms: [machine; 2],
            record: None,
            unused: true,
            was_used: false,
            takes: 0,
            version: 1,
            replicas: [replica; 2],
            budget,
            false_result: false,
            false_attestation: false,
        }
    }

    /// The version of the next write.
    pub fn next_version(&mut self) -> Version {
        self.version += 1;
        self.version
    }

    /// A VM's present objects.
    pub fn live(&self, at: VmIndex) -> Seen {
        Seen { vm: self.vms[at].vm, instance: self.vms[at].instance }
    }

    /// A VM's objects in the caches of a replica.
    pub fn cached(&self, at: VmIndex, replica: ReplicaIndex) -> Seen {
        let replica = &self.replicas[replica];
        Seen { vm: replica.vms[at], instance: replica.instances[at] }
    }

    /// Changes an instance.
    pub fn write_instance(&mut self, at: VmIndex, change: impl FnOnce(&mut Instance)) {
        let version = self.next_version();
        if let Some(instance) = &mut self.vms[at].instance {
            change(instance);
            instance.version = version;
        }
    }
}

impl State {
    /// Replaces versions, takes and generations by their ranks, so that states with different histories are equal.
    pub fn normalize(&mut self) {
        let mut versions: Vec<&mut u8> = Vec::new();
        let mut takes: Vec<&mut u8> = Vec::new();
        let mut generations: [Vec<&mut u8>; 2] = Default::default();
        for (at, machine) in self.vms.iter_mut().enumerate() {
            for vm in [&mut machine.vm, &mut machine.known] {
                versions.extend([&mut vm.version, &mut vm.confirmed]);
                generations[at].extend([&mut vm.generation, &mut vm.handled]);
            }
            versions.extend(machine.instance.as_mut().map(|instance| &mut instance.version));
        }
        for replica in &mut self.replicas {
            takes.extend(replica.record.as_mut().map(|(_, take, _)| take));
            for (at, vm) in replica.vms.iter_mut().enumerate() {
                versions.extend([&mut vm.version, &mut vm.confirmed]);
                generations[at].extend([&mut vm.generation, &mut vm.handled]);
            }
            versions.extend(replica.instances.iter_mut().flatten().map(|instance| &mut instance.version));
            for (at, call) in replica.calls.iter_mut().enumerate() {
                let Some(call) = call else { continue };
                takes.extend(call.held.as_mut().map(|(_, take, _)| take));
                match &mut call.stage {
                    Stage::Take(seen) | Stage::Patch(seen) => {
                        versions.extend([&mut seen.vm.version, &mut seen.vm.confirmed]);
                        generations[at].extend([&mut seen.vm.generation, &mut seen.vm.handled]);
                        versions.extend(seen.instance.as_mut().map(|instance| &mut instance.version));
                    }
                    Stage::Wait(since, handled_at) => {
                        generations[at].push(since);
                        versions.extend(handled_at.as_mut());
                    }
                    Stage::Start | Stage::GiveBack => {}
                }
            }
        }
        takes.extend(self.record.as_mut().map(|(_, take, _)| take));
        self.version = rank(versions);
        self.takes = rank(takes);
        generations.into_iter().map(rank).for_each(drop);
        if self.budget.replicas == 2 && self.replicas[1] < self.replicas[0] {
            self.replicas.swap(0, 1);
        }
    }
}

/// Replaces numbers by their ranks, starting with 1, and returns the highest one.
fn rank(all: Vec<&mut u8>) -> u8 {
    let known: std::collections::BTreeSet<u8> = all.iter().map(|one| **one).collect();
    for one in all {
        *one = known.iter().position(|known| *known == *one).map_or(*one, |at| at as u8 + 1);
    }
    known.len() as u8
}
