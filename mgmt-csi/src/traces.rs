//! Traces that CSI calls continue, if the call names only a handle. The context is on the object that caused the call:
//!
//! - A deleted claim is gone before its volume is deleted. What the watch saw of it is kept until its PersistentVolume is gone.
//! - A VolumeSnapshot exists until its snapshot is deleted. It is read, because snapshots are not watched.
//!
//! Without an exporter of spans, nothing is kept or read. A failed read only ends a trace.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crds::names::{ANNOTATION_DELETION_TRACEPARENT, ANNOTATION_TRACEPARENT};
use infra_api::{Labels, SnapshotId};
use kube::api::{ApiResource, DynamicObject};
use kube::core::GroupVersionKind;
use kube::{Api, Client, ResourceExt};
use kube_kit::informer::Change;
use kube_kit::partial::{PersistentVolume, PersistentVolumeClaim};
use process_kit::trace::TraceParent;
use process_kit::{operation, trace};
use tokio::time::{Instant, timeout_at};

use crate::cluster::{self, Cluster, annotation};
use crate::infra::StorageInfra;

/// Labels of a snapshot in the storage infra: name and namespace of its VolumeSnapshot.
pub(crate) const LABEL_SNAPSHOT: &str = "snapshot";
pub(crate) const LABEL_NAMESPACE: &str = "namespace";

/// Maximum number of contexts of deleted claims. The oldest is dropped.
const MAX_KEPT: usize = 4096;

/// How long a call waits for a trace context.
const LONGEST_READ: Duration = Duration::from_secs(1);

/// Finds the traces of calls.
#[derive(Clone)]
pub struct Traces {
    client: Client,
    deletions: Arc<Mutex<DeletionContexts>>,
}

impl std::fmt::Debug for Traces {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Traces").finish_non_exhaustive()
    }
}

impl Traces {
    /// Reads snapshots with `client`.
    pub fn new(client: &Client) -> Self {
        Self { client: client.clone(), deletions: Arc::default() }
    }

    /// Keeps the contexts of claims that are being deleted.
    pub fn watch(&self, cluster: Cluster) -> Cluster {
        if !trace::is_exported() {
            return cluster;
        }
        let (claims, volumes) = (self.clone(), self.clone());
        cluster
            .on_claim(move |change: &Change<'_, PersistentVolumeClaim>| {
                claims.deletions().observe_claim(change);
            })
            .on_volume(move |change: &Change<'_, PersistentVolume>| {
                volumes.deletions().observe_volume(change);
            })
    }

    /// Continues the trace of the deletion of the claim of these PersistentVolumes.
    pub(crate) fn continue_volume_deletion(&self, volumes: &[Arc<PersistentVolume>]) {
        let contexts = self.deletions();
        let claims = volumes.iter().filter_map(|volume| claim_uid(volume));
        for context in claims.filter_map(|claim| contexts.get(claim)) {
            operation::continue_trace(Some(context));
        }
    }

    /// Continues the trace of the creation of a VolumeSnapshot, by the labels of its snapshot.
    pub(crate) async fn continue_snapshot_creation(&self, labels: &Labels, deadline: Instant) {
        if trace::is_exported() {
            let deadline = deadline.min(Instant::now() + LONGEST_READ);
            self.continue_snapshot(labels, ANNOTATION_TRACEPARENT, deadline).await;
        }
    }

    /// Continues the trace of the deletion of the VolumeSnapshot of a snapshot.
    pub(crate) async fn continue_snapshot_deletion(
        &self,
        infra: Arc<dyn StorageInfra>,
        id: SnapshotId,
        deadline: Instant,
    ) {
        if !trace::is_exported() {
            return;
        }
        let deadline = deadline.min(Instant::now() + LONGEST_READ);
        // Not as a part of the call: its span would start with this request, and could not continue a trace any more.
        let read = tokio::spawn(async move { infra.get_snapshot(&id, deadline).await });
        if let Ok(Ok(Some(snapshot))) = read.await {
            self.continue_snapshot(&snapshot.labels, ANNOTATION_DELETION_TRACEPARENT, deadline).await;
        }
    }

    async fn continue_snapshot(&self, labels: &Labels, key: &str, deadline: Instant) {
        let (Some(namespace), Some(name)) = (labels.get(LABEL_NAMESPACE), labels.get(LABEL_SNAPSHOT)) else {
            return;
        };
        let kind = GroupVersionKind::gvk("snapshot.storage.k8s.io", "v1", "VolumeSnapshot");
        let resource = ApiResource::from_gvk(&kind);
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), namespace, &resource);
        match timeout_at(deadline, api.get_metadata_opt(name)).await {
            Ok(Ok(Some(found))) => {
                operation::continue_trace(found.annotations().get(key).map(String::as_str));
            }
            Ok(Ok(None)) => {}
            Ok(Err(error)) => tracing::debug!(namespace, name, %error, "cannot read the trace of a snapshot"),
            Err(_) => tracing::debug!(namespace, name, "timed out reading the trace of a snapshot"),
        }
    }

    fn deletions(&self) -> MutexGuard<'_, DeletionContexts> {
        self.deletions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Contexts of the deletion of claims, by the UID of the claim, oldest first.
#[derive(Debug, Default)]
struct DeletionContexts(VecDeque<(String, String)>);

impl DeletionContexts {
    fn observe_claim(&mut self, change: &Change<'_, PersistentVolumeClaim>) {
        let Some(claim) = change.new.or(change.old) else { return };
        let Some(uid) = claim.metadata.uid.as_deref() else { return };
        match annotation(claim, ANNOTATION_DELETION_TRACEPARENT) {
            Some(_) if change.new.is_none() && cluster::volume_name(claim).is_none() => self.remove(uid),
            Some(context) => self.put(uid, context),
            None => {}
        }
    }

    fn observe_volume(&mut self, change: &Change<'_, PersistentVolume>) {
        if let (Some(old), None) = (change.old, change.new)
            && let Some(claim) = claim_uid(old)
        {
            self.remove(claim);
        }
    }

    /// Keeps a context, unless it is malformed.
    fn put(&mut self, claim: &str, context: &str) {
        if TraceParent::parse(context).is_none() {
            return;
        }
        self.remove(claim);
        if self.0.len() == MAX_KEPT {
            self.0.pop_front();
        }
        self.0.push_back((claim.to_owned(), context.to_owned()));
    }

    fn remove(&mut self, claim: &str) {
        self.0.retain(|(other, _)| other != claim);
    }

    fn get(&self, claim: &str) -> Option<&str> {
        self.0.iter().find(|(other, _)| other == claim).map(|(_, context)| context.as_str())
    }
}

/// UID of the claim of a PersistentVolume.
fn claim_uid(volume: &PersistentVolume) -> Option<&str> {
    volume.spec.claim_ref.as_ref()?.uid.as_deref()
}

#[cfg(test)]
mod tests {
    use kube_kit::informer::Key;
    use serde_json::json;

    use super::*;

    const CONTEXT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn claim(uid: &str, volume: Option<&str>, context: &str) -> Arc<PersistentVolumeClaim> {
        let annotations = json!({ANNOTATION_DELETION_TRACEPARENT: context});
        let claim = json!({
            "metadata": {"name": uid, "uid": uid, "annotations": annotations},
            "spec": {"volumeName": volume},
        });
        Arc::new(serde_json::from_value(claim).unwrap())
    }

    fn volume(claim: &str) -> Arc<PersistentVolume> {
        let reference = json!({"namespace": "guest", "name": claim, "uid": claim});
        let volume = json!({"metadata": {"name": "pv"}, "spec": {"claimRef": reference}});
        Arc::new(serde_json::from_value(volume).unwrap())
    }

    #[test]
    fn the_context_of_a_claim_is_kept_until_its_volume_is_gone() {
        let (mut kept, key) = (DeletionContexts::default(), Key::new("guest", "c"));
        let (bound, pending) = (claim("c", Some("pv"), CONTEXT), claim("p", None, CONTEXT));
        for one in [&bound, &pending] {
            kept.observe_claim(&Change { key: &key, old: None, new: Some(one) });
            kept.observe_claim(&Change { key: &key, old: Some(one), new: None });
        }
        assert_eq!((kept.get("c"), kept.get("p")), (Some(CONTEXT), None));
        let (old, key) = (volume("c"), Key::cluster("pv"));
        kept.observe_volume(&Change { key: &key, old: Some(&old), new: Some(&old) });
        assert_eq!(kept.get("c"), Some(CONTEXT));
        kept.observe_volume(&Change { key: &key, old: Some(&old), new: None });
        assert_eq!(kept.get("c"), None);
    }

    #[test]
    fn malformed_contexts_are_not_kept_and_the_oldest_is_dropped() {
        let mut kept = DeletionContexts::default();
        kept.put("bad", &CONTEXT.repeat(1000));
        assert!(kept.0.is_empty());
        let other = CONTEXT.replace('a', "b");
        kept.put("0", CONTEXT);
        kept.put("0", &other);
        assert_eq!(kept.get("0"), Some(other.as_str()), "a repeated deletion");
        (1..=MAX_KEPT).for_each(|claim| kept.put(&claim.to_string(), CONTEXT));
        assert_eq!((kept.0.len(), kept.get("0"), kept.get("1")), (MAX_KEPT, None, Some(CONTEXT)));
    }
}
