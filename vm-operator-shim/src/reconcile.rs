//! Reconciler of one VM: executes its plan. Nothing else in the shim writes objects.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crds::VolumeAttachment;
use crds::names::ClaimName;
use futures::future::join_all;
use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolumeClaim};
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::ApiResource;
use kube::{Api, Client, ResourceExt};
use kube_kit::client::chain;
use kube_kit::events::{Events, name_list};
use kube_kit::fair::FairLimiter;
use kube_kit::informer::{Informer, Key};
use kube_kit::mutation_cache::MutationCache;
use kube_kit::partial::Metadata;
use kube_kit::queue::NextAction;
use process_kit::trace;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tracing::Instrument;

use crate::attach_limiter::{AttachLimiter, RECENT};
use crate::attachments::Attachments;
use crate::missing_claims::{Missing, MissingClaims};
use crate::plan::{MAX_ENTRIES, Obstacle, Plan, Reason, needs_fresh_read, plan};
use crate::traces;
use crate::vm::Vm;

/// Delay during which status changes are batched while attaches or detaches are in progress. It also keeps the status write
/// from conflicting with a client that is still adding entries to the spec.
const BATCH_DELAY: Duration = Duration::from_millis(50);

/// Delay before the `:detaching` suffix is written. Usually the disk is detached by then, which saves this write.
const RENAME_DELAY: Duration = Duration::from_secs(1);

/// Delay during which all status changes of a VM that flaps are batched. Each of its status writes costs much: the API server
/// validates all entries.
const FLAPPING_DELAY: Duration = Duration::from_secs(3);

/// Delay before a retry after a conflict. Usually the cache shows the other write by then.
const CONFLICT_DELAY: Duration = Duration::from_secs(1);

/// Why a reconcile must be retried.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReconcileError {
    /// VolumeAttachments could not be created or deleted.
    #[error("{}", .0.join("; "))]
    Attachments(Vec<String>),
    /// The VM could not be read.
    #[error("failed to read the VirtualMachine: {0}")]
    Read(String),
    /// The status could not be written.
    #[error("failed to write status.volumes: {0}")]
    Status(String),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    operation: &'static str,
    outcome: &'static str,
}

/// Counts writes to the management cluster.
#[derive(Clone, Debug)]
pub(crate) struct Metrics(Family<Labels, Counter>);

impl Metrics {
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let writes = Family::<Labels, Counter>::default();
        registry.register(
            "writes",
            "Writes to the management cluster by operation and outcome",
            writes.clone(),
        );
        Self(writes)
    }

    pub(crate) fn count(&self, operation: &'static str, ok: bool) {
        let labels = Labels { operation, outcome: if ok { "ok" } else { "error" } };
        self.0.get_or_create(&labels).inc();
    }
}

/// Batching of status writes: since when each VM has an unwritten status change.
#[derive(Debug, Default)]
pub(crate) struct StatusDelay(Mutex<HashMap<Key, Instant>>);

impl StatusDelay {
    /// Remaining delay before the status is written; None if it is to be written now.
    fn remaining(&self, key: &Key, more_to_come: bool, wait: Duration) -> Option<Duration> {
        let mut since = self.since();
        if more_to_come {
            let first = *since.entry(key.clone()).or_insert_with(Instant::now);
            let left = wait.checked_sub(first.elapsed()).filter(|left| !left.is_zero());
            if left.is_some() {
                return left;
            }
        }
        since.remove(key);
        None
    }

    /// Records that the VM has no status change to write.
    fn ended(&self, key: &Key) {
        self.since().remove(key);
    }

    fn since(&self) -> MutexGuard<'_, HashMap<Key, Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(crate) struct Reconciler {
    pub(crate) client: Client,
    pub(crate) resource: ApiResource,
    pub(crate) vms: Arc<MutationCache<Vm>>,
    pub(crate) attachments: Arc<Attachments>,
    pub(crate) claims: Informer<Metadata<PersistentVolumeClaim>>,
    pub(crate) missing_claims: Arc<MissingClaims>,
    pub(crate) attach_limiter: AttachLimiter,
    /// Limits concurrent requests to the API server, fairly between VMs.
    pub(crate) requests: FairLimiter,
    pub(crate) status_delay: StatusDelay,
    pub(crate) metrics: Metrics,
    pub(crate) events: Events,
}

impl Reconciler {
    /// Reconciles one VM.
    pub(crate) async fn reconcile(&self, key: &Key) -> Result<NextAction, ReconcileError> {
        let Some(vm) = self.vms.get(key) else {
            // The garbage collector deletes the VolumeAttachments of the VM.
            self.status_delay.ended(key);
            self.missing_claims.forget(key);
            return Ok(NextAction::AwaitChange);
        };
        let (mut vm, mut missing) = (vm.clone(), self.missing(key, &vm));
        let mut plan = self.plan(key, &vm, &missing.obstacles);
        let is_confirmed = needs_fresh_read(&vm, &plan);
        if is_confirmed {
            let Some(now) = self.read(key).await? else { return Ok(NextAction::AwaitChange) };
            vm = Arc::new(now);
            missing = self.missing(key, &vm);
            plan = self.plan(key, &vm, &missing.obstacles);
        }
        self.report(&vm, &missing);
        let mut next = missing.recheck_after.map_or(NextAction::AwaitChange, NextAction::RequeueAfter);
        if let Some(wait) = self.limit_attaches(key, &vm, &mut plan, &mut missing.obstacles) {
            next = sooner(next, wait);
        }
        let api = Api::<VolumeAttachment>::namespaced(self.client.clone(), &key.namespace);
        let creates = join_all(plan.create.iter().map(|attachment| self.create(key, &api, attachment)));
        let deletes = join_all(plan.delete.iter().map(|attachment| {
            let span = traces::deletion(&vm, attachment);
            self.delete(key, &api, attachment).instrument(span)
        }));
        let (created, deleted) = futures::join!(creates, deletes);

        let mut problems: Vec<String> = deleted.into_iter().filter_map(Result::err).collect();
        for (attachment, outcome) in plan.create.iter().zip(created) {
            match outcome {
                Ok(true) => {}
                Ok(false) => next = sooner(next, CONFLICT_DELAY),
                Err(problem) => {
                    let obstacle = Obstacle::Refused(problem.clone());
                    missing.obstacles.insert(attachment.spec.volume_name.clone(), obstacle);
                    problems.push(problem);
                }
            }
        }

        // Plan again: the writes above may have changed the status.
        let vm = if is_confirmed { vm } else { self.vms.get(key).unwrap_or(vm) };
        let Plan { status, in_progress, only_renames, .. } = self.plan(key, &vm, &missing.obstacles);
        let is_flapping = self.attach_limiter.is_flapping(key);
        let wait = match (is_flapping, only_renames) {
            (true, _) => FLAPPING_DELAY,
            (false, true) => RENAME_DELAY,
            (false, false) => BATCH_DELAY,
        };
        match status {
            None => self.status_delay.ended(key),
            Some(volumes) => {
                // After a failure the next reconcile is in backoff, so the status is written now.
                let may_wait = (in_progress || is_flapping) && problems.is_empty();
                match self.status_delay.remaining(key, may_wait, wait) {
                    Some(left) => next = sooner(next, left),
                    None => {
                        let written = self.write_status(key, &vm, &volumes).await?;
                        if !written {
                            next = sooner(next, CONFLICT_DELAY);
                        }
                    }
                }
            }
        }
        if problems.is_empty() { Ok(next) } else { Err(ReconcileError::Attachments(problems)) }
    }

    fn plan(&self, key: &Key, vm: &Vm, obstacles: &BTreeMap<ClaimName, Obstacle>) -> Plan {
        plan(vm, &self.resource.api_version, &self.attachments.of(key, vm), obstacles)
    }

    /// The claims that a VM names and that do not exist.
    fn missing(&self, key: &Key, vm: &Vm) -> Missing {
        let exists =
            |claim: &ClaimName| self.claims.get(&Key::new(&*key.namespace, claim.as_str())).is_some();
        self.missing_claims.of(key, vm, exists)
    }

    /// Removes from a plan the attaches that exceed the rate limit, and returns when to continue with them. If the VM flaps,
    /// each entry reports it, so that the guest's user learns why the disk is not attached.
    fn limit_attaches(
        &self,
        key: &Key,
        vm: &Vm,
        plan: &mut Plan,
        obstacles: &mut BTreeMap<ClaimName, Obstacle>,
    ) -> Option<Duration> {
        let oldest = Timestamp::now() - RECENT;
        let is_recent = |attachment: &&VolumeAttachment| {
            attachment.metadata.creation_timestamp.as_ref().is_some_and(|at| at.0 > oldest)
        };
        self.attach_limiter.count_removals(key, plan.delete.iter().filter(is_recent).count());
        let grant = self.attach_limiter.acquire(key, plan.create.len());
        let delayed = plan.create.split_off(grant.disks);
        if delayed.is_empty() {
            return None;
        }
        let (cause, last_at) = (grant.cause(), grant.last_at.strftime("%FT%TZ"));
        let note = format!("{cause}; {} disks wait, the last until about {last_at}", delayed.len());
        tracing::debug!(vm = %key, "attaches delayed: {note}");
        self.events.warning_once(self.reference(vm), "Attach", Reason::AttachDelayed.as_str(), note);
        if grant.is_flapping {
            let text = format!("{cause}; the disk is attached in its turn, at about {last_at} at the latest");
            let delayed = delayed.into_iter().map(|attachment| attachment.spec.volume_name);
            obstacles.extend(delayed.map(|claim| (claim, Obstacle::Delayed(text.clone()))));
        }
        Some(grant.wait())
    }

    /// Emits one event for all missing claims, and one for the entries beyond the limit.
    fn report(&self, vm: &Vm, missing: &Missing) {
        let claims: Vec<&str> = missing.claims().into_iter().map(ClaimName::as_str).collect();
        if !claims.is_empty() {
            let note = format!("{} claims not found: {}", claims.len(), name_list(&claims, claims.len()));
            self.events.warning_once(self.reference(vm), "Attach", Reason::ClaimNotFound.as_str(), note);
        }
        let entries = vm.spec.volumes.len();
        if entries > MAX_ENTRIES {
            let note =
                format!("spec.volumes has {entries} entries, but at most {MAX_ENTRIES} can be attached");
            self.events.warning_once(self.reference(vm), "Attach", Reason::TooManyVolumes.as_str(), note);
        }
    }

    fn reference(&self, vm: &Vm) -> ObjectReference {
        ObjectReference {
            api_version: Some(self.resource.api_version.clone()),
            kind: Some(self.resource.kind.clone()),
            name: vm.metadata.name.clone(),
            namespace: vm.metadata.namespace.clone(),
            uid: vm.metadata.uid.clone(),
            ..Default::default()
        }
    }

    /// Reads the VM from the API server.
    async fn read(&self, key: &Key) -> Result<Option<Vm>, ReconcileError> {
        let api = Api::<Vm>::namespaced_with(self.client.clone(), &key.namespace, &self.resource);
        let _permit = self.requests.acquire(key).await;
        let mut found = api.get_opt(&key.name).await.map_err(|error| ReconcileError::Read(chain(&error)))?;
        if let Some(vm) = &mut found {
            crate::vm::trim(vm);
        }
        Ok(found)
    }

    /// Creates a VolumeAttachment, in the trace of its entry. False if one of this name exists.
    async fn create(
        &self,
        key: &Key,
        api: &Api<VolumeAttachment>,
        attachment: &VolumeAttachment,
    ) -> Result<bool, String> {
        let span = traces::creation(attachment);
        let attachment = traces::within(&span, attachment);
        let outcome = self.post(key, api, &attachment).instrument(span.clone()).await;
        if let Err(problem) = &outcome {
            trace::fail(&span, problem);
        }
        outcome
    }

    async fn post(
        &self,
        key: &Key,
        api: &Api<VolumeAttachment>,
        attachment: &VolumeAttachment,
    ) -> Result<bool, String> {
        let name = attachment.name_any();
        let _permit = self.requests.acquire(key).await;
        let outcome = api.create(&PostParams::default(), attachment).await;
        self.metrics.count("create", outcome.is_ok());
        match outcome {
            Ok(made) => {
                tracing::info!(
                    attachment = name,
                    claim = attachment.spec.volume_name.as_str(),
                    node = attachment.spec.node_uuid,
                    "created"
                );
                self.attachments.created(made);
                Ok(true)
            }
            // The cache lags; the next watch event shows the existing one.
            Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(false),
            Err(error) => Err(format!("failed to create VolumeAttachment {name}: {}", chain(&error))),
        }
    }

    async fn delete(
        &self,
        key: &Key,
        api: &Api<VolumeAttachment>,
        attachment: &VolumeAttachment,
    ) -> Result<(), String> {
        let name = attachment.name_any();
        let _permit = self.requests.acquire(key).await;
        // The precondition protects a successor of the same name.
        let preconditions = Preconditions { uid: attachment.uid(), resource_version: None };
        let outcome = api.delete(&name, &DeleteParams::default().preconditions(preconditions)).await;
        self.metrics.count("delete", outcome.is_ok());
        match outcome {
            Ok(left) => {
                tracing::info!(
                    attachment = name,
                    claim = attachment.spec.volume_name.as_str(),
                    node = attachment.spec.node_uuid,
                    "deleted"
                );
                if let Some(left) = left.left() {
                    self.attachments.deleting(left);
                }
                Ok(())
            }
            Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => Ok(()),
            Err(error) => Err(format!("failed to delete VolumeAttachment {name}: {}", chain(&error))),
        }
    }

    /// Writes the status with the `resourceVersion` on which it was planned: a late write must not report a disk that has been
    /// detached since. False on a conflict.
    async fn write_status(&self, key: &Key, vm: &Vm, volumes: &[Value]) -> Result<bool, ReconcileError> {
        let api = Api::<Vm>::namespaced_with(self.client.clone(), &key.namespace, &self.resource);
        let seen = json!({"uid": vm.metadata.uid, "resourceVersion": vm.metadata.resource_version});
        let patch = Patch::Merge(json!({"metadata": seen, "status": {"volumes": volumes}}));
        let _permit = self.requests.acquire(key).await;
        let outcome = api.patch_status(&key.name, &PatchParams::default(), &patch).await;
        self.metrics.count("status", outcome.is_ok());
        match outcome {
            Ok(mut vm) => {
                tracing::info!(vm = %key, volumes = volumes.len(), "wrote the status");
                crate::vm::trim(&mut vm);
                self.vms.changed(vm);
                Ok(true)
            }
            Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => Ok(false),
            Err(error) => Err(ReconcileError::Status(chain(&error))),
        }
    }
}

fn sooner(next: NextAction, than: Duration) -> NextAction {
    match next {
        NextAction::AwaitChange => NextAction::RequeueAfter(than),
        NextAction::RequeueAfter(delay) => NextAction::RequeueAfter(delay.min(than)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_change_waits_only_while_more_is_in_progress_and_not_for_long() {
        let (status_delay, key) = (StatusDelay::default(), Key::new("guest", "vm"));
        assert_eq!(status_delay.remaining(&key, false, BATCH_DELAY), None);
        assert!(status_delay.remaining(&key, true, BATCH_DELAY).is_some());
        assert!(status_delay.remaining(&key, true, BATCH_DELAY).is_some());
        assert_eq!(status_delay.remaining(&key, false, BATCH_DELAY), None);
        status_delay.since().insert(key.clone(), Instant::now().checked_sub(BATCH_DELAY).unwrap());
        assert!(status_delay.remaining(&key, true, RENAME_DELAY).is_some(), "a rename waits longer");
        assert_eq!(status_delay.remaining(&key, true, BATCH_DELAY), None);
        assert!(status_delay.since().is_empty());
    }
}
