//! An informer's copy with the process's own latest writes over it. A watch lags behind the answers to
//! writes by some milliseconds; whoever decides in between must not decide on what was before.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kube::{Resource, ResourceExt};
use tokio::time::Instant;

use crate::informer::{Change, Informer, Key};
use process_kit::memory::give_back;

/// Reads the newest that is known of an object. An own write is believed until the watch has it or tells of the object's
/// end, however far behind that is, or everything was read anew.
///
/// What becomes of it while the watch is down, or the server goes back to an older state, may be in no change: who writes
/// looks at all again in the informer's `on_read`.
#[derive(Debug)]
pub struct Latest<K> {
    informer: Informer<K>,
    own: Mutex<HashMap<Key, Own<K>>>,
}

/// An own write.
#[derive(Debug)]
struct Own<K> {
    object: Arc<K>,
    /// Whether it was the object's end.
    ended: bool,
    answered: Instant,
}

impl<K: Resource> Own<K> {
    fn new(object: K, ended: bool) -> Self {
        Self { object: Arc::new(object), ended, answered: Instant::now() }
    }

    fn is_newer(&self, seen: Option<&K>) -> bool {
        match self.ended {
            true => seen.is_some_and(|seen| seen.meta().uid == self.object.meta().uid),
            false => is_newer(&*self.object, seen),
        }
    }
}

impl<K: Resource> Latest<K> {
    /// Nothing written yet. [`Self::seen`] must be called from the informer's `on_change`.
    pub fn new(informer: Informer<K>) -> Self {
        Self { informer, own: Mutex::default() }
    }

    /// The informer below.
    pub fn informer(&self) -> &Informer<K> {
        &self.informer
    }

    /// The newest of what was seen and what was written.
    pub fn get(&self, key: &Key) -> Option<Arc<K>> {
        let mut own = self.own();
        let Some(written) = own.get(key) else { return self.informer.get(key) };
        // Before the look at what was seen, which is no older than that then.
        let told = self.informer.told();
        let seen = self.informer.get(key);
        let was_read_since = told.read.is_some_and(|read| read > written.answered);
        // One that is seen as it was before, though the watch is past the write, is of a server that went back.
        let came_and_went =
            seen.is_none() && version(&*written.object).is_some_and(|own| told.version >= Some(own));
        if was_read_since || came_and_went || !written.is_newer(seen.as_deref()) {
            own.remove(key);
            return seen;
        }
        (!written.ended).then(|| written.object.clone())
    }

    /// Takes the answer to a create.
    pub fn created(&self, object: K) {
        let key = Key::of(&object);
        let mut own = self.own();
        if is_newer(&object, self.informer.get(&key).as_deref()) {
            own.insert(key, Own::new(object, false));
        }
    }

    /// Takes the answer to a change of an object that was there. One that the watch says is gone by now
    /// stays gone.
    pub fn changed(&self, object: K) {
        let key = Key::of(&object);
        let mut own = self.own();
        let seen = self.informer.get(&key);
        let was_known = seen.is_some() || own.contains_key(&key);
        let has_ended =
            own.get(&key).is_some_and(|own| own.ended && own.object.meta().uid == object.meta().uid);
        if was_known && !has_ended && is_newer(&object, seen.as_deref()) {
            own.insert(key, Own::new(object, false));
        }
    }

    /// Takes an object, as it was before, that an own write ended: by removing its last finalizer.
    pub fn ended(&self, object: K) {
        let key = Key::of(&object);
        let mut own = self.own();
        let written = Own::new(object, true);
        if written.is_newer(self.informer.get(&key).as_deref()) {
            own.insert(key, written);
        } else {
            own.remove(&key);
        }
    }

    /// Forgets a write once the watch has caught up with it.
    pub fn seen(&self, change: &Change<'_, K>) {
        let mut own = self.own();
        if let Some(written) = own.get(change.key)
            && change.new.is_none_or(|new| !written.is_newer(Some(&**new)))
        {
            own.remove(change.key);
            give_back(&mut own);
        }
    }

    fn own(&self) -> MutexGuard<'_, HashMap<Key, Own<K>>> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits until an informer shows what the API server has by a key, or what came after it. False when the deadline came
/// first.
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

/// Whether `written` is newer than `seen`.
pub fn is_newer<K: Resource>(written: &K, seen: Option<&K>) -> bool {
    match (version(written), seen) {
        (_, None) => true,
        (Some(written), Some(seen)) => version(seen).is_some_and(|seen| written > seen),
        (None, Some(_)) => false,
    }
}

fn version<K: Resource>(object: &K) -> Option<u64> {
    number(&object.resource_version()?)
}

/// A resource version as what it is: a number that can be compared (KEP-5504).
pub(crate) fn number(version: &str) -> Option<u64> {
    version.parse().ok()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;

    use super::*;

    fn object(version: &str) -> ConfigMap {
        let mut object = ConfigMap::default();
        object.metadata.name = Some("a".into());
        object.metadata.resource_version = Some(version.into());
        object
    }

    #[test]
    fn an_own_write_counts_until_the_watch_has_it() {
        let latest = Latest::new(Informer::<ConfigMap>::fixed([object("9")]));
        let key = Key::cluster("a");
        latest.changed(object("10"));
        assert_eq!(latest.get(&key).unwrap().resource_version().as_deref(), Some("10"));
        let older = Arc::new(object("9"));
        latest.seen(&Change { key: &key, old: None, new: Some(&older) });
        assert_eq!(latest.get(&key).unwrap().resource_version().as_deref(), Some("10"));
        latest.seen(&Change { key: &key, old: None, new: None });
        assert_eq!(latest.get(&key).unwrap().resource_version().as_deref(), Some("9"));
    }

    #[test]
    fn a_late_answer_does_not_bring_a_deleted_object_back() {
        let latest = Latest::new(Informer::<ConfigMap>::fixed([]));
        latest.changed(object("10"));
        assert!(latest.get(&Key::cluster("a")).is_none());
        latest.created(object("11"));
        assert!(latest.get(&Key::cluster("a")).is_some());
    }

    #[test]
    fn an_object_that_was_ended_is_gone_before_the_watch_says_so_and_the_next_of_its_name_is_not() {
        let of = |uid: &str, version: &str| {
            let mut object = object(version);
            object.metadata.uid = Some(uid.into());
            object
        };
        let latest = Latest::new(Informer::<ConfigMap>::fixed([of("u1", "9")]));
        let key = Key::cluster("a");
        latest.ended(of("u1", "9"));
        assert!(latest.get(&key).is_none());
        latest.changed(of("u1", "10"));
        assert!(latest.get(&key).is_none());
        let later = Arc::new(of("u1", "10"));
        latest.seen(&Change { key: &key, old: None, new: Some(&later) });
        assert!(latest.get(&key).is_none());
        latest.created(of("u2", "12"));
        assert_eq!(latest.get(&key).unwrap().metadata.uid.as_deref(), Some("u2"));
    }
}
