//! A watched, trimmed copy of objects that many callers share: they read it, wait on it, or are told of
//! changes. One watch serves all of them, so no call makes requests of its own to find something out.

use std::collections::HashMap;
use std::fmt::{Debug, Display};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use futures::StreamExt;
use kube::core::DeserializeGuard;
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt, watcher as watch};
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::client::chain;
use crate::health::Check;

/// Namespace and name; the namespace is empty for objects of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// Namespace, or empty.
    pub namespace: String,
    /// Name.
    pub name: String,
}

impl Key {
    /// The key of an object in a namespace.
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }

    /// The key of an object of the cluster.
    pub fn cluster(name: impl Into<String>) -> Self {
        Self::new("", name)
    }

    /// The key of an object at hand.
    pub fn of<K: Resource>(object: &K) -> Self {
        Self::new(object.namespace().unwrap_or_default(), object.name_any())
    }
}

impl Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.namespace.is_empty() {
            f.write_str(&self.name)
        } else {
            write!(f, "{}/{}", self.namespace, self.name)
        }
    }
}

/// What happened to one object: what was known before, and what is known now.
#[derive(Debug)]
pub struct Change<'a, K> {
    /// Which object.
    pub key: &'a Key,
    /// As it was, unless it is new.
    pub old: Option<&'a Arc<K>>,
    /// As it is, unless it is gone.
    pub new: Option<&'a Arc<K>>,
}

type Trim<K> = Box<dyn Fn(&mut K) + Send + Sync>;
type Handler<K> = Box<dyn Fn(&Change<'_, K>) + Send + Sync>;

/// The shared copy. Cloning it is cheap and shares the copy.
pub struct Informer<K> {
    shared: Arc<Shared<K>>,
}

struct Shared<K> {
    objects: RwLock<HashMap<Key, Arc<K>>>,
    waiting: Mutex<HashMap<Key, Arc<Notify>>>,
    synced: tokio::sync::watch::Sender<bool>,
}

impl<K> Clone for Informer<K> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone() }
    }
}

impl<K> Debug for Informer<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Informer").finish_non_exhaustive()
    }
}

/// An informer that is not started yet.
pub struct Builder<K>
where
    K: Resource + DeserializeOwned + Clone + Debug + Send + Sync + 'static,
{
    api: Api<DeserializeGuard<K>>,
    what: String,
    config: watcher::Config,
    trim: Trim<K>,
    handlers: Vec<Handler<K>>,
    informer: Informer<K>,
}

impl<K> Informer<K>
where
    K: Resource + DeserializeOwned + Clone + Debug + Send + Sync + 'static,
{
    /// Prepares an informer. `what` names the objects in logs and health.
    pub fn builder(what: impl Into<String>, api: Api<DeserializeGuard<K>>) -> Builder<K> {
        let shared = Shared {
            objects: RwLock::default(),
            waiting: Mutex::default(),
            synced: tokio::sync::watch::Sender::new(false),
        };
        Builder {
            api,
            what: what.into(),
            config: watcher::Config::default(),
            trim: Box::new(|_| {}),
            handlers: Vec::new(),
            informer: Self { shared: Arc::new(shared) },
        }
    }
}

impl<K: Resource> Informer<K> {
    /// A copy that nothing watches, with these objects: for tests of code that reads one.
    pub fn fixed(objects: impl IntoIterator<Item = K>) -> Self {
        let objects = objects.into_iter().map(|object| (Key::of(&object), Arc::new(object))).collect();
        let shared = Shared {
            objects: RwLock::new(objects),
            waiting: Mutex::default(),
            synced: tokio::sync::watch::Sender::new(true),
        };
        Self { shared: Arc::new(shared) }
    }
}

impl<K> Informer<K> {
    /// The object, if it is known.
    pub fn get(&self, key: &Key) -> Option<Arc<K>> {
        self.shared.objects.read().unwrap_or_else(PoisonError::into_inner).get(key).cloned()
    }

    /// All objects, in no order.
    pub fn list(&self) -> Vec<Arc<K>> {
        self.shared.objects.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// The first object that `pick` takes.
    pub fn find(&self, pick: impl Fn(&K) -> bool) -> Option<Arc<K>> {
        let objects = self.shared.objects.read().unwrap_or_else(PoisonError::into_inner);
        objects.values().find(|object| pick(object)).cloned()
    }

    /// How many objects are known.
    pub fn len(&self) -> usize {
        self.shared.objects.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Whether none is known.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the first list was read.
    pub fn is_synced(&self) -> bool {
        *self.shared.synced.borrow()
    }

    /// Waits for the first list.
    pub async fn synced(&self) {
        // The sender lives as long as `self`, so waiting can't fail.
        let _ = self.shared.synced.subscribe().wait_for(|synced| *synced).await;
    }

    /// Waits until `check` answers about the object, looking again at each of its changes. None when the
    /// deadline came first.
    pub async fn wait_for<T>(
        &self,
        key: &Key,
        deadline: Instant,
        mut check: impl FnMut(Option<&Arc<K>>) -> Option<T>,
    ) -> Option<T> {
        let waiter = Waiter::new(&self.shared, key);
        loop {
            let changed = waiter.notify.notified();
            tokio::pin!(changed);
            // Enlist before looking, so that a change in between is not missed.
            changed.as_mut().enable();
            if let Some(answer) = check(self.get(key).as_ref()) {
                return Some(answer);
            }
            tokio::select! {
                () = &mut changed => {}
                () = tokio::time::sleep_until(deadline) => return None,
            }
        }
    }

    /// Wakes everyone who waits on `key`, for waits whose answer depends on more than the object itself.
    pub fn wake(&self, key: &Key) {
        let waiting = self.shared.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(notify) = waiting.get(key) {
            notify.notify_waiters();
        }
    }
}

/// A place in the table of those who wait; the last one of a key clears it away.
struct Waiter<'a, K> {
    shared: &'a Shared<K>,
    key: &'a Key,
    notify: Arc<Notify>,
}

impl<'a, K> Waiter<'a, K> {
    fn new(shared: &'a Shared<K>, key: &'a Key) -> Self {
        let mut waiting = shared.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let notify = waiting.entry(key.clone()).or_default().clone();
        Self { shared, key, notify }
    }
}

impl<K> Drop for Waiter<'_, K> {
    fn drop(&mut self) {
        let mut waiting = self.shared.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        // Two counts: the table's and this one's.
        if Arc::strong_count(&self.notify) <= 2 {
            waiting.remove(self.key);
        }
    }
}

impl<K> Builder<K>
where
    K: Resource + DeserializeOwned + Clone + Debug + Send + Sync + 'static,
{
    /// Watches only what the selectors let through.
    #[must_use]
    pub fn config(mut self, config: watcher::Config) -> Self {
        self.config = config;
        self
    }

    /// Drops fields that nobody reads, before an object is kept. Managed fields always go.
    #[must_use]
    pub fn trim(mut self, trim: impl Fn(&mut K) + Send + Sync + 'static) -> Self {
        self.trim = Box::new(trim);
        self
    }

    /// Is told of every change, on the watch's own task: it must not block.
    #[must_use]
    pub fn on_change(mut self, handler: impl Fn(&Change<'_, K>) + Send + Sync + 'static) -> Self {
        self.handlers.push(Box::new(handler));
        self
    }

    /// The informer, which stays empty until [`Self::start`].
    pub fn informer(&self) -> Informer<K> {
        self.informer.clone()
    }

    /// Starts watching. `check` passes while the watch is up.
    pub fn start(self, check: Check, stop: CancellationToken) -> Informer<K> {
        let informer = self.informer.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = self.watch(check) => {}
                () = stop.cancelled() => {}
            }
        });
        informer
    }

    async fn watch(self, check: Check) {
        check.fail(format!("the first list of {} was not read yet", self.what));
        // Faster than the runtime's default: calls with deadlines wait behind this.
        let backoff = backon::ExponentialBuilder::default()
            .with_min_delay(Duration::from_millis(100))
            .with_max_delay(Duration::from_secs(5))
            .with_jitter()
            .without_max_times();
        let mut events = std::pin::pin!(
            watch(self.api.clone(), self.config.clone()).backoff(watcher::ExponentialBackoff::from(backoff))
        );
        let mut listing: Option<HashMap<Key, Arc<K>>> = None;
        let mut failing = false;
        while let Some(event) = events.next().await {
            match event {
                Ok(event) => {
                    if failing && listing.is_none() && !matches!(event, Event::Init) {
                        tracing::info!("watching {} again", self.what);
                        failing = false;
                        check.pass();
                    }
                    match event {
                        Event::Init => listing = Some(HashMap::new()),
                        Event::InitApply(object) => {
                            if let (Some(object), Some(list)) = (self.decode(object), listing.as_mut()) {
                                list.insert(Key::of(&object), Arc::new(object));
                            }
                        }
                        Event::InitDone => {
                            self.replace(listing.take().unwrap_or_default());
                            failing = false;
                            check.pass();
                        }
                        Event::Apply(object) => {
                            if let Some(object) = self.decode(object) {
                                self.apply(Key::of(&object), Arc::new(object));
                            }
                        }
                        Event::Delete(object) => self.remove(&Key::of(&object)),
                    }
                }
                Err(error) => {
                    let reason = format!("cannot watch {}: {}", self.what, chain(&error));
                    if !failing {
                        tracing::warn!("{reason}; trying again");
                    }
                    failing = true;
                    check.fail(reason);
                }
            }
        }
    }

    /// The object without what nobody reads. One that can't be decoded is reported and left out, so that
    /// it doesn't stop the others; what was known of it before is kept.
    fn decode(&self, object: DeserializeGuard<K>) -> Option<K> {
        let name = Key::of(&object);
        match object.0 {
            Ok(mut object) => {
                object.meta_mut().managed_fields = None;
                (self.trim)(&mut object);
                Some(object)
            }
            Err(invalid) => {
                tracing::error!(object = %name, error = invalid.error, "malformed object among {}: left out", self.what);
                None
            }
        }
    }

    fn apply(&self, key: Key, object: Arc<K>) {
        let old = self.objects_mut().insert(key.clone(), object.clone());
        self.tell(&Change { key: &key, old: old.as_ref(), new: Some(&object) });
    }

    fn remove(&self, key: &Key) {
        let old = self.objects_mut().remove(key);
        if old.is_some() {
            self.tell(&Change { key, old: old.as_ref(), new: None });
        }
    }

    /// Takes a fresh list: what it lacks is gone, what it has is new or changed.
    fn replace(&self, list: HashMap<Key, Arc<K>>) {
        let before = std::mem::replace(&mut *self.objects_mut(), list.clone());
        for (key, old) in before.iter().filter(|(key, _)| !list.contains_key(*key)) {
            self.tell(&Change { key, old: Some(old), new: None });
        }
        for (key, new) in &list {
            let old = before.get(key);
            if old.is_none_or(|old| old.resource_version() != new.resource_version()) {
                self.tell(&Change { key, old, new: Some(new) });
            }
        }
        self.informer.shared.synced.send_replace(true);
    }

    fn tell(&self, change: &Change<'_, K>) {
        for handler in &self.handlers {
            handler(change);
        }
        self.informer.wake(change.key);
    }

    fn objects_mut(&self) -> std::sync::RwLockWriteGuard<'_, HashMap<Key, Arc<K>>> {
        self.informer.shared.objects.write().unwrap_or_else(PoisonError::into_inner)
    }
}
