//! Informer of objects that are computed from those of other informers.

use std::sync::{Arc, Mutex, PoisonError};

use kube::Resource;

use super::{Change, Handler, Informer, Key};
use process_kit::memory::shrink_map;

/// A store of computed objects. The informers that they are computed from update it.
pub struct Derived<K> {
    informer: Informer<K>,
    handlers: Vec<Handler<K>>,
    is_same: fn(&K, &K) -> bool,
    /// Held while an object is computed, so that the latest state of all sources is stored last.
    updating: Mutex<()>,
}

impl<K> std::fmt::Debug for Derived<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Derived").finish_non_exhaustive()
    }
}

impl<K: Resource> Derived<K> {
    /// An empty store that calls these handlers whenever an object is not the same any more.
    pub fn new(handlers: Vec<Handler<K>>, is_same: fn(&K, &K) -> bool) -> Self {
        Self { informer: Informer::fixed([]), handlers, is_same, updating: Mutex::default() }
    }

    /// The store. Whether it is complete and current is known to the informers that it is computed from.
    pub fn informer(&self) -> &Informer<K> {
        &self.informer
    }

    /// Stores what `compute` returns, and wakes all waiters of the object, whose checks may depend on the sources.
    pub fn update(&self, key: &Key, compute: impl FnOnce() -> Option<K>) {
        let _updating = self.updating.lock().unwrap_or_else(PoisonError::into_inner);
        let new = compute().map(Arc::new);
        let old = self.informer.get(key);
        let is_same = match (&old, &new) {
            (Some(old), Some(new)) => (self.is_same)(old, new),
            (old, new) => old.is_none() && new.is_none(),
        };
        if !is_same {
            self.store(key, new.clone());
            let change = Change { key, old: old.as_ref(), new: new.as_ref() };
            self.handlers.iter().for_each(|handler| handler(&change));
        }
        self.informer.wake(key);
    }

    fn store(&self, key: &Key, new: Option<Arc<K>>) {
        let mut objects = self.informer.shared.objects.write().unwrap_or_else(PoisonError::into_inner);
        match new {
            Some(new) => drop(objects.insert(key.clone(), new)),
            None => drop(objects.remove(key)),
        }
        shrink_map(&mut objects);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use k8s_openapi::api::core::v1::ConfigMap;

    use super::*;

    #[test]
    fn handlers_hear_only_of_objects_that_change() {
        let heard = Arc::new(AtomicUsize::new(0));
        let hearing = heard.clone();
        let hear: Handler<ConfigMap> = Box::new(move |_| {
            hearing.fetch_add(1, Ordering::SeqCst);
        });
        let derived = Derived::new(vec![hear], ConfigMap::eq);
        let key = Key::cluster("a");
        for object in [Some(ConfigMap::default()), Some(ConfigMap::default()), None, None] {
            derived.update(&key, || object.clone());
            assert_eq!(derived.informer().get(&key).as_deref(), object.as_ref());
        }
        assert_eq!(heard.load(Ordering::SeqCst), 2);
    }
}
