//! Changes to `VirtualMachine.spec.volumes`, merged: the first change of a VM is sent at once; those that come while
//! it, or what came of it, is under way [gather](super::gather) and go together in the next PATCH.
//!
//! A PATCH names exactly the entries that change (JSON Patch): an entry is appended, or removed from the
//! place where it was seen. It goes in only while the spec's generation is the one that was seen, so that
//! one that arrives late can't undo what came after it. So nobody else's entries and no other field can be
//! lost, a status written in between is no conflict, and the size of a request doesn't grow with the
//! VM. Two entries of one name can't come about: the list is keyed by name, and the API server refuses
//! them. Each is planned from the answer to the one before it, which the watch may not show yet, so that our own
//! PATCHes never refuse each other.
//!
//! Before each PATCH that takes an entry out, and after the look at the VM onto which it goes, whoever asked for the
//! removal is asked whether its reason still stands. An attach that comes after that answer changes the VM, also
//! where it finds its entry there, so that the PATCH is refused.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crds::VirtualMachine;
use futures::future::{BoxFuture, join_all};
use kube::Api;
use kube::api::{Patch, PatchParams};
use kube_kit::informer::{Informer, Key};
use kube_kit::latest::is_newer;
use tokio::sync::oneshot;

use super::ApiError;
use super::batcher::{Batcher, Operation as BatchedOperation};
use crate::machine::{Change, Committed, Plan, Refusal, committed, plan};

/// How often a PATCH is made anew after somebody else changed the VM's disks in between.
const MAX_CONFLICTS: u32 = 6;

/// How long the guest may take to say whether it wants a disk, while other changes of the VM wait.
const GUEST_CHECK_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a change did not go in.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CommitError {
    /// There is no such VM.
    #[error("there is no VirtualMachine {0} in the management cluster")]
    VmNotFound(String),
    /// The VM doesn't allow it.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The entry stays: there is no reason to take it out any more, or none that is known.
    #[error(transparent)]
    Kept(#[from] KeepReason),
    /// The request failed.
    #[error("cannot change the disks of VirtualMachine {vm_name}: {source}")]
    Api {
        /// The VM.
        vm_name: String,
        /// What the API said.
        source: ApiError,
    },
}

/// Why an entry is not taken out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeepReason {
    /// The guest wants the disk.
    #[error("VolumeAttachment {0} of the guest asks for it again")]
    Requested(String),
    /// It is not known.
    #[error("{0}")]
    Unknown(String),
}

/// Asks whether an entry may be taken out, as things are now.
pub(crate) type MayRemove = Arc<dyn Fn() -> BoxFuture<'static, Result<(), KeepReason>> + Send + Sync>;

/// A change, and who waits for it.
pub(super) struct Request {
    change: Change,
    /// For a removal.
    may_remove: Option<MayRemove>,
    done: oneshot::Sender<Result<Committed, CommitError>>,
}

/// An operation on a VM that may come to a change.
pub(super) type Operation = BatchedOperation<Request>;

/// Merges changes per VM.
#[derive(Clone)]
pub struct Committer {
    api: Api<VirtualMachine>,
    vms: Informer<VirtualMachine>,
    namespace: String,
    batcher: Batcher<Request>,
    /// What our own PATCHes and reads answered, by VM, while the informer shows what is older.
    own_writes: Arc<Mutex<HashMap<String, Arc<VirtualMachine>>>>,
}

impl std::fmt::Debug for Committer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Committer").finish_non_exhaustive()
    }
}

impl Committer {
    /// Writes through `api`, and plans from what `VMs` shows.
    pub fn new(api: Api<VirtualMachine>, vms: Informer<VirtualMachine>, namespace: &str) -> Self {
        let (batcher, own_writes) = (Batcher::default(), Arc::default());
        Self { api, vms, namespace: namespace.to_owned(), batcher, own_writes }
    }

    /// Begins an operation on a VM, which may come to a change. It lasts until what this gives is dropped: changes of
    /// others that come meanwhile are likely not to be the last.
    pub(super) fn begin(&self, vm_name: &str) -> Operation {
        self.batcher.begin(vm_name)
    }

    /// Brings a change in, with others of the same VM. If the caller leaves, a PATCH that is on its way goes on,
    /// but none is made for the change any more: what is wished may be another by then.
    pub(super) async fn commit(
        &self,
        operation: &Operation,
        change: Change,
    ) -> Result<Committed, CommitError> {
        self.request(operation, change, None).await
    }

    /// Takes an entry out, as long as it may leave.
    pub(super) async fn remove(
        &self,
        operation: &Operation,
        entry: &str,
        may_remove: MayRemove,
    ) -> Result<Committed, CommitError> {
        self.request(operation, Change::Remove { name: entry.to_owned() }, Some(may_remove)).await
    }

    async fn request(
        &self,
        operation: &Operation,
        change: Change,
        may_remove: Option<MayRemove>,
    ) -> Result<Committed, CommitError> {
        let (done, outcome) = oneshot::channel();
        if let Some(mut batches) = self.batcher.push(operation, Request { change, may_remove, done }) {
            let committer = self.clone();
            tokio::spawn(async move {
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

    async fn apply(&self, vm_name: &str, mut batch: Vec<Request>) {
        let retry_singly = match self.write(vm_name, &mut batch).await {
            Ok(outcomes) => return answer(batch, outcomes),
            // One refused change must not take the others with it.
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

    /// One PATCH for all changes whose callers still wait; one outcome for each of these, or one failure for all.
    async fn write(
        &self,
        vm_name: &str,
        batch: &mut Vec<Request>,
    ) -> Result<Vec<Result<Committed, CommitError>>, CommitError> {
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
                    Arc::new(self.api.get(vm_name).await.map_err(|error| fail(error.into()))?)
                }
            };
            // Who left may have been answered elsewhere, and what was wished then may be wrong now.
            batch.retain(|request| !request.done.is_closed());
            reject_kept_entries(&vm, batch).await;
            let changes: Vec<Change> = batch.iter().map(|request| request.change.clone()).collect();
            let plan = plan(vm_name, &vm, &changes);
            // The copy may be older than a PATCH whose answer was lost: that there is nothing to do is for the API
            // server to say.
            if plan.operations.is_empty() && !is_live && !batch.is_empty() {
                base = None;
                continue;
            }
            if plan.operations.is_empty() {
                return Ok(outcomes_of(plan, &self.remember(vm_name, vm)));
            }
            let patch = Patch::Json::<()>(json_patch::Patch(plan.operations.clone()));
            match self.api.patch(vm_name, &PatchParams::default(), &patch).await.map_err(ApiError::from) {
                Ok(vm) => return Ok(outcomes_of(plan, &self.remember(vm_name, Arc::new(vm)))),
                // The list was not as it was seen: read the truth and plan again.
                Err(ApiError::Conflict(_) | ApiError::Invalid(_)) if conflicts < MAX_CONFLICTS => {
                    conflicts += 1;
                    let longest = Duration::from_millis(5 << conflicts);
                    tokio::time::sleep(longest.mul_f64(fastrand::f64())).await;
                    let live = self.api.get(vm_name).await.map_err(|error| fail(error.into()))?;
                    // Refused although nothing was different: it is the change itself that is refused.
                    if live.metadata.resource_version == vm.metadata.resource_version {
                        (conflicts, is_refused) = (MAX_CONFLICTS, true);
                    }
                    (base, is_live) = (Some(Arc::new(live)), true);
                }
                // Somebody was faster every time: the next try may go better.
                Err(ApiError::Invalid(message)) if !is_refused => {
                    return Err(fail(ApiError::Conflict(message)));
                }
                Err(error) => return Err(fail(error)),
            }
        }
    }

    /// The newest that is known of a VM: a plan made from less would be refused.
    fn newest_vm(&self, vm_name: &str) -> Option<Arc<VirtualMachine>> {
        let own_writes = self.own_writes.lock().unwrap_or_else(PoisonError::into_inner);
        let own = own_writes.get(vm_name).filter(|own| self.is_newer_than_cache(vm_name, own)).cloned();
        own.or_else(|| self.cached(vm_name))
    }

    /// Keeps an answer until the informer shows it too.
    fn remember(&self, vm_name: &str, vm: Arc<VirtualMachine>) -> Committed {
        let committed = committed(&vm);
        let mut own_writes = self.own_writes.lock().unwrap_or_else(PoisonError::into_inner);
        own_writes.insert(vm_name.to_owned(), vm);
        own_writes.retain(|vm_name, own| self.is_newer_than_cache(vm_name, own));
        committed
    }

    /// Whether an own answer is newer than what the informer shows.
    fn is_newer_than_cache(&self, vm_name: &str, own: &VirtualMachine) -> bool {
        let cached = self.cached(vm_name);
        cached.is_some_and(|cached| cached.metadata.uid == own.metadata.uid && is_newer(own, Some(&*cached)))
    }

    fn cached(&self, vm_name: &str) -> Option<Arc<VirtualMachine>> {
        self.vms.get(&Key::new(self.namespace.clone(), vm_name))
    }
}

/// Answers the removals of entries that must stay, and forgets them. `vm` was seen before.
async fn reject_kept_entries(vm: &VirtualMachine, batch: &mut Vec<Request>) {
    let is_there = |name: &String| vm.spec.volumes.iter().any(|entry| &entry.name == name);
    let check = |request: &Request| match (&request.change, &request.may_remove) {
        (Change::Remove { name }, Some(may_remove)) if is_there(name) => Some(may_remove()),
        _ => None,
    };
    let checking = batch.iter().map(|request| {
        let answer = check(request);
        async move {
            let unknown =
                || KeepReason::Unknown("the guest did not say in time whether it wants the disk".to_owned());
            match answer {
                Some(answer) => {
                    tokio::time::timeout(GUEST_CHECK_TIMEOUT, answer).await.unwrap_or_else(|_| Err(unknown()))
                }
                None => Ok(()),
            }
        }
    });
    let answers = join_all(checking).await;
    let all = std::mem::take(batch);
    for (request, answered) in all.into_iter().zip(answers) {
        match answered {
            Ok(()) => batch.push(request),
            Err(reason) => answer(vec![request], vec![Err(reason.into())]),
        }
    }
}

fn answer(batch: Vec<Request>, outcomes: Vec<Result<Committed, CommitError>>) {
    for (request, outcome) in batch.into_iter().zip(outcomes) {
        // A caller that left has nobody to tell.
        let _ = request.done.send(outcome);
    }
}

/// What each change came to.
fn outcomes_of(plan: Plan, committed: &Committed) -> Vec<Result<Committed, CommitError>> {
    let outcome =
        |refused: Option<Refusal>| refused.map_or_else(|| Ok(committed.clone()), |why| Err(why.into()));
    plan.refused.into_iter().map(outcome).collect()
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use http::{Method, Request as HttpRequest, Response};
    use http_body_util::BodyExt;
    use kube::Client;
    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;

    /// An API server of one VM, which carries out JSON Patches. The informer beside it never shows what they did.
    struct Server {
        vm: Mutex<Value>,
        patches: AtomicUsize,
        refused: AtomicUsize,
    }

    impl Server {
        async fn answer(&self, request: HttpRequest<Body>) -> Response<Body> {
            assert_eq!(request.method(), Method::PATCH, "nothing is read");
            let body = request.into_body().collect().await.unwrap().to_bytes();
            let patch: json_patch::Patch = serde_json::from_slice(&body).unwrap();
            tokio::time::sleep(Duration::from_millis(8)).await;
            self.patches.fetch_add(1, Ordering::SeqCst);
            let mut vm = self.vm.lock().unwrap();
            let (code, answer) = match json_patch::patch(&mut vm, &patch) {
                Ok(()) => {
                    let generation = vm["metadata"]["generation"].as_i64().unwrap() + 1;
                    vm["metadata"]["generation"] = json!(generation);
                    vm["metadata"]["resourceVersion"] = json!(generation.to_string());
                    (200, vm.to_string())
                }
                Err(error) => {
                    self.refused.fetch_add(1, Ordering::SeqCst);
                    (422, json!({"status": "Failure", "code": 422, "message": error.to_string()}).to_string())
                }
            };
            Response::builder().status(code).body(Body::from(answer.into_bytes())).unwrap()
        }

        fn entries(&self) -> usize {
            self.vm.lock().unwrap()["spec"]["volumes"].as_array().map_or(0, Vec::len)
        }
    }

    /// A server of a VM with these entries, and a committer that writes to it.
    fn serve(entries: &Value) -> (Arc<Server>, Committer) {
        let vm = json!({
            "apiVersion": "vmoperator.vmware.com/v1alpha5", "kind": "VirtualMachine",
            "metadata": {"name": "vm", "namespace": "n", "uid": "u", "generation": 1, "resourceVersion": "1"},
            "spec": {"volumes": entries},
        });
        let cached: VirtualMachine = serde_json::from_value(vm.clone()).unwrap();
        let (patches, refused) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let server = Arc::new(Server { vm: Mutex::new(vm), patches, refused });
        let answering = server.clone();
        let service = tower::service_fn(move |request: HttpRequest<Body>| {
            let server = answering.clone();
            async move { Ok::<_, Infallible>(server.answer(request).await) }
        });
        let resource = crds::virtual_machine_resource("v1alpha5");
        let api = Api::namespaced_with(Client::new(service, "n"), "n", &resource);
        (server, Committer::new(api, Informer::fixed([cached]), "n"))
    }

    /// Thirty operations, some milliseconds apart, each of which lasts a while after its change.
    async fn run_thirty(committer: &Committer, apart: Duration, change: impl Fn(String) -> Change) {
        let mut operations = Vec::new();
        for number in 0..30 {
            let (committer, change) = (committer.clone(), change(format!("disk-{number}")));
            operations.push(tokio::spawn(async move {
                let operation = committer.begin("vm");
                committer.commit(&operation, change).await.unwrap();
                tokio::time::sleep(Duration::from_millis(120)).await;
            }));
            tokio::time::sleep(apart).await;
        }
        for operation in operations {
            operation.await.unwrap();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_entry_that_the_guest_wants_stays_and_the_others_of_its_batch_go() {
        let entries = ["kept", "gone", "unknown"].map(|name| json!({"name": name}));
        let (server, committer) = serve(&json!(entries));
        let checks = Arc::new(AtomicUsize::new(0));
        let answering = |answer: Option<Result<(), KeepReason>>| -> MayRemove {
            let checks = checks.clone();
            Arc::new(move || {
                checks.fetch_add(1, Ordering::SeqCst);
                match answer.clone() {
                    Some(answer) => Box::pin(async move { answer }),
                    None => Box::pin(std::future::pending()),
                }
            })
        };
        let operation = committer.begin("vm");
        let reason = KeepReason::Requested("csi-1".to_owned());
        let (kept, gone, unknown) = tokio::join!(
            committer.remove(&operation, "kept", answering(Some(Err(reason.clone())))),
            committer.remove(&operation, "gone", answering(Some(Ok(())))),
            committer.remove(&operation, "unknown", answering(None)),
        );
        assert!(matches!(kept, Err(CommitError::Kept(why)) if why == reason));
        assert!(matches!(unknown, Err(CommitError::Kept(KeepReason::Unknown(_)))));
        assert!(gone.is_ok());
        assert_eq!((checks.load(Ordering::SeqCst), server.entries()), (3, 2));
    }

    #[tokio::test(start_paused = true)]
    async fn thirty_attaches_and_detaches_take_five_patches_each_and_none_is_refused() {
        let (server, committer) = serve(&json!([]));
        for apart in [1, 5, 10].map(Duration::from_millis) {
            let add = |name: String| Change::Add {
                claim: name.clone(),
                name,
                read_only: false,
                multi_writer: false,
            };
            run_thirty(&committer, apart, add).await;
            assert_eq!(server.entries(), 30);
            let patches = server.patches.swap(0, Ordering::SeqCst);
            assert!(patches <= 5, "{patches} to attach, {apart:?} apart");
            run_thirty(&committer, apart, |name| Change::Remove { name }).await;
            assert_eq!(server.entries(), 0);
            let patches = server.patches.swap(0, Ordering::SeqCst);
            assert!(patches <= 5, "{patches} to detach, {apart:?} apart");
        }
        assert_eq!(server.refused.load(Ordering::SeqCst), 0);
    }
}
