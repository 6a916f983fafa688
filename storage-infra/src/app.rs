//! Server wiring: builds the service from flags, starts listeners and periodic loops, and shuts them down.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use axum_server::accept::NoDelayAcceptor;
use axum_server::tls_rustls::{RustlsAcceptor, RustlsConfig};
use futures::FutureExt;
use futures::future::{BoxFuture, join_all};
use infra_api::{Expiry, ZONE_LABEL};
use process_kit::{process, supervise};
use rustls::RootCertStore;
use rustls::server::WebPkiClientVerifier;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use crate::api::{self, MetricsAuth, NamingAcceptor, WithoutRole};
use crate::backup::{self, Schedule};
use crate::catalog::Catalog;
use crate::catalog::postgres::Target;
use crate::clock::Clock;
use crate::engine::file::private_dir;
use crate::hypervisor::Hypervisor;
use crate::hypervisor::libvirt::Libvirt;
use crate::hypervisor::loop_device::LoopDevices;
use crate::hypervisor::simulated::Simulated;
use crate::lease::Lease;
use crate::lease_end;
use crate::metrics::Metrics;
use crate::placement::{Host, Hosts};
use crate::service::Service;
use crate::standby::{Door, Standby};
use crate::systemd;

/// Time that running operations and connections have to finish after a shutdown signal.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(10);
/// Time to wait for a terminating server to release the catalog lock.
const CATALOG_LOCK_TIMEOUT: Duration = Duration::from_secs(5);
/// HTTP/2 streams per connection: each volume and each VM may have one long-running request.
const MAX_STREAMS: u32 = 4096;
/// Interval between checks of the certificate files.
const RELOAD_INTERVAL: Duration = Duration::from_secs(30);

/// The error of a server that was replaced.
const REPLACED: &str = "another server is active: this one could not renew its lease in the database in time, and did nothing \
                        since; start it again as a passive server";

/// A hypervisor as given by `--hypervisor`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HypervisorFlag {
    /// Name by which nodes refer to it.
    pub name: String,
    /// Kind and location.
    pub target: HypervisorTarget,
}

/// Kind and location of a hypervisor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HypervisorTarget {
    /// A libvirt URI.
    Libvirt(String),
    /// This host as a node: root directory of links to loop devices.
    Host(PathBuf),
    /// Root directory of links to loop devices of VMs that this host plays.
    Loop(PathBuf),
    /// Simulated VMs without a hypervisor: state directory, and duration of an attach or detach.
    Simulated(PathBuf, Duration),
}

/// Where the catalog is.
#[derive(Debug, Clone)]
pub enum CatalogPlace {
    /// In SQLite, in the data directory.
    DataDir,
    /// In a PostgreSQL database, which several servers may use.
    Database(Box<Target>),
}

impl fmt::Display for HypervisorTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Libvirt(uri) => f.write_str(uri),
            Self::Host(dir) | Self::Loop(dir) | Self::Simulated(dir, _) => write!(f, "{}", dir.display()),
        }
    }
}

/// Options of `serve`.
#[derive(Debug, Clone)]
pub struct Options {
    /// Directory of the catalog, or of what is beside one in a database.
    pub data_dir: PathBuf,
    /// Where the catalog is.
    pub catalog: CatalogPlace,
    /// Listen address of the API.
    pub listen: SocketAddr,
    /// The server's certificate chain.
    pub tls_cert: PathBuf,
    /// The server's private key.
    pub tls_key: PathBuf,
    /// CA that signs client certificates.
    pub client_ca: PathBuf,
    /// What clients without a role may do.
    pub without_role: WithoutRole,
    /// The hypervisors.
    pub hypervisors: Vec<HypervisorFlag>,
    /// Zones of hypervisors, by their names.
    pub zones: Vec<(String, String)>,
    /// Labels of hypervisors: name, key and value.
    pub labels: Vec<(String, String, String)>,
    /// Directories besides those of pools whose files may be adopted.
    pub file_dirs: Vec<PathBuf>,
    /// When to back up the catalog.
    pub backups: Option<Schedule>,
    /// Listen address of health and metrics.
    pub http_listen: Option<SocketAddr>,
    /// Who may read the metrics.
    pub metrics_auth: MetricsAuth,
}

/// Serves until SIGTERM or SIGINT.
pub async fn serve(options: Options) -> anyhow::Result<()> {
    let metrics = Metrics::default();
    let tls = RustlsConfig::from_config(Arc::new(tls_config(&options)?));
    metrics.certificates().set(expiry(&options));
    private_dir(&options.data_dir)
        .with_context(|| format!("cannot create the data directory {}", options.data_dir.display()))?;
    // Also a passive server says at once what is wrong with its flags.
    drop(hypervisors(&options.hypervisors, &Lease::ended())?);
    let hosts = hosts(&options)?;
    let standby = Standby::default();
    let mut listeners = Listeners {
        api: Door::new(standby.api()),
        ops: Door::new(standby.ops(metrics.clone())),
        handle: axum_server::Handle::new(),
        stop: CancellationToken::new(),
        tasks: JoinSet::new(),
    };
    let mut address = None;
    let lead = match &options.catalog {
        CatalogPlace::DataDir => None,
        CatalogPlace::Database(target) => {
            let bound = *address.insert(listeners.start(&options, &tls).await?);
            let pings = supervise::background(
                "watchdog of the passive server",
                listeners.stop.clone(),
                systemd::passive(listeners.stop.child_token()),
            );
            let name = format!("{} at {bound}", rustix::system::uname().nodename().to_string_lossy());
            let lead = tokio::select! {
                lead = standby.lead((**target).clone(), name) => lead?,
                result = process::stop_signal() => return Ok(result.map(drop)?),
                ended = listeners.ended() => return ended,
                failure = supervise::failure() => anyhow::bail!(failure),
            };
            pings.abort();
            lease_end::watch(lead.lease().clone()).context("cannot watch the lease")?;
            Some(lead)
        }
    };
    let catalog = match &lead {
        None => Catalog::open(&options.data_dir, CATALOG_LOCK_TIMEOUT)?,
        Some(lead) => Catalog::open_led(&options.data_dir, CATALOG_LOCK_TIMEOUT, lead)?,
    };
    let lease = catalog.lease().clone();
    let watched = catalog.clone();
    let hypervisors = hypervisors(&options.hypervisors, &lease)?;
    let service = Service::new(
        catalog,
        hypervisors,
        hosts,
        Clock::default(),
        metrics.clone(),
        options.file_dirs.clone(),
    );
    service.recover().await.map_err(|failure| anyhow::anyhow!("cannot start: {failure}"))?;

    let stop = listeners.stop.clone();
    listeners.open(&service, &options);
    metrics.activated();
    let address = match address {
        Some(address) => address,
        None => listeners.start(&options, &tls).await?,
    };
    let status = format!("serving the API on {address}");
    let mut loops = periodic(&service, &stop);
    loops.push(supervise::background(
        "certificate reload",
        stop.clone(),
        reload(options.clone(), tls, metrics, status.clone(), stop.clone()),
    ));
    loops.push(supervise::background("watchdog", stop.clone(), systemd::watchdog(watched, stop.clone())));
    loops.extend(options.backups.map(|schedule| {
        let metrics = service.metrics().backups().clone();
        let work = backup::run(options.data_dir, schedule, metrics, stop.clone());
        supervise::background("backups of the catalog", stop.clone(), work)
    }));
    systemd::ready(&status);

    let ended = tokio::select! {
        result = process::stop_signal() => result.map(drop).map_err(anyhow::Error::from),
        ended = listeners.ended() => ended,
        failure = supervise::failure() => Err(anyhow::anyhow!(failure)),
        // Its locks of the pools end with the process, so it ends at once.
        () = lease.lost() => anyhow::bail!(REPLACED),
    };
    tracing::info!("stopping");
    systemd::stopping();
    stop.cancel();
    service.cancel_copies();
    listeners.handle.graceful_shutdown(Some(SHUTDOWN_GRACE));
    let finish = async {
        listeners.finished().await;
        join_all(loops).await;
        service.drain().await;
    };
    match (tokio::time::timeout(SHUTDOWN_GRACE, finish).await, lead) {
        (Ok(()), Some(lead)) => tokio::task::spawn_blocking(move || lead.give_up()).await?,
        (Ok(()), None) => {}
        (Err(_), _) => tracing::warn!("operations are still running; the next start completes them"),
    }
    ended
}

/// The listeners, and what answers there.
struct Listeners {
    api: Door,
    ops: Door,
    handle: axum_server::Handle<SocketAddr>,
    stop: CancellationToken,
    tasks: JoinSet<anyhow::Result<()>>,
}

impl Listeners {
    /// The service answers from now on.
    fn open(&self, service: &Service, options: &Options) {
        let mut router = api::router(service.clone(), options.without_role, self.stop.clone());
        if options.metrics_auth == MetricsAuth::Certificate {
            router = router.merge(api::metrics_router(service.clone()));
        }
        self.api.open(router);
        self.ops.open(api::ops_router(service.clone(), options.metrics_auth));
    }

    /// Starts to listen. Returns the address of the API.
    async fn start(&mut self, options: &Options, tls: &RustlsConfig) -> anyhow::Result<SocketAddr> {
        // Bind before health is served: a client that sees a healthy server must be able to connect.
        let listener = TcpListener::bind(options.listen)
            .with_context(|| format!("cannot listen on {}", options.listen))?;
        listener.set_nonblocking(true)?;
        if let Some(address) = options.http_listen {
            let listener = tokio::net::TcpListener::bind(address)
                .await
                .with_context(|| format!("cannot listen for health and metrics on {address}"))?;
            tracing::info!(address = %listener.local_addr()?, "health and metrics");
            let server = axum::serve(listener, self.ops.router())
                .with_graceful_shutdown(self.stop.clone().cancelled_owned());
            self.tasks.spawn(async move { server.await.context("health and metrics") });
        }
        let address = listener.local_addr()?;
        tracing::info!(%address, "serving the API");
        // The head and the body of a response are sent separately. Without TCP_NODELAY the body waits for the client's
        // delayed ACK (40 ms).
        let acceptor = NamingAcceptor(RustlsAcceptor::new(tls.clone()).acceptor(NoDelayAcceptor));
        let mut server = axum_server::from_tcp(listener)?.acceptor(acceptor).handle(self.handle.clone());
        server.http_builder().http2().max_concurrent_streams(MAX_STREAMS);
        let router = self.api.router();
        self.tasks.spawn(async move { server.serve(router.into_make_service()).await.context("the API") });
        Ok(address)
    }

    /// Waits until a listener fails.
    async fn ended(&mut self) -> anyhow::Result<()> {
        match self.tasks.join_next().await {
            Some(ended) => ended?.and(Err(anyhow::anyhow!("a listener stopped unexpectedly"))),
            None => std::future::pending().await,
        }
    }

    /// Waits until all listeners have ended.
    async fn finished(&mut self) {
        while self.tasks.join_next().await.is_some() {}
    }
}

/// Starts the service's periodic loops, each in a supervised task.
pub(crate) fn periodic(service: &Service, stop: &CancellationToken) -> Vec<JoinHandle<()>> {
    let until = || stop.clone();
    let loops: [(&str, BoxFuture<'static, ()>); 9] = [
        ("repair", service.repair().clone().run(until()).boxed()),
        ("release of attachments", service.fencing().clone().run_release(until()).boxed()),
        ("pool monitor", service.pool_monitor().clone().run(until()).boxed()),
        ("power monitor", service.power().clone().run_monitor(until()).boxed()),
        ("search for moved VMs", service.nodes().clone().run_follow(until()).boxed()),
        ("unexpected disk search", service.unexpected_disks().clone().run_search(until()).boxed()),
        ("moves", service.moves().clone().run(until()).boxed()),
        ("suspensions", service.suspensions().clone().run(until()).boxed()),
        ("resume of paused VMs", service.paused_vms().clone().run_resume(until()).boxed()),
    ];
    loops.into_iter().map(|(name, work)| supervise::background(name, until(), work)).collect()
}

/// Builds the hypervisors named by flags, which act only during the lease.
pub fn hypervisors(
    flags: &[HypervisorFlag],
    lease: &Lease,
) -> anyhow::Result<BTreeMap<String, Arc<dyn Hypervisor>>> {
    let mut all: BTreeMap<String, Arc<dyn Hypervisor>> = BTreeMap::new();
    for flag in flags {
        let hypervisor: Arc<dyn Hypervisor> = match &flag.target {
            HypervisorTarget::Libvirt(uri) => Arc::new(Libvirt::new(uri, lease.clone())),
            HypervisorTarget::Host(root) => Arc::new(this_host(root)?.under(lease.clone())),
            HypervisorTarget::Loop(root) => Arc::new(LoopDevices::new(root).under(lease.clone())),
            HypervisorTarget::Simulated(root, delay) => Arc::new(Simulated::new(root, *delay)),
        };
        if all.insert(flag.name.clone(), hypervisor).is_some() {
            anyhow::bail!("two hypervisors are named {}", flag.name);
        }
    }
    Ok(all)
}

fn this_host(root: &Path) -> anyhow::Result<LoopDevices> {
    LoopDevices::of_this_host(root).with_context(|| {
        format!("--hypervisor: cannot use {} for links to this host's disks", root.display())
    })
}

/// What the flags say about the hosts of the hypervisors.
fn hosts(options: &Options) -> anyhow::Result<Hosts> {
    let mut all: BTreeMap<&str, Host> = BTreeMap::new();
    for HypervisorFlag { name, target } in &options.hypervisors {
        let host = Host { name: name.clone(), location: target.to_string(), ..Host::default() };
        all.insert(name, host);
    }
    for (name, zone) in &options.zones {
        let host = all.get_mut(name.as_str());
        let host = host.with_context(|| format!("--hypervisor-zone: no --hypervisor is named {name}"))?;
        let before = host.zone.replace(zone.clone());
        anyhow::ensure!(before.is_none(), "--hypervisor-zone: the hypervisor {name} has two zones");
    }
    for (name, key, value) in &options.labels {
        let host = all.get_mut(name.as_str());
        let host = host.with_context(|| format!("--hypervisor-label: no --hypervisor is named {name}"))?;
        anyhow::ensure!(key != ZONE_LABEL, "--hypervisor-label: {key} is set with --hypervisor-zone");
        let before = host.labels.insert(key.clone(), value.clone());
        anyhow::ensure!(before.is_none(), "--hypervisor-label: the hypervisor {name} has two labels {key}");
    }
    Ok(Hosts::new(all.into_values().collect()))
}

fn certificates(flag: &str, path: &Path) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let found = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let found = found.with_context(|| format!("{flag}: cannot read certificates from {}", path.display()))?;
    anyhow::ensure!(!found.is_empty(), "{flag}: {} has no certificate", path.display());
    Ok(found)
}

/// Mutual TLS: clients must present a certificate signed by the client CA.
fn tls_config(options: &Options) -> anyhow::Result<rustls::ServerConfig> {
    let mut roots = RootCertStore::empty();
    for ca in certificates("--client-ca", &options.client_ca)? {
        roots
            .add(ca)
            .with_context(|| format!("--client-ca: {} is not a usable CA", options.client_ca.display()))?;
    }
    let clients = WebPkiClientVerifier::builder(Arc::new(roots)).build()?;
    let key = PrivateKeyDer::from_pem_file(&options.tls_key)
        .with_context(|| format!("--tls-key: cannot read the private key {}", options.tls_key.display()))?;
    let mut config = rustls::ServerConfig::builder()
        .with_client_cert_verifier(clients)
        .with_single_cert(certificates("--tls-cert", &options.tls_cert)?, key)
        .context("the server's certificate and private key do not match")?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

/// Expiry of the certificates in the files.
fn expiry(options: &Options) -> Expiry {
    let [chain, ca] =
        [&options.tls_cert, &options.client_ca].map(|path| std::fs::read(path).unwrap_or_default());
    Expiry::of(&chain, &ca)
}

/// Reloads renewed certificates for new connections: periodically, and on SIGHUP.
async fn reload(
    options: Options,
    tls: RustlsConfig,
    metrics: Metrics,
    status: String,
    stop: CancellationToken,
) {
    let read =
        || [&options.tls_cert, &options.tls_key, &options.client_ca].map(|path| std::fs::read(path).ok());
    let mut current = read();
    let mut tick = tokio::time::interval(RELOAD_INTERVAL);
    let mut requests = match signal(SignalKind::hangup()) {
        Ok(requests) => requests,
        Err(error) => return supervise::fail(format!("cannot handle SIGHUP: {error}")),
    };
    loop {
        let is_requested = tokio::select! {
            () = stop.cancelled() => return,
            _ = tick.tick() => false,
            _ = requests.recv() => true,
        };
        if is_requested {
            systemd::reloading();
        }
        let now = read();
        if now != current && load(&options, &tls) {
            current = now;
            metrics.certificates().set(expiry(&options));
        }
        if is_requested {
            systemd::ready(&status);
        }
    }
}

/// Loads the certificates for new connections; returns whether that succeeded.
fn load(options: &Options, tls: &RustlsConfig) -> bool {
    match tls_config(options) {
        Ok(config) => {
            tls.reload_from_config(Arc::new(config));
            tracing::info!("reloaded the TLS certificates");
            true
        }
        // Files may be replaced one by one: keep the current certificates until all files match.
        Err(error) => {
            tracing::warn!(
                error = format!("{error:#}"),
                "cannot load the new TLS certificates yet; the current ones stay in use"
            );
            false
        }
    }
}
