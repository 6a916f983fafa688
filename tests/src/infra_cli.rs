//! Commands of the program `storage-infra` to the lab's server.

use anyhow::{Context, Result};
use lab::process::{command, run};

use crate::Scenario;
use crate::program::binary;

/// Runs a command of the program with the operator's certificate; returns its output.
pub async fn storage_infra(s: &Scenario, arguments: &[&str]) -> Result<String> {
    let infra = s.lab.state().infra.as_ref().context("no storage infra")?;
    let mut command = command(&binary(&s.lab, "storage-infra").display().to_string(), arguments);
    command.env("NESTOR_INFRA_URL", &infra.url);
    for (name, file) in [("CA", "ca.crt"), ("CERT", "operator.crt"), ("KEY", "operator.key")] {
        command.env(format!("NESTOR_INFRA_{name}"), infra.pki.join(file));
    }
    run(&mut command).await
}
