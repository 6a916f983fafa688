//! Single processes of our binaries, started with whatever a test wants to give them.

use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use lab::Lab;
use serde_json::json;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};

use crate::{PATIENCE, eventually};

/// One of the lab's binaries.
pub fn binary(lab: &Lab, name: &str) -> PathBuf {
    lab.state().binaries.join(name)
}

/// How a process ended.
#[derive(Debug)]
pub struct Ended {
    /// Its exit code; None when a signal ended it.
    pub code: Option<i32>,
    /// What it wrote to standard error.
    pub stderr: String,
}

/// Runs a program that should end by itself.
pub async fn run_to_end(program: &Path, arguments: &[&str]) -> Result<Ended> {
    let mut command = command(program, arguments);
    let output = tokio::time::timeout(PATIENCE, command.output())
        .await
        .with_context(|| format!("{} {arguments:?} did not end", program.display()))?
        .with_context(|| format!("cannot run {}", program.display()))?;
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    Ok(Ended { code: output.status.code(), stderr })
}

fn command(program: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command.env_remove("KUBECONFIG").env_remove("NESTOR_LOG").kill_on_drop(true);
    command
}

/// A process that runs until it is stopped or dropped.
pub struct Running {
    child: Mutex<Child>,
    log: Arc<Mutex<String>>,
    port: u16,
}

impl Running {
    /// Starts a program with `--http-listen` on a port of its own.
    pub async fn start(program: &Path, arguments: &[&str]) -> Result<Self> {
        let port = TcpListener::bind("127.0.0.1:0").await?.local_addr()?.port();
        let listen = format!("127.0.0.1:{port}");
        let mut arguments = arguments.to_vec();
        arguments.extend(["--http-listen", &listen]);
        let mut child = command(program, &arguments).spawn()?;
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

    /// What it wrote to standard error so far.
    pub fn log(&self) -> String {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Status and text of a page of its HTTP port.
    pub async fn get(&self, path: &str) -> Result<(u16, String)> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).await?;
        stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").as_bytes()).await?;
        let mut answer = String::new();
        tokio::time::timeout(Duration::from_secs(10), stream.read_to_string(&mut answer)).await??;
        let status = answer.split_whitespace().nth(1).and_then(|code| code.parse().ok());
        let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body).to_owned();
        Ok((status.context("not an HTTP answer")?, body))
    }

    /// How it ended, if it did.
    fn ended(&self) -> std::io::Result<Option<ExitStatus>> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner).try_wait()
    }

    /// Waits until `/readyz` fails with all of these texts, while the process runs.
    pub async fn not_ready_because(&self, texts: &[&str]) -> Result<String> {
        eventually(&format!("/readyz fails with {texts:?}"), PATIENCE, || async {
            if let Some(status) = self.ended()? {
                anyhow::bail!("it ended with {status}: {}", self.log());
            }
            Ok(match self.get("/readyz").await {
                Ok((503, text)) if texts.iter().all(|part| text.contains(part)) => Ok(text),
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

    /// Asks it to stop, and gives its exit status.
    pub async fn stop(self) -> Result<ExitStatus> {
        let mut child = self.child.into_inner().unwrap_or_else(PoisonError::into_inner);
        let pid = child.id().and_then(|id| rustix::process::Pid::from_raw(id as i32));
        rustix::process::kill_process(pid.context("it ended before")?, rustix::process::Signal::TERM)?;
        let ended = tokio::time::timeout(Duration::from_secs(30), child.wait()).await;
        ended.context("it did not end within 30 s of SIGTERM")?.map_err(Into::into)
    }
}

/// Writes a kubeconfig for a bearer token.
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
    // JSON is YAML.
    std::fs::write(path, serde_json::to_vec(&file)?)?;
    Ok(())
}
