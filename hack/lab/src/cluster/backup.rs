//! Backup and restore of the management cluster's etcd.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt};
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::lab::Lab;
use crate::process::{Process, command, run};
use crate::wait::until;

const ETCD: &str = "mgmt-etcd";
const API_SERVER: &str = "mgmt-apiserver";
const CONTROLLERS: &str = "mgmt-controller-manager";
/// "nestor" in base64, as etcd's JSON API encodes keys. No key of Kubernetes begins with it.
const KEY: &str = "bmVzdG9y";

/// A copy of etcd's data folder at one moment.
#[derive(Debug)]
pub struct Backup(TempDir);

/// How a restore treats revisions, which Kubernetes uses as resource versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Revisions {
    /// Revisions continue after the newest one, and older ones are compacted, like `etcdutl snapshot restore
    /// --bump-revision --mark-compacted`: watches start again.
    Bumped,
    /// Revisions are reused: a watch that continues misses changes until its own revision is reached again.
    Reused,
}

impl Lab {
    /// Copies the data of the management cluster's etcd, as a crash would leave it. Clients are not interrupted.
    pub async fn back_up_management(&self) -> Result<Backup> {
        let folder = tempfile::tempdir()?;
        let process = self.run().process(ETCD).filter(Process::alive).context("etcd is not running")?;
        let _stopped = StoppedProcess::stop(process).await?;
        copy(&self.etcd_data(), &folder.path().join("etcd")).await?;
        Ok(Backup(folder))
    }

    /// Restores a backup. Restarts only the control plane.
    pub async fn restore_management(&self, backup: &Backup, revisions: Revisions) -> Result<()> {
        for component in [CONTROLLERS, API_SERVER] {
            self.stop(component).await?;
        }
        // No client can write any more.
        let last = self.revision().await?;
        self.stop(ETCD).await?;
        let data = self.etcd_data();
        std::fs::remove_dir_all(&data).with_context(|| format!("cannot remove {}", data.display()))?;
        copy(&backup.0.path().join("etcd"), &data).await?;
        self.start(ETCD).await?;
        if revisions == Revisions::Bumped {
            let missing = last.saturating_sub(self.revision().await?) + 1;
            let put = json!({"key": KEY, "value": KEY});
            let puts = (0..missing).map(|_| self.etcd("kv/put", &put));
            futures::stream::iter(puts).buffer_unordered(16).try_for_each(|_| async { Ok(()) }).await?;
            self.etcd("kv/compaction", &json!({"revision": self.revision().await?.to_string()})).await?;
        }
        self.start(API_SERVER).await?;
        self.start(CONTROLLERS).await
    }

    /// Restarts every component that watches the management cluster, except its control plane.
    pub async fn restart_watchers_of_management(&self) -> Result<()> {
        let watches = |name: &str, program: &str| match program {
            "mgmt-csi" | "gc-csi" | "vm-operator-shim" => true,
            "snapshot-controller" => name.starts_with("mgmt-"),
            _ => false,
        };
        for (name, component) in self.run().state()?.components {
            let program = component.argv.first().and_then(|path| path.rsplit('/').next()).unwrap_or_default();
            if watches(&name, program) {
                self.restart(&name).await?;
            }
        }
        Ok(())
    }

    fn etcd_data(&self) -> PathBuf {
        self.run().path("clusters/mgmt/etcd")
    }

    async fn revision(&self) -> Result<u64> {
        let answer = self.etcd("kv/range", &json!({"key": KEY})).await?;
        let revision = answer["header"]["revision"].as_str().and_then(|text| text.parse().ok());
        revision.with_context(|| format!("etcd's response has no revision: {answer}"))
    }

    /// An HTTP client with the API server's certificate for etcd.
    fn etcd_client(&self) -> Result<reqwest::Client> {
        let file = |name: &str| {
            let path = self.run().path("clusters/mgmt").join(name);
            std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
        };
        let identity =
            reqwest::Identity::from_pem(&[file("etcd-client.crt")?, file("etcd-client.key")?].concat())?;
        // Fails only if a provider is already installed.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let ca = reqwest::Certificate::from_pem(&file("etcd-ca.crt")?)?;
        let client = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(30));
        Ok(client.tls_certs_only([ca]).identity(identity).build()?)
    }

    /// Calls etcd's v3 API with JSON.
    async fn etcd(&self, call: &str, request: &Value) -> Result<Value> {
        let component = self.state().components.get(ETCD).context("the lab has no etcd")?;
        let address = component.argv.iter().find_map(|word| word.strip_prefix("--advertise-client-urls="));
        let url = format!("{}/v3/{call}", address.context("etcd has no address")?);
        let answer = self.etcd_client()?.post(&url).body(request.to_string()).send().await?;
        let text = answer.error_for_status()?.text().await?;
        serde_json::from_str(&text).with_context(|| format!("{url}: bad response: {text}"))
    }
}

async fn copy(from: &Path, to: &Path) -> Result<()> {
    run(command("cp", ["-a"]).arg(from).arg(to)).await.map(drop)
}

/// A process that is stopped (SIGSTOP) until this is dropped.
struct StoppedProcess(Process);

impl StoppedProcess {
    async fn stop(process: Process) -> Result<Self> {
        process.signal(Signal::STOP)?;
        let guard = Self(process);
        let stopped = until(Duration::from_secs(120), || is_stopped(process.pid).then_some(())).await;
        stopped.with_context(|| format!("process {} did not stop", process.pid))?;
        Ok(guard)
    }
}

impl Drop for StoppedProcess {
    fn drop(&mut self) {
        let _ = self.0.signal(Signal::CONT);
    }
}

/// Whether every thread of a process is stopped.
fn is_stopped(pid: i32) -> bool {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    tasks.flatten().all(|task| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
    })
}
