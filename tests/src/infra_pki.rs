//! Certificates of the lab's storage infra, and those that the programs have loaded.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use infra_api::Role;
use lab::cluster::SERVER_ADDRESS_FROM_VM;
use lab::infra::BACKUP_ACCOUNT;

use crate::program::{binary, run_to_end};
use crate::{PATIENCE, Scenario, eventually};

/// A certificate that a program has loaded: component, metric, and label `certificate`.
pub type Loaded = (&'static str, &'static str, &'static str);

/// storage-infra's own certificate.
pub const SERVER: Loaded =
    ("storage-infra", "nestor_storage_infra_certificate_expiry_timestamp_seconds", "server");
/// The CA that storage-infra trusts.
pub const CLIENT_CA: Loaded =
    ("storage-infra", "nestor_storage_infra_certificate_expiry_timestamp_seconds", "client-ca");
/// mgmt-csi's own certificate.
pub const CLIENT: Loaded = ("mgmt-csi", "nestor_mgmt_csi_certificate_expiry_timestamp_seconds", "client");
/// The CA that mgmt-csi trusts.
pub const SERVER_CA: Loaded =
    ("mgmt-csi", "nestor_mgmt_csi_certificate_expiry_timestamp_seconds", "server-ca");

/// The certificates of the lab's storage infra.
pub struct InfraPki<'a> {
    s: &'a Scenario,
    /// Their directory.
    pub dir: PathBuf,
}

impl<'a> InfraPki<'a> {
    /// Those of the lab.
    pub fn of(s: &'a Scenario) -> Result<Self> {
        let dir = s.lab.state().infra.as_ref().context("the lab has no infra")?.pki.clone();
        Ok(Self { s, dir })
    }

    /// Runs `storage-infra pki` on the directory.
    pub async fn run(&self, words: &[&str]) -> Result<()> {
        let dir = format!("--dir={}", self.dir.display());
        let ended =
            run_to_end(&binary(&self.s.lab, "storage-infra"), &[&["pki"], words, &[&dir]].concat()).await?;
        ensure!(ended.code == Some(0), "{words:?}: {}", ended.stderr);
        Ok(())
    }

    /// Renews the certificates of the server and of a client of each role.
    pub async fn issue_all(&self, lifetime: &str) -> Result<()> {
        let more = ["--overwrite", "--lifetime", lifetime];
        for role in Role::ALL {
            let account: &[&str] =
                if role.is_of_one_account() { &["--account", BACKUP_ACCOUNT] } else { &[] };
            self.run(&[&["issue", "--role", role.name()], account, &more[..]].concat()).await?;
        }
        let server = ["issue", "--role", "server", "--host", "127.0.0.1", "--host", SERVER_ADDRESS_FROM_VM];
        self.run(&[&server[..], &more[..]].concat()).await
    }

    /// Begins a rotation of the CA; returns when both sides trust both CAs.
    pub async fn begin_rotation(&self) -> Result<()> {
        let loads = self.changes(&[CLIENT_CA, SERVER_CA]).await?;
        self.run(&["rotate-ca"]).await?;
        loads.are_seen(self).await
    }

    /// Renews all certificates; returns when both sides use theirs.
    pub async fn renew_all(&self, lifetime: &str) -> Result<()> {
        let loads = self.changes(&[SERVER, CLIENT]).await?;
        self.issue_all(lifetime).await?;
        loads.are_seen(self).await
    }

    /// When a certificate that a program has loaded expires.
    pub async fn expiry(&self, (component, metric, certificate): Loaded) -> Result<String> {
        let text = self.s.lab.metrics(component).await?;
        let start = format!("{metric}{{certificate=\"{certificate}\"}} ");
        let value = text.lines().find_map(|line| line.strip_prefix(&start));
        Ok(value.with_context(|| format!("{component} has no {start}: {text}"))?.to_owned())
    }

    async fn changes(&self, loaded: &[Loaded]) -> Result<Changes> {
        let mut before = Vec::new();
        for one in loaded {
            before.push((*one, self.expiry(*one).await?));
        }
        Ok(Changes(before))
    }
}

/// Certificates that programs will load, with the expiry of the earlier ones.
struct Changes(Vec<(Loaded, String)>);

impl Changes {
    async fn are_seen(&self, pki: &InfraPki<'_>) -> Result<()> {
        for (loaded, before) in &self.0 {
            eventually(&format!("{loaded:?} is loaded"), PATIENCE, || async {
                let now = pki.expiry(*loaded).await?;
                Ok(if now == *before { Err(now) } else { Ok(()) })
            })
            .await?;
        }
        Ok(())
    }
}
