//! Capacity publisher: writes the free capacity per StorageClass and zone as `CSIStorageCapacity` objects, which guests
//! read. csi-provisioner cannot publish it, because the management cluster has no node plugin that reports zones.

mod compute;
mod publish;

use std::sync::Arc;
use std::time::Duration;

use crds::names::MANAGEMENT_DRIVER;
use infra_api::EventKind;
use k8s_openapi::api::storage::v1::{CSIStorageCapacity, StorageClass};
use kube::runtime::watcher;
use kube::{Api, Client};
use kube_kit::health::Health;
use kube_kit::informer::{Change, Informer};
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::changes::{Changes, RETRY_DELAY};
use crate::infra::{InfraEvent, StorageInfra};
use publish::Publisher;

/// Delay of changes by less than a hundredth: each write goes to all guests.
const SMALL_CHANGE_DELAY: Duration = Duration::from_secs(30);
/// Timeout of one call to the storage infra.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The publisher, not started yet.
#[derive(Debug, Default)]
pub struct Capacity {
    changed: Arc<Notify>,
}

/// The publisher, with its watches started.
pub struct Publishing {
    changes: Changes,
    classes: Informer<StorageClass>,
    publisher: Publisher,
    infra: Arc<dyn StorageInfra>,
}

impl std::fmt::Debug for Publishing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Publishing").finish_non_exhaustive()
    }
}

impl Capacity {
    /// Handler for storage infra events.
    pub fn on_infra_event(&self) -> impl Fn(InfraEvent<'_>) + Send + Sync + use<> {
        let notify = self.changed.clone();
        move |event| {
            let is_relevant = match event {
                InfraEvent::Resync => true,
                InfraEvent::Object(event) => {
                    matches!(event.kind, EventKind::Pool | EventKind::Volume | EventKind::Snapshot)
                }
            };
            if is_relevant {
                notify.notify_one();
            }
        }
    }

    /// Starts the watches, which run until `stop`, and adds a check for each to `ready`. Publishes to `namespace`.
    pub fn start(
        self,
        client: Client,
        namespace: &str,
        infra: Arc<dyn StorageInfra>,
        ready: &Health,
        stop: CancellationToken,
    ) -> Publishing {
        let notify = self.changed.clone();
        let classes = Informer::builder("StorageClasses", Api::all(client.clone()))
            .trim(trim_class)
            .on_change(move |change: &Change<'_, StorageClass>| {
                let ours = |class: &&Arc<StorageClass>| class.provisioner == MANAGEMENT_DRIVER;
                let parameters = |class: &Arc<StorageClass>| class.parameters.clone();
                let (old, new) = (change.old.filter(ours), change.new.filter(ours));
                if old.map(parameters) != new.map(parameters) {
                    notify.notify_one();
                }
            })
            .start(ready.check("storage-classes", "not started yet"), stop.clone());
        let notify = self.changed.clone();
        let api = Api::<CSIStorageCapacity>::namespaced(client, namespace);
        let published =
            Informer::builder("CSIStorageCapacities", Api::namespaced(api.clone().into_client(), namespace))
                .config(watcher::Config::default().labels(&publish::selector()))
                .on_change(move |_: &Change<'_, CSIStorageCapacity>| notify.notify_one())
                .start(ready.check("storage-capacities", "not started yet"), stop.clone());
        let changes = Changes::new(self.changed, stop);
        Publishing { changes, classes, publisher: Publisher { api, published }, infra }
    }
}

impl Publishing {
    /// Publishes until the process is stopped.
    pub async fn run(&self) {
        let synced = async { tokio::join!(self.classes.synced(), self.publisher.published.synced()) };
        self.changes.begin(synced).await;
        // When the changes that were too small so far are published.
        let mut due: Option<Instant> = None;
        while self.changes.next(due).await {
            match self.publish(due.is_some_and(|due| due <= Instant::now())).await {
                Ok(true) => due = due.or_else(|| Some(Instant::now() + SMALL_CHANGE_DELAY)),
                Ok(false) => due = None,
                Err(reason) => {
                    tracing::warn!(
                        "failed to publish storage capacity: {reason}; retrying in {RETRY_DELAY:?}"
                    );
                    self.changes.retry().await;
                }
            }
        }
    }

    /// Publishes what changed, small changes only with `all`. True if there was one that was not published.
    async fn publish(&self, all: bool) -> Result<bool, String> {
        let pools = self.infra.list_pools(Instant::now() + TIMEOUT).await;
        let pools = pools.map_err(|error| error.to_string())?;
        self.publisher.publish(compute::desired(&self.classes.list(), &pools), all).await
    }
}

fn trim_class(class: &mut StorageClass) {
    class.metadata.annotations = None;
    class.metadata.labels = None;
    class.allowed_topologies = None;
    class.mount_options = None;
}
