//! Consumer records: annotations and labels on a management claim that name the guest objects it serves and, if the
//! claim is shared with this guest, that this guest uses it.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crds::names;
use kube_kit::informer::Key;
use kube_kit::partial::{PersistentVolume, PersistentVolumeClaim};
use kube_kit::queue::NextAction;
use tokio::time::Instant;

use super::pods::Pods;
use crate::guest::{self, Guest};
use crate::management::claims::DesiredMetadata;
use crate::management::consumers::{Consumer, ConsumerError};
use crate::management::{Management, Relation};
use crds::names::ClaimName;

/// Minimum interval between two writes of a volume's pods, so that a rollout needs few writes.
const PODS_MIN_INTERVAL: Duration = Duration::from_secs(2);
/// Maximum number of pods that are named; of more, only the number is given.
const MAX_PODS: usize = 16;

/// Writes consumer records on management claims.
pub(super) struct ConsumerRecords {
    guest: Guest,
    management: Management,
    labels: Vec<String>,
    pods: Option<Pods>,
    paused: Mutex<HashMap<ClaimName, Instant>>,
}

impl ConsumerRecords {
    /// `labels` are copied from guest claims; pods are recorded if `pods` are watched.
    pub(super) fn new(guest: Guest, management: Management, labels: Vec<String>, pods: Option<Pods>) -> Self {
        Self { guest, management, labels, pods, paused: Mutex::default() }
    }

    /// Updates the records of the volume with this handle.
    pub(super) async fn reconcile(&self, handle: &ClaimName) -> Result<NextAction, String> {
        let volumes = self.guest.volumes_of(handle);
        let relation = self.management.claims.usable(handle).map(|(_, relation)| relation);
        let requirements: Vec<_> = volumes.iter().map(|volume| guest::requirements(volume)).collect();
        let recorded = match Consumer::of(&requirements).filter(|_| relation != Some(Relation::Own)) {
            Some(consumer) => self.management.consumers.record(handle, &consumer).await,
            None => self.management.consumers.remove(handle).await,
        };
        match recorded {
            // The watch reports the deletion.
            Ok(()) | Err(ConsumerError::Deleting(_)) => {}
            Err(error) => return Err(error.to_string()),
        }
        if relation != Some(Relation::Own) {
            return Ok(NextAction::AwaitChange);
        }
        let bound = volumes.iter().find_map(|volume| Some((volume, self.guest.claim_of(volume)?)));
        match bound {
            Some((volume, claim)) => self.update_metadata(handle, volume, &claim).await,
            None if volumes.is_empty() => Ok(NextAction::AwaitChange),
            // The recorded reclaim policy decides what happens after the PersistentVolume is deleted, often after its
            // claim.
            None => {
                let policy = DesiredMetadata {
                    annotations: [reclaim_policy(&volumes)].into(),
                    ..DesiredMetadata::default()
                };
                let written = self.management.claims.update_metadata(handle, &policy).await;
                written.map(|_| NextAction::AwaitChange).map_err(|error| error.to_string())
            }
        }
    }

    async fn update_metadata(
        &self,
        handle: &ClaimName,
        volume: &PersistentVolume,
        claim: &PersistentVolumeClaim,
    ) -> Result<NextAction, String> {
        let mut desired = desired_metadata(volume, claim, &self.labels);
        desired.annotations.extend([reclaim_policy(&self.guest.volumes_of(handle))]);
        let pause = self.pause_left(handle);
        if pause.is_none() {
            let pods = self.pods.as_ref().map(|pods| pods.pods_using(&Key::of(claim)));
            desired
                .annotations
                .insert(names::ANNOTATION_GUEST_PODS.to_owned(), pods_annotation(&pods.unwrap_or_default()));
        }
        let written = self
            .management
            .claims
            .update_metadata(handle, &desired)
            .await
            .map_err(|error| error.to_string())?;
        if written && self.pods.is_some() {
            self.paused().insert(handle.to_owned(), Instant::now() + PODS_MIN_INTERVAL);
            return Ok(NextAction::RequeueAfter(PODS_MIN_INTERVAL));
        }
        Ok(pause.map_or(NextAction::AwaitChange, NextAction::RequeueAfter))
    }

    /// Time until the pods of a volume may be written again.
    fn pause_left(&self, handle: &ClaimName) -> Option<Duration> {
        let mut paused = self.paused();
        let left = paused.get(handle)?.saturating_duration_since(Instant::now());
        if left.is_zero() {
            paused.remove(handle);
            return None;
        }
        Some(left)
    }

    fn paused(&self) -> std::sync::MutexGuard<'_, HashMap<ClaimName, Instant>> {
        self.paused.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Desired labels and annotations on the management claim of a bound volume.
fn desired_metadata(
    volume: &PersistentVolume,
    claim: &PersistentVolumeClaim,
    labels: &[String],
) -> DesiredMetadata {
    let claim = &claim.metadata;
    let annotations = [
        (names::ANNOTATION_GUEST_PVC, &claim.name),
        (names::ANNOTATION_GUEST_NAMESPACE, &claim.namespace),
        (names::ANNOTATION_GUEST_PV, &volume.metadata.name),
    ];
    let label = |key: &String| claim.labels.as_ref().and_then(|labels| labels.get(key)).cloned();
    DesiredMetadata {
        labels: labels.iter().map(|key| (key.clone(), label(key))).collect::<BTreeMap<_, _>>(),
        annotations: annotations.map(|(key, value)| (key.to_owned(), value.clone())).into(),
    }
}

/// The annotation with the guest's reclaim policy: set for Retain; absent for Delete, the usual policy.
fn reclaim_policy(volumes: &[Arc<PersistentVolume>]) -> (String, Option<String>) {
    let policy = |volume: &Arc<PersistentVolume>| volume.spec.persistent_volume_reclaim_policy.clone();
    let retain = volumes.iter().filter_map(policy).find(|policy| policy == "Retain");
    (names::ANNOTATION_GUEST_RECLAIM_POLICY.to_owned(), retain)
}

/// The pods that use a claim, as JSON; None without any.
fn pods_annotation(pods: &[Key]) -> Option<String> {
    let mut pods_annotation: Vec<String> = pods.iter().take(MAX_PODS).map(Key::to_string).collect();
    if let Some(more) = pods.len().checked_sub(MAX_PODS).filter(|more| *more > 0) {
        pods_annotation.push(format!("and {more} more"));
    }
    (!pods_annotation.is_empty()).then(|| serde_json::json!(pods_annotation).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_records_name_the_guest_objects_and_the_selected_labels() {
        let mut claim = PersistentVolumeClaim::default();
        claim.metadata.name = Some("data".to_owned());
        claim.metadata.namespace = Some("default".to_owned());
        claim.metadata.labels =
            Some([("team".to_owned(), "a".to_owned()), ("other".to_owned(), "b".to_owned())].into());
        let mut volume = PersistentVolume::default();
        volume.metadata.name = Some("pv-1".to_owned());
        let desired = desired_metadata(&volume, &claim, &["team".to_owned(), "tier".to_owned()]);
        assert_eq!(
            desired.labels,
            [("team".to_owned(), Some("a".to_owned())), ("tier".to_owned(), None)].into()
        );
        let annotation = |key: &str| desired.annotations[key].as_deref();
        assert_eq!(annotation("nestor.dev/guest-pvc"), Some("data"));
        assert_eq!(annotation("nestor.dev/guest-namespace"), Some("default"));
        assert_eq!(annotation("nestor.dev/guest-pv"), Some("pv-1"));
    }

    #[test]
    fn at_most_sixteen_pods_are_named() {
        let pods = |count: usize| (0..count).map(|i| Key::new("ns", format!("p{i}"))).collect::<Vec<_>>();
        assert_eq!(pods_annotation(&[]), None);
        assert_eq!(pods_annotation(&pods(2)).as_deref(), Some(r#"["ns/p0","ns/p1"]"#));
        let many = pods_annotation(&pods(MAX_PODS + 3)).unwrap();
        assert!(many.ends_with(r#""ns/p15","and 3 more"]"#), "{many}");
    }
}
