//! Wiring of the server: flags in, everything started, everything stopped.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use axum_server::accept::NoDelayAcceptor;
use axum_server::tls_rustls::{RustlsAcceptor, RustlsConfig};
use futures::future::join_all;
use process_kit::supervise;
use rustls::RootCertStore;
use rustls::server::WebPkiClientVerifier;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use crate::api::{self, NamingAcceptor};
use crate::catalog::Catalog;
use crate::engine::file::private_dir;
use crate::hypervisor::Hypervisor;
use crate::hypervisor::libvirt::Libvirt;
use crate::hypervisor::loop_device::LoopDevices;
use crate::hypervisor::simulated::Simulated;
use crate::metrics::Metrics;
use crate::service::Service;

/// How long work and connections get to end once the server is told to stop.
const GRACE: Duration = Duration::from_secs(10);
/// How long a server that is just ending may hold the catalog.
const HANDOVER: Duration = Duration::from_secs(5);
/// How many requests one client may have under way over one connection: each volume and each machine may have one that
/// waits for long.
const STREAMS: u32 = 4096;
/// How often the certificate files are looked at.
const RELOAD: Duration = Duration::from_secs(30);

/// A hypervisor as it stands in a flag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HypervisorFlag {
    /// Its name, which nodes are registered with.
    pub name: String,
    /// What it is and where.
    pub target: HypervisorTarget,
}

/// What a hypervisor is and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HypervisorTarget {
    /// A libvirt URI.
    Libvirt(String),
    /// The root directory for links to loop devices.
    Loop(PathBuf),
    /// Machines that are only told of: where they are noted, and how long a plug or an unplug takes.
    Simulated(PathBuf, Duration),
}

/// What `serve` needs.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where the catalog is.
    pub data_dir: PathBuf,
    /// Where the API listens.
    pub listen: SocketAddr,
    /// The server's certificate chain.
    pub tls_cert: PathBuf,
    /// The server's private key.
    pub tls_key: PathBuf,
    /// Who signs the certificates of those who may connect.
    pub client_ca: PathBuf,
    /// The hypervisors.
    pub hypervisors: Vec<HypervisorFlag>,
    /// Where health and metrics listen.
    pub http_listen: Option<SocketAddr>,
}

/// Serves until SIGTERM or SIGINT.
pub async fn serve(options: Options) -> anyhow::Result<()> {
    let tls = RustlsConfig::from_config(Arc::new(tls_config(&options)?));
    private_dir(&options.data_dir)
        .with_context(|| format!("cannot make the data directory {}", options.data_dir.display()))?;
    let catalog = Catalog::open(&options.data_dir, HANDOVER)?;
    let service = Service::new(catalog, hypervisors(&options.hypervisors)?, Metrics::default());
    service.recover().await.map_err(|failure| anyhow::anyhow!("cannot start: {failure}"))?;

    // Before health is served: who is told that the server is well must be able to connect.
    let listener =
        TcpListener::bind(options.listen).with_context(|| format!("cannot listen on {}", options.listen))?;
    listener.set_nonblocking(true)?;

    let stop = CancellationToken::new();
    let mut tasks = JoinSet::new();
    if let Some(address) = options.http_listen {
        let listener = tokio::net::TcpListener::bind(address)
            .await
            .with_context(|| format!("cannot listen for health and metrics on {address}"))?;
        tracing::info!(address = %listener.local_addr()?, "health and metrics");
        let server = axum::serve(listener, api::ops_router(service.clone()))
            .with_graceful_shutdown(stop.clone().cancelled_owned());
        tasks.spawn(async move { server.await.context("health and metrics") });
    }
    tracing::info!(address = %listener.local_addr()?, "serving the API");
    let handle = axum_server::Handle::new();
    let router = api::router(service.clone(), stop.clone());
    // An answer's head and body are sent one after the other: without this the body waits until the head was acknowledged,
    // which a client puts off for 40 ms.
    let acceptor = NamingAcceptor(RustlsAcceptor::new(tls.clone()).acceptor(NoDelayAcceptor));
    let mut server = axum_server::from_tcp(listener)?.acceptor(acceptor).handle(handle.clone());
    server.http_builder().http2().max_concurrent_streams(STREAMS);
    tasks.spawn(async move { server.serve(router.into_make_service()).await.context("the API") });
    let mut loops = periodic(&service, &stop);
    loops.push(supervise::background(
        "certificate reload",
        stop.clone(),
        reload(options.clone(), tls, stop.clone()),
    ));

    let ended = tokio::select! {
        result = told_to_stop() => result,
        Some(ended) = tasks.join_next() => ended?.and(Err(anyhow::anyhow!("a listener ended by itself"))),
        failure = supervise::failure() => Err(anyhow::anyhow!(failure)),
    };
    tracing::info!("stopping");
    stop.cancel();
    service.stop_copies();
    handle.graceful_shutdown(Some(GRACE));
    let finish = async {
        while tasks.join_next().await.is_some() {}
        join_all(loops).await;
        service.drain().await;
    };
    if tokio::time::timeout(GRACE, finish).await.is_err() {
        tracing::warn!("work is still under way; the next start finishes it");
    }
    ended
}

/// Starts the service's periodic work, each kind in a supervised task of its own.
fn periodic(service: &Service, stop: &CancellationToken) -> Vec<JoinHandle<()>> {
    vec![
        start("attachment repair", service, stop, |service, stop| async move {
            service.keep_repaired(stop).await
        }),
        start("release of attachments", service, stop, |service, stop| async move {
            service.keep_released(stop).await
        }),
        start("pool monitor", service, stop, |service, stop| async move { service.keep_watched(stop).await }),
        start("VM monitor", service, stop, |service, stop| async move { service.keep_known(stop).await }),
        start(
            "disk comparison",
            service,
            stop,
            |service, stop| async move { service.keep_compared(stop).await },
        ),
        start("resumption of paused VMs", service, stop, |service, stop| async move {
            service.keep_going(stop).await
        }),
    ]
}

fn start<F: Future<Output = ()> + Send + 'static>(
    name: &str,
    service: &Service,
    stop: &CancellationToken,
    work: impl FnOnce(Service, CancellationToken) -> F,
) -> JoinHandle<()> {
    supervise::background(name, stop.clone(), work(service.clone(), stop.clone()))
}

async fn told_to_stop() -> anyhow::Result<()> {
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    tokio::select! { _ = term.recv() => {} _ = int.recv() => {} }
    Ok(())
}

/// The hypervisors that flags name.
pub fn hypervisors(flags: &[HypervisorFlag]) -> anyhow::Result<BTreeMap<String, Arc<dyn Hypervisor>>> {
    let mut all: BTreeMap<String, Arc<dyn Hypervisor>> = BTreeMap::new();
    for flag in flags {
        let hypervisor: Arc<dyn Hypervisor> = match &flag.target {
            HypervisorTarget::Libvirt(uri) => Arc::new(Libvirt::new(uri)),
            HypervisorTarget::Loop(root) => Arc::new(LoopDevices::new(root)),
            HypervisorTarget::Simulated(root, delay) => Arc::new(Simulated::new(root, *delay)),
        };
        if all.insert(flag.name.clone(), hypervisor).is_some() {
            anyhow::bail!("two hypervisors are named {}", flag.name);
        }
    }
    Ok(all)
}

fn certificates(flag: &str, path: &Path) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let found = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let found = found.with_context(|| format!("{flag}: cannot read certificates from {}", path.display()))?;
    anyhow::ensure!(!found.is_empty(), "{flag}: {} has no certificate", path.display());
    Ok(found)
}

/// Mutual TLS: who has no certificate from the client CA is not spoken to.
fn tls_config(options: &Options) -> anyhow::Result<rustls::ServerConfig> {
    let mut roots = RootCertStore::empty();
    for ca in certificates("--client-ca", &options.client_ca)? {
        roots
            .add(ca)
            .with_context(|| format!("--client-ca: {} is no usable CA", options.client_ca.display()))?;
    }
    let clients = WebPkiClientVerifier::builder(Arc::new(roots)).build()?;
    let key = PrivateKeyDer::from_pem_file(&options.tls_key)
        .with_context(|| format!("--tls-key: cannot read the private key {}", options.tls_key.display()))?;
    let mut config = rustls::ServerConfig::builder()
        .with_client_cert_verifier(clients)
        .with_single_cert(certificates("--tls-cert", &options.tls_cert)?, key)
        .context("the server's certificate and key do not go together")?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

/// Takes renewed certificates into use for new connections.
async fn reload(options: Options, tls: RustlsConfig, stop: CancellationToken) {
    let read =
        || [&options.tls_cert, &options.tls_key, &options.client_ca].map(|path| std::fs::read(path).ok());
    let mut current = read();
    let mut tick = tokio::time::interval(RELOAD);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = tick.tick() => {}
        }
        let now = read();
        if now == current {
            continue;
        }
        match tls_config(&options) {
            Ok(config) => {
                tls.reload_from_config(Arc::new(config));
                tracing::info!("new certificates are in use");
                current = now;
            }
            // Perhaps one file is written and the next is not: the old ones stay in use until all fit.
            Err(error) => {
                tracing::warn!(error = format!("{error:#}"), "the new certificates cannot be used yet");
            }
        }
    }
}
