//! `cargo lab test`: all checks of a change, with the time of each stage.

use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tokio::process::Command;

use crate::cache;
use crate::lab::Lab;
use crate::run::{Run, repository};
use crate::sanity::{Tier, sanity};
use crate::session::{After, with_lab};
use crate::ui::{Ui, say, table};
use crate::up::UpOptions;
use crate::verbs::{self, cargo, foreground};

/// Duration of the soak test of `--all`.
const SOAK_MINUTES: u64 = 20;

/// Steps of the model tests of `--all` for each fault budget: more than most of them have.
const MODEL_STEPS: &str = "5000000";

/// The stages that have run.
#[derive(Default)]
struct Stages {
    rows: Vec<(String, String, Duration)>,
}

impl Stages {
    fn record(&mut self, name: &str, outcome: impl Into<String>, start: Instant) {
        self.rows.push((name.to_owned(), outcome.into(), start.elapsed()));
    }

    /// Runs cargo as a stage. Returns whether it passed.
    async fn cargo(&mut self, ui: &Ui, name: &str, args: &[&str], lab: Option<&Lab>) -> Result<bool> {
        let mut command = cargo();
        command.args(args).env("RUSTDOCFLAGS", "-D warnings");
        if let Some(lab) = lab {
            command.env("NESTOR_LAB", lab.dir());
        }
        ui.line(format!("{name}: cargo {}", args.join(" ")));
        self.run(name, &mut command).await
    }

    /// Runs a command as a stage.
    async fn run(&mut self, name: &str, command: &mut Command) -> Result<bool> {
        let start = Instant::now();
        let passed = foreground(command).await? == ExitCode::SUCCESS;
        self.record(name, if passed { "ok" } else { "FAILED" }, start);
        Ok(passed)
    }

    fn print(&self) {
        let rows: Vec<Vec<String>> = self
            .rows
            .iter()
            .map(|(name, outcome, took)| {
                vec![name.clone(), outcome.clone(), format!("{:.1}s", took.as_secs_f64())]
            })
            .collect();
        for line in table(&["STAGE", "OUTCOME", "TIME"], &rows) {
            say(line);
        }
    }
}

/// Which tests to run.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Selection {
    /// Run only black-box tests whose names contain this text.
    filter: Option<String>,
    /// Run only formatting, lints and unit tests; starts no lab.
    #[arg(long, conflicts_with_all = ["all", "filter"])]
    quick: bool,
    /// Also run the longer checks: licences, dependency sources, unused dependencies, spelling (builds the tools), and a soak
    /// test.
    #[arg(long, conflicts_with = "filter")]
    all: bool,
}

/// Runs all stages. The stages without a lab run first and must pass before a lab is started.
pub async fn verify(ui: &Ui, selection: &Selection) -> Result<ExitCode> {
    let mut stages = Stages::default();
    let outcome = run_stages(ui, selection, &mut stages).await;
    stages.print();
    match outcome {
        Ok(()) => {
            say(format!("all stages passed in {:.0}s", ui.elapsed().as_secs_f64()));
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => Err(error),
    }
}

async fn run_stages(ui: &Ui, selection: &Selection, stages: &mut Stages) -> Result<()> {
    let start = Instant::now();
    cache::packages::ensure(ui).await?;
    stages.record("packages", "ok", start);
    // The black-box tests are built before VMs compete for the CPU. kube-kit's own tests use tokio with a clock that can
    // be paused; with the other crates in one command, everything would be built twice.
    let quick: [(&str, &[&str]); 7] = [
        ("formatting", &["fmt", "--all", "--check"]),
        ("lints", &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]),
        ("documentation", &["doc", "--workspace", "--no-deps"]),
        ("unit tests", &["test", "--workspace", "--exclude", "tests", "--exclude", "kube-kit"]),
        ("unit tests of kube-kit", &["test", "-p", "kube-kit"]),
        ("build of the black-box tests", &["test", "-p", "tests", "--no-run"]),
        ("unit tests of the test helpers", &["test", "-p", "tests", "--lib"]),
    ];
    for (name, args) in quick {
        if !stages.cargo(ui, name, args, None).await? {
            bail!("{name} failed; the lab was not started");
        }
    }
    if selection.quick {
        return Ok(());
    }
    if selection.all {
        static_checks(ui, stages).await?;
        model(stages).await?;
    }
    let start = Instant::now();
    let run = Run::named("test")?;
    let options = UpOptions { guests: 2, one_namespace: true, ..UpOptions::default() };
    with_lab(ui, &run, &options, After::Down, async |lab| {
        stages.record("lab up", "ok", start);
        run_in_lab(ui, selection, stages, lab).await
    })
    .await
}

/// Runs the model tests through more states than usual.
async fn model(stages: &mut Stages) -> Result<()> {
    let mut command = cargo();
    command.args(["test", "--workspace", "--exclude", "tests", "--exclude", "kube-kit", "--test", "attach"]);
    command.env("NESTOR_MODEL_STATES", MODEL_STEPS);
    ensure!(stages.run("model with more states", &mut command).await?, "the model tests failed");
    Ok(())
}

/// Checks the dependencies and the spelling with tools that are built once. Advisories are left out: their database is
/// online.
async fn static_checks(ui: &Ui, stages: &mut Stages) -> Result<()> {
    let checks: [(&str, &str, &str, &[&str]); 3] = [
        ("cargo-deny", "0.20.2", "cargo-deny", &["--offline", "check", "bans", "licenses", "sources"]),
        ("cargo-machete", "0.9.2", "cargo-machete", &[]),
        // Rust 1.90 does not build 1.43.
        ("typos-cli", "1.42.0", "typos", &[]),
    ];
    // cargo-deny reads the sources of all platforms' crates; a build fetches only this platform's.
    ensure!(
        stages.cargo(ui, "fetch of all crates", &["fetch", "--locked"], None).await?,
        "cargo fetch failed"
    );
    for (name, version, program, args) in checks {
        let start = Instant::now();
        let folder = cache::cargo::tool(ui, name, version).await?;
        stages.record(&format!("build of {name} {version}"), "ok", start);
        if !stages.run(program, &mut check(&folder, program, args)).await? {
            bail!("{program} found problems; the lab was not started");
        }
    }
    Ok(())
}

fn check(folder: &Path, program: &str, args: &[&str]) -> Command {
    let mut command = Command::new(folder.join("bin").join(program));
    command.args(args).current_dir(repository());
    command
}

async fn run_in_lab(ui: &Ui, selection: &Selection, stages: &mut Stages, lab: &Lab) -> Result<()> {
    let runs = match &selection.filter {
        Some(filter) => vec![(filter.clone(), filter.clone())],
        None => capabilities()?.into_iter().map(|name| (format!("{name}::"), name)).collect(),
    };
    let mut passed = true;
    for (only, name) in runs {
        let args = ["test", "-p", "tests", "--test", "blackbox", "--", &only];
        passed &= stages.cargo(ui, &name, &args, Some(lab)).await?;
    }
    if selection.all {
        let start = Instant::now();
        let soak_passed = verbs::soak(lab, SOAK_MINUTES, None).await? == ExitCode::SUCCESS;
        stages.record("soak", if soak_passed { "ok" } else { "FAILED" }, start);
        passed &= soak_passed;
    }
    for tier in [Tier::Guest, Tier::Mgmt] {
        let start = Instant::now();
        let counts = sanity(ui, lab, tier).await?;
        let text = counts.to_string();
        let (name, numbers) = text.split_once(": ").unwrap_or((&text, ""));
        stages.record(name, numbers, start);
        passed &= counts.success();
    }
    if !passed {
        bail!("tests failed");
    }
    Ok(())
}

/// The modules of the black-box tests, one per file.
fn capabilities() -> Result<Vec<String>> {
    let folder = repository().join("tests/tests");
    let main = folder.join("main.rs");
    let listed = fs::read_to_string(&main).with_context(|| format!("cannot read {}", main.display()))?;
    let mut found = Vec::new();
    for entry in fs::read_dir(&folder)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let Some(module) = name.strip_suffix(".rs").filter(|module| *module != "main") else { continue };
        let line = format!("mod {module};");
        ensure!(listed.contains(&line), "{} has no {line:?}: {name} would never run", main.display());
        found.push(module.to_owned());
    }
    found.sort();
    Ok(found)
}
