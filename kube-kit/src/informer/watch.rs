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

use super::{Builder, Key};
use crate::client::chain;
use crate::health::Check;

/// An API server sends a bookmark each minute when nothing else is to be said, unless it keeps no cache of the resource
/// (as of events), or nothing at all was written since the watch began, as far as that cache has heard, which without
/// `--watch-progress-notify-interval` of etcd it mostly hasn't. A watch that had bookmarks and is silent for longer is one
/// of these, or dead, or of a server that went back in time (a restored etcd), which has nothing to tell until it is there
/// again.
const SILENCE: Duration = Duration::from_secs(90);
/// The first and the longest pause before a watch is begun anew. Calls with deadlines wait behind this.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(4));
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
    /// The link, the server, or our rights.
    Trouble(String),
}

impl From<Error> for Over {
    fn from(error: Error) -> Self {
        match &error {
            Error::Api(status) if status.code == 410 => Self::Expired(status.message.clone()),
            _ => Self::Trouble(chain(&error)),
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
        let mut pause = PAUSES.0;
        loop {
            let begun = Instant::now();
            let over = self.round(&mut place, &check).await;
            place.unbroken &= matches!(over, Over::Closed);
            match over {
                Over::Closed => {}
                Over::Malformed => place.malformed = true,
                Over::Expired(why) => {
                    tracing::info!("the watch of {} has expired ({why}): reading them anew", self.what);
                    place.version = None;
                }
                Over::Trouble(why) => {
                    let reason = format!("cannot watch {}: {why}", self.what);
                    if self.informer.trouble().is_none() {
                        tracing::warn!("{reason}; trying again");
                    }
                    self.down(&check, reason);
                }
            }
            if begun.elapsed() > PAUSES.1 {
                pause = PAUSES.0;
            }
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
        let request = match Request::new(&self.url).watch(&parameters, &since) {
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
            let event = match tokio::time::timeout(silence, events.next()).await {
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
                            let behind =
                                || Over::Trouble("the server went back to an older state".to_owned());
                            return outcome.map_or_else(Over::from, |_| behind());
                        }
                    }
                }
                Err(_) => {
                    place.version = None;
                    return Over::Trouble(format!("nothing was heard for {silence:?}"));
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
            if seen.is_some() {
                place.version = seen;
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
        let number = |version: &str| version.parse::<u64>().ok();
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
        let mut fresh = HashMap::new();
        loop {
            let request = Request::new(&self.url).list(&parameters).map_err(Error::BuildRequest)?;
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
                self.replace(fresh);
                return Ok(page.resource_version.unwrap_or_default());
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
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};

    use http::{Request, Response};
    use http_body_util::StreamBody;
    use http_body_util::combinators::UnsyncBoxBody;
    use hyper::body::{Bytes, Frame};
    use k8s_openapi::api::core::v1::ConfigMap;
    use k8s_openapi::serde_json::{Value, json};
    use kube::client::Body;
    use kube::{Api, Client};
    use tokio_util::sync::CancellationToken;

    use super::super::{Informer, Key};
    use super::*;
    use crate::health::Health;

    type Answer = Response<UnsyncBoxBody<Bytes, std::convert::Infallible>>;

    /// An API server of one object and watches that say what they are told to, and then nothing more.
    #[derive(Default)]
    struct Server {
        lists: AtomicUsize,
        watches: AtomicUsize,
        /// What the list shows of the object.
        shows: Mutex<(String, String)>,
        /// What each watch says; the last one goes on with this for ever.
        says: Mutex<Vec<Result<Value, u16>>>,
        /// Another object of the list.
        besides: Mutex<Option<Value>>,
        /// Whether a watch ends when it has said what it is told to.
        ends: AtomicBool,
    }

    fn object(version: &str, text: &str) -> Value {
        let metadata = json!({"name": "c", "namespace": "n", "uid": text, "resourceVersion": version});
        json!({"metadata": metadata, "data": {"text": text}})
    }

    impl Server {
        fn answer(&self, request: &Request<Body>) -> Answer {
            let (version, text) = self.shows.lock().unwrap().clone();
            if !request.uri().query().unwrap_or_default().contains("watch=true") {
                self.lists.fetch_add(1, Ordering::SeqCst);
                let besides = self.besides.lock().unwrap().clone();
                let items: Vec<Value> = [object(&version, &text)].into_iter().chain(besides).collect();
                let list = json!({"metadata": {"resourceVersion": version}, "items": items});
                return body(200, stream_of(Some(list)).boxed());
            }
            self.watches.fetch_add(1, Ordering::SeqCst);
            let mut says = self.says.lock().unwrap();
            let said = if says.is_empty() { None } else { Some(says.remove(0)) };
            match said {
                Some(Err(code)) => {
                    let status =
                        json!({"code": code, "message": "too old", "reason": "Expired", "status": "Failure"});
                    body(code, stream_of(Some(status)).boxed())
                }
                Some(Ok(event)) if self.ends.load(Ordering::SeqCst) => {
                    body(200, stream_of(Some(event)).boxed())
                }
                Some(Ok(event)) => {
                    body(200, stream_of(Some(event)).chain(futures::stream::pending()).boxed())
                }
                None => body(200, futures::stream::pending().boxed()),
            }
        }
    }

    type Frames = futures::stream::BoxStream<'static, Result<Frame<Bytes>, std::convert::Infallible>>;

    fn stream_of(
        value: Option<Value>,
    ) -> impl futures::Stream<Item = Result<Frame<Bytes>, std::convert::Infallible>> {
        futures::stream::iter(value.map(|value| Ok(Frame::data(Bytes::from(format!("{value}\n"))))))
    }

    fn body(code: u16, frames: Frames) -> Answer {
        Response::builder().status(code).body(UnsyncBoxBody::new(StreamBody::new(frames))).unwrap()
    }

    fn started(server: &Arc<Server>) -> (Informer<ConfigMap>, Health, CancellationToken) {
        let answering = server.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let answer = answering.answer(&request);
            async move { Ok::<_, std::convert::Infallible>(answer) }
        });
        let (health, stop) = (Health::default(), CancellationToken::new());
        let api = Api::namespaced(Client::new(service, "n"), "n");
        let informer =
            Informer::builder("ConfigMaps", api).start(health.check("watch", "not yet"), stop.clone());
        (informer, health, stop)
    }

    async fn shown(informer: &Informer<ConfigMap>, text: &str) {
        let shows = |object: Option<&Arc<ConfigMap>>| {
            (object?.data.as_ref()?.get("text").map(String::as_str) == Some(text)).then_some(())
        };
        let by = Instant::now() + 2 * SILENCE;
        informer
            .wait_for(&Key::new("n", "c"), by, shows)
            .await
            .unwrap_or_else(|| panic!("never shows {text}"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_that_expired_is_begun_anew_and_those_who_wait_see_what_they_wait_for() {
        let server = Arc::new(Server::default());
        *server.shows.lock().unwrap() = ("1".to_owned(), "old".to_owned());
        let gone =
            json!({"type": "ERROR", "object": {"code": 410, "message": "too old", "status": "Failure"}});
        *server.says.lock().unwrap() = vec![Err(410), Ok(gone)];
        let (informer, health, stop) = started(&server);
        informer.synced().await;
        let waiting = tokio::spawn({
            let informer = informer.clone();
            async move { shown(&informer, "new").await }
        });
        *server.shows.lock().unwrap() = ("9".to_owned(), "new".to_owned());
        waiting.await.unwrap();
        while server.watches.load(Ordering::SeqCst) < 3 {
            tokio::time::sleep(PAUSES.0).await;
        }
        assert!(health.failing().is_empty(), "{:?}", health.failing());
        assert_eq!(server.lists.load(Ordering::SeqCst), 3);
        stop.cancel();
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_watch_is_believed_no_longer_and_everything_is_read_anew() {
        let server = Arc::new(Server::default());
        *server.shows.lock().unwrap() = ("9".to_owned(), "later".to_owned());
        let bookmark = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"resourceVersion": "9"}});
        *server.says.lock().unwrap() = vec![Ok(json!({"type": "BOOKMARK", "object": bookmark}))];
        let (informer, health, stop) = started(&server);
        shown(&informer, "later").await;
        // An older state came back: no watch from version 9 on tells of it.
        *server.shows.lock().unwrap() = ("5".to_owned(), "restored".to_owned());
        let begun = Instant::now();
        shown(&informer, "restored").await;
        assert!(begun.elapsed() < SILENCE + PAUSES.1, "{:?}", begun.elapsed());
        // It is well again although the new watch says nothing.
        while !health.failing().is_empty() {
            tokio::time::sleep(PAUSES.0).await;
        }
        assert!(informer.trouble().is_none());
        stop.cancel();
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_of_what_nobody_writes_is_kept_once_the_server_says_where_it_is() {
        let server = Arc::new(Server::default());
        *server.shows.lock().unwrap() = ("9".to_owned(), "quiet".to_owned());
        let bookmark = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"resourceVersion": "9"}});
        *server.says.lock().unwrap() = vec![Ok(json!({"type": "BOOKMARK", "object": bookmark}))];
        let (informer, health, stop) = started(&server);
        shown(&informer, "quiet").await;
        *server.shows.lock().unwrap() = ("12".to_owned(), "missed".to_owned());
        tokio::time::sleep(SILENCE + PAUSES.1).await;
        let asked = (server.lists.load(Ordering::SeqCst), server.watches.load(Ordering::SeqCst));
        assert_eq!(asked, (2, 1), "lists, watches");
        assert!(health.failing().is_empty(), "{:?}", health.failing());
        // Silent even so, it is dead.
        shown(&informer, "missed").await;
        stop.cancel();
    }

    #[tokio::test(start_paused = true)]
    async fn another_object_under_a_version_that_was_seen_is_told() {
        let server = Arc::new(Server::default());
        *server.shows.lock().unwrap() = ("9".to_owned(), "later".to_owned());
        let gone =
            json!({"type": "ERROR", "object": {"code": 410, "message": "too old", "status": "Failure"}});
        *server.says.lock().unwrap() = vec![Ok(gone)];
        let (informer, _, stop) = started(&server);
        informer.synced().await;
        *server.shows.lock().unwrap() = ("9".to_owned(), "restored".to_owned());
        shown(&informer, "restored").await;
        stop.cancel();
    }

    #[tokio::test(start_paused = true)]
    async fn a_malformed_object_is_left_out_and_does_not_stop_the_others() {
        let server = Arc::new(Server::default());
        *server.shows.lock().unwrap() = ("1".to_owned(), "old".to_owned());
        let (mut malformed, mut well) = (object("2", "x"), object("3", "new"));
        malformed["data"] = json!("not a map");
        malformed["metadata"]["name"] = json!("m");
        let event = |object: &mut Value| Ok(json!({"type": "MODIFIED", "object": object.take()}));
        let malformed = event(&mut malformed);
        // What a watch can't decode, the next one is told again.
        *server.says.lock().unwrap() = vec![malformed.clone(), malformed, event(&mut well)];
        server.ends.store(true, Ordering::SeqCst);
        let (informer, health, stop) = started(&server);
        shown(&informer, "new").await;
        assert_eq!(informer.len(), 1);
        assert_eq!(server.lists.load(Ordering::SeqCst), 1, "what was read is still good");
        assert!(health.failing().is_empty(), "{:?}", health.failing());
        stop.cancel();
    }

    #[tokio::test(start_paused = true)]
    async fn a_malformed_object_of_a_list_is_left_out() {
        let server = Arc::new(Server::default());
        *server.shows.lock().unwrap() = ("1".to_owned(), "text".to_owned());
        let mut malformed = object("1", "x");
        malformed["data"] = json!("not a map");
        malformed["metadata"]["name"] = json!("m");
        *server.besides.lock().unwrap() = Some(malformed);
        let (informer, _, stop) = started(&server);
        shown(&informer, "text").await;
        assert_eq!(informer.len(), 1);
        stop.cancel();
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_that_fails_is_resumed_and_well_again_though_nothing_is_said() {
        let server = Arc::new(Server::default());
        *server.shows.lock().unwrap() = ("1".to_owned(), "same".to_owned());
        *server.says.lock().unwrap() = vec![Err(500), Err(500)];
        let (informer, health, stop) = started(&server);
        informer.synced().await;
        while server.watches.load(Ordering::SeqCst) < 3 || !health.failing().is_empty() {
            tokio::time::sleep(PAUSES.0).await;
        }
        assert!(informer.trouble().is_none());
        assert_eq!(server.lists.load(Ordering::SeqCst), 1, "what was read is still good");
        stop.cancel();
    }
}
