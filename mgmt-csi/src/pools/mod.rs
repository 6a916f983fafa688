//! Shows the pools of the storage infra as StoragePools in the management cluster: one object for each pool, which nobody else
//! writes.

mod object;

use std::sync::Arc;
use std::time::Duration;

use crds::StoragePool;
use infra_api::{EventKind, Pool};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, PostParams};
use kube::{Api, Client, ResourceExt};
use kube_kit::client::chain;
use kube_kit::health::Health;
use kube_kit::informer::{Change, Informer};
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::changes::{Changes, RETRY_DELAY};
use crate::infra::{InfraEvent, StorageInfra};

/// Time between two looks at pools that report no change: VMs fill them without one.
const REFRESH_INTERVAL: Duration = Duration::from_secs(60);
/// Timeout of one call to the storage infra.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The writer, not started yet.
#[derive(Debug, Default)]
pub struct StoragePools {
    changed: Arc<Notify>,
}

/// The writer, with its watch started.
pub struct ShownPools {
    changes: Changes,
    objects: Informer<StoragePool>,
    api: Api<StoragePool>,
    infra: Arc<dyn StorageInfra>,
}

impl std::fmt::Debug for ShownPools {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ShownPools").finish_non_exhaustive()
    }
}

impl StoragePools {
    /// Handler for storage infra events.
    pub fn on_infra_event(&self) -> impl Fn(InfraEvent<'_>) + Send + Sync + use<> {
        let notify = self.changed.clone();
        move |event| match event {
            InfraEvent::Resync => notify.notify_one(),
            InfraEvent::Object(event) if matches!(event.kind, EventKind::Pool | EventKind::Volume) => {
                notify.notify_one();
            }
            InfraEvent::Object(_) => {}
        }
    }

    /// Starts the watch, which runs until `stop`, and adds its check to `ready`.
    pub fn start(
        self,
        client: Client,
        infra: Arc<dyn StorageInfra>,
        ready: &Health,
        stop: CancellationToken,
    ) -> ShownPools {
        let notify = self.changed.clone();
        let api = Api::<StoragePool>::all(client);
        let objects = Informer::builder("StoragePools", api.clone())
            .on_change(move |_: &Change<'_, StoragePool>| notify.notify_one())
            .start(ready.check("storage-pools", "not started yet"), stop.clone());
        ShownPools { changes: Changes::new(self.changed, stop), objects, api, infra }
    }
}

impl ShownPools {
    /// Writes until the process is stopped. Only the leader runs this.
    pub async fn run(&self) {
        self.changes.begin(self.objects.synced()).await;
        while self.changes.next(Some(Instant::now() + REFRESH_INTERVAL)).await {
            if let Err(reason) = self.reconcile().await {
                tracing::warn!("failed to write the StoragePools: {reason}; retrying in {RETRY_DELAY:?}");
                self.changes.retry().await;
            }
        }
    }

    /// Writes what differs. Continues after a failure, and returns the last one.
    async fn reconcile(&self) -> Result<(), String> {
        let pools =
            self.infra.list_pools(Instant::now() + TIMEOUT).await.map_err(|error| error.to_string())?;
        let objects = self.objects.list();
        let mut result = Ok(());
        for object in &objects {
            let name = object.name_any();
            if !pools.iter().any(|pool| pool.name.as_str() == name) {
                let removed = self.api.delete(&name, &DeleteParams::default()).await;
                record(&mut result, "delete", &name, removed.map(drop));
            }
        }
        for pool in &pools {
            let before = objects.iter().find(|object| object.name_any() == pool.name.as_str());
            let written = self.write(pool, before.map(AsRef::as_ref)).await;
            record(&mut result, "write", pool.name.as_str(), written);
        }
        result
    }

    async fn write(&self, pool: &Pool, before: Option<&StoragePool>) -> kube::Result<()> {
        let object = object::desired(pool, before, &Time(Timestamp::now()));
        match before {
            Some(same) if *same == object => Ok(()),
            Some(_) => self.api.replace(pool.name.as_str(), &PostParams::default(), &object).await.map(drop),
            None => self.api.create(&PostParams::default(), &object).await.map(drop),
        }
    }
}

/// Records a failure. Those that show a late watch do not count: its change starts another attempt.
fn record(result: &mut Result<(), String>, what: &str, name: &str, done: kube::Result<()>) {
    match done {
        Ok(()) => {}
        Err(kube::Error::Api(status))
            if status.is_already_exists() || status.is_not_found() || status.is_conflict() => {}
        Err(error) => *result = Err(format!("failed to {what} StoragePool {name}: {}", chain(&error))),
    }
}
