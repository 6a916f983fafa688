//! Group commit of changes to `VirtualMachine.spec.volumes`. The first change of a VM is sent at once; changes that
//! arrive while it is in flight are [batched](super::batcher) into the next PATCH.
//!
//! A PATCH (JSON Patch) names only the entries that change: it appends an entry, or removes one at the index where it
//! was observed. It tests the spec's generation, so a late PATCH cannot undo newer changes. Entries and fields of
//! others are never overwritten, a concurrent status update is no conflict, and the request size does not depend on the
//! number of entries. The list is keyed by name, so the API server refuses duplicate entries. Each PATCH is computed
//! from the response to the previous one (a mutation cache over the informer), so our own PATCHes do not conflict with
//! each other.
//!
//! Before each PATCH that removes an entry, and after reading the VM that it applies to, the committer calls the
//! request's [`MayRemove`] check. A later attach changes the VM even if its entry is already present, so the API server
//! then refuses the PATCH.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crds::names::{ClaimName, VmName};
use futures::future::{BoxFuture, join_all};
use kube::api::Patch;
use kube_kit::resource_version::is_newer;
use process_kit::trace::TraceParent;
use process_kit::{operation, supervise};
use tokio::sync::oneshot;

use super::batcher::{Batcher, Operation as BatchedOperation};
use crate::management::error::ApiError;
use crate::management::holders::{Holders, TakeError, back_off, may_be_outdated};
use crate::management::virtual_machines::VirtualMachines;
use crate::vm_volumes::holder::{Holder, Taken};
use crate::vm_volumes::{EntryChange, PatchPlan, Refusal, Revision, Vm, add_traces, plan_patch, revision};

/// Retries of a PATCH after conflicts with changes of others.
const MAX_CONFLICTS: u32 = 6;

/// Timeout of the check in the guest cluster before an entry is removed; other changes of the VM wait meanwhile.
const GUEST_CHECK_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a change was not committed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CommitError {
    /// The VirtualMachine does not exist.
    #[error("there is no VirtualMachine {0} in the management cluster")]
    VmNotFound(VmName),
    /// The change is not possible in the VM's present state.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The entry must not be removed, or the check failed.
    #[error(transparent)]
    Kept(#[from] KeepReason),
    /// The claim of an entry was not taken for the VM.
    #[error(transparent)]
    Take(#[from] TakeError),
    /// The API request failed.
    #[error("failed to change spec.volumes of VirtualMachine {vm_name}: {source}")]
    Api {
        /// Name of the VM.
        vm_name: VmName,
        /// Error of the API request.
        source: ApiError,
    },
}

/// Why an entry is not removed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeepReason {
    /// A guest VolumeAttachment requests the disk.
    #[error("guest VolumeAttachment {0} requests it again")]
    Requested(String),
    /// The check failed.
    #[error("{0}")]
    Unknown(String),
}

/// Checks at the guest's API server whether an entry may be removed.
pub(crate) type MayRemove = Arc<dyn Fn() -> BoxFuture<'static, Result<(), KeepReason>> + Send + Sync>;

/// A record that is written while a change is committed.
type TakenSlot = Arc<Mutex<Option<Taken>>>;

/// An addition that is committed.
#[derive(Debug)]
pub(super) struct Added {
    /// The VM with the entry.
    pub(super) since: Revision,
    /// The record on the claim, if claims have holders.
    pub(super) taken: Option<Taken>,
}

/// A change and the channel for its outcome.
pub(super) struct Request {
    change: EntryChange,
    /// Set for removals.
    may_remove: Option<MayRemove>,
    /// ID of the boot of the VM's node, if the disk may be attested blank.
    boot: Option<String>,
    /// The record with which the claim of an addition was taken last.
    taken: TakenSlot,
    /// Trace context of the operation.
    context: Option<TraceParent>,
    done: oneshot::Sender<Result<Revision, CommitError>>,
}

/// An operation on a VM that may lead to a change.
pub(super) type Operation = BatchedOperation<Request>;

/// Batches and commits changes per VM.
#[derive(Clone)]
pub(super) struct Committer {
    vms: VirtualMachines,
    /// Set if claims have holders.
    holders: Option<Holders>,
    batcher: Batcher<Request>,
    /// Mutation cache: the VMs returned by our own PATCHes and reads, until the informer is as new.
    own_writes: Arc<Mutex<HashMap<VmName, Arc<Vm>>>>,
}

impl std::fmt::Debug for Committer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Committer").finish_non_exhaustive()
    }
}

impl Committer {
    pub(super) fn new(vms: VirtualMachines, holders: Option<Holders>) -> Self {
        Self { vms, holders, batcher: Batcher::default(), own_writes: Arc::default() }
    }

    /// Starts an operation on a VM. It ends when the result is dropped; until then, further changes of the VM are
    /// likely.
    pub(super) fn begin(&self, vm_name: &VmName) -> Operation {
        self.batcher.begin(vm_name)
    }

    /// Commits an addition, batched with other changes of the same VM. If the caller is cancelled, a PATCH in flight completes,
    /// but no new one is sent for its change.
    pub(super) async fn add(
        &self,
        operation: &Operation,
        change: EntryChange,
        boot: Option<String>,
    ) -> Result<Added, CommitError> {
        let taken = TakenSlot::default();
        let since = self.request(operation, change, None, (boot, taken.clone())).await?;
        let taken = taken.lock().unwrap_or_else(PoisonError::into_inner).take();
        Ok(Added { since, taken })
    }

    /// Removes an entry if `may_remove` allows it.
    pub(super) async fn remove(
        &self,
        operation: &Operation,
        entry: &str,
        may_remove: MayRemove,
    ) -> Result<Revision, CommitError> {
        let change = EntryChange::Remove { name: entry.to_owned() };
        self.request(operation, change, Some(may_remove), Default::default()).await
    }

    async fn request(
        &self,
        operation: &Operation,
        change: EntryChange,
        may_remove: Option<MayRemove>,
        (boot, taken): (Option<String>, TakenSlot),
    ) -> Result<Revision, CommitError> {
        let (done, outcome) = oneshot::channel();
        let context = operation::trace_parent();
        let request = Request { change, may_remove, boot, taken, context, done };
        if let Some(mut batches) = self.batcher.push(operation, request) {
            let committer = self.clone();
            supervise::worker(format!("batcher of VM {}", operation.vm_name()), async move {
                while let Some(batch) = batches.next().await {
                    committer.apply(batches.vm_name(), batch).await;
                }
            });
        }
        outcome.await.unwrap_or_else(|_| {
            let source = ApiError::Unavailable("the process is stopping".to_owned());
            Err(CommitError::Api { vm_name: operation.vm_name().to_owned(), source })
        })
    }

    async fn apply(&self, vm_name: &VmName, mut batch: Vec<Request>) {
        let retry_singly = match self.write(vm_name, &mut batch).await {
            Ok(outcomes) => return answer(batch, outcomes),
            // If the API server refuses a batch, each change is sent alone, so that one invalid change does not fail
            // the others.
            Err(CommitError::Api { source: ApiError::Invalid(_) | ApiError::Forbidden(_), .. })
                if batch.len() > 1 =>
            {
                batch
            }
            Err(error) => {
                let outcomes = batch.iter().map(|_| Err(error.clone())).collect();
                return answer(batch, outcomes);
            }
        };
        for request in retry_singly {
            let mut one = vec![request];
            let outcomes = self.write(vm_name, &mut one).await;
            answer(one, outcomes.unwrap_or_else(|error| vec![Err(error)]));
        }
    }

    /// Sends one PATCH for all changes whose callers still wait. Returns one outcome per change, or one error for all.
    async fn write(
        &self,
        vm_name: &VmName,
        batch: &mut Vec<Request>,
    ) -> Result<Vec<Result<Revision, CommitError>>, CommitError> {
        let fail = |source| match source {
            ApiError::NotFound(_) => CommitError::VmNotFound(vm_name.to_owned()),
            source => CommitError::Api { vm_name: vm_name.to_owned(), source },
        };
        let mut base = self.newest_vm(vm_name);
        let mut is_live = false;
        let (mut conflicts, mut is_refused) = (0, false);
        loop {
            let vm = match base {
                Some(vm) => vm,
                None => {
                    is_live = true;
                    Arc::new(self.vms.read_existing(vm_name).await.map_err(fail)?)
                }
            };
            // A cancelled caller may have retried elsewhere, so its change may be outdated.
            batch.retain(|request| !request.done.is_closed());
            reject_kept_entries(&vm, batch).await;
            self.take_claims(vm_name, &vm, batch).await;
            let changes: Vec<EntryChange> = batch.iter().map(|request| request.change.clone()).collect();
            let mut plan = plan_patch(self.vms.vm_api(), vm_name, &vm, &changes);
            add_traces(&vm, &mut plan.operations, &contexts_of(batch));
            // The cached VM may be older than a PATCH whose response was lost, so "nothing to do" is verified at the
            // API server.
            if plan.operations.is_empty() && !is_live && !batch.is_empty() {
                base = None;
                continue;
            }
            if plan.operations.is_empty() {
                return Ok(outcomes_of(plan, &self.remember(vm_name, vm)));
            }
            let patch = Patch::Json::<()>(json_patch::Patch(plan.operations.clone()));
            match self.vms.patch(vm_name, &patch).await {
                Ok(vm) => return Ok(outcomes_of(plan, &self.remember(vm_name, Arc::new(vm)))),
                // The list changed in between: read the VM and plan again.
                Err(ApiError::Conflict(_) | ApiError::Invalid(_)) if conflicts < MAX_CONFLICTS => {
                    conflicts += 1;
                    let longest = Duration::from_millis(5 << conflicts);
                    tokio::time::sleep(longest.mul_f64(fastrand::f64())).await;
                    let live = self.vms.read_existing(vm_name).await.map_err(fail)?;
                    // The VM did not change, so the API server refuses the change itself.
                    if live.metadata.resource_version == vm.metadata.resource_version {
                        (conflicts, is_refused) = (MAX_CONFLICTS, true);
                    }
                    (base, is_live) = (Some(Arc::new(live)), true);
                }
                Err(error) if may_be_outdated(&error) && conflicts < MAX_CONFLICTS => {
                    back_off(conflicts).await;
                    conflicts += 1;
                    (base, is_live) = (self.newest_vm(vm_name), false);
                }
                // Every attempt conflicted with a change of another client; a retry may succeed.
                Err(ApiError::Invalid(message)) if !is_refused => {
                    return Err(fail(ApiError::Conflict(message)));
                }
                Err(error) => return Err(fail(error)),
            }
        }
    }

    /// Takes the claims of entries to add for the VM, which was read before, and answers the requests whose claim another VM holds.
    async fn take_claims(&self, vm_name: &VmName, vm: &Vm, batch: &mut Vec<Request>) {
        let Some(holders) = &self.holders else { return };
        let holder = Holder::of(vm_name, vm);
        let taking = batch.iter().map(|request| async {
            match &request.change {
                EntryChange::Add { claim, multi_writer, .. } => {
                    let (claim, boot) = (ClaimName::new(claim), request.boot.as_deref());
                    let taken = holders.take(&claim, &holder, boot, *multi_writer).await?;
                    *request.taken.lock().unwrap_or_else(PoisonError::into_inner) = taken;
                    Ok::<_, TakeError>(())
                }
                EntryChange::Remove { .. } => Ok(()),
            }
        });
        let outcomes = join_all(taking).await;
        retain_allowed(batch, outcomes);
    }

    /// The newest known version of a VM: a PATCH computed from an older one would be refused.
    fn newest_vm(&self, vm_name: &VmName) -> Option<Arc<Vm>> {
        let own_writes = self.own_writes.lock().unwrap_or_else(PoisonError::into_inner);
        let own = own_writes.get(vm_name).filter(|own| self.is_newer_than_cache(vm_name, own)).cloned();
        own.or_else(|| self.vms.get(vm_name))
    }

    /// Keeps a response until the informer's cache is as new.
    fn remember(&self, vm_name: &VmName, vm: Arc<Vm>) -> Revision {
        let committed = revision(&vm);
        let mut own_writes = self.own_writes.lock().unwrap_or_else(PoisonError::into_inner);
        own_writes.insert(vm_name.to_owned(), vm);
        own_writes.retain(|vm_name, own| self.is_newer_than_cache(vm_name, own));
        committed
    }

    /// Whether our own response is newer than the informer's cache.
    fn is_newer_than_cache(&self, vm_name: &VmName, own: &Vm) -> bool {
        let cached = self.vms.get(vm_name);
        cached.is_some_and(|cached| cached.metadata.uid == own.metadata.uid && is_newer(own, Some(&*cached)))
    }
}

/// Removes the requests whose entry must stay from the batch, and answers them.
async fn reject_kept_entries(vm: &Vm, batch: &mut Vec<Request>) {
    let is_there = |name: &String| vm.spec.volumes.iter().any(|entry| &entry.name == name);
    let check = |request: &Request| match (&request.change, &request.may_remove) {
        (EntryChange::Remove { name }, Some(may_remove)) if is_there(name) => Some(may_remove()),
        _ => None,
    };
    let checking = batch.iter().map(|request| {
        let answer = check(request);
        async move {
            let unknown = || {
                KeepReason::Unknown(
                    "the guest's API server did not answer in time whether the disk is requested".to_owned(),
                )
            };
            match answer {
                Some(answer) => {
                    tokio::time::timeout(GUEST_CHECK_TIMEOUT, answer).await.unwrap_or_else(|_| Err(unknown()))
                }
                None => Ok(()),
            }
        }
    });
    let answers = join_all(checking).await;
    retain_allowed(batch, answers);
}

/// Keeps the requests with a positive outcome, and answers the others.
fn retain_allowed<E: Into<CommitError>>(batch: &mut Vec<Request>, outcomes: Vec<Result<(), E>>) {
    let all = std::mem::take(batch);
    for (request, outcome) in all.into_iter().zip(outcomes) {
        match outcome {
            Ok(()) => batch.push(request),
            Err(why) => answer(vec![request], vec![Err(why.into())]),
        }
    }
}

/// The trace context of each entry that changes; of several changes, the last one's.
fn contexts_of(batch: &[Request]) -> BTreeMap<String, Option<TraceParent>> {
    let of = |request: &Request| match &request.change {
        EntryChange::Add { name, .. } | EntryChange::Remove { name } => {
            (name.clone(), request.context.clone())
        }
    };
    batch.iter().map(of).collect()
}

fn answer(batch: Vec<Request>, outcomes: Vec<Result<Revision, CommitError>>) {
    for (request, outcome) in batch.into_iter().zip(outcomes) {
        // The receiver is gone if the caller was cancelled.
        let _ = request.done.send(outcome);
    }
}

/// The outcome of each change.
fn outcomes_of(plan: PatchPlan, committed: &Revision) -> Vec<Result<Revision, CommitError>> {
    let outcome =
        |refused: Option<Refusal>| refused.map_or_else(|| Ok(committed.clone()), |why| Err(why.into()));
    plan.refused.into_iter().map(outcome).collect()
}

#[cfg(test)]
mod tests;
