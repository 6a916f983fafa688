//! Carries out the plan of one machine: the only place that writes.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crds::VolumeAttachment;
use futures::future::join_all;
use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolumeClaim};
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::ApiResource;
use kube::{Api, Client, ResourceExt};
use kube_kit::client::chain;
use kube_kit::events::{Events, listed};
use kube_kit::fair::Gate;
use kube_kit::informer::{Informer, Key};
use kube_kit::latest::Latest;
use kube_kit::lean::Metadata;
use kube_kit::queue::Next;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};

use crate::absent::{Absent, Missing};
use crate::allowance::{Allowance, YOUNG};
use crate::attachments::Attachments;
use crate::machine::{self, Machine};
use crate::plan::{MOST_ENTRIES, Obstacle, Plan, must_be_confirmed, plan};

/// How long an answer waits for those that are still to come, so that many are told in few writes. By the time of the
/// first write, whoever ordered them together has put all of them into the spec, and is not in its way.
const GATHER: Duration = Duration::from_millis(50);

/// How long the new name of a disk that is leaving waits: mostly it is gone by then, which is told anyway.
const LEAVING: Duration = Duration::from_secs(1);

/// After which time a machine is looked at again about which somebody else's write was not seen yet. Mostly it is by then.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Why a pass over a machine must be repeated.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unfinished {
    /// Some attachments could not be created or deleted.
    #[error("{}", .0.join("; "))]
    Attachments(Vec<String>),
    /// The machine could not be read.
    #[error("cannot read the machine: {0}")]
    Read(String),
    /// The status could not be written.
    #[error("cannot write status.volumes: {0}")]
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

    fn count(&self, operation: &'static str, ok: bool) {
        let labels = Labels { operation, outcome: if ok { "ok" } else { "error" } };
        self.0.get_or_create(&labels).inc();
    }
}

/// Since when each machine has something to be told that waits for more.
#[derive(Debug, Default)]
pub(crate) struct Gathering(Mutex<HashMap<Key, Instant>>);

impl Gathering {
    /// How long what is to be told must wait, if it must.
    fn left(&self, key: &Key, more_to_come: bool, wait: Duration) -> Option<Duration> {
        let mut since = self.since();
        if more_to_come {
            let begun = *since.entry(key.clone()).or_insert_with(Instant::now);
            let left = wait.checked_sub(begun.elapsed()).filter(|left| !left.is_zero());
            if left.is_some() {
                return left;
            }
        }
        since.remove(key);
        None
    }

    /// There is nothing to be told.
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
    pub(crate) machines: Arc<Latest<Machine>>,
    pub(crate) attachments: Arc<Attachments>,
    pub(crate) claims: Informer<Metadata<PersistentVolumeClaim>>,
    pub(crate) absent: Arc<Absent>,
    pub(crate) allowance: Allowance,
    /// Bounds the requests to the API server, and shares them out.
    pub(crate) requests: Gate,
    pub(crate) gathering: Gathering,
    pub(crate) metrics: Metrics,
    pub(crate) events: Events,
}

impl Reconciler {
    /// One pass over one machine.
    pub(crate) async fn reconcile(&self, key: &Key) -> Result<Next, Unfinished> {
        let Some(vm) = self.machines.get(key) else {
            // The garbage collector deletes what the machine owned.
            self.gathering.ended(key);
            self.absent.forget(key);
            return Ok(Next::Wait);
        };
        let (mut vm, mut missing) = (vm.clone(), self.missing(key, &vm));
        let mut orders = self.plan(key, &vm, &missing.obstacles);
        let is_confirmed = must_be_confirmed(&vm, &orders);
        if is_confirmed {
            let Some(now) = self.read(key).await? else { return Ok(Next::Wait) };
            vm = Arc::new(now);
            missing = self.missing(key, &vm);
            orders = self.plan(key, &vm, &missing.obstacles);
        }
        self.report(&vm, &missing);
        let mut next = missing.look_within.map_or(Next::Wait, Next::After);
        if self.delay(key, &vm, &mut orders) {
            next = Next::After(self.allowance.wait());
        }
        let api = Api::<VolumeAttachment>::namespaced(self.client.clone(), &key.namespace);
        let creates = join_all(orders.create.iter().map(|order| self.create(key, &api, order)));
        let deletes = join_all(orders.delete.iter().map(|order| self.delete(key, &api, order)));
        let (created, deleted) = futures::join!(creates, deletes);

        let mut problems: Vec<String> = deleted.into_iter().filter_map(Result::err).collect();
        for (order, outcome) in orders.create.iter().zip(created) {
            match outcome {
                Ok(true) => {}
                Ok(false) => next = sooner(next, LOOK_AGAIN),
                Err(problem) => {
                    let text = format!("AttachmentRefused: {problem}");
                    missing.obstacles.insert(order.spec.volume_name.clone(), Obstacle::Refused(text));
                    problems.push(problem);
                }
            }
        }

        // The writes above changed what is to be told.
        let vm = if is_confirmed { vm } else { self.machines.get(key).unwrap_or(vm) };
        let Plan { status, under_way, only_renames, .. } = self.plan(key, &vm, &missing.obstacles);
        let wait = if only_renames { LEAVING } else { GATHER };
        match status {
            None => self.gathering.ended(key),
            // A pass that failed is repeated late, so it tells what it has.
            Some(volumes) => match self.gathering.left(key, under_way && problems.is_empty(), wait) {
                Some(left) => next = sooner(next, left),
                None => {
                    let written = self.write_status(key, &vm, &volumes).await?;
                    if !written {
                        next = sooner(next, LOOK_AGAIN);
                    }
                }
            },
        }
        if problems.is_empty() { Ok(next) } else { Err(Unfinished::Attachments(problems)) }
    }

    fn plan(&self, key: &Key, vm: &Machine, obstacles: &BTreeMap<String, Obstacle>) -> Plan {
        plan(vm, &self.resource.api_version, &self.attachments.of(key, vm), obstacles)
    }

    /// The claims that a machine names and that are not there.
    fn missing(&self, key: &Key, vm: &Machine) -> Missing {
        let exists = |claim: &str| self.claims.get(&Key::new(&*key.namespace, claim)).is_some();
        self.absent.of(key, vm, exists)
    }

    /// Takes out of a plan what the machine may not attach yet. Whether there was any.
    fn delay(&self, key: &Key, vm: &Machine, orders: &mut Plan) -> bool {
        let oldest = Timestamp::now() - YOUNG;
        let is_young = |order: &&VolumeAttachment| {
            order.metadata.creation_timestamp.as_ref().is_some_and(|at| at.0 > oldest)
        };
        self.allowance.taken_back(key, orders.delete.iter().filter(is_young).count());
        let wanted = orders.create.len();
        orders.create.truncate(self.allowance.take(key, wanted));
        let delayed = wanted - orders.create.len();
        if delayed > 0 {
            let rate = self.allowance.rate();
            let note = format!(
                "disks of this VirtualMachine are attached and taken back too fast: beyond {} at once, {} a second are \
                 attached; {delayed} wait",
                rate.burst, rate.per_second
            );
            self.events.warning_once(self.reference(vm), "Attach", "AttachDelayed", note);
            tracing::debug!(machine = %key, delayed, "attaching later");
        }
        delayed > 0
    }

    /// One event for all claims that are missing, and one for all entries that are too many.
    fn report(&self, vm: &Machine, missing: &Missing) {
        let claims = missing.claims();
        if !claims.is_empty() {
            let note = format!("{} claims not found: {}", claims.len(), listed(&claims, claims.len()));
            self.events.warning_once(self.reference(vm), "Attach", "ClaimNotFound", note);
        }
        let entries = vm.spec.volumes.len();
        if entries > MOST_ENTRIES {
            let note = format!(
                "spec.volumes has {entries} entries, and the disks of {MOST_ENTRIES} can be attached"
            );
            self.events.warning_once(self.reference(vm), "Attach", "TooManyVolumes", note);
        }
    }

    fn reference(&self, vm: &Machine) -> ObjectReference {
        ObjectReference {
            api_version: Some(self.resource.api_version.clone()),
            kind: Some(self.resource.kind.clone()),
            name: vm.metadata.name.clone(),
            namespace: vm.metadata.namespace.clone(),
            uid: vm.metadata.uid.clone(),
            ..Default::default()
        }
    }

    /// The machine as the API server has it now.
    async fn read(&self, key: &Key) -> Result<Option<Machine>, Unfinished> {
        let api = Api::<Machine>::namespaced_with(self.client.clone(), &key.namespace, &self.resource);
        let _permit = self.requests.enter(key).await;
        let mut found = api.get_opt(&key.name).await.map_err(|error| Unfinished::Read(chain(&error)))?;
        if let Some(vm) = &mut found {
            machine::trim(vm);
        }
        Ok(found)
    }

    /// False when one of this name is there already.
    async fn create(
        &self,
        key: &Key,
        api: &Api<VolumeAttachment>,
        order: &VolumeAttachment,
    ) -> Result<bool, String> {
        let name = order.name_any();
        let _permit = self.requests.enter(key).await;
        let outcome = api.create(&PostParams::default(), order).await;
        self.metrics.count("create", outcome.is_ok());
        match outcome {
            Ok(made) => {
                tracing::info!(
                    attachment = name,
                    claim = order.spec.volume_name,
                    node = order.spec.node_uuid,
                    "created"
                );
                self.attachments.created(made);
                Ok(true)
            }
            // The watch is behind; its next event says whose it is.
            Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(false),
            Err(error) => Err(format!("cannot create VolumeAttachment {name}: {}", chain(&error))),
        }
    }

    async fn delete(
        &self,
        key: &Key,
        api: &Api<VolumeAttachment>,
        order: &VolumeAttachment,
    ) -> Result<(), String> {
        let name = order.name_any();
        let _permit = self.requests.enter(key).await;
        // Never the next one of the same name.
        let preconditions = Preconditions { uid: order.uid(), resource_version: None };
        let outcome = api.delete(&name, &DeleteParams::default().preconditions(preconditions)).await;
        self.metrics.count("delete", outcome.is_ok());
        match outcome {
            Ok(left) => {
                tracing::info!(
                    attachment = name,
                    claim = order.spec.volume_name,
                    node = order.spec.node_uuid,
                    "deleted"
                );
                if let Some(left) = left.left() {
                    self.attachments.deleting(left);
                }
                Ok(())
            }
            Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => Ok(()),
            Err(error) => Err(format!("cannot delete VolumeAttachment {name}: {}", chain(&error))),
        }
    }

    /// Writes what is to be told, onto the machine as it was when that was decided: a write that comes late must not
    /// tell of a disk that has left since. False when the machine is another by now.
    async fn write_status(&self, key: &Key, vm: &Machine, volumes: &[Value]) -> Result<bool, Unfinished> {
        let api = Api::<Machine>::namespaced_with(self.client.clone(), &key.namespace, &self.resource);
        let seen = json!({"uid": vm.metadata.uid, "resourceVersion": vm.metadata.resource_version});
        let patch = Patch::Merge(json!({"metadata": seen, "status": {"volumes": volumes}}));
        let _permit = self.requests.enter(key).await;
        let outcome = api.patch_status(&key.name, &PatchParams::default(), &patch).await;
        self.metrics.count("status", outcome.is_ok());
        match outcome {
            Ok(mut vm) => {
                tracing::info!(machine = %key, volumes = volumes.len(), "told");
                machine::trim(&mut vm);
                self.machines.changed(vm);
                Ok(true)
            }
            Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => Ok(false),
            Err(error) => Err(Unfinished::Status(chain(&error))),
        }
    }
}

fn sooner(next: Next, than: Duration) -> Next {
    match next {
        Next::Wait => Next::After(than),
        Next::After(delay) => Next::After(delay.min(than)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_waits_only_while_there_is_more_to_come_and_not_for_long() {
        let (gathering, key) = (Gathering::default(), Key::new("guest", "vm"));
        assert_eq!(gathering.left(&key, false, GATHER), None);
        assert!(gathering.left(&key, true, GATHER).is_some());
        assert!(gathering.left(&key, true, GATHER).is_some());
        assert_eq!(gathering.left(&key, false, GATHER), None);
        gathering.since().insert(key.clone(), Instant::now().checked_sub(GATHER).unwrap());
        assert!(gathering.left(&key, true, LEAVING).is_some(), "a new name waits longer");
        assert_eq!(gathering.left(&key, true, GATHER), None);
        assert!(gathering.since().is_empty());
    }
}
