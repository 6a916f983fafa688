//! A storage-infra of a bench's own, without clusters: the release program with one file pool on the host's filesystem and
//! a simulated hypervisor.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use infra_api::{
    Client, ClientOptions, EngineKind, Labels, OnFull, PoolName, PoolSpec, Role, VolumeId, VolumeSpec,
};
use tempfile::TempDir;

use crate::usage;

/// Time for the server to start.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Timeout of one request.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// A running server. Stopped and removed when dropped.
pub(crate) struct StorageInfra {
    pub(crate) client: Client,
    child: Child,
    http: String,
    folder: TempDir,
}

impl StorageInfra {
    /// Starts a server with an empty pool and simulated VMs.
    pub(crate) async fn start() -> Result<Self> {
        Self::start_with(|folder| format!("simulated=simulated:{}", folder.join("vms").display())).await
    }

    /// The same with the hypervisor of this flag, for which it gets the server's directory.
    pub(crate) async fn start_with(hypervisor: impl FnOnce(&Path) -> String) -> Result<Self> {
        let target = lab::run::target_dir()?;
        let program = target.join("release/storage-infra");
        let parent = target.join("bench");
        std::fs::create_dir_all(&parent).with_context(|| format!("cannot create {}", parent.display()))?;
        let folder = tempfile::tempdir_in(&parent)?;
        let pki = folder.path().join("pki");
        let init =
            Command::new(&program).args(["pki", "init", "--host", "127.0.0.1", "--dir"]).arg(&pki).output();
        let init = init.with_context(|| format!("cannot run {}", program.display()))?;
        ensure!(init.status.success(), "storage-infra pki init: {}", String::from_utf8_lossy(&init.stderr));
        let [api, http] = [free_address()?, free_address()?];
        let child = serve(&program, folder.path(), &hypervisor(folder.path()), &api, &http)?;
        let url = format!("https://{api}");
        let client = Client::new(&ClientOptions::from_pki_dir(url, &pki, Role::Operator))?;
        let server = Self { client, child, http: format!("http://{http}"), folder };
        let ready = format!("{}/readyz", server.http);
        let check = || async { Ok(lab::ready::get(&ready, None).await.map(drop)) };
        lab::wait::eventually("storage-infra is ready", START_TIMEOUT, check).await?;
        server.register_pool().await?;
        Ok(server)
    }

    async fn register_pool(&self) -> Result<()> {
        let pool = self.folder.path().join("pool");
        std::fs::create_dir(&pool)?;
        let spec = PoolSpec {
            engine: EngineKind::File,
            path: pool.display().to_string(),
            labels: Labels::new(),
            cordoned: false,
            on_full: OnFull::default(),
            hosts: infra_api::PoolHosts::default(),
        };
        self.client.put_pool(&PoolName::new("pool")?, &spec).await?;
        Ok(())
    }

    /// Creates an empty volume of 1 MiB.
    pub(crate) async fn create(&self, name: &str) -> Result<()> {
        self.client.put_volume(&VolumeId::new(name)?, &VolumeSpec::of_size(1 << 20), TIMEOUT).await?;
        Ok(())
    }

    /// Its metrics, as Prometheus text.
    pub(crate) async fn metrics(&self) -> Result<String> {
        lab::ready::get(&format!("{}/metrics", self.http), None).await.map_err(anyhow::Error::msg)
    }

    /// The CPU time that it has used.
    pub(crate) fn cpu(&self) -> Result<Duration> {
        usage::cpu_of(self.child.id())
    }

    /// The times that it has listed the files of its pool.
    pub(crate) async fn listings(&self) -> Result<f64> {
        let metrics = self.metrics().await?;
        let sample =
            metrics.lines().find(|line| line.starts_with("nestor_storage_infra_pool_listings_total"));
        let value = sample.and_then(|sample| sample.rsplit_once(' ')?.1.parse().ok());
        value.context("storage-infra does not count the listings of its pool")
    }
}

impl Drop for StorageInfra {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn serve(program: &Path, folder: &Path, hypervisor: &str, api: &str, http: &str) -> Result<Child> {
    let path = |name: &str| -> PathBuf { folder.join(name) };
    let mut serve = Command::new(program);
    serve.args(["serve", "--listen", api, "--http-listen", http, "--clients-without-role", "refuse"]);
    serve.arg("--data-dir").arg(path("data"));
    serve.args(["--hypervisor", hypervisor]);
    serve.arg("--tls-cert").arg(path("pki/server.crt"));
    serve.arg("--tls-key").arg(path("pki/server.key"));
    serve.arg("--client-ca").arg(path("pki/ca.crt"));
    serve.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    serve.spawn().with_context(|| format!("cannot run {}", program.display()))
}

fn free_address() -> Result<String> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string())
}
