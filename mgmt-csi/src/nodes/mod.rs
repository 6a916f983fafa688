//! Nodes: keeps the nodes of the storage infra equal to the VirtualMachines, and the status of VirtualMachines equal to what
//! their hypervisors report, if no other program writes that. A VM waits until its status has its UUID; the storage infra finds
//! the hypervisor. A VM that is proven off is annotated with the time of the proof.
//!
//! The node of a deleted VirtualMachine is removed as soon as the storage infra has proven that its disks are free. Nodes that
//! an administrator registered for VMs without a VirtualMachine are left alone.
//!
//! Changes of VirtualMachines and events of the storage infra trigger checks of single nodes; everything is compared
//! periodically, and when the event stream is opened.

mod decide;
mod metrics;
mod proof;
mod status;
mod writes;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crds::VirtualMachine;
use infra_api::{Change as InfraChange, Event, EventKind, Node};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::core::ApiResource;
use kube_kit::index::Index;
use kube_kit::informer::{Change, Informer, Key};
use kube_kit::queue::{NextAction, Queue, Retry};
use prometheus_client::registry::Registry;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::event_reason::EventReason;
use crate::infra::{DeleteError, InfraEvent, ReadError, RegisterError};
use crate::virtual_machines;
use crate::volume_attachment::{Shared, is_attached};
use metrics::Metrics;
use status::StatusWriter;

/// Timeout of one call to the storage infra.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of concurrent checks. A hypervisor that hangs blocks some of them.
const CONCURRENT_CHECKS: usize = 16;
/// Interval between full comparisons, which only a lost event makes necessary.
const INTERVAL: Duration = Duration::from_secs(300);
/// Delay of a retry for a node that is kept. The end of an attachment triggers one at once.
const KEPT_DELAY: Duration = Duration::from_secs(30);
/// How long the disks of a deleted VM may take to be detached before it is reported.
const REPORT_AFTER: Duration = Duration::from_secs(30);

/// Flags of the registration.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct NodeArgs {
    /// Who writes biosUUID, zone and powerState of the status of VirtualMachines. With vm-operator-shim, mgmt-csi can do it.
    #[arg(long, value_enum, default_value_t = StatusWriter::VmOperator)]
    vm_status_writer: StatusWriter,
}

/// What to check.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Check {
    All,
    One(Uuid),
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all nodes of the storage infra"),
            Self::One(uuid) => write!(f, "node {uuid} of the storage infra"),
        }
    }
}

/// Why a check must be retried.
#[derive(Debug, thiserror::Error)]
enum CheckError {
    #[error("failed to compare it with the VirtualMachines: {0}")]
    Read(#[from] ReadError),
    #[error("failed to register it: {0}")]
    Register(#[from] RegisterError),
    #[error("failed to remove it, although its VirtualMachine was deleted: {0}")]
    Remove(#[from] DeleteError),
    #[error("failed to write {0} of VirtualMachine {1}: {2}")]
    Write(&'static str, Key, String),
}

/// The reconciler, not started yet.
#[derive(Debug)]
pub struct Nodes {
    writer: StatusWriter,
    metrics: Metrics,
    checks: Queue<Check>,
    /// VirtualMachines by UUID.
    by_uuid: Arc<Index>,
    /// Since when nodes are kept without a VirtualMachine.
    kept_since: Mutex<HashMap<Uuid, Instant>>,
}

/// What the reconciler uses.
pub(crate) struct Context {
    /// VirtualMachines.
    pub(crate) vms: Informer<VirtualMachine>,
    /// Their API.
    pub(crate) resource: ApiResource,
    /// Clients, VolumeAttachments and events.
    pub(crate) shared: Shared,
}

impl Nodes {
    /// Registers the metrics.
    pub fn new(registry: &mut Registry, options: NodeArgs) -> Self {
        Self {
            writer: options.vm_status_writer,
            metrics: Metrics::register(registry),
            checks: Queue::default(),
            by_uuid: Arc::default(),
            kept_since: Mutex::default(),
        }
    }

    /// Handler for changes of VirtualMachines.
    pub(crate) fn on_vm(&self) -> impl Fn(&Change<'_, VirtualMachine>) + Send + Sync + use<> {
        let (checks, by_uuid) = (self.checks.clone(), self.by_uuid.clone());
        move |change| {
            let uuid = |vm: Option<&Arc<VirtualMachine>>| vm.and_then(|vm| decide::uuid(vm));
            let (old, new) = (uuid(change.old), uuid(change.new));
            by_uuid.put(change.key, new.map(group));
            if change.old.map(|vm| decide::inputs(vm)) == change.new.map(|vm| decide::inputs(vm)) {
                return;
            }
            for uuid in old.filter(|old| new != Some(*old)).into_iter().chain(new) {
                checks.push(Check::One(uuid));
            }
            if let Some(text) = change.new.and_then(|vm| decide::invalid_uuid(vm)) {
                tracing::warn!(vm = %change.key, "the status of the VirtualMachine has an invalid UUID: {text:?}; it is not registered");
            }
        }
    }

    /// Handler for storage infra events.
    pub fn on_infra_event(&self) -> impl Fn(InfraEvent<'_>) + Send + Sync + use<> {
        let (checks, kept) = (self.checks.clone(), self.metrics.kept.clone());
        move |event| match event {
            InfraEvent::Resync => checks.push(Check::All),
            InfraEvent::Object(Event {
                kind: EventKind::Node,
                id,
                change: InfraChange::Updated | InfraChange::Deleted,
            }) => {
                if let Ok(uuid) = id.parse() {
                    checks.push(Check::One(uuid));
                }
            }
            InfraEvent::Object(Event {
                kind: EventKind::Attachment, change: InfraChange::Deleted, ..
            }) => kept.all().into_iter().for_each(|uuid| checks.push(Check::One(uuid))),
            InfraEvent::Object(_) => {}
        }
    }

    /// Runs until `stop`. The caches must be synced. Only the leader runs this.
    pub(crate) async fn run(&self, context: &Context, stop: CancellationToken) {
        tokio::select! {
            () = stop.cancelled() => return,
            () = context.vms.synced() => {}
        }
        self.metrics.unregistered.clear();
        self.metrics.kept.clear();
        self.kept_since().clear();
        let worker = self.checks.worker("nodes");
        self.checks.push(Check::All);
        let work = |check| async move {
            match check {
                Check::All => self.check_all(context).await,
                Check::One(uuid) => self.check(context, uuid).await,
            }
        };
        worker.run(CONCURRENT_CHECKS, Retry::default(), stop, work).await;
    }

    /// Compares all nodes with all VMs.
    async fn check_all(&self, context: &Context) -> Result<NextAction, CheckError> {
        let listed = context.shared.clients.infra.list_nodes(Instant::now() + TIMEOUT).await?;
        let mut nodes: HashMap<Uuid, Node> = listed.into_iter().map(|node| (node.uuid, node)).collect();
        for vm in context.vms.list() {
            let Some(uuid) = decide::uuid(&vm) else { continue };
            if nodes.remove(&uuid).is_none_or(|node| decide::needs_check(&vm, &node, self.writer)) {
                self.checks.push(Check::One(uuid));
            }
        }
        for node in nodes.values().filter(|node| decide::is_own(node)) {
            self.checks.push(Check::One(node.uuid));
        }
        Ok(NextAction::RequeueAfter(INTERVAL))
    }

    async fn check(&self, context: &Context, uuid: Uuid) -> Result<NextAction, CheckError> {
        let vms = self.by_uuid.members(&group(uuid));
        let vms = vms.iter().filter_map(|key| context.vms.get(key)).collect();
        let Some((vm, others)) = decide::owner(vms) else {
            return self.remove(context, uuid).await;
        };
        self.kept_since().remove(&uuid);
        self.metrics.kept.remove(uuid);
        for other in others {
            report_duplicate(context, uuid, &vm, &other);
        }
        self.register(context, uuid, &vm).await
    }

    async fn register(
        &self,
        context: &Context,
        uuid: Uuid,
        vm: &VirtualMachine,
    ) -> Result<NextAction, CheckError> {
        let infra = &context.shared.clients.infra;
        let spec = decide::node(vm, self.writer);
        let registered = infra.register_node(uuid, &spec, Instant::now() + TIMEOUT).await;
        let node = match registered {
            Ok(node) => node,
            Err(error) => {
                self.report_unregistered(context, uuid, vm, &error).await?;
                return Err(error.into());
            }
        };
        if self.metrics.unregistered.remove(uuid) {
            requeue_unattached(&context.shared, uuid);
        }
        writes::status(context, vm, &node, self.writer).await?;
        writes::proof(context, vm, node.proven_off).await?;
        let next = proof::next_check(&node, has_disks(&context.shared, uuid));
        Ok(next.map_or(NextAction::AwaitChange, NextAction::RequeueAfter))
    }

    /// Reports a VM that could not be registered, unless it is registered already.
    async fn report_unregistered(
        &self,
        context: &Context,
        uuid: Uuid,
        vm: &VirtualMachine,
        error: &RegisterError,
    ) -> Result<(), CheckError> {
        let is_new = matches!(error, RegisterError::NotFound(_))
            || context.shared.clients.infra.get_node(uuid, Instant::now() + TIMEOUT).await?.is_none();
        if !is_new {
            return Ok(());
        }
        self.metrics.unregistered.insert(uuid);
        let why = error.message().guest();
        context.shared.clients.events.warning_once(
            virtual_machines::reference(vm),
            "Register",
            EventReason::NodeNotRegistered.as_str(),
            format!(
                "no disk can be attached, because the VM is not registered with the storage infra: {why}"
            ),
        );
        Ok(())
    }

    /// Removes the node of a deleted VM.
    async fn remove(&self, context: &Context, uuid: Uuid) -> Result<NextAction, CheckError> {
        let infra = &context.shared.clients.infra;
        self.metrics.unregistered.remove(uuid);
        let node = infra.get_node(uuid, Instant::now() + TIMEOUT).await?.filter(decide::is_own);
        let removed = match &node {
            Some(_) => infra.remove_node(uuid, Instant::now() + TIMEOUT).await,
            None => Ok(()),
        };
        match (removed, node) {
            (Err(error), Some(node)) => self.keep(context, &node, error),
            (_, node) => {
                if let Some(node) = node {
                    tracing::info!(node = %uuid, name = node.name, "removed the node of a deleted VirtualMachine");
                }
                self.metrics.kept.remove(uuid);
                self.kept_since().remove(&uuid);
                Ok(NextAction::AwaitChange)
            }
        }
    }

    /// Keeps a node whose disks are not known to be free, and reports it if that takes long.
    fn keep(&self, context: &Context, node: &Node, error: DeleteError) -> Result<NextAction, CheckError> {
        self.metrics.kept.insert(node.uuid);
        let since = *self.kept_since().entry(node.uuid).or_insert_with(Instant::now);
        if since.elapsed() < REPORT_AFTER {
            return Ok(NextAction::RequeueAfter(REPORT_AFTER));
        }
        let note = format!(
            "this VM was deleted, but stays registered as node {}: its disks are not known to be free",
            node.uuid
        );
        warn(context, deleted(node), EventReason::NodeKept, &note);
        match error {
            DeleteError::InUse(why) => {
                tracing::warn!(node = %node.uuid, name = node.name, "kept the node of a deleted VirtualMachine: {why}");
                Ok(NextAction::RequeueAfter(KEPT_DELAY))
            }
            error @ DeleteError::Indeterminate(_) => Err(error.into()),
        }
    }

    fn kept_since(&self) -> MutexGuard<'_, HashMap<Uuid, Instant>> {
        self.kept_since.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Group of VMs with this UUID in the index.
fn group(uuid: Uuid) -> Key {
    Key::cluster(uuid.to_string())
}

/// Whether a VM has VolumeAttachments.
fn has_disks(shared: &Shared, uuid: Uuid) -> bool {
    let text = uuid.to_string();
    shared.attachments.objects.informer().find(|one| one.spec.node_uuid == text).is_some()
}

/// Retries the attaches that may have failed because the node was not registered.
fn requeue_unattached(shared: &Shared, uuid: Uuid) {
    let text = uuid.to_string();
    let waits = |one: &crds::VolumeAttachment| {
        one.spec.node_uuid == text && one.metadata.deletion_timestamp.is_none() && !is_attached(one)
    };
    for attachment in shared.attachments.objects.informer().list().iter().filter(|one| waits(one)) {
        shared.attachments.queue.push(Key::of(&**attachment));
    }
}

/// Reports a VM with the UUID of an older one, which may be another guest's.
fn report_duplicate(context: &Context, uuid: Uuid, older: &VirtualMachine, vm: &VirtualMachine) {
    tracing::warn!(vm = %Key::of(vm), older = %Key::of(older), "two VirtualMachines have the UUID {uuid}");
    let note = format!(
        "an older VirtualMachine has the same UUID {uuid} in its status and is registered instead: correct the status; the log \
         of mgmt-csi names it"
    );
    warn(context, virtual_machines::reference(vm), EventReason::DuplicateUuid, &note);
}

/// Logs a warning, and emits it as event.
fn warn(context: &Context, about: ObjectReference, reason: EventReason, note: &str) {
    let (namespace, name) = (about.namespace.as_deref(), about.name.as_deref());
    tracing::warn!(namespace, vm = name, reason = reason.as_str(), "{note}");
    context.shared.clients.events.warning_once(about, "Register", reason.as_str(), note.to_owned());
}

/// Object reference to the deleted VirtualMachine of a node.
fn deleted(node: &Node) -> ObjectReference {
    let label = |key: &str| node.labels.get(key).cloned();
    virtual_machines::reference_to(
        label(decide::LABEL_NAMESPACE),
        Some(node.name.clone()),
        label(decide::LABEL_UID),
    )
}
