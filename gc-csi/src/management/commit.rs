//! Changes to `VirtualMachine.spec.volumes`, merged: the first change of a machine is sent at once; those that come while
//! it, or what came of it, is under way [gather](super::gather) and go together in the next PATCH.
//!
//! A PATCH names exactly the entries that change (JSON Patch): an entry is appended, or removed from the
//! place where it was seen. It goes in only while the spec's generation is the one that was seen, so that
//! one that arrives late can't undo what came after it. So nobody else's entries and no other field can be
//! lost, a status written in between is no conflict, and the size of a request doesn't grow with the
//! machine. Two entries of one name can't come about: the list is keyed by name, and the API server refuses
//! them. Each is planned from the answer to the one before it, which the watch may not show yet, so that our own
//! PATCHes never refuse each other.
//!
//! Before each PATCH that takes an entry out, and after the look at the machine onto which it goes, whoever asked for the
//! removal is asked whether its reason still stands. An attach that comes after that answer changes the machine, also
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
use process_kit::supervise;
use tokio::sync::oneshot;

use super::ApiError;
use super::gather::{Gathering, Operation as Begun};
use crate::machine::{Change, Committed, Plan, Refusal, committed, plan};

/// How often a PATCH is made anew after somebody else changed the machine's disks in between.
const MOST_CONFLICTS: u32 = 6;

/// How long the guest may take to say whether it wants a disk, while other changes of the machine wait.
const ASKED: Duration = Duration::from_secs(5);

/// Why a change did not go in.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CommitError {
    /// There is no such machine.
    #[error("there is no VirtualMachine {0} in the management cluster")]
    NoMachine(String),
    /// The machine doesn't allow it.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The entry stays: there is no reason to take it out any more, or none that is known.
    #[error(transparent)]
    Wanted(#[from] Wanted),
    /// The request failed.
    #[error("cannot change the disks of VirtualMachine {machine}: {source}")]
    Api {
        /// The machine.
        machine: String,
        /// What the API said.
        source: ApiError,
    },
}

/// Why an entry is not taken out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Wanted {
    /// The guest wants the disk.
    #[error("VolumeAttachment {0} of the guest asks for it again")]
    By(String),
    /// It is not known.
    #[error("{0}")]
    Unknown(String),
}

/// Asks whether an entry may be taken out, as things are now.
pub(crate) type MayLeave = Arc<dyn Fn() -> BoxFuture<'static, Result<(), Wanted>> + Send + Sync>;

/// A change, and who waits for it.
pub(super) struct Request {
    change: Change,
    /// For a removal.
    may_leave: Option<MayLeave>,
    done: oneshot::Sender<Result<Committed, CommitError>>,
}

/// An operation on a machine that may come to a change.
pub(super) type Operation = Begun<Request>;

/// Merges changes per machine.
#[derive(Clone)]
pub struct Committer {
    api: Api<VirtualMachine>,
    machines: Informer<VirtualMachine>,
    namespace: String,
    gathering: Gathering<Request>,
    /// What our own PATCHes and reads answered, by machine, while the informer shows what is older.
    newest: Arc<Mutex<HashMap<String, Arc<VirtualMachine>>>>,
}

impl std::fmt::Debug for Committer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Committer").finish_non_exhaustive()
    }
}

impl Committer {
    /// Writes through `api`, and plans from what `machines` shows.
    pub fn new(api: Api<VirtualMachine>, machines: Informer<VirtualMachine>, namespace: &str) -> Self {
        let (gathering, newest) = (Gathering::default(), Arc::default());
        Self { api, machines, namespace: namespace.to_owned(), gathering, newest }
    }

    /// Begins an operation on a machine, which may come to a change. It lasts until what this gives is dropped: changes of
    /// others that come meanwhile are likely not to be the last.
    pub(super) fn begin(&self, machine: &str) -> Operation {
        self.gathering.begin(machine)
    }

    /// Brings a change in, with others of the same machine. If the caller leaves, a PATCH that is on its way goes on,
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
        may_leave: MayLeave,
    ) -> Result<Committed, CommitError> {
        self.request(operation, Change::Remove { name: entry.to_owned() }, Some(may_leave)).await
    }

    async fn request(
        &self,
        operation: &Operation,
        change: Change,
        may_leave: Option<MayLeave>,
    ) -> Result<Committed, CommitError> {
        let (done, outcome) = oneshot::channel();
        if let Some(mut batches) = self.gathering.push(operation, Request { change, may_leave, done }) {
            let committer = self.clone();
            supervise::worker(format!("batcher of VM {}", operation.machine()), async move {
                while let Some(batch) = batches.next().await {
                    committer.apply(batches.machine(), batch).await;
                }
            });
        }
        outcome.await.unwrap_or_else(|_| {
            let source = ApiError::Unavailable("the process is stopping".to_owned());
            Err(CommitError::Api { machine: operation.machine().to_owned(), source })
        })
    }

    async fn apply(&self, machine: &str, mut batch: Vec<Request>) {
        let alone = match self.write(machine, &mut batch).await {
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
        for request in alone {
            let mut one = vec![request];
            let outcomes = self.write(machine, &mut one).await;
            answer(one, outcomes.unwrap_or_else(|error| vec![Err(error)]));
        }
    }

    /// One PATCH for all changes whose callers still wait; one outcome for each of these, or one failure for all.
    async fn write(
        &self,
        machine: &str,
        batch: &mut Vec<Request>,
    ) -> Result<Vec<Result<Committed, CommitError>>, CommitError> {
        let fail = |source| match source {
            ApiError::NotFound(_) => CommitError::NoMachine(machine.to_owned()),
            source => CommitError::Api { machine: machine.to_owned(), source },
        };
        let mut base = self.newest_of(machine);
        let mut is_live = false;
        let (mut conflicts, mut is_refused) = (0, false);
        loop {
            let vm = match base {
                Some(vm) => vm,
                None => {
                    is_live = true;
                    Arc::new(self.api.get(machine).await.map_err(|error| fail(error.into()))?)
                }
            };
            // Who left may have been answered elsewhere, and what was wished then may be wrong now.
            batch.retain(|request| !request.done.is_closed());
            keep_what_may_leave(&vm, batch).await;
            let changes: Vec<Change> = batch.iter().map(|request| request.change.clone()).collect();
            let plan = plan(machine, &vm, &changes);
            // The copy may be older than a PATCH whose answer was lost: that there is nothing to do is for the API
            // server to say.
            if plan.operations.is_empty() && !is_live && !batch.is_empty() {
                base = None;
                continue;
            }
            if plan.operations.is_empty() {
                return Ok(settle(plan, &self.keep(machine, vm)));
            }
            let patch = Patch::Json::<()>(json_patch::Patch(plan.operations.clone()));
            match self.api.patch(machine, &PatchParams::default(), &patch).await.map_err(ApiError::from) {
                Ok(vm) => return Ok(settle(plan, &self.keep(machine, Arc::new(vm)))),
                // The list was not as it was seen: read the truth and plan again.
                Err(ApiError::Conflict(_) | ApiError::Invalid(_)) if conflicts < MOST_CONFLICTS => {
                    conflicts += 1;
                    let longest = Duration::from_millis(5 << conflicts);
                    tokio::time::sleep(longest.mul_f64(fastrand::f64())).await;
                    let live = self.api.get(machine).await.map_err(|error| fail(error.into()))?;
                    // Refused although nothing was different: it is the change itself that is refused.
                    if live.metadata.resource_version == vm.metadata.resource_version {
                        (conflicts, is_refused) = (MOST_CONFLICTS, true);
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

    /// The newest that is known of a machine: a plan made from less would be refused.
    fn newest_of(&self, machine: &str) -> Option<Arc<VirtualMachine>> {
        let newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        let own = newest.get(machine).filter(|own| self.is_ahead(machine, own)).cloned();
        own.or_else(|| self.seen(machine))
    }

    /// Keeps an answer until the informer shows it too.
    fn keep(&self, machine: &str, vm: Arc<VirtualMachine>) -> Committed {
        let committed = committed(&vm);
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        newest.insert(machine.to_owned(), vm);
        newest.retain(|machine, own| self.is_ahead(machine, own));
        committed
    }

    /// Whether an own answer is newer than what the informer shows.
    fn is_ahead(&self, machine: &str, own: &VirtualMachine) -> bool {
        let seen = self.seen(machine);
        seen.is_some_and(|seen| seen.metadata.uid == own.metadata.uid && is_newer(own, Some(&*seen)))
    }

    fn seen(&self, machine: &str) -> Option<Arc<VirtualMachine>> {
        self.machines.get(&Key::new(self.namespace.clone(), machine))
    }
}

/// Answers the removals of entries that must stay, and forgets them. `vm` was seen before.
async fn keep_what_may_leave(vm: &VirtualMachine, batch: &mut Vec<Request>) {
    let is_there = |name: &String| vm.spec.volumes.iter().any(|entry| &entry.name == name);
    let ask = |request: &Request| match (&request.change, &request.may_leave) {
        (Change::Remove { name }, Some(may_leave)) if is_there(name) => Some(may_leave()),
        _ => None,
    };
    let asking = batch.iter().map(|request| {
        let answer = ask(request);
        async move {
            let unknown =
                || Wanted::Unknown("the guest did not say in time whether it wants the disk".to_owned());
            match answer {
                Some(answer) => tokio::time::timeout(ASKED, answer).await.unwrap_or_else(|_| Err(unknown())),
                None => Ok(()),
            }
        }
    });
    let answers = join_all(asking).await;
    let all = std::mem::take(batch);
    for (request, answered) in all.into_iter().zip(answers) {
        match answered {
            Ok(()) => batch.push(request),
            Err(wanted) => answer(vec![request], vec![Err(wanted.into())]),
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
fn settle(plan: Plan, committed: &Committed) -> Vec<Result<Committed, CommitError>> {
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

    /// An API server of one machine, which carries out JSON Patches. The informer beside it never shows what they did.
    struct Server {
        machine: Mutex<Value>,
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
            let mut machine = self.machine.lock().unwrap();
            let (code, answer) = match json_patch::patch(&mut machine, &patch) {
                Ok(()) => {
                    let generation = machine["metadata"]["generation"].as_i64().unwrap() + 1;
                    machine["metadata"]["generation"] = json!(generation);
                    machine["metadata"]["resourceVersion"] = json!(generation.to_string());
                    (200, machine.to_string())
                }
                Err(error) => {
                    self.refused.fetch_add(1, Ordering::SeqCst);
                    (422, json!({"status": "Failure", "code": 422, "message": error.to_string()}).to_string())
                }
            };
            Response::builder().status(code).body(Body::from(answer.into_bytes())).unwrap()
        }

        fn entries(&self) -> usize {
            self.machine.lock().unwrap()["spec"]["volumes"].as_array().map_or(0, Vec::len)
        }
    }

    /// A server of a machine with these entries, and a committer that writes to it.
    fn serve(entries: &Value) -> (Arc<Server>, Committer) {
        let machine = json!({
            "apiVersion": "vmoperator.vmware.com/v1alpha5", "kind": "VirtualMachine",
            "metadata": {"name": "vm", "namespace": "n", "uid": "u", "generation": 1, "resourceVersion": "1"},
            "spec": {"volumes": entries},
        });
        let seen: VirtualMachine = serde_json::from_value(machine.clone()).unwrap();
        let (patches, refused) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let server = Arc::new(Server { machine: Mutex::new(machine), patches, refused });
        let answering = server.clone();
        let service = tower::service_fn(move |request: HttpRequest<Body>| {
            let server = answering.clone();
            async move { Ok::<_, Infallible>(server.answer(request).await) }
        });
        let resource = crds::virtual_machine_resource("v1alpha5");
        let api = Api::namespaced_with(Client::new(service, "n"), "n", &resource);
        (server, Committer::new(api, Informer::fixed([seen]), "n"))
    }

    /// Thirty operations, some milliseconds apart, each of which lasts a while after its change.
    async fn thirty(committer: &Committer, apart: Duration, change: impl Fn(String) -> Change) {
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
        let asked = Arc::new(AtomicUsize::new(0));
        let answering = |answer: Option<Result<(), Wanted>>| -> MayLeave {
            let asked = asked.clone();
            Arc::new(move || {
                asked.fetch_add(1, Ordering::SeqCst);
                match answer.clone() {
                    Some(answer) => Box::pin(async move { answer }),
                    None => Box::pin(std::future::pending()),
                }
            })
        };
        let operation = committer.begin("vm");
        let wanted = Wanted::By("csi-1".to_owned());
        let (kept, gone, unknown) = tokio::join!(
            committer.remove(&operation, "kept", answering(Some(Err(wanted.clone())))),
            committer.remove(&operation, "gone", answering(Some(Ok(())))),
            committer.remove(&operation, "unknown", answering(None)),
        );
        assert!(matches!(kept, Err(CommitError::Wanted(why)) if why == wanted));
        assert!(matches!(unknown, Err(CommitError::Wanted(Wanted::Unknown(_)))));
        assert!(gone.is_ok());
        assert_eq!((asked.load(Ordering::SeqCst), server.entries()), (3, 2));
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
            thirty(&committer, apart, add).await;
            assert_eq!(server.entries(), 30);
            let patches = server.patches.swap(0, Ordering::SeqCst);
            assert!(patches <= 5, "{patches} to attach, {apart:?} apart");
            thirty(&committer, apart, |name| Change::Remove { name }).await;
            assert_eq!(server.entries(), 0);
            let patches = server.patches.swap(0, Ordering::SeqCst);
            assert!(patches <= 5, "{patches} to detach, {apart:?} apart");
        }
        assert_eq!(server.refused.load(Ordering::SeqCst), 0);
    }
}
