//! schemathesis against servers of its own: requests that it derives from the OpenAPI document of storage-infra, valid and
//! invalid, sent by a client of each role. Each response must be one that the document describes.

mod server;

use std::fs;
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use infra_api::Role;
use serde::Deserialize;
use tokio::process::Command;

use crate::cache;
use crate::run::{repository, target_dir};
use crate::ui::Ui;
use server::Server;

/// The program that is tested.
const PROGRAM: &str = "storage-infra";

/// What schemathesis found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Requests of all roles.
    pub(crate) requests: u64,
    /// Responses that are not as documented, and requests that got none.
    pub(crate) failures: u64,
}

impl Counts {
    /// Whether requests were sent and all responses are as documented.
    pub(crate) fn success(self) -> bool {
        self.failures == 0 && self.requests > 0
    }

    fn and(self, other: Self) -> Self {
        Self { requests: self.requests + other.requests, failures: self.failures + other.failures }
    }
}

/// Tests the API with each role, each with a new server, so that one run does not depend on another.
pub(crate) async fn schemathesis(ui: &Ui) -> Result<Counts> {
    let python = cache::schemathesis(ui).await?;
    let programs = cache::cargo::build_debug(ui, &[PROGRAM]).await?;
    let logs = target_dir()?.join("schemathesis");
    fs::create_dir_all(&logs).with_context(|| format!("cannot make {}", logs.display()))?;
    let mut total = Counts::default();
    for role in Role::ALL {
        let counts = test_role(ui, &python, &programs.join(PROGRAM), &logs, role).await?;
        ui.line(format!("role {role}: {} requests, {} failures", counts.requests, counts.failures));
        total = total.and(counts);
    }
    Ok(total)
}

/// Tests the API with one role. After the requests, the server must be healthy and stop as usual.
async fn test_role(ui: &Ui, python: &Path, program: &Path, logs: &Path, role: Role) -> Result<Counts> {
    let log = |suffix: &str| logs.join(format!("{role}{suffix}"));
    let server = Server::start(program, &log("-server.log")).await?;
    let (output, report) = (log(".log"), log(".json"));
    let file = fs::File::create(&output).with_context(|| format!("cannot write {}", output.display()))?;
    let mut run = command(python, &server, role);
    run.args(["--report", "json", "--report-json-path"]).arg(&report);
    // It keeps failed requests in its working directory.
    run.current_dir(logs);
    let _ = fs::remove_file(&report);
    let mut step = ui.step(format!("schemathesis as {role}"));
    step.message(format!("see {}", output.display()));
    let status =
        run.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file).kill_on_drop(true).status().await;
    let status = status.context("cannot run schemathesis")?;
    let text = || fs::read_to_string(&output).unwrap_or_default();
    let report =
        fs::read_to_string(&report).with_context(|| format!("schemathesis wrote no report:\n{}", text()))?;
    let counts = counts(&report)?;
    ensure!(status.success() == counts.success(), "schemathesis: {status}, but {counts:?}:\n{}", text());
    if !counts.success() {
        ui.line(text());
    }
    server.finish().await.with_context(|| format!("storage-infra after the requests of {role}"))?;
    step.done();
    Ok(counts)
}

/// schemathesis with our settings and the certificate of a role.
fn command(python: &Path, server: &Server, role: Role) -> Command {
    let settings = repository().join("hack/tools/schemathesis");
    let (ca, certificate, key) = server.certificates(role);
    let mut run = Command::new(python);
    run.args(["-m", "schemathesis.cli", "--no-color", "--config-file"])
        .arg(settings.join("schemathesis.toml"));
    run.arg("run").arg(format!("{}/v1/openapi.json", server.url()));
    run.arg("--tls-verify").arg(ca).arg("--request-cert").arg(certificate).arg("--request-cert-key").arg(key);
    if role != Role::Operator {
        // Others learn only that their role does not allow it.
        run.args(["--exclude-checks", "unsupported_method"]);
    }
    run.env("SCHEMATHESIS_HOOKS", settings.join("hooks.py")).env("POOLS", server.pools());
    run.env("PYTHONDONTWRITEBYTECODE", "1");
    run
}

/// The part of a report that we read.
#[derive(Deserialize)]
struct Report {
    test_cases: TestCases,
    errors: Vec<serde_json::Value>,
}

#[derive(Deserialize)]
struct TestCases {
    generated: u64,
    unique_failures: u64,
}

fn counts(report: &str) -> Result<Counts> {
    let Report { test_cases, errors } =
        serde_json::from_str(report).context("not a report of schemathesis")?;
    let failures = test_cases.unique_failures + u64::try_from(errors.len())?;
    Ok(Counts { requests: test_cases.generated, failures })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_count_as_failures() {
        let report = r#"{"seed": 1, "test_cases": {"generated": 9, "with_failures": 3, "unique_failures": 2}, "errors": [{}]}"#;
        let found = counts(report).unwrap();
        assert_eq!(found, Counts { requests: 9, failures: 3 });
        assert!(!found.success());
        assert!(!Counts::default().success(), "nothing was tested");
        counts("{}").unwrap_err();
    }
}
