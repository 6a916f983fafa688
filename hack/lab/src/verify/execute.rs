//! Execution of a step.

use std::fs;
use std::path::Path;
use std::process::{ExitCode, Stdio};

use anyhow::{Context, Result, ensure};
use tokio::process::Command;

use super::report::Outcome;
use super::steps::{Step, Work};
use crate::advisories;
use crate::cache::cargo::{tool, tool_with};
use crate::cache::packages;
use crate::lab::Lab;
use crate::process::run;
use crate::run::{repository, target_dir};
use crate::sanity::{Tier, sanity};
use crate::schemathesis::schemathesis;
use crate::ui::Ui;
use crate::verbs::{blackbox_tests, cargo, foreground};

/// Runs a step, in the lab if there is one. An error is a failure of the step.
pub(super) async fn execute(ui: &Ui, step: &Step, lab: Option<&Lab>) -> Outcome {
    match outcome(ui, step, lab).await {
        Ok(outcome) => outcome,
        Err(error) => {
            ui.line(format!("{}: {error:#}", step.name));
            Outcome::of(false)
        }
    }
}

async fn outcome(ui: &Ui, step: &Step, lab: Option<&Lab>) -> Result<Outcome> {
    match &step.work {
        Work::Fmt => captured(cargo().args(["fmt", "--all", "--check"])).await,
        Work::Machete => machete(ui).await,
        Work::Deny => deny(ui).await,
        Work::Spelling => spelling(ui).await,
        Work::Book => book(ui).await,
        Work::Schemathesis => schemathesis_outcome(ui).await,
        Work::Cargo { args, env } => {
            shown(ui, &step.name, cargo().args(args).envs(env.iter().copied())).await
        }
        Work::Ceph { args } => {
            packages::ensure_ceph(ui).await?;
            shown(ui, &step.name, cargo().args(args)).await
        }
        Work::BlackBox { selection, soak_minutes, .. } => {
            let lab = lab.context("this step needs a lab")?;
            shown(ui, &step.name, &mut blackbox(lab, selection, *soak_minutes)).await
        }
        Work::Sanity(tier) => sanity_outcome(ui, lab.context("this step needs a lab")?, *tier).await,
    }
}

/// Runs a command in the foreground, with its output on the terminal.
async fn shown(ui: &Ui, name: &str, command: &mut Command) -> Result<Outcome> {
    let args: Vec<_> = command.as_std().get_args().map(|arg| arg.to_string_lossy()).collect();
    ui.line(format!("{name}: cargo {}", args.join(" ")));
    let status = foreground(command.env("RUSTDOCFLAGS", "-D warnings")).await?;
    Ok(Outcome::of(status == ExitCode::SUCCESS))
}

/// Runs a command beside others. Its output is an error if it fails, and discarded otherwise.
async fn captured(command: &mut Command) -> Result<Outcome> {
    let output = command.stdin(Stdio::null()).kill_on_drop(true).output().await;
    let output =
        output.with_context(|| format!("cannot run {}", command.as_std().get_program().to_string_lossy()))?;
    if output.status.success() {
        return Ok(Outcome::of(true));
    }
    let texts = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    anyhow::bail!("{}\n{}", output.status, texts.concat().trim_end())
}

fn blackbox(lab: &Lab, selection: &[String], soak_minutes: Option<u64>) -> Command {
    let mut command = blackbox_tests(lab, selection);
    if let Some(minutes) = soak_minutes {
        command.arg("--nocapture").env("NESTOR_SOAK_MINUTES", minutes.to_string());
    }
    command
}

async fn machete(ui: &Ui) -> Result<Outcome> {
    let folder = tool(ui, "cargo-machete", "0.9.2").await?;
    captured(Command::new(folder.join("bin/cargo-machete")).current_dir(repository())).await
}

async fn spelling(ui: &Ui) -> Result<Outcome> {
    // Rust 1.90 does not build 1.43.
    let folder = tool(ui, "typos-cli", "1.42.0").await?;
    captured(Command::new(folder.join("bin/typos")).current_dir(repository())).await
}

/// Builds the documentation as a book; a warning is a failure. Its server is left out of the tool.
async fn book(ui: &Ui) -> Result<Outcome> {
    let features = ["--no-default-features", "--features", "search"];
    let folder = tool_with(ui, "mdbook", "0.5.4", &features).await?;
    let out = target_dir()?.join("book");
    let mut book = Command::new(folder.join("bin/mdbook"));
    book.args(["build", "docs", "--dest-dir"]).arg(out).current_dir(repository()).stdin(Stdio::null());
    let output = book.kill_on_drop(true).output().await.context("cannot run mdbook")?;
    let log = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success() && !log.contains("WARN"), "mdbook: {}\n{log}", output.status);
    Ok(Outcome::of(true))
}

/// Checks the dependencies, also for the advisories in this repository.
async fn deny(ui: &Ui) -> Result<Outcome> {
    let folder = tool(ui, "cargo-deny", "0.20.2").await?;
    // cargo-deny reads the sources of all platforms' crates; a build fetches only this platform's.
    run(cargo().args(["fetch", "--locked"])).await?;
    let scratch = tempfile::tempdir()?;
    let date = advisories::database(scratch.path()).await?;
    let config = scratch.path().join("deny.toml");
    fs::write(&config, deny_config(scratch.path())?)?;
    let mut deny = Command::new(folder.join("bin/cargo-deny"));
    deny.args(["--offline", "--config"]).arg(config).arg("check").current_dir(repository());
    captured(&mut deny).await?;
    advisories::check_age(date)?;
    Ok(Outcome { passed: true, details: Some(format!("advisories of {date}")) })
}

/// deny.toml with the advisories in this folder.
fn deny_config(advisories: &Path) -> Result<String> {
    let config = fs::read_to_string(repository().join("deny.toml"))?;
    let table = "[advisories]\n";
    ensure!(config.contains(table), "deny.toml has no {}", table.trim());
    Ok(config.replace(table, &format!("{table}db-path = {:?}\n", advisories.display().to_string())))
}

async fn sanity_outcome(ui: &Ui, lab: &Lab, tier: Tier) -> Result<Outcome> {
    let counts = sanity(ui, lab, tier).await?;
    Ok(Outcome { passed: counts.success(), details: Some(counts.numbers()) })
}

async fn schemathesis_outcome(ui: &Ui) -> Result<Outcome> {
    let counts = schemathesis(ui).await?;
    let details = format!("{} requests, {} failures", counts.requests, counts.failures);
    Ok(Outcome { passed: counts.success(), details: Some(details) })
}
