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
use crate::latest::Latest;

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
    /// Whether nothing answers.
    is_away: AtomicBool,
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

fn started(server: &Arc<Server>) -> (Informer<ConfigMap>, Health, CancellationToken) {
    let answering = server.clone();
    let service = tower::service_fn(move |request: Request<Body>| {
        let answer = match answering.is_away.load(Ordering::SeqCst) {
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

async fn shown(informer: &Informer<ConfigMap>, text: &str) {
    let shows = |object: Option<&Arc<ConfigMap>>| {
        (object?.data.as_ref()?.get("text").map(String::as_str) == Some(text)).then_some(())
    };
    let by = Instant::now() + 2 * SILENCE;
    informer.wait_for(&Key::new("n", "c"), by, shows).await.unwrap_or_else(|| panic!("never shows {text}"));
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_expired_is_begun_anew_and_those_who_wait_see_what_they_wait_for() {
    let server = Arc::new(Server::default());
    *server.shows.lock().unwrap() = ("1".to_owned(), "old".to_owned());
    let gone = json!({"type": "ERROR", "object": {"code": 410, "message": "too old", "status": "Failure"}});
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
    *server.says.lock().unwrap() = vec![Ok(bookmark("9"))];
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
    *server.says.lock().unwrap() = vec![Ok(bookmark("9"))];
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
    let gone = json!({"type": "ERROR", "object": {"code": 410, "message": "too old", "status": "Failure"}});
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

#[tokio::test(start_paused = true)]
async fn a_server_that_is_back_is_asked_again_soon_though_it_turns_us_away_and_has_forgotten_all() {
    let server = Arc::new(Server::default());
    *server.shows.lock().unwrap() = ("1".to_owned(), "first".to_owned());
    server.ends.store(true, Ordering::SeqCst);
    let (informer, _health, stop) = started(&server);
    // Each watch says something, and ends: so it is not one in the middle that breaks, whose end is noticed late.
    *server.says.lock().unwrap() = (2..1000).map(|version: u32| Ok(bookmark(&version.to_string()))).collect();
    while informer.told().version < Some(3) {
        tokio::time::sleep(PAUSES.0).await;
    }
    server.is_away.store(true, Ordering::SeqCst);
    while informer.trouble().is_none() {
        tokio::time::sleep(PAUSES.0).await;
    }
    tokio::time::sleep(10 * PAUSES.1).await;
    assert_eq!(server.lists.load(Ordering::SeqCst), 1, "it knows where it was");
    *server.says.lock().unwrap() = vec![Err(403), Err(403), Err(410)];
    *server.shows.lock().unwrap() = ("9".to_owned(), "now".to_owned());
    server.is_away.store(false, Ordering::SeqCst);
    let begun = Instant::now();
    shown(&informer, "now").await;
    assert!(server.says.lock().unwrap().is_empty());
    // The pause that it was in, and three that grow from the first.
    assert!(begun.elapsed() <= PAUSES.1 + 7 * PAUSES.0, "{:?}", begun.elapsed());
    stop.cancel();
}

fn own(version: &str) -> (Key, ConfigMap) {
    let metadata = json!({"name": "own", "namespace": "n", "resourceVersion": version});
    (Key::new("n", "own"), k8s_openapi::serde_json::from_value(json!({"metadata": metadata})).unwrap())
}

#[tokio::test(start_paused = true)]
async fn an_own_write_is_believed_until_the_watch_is_past_it() {
    let server = Arc::new(Server::default());
    *server.shows.lock().unwrap() = ("1".to_owned(), "other".to_owned());
    *server.says.lock().unwrap() = vec![Ok(bookmark("6"))];
    let (informer, _health, stop) = started(&server);
    let latest = Latest::new(informer.clone());
    let (key, later) = own("7");
    latest.created(later);
    while informer.told().version < Some(6) {
        tokio::time::sleep(PAUSES.0).await;
    }
    assert!(latest.get(&key).is_some());
    // It came, and went again, before the watch was there.
    let (key, earlier) = own("5");
    latest.created(earlier);
    assert!(latest.get(&key).is_none());
    // A server that went back gives versions anew that the watch is past.
    let changed: ConfigMap = k8s_openapi::serde_json::from_value(object("3", "changed")).unwrap();
    latest.changed(changed);
    let now = latest.get(&Key::new("n", "c")).unwrap();
    assert_eq!(now.metadata.resource_version.as_deref(), Some("3"));
    assert_eq!(server.lists.load(Ordering::SeqCst), 1);
    stop.cancel();
}

#[tokio::test(start_paused = true)]
async fn an_own_write_is_believed_no_longer_once_all_was_read_since() {
    let server = Arc::new(Server::default());
    *server.shows.lock().unwrap() = ("1".to_owned(), "restored".to_owned());
    let (informer, _health, stop) = started(&server);
    informer.synced().await;
    let latest = Latest::new(informer);
    let (key, later) = own("7");
    latest.created(later);
    tokio::time::sleep(SILENCE).await;
    assert!(latest.get(&key).is_some());
    while server.lists.load(Ordering::SeqCst) < 2 {
        tokio::time::sleep(PAUSES.1).await;
    }
    assert!(latest.get(&key).is_none());
    stop.cancel();
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_a_server_closes_while_it_tells_something_is_resumed_without_ever_longer_pauses() {
    let server = Arc::new(Server::default());
    *server.shows.lock().unwrap() = ("1".to_owned(), "first".to_owned());
    let told = |version: u32| Ok(json!({"type": "MODIFIED", "object": object(&version.to_string(), "next")}));
    *server.says.lock().unwrap() = (2..=20).map(told).collect();
    server.ends.store(true, Ordering::SeqCst);
    let begun = Instant::now();
    let (informer, _health, stop) = started(&server);
    while informer.told().version < Some(20) {
        tokio::time::sleep(PAUSES.0).await;
    }
    assert!(begun.elapsed() <= 20 * PAUSES.0, "{:?}", begun.elapsed());
    assert_eq!(server.lists.load(Ordering::SeqCst), 1);
    stop.cancel();
}

#[tokio::test(start_paused = true)]
async fn who_begins_to_lead_reads_what_a_silent_watch_did_not_tell() {
    let server = Arc::new(Server::default());
    *server.shows.lock().unwrap() = ("1".to_owned(), "old".to_owned());
    let (informer, health, stop) = started(&server);
    informer.synced().await;
    // The clock stands still by itself.
    tokio::time::sleep(PAUSES.0).await;
    *server.shows.lock().unwrap() = ("9".to_owned(), "new".to_owned());
    let begun = Instant::now();
    health.informers().reach_the_present().await;
    assert!(begun.elapsed() < PAUSES.0, "{:?}", begun.elapsed());
    let seen = informer.get(&Key::new("n", "c")).unwrap();
    assert_eq!(seen.data.as_ref().unwrap()["text"], "new");
    assert_eq!(server.lists.load(Ordering::SeqCst), 2);
    // The next term begins with a list of its own, also while nobody answers: it is waited for.
    server.is_away.store(true, Ordering::SeqCst);
    tokio::time::sleep(PAUSES.0).await;
    let reaching = health.informers().reach_the_present();
    assert!(tokio::time::timeout(SILENCE, reaching).await.is_err());
    stop.cancel();
    health.informers().reach_the_present().await;
}

#[tokio::test(start_paused = true)]
async fn one_that_was_never_read_holds_up_nobody_who_does_not_wait_for_it() {
    let server = Arc::new(Server::default());
    server.is_away.store(true, Ordering::SeqCst);
    let (informer, health, stop) = started(&server);
    health.informers().reach_the_present().await;
    assert!(!informer.is_synced());
    stop.cancel();
}
