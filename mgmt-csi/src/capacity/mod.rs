//! Publishes what new volumes can have, per StorageClass and zone, as `CSIStorageCapacity` objects: guests read
//! them, since they can't ask the infra. csi-provisioner can't do it here, as there is no node plugin in the
//! management cluster to tell it of zones.

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

use crate::infra::{News, StorageInfra};
use publish::Publisher;

/// How long news are collected before they are acted on.
const COLLECT: Duration = Duration::from_secs(2);
/// How long after a failure it is tried again.
const AGAIN: Duration = Duration::from_secs(10);
/// How long the infra may take for one answer.
const ANSWER: Duration = Duration::from_secs(30);

/// The publisher, not started yet.
#[derive(Debug, Default)]
pub struct Capacity {
    news: Arc<Notify>,
}

/// The publisher, with its watches.
pub struct Publishing {
    news: Arc<Notify>,
    classes: Informer<StorageClass>,
    publisher: Publisher,
    infra: Arc<dyn StorageInfra>,
    stop: CancellationToken,
}

impl std::fmt::Debug for Publishing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Publishing").finish_non_exhaustive()
    }
}

impl Capacity {
    /// Takes the infra's news.
    pub fn news(&self) -> impl Fn(News<'_>) + Send + Sync + use<> {
        let notify = self.news.clone();
        move |news| {
            let counts = match news {
                News::Everything => true,
                News::One(event) => {
                    matches!(event.kind, EventKind::Pool | EventKind::Volume | EventKind::Snapshot)
                }
            };
            if counts {
                notify.notify_one();
            }
        }
    }

    /// Starts watching, until `stop`; what is published is in `namespace`. `ready` gets a check for each watch.
    pub fn start(
        self,
        client: Client,
        namespace: &str,
        infra: Arc<dyn StorageInfra>,
        ready: &Health,
        stop: CancellationToken,
    ) -> Publishing {
        let check = |what: &str| ready.check(format!("watch of {what}"), "not started yet");
        let notify = self.news.clone();
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
            .start(check("StorageClasses"), stop.clone());
        let notify = self.news.clone();
        let api = Api::<CSIStorageCapacity>::namespaced(client, namespace);
        let published =
            Informer::builder("CSIStorageCapacities", Api::namespaced(api.clone().into_client(), namespace))
                .config(watcher::Config::default().labels(&publish::selector()))
                .on_change(move |_: &Change<'_, CSIStorageCapacity>| notify.notify_one())
                .start(check("CSIStorageCapacities"), stop.clone());
        Publishing { news: self.news, classes, publisher: Publisher { api, published }, infra, stop }
    }
}

impl Publishing {
    /// Publishes until the process is stopped.
    pub async fn run(&self) {
        let Self { news, classes, publisher, infra, stop } = self;
        tokio::select! {
            () = stop.cancelled() => return,
            _ = async { tokio::join!(classes.synced(), publisher.published.synced()) } => {}
        }
        // What went before this was another replica's business.
        news.notify_one();
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = news.notified() => {}
            }
            // A burst of new volumes is one change of what is left.
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(COLLECT) => {}
            }
            let done = match infra.list_pools(Instant::now() + ANSWER).await {
                Ok(pools) => publisher.publish(compute::wanted(&classes.list(), &pools)).await,
                Err(error) => Err(error.to_string()),
            };
            if let Err(reason) = done {
                tracing::warn!("cannot publish storage capacity: {reason}; trying again in {AGAIN:?}");
                news.notify_one();
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = tokio::time::sleep(AGAIN) => {}
                }
            }
        }
    }
}

fn trim_class(class: &mut StorageClass) {
    class.metadata.annotations = None;
    class.metadata.labels = None;
    class.allowed_topologies = None;
    class.mount_options = None;
}
