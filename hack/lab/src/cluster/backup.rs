//! Copies of the management cluster's etcd, and what putting one back takes.

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
/// "nestor", as etcd's JSON has keys. No key of Kubernetes begins with it.
const KEY: &str = "bmVzdG9y";

/// What etcd held at one moment.
#[derive(Debug)]
pub struct Backup(TempDir);

/// What a restore does about revisions, from which Kubernetes makes resource versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Revisions {
    /// They go on after the last that anybody has seen, and all before are compacted, as by `etcdutl snapshot restore
    /// --bump-revision --mark-compacted`: watches begin anew.
    GoOn,
    /// They are given out a second time: a watch that goes on misses whatever happens until its own is reached again.
    ComeAgain,
}

impl Lab {
    /// Copies what the management cluster's etcd holds now, as a crash would leave it. Nobody notices.
    pub async fn back_up_management(&self) -> Result<Backup> {
        let folder = tempfile::tempdir()?;
        let process = self.run().process(ETCD).filter(Process::alive).context("etcd does not run")?;
        let _standing = Standing::still(process).await?;
        copy(&self.etcd_data(), &folder.path().join("etcd")).await?;
        Ok(Backup(folder))
    }

    /// Puts a copy back. Nothing but the control plane is started anew.
    pub async fn restore_management(&self, backup: &Backup, revisions: Revisions) -> Result<()> {
        for part in [CONTROLLERS, API_SERVER] {
            self.stop(part).await?;
        }
        // Nobody writes any more.
        let last = self.revision().await?;
        self.stop(ETCD).await?;
        let data = self.etcd_data();
        std::fs::remove_dir_all(&data).with_context(|| format!("cannot remove {}", data.display()))?;
        copy(&backup.0.path().join("etcd"), &data).await?;
        self.start(ETCD).await?;
        if revisions == Revisions::GoOn {
            let missing = last.saturating_sub(self.revision().await?) + 1;
            let put = json!({"key": KEY, "value": KEY});
            let puts = (0..missing).map(|_| self.etcd("kv/put", &put));
            futures::stream::iter(puts).buffer_unordered(16).try_for_each(|_| async { Ok(()) }).await?;
            self.etcd("kv/compaction", &json!({"revision": self.revision().await?.to_string()})).await?;
        }
        self.start(API_SERVER).await?;
        self.start(CONTROLLERS).await
    }

    /// Starts everything anew that watches the management cluster, besides its control plane.
    pub async fn restart_watchers_of_management(&self) -> Result<()> {
        let watches = |name: &str, program: &str| match program {
            "mgmt-csi" | "gc-csi" | "vm-operator-shim" => true,
            "snapshot-controller" => name.starts_with("mgmt-"),
            _ => false,
        };
        for (name, part) in self.run().state()?.parts {
            let program = part.argv.first().and_then(|path| path.rsplit('/').next()).unwrap_or_default();
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
        revision.with_context(|| format!("etcd answers without a revision: {answer}"))
    }

    /// A call of etcd's v3 API, in JSON.
    async fn etcd(&self, call: &str, request: &Value) -> Result<Value> {
        let part = self.state().parts.get(ETCD).context("the lab has no etcd")?;
        let url = format!("{}/v3/{call}", part.http.as_deref().context("etcd has no address")?);
        let client = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(30)).build()?;
        let answer = client.post(&url).body(request.to_string()).send().await?;
        let text = answer.error_for_status()?.text().await?;
        serde_json::from_str(&text).with_context(|| format!("{url} answers {text}"))
    }
}

async fn copy(from: &Path, to: &Path) -> Result<()> {
    run(command("cp", ["-a"]).arg(from).arg(to)).await.map(drop)
}

/// A process that stands still until this is dropped.
struct Standing(Process);

impl Standing {
    async fn still(process: Process) -> Result<Self> {
        process.signal(Signal::STOP)?;
        let standing = Self(process);
        let stopped = until(Duration::from_secs(120), || is_stopped(process.pid).then_some(())).await;
        stopped.with_context(|| format!("process {} does not stand still", process.pid))?;
        Ok(standing)
    }
}

impl Drop for Standing {
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
