//! A watched, trimmed copy of objects that many callers share: they read it, wait on it, or are told of
//! changes. One watch serves all of them, so no call makes requests of its own to find something out. Objects of which
//! there are many are best watched as a type of [`lean`](crate::lean).

mod present;
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
use process_kit::memory::give_back;
use process_kit::supervise;

pub(crate) use present::Informers;

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
    /// When everything was asked for that was read last; none before the first list.
    read: tokio::sync::watch::Sender<Option<Instant>>,
    /// Everything is to be read anew, unless it was asked for after this.
    outdated: tokio::sync::watch::Sender<Option<Instant>>,
    told: Mutex<Told>,
    trouble: Mutex<Option<String>>,
    ended: CancellationToken,
}

/// How far the server has told.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Told {
    /// The version up to which it did, where that is a number. A server that went back to an older state may be behind it.
    pub(crate) version: Option<u64>,
    /// When everything was asked for the last time that it was read.
    pub(crate) read: Option<Instant>,
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
    client: Client,
    url: String,
    what: String,
    config: watcher::Config,
    metadata_only: bool,
    trim: Trim<K>,
    handlers: Vec<Handler<K>>,
    returns: Vec<Box<dyn Fn() + Send + Sync>>,
    reads: Vec<Box<dyn Fn() + Send + Sync>>,
    informer: Informer<K>,
}

impl<K> Informer<K>
where
    K: Resource + DeserializeOwned + Clone + Debug + Send + Sync + 'static,
{
    /// Prepares an informer. `what` names the objects in logs and health.
    pub fn builder(what: impl Into<String>, api: Api<K>) -> Builder<K> {
        let shared = Shared {
            objects: RwLock::default(),
            waiting: Mutex::default(),
            read: tokio::sync::watch::Sender::new(None),
            outdated: tokio::sync::watch::Sender::new(None),
            told: Mutex::default(),
            trouble: Mutex::default(),
            ended: CancellationToken::new(),
        };
        Builder {
            url: api.resource_url().to_owned(),
            client: api.into_client(),
            what: what.into(),
            config: watcher::Config::default(),
            metadata_only: false,
            trim: Box::new(|_| {}),
            handlers: Vec::new(),
            returns: Vec::new(),
            reads: Vec::new(),
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
            read: tokio::sync::watch::Sender::new(Some(Instant::now())),
            outdated: tokio::sync::watch::Sender::new(None),
            told: Mutex::default(),
            trouble: Mutex::default(),
            ended: CancellationToken::new(),
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
        self.shared.read.borrow().is_some()
    }

    /// What is looked at after this is no older.
    pub(crate) fn told(&self) -> Told {
        *self.told_mut()
    }

    fn told_mut(&self) -> MutexGuard<'_, Told> {
        self.shared.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why what is known may be behind: the watch is down. None while it is up.
    pub fn trouble(&self) -> Option<String> {
        self.shared.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Gives what it was before.
    fn set_trouble(&self, trouble: Option<String>) -> Option<String> {
        let mut now = self.shared.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *now, trouble)
    }

    /// Waits for the first list.
    pub async fn synced(&self) {
        // The sender lives as long as `self`, so waiting can't fail.
        let _ = self.shared.read.subscribe().wait_for(Option::is_some).await;
    }

    /// Has everything read anew that was asked for before `since`, and waits for that. Whoever relies on nothing but the
    /// first list is not held up by one that can't be read: that list is newer than `since`, when it comes. Ends with the
    /// watch, too.
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

    /// Waits until everything must be read anew.
    async fn outdated(&self) {
        let read = *self.shared.read.borrow();
        let mut outdated = self.shared.outdated.subscribe();
        // As above: this can't fail.
        let _ = outdated.wait_for(|since| *since > read).await;
    }

    /// Waits until `check` answers about the object, looking again at each of its changes. None when the
    /// deadline came first, or the watch ended, as it does when the process is stopped.
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
                () = self.shared.ended.cancelled() => return None,
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
            give_back(&mut waiting);
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

    /// Asks the server for the metadata of the objects alone.
    #[must_use]
    pub fn metadata_only(mut self) -> Self {
        self.metadata_only = true;
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

    /// Is told when the watch is up, at first and after it was down, on the watch's own task: it must not block.
    #[must_use]
    pub fn on_return(mut self, told: impl Fn() + Send + Sync + 'static) -> Self {
        self.returns.push(Box::new(told));
        self
    }

    /// Is told when everything was read anew, after the changes that this showed: what came and went since the last that
    /// was heard was in none of them. On the watch's own task: it must not block.
    #[must_use]
    pub fn on_read(mut self, told: impl Fn() + Send + Sync + 'static) -> Self {
        self.reads.push(Box::new(told));
        self
    }

    /// The informer, which stays empty until [`Self::start`].
    pub fn informer(&self) -> Informer<K> {
        self.informer.clone()
    }

    /// Starts watching. `check` passes while the watch is up.
    pub fn start(self, check: Check, stop: CancellationToken) -> Informer<K> {
        let informer = self.informer.clone();
        check.informers().add(&informer);
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

    /// The object without what nobody reads. One that can't be decoded is reported and left out, so that
    /// it doesn't stop the others; what was known of it before is kept.
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
                tracing::error!(object = %name, error = invalid.error, "malformed object among {}: left out", self.what);
                Err(name)
            }
        }
    }

    fn take(&self, object: DeserializeGuard<K>) {
        let Ok(object) = self.decode(object) else { return };
        let key = Key::of(&*object);
        let old = self.objects_mut().insert(key.clone(), object.clone());
        self.tell(&Change { key: &key, old: old.as_ref(), new: Some(&object) });
    }

    fn remove(&self, key: &Key) {
        let old = {
            let mut objects = self.objects_mut();
            let old = objects.remove(key);
            give_back(&mut objects);
            old
        };
        if old.is_some() {
            self.tell(&Change { key, old: old.as_ref(), new: None });
        }
    }

    /// Takes a fresh list: what it lacks is gone, what it has is new or changed.
    fn replace(&self, fresh: HashMap<Key, Arc<K>>, told: Told) {
        let before = std::mem::replace(&mut *self.objects_mut(), fresh);
        // Whoever is told below looks at what is known by then.
        *self.informer.told_mut() = told;
        // Nobody else changes the copy, so it stays as it is while all that is told.
        for (key, old) in &before {
            if self.informer.get(key).is_none() {
                self.tell(&Change { key, old: Some(old), new: None });
            }
        }
        for new in self.informer.list() {
            let key = Key::of(&*new);
            let old = before.get(&key);
            // Not by the version alone: a server that went back in time gives one that was seen to another state.
            if old.is_none_or(|old| old.meta() != new.meta()) {
                self.tell(&Change { key: &key, old, new: Some(&new) });
            }
        }
        self.informer.shared.read.send_replace(told.read);
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
