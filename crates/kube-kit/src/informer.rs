//! Informer: a local store of watched objects, shared by all readers. Callers read it, wait for changes, or register
//! handlers, and make no API requests of their own. Use a partial type of [`partial`](crate::partial) for objects that are numerous.

mod derived;
pub(crate) mod metrics;
mod watch;

use std::collections::HashMap;
use std::fmt::{Debug, Display};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::DeserializeGuard;
use kube::runtime::watcher;
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::health::Check;
pub use derived::Derived;
use metrics::WatchMetrics;
use process_kit::memory::shrink_map;
use process_kit::supervise;

/// Namespace and name of an object; the namespace is empty for cluster-scoped objects.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// Namespace, or empty.
    pub namespace: String,
    /// Name.
    pub name: String,
}

impl Key {
    /// Key of a namespaced object.
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }

    /// Key of a cluster-scoped object.
    pub fn cluster(name: impl Into<String>) -> Self {
        Self::new("", name)
    }

    /// Key of this object.
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

/// A change of one object.
#[derive(Debug)]
pub struct Change<'a, K> {
    /// Key of the object.
    pub key: &'a Key,
    /// Previous state; None if the object was added.
    pub old: Option<&'a Arc<K>>,
    /// New state; None if the object was deleted.
    pub new: Option<&'a Arc<K>>,
}

type Trim<K> = Box<dyn Fn(&mut K) + Send + Sync>;
/// Handler of changes, called on the task that makes them: it must not block.
pub type Handler<K> = Box<dyn Fn(&Change<'_, K>) + Send + Sync>;

/// Shared store of objects. Clones share the store.
pub struct Informer<K> {
    shared: Arc<Shared<K>>,
}

struct Shared<K> {
    objects: RwLock<HashMap<Key, Arc<K>>>,
    waiting: Mutex<HashMap<Key, Arc<Notify>>>,
    /// Start time of the last complete list; None before the first.
    read: tokio::sync::watch::Sender<Option<Instant>>,
    /// The store must be relisted unless its last list started after this time.
    outdated: tokio::sync::watch::Sender<Option<Instant>>,
    last_sync: Mutex<LastSync>,
    watch_error: Mutex<Option<String>>,
    ended: CancellationToken,
}

/// How current an informer's store is.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct LastSync {
    /// Last resource version received, if numeric. May be too high if the server was restored to an older state.
    pub(crate) version: Option<u64>,
    /// Start time of the last complete list.
    pub(crate) list_started: Option<Instant>,
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

/// An informer that is not started.
pub struct Builder<K>
where
    K: Resource + DeserializeOwned + Clone + Debug + Send + Sync + 'static,
{
    client: Client,
    url: String,
    what: String,
    config: watcher::Config,
    metadata_only: bool,
    trim: Trim<K>,
    handlers: Vec<Handler<K>>,
    reconnect_handlers: Vec<Box<dyn Fn() + Send + Sync>>,
    relist_handlers: Vec<Box<dyn Fn() + Send + Sync>>,
    informer: Informer<K>,
    metrics: WatchMetrics,
}

impl<K> Informer<K>
where
    K: Resource + DeserializeOwned + Clone + Debug + Send + Sync + 'static,
{
    /// Prepares an informer. `what` names the objects in logs and metrics.
    pub fn builder(what: impl Into<String>, api: Api<K>) -> Builder<K> {
        let shared = Shared {
            objects: RwLock::default(),
            waiting: Mutex::default(),
            read: tokio::sync::watch::Sender::new(None),
            outdated: tokio::sync::watch::Sender::new(None),
            last_sync: Mutex::default(),
            watch_error: Mutex::default(),
            ended: CancellationToken::new(),
        };
        let what = what.into();
        Builder {
            url: api.resource_url().to_owned(),
            client: api.into_client(),
            metrics: WatchMetrics::of(&what),
            what,
            config: watcher::Config::default(),
            metadata_only: false,
            trim: Box::new(|_| {}),
            handlers: Vec::new(),
            reconnect_handlers: Vec::new(),
            relist_handlers: Vec::new(),
            informer: Self { shared: Arc::new(shared) },
        }
    }
}

impl<K: Resource> Informer<K> {
    /// Creates an informer with fixed objects and no watch, for tests.
    pub fn fixed(objects: impl IntoIterator<Item = K>) -> Self {
        let objects = objects.into_iter().map(|object| (Key::of(&object), Arc::new(object))).collect();
        let shared = Shared {
            objects: RwLock::new(objects),
            waiting: Mutex::default(),
            read: tokio::sync::watch::Sender::new(Some(Instant::now())),
            outdated: tokio::sync::watch::Sender::new(None),
            last_sync: Mutex::default(),
            watch_error: Mutex::default(),
            ended: CancellationToken::new(),
        };
        Self { shared: Arc::new(shared) }
    }
}

impl<K> Informer<K> {
    /// Returns an object of the store.
    pub fn get(&self, key: &Key) -> Option<Arc<K>> {
        self.shared.objects.read().unwrap_or_else(PoisonError::into_inner).get(key).cloned()
    }

    /// Returns all objects, unordered.
    pub fn list(&self) -> Vec<Arc<K>> {
        self.shared.objects.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// Returns the first object that matches `pick`.
    pub fn find(&self, pick: impl Fn(&K) -> bool) -> Option<Arc<K>> {
        let objects = self.shared.objects.read().unwrap_or_else(PoisonError::into_inner);
        objects.values().find(|object| pick(object)).cloned()
    }

    /// Number of objects.
    pub fn len(&self) -> usize {
        self.shared.objects.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Whether the store is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the first list was read.
    pub fn is_synced(&self) -> bool {
        self.shared.read.borrow().is_some()
    }

    /// How current the store is; objects read after this call are at least as current.
    pub(crate) fn last_sync(&self) -> LastSync {
        *self.last_sync_mut()
    }

    fn last_sync_mut(&self) -> MutexGuard<'_, LastSync> {
        self.shared.last_sync.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Error of the watch, during which the store may be stale; None while the watch is established.
    pub fn watch_error(&self) -> Option<String> {
        self.shared.watch_error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the previous error.
    fn set_watch_error(&self, watch_error: Option<String>) -> Option<String> {
        let mut now = self.shared.watch_error.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *now, watch_error)
    }

    /// Waits for the first list.
    pub async fn synced(&self) {
        // Cannot fail: the sender lives as long as `self`.
        let _ = self.shared.read.subscribe().wait_for(Option::is_some).await;
    }

    /// Relists all objects unless the last list started after `since`, and waits for it. Returns immediately before the first
    /// list, so that an unreadable resource does not block callers that need only other resources; that list will start after
    /// `since`. Also returns when the watch is stopped.
    pub(crate) async fn relisted(&self, since: Instant) {
        if !self.is_synced() {
            return;
        }
        self.shared.outdated.send_replace(Some(since));
        let mut read = self.shared.read.subscribe();
        tokio::select! {
            _ = read.wait_for(|read| *read >= Some(since)) => {}
            () = self.shared.ended.cancelled() => {}
        }
    }

    /// Waits until a relist is required.
    async fn outdated(&self) {
        let read = *self.shared.read.borrow();
        let mut outdated = self.shared.outdated.subscribe();
        // Cannot fail, as above.
        let _ = outdated.wait_for(|since| *since > read).await;
    }

    /// Calls `check` with the object, now and after each change, until it returns a value. Returns None at the deadline, or when
    /// the watch is stopped.
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
            // Subscribe before the check, so that no change is missed.
            changed.as_mut().enable();
            if let Some(answer) = check(self.get(key).as_ref()) {
                return Some(answer);
            }
            tokio::select! {
                () = &mut changed => {}
                () = self.shared.ended.cancelled() => return None,
                () = tokio::time::sleep_until(deadline) => return None,
            }
        }
    }

    /// Wakes all waiters of `key`, for checks that depend on more than the object.
    pub fn wake(&self, key: &Key) {
        let waiting = self.shared.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(notify) = waiting.get(key) {
            notify.notify_waiters();
        }
    }
}

/// A registered waiter; the last one of a key removes the entry.
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
        // Two references: the map's and this one.
        if Arc::strong_count(&self.notify) <= 2 {
            waiting.remove(self.key);
            shrink_map(&mut waiting);
        }
    }
}

impl<K> Builder<K>
where
    K: Resource + DeserializeOwned + Clone + Debug + Send + Sync + 'static,
{
    /// Watches only objects that match these selectors.
    #[must_use]
    pub fn config(mut self, config: watcher::Config) -> Self {
        self.config = config;
        self
    }

    /// Requests only the metadata of objects.
    #[must_use]
    pub fn metadata_only(mut self) -> Self {
        self.metadata_only = true;
        self
    }

    /// Removes unused fields before an object is stored. Managed fields are always removed.
    #[must_use]
    pub fn trim(mut self, trim: impl Fn(&mut K) + Send + Sync + 'static) -> Self {
        self.trim = Box::new(trim);
        self
    }

    /// Calls `handler` after every change, on the watch task: it must not block.
    #[must_use]
    pub fn on_change(mut self, handler: impl Fn(&Change<'_, K>) + Send + Sync + 'static) -> Self {
        self.handlers.push(Box::new(handler));
        self
    }

    /// Calls `handler` when the watch is established, and after each reconnect, on the watch task: it must not block.
    #[must_use]
    pub fn on_reconnect(mut self, handler: impl Fn() + Send + Sync + 'static) -> Self {
        self.reconnect_handlers.push(Box::new(handler));
        self
    }

    /// Calls `handler` after each complete list and the changes that it shows, on the watch task: it must not block. Objects that
    /// were created and deleted since the previous watch emit no change.
    #[must_use]
    pub fn on_relist(mut self, handler: impl Fn() + Send + Sync + 'static) -> Self {
        self.relist_handlers.push(Box::new(handler));
        self
    }

    /// The informer; its store is empty until [`Self::start`].
    pub fn informer(&self) -> Informer<K> {
        self.informer.clone()
    }

    /// Starts the watch. `check` passes while it is established.
    pub fn start(self, check: Check, stop: CancellationToken) -> Informer<K> {
        let informer = self.informer.clone();
        let relisting = informer.clone();
        check.informers().add(Box::new(move |since| {
            let informer = relisting.clone();
            Box::pin(async move { informer.relisted(since).await })
        }));
        let ended = informer.shared.ended.clone();
        let name = format!("watch of {}", self.what);
        supervise::background(name, stop.clone(), async move {
            tokio::select! {
                () = self.watch(check) => {}
                () = stop.cancelled() => {}
            }
            ended.cancel();
        });
        informer
    }

    /// Trims an object for the store. A malformed object is logged and skipped; the store keeps its previous state.
    fn decode(&self, object: DeserializeGuard<K>) -> Result<Arc<K>, Key> {
        match object.0 {
            Ok(mut object) => {
                object.meta_mut().managed_fields = None;
                (self.trim)(&mut object);
                Ok(Arc::new(object))
            }
            Err(invalid) => {
                let ObjectMeta { name, namespace, .. } = invalid.metadata;
                let name = Key::new(namespace.unwrap_or_default(), name.unwrap_or_default());
                tracing::error!(object = %name, error = invalid.error, "ignoring a malformed object of {}", self.what);
                Err(name)
            }
        }
    }

    fn store(&self, object: DeserializeGuard<K>) {
        let Ok(object) = self.decode(object) else { return };
        let key = Key::of(&*object);
        let old = self.objects_mut().insert(key.clone(), object.clone());
        self.notify(&Change { key: &key, old: old.as_ref(), new: Some(&object) });
    }

    fn remove(&self, key: &Key) {
        let old = {
            let mut objects = self.objects_mut();
            let old = objects.remove(key);
            shrink_map(&mut objects);
            old
        };
        if old.is_some() {
            self.notify(&Change { key, old: old.as_ref(), new: None });
        }
    }

    /// Replaces the store by a new list and reports the differences as changes.
    fn replace(&self, fresh: HashMap<Key, Arc<K>>, last_sync: LastSync) {
        let before = std::mem::replace(&mut *self.objects_mut(), fresh);
        // Handlers may read the store's currency.
        *self.informer.last_sync_mut() = last_sync;
        // Only this task modifies the store, so it does not change during the loop.
        for (key, old) in &before {
            if self.informer.get(key).is_none() {
                self.notify(&Change { key, old: Some(old), new: None });
            }
        }
        for new in self.informer.list() {
            let key = Key::of(&*new);
            let old = before.get(&key);
            // Compare more than the resource version: a restored server may reuse it for another state.
            if old.is_none_or(|old| old.meta() != new.meta()) {
                self.notify(&Change { key: &key, old, new: Some(&new) });
            }
        }
        self.informer.shared.read.send_replace(last_sync.list_started);
    }

    fn notify(&self, change: &Change<'_, K>) {
        for handler in &self.handlers {
            handler(change);
        }
        self.informer.wake(change.key);
    }

    fn objects_mut(&self) -> std::sync::RwLockWriteGuard<'_, HashMap<Key, Arc<K>>> {
        self.informer.shared.objects.write().unwrap_or_else(PoisonError::into_inner)
    }
}
