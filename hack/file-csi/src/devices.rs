//! Block devices of volumes: a loop device of the host, and a bind mount of it for each pod in the node's mount namespace.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

use tokio::process::Command;

use crate::files::{Files, Kind};

/// Mounts a device on a file, once.
const PUBLISH: &str =
    r#"mountpoint --quiet "$2" && exit; mkdir -p "$(dirname "$2")"; touch "$2"; mount --bind "$1" "$2""#;
/// Unmounts and removes a file, if it exists.
const UNPUBLISH: &str =
    r#"[ -e "$1" ] || exit 0; while mountpoint --quiet "$1"; do umount "$1"; done; rm "$1""#;
/// Whether a device is mounted on any file.
const USERS: &str = r#"grep --count " /${1#/dev/} /" /proc/self/mountinfo || true"#;

/// Devices of volumes.
#[derive(Debug, Clone)]
pub(crate) struct Devices {
    pub(crate) files: Files,
    /// File with the PID of a process of the node.
    pub(crate) node_pid: PathBuf,
}

impl Devices {
    /// Makes the volume's device available at a path of the node.
    pub(crate) async fn publish(&self, volume: &str, target: &str) -> io::Result<()> {
        let file = self.files.path(Kind::Volume, volume).ok_or(io::ErrorKind::NotFound)?;
        // The device of a file that has one already is that one.
        let device = run(
            "losetup",
            ["--find", "--show", "--nooverlap"].map(OsStr::new).into_iter().chain([file.as_os_str()]),
        )
        .await?;
        self.on_node(PUBLISH, &[device.trim(), target]).await.map(drop)
    }

    /// Removes the path, and the device unless another path has it.
    pub(crate) async fn unpublish(&self, volume: &str, target: &str) -> io::Result<()> {
        self.on_node(UNPUBLISH, &[target]).await?;
        let Some(device) = self.device(volume).await? else { return Ok(()) };
        match self.on_node(USERS, &[&device]).await?.trim() {
            "0" => run("losetup", ["--detach", &device].map(OsStr::new)).await.map(drop),
            _ => Ok(()),
        }
    }

    /// Gives the device the size of its file.
    pub(crate) async fn refresh(&self, volume: &str) -> io::Result<()> {
        let Some(device) = self.device(volume).await? else { return Ok(()) };
        run("losetup", ["--set-capacity", &device].map(OsStr::new)).await.map(drop)
    }

    /// The volume's device, if there is one.
    pub(crate) async fn device(&self, volume: &str) -> io::Result<Option<String>> {
        let Some(file) = self.files.path(Kind::Volume, volume) else { return Ok(None) };
        let arguments = ["--noheadings", "--output", "NAME", "--associated"].map(OsStr::new);
        let listed = run("losetup", arguments.into_iter().chain([file.as_os_str()])).await?;
        Ok(listed.lines().next().map(|line| line.trim().to_owned()))
    }

    /// Runs a shell script in the node's namespaces: its `/proc` has no other processes.
    async fn on_node(&self, script: &str, arguments: &[&str]) -> io::Result<String> {
        let pid = std::fs::read_to_string(&self.node_pid)?;
        let words = ["--target", pid.trim(), "--mount", "--pid", "sh", "-euc", script, "sh"];
        run("nsenter", words.iter().chain(arguments).map(OsStr::new)).await
    }
}

async fn run<'a>(program: &str, arguments: impl IntoIterator<Item = &'a OsStr>) -> io::Result<String> {
    let output = Command::new(program).args(arguments).kill_on_drop(true).output().await?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(io::Error::other(format!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim())))
}

/// Whether a path is one that kubelet gives.
pub(crate) fn is_absolute(path: &str) -> bool {
    Path::new(path).is_absolute()
}
