//! The list and watch behind an informer.
//!
//! A watch that ends is resumed where it was; where that is not possible (410), and where it gave no sign of life, all
//! is read anew. Whoever waits on the informer waits on: what the fresh list shows is told as changes.
//!
//! Objects are decoded one by one into what is kept of them, and a list page by page, so that the whole of it is never in
//! memory. Only where one of them is malformed is it all decoded a second time, in the costly way that tells which.

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

use super::{Builder, Key, Told};
use crate::client::chain;
use crate::health::Check;
use crate::latest::number;

/// An API server sends a bookmark each minute when nothing else is to be said, unless it keeps no cache of the resource
/// (as of events), or nothing at all was written since the watch began, as far as that cache has heard, which without
/// `--watch-progress-notify-interval` of etcd it mostly hasn't. A watch that had bookmarks and is silent for longer is one
/// of these, or dead, or of a server that went back in time (a restored etcd), which has nothing to tell until it is there
/// again.
const SILENCE: Duration = Duration::from_secs(90);
/// The first and the longest pause before a watch is begun anew. Calls with deadlines wait behind this.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_millis(1500));
/// How long the server is asked to keep a watch open: the first, and how many seconds may come to that, so that not all
/// watches of all clients end at once.
const LASTS: (Duration, u32) = (Duration::from_secs(200), 90);
/// How long after that a server that sends no bookmarks is waited for.
const MARGIN: Duration = Duration::from_secs(5);
/// How many objects a page of a list has.
const PAGE: u32 = 500;

/// Where a watch is.
#[derive(Default)]
struct Place {
    /// Up to where it was told; none where all must be read anew.
    version: Option<String>,
    /// Whether there are bookmarks.
    bookmarks: bool,
    /// Whether the next that is told holds a malformed object.
    malformed: bool,
    /// Whether the server can't have been put back to an older state since it told of that version.
    unbroken: bool,
}

/// Why a watch is over.
enum Over {
    /// The server closed it, as it does now and then.
    Closed,
    /// It can't be resumed: what it would tell next is forgotten.
    Expired(String),
    /// An object was malformed.
    Malformed,
    /// Everything is to be read anew.
    Outdated,
    /// The server, or our rights.
    Refused(String),
    /// The link, or no server.
    Broken(String),
}

impl From<Error> for Over {
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
        self.down(&check, format!("the first list of {} was not read yet", self.what));
        let mut place = Place::default();
        let (mut pause, mut was_broken) = (PAUSES.0, false);
        loop {
            let (begun, since) = (Instant::now(), place.version.clone());
            let over = self.round(&mut place, &check).await;
            let (is_closed, is_broken) = (matches!(over, Over::Closed), matches!(over, Over::Broken(_)));
            place.unbroken &= is_closed;
            match over {
                Over::Closed => {}
                Over::Malformed => place.malformed = true,
                Over::Outdated => {
                    place.version = None;
                    continue;
                }
                Over::Expired(why) => {
                    tracing::info!("the watch of {} has expired ({why}): reading them anew", self.what);
                    place.version = None;
                }
                Over::Refused(why) | Over::Broken(why) => {
                    let reason = format!("cannot watch {}: {why}", self.what);
                    if self.informer.trouble().is_none() {
                        tracing::warn!("{reason}; trying again");
                    }
                    self.down(&check, reason);
                }
            }
            // A server closes the watch of one who falls behind, who must not fall behind more by waiting.
            let told_something = since.is_some() && place.version != since;
            // One that is there again turns us away while it starts, and has forgotten where we were.
            let is_back = was_broken && !is_broken && pause == PAUSES.1;
            if begun.elapsed() > PAUSES.1 || (is_closed && told_something) || is_back {
                pause = PAUSES.0;
            }
            was_broken = is_broken;
            tokio::time::sleep(pause.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
            pause = (2 * pause).min(PAUSES.1);
        }
    }

    /// Reads everything where that must be, and goes on from there until the watch is over.
    async fn round(&self, place: &mut Place, check: &Check) -> Over {
        let since = match place.version.clone() {
            Some(since) => since,
            None => match self.read().await {
                Ok(read) => {
                    place.unbroken = true;
                    place.version.insert(read).clone()
                }
                Err(error) => return error.into(),
            },
        };
        let lasts = LASTS.0 + Duration::from_secs(fastrand::u32(..LASTS.1).into());
        let parameters = WatchParams {
            label_selector: self.config.label_selector.clone(),
            field_selector: self.config.field_selector.clone(),
            timeout: Some(u32::try_from(lasts.as_secs()).unwrap_or(u32::MAX)),
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
        let is_tolerant = std::mem::take(&mut place.malformed);
        let begun = Instant::now();
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
        let mut asked = false;
        loop {
            let silence = if place.bookmarks { SILENCE } else { lasts + MARGIN };
            let event = tokio::select! {
                event = tokio::time::timeout(silence, events.next()) => event,
                () = self.informer.outdated() => return Over::Outdated,
            };
            let event = match event {
                Ok(Some(Ok(event))) => event,
                Ok(None) => {
                    // Before its time it is a server that stops, and another may come.
                    place.unbroken &= begun.elapsed() >= lasts;
                    return Over::Closed;
                }
                Ok(Some(Err(error))) if !is_tolerant && is_malformed(&error) => return Over::Malformed,
                Ok(Some(Err(error))) => return error.into(),
                // Without bookmarks it is silent for longer than it was to last.
                Err(_) if place.bookmarks && place.unbroken && !asked => {
                    match self.has_reached(place.version.as_deref()).await {
                        Ok(true) => {
                            asked = true;
                            continue;
                        }
                        outcome => {
                            place.version = None;
                            let behind = "the server went back to an older state";
                            return outcome.map_or_else(Over::from, |_| Over::Refused(behind.to_owned()));
                        }
                    }
                }
                Err(_) => {
                    place.version = None;
                    return Over::Broken(format!("nothing was heard for {silence:?}"));
                }
            };
            let seen = match event {
                WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                    let seen = object.resource_version();
                    self.take(object);
                    seen
                }
                WatchEvent::Deleted(object) => {
                    self.remove(&Key::of(&object));
                    object.resource_version()
                }
                WatchEvent::Bookmark(bookmark) => {
                    place.bookmarks = true;
                    Some(bookmark.metadata.resource_version)
                }
                WatchEvent::Error(status) => {
                    place.version = None;
                    return Error::Api(status).into();
                }
            };
            if let Some(seen) = seen {
                self.informer.told_mut().version = number(&seen);
                place.version = Some(seen);
            }
            (place.unbroken, asked) = (true, false);
        }
    }

    /// Whether the server is at this version, or later. It looks for that itself, at what is written, and so has something
    /// to tell those who watch from then on.
    async fn has_reached(&self, version: Option<&str>) -> kube::Result<bool> {
        let parameters = ListParams {
            label_selector: self.config.label_selector.clone(),
            field_selector: self.config.field_selector.clone(),
            limit: Some(1),
            ..ListParams::default()
        };
        let request = Request::new(&self.url).list(&parameters).map_err(Error::BuildRequest)?;
        let list = self.client.request::<ObjectList<IgnoredAny>>(request).await?;
        let (now, since) =
            (list.metadata.resource_version.as_deref().and_then(number), version.and_then(number));
        Ok(now.is_some() && now >= since)
    }

    /// Reads all objects, page by page; gives the version from which to watch.
    async fn read(&self) -> kube::Result<String> {
        let mut parameters = ListParams {
            label_selector: self.config.label_selector.clone(),
            field_selector: self.config.field_selector.clone(),
            limit: Some(PAGE),
            ..ListParams::default()
        };
        let begun = Instant::now();
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
                // So much was written meanwhile that the rest of the pages is forgotten: all in one, then.
                Err(Error::Api(status)) if status.code == 410 && parameters.limit.is_some() => {
                    fresh.clear();
                    (parameters.limit, parameters.continue_token) = (None, None);
                    continue;
                }
                Err(error) => return Err(error),
            };
            let page = self.keep(&page, &mut fresh).map_err(Error::SerdeError)?;
            parameters.continue_token = page.continue_.filter(|token| !token.is_empty());
            if parameters.continue_token.is_none() {
                let version = page.resource_version.unwrap_or_default();
                self.replace(fresh, Told { version: number(&version), read: Some(begun) });
                self.reads.iter().for_each(|told| told());
                return Ok(version);
            }
        }
    }

    /// Keeps what a page of a list says.
    fn keep(&self, page: &str, fresh: &mut HashMap<Key, Arc<K>>) -> serde_json::Result<ListMeta> {
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
                // It is there, whatever it looks like.
                Err(key) => self.informer.get(&key).and_then(|known| fresh.insert(key, known)),
            };
        }
        Ok(metadata)
    }

    /// The watch is up: what is known is at most a moment old.
    fn up(&self, check: &Check) {
        check.pass();
        let was_up = self.informer.set_trouble(None).is_none();
        if !was_up {
            tracing::info!("watching {}", self.what);
            for told in &self.returns {
                told();
            }
        }
    }

    fn down(&self, check: &Check, reason: String) {
        check.fail(reason.clone());
        self.informer.set_trouble(Some(reason));
    }
}

/// Whether a watch ended with an object that could not be decoded. What can't be read as an event is read as a `Status`
/// then, which needs no fields.
fn is_malformed(error: &Error) -> bool {
    match error {
        Error::SerdeError(_) => true,
        Error::Api(status) => **status == Status::default(),
        _ => false,
    }
}

/// An event whose object was decoded.
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
