//! The Ceph cluster of a lab whose pools have the engine `rbd`: daemons on this host, which listen on `[::1]` alone.
//!
//! QEMU opens images in the network namespace of the VMs, so the ports of the cluster are forwarded to `[::1]` there. The
//! VMs' own network is IPv4 alone: they do not reach these ports.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use ceph_kit::{Cluster, Daemon, OSDS};
use serde::{Deserialize, Serialize};

use crate::infra::POOLS;
use crate::lab::Lab;
use crate::ready::Ready;
use crate::run::Run;
use crate::state::Component;
use crate::ui::Ui;
use crate::wait::eventually;

/// How long the cluster may take to reach a state on a busy host.
const PATIENCE: Duration = Duration::from_secs(180);
/// The cephx user of the storage infra.
const USER: &str = "nestor";

/// Storage engine of the lab's pools.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// Files in two XFS filesystems.
    #[default]
    File,
    /// Images in two pools of a Ceph cluster, which the lab starts.
    Rbd,
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::File => "file",
            Self::Rbd => "rbd",
        })
    }
}

/// The name of a daemon's component.
fn component(daemon: Daemon) -> String {
    format!("ceph-{}", daemon.name().replace('.', "-"))
}

/// The cluster of a run.
fn cluster(run: &Run) -> Result<Cluster> {
    Cluster::open(&run.path("ceph"), &run.socket_dir())
        .context("the lab has no Ceph cluster: `cargo lab up --engine rbd` starts one")
}

/// The ports of a run's cluster that QEMU needs.
pub(crate) fn ports(run: &Run) -> Result<Vec<u16>> {
    Ok(cluster(run)?.ports().collect())
}

/// Starts a cluster with the pools of the lab. Returns their paths in the storage infra.
pub(crate) async fn start(ui: &Ui, run: &Run) -> Result<BTreeMap<String, PathBuf>> {
    let step = ui.step("Ceph cluster");
    let dir = run.path("ceph");
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let sockets = run.socket_dir();
    let cluster = blocking(move || Cluster::create(&dir, &sockets)).await?;
    launch(run, &cluster, Daemon::Monitor).await?;
    await_monitor(&cluster).await?;
    launch(run, &cluster, Daemon::Manager).await?;
    for id in OSDS {
        let own = cluster.clone();
        blocking(move || own.format_osd(id)).await?;
        launch(run, &cluster, Daemon::Osd(id)).await?;
    }
    await_osds(&cluster, OSDS.len() as u64).await?;
    let own = cluster.clone();
    blocking(move || {
        POOLS.iter().try_for_each(|pool| own.create_pool(pool))?;
        own.create_user(USER, &POOLS, None)
    })
    .await?;
    await_clean(&cluster).await?;
    step.done();
    let path = |pool: &str| PathBuf::from(cluster.pool_path(USER, pool, None));
    Ok(POOLS.iter().map(|pool| ((*pool).to_owned(), path(pool))).collect())
}

async fn launch(run: &Run, cluster: &Cluster, daemon: Daemon) -> Result<()> {
    let part = Component {
        argv: cluster.command_line(daemon),
        env: BTreeMap::new(),
        ready: Ready::Socket(cluster.socket(daemon)),
        http: None,
        grace: 30,
        driver: None,
    };
    run.launch(&component(daemon), part).await
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work).await.context("a call of Ceph panicked")?
}

async fn await_monitor(cluster: &Cluster) -> Result<()> {
    eventually("the monitor answers", PATIENCE, || async {
        let own = cluster.clone();
        let answers = blocking(move || Ok(own.answers())).await?;
        Ok(answers.then_some(()).ok_or_else(|| "it does not".to_owned()))
    })
    .await
}

async fn await_osds(cluster: &Cluster, expected: u64) -> Result<()> {
    eventually(&format!("{expected} OSDs run"), PATIENCE, || async {
        let own = cluster.clone();
        let up = blocking(move || own.osds_up()).await?;
        Ok(if up == expected { Ok(()) } else { Err(format!("{up} run")) })
    })
    .await
}

async fn await_clean(cluster: &Cluster) -> Result<()> {
    eventually("each placement group of Ceph has its replicas", PATIENCE, || async {
        let own = cluster.clone();
        Ok(match blocking(move || Ok((own.is_clean()?, own.ceph(&["pg", "stat"])?))).await? {
            (true, _) => Ok(()),
            (false, stat) => Err(stat),
        })
    })
    .await
}

/// Faults of a lab's Ceph cluster.
#[derive(Debug, Clone)]
pub struct Ceph<'a> {
    lab: &'a Lab,
    cluster: Cluster,
}

impl Lab {
    /// The Ceph cluster of a lab with the engine `rbd`.
    pub fn ceph(&self) -> Result<Ceph<'_>> {
        Ok(Ceph { lab: self, cluster: cluster(self.run())? })
    }
}

impl Ceph<'_> {
    /// Kills an OSD, and waits until the monitor knows.
    pub async fn kill_osd(&self, id: u8) -> Result<()> {
        self.lab.kill(&component(Daemon::Osd(id))).await?;
        await_osds(&self.cluster, OSDS.len() as u64 - 1).await
    }

    /// Starts the OSD that was killed, and waits until it has all data again.
    pub async fn start_osd(&self, id: u8) -> Result<()> {
        self.lab.start(&component(Daemon::Osd(id))).await?;
        await_osds(&self.cluster, OSDS.len() as u64).await?;
        await_clean(&self.cluster).await
    }

    /// Kills the monitor.
    pub async fn kill_monitor(&self) -> Result<()> {
        self.lab.kill(&component(Daemon::Monitor)).await
    }

    /// Starts the monitor, and waits until it answers.
    pub async fn start_monitor(&self) -> Result<()> {
        self.lab.start(&component(Daemon::Monitor)).await?;
        await_monitor(&self.cluster).await
    }

    /// Output of `ceph` as administrator.
    pub async fn ceph(&self, arguments: &[&str]) -> Result<String> {
        self.call(arguments, Cluster::ceph).await
    }

    /// Output of `rbd` as administrator.
    pub async fn rbd(&self, arguments: &[&str]) -> Result<String> {
        self.call(arguments, Cluster::rbd).await
    }

    /// The names of the images in a pool and in its trash.
    pub(crate) async fn images(&self, pool: &str) -> Result<Vec<String>> {
        let listed = self.rbd(&["ls", "--pool", pool]).await?;
        let trash = self.rbd(&["trash", "ls", "--all", "--pool", pool]).await?;
        Ok(listed.lines().chain(trash.lines()).map(str::to_owned).collect())
    }

    async fn call(
        &self,
        arguments: &[&str],
        program: fn(&Cluster, &[&str]) -> Result<String>,
    ) -> Result<String> {
        let own = self.cluster.clone();
        let words: Vec<String> = arguments.iter().map(|word| (*word).to_owned()).collect();
        blocking(move || program(&own, &words.iter().map(String::as_str).collect::<Vec<_>>())).await
    }

    /// The ports on which its daemons listen.
    pub fn ports(&self) -> Vec<u16> {
        self.cluster.ports().collect()
    }
}
