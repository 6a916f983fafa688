//! Guest pods by the claims that they use.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::api::ListParams;
use kube::{Api, Client};
use kube_kit::client::chain;
use kube_kit::health::Check;
use kube_kit::index::Index;
use kube_kit::informer::{Informer, Key};
use kube_kit::partial::{Pod, PodVolume};
use tokio::sync::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::guest::reference;

/// Page size of lists.
const PAGE: u32 = 500;

/// How long a list of pods is reused: a failed pool affects many claims of a namespace at once.
const LISTED_FOR: Duration = Duration::from_secs(10);

/// Maximum number of pods per claim that get an event.
const MAX_REPORTED: usize = 16;

/// Informer of guest pods, trimmed to their claims.
#[derive(Debug, Clone)]
pub(super) struct Pods {
    informer: Informer<Pod>,
    by_claim: Arc<Index>,
}

impl Pods {
    /// Starts the informer; calls `changed` for each claim whose pods change.
    pub(super) fn start(
        client: &Client,
        check: Check,
        stop: &CancellationToken,
        changed: impl Fn(&Key) + Send + Sync + 'static,
    ) -> Self {
        let by_claim = Arc::new(Index::default());
        let index = by_claim.clone();
        let informer = Informer::builder("guest Pods", Api::all(client.clone()))
            .trim(trim)
            .on_change(move |change| {
                let [old, new] =
                    [change.old, change.new].map(|pod| pod.map_or(Vec::new(), |pod| claims(pod)));
                index.put(change.key, new.iter().cloned());
                let (left, joined) = (
                    old.iter().filter(|key| !new.contains(key)),
                    new.iter().filter(|key| !old.contains(key)),
                );
                for claim in left.chain(joined) {
                    changed(claim);
                }
            })
            .start(check, stop.clone());
        Self { informer, by_claim }
    }

    /// Waits for the first list.
    pub(super) async fn synced(&self) {
        self.informer.synced().await;
    }

    /// The pods that use a claim, in order.
    pub(super) fn pods_using(&self, claim: &Key) -> Vec<Key> {
        self.by_claim.members(claim)
    }
}

/// Lists the pods of a namespace to report an abnormal volume. There is no watch, because most volumes never need it.
pub(super) struct PodLister {
    client: Client,
    listed: Mutex<HashMap<String, Listed>>,
}

/// The pods of a namespace by claim, and the time of the list.
#[derive(Debug)]
struct Listed {
    at: Instant,
    by_claim: HashMap<Key, Vec<ObjectReference>>,
}

impl PodLister {
    pub(super) fn new(client: Client) -> Self {
        Self { client, listed: Mutex::default() }
    }

    /// The pods that use a claim, at most ten seconds old and at most [`MAX_REPORTED`].
    pub(super) async fn pods_using(&self, claim: &Key) -> Result<Vec<ObjectReference>, String> {
        let mut listed = self.listed.lock().await;
        listed.retain(|_, listed| listed.at.elapsed() < LISTED_FOR);
        if !listed.contains_key(&claim.namespace) {
            let by_claim = self.list(&claim.namespace).await?;
            listed.insert(claim.namespace.clone(), Listed { at: Instant::now(), by_claim });
        }
        let listed = listed.get(&claim.namespace);
        let pods_using = listed.and_then(|listed| listed.by_claim.get(claim)).map(Vec::as_slice);
        Ok(pods_using.unwrap_or_default().iter().take(MAX_REPORTED).cloned().collect())
    }

    async fn list(&self, namespace: &str) -> Result<HashMap<Key, Vec<ObjectReference>>, String> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let mut parameters = ListParams::default().limit(PAGE);
        let mut by_claim: HashMap<Key, Vec<ObjectReference>> = HashMap::new();
        loop {
            let page = api.list(&parameters).await.map_err(|error| {
                format!("failed to list the guest's Pods in namespace {namespace}: {}", chain(&error))
            })?;
            for pod in &page.items {
                for claim in claims(pod) {
                    by_claim.entry(claim).or_default().push(reference(pod));
                }
            }
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => parameters = parameters.continue_token(&token),
                None => return Ok(by_claim),
            }
        }
    }
}

/// The claims of a pod; none after the pod has terminated.
fn claims(pod: &Pod) -> Vec<Key> {
    if matches!(pod.phase.as_deref(), Some("Succeeded" | "Failed")) {
        return Vec::new();
    }
    let name = |volume: &PodVolume| match volume {
        PodVolume::Claim(name) => name.clone(),
        // The claim of a generic ephemeral volume is named after the pod and the volume.
        PodVolume::Ephemeral(volume) => {
            format!("{}-{volume}", pod.metadata.name.as_deref().unwrap_or_default())
        }
    };
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    pod.volumes.iter().map(|volume| Key::new(namespace, name(volume))).collect()
}

/// Keeps only the identity of the metadata.
fn trim(pod: &mut Pod) {
    pod.metadata.annotations = None;
    pod.metadata.labels = None;
    pod.metadata.finalizers = None;
    pod.metadata.owner_references = None;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(phase: &str) -> Pod {
        let mut pod: Pod = serde_json::from_value(serde_json::json!({
            "metadata": {"name": "web", "namespace": "shop", "labels": {"app": "web"}},
            "spec": {
                "containers": [{"name": "c", "image": "i"}],
                "volumes": [
                    {"name": "a", "persistentVolumeClaim": {"claimName": "data"}},
                    {"name": "scratch", "ephemeral": {}},
                    {"name": "b", "emptyDir": {}},
                ],
            },
            "status": {"phase": phase},
        }))
        .unwrap();
        trim(&mut pod);
        pod
    }

    #[test]
    fn only_pods_that_have_not_terminated_use_their_claims() {
        let running = pod("Running");
        assert_eq!(claims(&running), [Key::new("shop", "data"), Key::new("shop", "web-scratch")]);
        assert!(running.metadata.labels.is_none());
        for ended in ["Succeeded", "Failed"] {
            assert!(claims(&pod(ended)).is_empty(), "{ended}");
        }
    }
}
