//! List and watch loop of an informer.
//!
//! A closed watch is resumed at its last resource version. If that is impossible (410), or the watch was silent for too
//! long, all objects are listed again; differences are reported as changes, so waiters need not care.
//!
//! Objects are decoded one by one into their trimmed form, and lists page by page, to limit memory. Only if an object is
//! malformed, the page or event is decoded a second time in the slower, tolerant way that identifies the object.

use std::collections::HashMap;
use std::fmt::Debug;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::future::Either;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ListMeta;
use kube::api::{ListParams, ObjectList, WatchEvent, WatchParams};
use kube::core::{DeserializeGuard, Request, Status};
use kube::{Error, Resource, ResourceExt};
use serde::de::{DeserializeOwned, IgnoredAny};
use tokio::time::Instant;

use super::{Builder, Key, LastSync};
use crate::client::chain;
use crate::health::Check;
use crate::resource_version;

/// An API server sends a bookmark every minute on an idle watch, except for resources without a watch cache (Events), or if
/// nothing was written since the watch began as far as the watch cache knows (which without etcd's
/// `--watch-progress-notify-interval` is common). A watch that had bookmarks and is silent for longer is therefore such an
/// idle one, or dead, or its server was restored to an older state and has no news until it reaches that version again.
const MAX_SILENCE: Duration = Duration::from_secs(90);
/// Shortest and longest delay before a watch is restarted. Calls with deadlines wait for this.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_millis(1500));
/// Requested duration of a watch, and maximum jitter in seconds, so that not all watches of all clients end at once.
const WATCH_DURATION: (Duration, u32) = (Duration::from_secs(200), 90);
/// Grace period after that duration, for servers without bookmarks.
const GRACE: Duration = Duration::from_secs(5);
/// Page size of lists.
const PAGE: u32 = 500;

/// Position of a watch.
#[derive(Default)]
struct Position {
    /// Last resource version; None if a list is required.
    version: Option<String>,
    /// Whether the server sends bookmarks.
    bookmarks: bool,
    /// Whether the next event contains a malformed object.
    malformed: bool,
    /// Whether the server cannot have been restored to an older state since it sent that version.
    unbroken: bool,
}

/// Why a watch ended.
enum WatchEnd {
    /// The server closed it, as it does regularly.
    Closed,
    /// It cannot be resumed: its resource version expired.
    Expired(String),
    /// An event contained a malformed object.
    Malformed,
    /// A relist was requested.
    Outdated,
    /// The server refused it, or permissions are missing.
    Refused(String),
    /// The connection failed.
    Broken(String),
}

impl From<Error> for WatchEnd {
    fn from(error: Error) -> Self {
        match &error {
            Error::Api(status) if status.code == 410 => Self::Expired(status.message.clone()),
            Error::Api(_) => Self::Refused(chain(&error)),
            _ => Self::Broken(chain(&error)),
        }
    }
}

impl<K> Builder<K>
where
    K: Resource + DeserializeOwned + Clone + Debug + Send + Sync + 'static,
{
    pub(super) async fn watch(self, check: Check) {
        self.down(&check, format!("the first list of {} has not completed yet", self.what));
        let mut position = Position::default();
        let (mut delay, mut was_broken) = (BACKOFF.0, false);
        loop {
            let (started, since) = (Instant::now(), position.version.clone());
            let end = self.list_and_watch(&mut position, &check).await;
            let (is_closed, is_broken) =
                (matches!(end, WatchEnd::Closed), matches!(end, WatchEnd::Broken(_)));
            position.unbroken &= is_closed;
            match end {
                WatchEnd::Closed => {}
                WatchEnd::Malformed => position.malformed = true,
                WatchEnd::Outdated => {
                    position.version = None;
                    continue;
                }
                WatchEnd::Expired(reason) => {
                    tracing::info!("the watch of {} expired ({reason}), relisting", self.what);
                    position.version = None;
                }
                WatchEnd::Refused(reason) | WatchEnd::Broken(reason) => {
                    let reason = format!("failed to watch {}: {reason}", self.what);
                    // Not each retry, but a new cause, also of the first list.
                    if self.informer.watch_error().as_ref() != Some(&reason) {
                        tracing::warn!("{reason}; retrying");
                    }
                    self.down(&check, reason);
                }
            }
            // A server closes watches of slow clients; a delay would make such a client slower.
            let made_progress = since.is_some() && position.version != since;
            // A restarted server refuses requests while it starts, and may not know the resource version.
            let is_back = was_broken && !is_broken && delay == BACKOFF.1;
            if started.elapsed() > BACKOFF.1 || (is_closed && made_progress) || is_back {
                delay = BACKOFF.0;
            }
            was_broken = is_broken;
            tokio::time::sleep(delay.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
            delay = (2 * delay).min(BACKOFF.1);
        }
    }

    /// Lists all objects if required, and watches until the watch ends.
    async fn list_and_watch(&self, position: &mut Position, check: &Check) -> WatchEnd {
        let since = match position.version.clone() {
            Some(since) => since,
            None => match self.list().await {
                Ok(read) => {
                    position.unbroken = true;
                    position.version.insert(read).clone()
                }
                Err(error) => return error.into(),
            },
        };
        let duration = WATCH_DURATION.0 + Duration::from_secs(fastrand::u32(..WATCH_DURATION.1).into());
        let parameters = WatchParams {
            label_selector: self.config.label_selector.clone(),
            field_selector: self.config.field_selector.clone(),
            timeout: Some(u32::try_from(duration.as_secs()).unwrap_or(u32::MAX)),
            ..WatchParams::default()
        };
        let request = Request::new(&self.url);
        let request = match self.metadata_only {
            true => request.watch_metadata(&parameters, &since),
            false => request.watch(&parameters, &since),
        };
        let request = match request {
            Ok(request) => request,
            Err(error) => return Error::BuildRequest(error).into(),
        };
        let is_tolerant = std::mem::take(&mut position.malformed);
        let started = Instant::now();
        let events = match is_tolerant {
            true => {
                let events = self.client.request_events::<DeserializeGuard<K>>(request).await;
                events.map(Either::Left)
            }
            false => {
                let events = self.client.request_events::<K>(request).await;
                events.map(|events| Either::Right(events.map(|event| event.map(well_formed))))
            }
        };
        let events = match events {
            Ok(events) => events,
            Err(error) => return error.into(),
        };
        let mut events = pin!(events);
        self.up(check);
        let mut confirmed = false;
        loop {
            let silence = if position.bookmarks { MAX_SILENCE } else { duration + GRACE };
            let event = tokio::select! {
                event = tokio::time::timeout(silence, events.next()) => event,
                () = self.informer.outdated() => return WatchEnd::Outdated,
            };
            let event = match event {
                Ok(Some(Ok(event))) => event,
                Ok(None) => {
                    // A watch that ends early ends because the server stops, and another server may take over.
                    position.unbroken &= started.elapsed() >= duration;
                    return WatchEnd::Closed;
                }
                Ok(Some(Err(error))) if !is_tolerant && is_malformed(&error) => return WatchEnd::Malformed,
                Ok(Some(Err(error))) => return error.into(),
                // A silent watch without bookmarks has exceeded its requested duration.
                Err(_) if position.bookmarks && position.unbroken && !confirmed => {
                    match self.has_reached(position.version.as_deref()).await {
                        Ok(true) => {
                            confirmed = true;
                            self.metrics.heard();
                            continue;
                        }
                        outcome => {
                            position.version = None;
                            let restored = "the server was restored to an older state";
                            return outcome
                                .map_or_else(WatchEnd::from, |_| WatchEnd::Refused(restored.to_owned()));
                        }
                    }
                }
                Err(_) => {
                    position.version = None;
                    return WatchEnd::Broken(format!("no event or bookmark for {silence:?}"));
                }
            };
            self.metrics.heard();
            let seen = match event {
                WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                    let seen = object.resource_version();
                    self.store(object);
                    seen
                }
                WatchEvent::Deleted(object) => {
                    self.remove(&Key::of(&object));
                    object.resource_version()
                }
                WatchEvent::Bookmark(bookmark) => {
                    position.bookmarks = true;
                    Some(bookmark.metadata.resource_version)
                }
                WatchEvent::Error(status) => {
                    position.version = None;
                    return Error::Api(status).into();
                }
            };
            if let Some(seen) = seen {
                self.informer.last_sync_mut().version = resource_version::parse(&seen);
                position.version = Some(seen);
            }
            (position.unbroken, confirmed) = (true, false);
        }
    }

    /// Whether the server has reached this version. The list reads from etcd, so the server's watch cache advances, and idle
    /// watches receive bookmarks again.
    async fn has_reached(&self, version: Option<&str>) -> kube::Result<bool> {
        let parameters = ListParams {
            label_selector: self.config.label_selector.clone(),
            field_selector: self.config.field_selector.clone(),
            limit: Some(1),
            ..ListParams::default()
        };
        let request = Request::new(&self.url).list(&parameters).map_err(Error::BuildRequest)?;
        let list = self.client.request::<ObjectList<IgnoredAny>>(request).await?;
        let (now, since) = (
            list.metadata.resource_version.as_deref().and_then(resource_version::parse),
            version.and_then(resource_version::parse),
        );
        Ok(now.is_some() && now >= since)
    }

    /// Lists all objects page by page; returns the resource version for the watch.
    async fn list(&self) -> kube::Result<String> {
        let mut parameters = ListParams {
            label_selector: self.config.label_selector.clone(),
            field_selector: self.config.field_selector.clone(),
            limit: Some(PAGE),
            ..ListParams::default()
        };
        let started = Instant::now();
        let mut fresh = HashMap::new();
        loop {
            let request = Request::new(&self.url);
            let request = match self.metadata_only {
                true => request.list_metadata(&parameters),
                false => request.list(&parameters),
            };
            let request = request.map_err(Error::BuildRequest)?;
            let page = match self.client.request_text(request).await {
                Ok(page) => page,
                // The continue token expired because of many writes: list without pages.
                Err(Error::Api(status)) if status.code == 410 && parameters.limit.is_some() => {
                    fresh.clear();
                    (parameters.limit, parameters.continue_token) = (None, None);
                    continue;
                }
                Err(error) => return Err(error),
            };
            let page = self.decode_page(&page, &mut fresh).map_err(Error::SerdeError)?;
            parameters.continue_token = page.continue_.filter(|token| !token.is_empty());
            if parameters.continue_token.is_none() {
                let version = page.resource_version.unwrap_or_default();
                self.metrics.listed(!self.informer.is_synced());
                self.replace(
                    fresh,
                    LastSync { version: resource_version::parse(&version), list_started: Some(started) },
                );
                self.relist_handlers.iter().for_each(|handler| handler());
                return Ok(version);
            }
        }
    }

    /// Decodes a page of a list.
    fn decode_page(&self, page: &str, fresh: &mut HashMap<Key, Arc<K>>) -> serde_json::Result<ListMeta> {
        let ObjectList { items, metadata, .. } = match serde_json::from_str::<ObjectList<K>>(page) {
            Ok(ObjectList { items, metadata, types }) => {
                let items = items.into_iter().map(|object| DeserializeGuard(Ok(object))).collect();
                ObjectList { items, metadata, types }
            }
            Err(_) => serde_json::from_str::<ObjectList<DeserializeGuard<K>>>(page)?,
        };
        for object in items {
            match self.decode(object) {
                Ok(object) => fresh.insert(Key::of(&*object), object),
                // A malformed object exists, so keep its previous state.
                Err(key) => self.informer.get(&key).and_then(|known| fresh.insert(key, known)),
            };
        }
        Ok(metadata)
    }

    /// Called when the watch is established: the store is current.
    fn up(&self, check: &Check) {
        check.pass();
        self.metrics.set_connected(true);
        let was_up = self.informer.set_watch_error(None).is_none();
        if !was_up {
            tracing::info!("watching {}", self.what);
            for handler in &self.reconnect_handlers {
                handler();
            }
        }
    }

    fn down(&self, check: &Check, reason: String) {
        check.fail(reason.clone());
        self.metrics.set_connected(false);
        self.informer.set_watch_error(Some(reason));
    }
}

/// Whether a watch failed because of an object that cannot be decoded. kube decodes what is not an event as a `Status`, which
/// has no required fields.
fn is_malformed(error: &Error) -> bool {
    match error {
        Error::SerdeError(_) => true,
        Error::Api(status) => **status == Status::default(),
        _ => false,
    }
}

/// Wraps the decoded object of an event.
fn well_formed<K>(event: WatchEvent<K>) -> WatchEvent<DeserializeGuard<K>> {
    let guarded = |object| DeserializeGuard(Ok(object));
    match event {
        WatchEvent::Added(object) => WatchEvent::Added(guarded(object)),
        WatchEvent::Modified(object) => WatchEvent::Modified(guarded(object)),
        WatchEvent::Deleted(object) => WatchEvent::Deleted(guarded(object)),
        WatchEvent::Bookmark(bookmark) => WatchEvent::Bookmark(bookmark),
        WatchEvent::Error(status) => WatchEvent::Error(status),
    }
}

#[cfg(test)]
mod tests;
