use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::ConnectInfo;
use axum_server::Handle;
use axum_server::tls_rustls::RustlsConfig;
use futures::future::join_all;
use tokio::sync::Barrier;

use super::*;

/// More than the client's initial limit of concurrent streams, before the server has sent its own.
const CALLS: usize = 150;

#[tokio::test]
async fn many_concurrent_calls_share_one_connection() {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let key = rcgen::KeyPair::generate().unwrap();
    let certificate =
        rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap().self_signed(&key).unwrap();
    let (cert, key) = (certificate.pem().into_bytes(), key.serialize_pem().into_bytes());

    // The server responds to none before all have arrived.
    let (all, callers) = (Arc::new(Barrier::new(CALLS)), Arc::new(Mutex::new(HashSet::new())));
    let observed = callers.clone();
    let app = Router::new().fallback(move |ConnectInfo(caller): ConnectInfo<SocketAddr>| {
        let (all, observed) = (all.clone(), observed.clone());
        async move {
            observed.lock().unwrap().insert(caller);
            all.wait().await;
            r#"{"items": []}"#
        }
    });
    let tls = RustlsConfig::from_pem(cert.clone(), key.clone()).await.unwrap();
    let handle = Handle::new();
    let server = axum_server::bind_rustls(SocketAddr::from(([127, 0, 0, 1], 0)), tls).handle(handle.clone());
    tokio::spawn(server.serve(app.into_make_service_with_connect_info::<SocketAddr>()));
    let address = handle.listening().await.unwrap();

    let dir = tempfile::tempdir().unwrap();
    let (cert_file, key_file) = (dir.path().join("crt"), dir.path().join("key"));
    std::fs::write(&cert_file, cert).unwrap();
    std::fs::write(&key_file, key).unwrap();
    let client = Client::new(&ClientOptions {
        url: format!("https://{address}"),
        ca: cert_file.clone(),
        cert: cert_file,
        key: key_file,
        connect_timeout: Duration::from_secs(30),
        timeout: Duration::from_secs(60),
    })
    .unwrap();
    for answer in join_all((0..CALLS).map(|_| client.list_pools())).await {
        assert_eq!(answer.unwrap(), []);
    }
    assert_eq!(callers.lock().unwrap().len(), 1);
    handle.shutdown();
}
