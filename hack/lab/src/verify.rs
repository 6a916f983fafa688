//! `cargo lab test`: everything that must hold before a change goes in, with the time of each stage.

use std::fs;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::cache;
use crate::lab::Lab;
use crate::run::{Run, repository};
use crate::sanity::{Tier, sanity};
use crate::session::{After, with_lab};
use crate::ui::{Ui, say, table};
use crate::up::UpOptions;
use crate::verbs::{cargo, foreground};

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
        ui.line(format!("{name}: cargo {}", args.join(" ")));
        let start = Instant::now();
        let mut command = cargo();
        command.args(args);
        if let Some(lab) = lab {
            command.env("NESTOR_LAB", lab.dir());
        }
        let held = foreground(&mut command).await? == ExitCode::SUCCESS;
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

/// Runs all stages. What needs no lab comes first, and must hold before a lab is brought up.
pub async fn verify(ui: &Ui, filter: Option<&str>) -> Result<ExitCode> {
    let mut stages = Stages::default();
    let outcome = run_stages(ui, filter, &mut stages).await;
    stages.print();
    match outcome {
        Ok(()) => {
            say(format!("all held in {:.0}s", ui.elapsed().as_secs_f64()));
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => Err(error),
    }
}

async fn run_stages(ui: &Ui, filter: Option<&str>, stages: &mut Stages) -> Result<()> {
    let start = Instant::now();
    cache::packages::ensure(ui).await?;
    stages.note("packages", "ok", start);
    // The black-box tests are built before there are machines to compete with. kube-kit's own tests want another tokio,
    // with a clock that can be stopped: beside the others, everything would be built twice.
    let quick: [(&str, &[&str]); 6] = [
        ("formatting", &["fmt", "--all", "--check"]),
        ("lints", &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]),
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
    let start = Instant::now();
    let run = Run::named("test")?;
    let options = UpOptions { guests: 2, one_namespace: true, ..UpOptions::default() };
    with_lab(ui, &run, &options, After::Down, async |lab| {
        stages.note("lab up", "ok", start);
        over_lab(ui, filter, stages, lab).await
    })
    .await
}

async fn over_lab(ui: &Ui, filter: Option<&str>, stages: &mut Stages, lab: &Lab) -> Result<()> {
    let runs = match filter {
        Some(filter) => vec![(filter.to_owned(), filter.to_owned())],
        None => capabilities()?.into_iter().map(|name| (format!("{name}::"), name)).collect(),
    };
    let mut held = true;
    for (only, name) in runs {
        let args = ["test", "-p", "tests", "--test", "blackbox", "--", &only];
        held &= stages.cargo(ui, &name, &args, Some(lab)).await?;
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
