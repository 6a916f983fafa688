//! Clients whose certificate is for one account: what exists for them, what they may do, and that nothing else shows. Runs as
//! root.

use std::fs;

use crate::support::*;
use infra_api::{
    Account, Client, ClientError, ClientOptions, Health, List, Owner, Problem, ProblemCode, SnapshotSpec,
    TAKEN_BY_LABEL, Volume, VolumeSpec,
};
use rcgen::{CertificateParams, DistinguishedName, DnType, Issuer, KeyPair};
use reqwest::Method;
use serde::de::DeserializeOwned;
use uuid::Uuid;

fn account(name: &str) -> Account {
    Account::new(name).unwrap()
}

fn owner(name: &str) -> Owner {
    Owner { account: account(name), class: "gold".into() }
}

fn of_account(name: &str) -> VolumeSpec {
    VolumeSpec { owner: owner(name), ..size(MIB) }
}

/// Issues the certificate of a backup; its files have the name `backup-ACCOUNT`.
fn issue(site: &Site, account: &str) {
    let (dir, name) = (site.path("pki"), format!("backup-{account}"));
    let words =
        ["pki", "issue", "--role", "backup", "--account", account, "--name", &name, "--dir", text(&dir)];
    let issued = run(&words);
    assert!(issued.status.success(), "{issued:?}");
}

/// A client with the certificate of these files.
fn client(site: &Site, server: &Server, name: &str) -> Client {
    let file = |name: String| site.path("pki").join(name);
    let (cert, key) = (file(format!("{name}.crt")), file(format!("{name}.key")));
    let url = format!("https://{}", server.api);
    Client::new(&ClientOptions::from_files(url, &file("ca.crt".into()), &cert, &key)).unwrap()
}

fn backup(site: &Site, server: &Server, account: &str) -> Client {
    issue(site, account);
    client(site, server, &format!("backup-{account}"))
}

/// An HTTP client with the certificate of these files, for what the API's client does not show.
struct Http {
    client: reqwest::Client,
    base: String,
}

impl Http {
    fn new(site: &Site, server: &Server, name: &str) -> Self {
        // Installed by the first test of the process.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let read = |name: &str| fs::read(site.path("pki").join(name)).unwrap();
        let authority = reqwest::Certificate::from_pem(&read("ca.crt")).unwrap();
        let pem = [read(&format!("{name}.crt")), read(&format!("{name}.key"))].concat();
        let identity = reqwest::Identity::from_pem(&pem).unwrap();
        let client = reqwest::Client::builder().tls_certs_only([authority]).identity(identity);
        Self { client: client.build().unwrap(), base: format!("https://{}", server.api) }
    }

    /// Status, headers and body of a response, without what differs in each response.
    async fn send(&self, method: Method, path: &str, body: &str) -> (u16, String, String) {
        let request = self.client.request(method, format!("{}{path}", self.base)).body(body.to_owned());
        let request = request.header("content-type", "application/json").header("prefer", "wait=0");
        let response = request.send().await.unwrap();
        let mut headers = response.headers().clone();
        headers.remove("x-request-id");
        headers.remove("date");
        (response.status().as_u16(), format!("{headers:?}"), response.text().await.unwrap())
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> T {
        let (status, _, body) = self.send(Method::GET, path, "").await;
        assert_eq!(status, 200, "{path}: {body}");
        serde_json::from_str(&body).unwrap()
    }
}

/// The problem with which a call must have failed.
fn problem<T: std::fmt::Debug>(outcome: Result<T, ClientError>) -> Problem {
    let error = outcome.unwrap_err();
    error.problem().unwrap_or_else(|| panic!("{error}")).clone()
}

/// A server with volumes `a1` and `a2` of account `a`, `b1` of `b` and `n1` of none, and a snapshot of each of the first, `sa1`
/// and `sb1`.
async fn two_accounts(site: &Site) -> Server {
    let server = site.ready(&[]).await;
    for (id, of) in [("a1", "a"), ("b1", "b"), ("n1", ""), ("a2", "a")] {
        server.client.put_volume(&volume(id), &of_account(of), SOON).await.unwrap();
    }
    for (id, of) in [("sa1", "a1"), ("sb1", "b1")] {
        server.client.put_snapshot(&snapshot(id), &of_volume(of), SOON).await.unwrap();
    }
    server
}

fn of_volume(id: &str) -> SnapshotSpec {
    of(&volume(id))
}

#[tokio::test]
async fn what_is_of_others_does_not_differ_from_what_does_not_exist() {
    let site = Site::reflink();
    let server = two_accounts(&site).await;
    issue(&site, "a");
    let http = Http::new(&site, &server, "backup-a");
    let snapshot_of = |volume: &str| format!(r#"{{"volume":"{volume}"}}"#);
    // IDs of the same length, of which the second does not exist.
    for (method, path, others, body) in [
        (Method::GET, "/v1/volumes/", "b1", ""),
        (Method::HEAD, "/v1/volumes/", "b1", ""),
        (Method::GET, "/v1/volumes/", "n1", ""),
        (Method::DELETE, "/v1/volumes/", "b1", ""),
        (Method::GET, "/v1/snapshots/", "sb1", ""),
        (Method::DELETE, "/v1/snapshots/", "sb1", ""),
        (Method::GET, "/v1/snapshots?volume=", "b1", ""),
        (Method::PUT, "/v1/snapshots/new?of=", "b1", "body"),
        (Method::PUT, "/v1/snapshots/new?of=", "n1", "body"),
    ] {
        let missing = others.replace(['a', 'b', 'n'], "x");
        let mut seen = Vec::new();
        for id in [others, &missing] {
            let body = if body.is_empty() { String::new() } else { snapshot_of(id) };
            let (status, headers, answer) = http.send(method.clone(), &format!("{path}{id}"), &body).await;
            seen.push((status, headers, answer.replace(id, "ID")));
        }
        assert_eq!(seen[0], seen[1], "{method} {path}{others}");
        let expected: &[u16] = match (&method, path) {
            (_, "/v1/snapshots?volume=") => &[200],
            (&Method::DELETE, "/v1/volumes/") => &[403],
            (&Method::DELETE, _) => &[204],
            _ => &[404],
        };
        assert!(expected.contains(&seen[0].0), "{method} {path}{others}: {seen:?}");
    }
    assert!(server.client.get_snapshot(&snapshot("sb1")).await.unwrap().is_some());
    assert!(server.client.get_snapshot(&snapshot("new")).await.unwrap().is_none());
}

#[tokio::test]
async fn lists_have_the_objects_of_the_account_and_no_gaps() {
    let site = Site::reflink();
    let server = two_accounts(&site).await;
    issue(&site, "a");
    let http = Http::new(&site, &server, "backup-a");
    let ids = |list: &List<Volume>| list.items.iter().map(|one| one.id.to_string()).collect::<Vec<_>>();
    let all: List<Volume> = http.get("/v1/volumes").await;
    assert_eq!((ids(&all), all.next), (vec!["a1".to_owned(), "a2".to_owned()], None));
    // A page is full although objects of others lie between, and the last one has no successor although others follow.
    let first: List<Volume> = http.get("/v1/volumes?limit=1").await;
    assert_eq!((ids(&first), first.next.as_deref()), (vec!["a1".to_owned()], Some("a1")));
    let last: List<Volume> = http.get("/v1/volumes?limit=1&continue=a1").await;
    assert_eq!((ids(&last), last.next), (vec!["a2".to_owned()], None));
    let beyond: List<Volume> = http.get("/v1/volumes?continue=a2").await;
    assert_eq!((ids(&beyond), beyond.next), (vec![], None));

    let snapshots: List<infra_api::Snapshot> = http.get("/v1/snapshots?limit=1").await;
    assert_eq!((&snapshots.items[0].id, snapshots.items.len(), snapshots.next), (&snapshot("sa1"), 1, None));
    // All accounts for other roles.
    assert_eq!(server.client.list_volumes(None, None).await.unwrap().items.len(), 4);
    assert_eq!(server.client.list_snapshots(None, None, None).await.unwrap().items.len(), 2);
}

#[tokio::test]
async fn a_backup_takes_snapshots_of_its_own_volumes_and_deletes_only_these() {
    let site = Site::reflink();
    let server = two_accounts(&site).await;
    let (a, b) = (backup(&site, &server, "a"), backup(&site, &server, "b"));
    let taken = a.put_snapshot(&snapshot("t1"), &of_volume("a1"), SOON).await.unwrap();
    assert_eq!(taken.owner, owner("a"));
    assert_eq!(taken.labels[TAKEN_BY_LABEL], "backup");
    assert_eq!(a.put_snapshot(&snapshot("t1"), &of_volume("a1"), SOON).await.unwrap(), taken);
    assert_eq!(a.get_snapshot(&snapshot("t1")).await.unwrap(), Some(taken));

    // Not for another account, and no ID of others.
    let foreign = SnapshotSpec { account: account("b"), ..of_volume("a1") };
    let refused = problem(a.put_snapshot(&snapshot("t2"), &foreign, SOON).await);
    assert_eq!((refused.status, refused.code), (403, ProblemCode::Forbidden));
    assert!(refused.detail.contains("for the account a"), "{refused}");
    let refused = problem(a.put_snapshot(&snapshot("sb1"), &of_volume("a1"), SOON).await);
    assert_eq!(refused.code, ProblemCode::Exists);
    assert!(!refused.detail.contains("b1"), "{refused}");

    let refused = problem(a.delete_snapshot(&snapshot("sa1")).await);
    assert_eq!((refused.status, refused.code), (403, ProblemCode::Forbidden));
    assert!(refused.detail.contains("not taken by this role"), "{refused}");
    for id in ["t1", "sa1", "sb1"] {
        let deleted = b.delete_snapshot(&snapshot(id)).await;
        assert_eq!(deleted.is_ok(), id != "sb1", "{id}");
        assert!(server.client.get_snapshot(&snapshot(id)).await.unwrap().is_some(), "{id}");
    }
    a.delete_snapshot(&snapshot("t1")).await.unwrap();
    assert_eq!(server.client.get_snapshot(&snapshot("t1")).await.unwrap(), None);
    // Its volumes stay readable, and are changed by others only.
    assert!(a.get_volume(&volume("a1")).await.unwrap().is_some());
    assert_eq!(code(a.delete_volume(&volume("a1")).await), ProblemCode::Forbidden);
    assert_eq!(code(a.put_owner(&volume("a1"), &owner("b")).await), ProblemCode::Forbidden);
}

#[tokio::test]
async fn access_follows_the_owner_of_a_volume_at_once() {
    let site = Site::reflink();
    let server = two_accounts(&site).await;
    let (a, b) = (backup(&site, &server, "a"), backup(&site, &server, "b"));
    let id = volume("a1");
    a.put_snapshot(&snapshot("t1"), &of_volume("a1"), SOON).await.unwrap();
    server.client.put_owner(&id, &owner("b")).await.unwrap();
    assert_eq!(a.get_volume(&id).await.unwrap(), None);
    assert_eq!(a.list_volumes(None, None).await.unwrap().items.len(), 1);
    assert_eq!(code(a.put_snapshot(&snapshot("t2"), &of_volume("a1"), SOON).await), ProblemCode::NotFound);
    assert!(b.get_volume(&id).await.unwrap().is_some());
    assert_eq!(b.put_snapshot(&snapshot("t3"), &of_volume("a1"), SOON).await.unwrap().owner, owner("b"));
    // What was taken before stays with whom it counts for, also when the volume is deleted.
    server.client.delete_volume(&id).await.unwrap();
    let exist = async |client: &Client| {
        let all = client.list_snapshots(Some(&id), None, None).await.unwrap().items;
        all.iter().map(|one| one.id.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(exist(&a).await, ["sa1", "t1"]);
    assert_eq!(exist(&b).await, ["t3"]);
}

#[tokio::test]
async fn an_unfinished_snapshot_is_not_continued_for_an_account_that_lost_the_volume() {
    let site = Site::no_reflink();
    let server = site.ready(&[]).await;
    server.client.put_volume(&volume("a1"), &of_account("a"), SOON).await.unwrap();
    site.write(&volume("a1"), &[1; MIB as usize], 0);
    issue(&site, "a");
    let http = Http::new(&site, &server, "backup-a");
    let put = async || http.send(Method::PUT, "/v1/snapshots/t1", r#"{"volume":"a1"}"#).await;
    let frozen = site.freeze();
    until("the snapshot is being taken", async || put().await.0 == 202).await;
    let change = server.client.put_owner(&volume("a1"), &owner("b")).await;
    assert!(change.is_ok(), "{change:?}");
    let (status, _, body) = put().await;
    assert!(status == 404 && body.contains("the volume a1 does not exist"), "{status}: {body}");
    drop(frozen);
}

#[tokio::test]
async fn answers_show_nothing_of_vms_and_hypervisors() {
    let site = Site::no_reflink();
    let node = Uuid::new_v4();
    let server = site.ready(&[node]).await;
    let a = backup(&site, &server, "a");
    server.client.put_volume(&volume("a1"), &of_account("a"), SOON).await.unwrap();
    let spec = VolumeSpec { owner: owner("a"), ..cloned(&volume("a1"), MIB) };
    server.client.put_volume(&volume("a2"), &spec, SOON).await.unwrap();
    server.client.attach(&attachment("x"), &writer(&volume("a1"), node), SOON).await.unwrap();
    let refused = problem(a.put_snapshot(&snapshot("t1"), &of_volume("a1"), SOON).await);
    assert_eq!((refused.code, refused.nodes.len()), (ProblemCode::InUse, 0));
    assert!(refused.detail.contains("detach") && !refused.detail.contains("node-0"), "{refused}");
    let cause = |event: &serde_json::Value| event["cause"].as_str().is_some_and(|it| it.contains("node-0"));
    until("the log names the VM", async || !server.logged(cause).is_empty()).await;
    let complete = problem(server.client.put_snapshot(&snapshot("t1"), &of_volume("a1"), SOON).await);
    assert!(complete.nodes.len() == 1 && complete.detail.contains("node-0"), "{complete}");

    let shown = a.get_volume(&volume("a1")).await.unwrap().unwrap();
    assert_eq!((shown.attached_to, shown.condition.message), (vec![], None));
    assert_eq!(a.get_volume(&volume("a2")).await.unwrap().unwrap().source, None);
    let health = a.health().await.unwrap();
    assert_eq!((health.healthy, health.hypervisors), (true, vec![]));
}

/// The operations that the role allows, of a certificate for an account.
const ALLOWED: [&str; 7] = [
    "GET /v1/volumes",
    "GET /v1/volumes/{id}",
    "GET /v1/snapshots",
    "GET /v1/snapshots/{id}",
    "PUT /v1/snapshots/{id}",
    "DELETE /v1/snapshots/{id}",
    "GET /v1/health",
];

/// Sends each operation of the API; returns those that are not refused with 403, and the bodies of the refusals.
async fn not_forbidden(http: &Http) -> (Vec<String>, Vec<String>) {
    let document = serde_json::to_value(storage_infra::api::openapi()).unwrap();
    let (mut allowed, mut refusals) = (Vec::new(), Vec::new());
    for (route, methods) in document["paths"].as_object().unwrap() {
        let node = Uuid::nil().to_string();
        let path = route.replace("{uuid}", &node).replace("{id}", "b1").replace("{name}", "pool");
        let path = path.replace("{account}", "b");
        for method in methods.as_object().unwrap().keys() {
            let method = method.to_ascii_uppercase();
            let sent = Method::from_bytes(method.as_bytes()).unwrap();
            match http.send(sent, &path, r#"{"volume":"b1"}"#).await {
                (403, _, body) => refusals.push(body),
                _ => allowed.push(format!("{method} {route}")),
            }
        }
    }
    (allowed, refusals)
}

#[tokio::test]
async fn every_other_operation_is_refused_and_so_are_the_metrics() {
    let mut site = Site::reflink();
    site.flags = ["--metrics-auth", "certificate"].map(str::to_owned).to_vec();
    let server = two_accounts(&site).await;
    issue(&site, "a");
    let http = Http::new(&site, &server, "backup-a");
    let (mut allowed, refusals) = not_forbidden(&http).await;
    let mut expected = ALLOWED.map(str::to_owned);
    allowed.sort_unstable();
    expected.sort_unstable();
    assert_eq!(allowed, expected);
    assert!(refusals.iter().all(|body| body.contains("role backup")), "{refusals:?}");
    for path in ["/v1/openapi.json", "/v1/docs"] {
        assert_eq!(http.send(Method::GET, path, "").await.0, 200, "{path}");
    }
    let (status, _, body) = http.send(Method::GET, "/metrics", "").await;
    assert!(status == 403 && !body.contains("account="), "{body}");
    let reader = Http::new(&site, &server, "reader");
    let (status, _, body) = reader.send(Method::GET, "/metrics", "").await;
    assert!(status == 200 && body.contains(r#"account="b""#), "{body}");
}

/// Signs a certificate of the role backup without an account, as `storage-infra pki` of an earlier version did.
fn issue_without_account(site: &Site) {
    let named = |kind: DnType, name: &str| {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(kind, name);
        params
    };
    let authority = KeyPair::from_pem(&fs::read_to_string(site.path("pki/ca.key")).unwrap()).unwrap();
    let issuer = Issuer::new(named(DnType::CommonName, "Nestor storage infra CA"), authority);
    let key = KeyPair::generate().unwrap();
    let leaf = named(DnType::OrganizationName, "nestor:backup").signed_by(&key, &issuer).unwrap();
    fs::write(site.path("pki/old.crt"), leaf.pem()).unwrap();
    fs::write(site.path("pki/old.key"), key.serialize_pem()).unwrap();
}

#[tokio::test]
async fn a_certificate_of_a_backup_without_an_account_is_refused_with_a_way_out() {
    let site = Site::reflink();
    let server = two_accounts(&site).await;
    issue_without_account(&site);
    let (allowed, refusals) = not_forbidden(&Http::new(&site, &server, "old")).await;
    assert_eq!(allowed, Vec::<String>::new());
    let is_clear = |body: &String| body.contains("storage-infra pki issue --role backup --account ACCOUNT");
    assert!(refusals.iter().all(is_clear), "{refusals:?}");
    let health: Health = Http::new(&site, &server, "reader").get("/v1/health").await;
    assert_eq!(health.hypervisors.len(), 1);
}
