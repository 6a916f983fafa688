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
use crate::mutation_cache::MutationCache;

type Answer = Response<UnsyncBoxBody<Bytes, std::convert::Infallible>>;

/// An API server with one object, whose watches send the given events and are then silent.
#[derive(Default)]
struct Server {
    lists: AtomicUsize,
    watches: AtomicUsize,
    /// Version and text of the object in lists.
    object: Mutex<(String, String)>,
    /// Answer of each watch, in order; later watches are silent.
    answers: Mutex<Vec<Result<Value, u16>>>,
    /// Another object in lists.
    other_object: Mutex<Option<Value>>,
    /// Whether a watch ends after its answer.
    ends: AtomicBool,
    /// Whether the server is unreachable.
    is_unreachable: AtomicBool,
}

fn object(version: &str, text: &str) -> Value {
    let metadata = json!({"name": "c", "namespace": "n", "uid": text, "resourceVersion": version});
    json!({"metadata": metadata, "data": {"text": text}})
}

fn bookmark(version: &str) -> Value {
    let object = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"resourceVersion": version}});
    json!({"type": "BOOKMARK", "object": object})
}

impl Server {
    fn answer(&self, request: &Request<Body>) -> Answer {
        let (version, text) = self.object.lock().unwrap().clone();
        if !request.uri().query().unwrap_or_default().contains("watch=true") {
            self.lists.fetch_add(1, Ordering::SeqCst);
            let other_object = self.other_object.lock().unwrap().clone();
            let items: Vec<Value> = [object(&version, &text)].into_iter().chain(other_object).collect();
            let list = json!({"metadata": {"resourceVersion": version}, "items": items});
            return body(200, stream_of(Some(list)).boxed());
        }
        self.watches.fetch_add(1, Ordering::SeqCst);
        let mut answers = self.answers.lock().unwrap();
        let answer = if answers.is_empty() { None } else { Some(answers.remove(0)) };
        match answer {
            Some(Err(code)) => {
                let status =
                    json!({"code": code, "message": "too old", "reason": "Expired", "status": "Failure"});
                body(code, stream_of(Some(status)).boxed())
            }
            Some(Ok(event)) if self.ends.load(Ordering::SeqCst) => body(200, stream_of(Some(event)).boxed()),
            Some(Ok(event)) => body(200, stream_of(Some(event)).chain(futures::stream::pending()).boxed()),
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

fn start_informer(server: &Arc<Server>) -> (Informer<ConfigMap>, Health, CancellationToken) {
    let answering = server.clone();
    let service = tower::service_fn(move |request: Request<Body>| {
        let answer = match answering.is_unreachable.load(Ordering::SeqCst) {
            true => Err(std::io::Error::from(std::io::ErrorKind::ConnectionRefused)),
            false => Ok(answering.answer(&request)),
        };
        async move { answer }
    });
    let (health, stop) = (Health::default(), CancellationToken::new());
    let api = Api::namespaced(Client::new(service, "n"), "n");
    let informer = Informer::builder("ConfigMaps", api).start(health.check("watch", "not yet"), stop.clone());
    (informer, health, stop)
}

async fn wait_for_text(informer: &Informer<ConfigMap>, text: &str) {
    let shows = |object: Option<&Arc<ConfigMap>>| {
        (object?.data.as_ref()?.get("text").map(String::as_str) == Some(text)).then_some(())
    };
    let by = Instant::now() + 2 * MAX_SILENCE;
    informer
        .wait_for(&Key::new("n", "c"), by, shows)
        .await
        .unwrap_or_else(|| panic!("the informer never showed {text}"));
}

#[tokio::test(start_paused = true)]
async fn an_expired_watch_is_restarted_and_waiters_see_the_change() {
    let server = Arc::new(Server::default());
    *server.object.lock().unwrap() = ("1".to_owned(), "old".to_owned());
    let gone = json!({"type": "ERROR", "object": {"code": 410, "message": "too old", "status": "Failure"}});
    *server.answers.lock().unwrap() = vec![Err(410), Ok(gone)];
    let (informer, health, stop) = start_informer(&server);
    informer.synced().await;
    let waiting = tokio::spawn({
        let informer = informer.clone();
        async move { wait_for_text(&informer, "new").await }
    });
    *server.object.lock().unwrap() = ("9".to_owned(), "new".to_owned());
    waiting.await.unwrap();
    while server.watches.load(Ordering::SeqCst) < 3 {
        tokio::time::sleep(BACKOFF.0).await;
    }
    assert!(health.failing().is_empty(), "{:?}", health.failing());
    assert_eq!(server.lists.load(Ordering::SeqCst), 3);
    stop.cancel();
}

#[tokio::test(start_paused = true)]
async fn a_silent_watch_is_replaced_by_a_relist() {
    let server = Arc::new(Server::default());
    *server.object.lock().unwrap() = ("9".to_owned(), "later".to_owned());
    *server.answers.lock().unwrap() = vec![Ok(bookmark("9"))];
    let (informer, health, stop) = start_informer(&server);
    wait_for_text(&informer, "later").await;
    // The server was restored to an older state: a watch from version 9 does not report it.
    *server.object.lock().unwrap() = ("5".to_owned(), "restored".to_owned());
    let started = Instant::now();
    wait_for_text(&informer, "restored").await;
    assert!(started.elapsed() < MAX_SILENCE + BACKOFF.1, "{:?}", started.elapsed());
    // The check passes again although the new watch is silent.
    while !health.failing().is_empty() {
        tokio::time::sleep(BACKOFF.0).await;
    }
    assert!(informer.watch_error().is_none());
    stop.cancel();
}

#[tokio::test(start_paused = true)]
async fn an_idle_watch_is_kept_after_the_server_confirms_its_version() {
    let server = Arc::new(Server::default());
    *server.object.lock().unwrap() = ("9".to_owned(), "quiet".to_owned());
    *server.answers.lock().unwrap() = vec![Ok(bookmark("9"))];
    let (informer, health, stop) = start_informer(&server);
    wait_for_text(&informer, "quiet").await;
    *server.object.lock().unwrap() = ("12".to_owned(), "missed".to_owned());
    tokio::time::sleep(MAX_SILENCE + BACKOFF.1).await;
    let counts = (server.lists.load(Ordering::SeqCst), server.watches.load(Ordering::SeqCst));
    assert_eq!(counts, (2, 1), "lists, watches");
    assert!(health.failing().is_empty(), "{:?}", health.failing());
    // Still silent, so the watch is dead.
    wait_for_text(&informer, "missed").await;
    stop.cancel();
}

#[tokio::test(start_paused = true)]
async fn another_object_under_a_known_version_is_reported() {
    let server = Arc::new(Server::default());
    *server.object.lock().unwrap() = ("9".to_owned(), "later".to_owned());
    let gone = json!({"type": "ERROR", "object": {"code": 410, "message": "too old", "status": "Failure"}});
    *server.answers.lock().unwrap() = vec![Ok(gone)];
    let (informer, _, stop) = start_informer(&server);
    informer.synced().await;
    *server.object.lock().unwrap() = ("9".to_owned(), "restored".to_owned());
    wait_for_text(&informer, "restored").await;
    stop.cancel();
}

#[tokio::test(start_paused = true)]
async fn a_malformed_object_in_a_watch_is_ignored_and_others_are_not() {
    let server = Arc::new(Server::default());
    *server.object.lock().unwrap() = ("1".to_owned(), "old".to_owned());
    let (mut malformed, mut well) = (object("2", "x"), object("3", "new"));
    malformed["data"] = json!("not a map");
    malformed["metadata"]["name"] = json!("m");
    let event = |object: &mut Value| Ok(json!({"type": "MODIFIED", "object": object.take()}));
    let malformed = event(&mut malformed);
    // An event that a watch cannot decode is sent again by the next one.
    *server.answers.lock().unwrap() = vec![malformed.clone(), malformed, event(&mut well)];
    server.ends.store(true, Ordering::SeqCst);
    let (informer, health, stop) = start_informer(&server);
    wait_for_text(&informer, "new").await;
    assert_eq!(informer.len(), 1);
    assert_eq!(server.lists.load(Ordering::SeqCst), 1, "no relist is needed");
    assert!(health.failing().is_empty(), "{:?}", health.failing());
    stop.cancel();
}

#[tokio::test(start_paused = true)]
async fn a_malformed_object_in_a_list_is_ignored() {
    let server = Arc::new(Server::default());
    *server.object.lock().unwrap() = ("1".to_owned(), "text".to_owned());
    let mut malformed = object("1", "x");
    malformed["data"] = json!("not a map");
    malformed["metadata"]["name"] = json!("m");
    *server.other_object.lock().unwrap() = Some(malformed);
    let (informer, _, stop) = start_informer(&server);
    wait_for_text(&informer, "text").await;
    assert_eq!(informer.len(), 1);
    stop.cancel();
}

#[tokio::test(start_paused = true)]
async fn a_failed_watch_is_resumed_and_the_check_passes_without_events() {
    let server = Arc::new(Server::default());
    *server.object.lock().unwrap() = ("1".to_owned(), "same".to_owned());
    *server.answers.lock().unwrap() = vec![Err(500), Err(500)];
    let (informer, health, stop) = start_informer(&server);
    informer.synced().await;
    while server.watches.load(Ordering::SeqCst) < 3 || !health.failing().is_empty() {
        tokio::time::sleep(BACKOFF.0).await;
    }
    assert!(informer.watch_error().is_none());
    assert_eq!(server.lists.load(Ordering::SeqCst), 1, "no relist is needed");
    stop.cancel();
}

#[tokio::test(start_paused = true)]
async fn a_restarted_server_is_retried_soon_although_it_refuses_requests_and_expires_the_version() {
    let server = Arc::new(Server::default());
    *server.object.lock().unwrap() = ("1".to_owned(), "first".to_owned());
    server.ends.store(true, Ordering::SeqCst);
    let (informer, _health, stop) = start_informer(&server);
    // Each watch sends an event and ends, so that the outage is noticed immediately.
    *server.answers.lock().unwrap() =
        (2..1000).map(|version: u32| Ok(bookmark(&version.to_string()))).collect();
    while informer.last_sync().version < Some(3) {
        tokio::time::sleep(BACKOFF.0).await;
    }
    server.is_unreachable.store(true, Ordering::SeqCst);
    while informer.watch_error().is_none() {
        tokio::time::sleep(BACKOFF.0).await;
    }
    tokio::time::sleep(10 * BACKOFF.1).await;
    assert_eq!(server.lists.load(Ordering::SeqCst), 1, "the version is kept");
    *server.answers.lock().unwrap() = vec![Err(403), Err(403), Err(410)];
    *server.object.lock().unwrap() = ("9".to_owned(), "now".to_owned());
    server.is_unreachable.store(false, Ordering::SeqCst);
    let started = Instant::now();
    wait_for_text(&informer, "now").await;
    assert!(server.answers.lock().unwrap().is_empty());
    // The current delay, and three that double from the shortest.
    assert!(started.elapsed() <= BACKOFF.1 + 7 * BACKOFF.0, "{:?}", started.elapsed());
    stop.cancel();
}

fn own_write(version: &str) -> (Key, ConfigMap) {
    let metadata = json!({"name": "own", "namespace": "n", "resourceVersion": version});
    (Key::new("n", "own"), k8s_openapi::serde_json::from_value(json!({"metadata": metadata})).unwrap())
}

#[tokio::test(start_paused = true)]
async fn an_own_write_is_used_until_the_watch_has_passed_it() {
    let server = Arc::new(Server::default());
    *server.object.lock().unwrap() = ("1".to_owned(), "other".to_owned());
    *server.answers.lock().unwrap() = vec![Ok(bookmark("6"))];
    let (informer, _health, stop) = start_informer(&server);
    let cache = MutationCache::new(informer.clone());
    let (key, later) = own_write("7");
    cache.created(later);
    while informer.last_sync().version < Some(6) {
        tokio::time::sleep(BACKOFF.0).await;
    }
    assert!(cache.get(&key).is_some());
    // Created and deleted before the watch began.
    let (key, earlier) = own_write("5");
    cache.created(earlier);
    assert!(cache.get(&key).is_none());
    // A restored server reuses versions that the watch has passed.
    let changed: ConfigMap = k8s_openapi::serde_json::from_value(object("3", "changed")).unwrap();
    cache.changed(changed);
    let now = cache.get(&Key::new("n", "c")).unwrap();
    assert_eq!(now.metadata.resource_version.as_deref(), Some("3"));
    assert_eq!(server.lists.load(Ordering::SeqCst), 1);
    stop.cancel();
}

#[tokio::test(start_paused = true)]
async fn an_own_write_is_dropped_after_a_relist() {
    let server = Arc::new(Server::default());
    *server.object.lock().unwrap() = ("1".to_owned(), "restored".to_owned());
    let (informer, _health, stop) = start_informer(&server);
    informer.synced().await;
    let cache = MutationCache::new(informer);
    let (key, later) = own_write("7");
    cache.created(later);
    tokio::time::sleep(MAX_SILENCE).await;
    assert!(cache.get(&key).is_some());
    while server.lists.load(Ordering::SeqCst) < 2 {
        tokio::time::sleep(BACKOFF.1).await;
    }
    assert!(cache.get(&key).is_none());
    stop.cancel();
}

#[tokio::test(start_paused = true)]
async fn watches_that_end_after_an_event_are_resumed_without_growing_delays() {
    let server = Arc::new(Server::default());
    *server.object.lock().unwrap() = ("1".to_owned(), "first".to_owned());
    let event =
        |version: u32| Ok(json!({"type": "MODIFIED", "object": object(&version.to_string(), "next")}));
    *server.answers.lock().unwrap() = (2..=20).map(event).collect();
    server.ends.store(true, Ordering::SeqCst);
    let started = Instant::now();
    let (informer, _health, stop) = start_informer(&server);
    while informer.last_sync().version < Some(20) {
        tokio::time::sleep(BACKOFF.0).await;
    }
    assert!(started.elapsed() <= 20 * BACKOFF.0, "{:?}", started.elapsed());
    assert_eq!(server.lists.load(Ordering::SeqCst), 1);
    stop.cancel();
}

#[tokio::test(start_paused = true)]
async fn a_new_leader_sees_what_a_silent_watch_did_not_report() {
    let server = Arc::new(Server::default());
    *server.object.lock().unwrap() = ("1".to_owned(), "old".to_owned());
    let (informer, health, stop) = start_informer(&server);
    informer.synced().await;
    // The paused clock does not advance by itself.
    tokio::time::sleep(BACKOFF.0).await;
    *server.object.lock().unwrap() = ("9".to_owned(), "new".to_owned());
    let started = Instant::now();
    health.informers().relist_all().await;
    assert!(started.elapsed() < BACKOFF.0, "{:?}", started.elapsed());
    let seen = informer.get(&Key::new("n", "c")).unwrap();
    assert_eq!(seen.data.as_ref().unwrap()["text"], "new");
    assert_eq!(server.lists.load(Ordering::SeqCst), 2);
    // The next term waits for its own list, also while the server is unreachable.
    server.is_unreachable.store(true, Ordering::SeqCst);
    tokio::time::sleep(BACKOFF.0).await;
    let reaching = health.informers().relist_all();
    assert!(tokio::time::timeout(MAX_SILENCE, reaching).await.is_err());
    stop.cancel();
    health.informers().relist_all().await;
}

#[tokio::test(start_paused = true)]
async fn an_informer_without_a_first_list_does_not_delay_the_leader() {
    let server = Arc::new(Server::default());
    server.is_unreachable.store(true, Ordering::SeqCst);
    let (informer, health, stop) = start_informer(&server);
    health.informers().relist_all().await;
    assert!(!informer.is_synced());
    stop.cancel();
}
