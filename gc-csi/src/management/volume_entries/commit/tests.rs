//! Tests of the group commit.

use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};

use http::{Method, Request as HttpRequest, Response};
use http_body_util::BodyExt;
use kube::client::Body;
use kube::{Api, Client};
use serde_json::{Value, json};

use super::*;

/// A fake API server of one VM that applies JSON Patches. The informer never shows the changes.
struct Server {
    vm: Mutex<Value>,
    patches: AtomicUsize,
    refused: AtomicUsize,
}

impl Server {
    async fn answer(&self, request: HttpRequest<Body>) -> Response<Body> {
        assert_eq!(request.method(), Method::PATCH, "no reads");
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

/// A fake API server of a VM with these entries, and a committer that writes to it.
fn serve(entries: &Value) -> (Arc<Server>, Committer) {
    let vm = json!({
        "apiVersion": "vmoperator.vmware.com/v1alpha5", "kind": "VirtualMachine",
        "metadata": {"name": "vm", "namespace": "n", "uid": "u", "generation": 1, "resourceVersion": "1"},
        "spec": {"volumes": entries},
    });
    let cached: Vm = serde_json::from_value(vm.clone()).unwrap();
    let (patches, refused) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let server = Arc::new(Server { vm: Mutex::new(vm), patches, refused });
    let answering = server.clone();
    let service = tower::service_fn(move |request: HttpRequest<Body>| {
        let server = answering.clone();
        async move { Ok::<_, Infallible>(server.answer(request).await) }
    });
    let resource = crds::virtual_machine_resource("v1alpha5");
    let api = Api::namespaced_with(Client::new(service, "n"), "n", &resource);
    (server, Committer::new(VirtualMachines::fixed("n", api, cached), None))
}

/// Runs thirty operations, started `apart`; each lasts for a while after its change.
async fn run_thirty(committer: &Committer, apart: Duration, change: impl Fn(String) -> EntryChange) {
    let mut operations = Vec::new();
    for number in 0..30 {
        let (committer, change) = (committer.clone(), change(format!("disk-{number}")));
        operations.push(tokio::spawn(async move {
            let operation = committer.begin(&VmName::new("vm"));
            committer.request(&operation, change, None, Default::default()).await.unwrap();
            tokio::time::sleep(Duration::from_millis(120)).await;
        }));
        tokio::time::sleep(apart).await;
    }
    for operation in operations {
        operation.await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn only_entries_that_the_guest_does_not_request_are_removed_from_a_batch() {
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
    let operation = committer.begin(&VmName::new("vm"));
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
async fn thirty_attaches_and_detaches_take_at_most_five_patches_each_without_conflicts() {
    let (server, committer) = serve(&json!([]));
    for apart in [1, 5, 10].map(Duration::from_millis) {
        let add = |name: String| EntryChange::Add {
            claim: name.clone(),
            name,
            read_only: false,
            multi_writer: false,
            serial: None,
        };
        run_thirty(&committer, apart, add).await;
        assert_eq!(server.entries(), 30);
        let patches = server.patches.swap(0, Ordering::SeqCst);
        assert!(patches <= 5, "{patches} to attach, {apart:?} apart");
        run_thirty(&committer, apart, |name| EntryChange::Remove { name }).await;
        assert_eq!(server.entries(), 0);
        let patches = server.patches.swap(0, Ordering::SeqCst);
        assert!(patches <= 5, "{patches} to detach, {apart:?} apart");
    }
    assert_eq!(server.refused.load(Ordering::SeqCst), 0);
}
