//! Data directory of the lab's storage-infra: copy, restore, recover; and a second server over a copy.

use std::path::{Path, PathBuf};
use std::process::Output;

use anyhow::{Context, Result, ensure};
use infra_api::{Client, ClientOptions, Role};
use tempfile::TempDir;

use crate::program::{Running, binary};
use crate::{PATIENCE, Scenario, eventually};

const PART: &str = "storage-infra";

/// The data directory of the lab's storage-infra.
pub fn data_dir(s: &Scenario) -> PathBuf {
    s.lab.dir().join("infra/data")
}

/// Runs `storage-infra recover` on the lab's data directory; returns its output.
pub async fn recover(s: &Scenario, arguments: &[&str]) -> Result<String> {
    let hypervisor = format!("loop=loop:{}", s.lab.dir().join("infra/loop").display());
    run_on_data(s, "recover", &[&["--hypervisor", &hypervisor], arguments].concat()).await
}

/// Runs a command of storage-infra on the lab's data directory; returns its output.
pub async fn run_on_data(s: &Scenario, name: &str, arguments: &[&str]) -> Result<String> {
    let mut command = tokio::process::Command::new(binary(&s.lab, PART));
    command.args([name, "--data-dir"]).arg(data_dir(s)).args(arguments);
    let Output { status, stdout, stderr } =
        command.output().await.with_context(|| format!("cannot run {name}"))?;
    let text = String::from_utf8([stdout, stderr].concat())?;
    ensure!(status.success(), "{name} {arguments:?}: {text}");
    Ok(text)
}

/// Removes the catalog, while no server uses it.
pub fn lose_catalog(s: &Scenario) -> Result<()> {
    let catalog = data_dir(s).join("catalog.sqlite");
    std::fs::remove_file(&catalog)?;
    for beside in ["-wal", "-shm"] {
        // A server that ended regularly leaves none.
        let _ = std::fs::remove_file(format!("{}{beside}", catalog.display()));
    }
    Ok(())
}

/// A copy of the lab's data directory, made while no server uses it.
pub struct DataCopy(TempDir);

impl DataCopy {
    /// Copies the data directory.
    pub async fn take(s: &Scenario) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        copy(&data_dir(s), &dir.path().join("data")).await?;
        Ok(Self(dir))
    }

    /// Path of the copy.
    pub fn path(&self) -> PathBuf {
        self.0.path().join("data")
    }

    /// Replaces the lab's data directory by the copy.
    pub async fn restore(&self, s: &Scenario) -> Result<()> {
        std::fs::remove_dir_all(data_dir(s))?;
        copy(&self.path(), &data_dir(s)).await
    }
}

async fn copy(from: &Path, to: &Path) -> Result<()> {
    let copied = tokio::process::Command::new("cp").arg("-a").arg(from).arg(to).status().await?;
    ensure!(copied.success(), "cannot copy {} to {}", from.display(), to.display());
    Ok(())
}

/// Starts a second server over the lab's pools with this data directory; returns it with a client.
pub async fn start_second_server(s: &Scenario, data: &Path) -> Result<(Running, Client)> {
    let infra = s.lab.state().infra.as_ref().context("the lab has no infra")?;
    let file = |name: &str| infra.pki.join(name).display().to_string();
    let words = [
        "serve".to_owned(),
        "--log-format=json".to_owned(),
        "--listen=127.0.0.1:0".to_owned(),
        format!("--data-dir={}", data.display()),
        format!("--tls-cert={}", file("server.crt")),
        format!("--tls-key={}", file("server.key")),
        format!("--client-ca={}", file("ca.crt")),
        format!("--hypervisor=libvirt=libvirt:{}", infra.libvirt_uri),
        format!("--hypervisor=loop=loop:{}", infra.loop_root.display()),
        format!("--hypervisor=simulated=simulated:{}", infra.simulated_root.display()),
    ];
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let server = Running::start(&binary(&s.lab, PART), &words).await?;
    let address = eventually("the second server serves", PATIENCE, || async {
        Ok(address(&server.log()).ok_or_else(|| server.log()))
    })
    .await?;
    let options = ClientOptions::from_pki_dir(format!("https://{address}"), &infra.pki, Role::Operator);
    Ok((server, Client::new(&options)?))
}

/// The API address from a server's log.
fn address(log: &str) -> Option<String> {
    let events = log.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let mut served = events.filter(|event| event["message"] == "serving the API");
    served.next()?["address"].as_str().map(str::to_owned)
}
