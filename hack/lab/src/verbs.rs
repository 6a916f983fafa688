//! Small verbs: logs, kubectl, bench, soak.

use std::ffi::OsStr;
use std::fs;
use std::process::{ExitCode, Stdio};

use anyhow::{Context, Result, bail};
use tokio::process::Command;

use crate::lab::Lab;
use crate::run::{Run, repository};
use crate::state::Cluster;

/// Prints or follows a log.
pub async fn logs(run: &Run, name: &str, follow: bool) -> Result<ExitCode> {
    let path = run.log(name);
    if !path.exists() {
        let entries = fs::read_dir(run.path("logs"))
            .with_context(|| format!("no logs: there is no lab at {}", run.dir().display()))?;
        let mut known: Vec<String> = entries
            .filter_map(|entry| {
                Some(entry.ok()?.file_name().into_string().ok()?.strip_suffix(".log")?.to_owned())
            })
            .collect();
        known.sort();
        bail!("no log of {name:?}; there are: {}", known.join(", "));
    }
    let mut show = if follow { Command::new("tail") } else { Command::new("cat") };
    if follow {
        show.args(["--lines=100", "--follow=name", "--retry"]);
    }
    foreground(show.arg(path)).await
}

/// Runs kubectl against one of the clusters.
pub async fn kubectl(run: &Run, cluster: &str, args: &[String]) -> Result<ExitCode> {
    let state = run.state()?;
    let guest = if cluster == "guest" { "g1" } else { cluster };
    let found: Option<&Cluster> = match cluster {
        "mgmt" | "management" => state.management.as_ref(),
        _ => state.guests.get(guest).map(|guest| &guest.cluster),
    };
    let found = found.with_context(|| {
        let guests: Vec<&str> = state.guests.keys().map(String::as_str).collect();
        format!("no cluster {cluster:?}; there are: mgmt, guest (g1), {}", guests.join(", "))
    })?;
    let mut kubectl = Command::new(state.tools.join("kubectl"));
    foreground(kubectl.arg("--kubeconfig").arg(&found.kubeconfig).args(args)).await
}

/// Runs a bench, with a lab if it needs one.
pub async fn bench(lab: Option<&Lab>, name: &str, args: &[String]) -> Result<ExitCode> {
    let mut bench = cargo();
    bench.args(["run", "--quiet", "--profile", "bench-client", "-p", "bench", "--", name]).args(args);
    if let Some(lab) = lab {
        bench.env("NESTOR_LAB", lab.dir());
    }
    foreground(&mut bench).await
}

/// Runs the soak test, with random operations and faults, against a lab.
pub async fn soak(lab: &Lab, minutes: u64, seed: Option<u64>) -> Result<ExitCode> {
    let mut soak = blackbox_tests(lab, &["soak::random_operations_and_faults"]);
    soak.arg("--nocapture").env("NESTOR_SOAK_MINUTES", minutes.to_string());
    if let Some(seed) = seed {
        soak.env("NESTOR_SOAK_SEED", seed.to_string());
    }
    foreground(&mut soak).await
}

/// Arguments of cargo that run the black-box tests, built like the unit tests with the features of the whole workspace.
pub(crate) const BLACKBOX_TESTS: [&str; 4] = ["test", "--workspace", "--test", "blackbox"];

/// Cargo with the black-box tests whose names contain one of these texts, in a lab.
pub(crate) fn blackbox_tests<S: AsRef<OsStr>>(lab: &Lab, filters: &[S]) -> Command {
    let mut command = cargo();
    command.args(BLACKBOX_TESTS).arg("--").args(filters).env("NESTOR_LAB", lab.dir());
    command
}

/// The cargo that runs us, in the repository. It runs in the foreground, so that an interrupt reaches it.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned()));
    command.current_dir(repository());
    command
}

/// Runs a program with our input and output, and returns its exit code.
pub(crate) async fn foreground(command: &mut Command) -> Result<ExitCode> {
    command.stdin(Stdio::inherit()).kill_on_drop(true);
    let program = command.as_std().get_program().to_string_lossy().into_owned();
    let status = command.status().await.with_context(|| format!("cannot run {program}"))?;
    Ok(match status.code().and_then(|code| u8::try_from(code).ok()) {
        Some(code) => ExitCode::from(code),
        None => ExitCode::FAILURE,
    })
}
