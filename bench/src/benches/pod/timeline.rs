//! Timeline of pods and their volumes, from watches of the guest's API server.

use std::collections::{HashMap, HashSet};
use std::fmt::Debug;
use std::time::Instant;

use anyhow::{Context, Result};
use futures::{StreamExt, pin_mut};
use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::api::Api;
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt, watcher as watch_objects};
use kube::{Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tests::Scenario;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::observed::LONGEST;

/// Something that becomes true of a pod or a volume.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Fact {
    /// The claim is bound.
    Bound { claim: String },
    /// The pod has a node.
    Scheduled { pod: String },
    /// The pod's container runs.
    Running { pod: String },
    /// The attach-detach controller has created the VolumeAttachment.
    AttachRequested { volume: String, node: String },
    /// gc-csi has attached the volume.
    Attached { volume: String, node: String },
    /// The attach-detach controller has requested the detach.
    DetachRequested { volume: String, node: String },
    /// gc-csi has detached the volume.
    Detached { volume: String, node: String },
    /// The Node reports the volume as attached, for which kubelet waits.
    Reported { volume: String, node: String },
}

/// When each fact became true, which can be several times.
type Moments = HashMap<Fact, Vec<Instant>>;

/// Watches with the moments of all facts.
pub(super) struct Timeline {
    moments: watch::Receiver<Moments>,
    watching: Vec<JoinHandle<()>>,
}

impl Drop for Timeline {
    fn drop(&mut self) {
        self.watching.iter().for_each(JoinHandle::abort);
    }
}

impl Timeline {
    /// Watches the objects of a scenario.
    pub(super) fn watch(s: &Scenario) -> Self {
        let (sender, moments) = watch::channel(Moments::new());
        let watching = vec![
            observe(Api::namespaced(s.guest.clone(), &s.name), sender.clone(), of_claim),
            observe(Api::namespaced(s.guest.clone(), &s.name), sender.clone(), of_pod),
            observe(Api::all(s.guest.clone()), sender.clone(), of_attachment),
            observe(Api::all(s.guest.clone()), sender, of_node),
        ];
        Self { moments, watching }
    }

    /// Waits until a fact is true, and returns when it became so first after `since`.
    pub(super) async fn after(&self, since: Instant, fact: Fact) -> Result<Instant> {
        let first = |moments: &Moments| {
            moments.get(&fact).and_then(|all| all.iter().copied().find(|moment| *moment >= since))
        };
        let mut moments = self.moments.clone();
        let waiting = moments.wait_for(|moments| first(moments).is_some());
        let moments = tokio::time::timeout(LONGEST, waiting)
            .await
            .with_context(|| format!("{fact:?}: not within {LONGEST:?}"))?
            .context("the watches ended")?;
        first(&moments).context("the watches ended")
    }
}

/// Records when facts about objects become true.
fn observe<K>(api: Api<K>, moments: watch::Sender<Moments>, facts: fn(&K) -> Vec<Fact>) -> JoinHandle<()>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    tokio::spawn(async move {
        let events = watch_objects(api, watcher::Config::default()).default_backoff();
        pin_mut!(events);
        let mut known: HashMap<String, HashSet<Fact>> = HashMap::new();
        let mut listed: HashSet<String> = HashSet::new();
        let delete = |before: HashSet<Fact>| record(&moments, before.into_iter().filter_map(ended));
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::Init) => listed.clear(),
                Ok(Event::InitApply(object) | Event::Apply(object)) => {
                    listed.insert(object.name_any());
                    let now: HashSet<Fact> = facts(&object).into_iter().collect();
                    let before = known.insert(object.name_any(), now.clone()).unwrap_or_default();
                    record(&moments, now.difference(&before).cloned());
                }
                // Objects that were deleted while there was no watch.
                Ok(Event::InitDone) => {
                    known.extract_if(|name, _| !listed.contains(name)).for_each(|(_, before)| delete(before));
                }
                Ok(Event::Delete(object)) => delete(known.remove(&object.name_any()).unwrap_or_default()),
                // The watcher retries by itself.
                Err(_) => {}
            }
        }
    })
}

fn record(moments: &watch::Sender<Moments>, facts: impl Iterator<Item = Fact>) {
    let now = Instant::now();
    moments.send_modify(|all| facts.for_each(|fact| all.entry(fact).or_default().push(now)));
}

/// What becomes true when the object of a fact is deleted.
fn ended(fact: Fact) -> Option<Fact> {
    match fact {
        Fact::AttachRequested { volume, node } => Some(Fact::Detached { volume, node }),
        _ => None,
    }
}

fn of_claim(claim: &PersistentVolumeClaim) -> Vec<Fact> {
    let is_bound = claim.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Bound");
    is_bound.then(|| Fact::Bound { claim: claim.name_any() }).into_iter().collect()
}

fn of_pod(pod: &Pod) -> Vec<Fact> {
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref());
    let containers = pod.status.as_ref().and_then(|status| status.container_statuses.as_ref());
    let state = containers.and_then(|all| all.first()?.state.as_ref());
    let runs = state.is_some_and(|state| state.running.is_some());
    let scheduled = node.map(|_| Fact::Scheduled { pod: pod.name_any() });
    scheduled.into_iter().chain(runs.then(|| Fact::Running { pod: pod.name_any() })).collect()
}

fn of_attachment(attachment: &VolumeAttachment) -> Vec<Fact> {
    let Some(volume) = attachment.spec.source.persistent_volume_name.clone() else { return Vec::new() };
    let node = attachment.spec.node_name.clone();
    let is_attached = attachment.status.as_ref().is_some_and(|status| status.attached);
    let is_deleted = attachment.metadata.deletion_timestamp.is_some();
    let detach = Fact::DetachRequested { volume: volume.clone(), node: node.clone() };
    let requested = Fact::AttachRequested { volume: volume.clone(), node: node.clone() };
    let attached = is_attached.then_some(Fact::Attached { volume, node });
    std::iter::once(requested).chain(attached).chain(is_deleted.then_some(detach)).collect()
}

fn of_node(node: &Node) -> Vec<Fact> {
    let attached = node.status.as_ref().and_then(|status| status.volumes_attached.as_ref());
    let names = attached.into_iter().flatten().filter_map(|volume| volume.name.rsplit('^').next());
    names.map(|name| Fact::Reported { volume: name.to_owned(), node: node.name_any() }).collect()
}
