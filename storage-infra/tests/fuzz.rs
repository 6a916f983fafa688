//! Requests that are derived from the OpenAPI document, valid and invalid: each response is documented, no error is the
//! server's, and afterwards the server works and its catalog is consistent.

mod operation;
mod response;
mod schema;

use std::collections::BTreeMap;
use std::path::Path;

use crate::support::*;
use infra_api::{Labels, NodeSpec, VolumeState};
use operation::{Operation, operations};
use reqwest::{Certificate, Identity, StatusCode};
use serde_json::Value;
use uuid::Uuid;

/// Random inputs per target of `fuzz-kit` for each request per operation here, because a request takes longer.
const INPUTS_PER_REQUEST: u64 = 10;

#[tokio::test]
async fn fuzzed_requests_get_documented_responses_and_leave_a_consistent_catalog() {
    let site = Site::new();
    std::fs::create_dir(site.path("other")).unwrap();
    let nodes = [Uuid::from_u128(1), Uuid::from_u128(2)];
    let server = site.ready(&nodes).await;
    let (http, base) = (http(&site), format!("https://{}", server.api));
    let api: Value = http.get(format!("{base}/v1/openapi.json")).send().await.unwrap().json().await.unwrap();
    let known = known_values(&site, &nodes);
    let schemas = schema::Schemas { api: &api, known: &known };
    let (mut rng, mut statuses) = (fuzz_kit::rng(), BTreeMap::new());
    for _ in 0..fuzz_kit::runs().div_ceil(INPUTS_PER_REQUEST) {
        for operation in &operations(&api) {
            let request = operation.request(&mut rng, &schemas);
            let what = request.to_string();
            let response = request.send(&http, &base).await;
            let status = response.status();
            response::check(&api, operation, response).await.unwrap_or_else(|why| panic!("{what}: {why}"));
            *statuses.entry(status.as_u16()).or_insert(0_u32) += 1;
        }
    }
    assert!(
        [200, 201, 204, 400, 404, 409].iter().all(|status| statuses.contains_key(status)),
        "{statuses:?}"
    );
    unsupported_requests_are_refused(&http, &base, &api).await;
    lists_are_no_objects(&http, &base, &api).await;
    check_consistency(&site, server).await;
}

/// A client that presents the client certificate of the site.
fn http(site: &Site) -> reqwest::Client {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let pem = |name: &str| std::fs::read(site.path("pki").join(name)).unwrap();
    let identity = Identity::from_pem(&[pem("operator.key"), pem("operator.crt")].concat()).unwrap();
    let ca = Certificate::from_pem(&pem("ca.crt")).unwrap();
    let builder = reqwest::Client::builder().tls_certs_only([ca]).identity(identity).timeout(SOON);
    builder.no_proxy().build().unwrap()
}

/// Texts that mean something to this server, by parameter or field.
fn known_values(site: &Site, nodes: &[Uuid]) -> BTreeMap<&'static str, Vec<String>> {
    let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
    let uuids: Vec<String> = nodes.iter().chain([&Uuid::nil()]).map(Uuid::to_string).collect();
    let directories = [site.path("pool"), site.path("other"), site.path("missing")];
    let mut paths: Vec<String> = directories.iter().map(|path| text(path).to_owned()).collect();
    paths.extend(texts(&["relative", "", "/\0", "/\n"]));
    let ids = texts(&["a", "b", "c.d", "unknown"]);
    BTreeMap::from([
        ("path", paths),
        ("name", texts(&["pool", "other", "here", "unknown"])),
        ("pool", texts(&["pool", "other", "unknown"])),
        ("hypervisor", texts(&["here", "unknown"])),
        ("uuid", uuids.clone()),
        ("node", uuids),
        ("id", ids.clone()),
        ("volume", ids.clone()),
        ("snapshot", ids.clone()),
        ("replaces", ids),
    ])
}

/// Unknown paths, and methods that no operation has, are problems too.
async fn unsupported_requests_are_refused(http: &reqwest::Client, base: &str, api: &Value) {
    let unknown = http.get(format!("{base}/v1/nothing%00")).send().await.unwrap();
    assert_eq!(unknown.status(), StatusCode::NOT_FOUND);
    response::problem(unknown).await.unwrap();
    for Operation { path, .. } in operations(api) {
        let url = format!("{base}{}", path.replace(['{', '}'], ""));
        let refused = http.patch(&url).body("{}").send().await.unwrap();
        assert_eq!(refused.status(), StatusCode::METHOD_NOT_ALLOWED, "{url}");
        response::problem(refused).await.unwrap_or_else(|why| panic!("PATCH {url}: {why}"));
    }
}

/// Serde would read some bodies also from a list of fields.
async fn lists_are_no_objects(http: &reqwest::Client, base: &str, api: &Value) {
    for Operation { method, path, call } in operations(api) {
        if call["requestBody"]["content"]["application/json"].is_null() {
            continue;
        }
        let path = path.replace("{uuid}", &Uuid::nil().to_string()).replace(['{', '}'], "");
        let request =
            http.request(method, format!("{base}{path}")).header("content-type", "application/json");
        let refused = request.body("[]").send().await.unwrap();
        assert_eq!(refused.status(), StatusCode::BAD_REQUEST, "{path}");
        response::problem(refused).await.unwrap_or_else(|why| panic!("{path}: {why}"));
    }
}

/// The server is healthy, also after a restart; its catalog has no faults; and every volume has its file.
async fn check_consistency(site: &Site, server: Server) {
    let spec = NodeSpec { name: "n".into(), hypervisor: "here".into(), zone: None, labels: Labels::new() };
    server.client.put_node(Uuid::from_u128(3), &spec).await.unwrap();
    for pool in server.client.list_pools().await.unwrap() {
        server.client.resume_pool(&pool.name).await.unwrap();
    }
    for volume in server.client.list_volumes(None, None).await.unwrap().items {
        server.client.resume_volume(&volume.id).await.unwrap();
    }
    // Imports wait for their clients.
    for volume in server.client.list_volumes(None, None).await.unwrap().items {
        if volume.state == VolumeState::Creating
            && server.client.get_import(&volume.id).await.unwrap().is_some_and(|import| !import.complete)
        {
            server.client.delete_volume(&volume.id).await.unwrap();
        }
    }
    until("operations are complete", async || {
        let volumes = server.client.list_volumes(None, None).await.unwrap().items;
        volumes.iter().all(|volume| volume.state == VolumeState::Ready)
    })
    .await;
    assert_eq!(server.stop(), Some(0));
    let faults: String = site.catalog().query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
    assert_eq!(faults, "ok");
    let server = site.start();
    let health = server.client.health().await.unwrap();
    assert!(health.catalog_writable && health.pools_healthy == health.pools_total, "{health:?}");
    for volume in server.client.list_volumes(None, None).await.unwrap().items {
        let pool = server.client.get_pool(&volume.pool).await.unwrap().unwrap();
        let file = std::fs::metadata(Path::new(&pool.path).join(format!("{}.raw", volume.id))).unwrap();
        assert_eq!(file.len(), volume.capacity_bytes, "{volume:?}");
    }
}
