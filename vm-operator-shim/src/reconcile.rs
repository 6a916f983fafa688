//! Carries out the plan of one machine: the only place that writes.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crds::VolumeAttachment;
use futures::future::join_all;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::ApiResource;
use kube::{Api, Client, ResourceExt};
use kube_kit::client::chain;
use kube_kit::informer::Key;
use kube_kit::latest::{BELIEVED, Latest};
use kube_kit::queue::Next;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};

use crate::attachments::Attachments;
use crate::machine::{self, Machine};
use crate::plan::plan;

/// The least time between two status writes for one machine: many answers that come close together are told
/// in few writes, and the first of them at once.
const STATUS_INTERVAL: Duration = Duration::from_millis(50);

/// Why a pass over a machine must be repeated.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unfinished {
    /// Some attachments could not be created or deleted.
    #[error("{}", .0.join("; "))]
    Attachments(Vec<String>),
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

pub(crate) struct Reconciler {
    pub(crate) client: Client,
    pub(crate) resource: ApiResource,
    pub(crate) machines: std::sync::Arc<Latest<Machine>>,
    pub(crate) attachments: std::sync::Arc<Attachments>,
    pub(crate) status_written: Mutex<HashMap<Key, Instant>>,
    pub(crate) metrics: Metrics,
}

impl Reconciler {
    /// One pass over one machine.
    pub(crate) async fn reconcile(&self, key: &Key) -> Result<Next, Unfinished> {
        let Some(vm) = self.machines.get(key) else {
            // The garbage collector deletes what the machine owned.
            self.status_written_at().remove(key);
            return Ok(Next::Wait);
        };
        let orders = plan(&vm, &self.resource.api_version, &self.attachments.of(key, &vm), &BTreeMap::new());
        let wrote = !orders.create.is_empty() || !orders.delete.is_empty();
        let api = Api::<VolumeAttachment>::namespaced(self.client.clone(), &key.namespace);
        let creates = join_all(orders.create.iter().map(|order| self.create(&api, order)));
        let deletes = join_all(orders.delete.iter().map(|order| self.delete(&api, order)));
        let (created, deleted) = futures::join!(creates, deletes);

        let mut problems: Vec<String> = deleted.into_iter().filter_map(Result::err).collect();
        let mut refused = BTreeMap::new();
        for (order, outcome) in orders.create.iter().zip(created) {
            if let Err(problem) = outcome {
                refused.insert(order.spec.volume_name.clone(), format!("AttachmentRefused: {problem}"));
                problems.push(problem);
            }
        }

        // The writes above changed what is to be told.
        let vm = self.machines.get(key).unwrap_or(vm);
        let told = plan(&vm, &self.resource.api_version, &self.attachments.of(key, &vm), &refused).status;
        let mut next = if wrote { Next::After(BELIEVED) } else { Next::Wait };
        if let Some(volumes) = told {
            match self.time_to_next_status(key) {
                Some(left) => next = Next::After(left),
                None => {
                    self.write_status(key, &volumes).await?;
                    next = Next::After(BELIEVED);
                }
            }
        }
        if problems.is_empty() { Ok(next) } else { Err(Unfinished::Attachments(problems)) }
    }

    async fn create(&self, api: &Api<VolumeAttachment>, order: &VolumeAttachment) -> Result<(), String> {
        let name = order.name_any();
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
                Ok(())
            }
            // The watch is behind; its next event says whose it is.
            Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(()),
            Err(error) => Err(format!("cannot create VolumeAttachment {name}: {}", chain(&error))),
        }
    }

    async fn delete(&self, api: &Api<VolumeAttachment>, order: &VolumeAttachment) -> Result<(), String> {
        let name = order.name_any();
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

    async fn write_status(&self, key: &Key, volumes: &[Value]) -> Result<(), Unfinished> {
        let api = Api::<Machine>::namespaced_with(self.client.clone(), &key.namespace, &self.resource);
        let patch = Patch::Merge(json!({"status": {"volumes": volumes}}));
        self.status_written_at().insert(key.clone(), Instant::now());
        let outcome = api.patch_status(&key.name, &PatchParams::default(), &patch).await;
        self.metrics.count("status", outcome.is_ok());
        match outcome {
            Ok(mut vm) => {
                tracing::info!(machine = %key, volumes = volumes.len(), "told");
                vm.metadata.managed_fields = None;
                machine::trim(&mut vm);
                self.machines.changed(vm);
                Ok(())
            }
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
            Err(error) => Err(Unfinished::Status(chain(&error))),
        }
    }

    /// How long a status write must wait, if it must.
    fn time_to_next_status(&self, key: &Key) -> Option<Duration> {
        let last = *self.status_written_at().get(key)?;
        STATUS_INTERVAL.checked_sub(last.elapsed()).filter(|left| !left.is_zero())
    }

    fn status_written_at(&self) -> std::sync::MutexGuard<'_, HashMap<Key, Instant>> {
        self.status_written.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
