//! Disks of machines: put in, taken out, and waited for.
//!
//! An answer is given only on what was seen after the change went in: the machine's generation tells
//! which of its states are older. What the informer shows may be behind, so where the entry is gone already, the machine
//! is read once from the API, and where it is there already, that is confirmed by a write; not where this process saw
//! the disk leave, or come, a moment ago ([`recent`](super::recent)).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crds::VirtualMachine;
use crds::names;
use kube_kit::informer::Key;
use process_kit::text::one_line;
use tokio::time::Instant;

use super::commit::{CommitError, MayLeave, Operation, Wanted};
use super::consumers::{Consumer, ConsumerError};
use super::sharing::bound_to;
use super::{Management, recent};
use crate::fit::{Asked, Misfit};
use crate::machine::{self, AttachedDisk, Begin, Change, Committed, Leaving, Refusal, committed};
use crate::vm_operator::NO_READ_ONLY;

/// How long a failure that was known before the call is given to heal before the call repeats it.
const KNOWN_FAILURE: Duration = Duration::from_secs(2);

/// What people can do about a disk that does not leave.
const ADVICE: &str = "it goes as soon as the machine lets go of it or is off; if the machine is lost, taint its Node with \
    node.kubernetes.io/out-of-service:NoExecute";

/// The machines that each entry's disk is plugged into.
pub(super) type Plugged = HashMap<String, Vec<String>>;

/// A disk to plug.
#[derive(Debug, Clone)]
pub(crate) struct Attach {
    /// The management claim.
    pub claim: String,
    /// The machine.
    pub machine: String,
    /// Whether the machine may only read.
    pub read_only: bool,
    /// Whether only one machine may have it.
    pub exclusive: bool,
    /// What the call asks of the claim.
    pub asked: Asked,
    /// What the guest's volumes of this handle ask of it: one, unless a person made another.
    pub volumes: Vec<Asked>,
}

/// A disk that is plugged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Attached {
    /// How the machine finds it.
    pub disk: AttachedDisk,
    /// The management PersistentVolume that it is.
    pub volume: String,
}

/// Why a disk is not plugged.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AttachError {
    /// There is no such machine.
    #[error(
        "there is no VirtualMachine {0} in this guest's namespace of the management cluster: the node's name must be its machine's"
    )]
    NoMachine(String),
    /// There is no such claim to this guest, or it can't be had in this way.
    #[error(transparent)]
    Unfit(#[from] Misfit),
    /// It could not be written down that this guest uses the claim.
    #[error(transparent)]
    Consumer(#[from] ConsumerError),
    /// The VM Operator can't.
    #[error("volume {0} can't be attached read-only: {NO_READ_ONLY}")]
    ReadOnly(String),
    /// The volume is not bound.
    #[error("management PersistentVolumeClaim {0} is not bound to a volume yet")]
    NotBound(String),
    /// Another machine has it.
    #[error(
        "volume {claim} is attached to VirtualMachine {machine}, and its access mode allows one node: it must be detached there first{because}"
    )]
    InUse {
        /// The management claim.
        claim: String,
        /// The machine that has it.
        machine: String,
        /// Why it is still there, or nothing.
        because: String,
    },
    /// It is plugged in another way.
    #[error("volume {claim} is attached to VirtualMachine {machine} {how} already: detach it first")]
    Differs {
        /// The management claim.
        claim: String,
        /// The machine.
        machine: String,
        /// How it is plugged.
        how: &'static str,
    },
    /// The management tier says that it failed; it goes on trying.
    #[error("volume {claim} could not be attached to VirtualMachine {machine}: {error}")]
    Failed {
        /// The management claim.
        claim: String,
        /// The machine.
        machine: String,
        /// The tier's own words.
        error: String,
    },
    /// The disk is still being unplugged from an earlier use.
    #[error("volume {claim} is still being detached from VirtualMachine {machine}{because}")]
    Leaving {
        /// The management claim.
        claim: String,
        /// The machine.
        machine: String,
        /// The last failure, or nothing.
        because: String,
    },
    /// Time ran out; the work goes on.
    #[error("volume {claim} was not attached to VirtualMachine {machine} in time{because}")]
    Deadline {
        /// The management claim.
        claim: String,
        /// The machine.
        machine: String,
        /// The last failure, or nothing.
        because: String,
    },
    /// The change did not go in.
    #[error(transparent)]
    Commit(CommitError),
}

/// Why a disk may still be plugged.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DetachError {
    /// The management tier says that it failed; it goes on trying.
    #[error("volume {claim} could not be detached from VirtualMachine {machine}: {error}; {ADVICE}")]
    Failed {
        /// The management claim.
        claim: String,
        /// The machine.
        machine: String,
        /// The tier's own words.
        error: String,
    },
    /// It is another guest's.
    #[error(
        "VirtualMachine {machine} has volume {claim}, and neither is known to be this guest's: it was left as it is; if \
         it is this guest's machine, ask the platform team to label it {}=<cluster ID>",
        names::LABEL_CLUSTER_ID
    )]
    NotOurs {
        /// The management claim.
        claim: String,
        /// The machine.
        machine: String,
    },
    /// Somebody else put it in, too.
    #[error(
        "volume {claim} stays attached to VirtualMachine {machine} by entry {entry} of its spec.volumes, which gc-csi did \
         not make: take that entry out"
    )]
    Held {
        /// The management claim.
        claim: String,
        /// The machine.
        machine: String,
        /// The entry.
        entry: String,
    },
    /// The guest wants it, or may want it.
    #[error("volume {claim} stays attached to VirtualMachine {machine}: {wanted}")]
    Wanted {
        /// The management claim.
        claim: String,
        /// The machine.
        machine: String,
        /// Why.
        wanted: Wanted,
    },
    /// Time ran out; the work goes on.
    #[error("volume {claim} was not detached from VirtualMachine {machine} in time{because}; {ADVICE}")]
    Deadline {
        /// The management claim.
        claim: String,
        /// The machine.
        machine: String,
        /// The last failure, or nothing.
        because: String,
    },
    /// The change did not go in.
    #[error(transparent)]
    Commit(CommitError),
}

impl From<CommitError> for AttachError {
    fn from(error: CommitError) -> Self {
        match error {
            CommitError::NoMachine(machine) => Self::NoMachine(machine),
            error => Self::Commit(error),
        }
    }
}

impl Management {
    /// The machines that each entry's disk is plugged into.
    pub(super) fn plugged(&self) -> Plugged {
        let mut plugged = Plugged::new();
        for vm in self.machines.list() {
            let disks = vm.status.iter().flat_map(|status| &status.volumes);
            let names = disks.filter(|disk| disk.attached).flat_map(|disk| names::entries_shown(&disk.name));
            for entry in names {
                plugged.entry(entry.to_owned()).or_default().extend(vm.metadata.name.clone());
            }
        }
        plugged
    }

    /// The machines that the claim's disk is plugged into.
    pub(super) fn plugged_into(&self, claim: &str) -> Vec<String> {
        let entry = names::volume_entry(claim);
        let around = self.machines_around(claim);
        let plugged = around.iter().filter(|vm| machine::is_plugged(vm, &entry));
        plugged.filter_map(|vm| vm.metadata.name.clone()).collect()
    }

    /// Machines that say anything of the claim's disk, by name.
    pub(crate) fn machines_around(&self, claim: &str) -> Vec<Arc<VirtualMachine>> {
        let keys = [claim.to_owned(), names::volume_entry(claim)].map(Key::cluster);
        let mut machines: Vec<Key> = keys.iter().flat_map(|key| self.machines_by_disk.members(key)).collect();
        machines.sort_unstable();
        machines.dedup();
        machines.iter().filter_map(|key| self.machines.get(key)).collect()
    }

    /// Machines that have the claim in their spec, or still plugged.
    pub fn machines_with(&self, claim: &str) -> Vec<String> {
        let entry = names::volume_entry(claim);
        let mut found: Vec<String> = self
            .machines_around(claim)
            .iter()
            .filter(|vm| machine::holds(vm, claim, &entry))
            .filter_map(|vm| vm.metadata.name.clone())
            .collect();
        found.sort_unstable();
        found
    }

    /// Plugs the disk and answers with what it is.
    pub(crate) async fn attach(&self, wanted: &Attach, deadline: Instant) -> Result<Attached, AttachError> {
        let Attach { claim, machine, read_only, exclusive, asked, volumes } = wanted;
        if *read_only && !self.vm_operator.plugs_read_only() {
            return Err(AttachError::ReadOnly(claim.clone()));
        }
        let _begun = self.left.begin(recent::disk(machine, claim));
        let operation = self.committer.begin(machine);
        self.fits_one(claim, volumes)?;
        self.fits(claim, asked)?;
        let Some(vm) = self.machines.get(&self.key(machine)) else {
            return Err(AttachError::NoMachine(machine.clone()));
        };
        let bound = self.usable_claim(claim).filter(|(claim, _)| super::claims::is_bound(claim));
        let Some(volume) = bound.and_then(|(claim, _)| bound_to(&claim)) else {
            return Err(AttachError::NotBound(claim.clone()));
        };
        let entry = names::volume_entry(claim);
        let mut others = if *exclusive { self.machines_with(claim) } else { Vec::new() };
        others.retain(|other| other != machine);
        let begin = machine::begin(&vm, claim, *read_only, !others.is_empty());
        if begin == Begin::Elsewhere
            && let Some(other) = others.into_iter().next()
        {
            let because = self.last_error(&other, &entry);
            return Err(AttachError::InUse { claim: claim.clone(), machine: other, because });
        }
        let consumer = Consumer::of(volumes).unwrap_or_else(|| Consumer::new("", *read_only));
        self.record_consumer(claim, &consumer).await?;

        let since = match begin {
            Begin::Differs(read_only_now) => {
                let how = if read_only_now { "read-only" } else { "writable" };
                return Err(AttachError::Differs { claim: claim.clone(), machine: machine.clone(), how });
            }
            Begin::Confirm if self.has_arrived(machine, claim, &vm) => committed(&vm),
            Begin::Confirm | Begin::Add | Begin::Elsewhere => {
                self.add(wanted, &operation, &entry, deadline).await?
            }
        };
        let disk = self.wait_attached(wanted, &entry, &since, deadline).await?;
        // The claim may have been made anew meanwhile, and its other disk have been plugged.
        if asked.pin.to().is_some() {
            self.fits(claim, asked)?;
        }
        self.arrived.saw(recent::disk(machine, claim), vm.metadata.uid.as_deref().unwrap_or_default());
        Ok(Attached { disk, volume })
    }

    /// Puts the entry in, or confirms it; not before an earlier use of it is over, whose end would unplug the disk again.
    async fn add(
        &self,
        wanted: &Attach,
        operation: &Operation,
        entry: &str,
        deadline: Instant,
    ) -> Result<Committed, AttachError> {
        let left = self
            .machines
            .wait_for(&self.key(&wanted.machine), deadline, |vm| {
                machine::may_be_added(vm.map(|vm| &**vm), &wanted.claim, entry).then_some(())
            })
            .await;
        let leaving = || {
            let (claim, machine) = (wanted.claim.clone(), wanted.machine.clone());
            AttachError::Leaving { because: self.last_error(&machine, entry), claim, machine }
        };
        left.ok_or_else(leaving)?;
        let change = Change::Add {
            name: entry.to_owned(),
            claim: wanted.claim.clone(),
            read_only: wanted.read_only,
            multi_writer: self.wants_multi_writer(&wanted.claim),
        };
        self.committer.commit(operation, change).await.map_err(|error| match error {
            // The informer was behind.
            CommitError::Refused(Refusal::Leaving { .. }) => leaving(),
            error => error.into(),
        })
    }

    async fn wait_attached(
        &self,
        wanted: &Attach,
        entry: &str,
        since: &Committed,
        deadline: Instant,
    ) -> Result<AttachedDisk, AttachError> {
        let Attach { claim, machine, .. } = wanted;
        let known = self.machines.get(&self.key(machine)).and_then(|vm| machine::failure(&vm, entry));
        let failed = |error: String| {
            let error = one_line(&error).into_owned();
            AttachError::Failed { claim: claim.clone(), machine: machine.clone(), error }
        };
        let heal_by = known.as_ref().map_or(deadline, |_| deadline.min(Instant::now() + KNOWN_FAILURE));
        let outcome = self
            .machines
            .wait_for(&self.key(machine), heal_by, |vm| {
                let Some(vm) = vm else { return Some(Err(AttachError::NoMachine(machine.clone()))) };
                Some(machine::attached(vm, since, entry, known.as_ref())?.map_err(failed))
            })
            .await;
        outcome.unwrap_or_else(|| match known {
            Some(error) => Err(failed(error)),
            None => {
                let because = self.last_error(machine, entry);
                Err(AttachError::Deadline { claim: claim.clone(), machine: machine.clone(), because })
            }
        })
    }

    /// Unplugs the disk. The claim need not exist any more, nor be this guest's still: what counts is that the machine
    /// has its disk, and it is done when the machine says that it has not. A machine that is gone has no disks. The entry is
    /// taken out only while it may leave.
    pub(crate) async fn detach(
        &self,
        claim: &str,
        machine: &str,
        may_leave: MayLeave,
        deadline: Instant,
    ) -> Result<(), DetachError> {
        let _begun = self.arrived.begin(recent::disk(machine, claim));
        let entry = names::volume_entry(claim);
        let Some(vm) = self.involved(machine, claim, &entry).await? else { return Ok(()) };
        if self.is_anothers_disk(&vm, claim) {
            return Err(DetachError::NotOurs { claim: claim.to_owned(), machine: machine.to_owned() });
        }
        let disk = machine::disk_uuid(&vm, &entry);
        let operation = self.committer.begin(machine);
        let since = match self.committer.remove(&operation, &entry, may_leave).await {
            Ok(since) => since,
            Err(CommitError::Wanted(wanted)) => {
                let (claim, machine) = (claim.to_owned(), machine.to_owned());
                return Err(DetachError::Wanted { claim, machine, wanted });
            }
            Err(CommitError::NoMachine(_)) => return Ok(()),
            Err(error) => return Err(DetachError::Commit(error)),
        };
        let known = self.machines.get(&self.key(machine)).and_then(|vm| machine::failure(&vm, &entry));
        let leaving = Leaving { entry: &entry, disk: disk.as_deref(), known: known.as_ref() };
        let outcome = self
            .machines
            .wait_for(&self.key(machine), deadline, |vm| {
                let (claim, machine) = (claim.to_owned(), machine.to_owned());
                if let Some(entry) = vm.and_then(|vm| machine::other_entry(vm, &since, &claim, &entry)) {
                    return Some(Err(DetachError::Held { claim, machine, entry: entry.to_owned() }));
                }
                let outcome = machine::detached(vm.map(|vm| &**vm), &since, leaving)?;
                let left = vm.filter(|vm| !machine::is_involved(vm, &claim, &entry));
                let left = left.and_then(|vm| vm.metadata.uid.clone());
                Some(outcome.map(|()| left).map_err(|error| {
                    let error = one_line(&error).into_owned();
                    DetachError::Failed { claim, machine, error }
                }))
            })
            .await;
        if let Some(Ok(Some(uid))) = &outcome {
            self.left.saw(recent::disk(machine, claim), uid);
        }
        outcome.map(|outcome| outcome.map(drop)).unwrap_or_else(|| {
            let because = self.last_error(machine, &entry);
            Err(DetachError::Deadline { claim: claim.to_owned(), machine: machine.to_owned(), because })
        })
    }

    /// The machine, if it has to do with the claim's disk still: as the watch shows it, or else as the API says now.
    async fn involved(
        &self,
        machine: &str,
        claim: &str,
        entry: &str,
    ) -> Result<Option<Arc<VirtualMachine>>, DetachError> {
        let is_involved = |vm: &VirtualMachine| machine::is_involved(vm, claim, entry);
        if let Some(vm) = self.machines.get(&self.key(machine)) {
            if is_involved(&vm) {
                return Ok(Some(vm));
            }
            if self.has_left(machine, claim, &vm) {
                return Ok(None);
            }
        }
        let Some(vm) = self.read(machine).await.map_err(DetachError::Commit)? else { return Ok(None) };
        if is_involved(&vm) {
            return Ok(Some(Arc::new(vm)));
        }
        self.left.saw(recent::disk(machine, claim), vm.metadata.uid.as_deref().unwrap_or_default());
        Ok(None)
    }

    /// Whether this process saw the disk leave this very machine just now, and nothing that says otherwise.
    fn has_left(&self, machine: &str, claim: &str, vm: &VirtualMachine) -> bool {
        let uid = vm.metadata.uid.as_deref().unwrap_or_default();
        self.machines.trouble().is_none() && self.left.has_seen(&recent::disk(machine, claim), uid)
    }

    /// Whether this process saw the disk come into this very machine just now, and nothing that says otherwise.
    fn has_arrived(&self, machine: &str, claim: &str, vm: &VirtualMachine) -> bool {
        let uid = vm.metadata.uid.as_deref().unwrap_or_default();
        self.machines.trouble().is_none() && self.arrived.has_seen(&recent::disk(machine, claim), uid)
    }

    fn wants_multi_writer(&self, claim: &str) -> bool {
        let claim = self.claims.get(&self.key(claim));
        claim.is_some_and(|claim| self.vm_operator.wants_multi_writer(&claim.spec.access_modes))
    }

    /// The machine as it is now; None when there is none.
    pub(super) async fn read(&self, machine: &str) -> Result<Option<VirtualMachine>, CommitError> {
        // The name is the guest's word and becomes part of a URL: one that no object can have, has none.
        if !super::is_object_name(machine) {
            return Ok(None);
        }
        let answer = self.machines_api.get_opt(machine).await;
        answer.map_err(|error| CommitError::Api { machine: machine.to_owned(), source: error.into() })
    }

    fn last_error(&self, machine: &str, entry: &str) -> String {
        let vm: Option<Arc<VirtualMachine>> = self.machines.get(&self.key(machine));
        let error = vm.and_then(|vm| machine::failure(&vm, entry));
        error.map(|error| format!(": {}", one_line(&error))).unwrap_or_default()
    }
}

/// What the disks of a machine go by: the claims in its spec, and the entries in its status.
pub(super) fn names_in(vm: &VirtualMachine) -> Vec<Key> {
    let claims = vm.spec.volumes.iter().filter_map(|volume| volume.persistent_volume_claim.as_ref());
    let entries = vm.status.iter().flat_map(|status| &status.volumes);
    let claims = claims.map(|source| source.claim_name.as_str());
    claims.chain(entries.flat_map(|disk| names::entries_shown(&disk.name))).map(Key::cluster).collect()
}
