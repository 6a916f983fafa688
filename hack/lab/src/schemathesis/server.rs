//! A storage-infra with objects of every kind.
//!
//! Requests name directories of the host for pools. Therefore the server has the rights of `nobody` if this process is root,
//! and all its files are in a temporary directory.

use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use infra_api::{
    Access, Account, AttachmentSpec, BudgetSpec, Client, ClientOptions, EngineKind, Labels, NodeSpec, OnFull,
    Owner, PoolSpec, Qos, Role, SnapshotSpec, VolumeSpec,
};
use rustix::process::{Pid, Signal, geteuid, kill_process};
use tokio::process::{Child, Command};
use uuid::Uuid;

use crate::ports;
use crate::process::{run, tail};
use crate::ready::Ready;
use crate::wait::eventually;

/// User and group `nobody`.
const NOBODY: u32 = 65534;
/// The account of a volume and its snapshot, and of the backup's certificate.
const ACCOUNT: &str = "g1";
/// More than a server needs to start, to stop, or to attach a simulated disk.
const PATIENCE: Duration = Duration::from_secs(90);

/// A running server. It is killed on drop.
pub(super) struct Server {
    child: Child,
    port: u16,
    health: Ready,
    log: PathBuf,
    dir: tempfile::TempDir,
}

impl Server {
    /// Starts a server on new data.
    pub(super) async fn start(program: &Path, log: &Path) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("nestor-schemathesis-").tempdir()?;
        let own = dir.path().join("storage-infra");
        // `nobody` cannot read all folders of a user.
        fs::copy(program, &own).with_context(|| format!("cannot copy {}", program.display()))?;
        if geteuid().is_root() {
            chown(dir.path(), Some(NOBODY), Some(NOBODY))?;
        }
        for words in [
            &["init", "--host", "127.0.0.1", "--dir"][..],
            &["issue", "--role", "backup", "--account", ACCOUNT, "--dir"],
        ] {
            run(unprivileged(&own).arg("pki").args(words).arg(dir.path().join("pki"))).await?;
        }
        let free = ports::free(2)?;
        let child = serve(&own, dir.path(), &free, log)?;
        let mut server =
            Self { child, port: free[0], health: Ready::http(free[1], "/readyz"), log: log.to_owned(), dir };
        server.wait_ready().await.with_context(|| tail(log, 20))?;
        server.fill().await.context("cannot create the objects")?;
        Ok(server)
    }

    /// Waits until it serves; fails at once if it exits.
    async fn wait_ready(&mut self) -> Result<()> {
        eventually("storage-infra is ready", PATIENCE, || {
            let exited = self.child.try_wait();
            let check = self.health.check();
            async move {
                ensure!(exited?.is_none(), "storage-infra exited");
                Ok(check.await)
            }
        })
        .await
    }

    pub(super) fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    /// The folder with the directories of the pools.
    pub(super) fn pools(&self) -> PathBuf {
        self.dir.path().join("pools")
    }

    /// The files of the CA, of the role's certificate, and of its key.
    pub(super) fn certificates(&self, role: Role) -> (PathBuf, PathBuf, PathBuf) {
        let file = |name: String| self.dir.path().join("pki").join(name);
        (file("ca.crt".to_owned()), file(format!("{role}.crt")), file(format!("{role}.key")))
    }

    fn client(&self) -> Result<Client> {
        let pki = self.dir.path().join("pki");
        Ok(Client::new(&ClientOptions::from_pki_dir(self.url(), &pki, Role::Operator))?)
    }

    /// Creates an object of every kind, whose names schemathesis.toml contains.
    async fn fill(&self) -> Result<()> {
        let client = self.client()?;
        let spec = PoolSpec {
            engine: EngineKind::File,
            path: self.pools().join("pool").display().to_string(),
            labels: Labels::from([("kind".to_owned(), "ssd".to_owned())]),
            cordoned: false,
            on_full: OnFull::default(),
            hosts: infra_api::PoolHosts::default(),
        };
        client.put_pool(&"pool".parse()?, &spec).await?;
        for number in 1..=2 {
            let hypervisor = "simulated".to_owned();
            let spec =
                NodeSpec { name: format!("vm-{number}"), hypervisor, zone: None, labels: Labels::new() };
            client.put_node(Uuid::from_u128(number), &spec).await?;
        }
        let account: Account = ACCOUNT.parse()?;
        let limits = BudgetSpec { volumes: Some(100), ..BudgetSpec::default() };
        client.put_budget(&account, &limits).await?;
        client
            .put_volume(&"a".parse()?, &volume(Owner { account, class: "gold".to_owned() }), PATIENCE)
            .await?;
        client.put_volume(&"b".parse()?, &volume(Owner::default()), PATIENCE).await?;
        let spec = SnapshotSpec { volume: "a".parse()?, account: Account::default(), labels: Labels::new() };
        client.put_snapshot(&"s".parse()?, &spec, PATIENCE).await?;
        let spec = AttachmentSpec {
            volume: "a".parse()?,
            node: Uuid::from_u128(1),
            read_only: false,
            access: Access::SingleNode,
        };
        client.attach(&"x".parse()?, &spec, PATIENCE).await?;
        Ok(())
    }

    /// Fails unless the server is healthy, stops on SIGTERM, and has logged no panic and no error of its own.
    pub(super) async fn finish(mut self) -> Result<()> {
        self.wait_ready().await.with_context(|| tail(&self.log, 20))?;
        let health = self.client()?.health().await?;
        ensure!(health.catalog_writable, "the catalog is not writable: {health:?}");
        let pid = self.child.id().and_then(|pid| Pid::from_raw(pid.try_into().ok()?));
        kill_process(pid.context("storage-infra exited")?, Signal::TERM)?;
        let status =
            tokio::time::timeout(PATIENCE, self.child.wait()).await.context("it does not stop")??;
        ensure!(status.success(), "storage-infra: {status}\n{}", tail(&self.log, 20));
        let log = fs::read_to_string(&self.log)?;
        let fault = log.lines().find(|line| line.contains("panicked at"));
        ensure!(fault.is_none(), "storage-infra panicked: {}", fault.unwrap_or_default());
        Ok(())
    }
}

fn volume(owner: Owner) -> VolumeSpec {
    VolumeSpec {
        qos: Qos { iops: Some(1000), bytes_per_second: None },
        owner,
        labels: Labels::from([("claim".to_owned(), "data".to_owned())]),
        ..VolumeSpec::of_size(4 << 20)
    }
}

/// The program with the rights of `nobody`, or with ours if we are not root.
fn unprivileged(program: &Path) -> Command {
    let mut command = crate::process::command::<&str>(&program.display().to_string(), []);
    if geteuid().is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
    command.current_dir("/");
    command
}

/// Serves the API and the health checks on these ports.
fn serve(program: &Path, dir: &Path, ports: &[u16], log: &Path) -> Result<Child> {
    let file = fs::File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
    let pki = |name: &str| dir.join("pki").join(name);
    for pool in ["pool", "other"] {
        let path = dir.join("pools").join(pool);
        fs::create_dir_all(&path)?;
        if geteuid().is_root() {
            chown(&path, Some(NOBODY), Some(NOBODY))?;
        }
    }
    let mut serve = unprivileged(program);
    serve.args(["serve", "--clients-without-role", "refuse"]);
    serve.arg("--data-dir").arg(dir.join("data"));
    serve.arg("--listen").arg(format!("127.0.0.1:{}", ports[0]));
    serve.arg("--http-listen").arg(format!("127.0.0.1:{}", ports[1]));
    serve.arg("--hypervisor").arg(format!("simulated=simulated:{}", dir.join("simulated").display()));
    serve.arg("--tls-cert").arg(pki("server.crt")).arg("--tls-key").arg(pki("server.key"));
    serve.arg("--client-ca").arg(pki("ca.crt"));
    serve.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file).kill_on_drop(true);
    serve.spawn().with_context(|| format!("cannot run {}", program.display()))
}
