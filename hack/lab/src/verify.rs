//! `cargo lab test`: everything that must hold before a change goes in, with the time of each stage.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::cache;
use crate::lab::Lab;
use crate::run::Run;
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
    let quick: [(&str, &[&str]); 3] = [
        ("formatting", &["fmt", "--all", "--check"]),
        ("lints", &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]),
        ("unit tests", &["test", "--workspace", "--exclude", "tests"]),
    ];
    for (name, args) in quick {
        if !stages.cargo(ui, name, args, None).await? {
            bail!("{name} did not hold; the lab was not brought up");
        }
    }
    let start = Instant::now();
    let run = Run::named("test")?;
    with_lab(ui, &run, &UpOptions::default(), After::Down, async |lab| {
        stages.note("lab up", "ok", start);
        over_lab(ui, filter, stages, lab).await
    })
    .await
}

async fn over_lab(ui: &Ui, filter: Option<&str>, stages: &mut Stages, lab: &Lab) -> Result<()> {
    let mut args = vec!["test", "-p", "tests", "--no-fail-fast"];
    args.extend(filter);
    let mut held = stages.cargo(ui, "black-box tests", &args, Some(lab)).await?;
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
