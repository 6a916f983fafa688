//! `cargo lab test`: everything that must hold before a change goes in, with the time of each stage.

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

/// How long the soak of `--all` goes on.
const SOAK_MINUTES: u64 = 20;

/// How many steps the model's tests of `--all` make for each budget: more than most of them have.
const MODEL_STEPS: &str = "5000000";

/// The stages so far.
#[derive(Default)]
struct Stages {
    rows: Vec<(String, String, Duration)>,
}

impl Stages {
    fn note(&mut self, name: &str, outcome: impl Into<String>, start: Instant) {
        self.rows.push((name.to_owned(), outcome.into(), start.elapsed()));
    }

    /// Runs cargo as a stage. The outcome is whether it held.
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
        let held = foreground(command).await? == ExitCode::SUCCESS;
        self.note(name, if held { "ok" } else { "FAILED" }, start);
        Ok(held)
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
    /// Only black-box tests whose names contain this.
    filter: Option<String>,
    /// Only formatting, lints and unit tests: no lab.
    #[arg(long, conflicts_with_all = ["all", "filter"])]
    quick: bool,
    /// Also what takes longer: licences, sources and unused dependencies, whose tools are built first, and a soak.
    #[arg(long, conflicts_with = "filter")]
    all: bool,
}

/// Runs all stages. What needs no lab comes first, and must hold before a lab is brought up.
pub async fn verify(ui: &Ui, selection: &Selection) -> Result<ExitCode> {
    let mut stages = Stages::default();
    let outcome = run_stages(ui, selection, &mut stages).await;
    stages.print();
    match outcome {
        Ok(()) => {
            say(format!("all held in {:.0}s", ui.elapsed().as_secs_f64()));
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => Err(error),
    }
}

async fn run_stages(ui: &Ui, selection: &Selection, stages: &mut Stages) -> Result<()> {
    let start = Instant::now();
    cache::packages::ensure(ui).await?;
    stages.note("packages", "ok", start);
    // The black-box tests are built before there are machines to compete with. kube-kit's own tests want another tokio,
    // with a clock that can be stopped: beside the others, everything would be built twice.
    let quick: [(&str, &[&str]); 7] = [
        ("formatting", &["fmt", "--all", "--check"]),
        ("lints", &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]),
        ("documentation", &["doc", "--workspace", "--no-deps"]),
        ("unit tests", &["test", "--workspace", "--exclude", "tests", "--exclude", "kube-kit"]),
        ("unit tests of kube-kit", &["test", "-p", "kube-kit"]),
        ("black-box tests, built", &["test", "-p", "tests", "--no-run"]),
        ("their helpers", &["test", "-p", "tests", "--lib"]),
    ];
    for (name, args) in quick {
        if !stages.cargo(ui, name, args, None).await? {
            bail!("{name} did not hold; the lab was not brought up");
        }
    }
    if selection.quick {
        return Ok(());
    }
    if selection.all {
        dependencies(ui, stages).await?;
        model(stages).await?;
    }
    let start = Instant::now();
    let run = Run::named("test")?;
    let options = UpOptions { guests: 2, one_namespace: true, ..UpOptions::default() };
    with_lab(ui, &run, &options, After::Down, async |lab| {
        stages.note("lab up", "ok", start);
        over_lab(ui, selection, stages, lab).await
    })
    .await
}

/// The model's tests again, through more states than anybody waits for every day.
async fn model(stages: &mut Stages) -> Result<()> {
    let mut command = cargo();
    command.args(["test", "--workspace", "--exclude", "tests", "--exclude", "kube-kit", "--test", "attach"]);
    command.env("NESTOR_MODEL_STATES", MODEL_STEPS);
    ensure!(stages.run("the model, further", &mut command).await?, "the model did not hold");
    Ok(())
}

/// Checks of the dependencies, by tools that are built once. Advisories are left out: their database is elsewhere.
async fn dependencies(ui: &Ui, stages: &mut Stages) -> Result<()> {
    let checks: [(&str, &str, &[&str]); 2] = [
        ("cargo-deny", "0.20.2", &["--offline", "check", "bans", "licenses", "sources"]),
        ("cargo-machete", "0.9.2", &[]),
    ];
    for (tool, version, args) in checks {
        let start = Instant::now();
        let folder = cache::cargo::tool(ui, tool, version).await?;
        stages.note(&format!("{tool} {version}, built"), "ok", start);
        if !stages.run(tool, &mut check(&folder, tool, args)).await? {
            bail!("{tool} found something; the lab was not brought up");
        }
    }
    Ok(())
}

fn check(folder: &Path, tool: &str, args: &[&str]) -> Command {
    let mut command = Command::new(folder.join("bin").join(tool));
    command.args(args).current_dir(repository());
    command
}

async fn over_lab(ui: &Ui, selection: &Selection, stages: &mut Stages, lab: &Lab) -> Result<()> {
    let runs = match &selection.filter {
        Some(filter) => vec![(filter.clone(), filter.clone())],
        None => capabilities()?.into_iter().map(|name| (format!("{name}::"), name)).collect(),
    };
    let mut held = true;
    for (only, name) in runs {
        let args = ["test", "-p", "tests", "--test", "blackbox", "--", &only];
        held &= stages.cargo(ui, &name, &args, Some(lab)).await?;
    }
    if selection.all {
        let start = Instant::now();
        let held_out = verbs::soak(lab, SOAK_MINUTES, None).await? == ExitCode::SUCCESS;
        stages.note("soak", if held_out { "ok" } else { "FAILED" }, start);
        held &= held_out;
    }
    for tier in [Tier::Guest, Tier::Mgmt] {
        let start = Instant::now();
        let counts = sanity(ui, lab, tier).await?;
        let text = counts.to_string();
        let (name, numbers) = text.split_once(": ").unwrap_or((&text, ""));
        stages.note(name, numbers, start);
        held &= counts.good();
    }
    if !held {
        bail!("not all tests held");
    }
    Ok(())
}

/// The files of the black-box tests, each of which is a module of their program.
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
