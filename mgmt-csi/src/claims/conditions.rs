//! Volume conditions reported by the storage infra: listed once, then updated by its events.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use infra_api::{Change, Event, EventKind, VolumeId};
use kube_kit::informer::Key;
use kube_kit::queue::{NextAction, Queue};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::time::Instant;

use super::bindings::Bindings;
use crate::infra::{InfraEvent, Message, ReadError, StorageInfra, condition_message};

/// Timeout of one call to the storage infra.
const ANSWER: Duration = Duration::from_secs(30);

/// What to read from the storage infra.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Refresh {
    All,
    One(VolumeId),
}

impl fmt::Display for Refresh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all volumes of the storage infra"),
            Self::One(id) => write!(f, "volume {id} of the storage infra"),
        }
    }
}

/// Handler that queues a read for each storage infra event. A failed pool causes an event for each of its volumes.
pub(super) fn on_infra_event(
    refreshes: Queue<Refresh>,
    conditions: Conditions,
    bindings: Bindings,
) -> impl Fn(InfraEvent<'_>) + Send + Sync + use<> {
    move |event| match event {
        InfraEvent::Resync => refreshes.push(Refresh::All),
        InfraEvent::Object(Event { kind: EventKind::Volume, id, change }) => {
            let Ok(id) = VolumeId::new(id.as_str()) else { return };
            // In the normal lifecycle of a volume, these two do not change its condition.
            let is_irrelevant = match change {
                Change::Created => true,
                Change::Deleted => bindings.claims_of(&id).is_empty(),
                Change::Updated => false,
            };
            if !is_irrelevant || conditions.of(id.as_str()) != Condition::Normal {
                refreshes.push(Refresh::One(id));
            }
        }
        InfraEvent::Object(_) => {}
    }
}

/// Condition of one volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Condition {
    /// Not read yet.
    Unknown,
    Normal,
    /// Unhealthy, with a message.
    Abnormal(Message),
}

/// The unhealthy volumes and their messages; None before the first list.
#[derive(Debug, Clone)]
pub(super) struct Conditions {
    abnormal: Arc<RwLock<Option<HashMap<VolumeId, Message>>>>,
    count: Gauge,
}

impl Conditions {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let count = Gauge::default();
        registry.register(
            "volumes_abnormal",
            "Volumes that the storage infra reports as unhealthy, or that it has lost",
            count.clone(),
        );
        Self { abnormal: Arc::default(), count }
    }

    pub(super) fn of(&self, handle: &str) -> Condition {
        let abnormal = self.abnormal.read().unwrap_or_else(PoisonError::into_inner);
        let Some(abnormal) = abnormal.as_ref() else { return Condition::Unknown };
        let message = VolumeId::new(handle).ok().and_then(|id| abnormal.get(&id).cloned());
        message.map_or(Condition::Normal, Condition::Abnormal)
    }

    /// Reads conditions, and queues the claims whose volume's condition changed. After the first list, queues all claims,
    /// because an earlier process may have written any condition.
    pub(super) async fn refresh(
        &self,
        infra: &dyn StorageInfra,
        refresh: Refresh,
        bindings: &Bindings,
        claims: &Queue<Key>,
    ) -> Result<NextAction, ReadError> {
        let changed = match refresh {
            Refresh::All => {
                // Computed before the volumes are listed: volumes bound now must be in the later list.
                let expected = bindings.ids();
                self.replace(read_all(infra, expected).await?)
            }
            Refresh::One(id) => {
                let message = read_one(infra, &id, bindings).await?;
                Some(if self.put(&id, message) { vec![id] } else { Vec::new() })
            }
        };
        let keys: Vec<Key> = match changed {
            Some(volumes) => volumes.iter().flat_map(|id| bindings.claims_of(id)).collect(),
            None => bindings.claims.informer().list().iter().map(|claim| Key::of(&**claim)).collect(),
        };
        for key in keys {
            claims.push(key);
        }
        Ok(NextAction::AwaitChange)
    }

    /// Whether the cached condition of a volume matches the storage infra now.
    pub(super) async fn is_current(
        &self,
        infra: &dyn StorageInfra,
        id: &VolumeId,
        bindings: &Bindings,
    ) -> Result<bool, ReadError> {
        let cached = self.of(id.as_str());
        let message = read_one(infra, id, bindings).await?;
        Ok(cached == message.map_or(Condition::Normal, Condition::Abnormal))
    }

    /// Drops a volume whose PersistentVolume is gone.
    pub(super) fn forget(&self, handle: &str) {
        if let Ok(id) = VolumeId::new(handle) {
            self.put(&id, None);
        }
    }

    /// Replaces all conditions. Returns the volumes that changed; None on the first call.
    fn replace(&self, now: HashMap<VolumeId, Message>) -> Option<Vec<VolumeId>> {
        let mut abnormal = self.abnormal.write().unwrap_or_else(PoisonError::into_inner);
        let before = abnormal.replace(now.clone());
        self.count.set(i64::try_from(now.len()).unwrap_or(i64::MAX));
        now.iter().for_each(|(id, message)| log(id, before.as_ref().and_then(|all| all.get(id)), message));
        let before = before?;
        let differs = |id: &&VolumeId| before.get(*id) != now.get(*id);
        let gone = before.keys().filter(|id| !now.contains_key(*id));
        Some(now.keys().filter(differs).chain(gone).cloned().collect())
    }

    /// Sets the condition of one volume. Returns whether it changed. Ignored before the first list.
    fn put(&self, id: &VolumeId, message: Option<Message>) -> bool {
        let mut abnormal = self.abnormal.write().unwrap_or_else(PoisonError::into_inner);
        let Some(abnormal) = abnormal.as_mut() else { return false };
        let before = match message.clone() {
            Some(message) => {
                log(id, abnormal.get(id), &message);
                abnormal.insert(id.clone(), message)
            }
            None => abnormal.remove(id),
        };
        self.count.set(i64::try_from(abnormal.len()).unwrap_or(i64::MAX));
        before != message
    }
}

/// Reads the message of a volume if it is unhealthy.
async fn read_one(
    infra: &dyn StorageInfra,
    id: &VolumeId,
    bindings: &Bindings,
) -> Result<Option<Message>, ReadError> {
    Ok(match infra.get_volume(id, Instant::now() + ANSWER).await? {
        Some(volume) => condition_message(&volume.condition),
        // The volume of an existing claim is never deleted on purpose.
        None => (!bindings.claims_of(id).is_empty()).then(|| lost_message(id)),
    })
}

/// Lists all volumes; an `expected` volume that is not listed is lost.
async fn read_all(
    infra: &dyn StorageInfra,
    mut expected: HashSet<VolumeId>,
) -> Result<HashMap<VolumeId, Message>, ReadError> {
    let mut abnormal = HashMap::new();
    let mut next: Option<String> = None;
    loop {
        let page = infra.list_volumes(None, next.as_deref(), Instant::now() + ANSWER).await?;
        for volume in page.items {
            expected.remove(&volume.id);
            if let Some(message) = condition_message(&volume.condition) {
                abnormal.insert(volume.id, message);
            }
        }
        next = page.next;
        if next.is_none() {
            abnormal.extend(expected.into_iter().map(|id| (id.clone(), lost_message(&id))));
            return Ok(abnormal);
        }
    }
}

/// Logs the complete text, which the claim does not show.
fn log(id: &VolumeId, before: Option<&Message>, now: &Message) {
    if before != Some(now) {
        tracing::warn!(volume = %id, "the volume is unhealthy: {now}");
    }
}

fn lost_message(id: &VolumeId) -> Message {
    Message::own(format!(
        "the storage infra no longer has volume {id}: it was deleted there, or the catalog was restored from a backup"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(name: &str) -> VolumeId {
        VolumeId::new(name).unwrap()
    }

    fn broken() -> Message {
        Message::new("pool-7 is gone", "broken")
    }

    #[test]
    fn only_changes_are_reported_and_nothing_before_the_first_list() {
        let conditions = Conditions::register(&mut Registry::default());
        assert!(!conditions.put(&id("a"), Some(broken())));
        assert_eq!(conditions.of("a"), Condition::Unknown);
        assert_eq!(conditions.replace([(id("a"), broken())].into()), None);
        assert_eq!(conditions.of("a"), Condition::Abnormal(broken()));
        assert_eq!(conditions.of("b"), Condition::Normal);

        assert!(!conditions.put(&id("a"), Some(broken())));
        assert!(conditions.put(&id("b"), Some(Message::own("gone"))));
        assert_eq!(conditions.count.get(), 2);
        let now = [(id("b"), Message::own("gone")), (id("c"), Message::own("gone"))].into();
        let mut changed = conditions.replace(now).unwrap();
        changed.sort();
        assert_eq!(changed, [id("a"), id("c")]);
        assert!(conditions.put(&id("b"), None));
        assert_eq!((conditions.of("b"), conditions.count.get()), (Condition::Normal, 1));
    }
}
