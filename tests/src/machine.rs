//! A Debian host whose init is a real systemd, in namespaces of this host: it needs no emulation, so it boots in seconds.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;
use tokio::process::{Child, Command};

use crate::{PATIENCE, eventually, unique};

const BOOT: &str = include_str!("machine.sh");

/// A running host. It ends when it is dropped.
pub struct Machine {
    init: Child,
    group: Group,
    folder: TempDir,
    shared: PathBuf,
}

impl Machine {
    /// Boots a copy of a root filesystem, kept in a folder. It sees `shared`, a folder of this host, at the same path.
    pub async fn boot(root: &Path, folder: &Path, shared: &Path) -> Result<Self> {
        let folder = tempfile::tempdir_in(folder)?;
        let mut copy = Command::new("cp");
        output(copy.args(["--archive", "--reflink=auto"]).arg(root).arg(folder.path().join("root"))).await?;
        let group = Group::create()?;
        let init = start(&folder, &group, shared)?;
        let machine = Self { init, group, folder, shared: shared.to_owned() };
        machine.has_booted().await?;
        Ok(machine)
    }

    /// Shuts it down, and boots it again.
    pub async fn reboot(&mut self) -> Result<()> {
        self.shut_down().await?;
        self.init = start(&self.folder, &self.group, &self.shared)?;
        self.has_booted().await
    }

    /// Shuts it down, and removes it.
    pub async fn remove(mut self) -> Result<()> {
        self.shut_down().await
    }

    async fn shut_down(&mut self) -> Result<()> {
        self.run("systemctl poweroff --no-block").await?;
        let ended = tokio::time::timeout(PATIENCE, self.init.wait()).await;
        ended.with_context(|| format!("it does not shut down: {}", self.console()))??;
        Ok(std::fs::remove_file(pid_file(&self.folder))?)
    }

    async fn has_booted(&self) -> Result<()> {
        eventually("the machine has booted", PATIENCE, || async {
            // It fails for every other state than `running`.
            let line = "systemctl is-system-running || true; systemctl --failed --no-legend --plain";
            match self.run(line).await {
                Ok(state) if state.trim() == "running" => Ok(Ok(())),
                Ok(state) if state.starts_with("degraded") => bail!("{state}"),
                other => Ok(Err(format!("{other:?}; {}", self.console()))),
            }
        })
        .await
    }

    /// What was printed before its systemd has a journal.
    fn console(&self) -> String {
        std::fs::read_to_string(console(&self.folder)).unwrap_or_default()
    }

    /// A path on the machine, as this host sees it.
    pub fn path(&self, inside: &str) -> PathBuf {
        root(&self.folder).join(inside.trim_start_matches('/'))
    }

    /// What shell commands on the machine print. An error if they fail.
    pub async fn run(&self, line: &str) -> Result<String> {
        let pid = std::fs::read_to_string(pid_file(&self.folder)).context("it has not started yet")?;
        let mut enter = Command::new("nsenter");
        enter.args(["--target", pid.trim(), "--mount", "--uts", "--ipc", "--net", "--pid"]);
        enter.args([
            "--root",
            "--wdns=/",
            "env",
            "-i",
            "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
            "sh",
            "-ec",
            line,
        ]);
        output(&mut enter).await
    }
}

fn root(folder: &TempDir) -> PathBuf {
    folder.path().join("root")
}

fn pid_file(folder: &TempDir) -> PathBuf {
    folder.path().join("pid")
}

fn console(folder: &TempDir) -> PathBuf {
    folder.path().join("console.log")
}

fn start(folder: &TempDir, group: &Group, shared: &Path) -> Result<Child> {
    let mut unshare = Command::new("unshare");
    unshare.args(["--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child", "sh", "-c", BOOT]);
    unshare.arg("sh").arg(root(folder)).arg(&group.0).arg(pid_file(folder)).arg(shared);
    let console = std::fs::File::create(console(folder))?;
    unshare.stdin(Stdio::null()).stdout(console.try_clone()?).stderr(console).kill_on_drop(true);
    unshare.spawn().context("cannot start unshare (Debian package util-linux)")
}

async fn output(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).kill_on_drop(true).output().await?;
    let [out, err] = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    ensure!(output.status.success(), "{command:?}: {out}{err}");
    Ok(out)
}

/// A control group (version 2). Those that systemd creates in it are removed with it.
struct Group(PathBuf);

impl Group {
    fn create() -> Result<Self> {
        let mounts = std::fs::read_to_string("/proc/self/mounts")?;
        let mut mounts = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let mount = mounts.find(|fields| fields.get(2) == Some(&"cgroup2"));
        let mount = mount.context("no control groups of version 2 are mounted")?;
        let folder = Path::new(mount[1]).join(unique("nestor-machine"));
        std::fs::create_dir(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        Ok(Self(folder))
    }
}

impl Drop for Group {
    /// Best effort: a group whose processes still end cannot be removed.
    fn drop(&mut self) {
        let mut find = std::process::Command::new("find");
        find.arg(&self.0).args(["-depth", "-type", "d", "-exec", "rmdir", "{}", ";"]);
        let _ = find.stdout(Stdio::null()).stderr(Stdio::null()).status();
    }
}
