//! containerd on this host, with a folder of its own: imports images and runs containers.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tempfile::TempDir;
use tokio::process::{Child, Command};
use uuid::Uuid;

use crate::wait::eventually;

/// Importing an image takes seconds, on a busy host minutes.
const PATIENCE: Duration = Duration::from_secs(300);

/// The CRI plugins are disabled: they need a network and CNI.
const CONFIG: &str = r#"version = 3
root = "FOLDER/root"
state = "FOLDER/state"
disabled_plugins = [
  "io.containerd.grpc.v1.cri",
  "io.containerd.cri.v1.images",
  "io.containerd.cri.v1.runtime",
  "io.containerd.nri.v1.nri",
]
[grpc]
  address = "FOLDER/containerd.sock"
[ttrpc]
  address = "FOLDER/containerd.sock.ttrpc"
"#;

/// A containerd that is killed when this is dropped.
pub struct Containerd {
    tools: PathBuf,
    folder: TempDir,
    child: Child,
}

impl Containerd {
    /// Starts the containerd in a folder of tools and waits until it responds.
    pub async fn start(tools: &Path) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let config = folder.path().join("config.toml");
        std::fs::write(&config, CONFIG.replace("FOLDER", &folder.path().display().to_string()))?;
        let log = std::fs::File::create(folder.path().join("log"))?;
        let mut containerd = Command::new(tools.join("containerd"));
        containerd.arg("--config").arg(&config).env("PATH", path(tools));
        containerd.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).kill_on_drop(true);
        let child = containerd.spawn().context("cannot start containerd")?;
        let this = Self { child, tools: tools.to_owned(), folder };
        eventually("containerd responds", PATIENCE, || async {
            Ok(this.ctr(&["version"]).await.map(drop).map_err(|error| format!("{error:#}; {}", this.log())))
        })
        .await?;
        Ok(this)
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// Runs `ctr` and returns its output.
    pub async fn ctr(&self, args: &[&str]) -> Result<String> {
        let mut ctr = Command::new(self.tools.join("ctr"));
        ctr.arg("--address").arg(self.folder.path().join("containerd.sock")).args(args);
        ctr.env("PATH", path(&self.tools)).stdin(Stdio::null()).kill_on_drop(true);
        let output = tokio::time::timeout(PATIENCE, ctr.output()).await;
        let output = output.with_context(|| format!("ctr {args:?} did not exit"))??;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let more = String::from_utf8_lossy(&output.stderr);
        match output.status.success() {
            true => Ok(format!("{text}{more}")),
            false => bail!("ctr {args:?} ended with {}: {text}{more}", output.status),
        }
    }

    /// Runs a command in a container with a read-only root, and returns its output.
    pub async fn run(&self, image: &str, words: &[&str]) -> Result<String> {
        let id = Uuid::new_v4().to_string();
        let how = ["run", "--rm", "--snapshotter", "native", "--read-only", image, &id];
        self.ctr(&[&how, words].concat()).await
    }

    /// The folder with its content and snapshots.
    pub(crate) fn root(&self) -> PathBuf {
        self.folder.path().join("root")
    }

    /// Stops containerd. Its folder is removed with the value.
    pub async fn stop(&mut self) -> Result<()> {
        let pid = self.child.id().and_then(|id| rustix::process::Pid::from_raw(id as i32));
        rustix::process::kill_process(pid.context("it ended before")?, rustix::process::Signal::TERM)?;
        let ended = tokio::time::timeout(Duration::from_secs(30), self.child.wait()).await;
        ended.context("containerd did not end within 30 s of SIGTERM")?.map(drop).map_err(Into::into)
    }
}

/// A PATH with the containerd shim and runc.
fn path(tools: &Path) -> String {
    format!("{}:{}", tools.display(), std::env::var("PATH").unwrap_or_default())
}
