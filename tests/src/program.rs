//! Single processes of our programs and of sidecars, started with the flags of a test.

use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use lab::Lab;
use lab::state::Cluster;
use serde_json::json;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};

use crate::driver::Driver;
use crate::paused_process::PausedProcess;
use crate::scenario::GUEST;
use crate::{PATIENCE, Scenario, eventually};

/// One of the lab's programs.
pub fn binary(lab: &Lab, name: &str) -> PathBuf {
    lab.state().binaries.join(name)
}

/// Result of a process.
#[derive(Debug)]
pub struct Ended {
    /// Exit code; `None` if a signal killed it.
    pub code: Option<i32>,
    /// Its standard error.
    pub stderr: String,
}

/// Runs a program that should exit.
pub async fn run_to_end(program: &Path, arguments: &[&str]) -> Result<Ended> {
    let mut command = command(program, arguments);
    let output = tokio::time::timeout(PATIENCE, command.output())
        .await
        .with_context(|| format!("{} {arguments:?} did not exit", program.display()))?
        .with_context(|| format!("cannot run {}", program.display()))?;
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    Ok(Ended { code: output.status.code(), stderr })
}

fn command(program: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let ours = std::env::vars_os().map(|(name, _)| name);
    for name in ours.filter(|name| name.to_string_lossy().starts_with("NESTOR_")) {
        command.env_remove(name);
    }
    command.env_remove("KUBECONFIG").kill_on_drop(true);
    command
}

/// A process that runs until it is stopped or dropped.
pub struct Running {
    child: Mutex<Child>,
    log: Arc<Mutex<String>>,
    port: u16,
}

impl Running {
    /// Starts a program with `--http-listen` on a free port.
    pub async fn start(program: &Path, arguments: &[&str]) -> Result<Self> {
        Self::listening(program, arguments, "--http-listen", None).await
    }

    /// Starts a sidecar of the Kubernetes project for the first guest with a driver's socket, and waits until it has
    /// connected to the driver.
    pub async fn sidecar(s: &Scenario, name: &str, socket: &Path, more: &[&str]) -> Result<Self> {
        let state = s.lab.state();
        let guest = state.guests.get(GUEST).context("the lab has no such guest")?;
        let address = format!("--csi-address={}", socket.display());
        let kubeconfig = format!("--kubeconfig={}", guest.cluster.kubeconfig_of(name).display());
        let words = [&[&address, &kubeconfig, "--leader-election=false", "--timeout=60s"], more].concat();
        let running = Self::listening(&state.tools.join(name), &words, "--http-endpoint", None).await?;
        eventually(&format!("{name} is connected to its driver"), PATIENCE, || async {
            Ok(match running.get("/metrics").await {
                Ok((200, _)) => Ok(()),
                other => Err(format!("{other:?}; log: {}", running.log())),
            })
        })
        .await?;
        Ok(running)
    }

    /// Starts a program with this flag set to a free port, and optionally a folder of fail points.
    pub(crate) async fn listening(
        program: &Path,
        arguments: &[&str],
        flag: &str,
        fail_points: Option<&Path>,
    ) -> Result<Self> {
        let port = TcpListener::bind("127.0.0.1:0").await?.local_addr()?.port();
        let listen = format!("{flag}=127.0.0.1:{port}");
        let arguments = [arguments, &[&listen]].concat();
        let mut command = command(program, &arguments);
        command.envs(fail_points.map(|folder| (fail_point::DIRECTORY_VAR, folder)));
        let mut child = command.spawn()?;
        let stderr = child.stderr.take().context("no standard error")?;
        let log = Arc::new(Mutex::new(String::new()));
        let written = log.clone();
        tokio::spawn(async move {
            let mut lines = BufReader::new(stderr).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                let mut log = written.lock().unwrap_or_else(PoisonError::into_inner);
                log.push_str(&line);
                log.push('\n');
            }
        });
        Ok(Self { child: Mutex::new(child), log, port })
    }

    /// The port on which it listens.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// The address on which it listens.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Its standard error so far.
    pub fn log(&self) -> String {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until its standard error contains this text; lines may arrive with a delay.
    pub async fn has_logged(&self, text: &str) -> Result<()> {
        eventually(&format!("\"{text}\" is logged"), PATIENCE, || async {
            let log = self.log();
            Ok(if log.contains(text) { Ok(()) } else { Err(log) })
        })
        .await
    }

    /// Status and body of an HTTP page.
    pub async fn get(&self, path: &str) -> Result<(u16, String)> {
        self.request(path, "").await
    }

    /// Status and body of an HTTP page that is requested with a bearer token.
    pub async fn get_with_token(&self, path: &str, token: &str) -> Result<(u16, String)> {
        self.request(path, &format!("Authorization: Bearer {token}\r\n")).await
    }

    async fn request(&self, path: &str, headers: &str) -> Result<(u16, String)> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).await?;
        let request = format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n{headers}\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        tokio::time::timeout(Duration::from_secs(10), stream.read_to_string(&mut answer)).await??;
        let status = answer.split_whitespace().nth(1).and_then(|code| code.parse().ok());
        let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body).to_owned();
        Ok((status.context("not an HTTP response")?, body))
    }

    /// Its exit status, if it has exited.
    fn ended(&self) -> std::io::Result<Option<ExitStatus>> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner).try_wait()
    }

    /// Waits until it has ended by itself.
    pub async fn wait_for_exit(&self) -> Result<ExitStatus> {
        eventually("the process ends by itself", PATIENCE, || async {
            Ok(self.ended()?.ok_or_else(|| format!("it runs; log: {}", self.log())))
        })
        .await
    }

    /// Waits until `/readyz` fails with a body that contains all of `texts`, while the process runs.
    pub async fn not_ready_because(&self, texts: &[&str]) -> Result<String> {
        eventually(&format!("/readyz fails with {texts:?}"), PATIENCE, || async {
            if let Some(status) = self.ended()? {
                anyhow::bail!("it exited with {status}: {}", self.log());
            }
            Ok(match self.get("/readyz").await {
                Ok((503, body)) if texts.iter().all(|text| body.contains(text)) => Ok(body),
                other => Err(format!("{other:?}")),
            })
        })
        .await
    }

    /// Waits until `/readyz` passes.
    pub async fn ready(&self) -> Result<()> {
        eventually("/readyz passes", PATIENCE, || async {
            Ok(match self.get("/readyz").await {
                Ok((200, _)) => Ok(()),
                other => Err(format!("{other:?}; log: {}", self.log())),
            })
        })
        .await
    }

    /// Pauses the process (SIGSTOP) until the result is dropped.
    pub fn pause(&self) -> Result<PausedProcess> {
        let id = self.child.lock().unwrap_or_else(PoisonError::into_inner).id();
        PausedProcess::stop(
            id.and_then(|id| rustix::process::Pid::from_raw(id as i32)).context("it has exited")?,
        )
    }

    /// Waits until the process has stopped itself at a `pause` fail point. It continues when the result is dropped.
    pub async fn wait_until_paused(&self) -> Result<PausedProcess> {
        let id = self.child.lock().unwrap_or_else(PoisonError::into_inner).id().context("it has exited")?;
        eventually("the process has stopped itself", PATIENCE, || async {
            let stat = std::fs::read_to_string(format!("/proc/{id}/stat"))?;
            let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
            Ok(if state == Some('T') { Ok(()) } else { Err(format!("{state:?}; log: {}", self.log())) })
        })
        .await?;
        self.pause()
    }

    /// Stops it with SIGTERM, and returns its exit status.
    pub async fn stop(self) -> Result<ExitStatus> {
        let mut child = self.child.into_inner().unwrap_or_else(PoisonError::into_inner);
        let pid = child.id().and_then(|id| rustix::process::Pid::from_raw(id as i32));
        rustix::process::kill_process(pid.context("it has exited")?, rustix::process::Signal::TERM)?;
        let ended = tokio::time::timeout(Duration::from_secs(30), child.wait()).await;
        ended.context("it did not exit within 30 s of SIGTERM")?.map_err(Into::into)
    }
}

/// A second controller of the first guest's driver, beside the lab's own, with its own flags.
pub struct Controller {
    /// The process.
    pub process: Running,
    /// Its Controller service.
    pub driver: Driver,
    folder: TempDir,
}

impl Controller {
    /// Starts it with additional flags. `${FOLDER}` in them is a temporary folder, for sockets.
    pub async fn start(s: &Scenario, more: &[&str]) -> Result<Self> {
        Self::start_as(s, &s.cluster_id, more).await
    }

    /// Starts it with another cluster ID and a folder of fail points.
    pub async fn start_with_fail_points(
        s: &Scenario,
        cluster_id: &str,
        more: &[&str],
        folder: &Path,
    ) -> Result<Self> {
        let (namespace, kubeconfig) = Self::home(s, cluster_id).await?;
        Self::begin(s, &namespace, &kubeconfig, cluster_id, more, Some(folder)).await
    }

    /// Starts it with another cluster ID, so that the lab's controller does not touch its claims.
    pub async fn start_as(s: &Scenario, cluster_id: &str, more: &[&str]) -> Result<Self> {
        let (namespace, kubeconfig) = Self::home(s, cluster_id).await?;
        Self::start_in(s, &namespace, &kubeconfig, cluster_id, more).await
    }

    /// The first guest's namespace in the management cluster, and the kubeconfig of an account there with this cluster ID.
    async fn home(s: &Scenario, cluster_id: &str) -> Result<(String, PathBuf)> {
        let guest = match cluster_id == s.cluster_id {
            true => s.lab.state().guests.get(GUEST).context("the lab has no such guest")?.clone(),
            false => s.account(&s.namespace, cluster_id).await?,
        };
        Ok((guest.namespace.clone(), management_cluster(s)?.kubeconfig_of(&guest.account())))
    }

    /// Starts it for another namespace of the management cluster, with this kubeconfig.
    pub async fn start_in(
        s: &Scenario,
        namespace: &str,
        kubeconfig: &Path,
        cluster_id: &str,
        more: &[&str],
    ) -> Result<Self> {
        Self::begin(s, namespace, kubeconfig, cluster_id, more, None).await
    }

    async fn begin(
        s: &Scenario,
        namespace: &str,
        kubeconfig: &Path,
        cluster_id: &str,
        more: &[&str],
        fail_points: Option<&Path>,
    ) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let own = folder.path().display().to_string();
        let guest = s.lab.state().guests.get(GUEST).context("the lab has no such guest")?;
        let socket = folder.path().join("csi.sock");
        let mut words = vec![
            format!("--endpoint=unix://{}", socket.display()),
            format!("--guest-kubeconfig={}", guest.cluster.kubeconfig_of("gc-csi-controller").display()),
            format!("--management-kubeconfig={}", kubeconfig.display()),
            format!("--management-namespace={namespace}"),
            format!("--cluster-id={cluster_id}"),
        ];
        words.extend(more.iter().map(|word| word.replace("${FOLDER}", &own)));
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let binary = binary(&s.lab, "gc-csi");
        let process = Running::listening(&binary, &words, "--http-listen", fail_points).await?;
        process.ready().await?;
        let driver = eventually("the second controller serves", PATIENCE, || async {
            Ok(Driver::connect(&socket).await.map_err(|error| format!("{error:#}; {}", process.log())))
        })
        .await?;
        Ok(Self { process, driver, folder })
    }

    /// Path of a socket in its folder.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Stops it; fails unless it exits successfully.
    pub async fn stop(self) -> Result<()> {
        let status = self.process.stop().await?;
        anyhow::ensure!(status.success(), "it exited with {status}");
        Ok(())
    }
}

/// The management cluster of the lab.
pub fn management_cluster(s: &Scenario) -> Result<&Cluster> {
    s.lab.state().management.as_ref().context("the lab has no management cluster")
}

/// Starts a replica of vm-operator-shim beside the lab's, with additional flags. It takes over an expired Lease within
/// seconds.
pub async fn shim_replica(s: &Scenario, kubeconfig: &Path, more: &[&str]) -> Result<Running> {
    let kubeconfig = format!("--kubeconfig={}", kubeconfig.display());
    let lease = [
        "--lease-namespace=nestor-system",
        "--lease-duration=5s",
        "--lease-renew-deadline=4s",
        "--lease-retry-period=1s",
    ];
    let words = [&[&*kubeconfig], &lease[..], more].concat();
    let running = Running::start(&binary(&s.lab, "vm-operator-shim"), &words).await?;
    running.ready().await?;
    Ok(running)
}

/// Writes a kubeconfig with a bearer token.
pub fn kubeconfig(path: &Path, server: &str, ca: Option<&Path>, token: &str) -> Result<()> {
    let cluster = match ca {
        Some(ca) => json!({"server": server, "certificate-authority": ca}),
        None => json!({"server": server, "insecure-skip-tls-verify": true}),
    };
    let file = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    });
    // JSON is valid YAML.
    std::fs::write(path, serde_json::to_vec(&file)?)?;
    Ok(())
}
