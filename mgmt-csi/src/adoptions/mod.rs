//! Adoption by an object: a PersistentVolume with the annotation `nestor.dev/adopt-file` makes that file of the storage infra's
//! host its volume.

mod decide;

use std::time::Duration;

use crds::names::ANNOTATION_ADOPTED_FILE;
use k8s_openapi::api::core::v1::{self, ObjectReference};
use kube::Api;
use kube::api::{Patch, PatchParams};
use kube_kit::client::chain;
use kube_kit::informer::{Change, Key};
use kube_kit::partial::PersistentVolume;
use kube_kit::queue::{NextAction, Queue, Retry};
use serde_json::json;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::clients::Clients;
use crate::cluster::{Cluster, Volumes};
use crate::event_reason::EventReason;
use crate::infra::{CreateError, Indeterminate};
use decide::{Wanted, size_differs, wanted};

/// Timeout of one call to the storage infra. A file that is copied takes longer: the next call waits for the same copy.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum number of files that are adopted at the same time: some of them are copied.
const CONCURRENT_ADOPTIONS: usize = 4;

/// Why an adoption must be retried.
#[derive(Debug, thiserror::Error)]
enum AdoptionError {
    #[error("the file did not become the volume: {0}")]
    Adopt(#[from] CreateError),
    #[error("failed to record the adopted file: {0}")]
    Record(String),
}

/// The reconciler of adoptions.
#[derive(Debug)]
pub struct Adoptions {
    volumes: Volumes,
    queue: Queue<Key>,
}

impl Adoptions {
    /// Reconciles the PersistentVolumes of this cluster.
    pub fn new(cluster: &Cluster) -> Self {
        Self { volumes: cluster.volumes(), queue: Queue::default() }
    }

    /// Looks at a PersistentVolume whenever it changes, as long as its file is not adopted.
    pub fn watch(&self, cluster: Cluster) -> Cluster {
        let queue = self.queue.clone();
        cluster.on_volume(move |change: &Change<'_, PersistentVolume>| {
            if change.new.is_some_and(|new| wanted(new).is_some()) {
                queue.push(change.key.clone());
            }
        })
    }

    /// Reconciles until `stop`. Only the leader runs this.
    pub(crate) async fn run(&self, clients: &Clients, stop: CancellationToken) {
        tokio::select! {
            () = stop.cancelled() => return,
            () = self.volumes.informer().synced() => {}
        }
        let worker = self.queue.worker("adoptions");
        for volume in self.volumes.informer().list() {
            if wanted(&volume).is_some() {
                self.queue.push(Key::of(&*volume));
            }
        }
        let adopt = |key: Key| async move { self.reconcile(clients, &key).await };
        worker.run(CONCURRENT_ADOPTIONS, Retry::default(), stop, adopt).await;
    }

    async fn reconcile(&self, clients: &Clients, key: &Key) -> Result<NextAction, AdoptionError> {
        let Some(volume) = self.volumes.informer().get(key) else { return Ok(NextAction::AwaitChange) };
        match wanted(&volume) {
            None => {}
            Some(Wanted::Refused(why)) => warn(clients, &volume, EventReason::AdoptionFailed, why),
            Some(Wanted::Adopt(id, adoption)) => {
                let deadline = Instant::now() + TIMEOUT;
                let adopted = clients.infra.adopt_volume(&id, &adoption, deadline).await;
                let adopted = adopted.inspect_err(|error| report(clients, &volume, error))?;
                record(clients, key, &adoption.path).await?;
                let text =
                    format!("file {} is volume {id} with {} bytes", adoption.path, adopted.capacity_bytes);
                tracing::info!(volume = %id, file = adoption.path, "adopted");
                clients.events.normal(reference(&volume), "Adopt", EventReason::VolumeAdopted.as_str(), text);
                if let Some(text) = size_differs(&volume, adopted.capacity_bytes) {
                    warn(clients, &volume, EventReason::AdoptedSizeDiffers, text);
                }
            }
        }
        Ok(NextAction::AwaitChange)
    }
}

/// Reports a failure, except that a copy takes long.
fn report(clients: &Clients, volume: &PersistentVolume, error: &CreateError) {
    if !matches!(error, CreateError::Indeterminate(Indeterminate::TimedOut(_))) {
        warn(clients, volume, EventReason::AdoptionFailed, error.to_string());
    }
}

fn warn(clients: &Clients, volume: &PersistentVolume, reason: EventReason, text: String) {
    clients.events.warning(reference(volume), "Adopt", reason.as_str(), text);
}

async fn record(clients: &Clients, key: &Key, path: &str) -> Result<(), AdoptionError> {
    let patch = Patch::Merge(json!({"metadata": {"annotations": {ANNOTATION_ADOPTED_FILE: path}}}));
    let api = Api::<v1::PersistentVolume>::all(clients.cluster.clone());
    match api.patch(&key.name, &PatchParams::default(), &patch).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
        Err(error) => Err(AdoptionError::Record(chain(&error))),
    }
}

fn reference(volume: &PersistentVolume) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("PersistentVolume".to_owned()),
        name: volume.metadata.name.clone(),
        uid: volume.metadata.uid.clone(),
        ..Default::default()
    }
}
