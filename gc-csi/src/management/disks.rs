//! Disks of machines: put in, taken out, and waited for.
//!
//! An answer is given only on what was seen after the change went in: the machine's generation tells
//! which of its states are older. What the informer shows may be behind, so where no change is needed
//! (the entry is there already, or gone already) the machine is read once from the API.

use std::sync::Arc;
use std::time::Duration;

use crds::names;
use crds::{VirtualMachine, VirtualMachineVolumeStatus};
use tokio::time::Instant;

use super::Management;
use super::commit::{Change, CommitError, Committed, committed};

/// How long a failure that was known before the call is given to heal before the call repeats it.
const KNOWN_FAILURE: Duration = Duration::from_secs(2);

/// A disk to plug.
#[derive(Debug, Clone)]
pub struct Attach {
    /// The management claim.
    pub claim: String,
    /// The machine.
    pub machine: String,
    /// Whether the machine may only read.
    pub read_only: bool,
    /// Whether only one machine may have it.
    pub exclusive: bool,
}

/// Why a disk is not plugged.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// There is no such machine.
    #[error(
        "there is no VirtualMachine {0} in this guest's namespace of the management cluster: the node's name must be its machine's"
    )]
    NoMachine(String),
    /// There is no such volume.
    #[error(
        "there is no volume {0}: the management PersistentVolumeClaim does not exist, or is not this guest's"
    )]
    NoClaim(String),
    /// The volume is not bound.
    #[error("management PersistentVolumeClaim {0} is not bound to a volume yet")]
    NotBound(String),
    /// Another machine has it.
    #[error(
        "volume {claim} is attached to VirtualMachine {machine}, and its access mode allows one node: it must be detached there first"
    )]
    InUse {
        /// The management claim.
        claim: String,
        /// The machine that has it.
        machine: String,
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
pub enum DetachError {
    /// The management tier says that it failed; it goes on trying.
    #[error("volume {claim} could not be detached from VirtualMachine {machine}: {error}")]
    Failed {
        /// The management claim.
        claim: String,
        /// The machine.
        machine: String,
        /// The tier's own words.
        error: String,
    },
    /// Time ran out; the work goes on.
    #[error("volume {claim} was not detached from VirtualMachine {machine} in time{because}")]
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
    /// Machines that have the claim in their spec, or still plugged.
    pub fn machines_with(&self, claim: &str) -> Vec<String> {
        let entry = names::volume_entry(claim);
        let mut found: Vec<String> = self
            .machines
            .list()
            .iter()
            .filter(|vm| wants(vm, claim).is_some() || disk(vm, &entry).is_some_and(|disk| disk.attached))
            .filter_map(|vm| vm.metadata.name.clone())
            .collect();
        found.sort_unstable();
        found
    }

    /// Plugs the disk and answers with the UUID by which the machine finds it.
    pub async fn attach(&self, wanted: &Attach, deadline: Instant) -> Result<String, AttachError> {
        let Attach { claim, machine, read_only, exclusive } = wanted;
        let bound = self.claim(claim).ok_or_else(|| AttachError::NoClaim(claim.clone()))?;
        let key = self.key(machine);
        if self.machines.get(&key).is_none() {
            return Err(AttachError::NoMachine(machine.clone()));
        }
        if !super::claims::is_bound(&bound) {
            return Err(AttachError::NotBound(claim.clone()));
        }
        if *exclusive
            && let Some(other) = self.machines_with(claim).into_iter().find(|other| other != machine)
        {
            return Err(AttachError::InUse { claim: claim.clone(), machine: other });
        }

        let entry = names::volume_entry(claim);
        let already = self.machines.get(&key).and_then(|vm| wants(&vm, claim));
        let since = match already {
            Some(read_only_now) if read_only_now != *read_only => {
                let how = if read_only_now { "read-only" } else { "writable" };
                return Err(AttachError::Differs { claim: claim.clone(), machine: machine.clone(), how });
            }
            Some(_) => match self.read(machine).await? {
                Some(vm) if wants(&vm, claim).is_some() => committed(&vm),
                Some(_) => self.add(wanted, &entry, deadline).await?,
                None => return Err(AttachError::NoMachine(machine.clone())),
            },
            None => self.add(wanted, &entry, deadline).await?,
        };
        self.wait_attached(wanted, &entry, &since, deadline).await
    }

    /// Puts the entry in; not before an earlier use of it is over, whose end would unplug the disk again.
    async fn add(&self, wanted: &Attach, entry: &str, deadline: Instant) -> Result<Committed, AttachError> {
        let left = self
            .machines
            .wait_for(&self.key(&wanted.machine), deadline, |vm| {
                vm.is_none_or(|vm| wants(vm, &wanted.claim).is_some() || disk(vm, entry).is_none())
                    .then_some(())
            })
            .await;
        if left.is_none() {
            let (claim, machine) = (wanted.claim.clone(), wanted.machine.clone());
            return Err(AttachError::Leaving { because: self.last_error(&machine, entry), claim, machine });
        }
        let change =
            Change::Add { name: entry.to_owned(), claim: wanted.claim.clone(), read_only: wanted.read_only };
        Ok(self.committer.commit(&wanted.machine, change).await?)
    }

    async fn wait_attached(
        &self,
        wanted: &Attach,
        entry: &str,
        since: &Committed,
        deadline: Instant,
    ) -> Result<String, AttachError> {
        let Attach { claim, machine, .. } = wanted;
        let known = self.machines.get(&self.key(machine)).and_then(|vm| disk(&vm, entry)?.error.clone());
        let failed = |error| AttachError::Failed { claim: claim.clone(), machine: machine.clone(), error };
        let heal_by = known.as_ref().map_or(deadline, |_| deadline.min(Instant::now() + KNOWN_FAILURE));
        let outcome = self
            .machines
            .wait_for(&self.key(machine), heal_by, |vm| {
                let Some(vm) = vm else { return Some(Err(AttachError::NoMachine(machine.clone()))) };
                if is_older(vm, since) {
                    return None;
                }
                let disk = disk(vm, entry)?;
                match (&disk.disk_uuid, &disk.error) {
                    (Some(uuid), _) if disk.attached => Some(Ok(uuid.clone())),
                    (_, Some(error)) if known.as_ref() != Some(error) => Some(Err(failed(error.clone()))),
                    _ => None,
                }
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

    /// Unplugs the disk. The claim need not exist any more, and a machine that is gone has no disks.
    pub async fn detach(&self, claim: &str, machine: &str, deadline: Instant) -> Result<(), DetachError> {
        let entry = names::volume_entry(claim);
        let seen = self.machines.get(&self.key(machine));
        let involved = |vm: &VirtualMachine| wants(vm, claim).is_some() || disk(vm, &entry).is_some();
        if !seen.as_deref().is_some_and(involved) {
            match self.read(machine).await.map_err(DetachError::Commit)? {
                Some(vm) if involved(&vm) => {}
                _ => return Ok(()),
            }
        }
        let since = match self.committer.commit(machine, Change::Remove { name: entry.clone() }).await {
            Ok(since) => since,
            Err(CommitError::NoMachine(_)) => return Ok(()),
            Err(error) => return Err(DetachError::Commit(error)),
        };
        let known = self.machines.get(&self.key(machine)).and_then(|vm| disk(&vm, &entry)?.error.clone());
        let outcome = self
            .machines
            .wait_for(&self.key(machine), deadline, |vm| {
                let Some(vm) = vm else { return Some(Ok(())) };
                if is_older(vm, &since) {
                    return None;
                }
                let Some(disk) = disk(vm, &entry) else { return Some(Ok(())) };
                let error = disk.error.clone().filter(|error| known.as_ref() != Some(error))?;
                let (claim, machine) = (claim.to_owned(), machine.to_owned());
                Some(Err(DetachError::Failed { claim, machine, error }))
            })
            .await;
        outcome.unwrap_or_else(|| {
            let because = self.last_error(machine, &entry);
            Err(DetachError::Deadline { claim: claim.to_owned(), machine: machine.to_owned(), because })
        })
    }

    /// The machine as it is now; None when there is none.
    async fn read(&self, machine: &str) -> Result<Option<VirtualMachine>, CommitError> {
        // The name is the guest's word and becomes part of a URL: one that no object can have, has none.
        if !super::is_object_name(machine) {
            return Ok(None);
        }
        let answer = self.machines_api.get_opt(machine).await;
        answer.map_err(|error| CommitError::Api { machine: machine.to_owned(), source: error.into() })
    }

    fn last_error(&self, machine: &str, entry: &str) -> String {
        let vm: Option<Arc<VirtualMachine>> = self.machines.get(&self.key(machine));
        let error = vm.and_then(|vm| disk(&vm, entry)?.error.clone());
        error.map(|error| format!(": {error}")).unwrap_or_default()
    }
}

/// Whether the machine should have the claim, and if so whether only to read.
fn wants(vm: &VirtualMachine, claim: &str) -> Option<bool> {
    let sources = vm.spec.volumes.iter().filter_map(|volume| volume.persistent_volume_claim.as_ref());
    sources.into_iter().find(|source| source.claim_name == claim).map(|source| source.read_only)
}

/// What the machine says of an entry.
fn disk<'a>(vm: &'a VirtualMachine, entry: &str) -> Option<&'a VirtualMachineVolumeStatus> {
    vm.status.as_ref()?.volumes.iter().find(|disk| disk.name == entry)
}

/// Whether a state that was seen is from before a change went in. A machine of another UID counts as
/// older too: it is, or else the machine was replaced since, which the next call finds out.
fn is_older(vm: &VirtualMachine, since: &Committed) -> bool {
    let seen = committed(vm);
    seen.uid != since.uid || seen.generation < since.generation
}
