//! Tests of the reconciler against a fake storage infra.

use std::collections::HashSet;
use std::convert::Infallible;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use futures::future::join_all;
use futures::stream::BoxStream;
use http::{Request, Response};
use infra_api::{
    Account, Adoption, AttachmentSpec, Budget, BudgetSpec, Capacity, CapacityQuery, Event, List, Node,
    NodeSpec, Owner, Pool, Qos, Snapshot, SnapshotId, SnapshotSpec, Volume, VolumeId, VolumeSize, VolumeSpec,
};
use kube::client::Body;
use kube_kit::fair::Limits;
use prometheus_client::registry::Registry;
use tokio::sync::Barrier;
use tokio::time::{Instant as Deadline, timeout};

use super::super::limiter::PER_VM;
use super::*;
use crate::cluster::Cluster;
use crate::infra::{
    AttachedDisk, BudgetError, CreateError, DeleteError, ExpandError, LimitError, Message, ParsedId,
    RegisterError, SnapshotError, parse_attachment_id,
};
use crate::ownership::UnlabelledVms;

const NODE: &str = "7f9c1b2a-0d3e-4f5a-8b7c-1234567890ab";
const UID: &str = "6f9c1b2a-0d3e-4f5a-8b7c-1234567890ab";
const NEXT_UID: &str = "8f9c1b2a-0d3e-4f5a-8b7c-1234567890ab";
/// The attachment whose detach succeeds.
const LAST: &str = "last";

/// A terminating attachment, or the next one of its name.
fn attachment(name: &str, uid: &str, version: &str) -> VolumeAttachment {
    serde_json::from_value(json!({
        "metadata": {
            "name": name, "namespace": "guest", "uid": uid, "resourceVersion": version,
            "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": [FINALIZER_DETACH],
        },
        "spec": {"nodeUUID": NODE, "volumeName": name},
        "status": {"attached": true, "diskUUID": UID},
    }))
    .unwrap()
}

/// A storage infra in which all detaches but one fail, after the VolumeAttachment is gone.
struct Failing {
    attachments: Arc<MutationCache<VolumeAttachment>>,
    called: Mutex<HashSet<String>>,
    all_called: Barrier,
    succeeded: AtomicBool,
}

#[async_trait]
impl StorageInfra for Failing {
    async fn detach(&self, id: &AttachmentId, _: bool, _: Duration) -> Result<(), DetachError> {
        let Some(ParsedId::Name(key)) = parse_attachment_id(id) else {
            panic!("{id} is not derived from a VolumeAttachment")
        };
        if key.name == LAST {
            self.succeeded.store(true, Ordering::SeqCst);
            return Ok(());
        }
        if self.called.lock().unwrap().insert(key.name.clone()) {
            self.all_called.wait().await;
            self.attachments.changed(attachment(&key.name, NEXT_UID, "2"));
        }
        Err(DetachError(Indeterminate::Failed(Message::own("busy"))))
    }

    async fn create_volume(&self, _: &VolumeId, _: &VolumeSpec, _: Deadline) -> Result<Volume, CreateError> {
        unreachable!()
    }

    async fn adopt_volume(&self, _: &VolumeId, _: &Adoption, _: Deadline) -> Result<Volume, CreateError> {
        unreachable!()
    }

    async fn delete_volume(&self, _: &VolumeId, _: Deadline) -> Result<(), DeleteError> {
        unreachable!()
    }

    async fn get_volume(&self, _: &VolumeId, _: Deadline) -> Result<Option<Volume>, ReadError> {
        unreachable!()
    }

    async fn list_volumes(
        &self,
        _: Option<u32>,
        _: Option<&str>,
        _: Deadline,
    ) -> Result<List<Volume>, ReadError> {
        unreachable!()
    }

    async fn expand_volume(&self, _: &VolumeId, _: &VolumeSize, _: Deadline) -> Result<Volume, ExpandError> {
        unreachable!()
    }

    async fn limit_volume(&self, _: &VolumeId, _: &Qos, _: Deadline) -> Result<Volume, LimitError> {
        unreachable!()
    }

    async fn set_owner(&self, _: &VolumeId, _: &Owner, _: Deadline) -> Result<(), LimitError> {
        unreachable!()
    }

    async fn list_budgets(&self, _: Deadline) -> Result<Vec<Budget>, ReadError> {
        unreachable!()
    }

    async fn set_budget(&self, _: &Account, _: &BudgetSpec, _: Deadline) -> Result<(), BudgetError> {
        unreachable!()
    }

    async fn delete_budget(&self, _: &Account, _: Deadline) -> Result<(), BudgetError> {
        unreachable!()
    }

    async fn create_snapshot(
        &self,
        _: &SnapshotId,
        _: &SnapshotSpec,
        _: Deadline,
    ) -> Result<Snapshot, SnapshotError> {
        unreachable!()
    }

    async fn delete_snapshot(&self, _: &SnapshotId, _: Deadline) -> Result<(), DeleteError> {
        unreachable!()
    }

    async fn get_snapshot(&self, _: &SnapshotId, _: Deadline) -> Result<Option<Snapshot>, ReadError> {
        unreachable!()
    }

    async fn list_snapshots(
        &self,
        _: Option<&VolumeId>,
        _: Option<u32>,
        _: Option<&str>,
        _: Deadline,
    ) -> Result<List<Snapshot>, ReadError> {
        unreachable!()
    }

    async fn list_pools(&self, _: Deadline) -> Result<Vec<Pool>, ReadError> {
        unreachable!()
    }

    async fn capacity(&self, _: &CapacityQuery, _: Deadline) -> Result<Capacity, ReadError> {
        unreachable!()
    }

    async fn attach(
        &self,
        _: &AttachmentId,
        _: &AttachmentSpec,
        _: Option<&AttachmentId>,
        _: Duration,
    ) -> Result<AttachedDisk, AttachError> {
        unreachable!()
    }

    async fn list_attachments(&self, _: Option<Uuid>, _: Deadline) -> Result<Vec<Attachment>, ReadError> {
        unreachable!()
    }

    async fn attachments_of(&self, _: &VolumeId, _: Deadline) -> Result<Vec<Attachment>, ReadError> {
        unreachable!()
    }

    async fn get_node(&self, _: Uuid, _: Deadline) -> Result<Option<Node>, ReadError> {
        unreachable!()
    }

    async fn list_nodes(&self, _: Deadline) -> Result<Vec<Node>, ReadError> {
        unreachable!()
    }

    async fn register_node(&self, _: Uuid, _: &NodeSpec, _: Deadline) -> Result<Node, RegisterError> {
        unreachable!()
    }

    async fn remove_node(&self, _: Uuid, _: Deadline) -> Result<(), DeleteError> {
        unreachable!()
    }

    async fn events(&self) -> Result<BoxStream<'static, Result<Event, Indeterminate>>, Indeterminate> {
        unreachable!()
    }

    async fn ping(&self) -> Result<(), Indeterminate> {
        unreachable!()
    }
}

/// An API server without objects.
fn empty() -> Client {
    let status =
        json!({"kind": "Status", "status": "Failure", "reason": "NotFound", "message": "", "code": 404});
    let service = tower::service_fn(move |_: Request<Body>| {
        let answer = Response::builder().status(404).body(Body::from(status.to_string().into_bytes()));
        async move { Ok::<_, Infallible>(answer.unwrap()) }
    });
    Client::new(service, "guest")
}

#[tokio::test(start_paused = true)]
async fn attachments_that_vanish_during_a_failing_detach_release_their_slots() {
    let mut names: Vec<String> = (0..PER_VM).map(|n| format!("attachment-{n}")).collect();
    names.push(LAST.to_owned());
    let attachments = names.iter().map(|name| attachment(name, UID, "1"));
    let attachments = Arc::new(MutationCache::new(Informer::fixed(attachments)));
    let infra = Arc::new(Failing {
        attachments: attachments.clone(),
        called: Mutex::default(),
        all_called: Barrier::new(PER_VM),
        succeeded: AtomicBool::new(false),
    });
    let client = empty();
    let cluster = Cluster::new(&client);
    let reconciler = Reconciler {
        events: Events::new(client.clone(), "mgmt-csi"),
        client,
        infra: infra.clone(),
        attachments,
        claims: cluster.claims(),
        volumes: cluster.volumes(),
        tracker: Arc::default(),
        limiter: VmLimiter::default(),
        requests: FairLimiter::new(Limits { total: PER_VM, namespace: PER_VM, object: PER_VM }),
        out_of_service: OutOfService::disabled(),
        guests: VmGuests::by_label(Informer::fixed([]), UnlabelledVms::Refuse),
        metrics: Metrics::register(&mut Registry::default()),
        stop: CancellationToken::new(),
    };
    let keys: Vec<Key> = names.iter().map(|name| Key::new("guest", name)).collect();
    let passes = join_all(keys.iter().map(|key| reconciler.reconcile(key)));
    for pass in timeout(2 * WAIT, passes).await.expect("deadlock on slots") {
        assert_eq!(pass.unwrap(), NextAction::AwaitChange);
    }
    assert!(infra.succeeded.load(Ordering::SeqCst));
}

#[test]
fn the_future_of_a_reconcile_is_small() {
    fn size<'a, F: Future>(_: impl Fn(&'a Reconciler, &'a Key) -> F) -> usize {
        size_of::<F>()
    }
    let size = size(Reconciler::reconcile);
    assert!(size <= 2048, "{size} bytes");
}
