//! Mutation cache: own writes laid over an informer's store. A watch lags behind the responses to writes by some
//! milliseconds; decisions in between must not use the previous state.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kube::Resource;
use tokio::time::Instant;

use crate::informer::{Change, Informer, Key};
use crate::resource_version::{self, is_newer};
use process_kit::memory::shrink_map;

/// Returns the newest known state of an object. An own write is used until the watch has passed it or reports the object's
/// deletion, however late, or a relist started after it.
///
/// Changes during a watch outage, or caused by a restore of the server, may be missing from the change events. Users
/// therefore reconcile all objects in the informer's `on_relist` callback.
#[derive(Debug)]
pub struct MutationCache<K> {
    informer: Informer<K>,
    own: Mutex<HashMap<Key, OwnWrite<K>>>,
}

/// An own write.
#[derive(Debug)]
struct OwnWrite<K> {
    object: Arc<K>,
    /// Whether the write deleted the object.
    deleted: bool,
    answered: Instant,
}

impl<K: Resource> OwnWrite<K> {
    fn new(object: K, deleted: bool) -> Self {
        Self { object: Arc::new(object), deleted, answered: Instant::now() }
    }

    fn is_newer(&self, seen: Option<&K>) -> bool {
        match self.deleted {
            true => seen.is_some_and(|seen| seen.meta().uid == self.object.meta().uid),
            false => is_newer(&*self.object, seen),
        }
    }
}

impl<K: Resource> MutationCache<K> {
    /// Creates an empty cache. The informer's `on_change` handler must call [`Self::observe`].
    pub fn new(informer: Informer<K>) -> Self {
        Self { informer, own: Mutex::default() }
    }

    /// The underlying informer.
    pub fn informer(&self) -> &Informer<K> {
        &self.informer
    }

    /// Returns the newer of the informer's state and the own write.
    pub fn get(&self, key: &Key) -> Option<Arc<K>> {
        let mut own = self.own();
        let Some(written) = own.get(key) else { return self.informer.get(key) };
        // Before reading the store, so that the store is at least as current.
        let last_sync = self.informer.last_sync();
        let seen = self.informer.get(key);
        let was_relisted = last_sync.list_started.is_some_and(|read| read > written.answered);
        // If the store has the old object although the watch has passed the write, the server was restored.
        let created_and_deleted = seen.is_none()
            && resource_version::of(&*written.object).is_some_and(|own| last_sync.version >= Some(own));
        if was_relisted || created_and_deleted || !written.is_newer(seen.as_deref()) {
            own.remove(key);
            return seen;
        }
        (!written.deleted).then(|| written.object.clone())
    }

    /// Stores the response to a create.
    pub fn created(&self, object: K) {
        let key = Key::of(&object);
        let mut own = self.own();
        if is_newer(&object, self.informer.get(&key).as_deref()) {
            own.insert(key, OwnWrite::new(object, false));
        }
    }

    /// Stores the response to an update. Ignored if the watch has reported the object's deletion.
    pub fn changed(&self, object: K) {
        let key = Key::of(&object);
        let mut own = self.own();
        let seen = self.informer.get(&key);
        let was_known = seen.is_some() || own.contains_key(&key);
        let was_deleted =
            own.get(&key).is_some_and(|own| own.deleted && own.object.meta().uid == object.meta().uid);
        if was_known && !was_deleted && is_newer(&object, seen.as_deref()) {
            own.insert(key, OwnWrite::new(object, false));
        }
    }

    /// Stores that an own write deleted the object, by removing its last finalizer. `object` is its previous state.
    pub fn deleted(&self, object: K) {
        let key = Key::of(&object);
        let mut own = self.own();
        let written = OwnWrite::new(object, true);
        if written.is_newer(self.informer.get(&key).as_deref()) {
            own.insert(key, written);
        } else {
            own.remove(&key);
        }
    }

    /// Drops a write that the watch has passed.
    pub fn observe(&self, change: &Change<'_, K>) {
        let mut own = self.own();
        if let Some(written) = own.get(change.key)
            && change.new.is_none_or(|new| !written.is_newer(Some(&**new)))
        {
            own.remove(change.key);
            shrink_map(&mut own);
        }
    }

    fn own(&self) -> MutexGuard<'_, HashMap<Key, OwnWrite<K>>> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits until an informer shows this state of an object or a newer one. `live` is None if the object does not exist on the
/// API server. Returns false at the deadline.
pub async fn catch_up<K: Resource>(
    informer: &Informer<K>,
    key: &Key,
    live: Option<&K>,
    deadline: tokio::time::Instant,
) -> bool {
    let shows = |seen: Option<&Arc<K>>| match live {
        Some(live) => seen.is_some_and(|seen| !is_newer(live, Some(&**seen))),
        None => seen.is_none(),
    };
    informer.wait_for(key, deadline, |seen| shows(seen).then_some(())).await.is_some()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::ResourceExt;

    use super::*;

    fn object(version: &str) -> ConfigMap {
        let mut object = ConfigMap::default();
        object.metadata.name = Some("a".into());
        object.metadata.resource_version = Some(version.into());
        object
    }

    #[test]
    fn an_own_write_is_used_until_the_watch_has_it() {
        let cache = MutationCache::new(Informer::<ConfigMap>::fixed([object("9")]));
        let key = Key::cluster("a");
        cache.changed(object("10"));
        assert_eq!(cache.get(&key).unwrap().resource_version().as_deref(), Some("10"));
        let older = Arc::new(object("9"));
        cache.observe(&Change { key: &key, old: None, new: Some(&older) });
        assert_eq!(cache.get(&key).unwrap().resource_version().as_deref(), Some("10"));
        cache.observe(&Change { key: &key, old: None, new: None });
        assert_eq!(cache.get(&key).unwrap().resource_version().as_deref(), Some("9"));
    }

    #[test]
    fn a_late_response_does_not_restore_a_deleted_object() {
        let cache = MutationCache::new(Informer::<ConfigMap>::fixed([]));
        cache.changed(object("10"));
        assert!(cache.get(&Key::cluster("a")).is_none());
        cache.created(object("11"));
        assert!(cache.get(&Key::cluster("a")).is_some());
    }

    #[test]
    fn a_deleted_object_is_hidden_until_the_watch_reports_it_and_its_successor_is_not() {
        let of = |uid: &str, version: &str| {
            let mut object = object(version);
            object.metadata.uid = Some(uid.into());
            object
        };
        let cache = MutationCache::new(Informer::<ConfigMap>::fixed([of("u1", "9")]));
        let key = Key::cluster("a");
        cache.deleted(of("u1", "9"));
        assert!(cache.get(&key).is_none());
        cache.changed(of("u1", "10"));
        assert!(cache.get(&key).is_none());
        let later = Arc::new(of("u1", "10"));
        cache.observe(&Change { key: &key, old: None, new: Some(&later) });
        assert!(cache.get(&key).is_none());
        cache.created(of("u2", "12"));
        assert_eq!(cache.get(&key).unwrap().metadata.uid.as_deref(), Some("u2"));
    }
}
