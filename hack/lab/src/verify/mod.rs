//! `cargo lab test`: the checks of a change, as named steps with their results and times.

mod black_box;
mod capabilities;
mod execute;
mod report;
mod steps;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use futures::future::join_all;

use crate::cache::{self, Kubernetes};
use crate::ceph::Engine;
use crate::deployed::EARLIER;
use crate::kubevirt::VmManager;
use crate::lab::Lab;
use crate::run::Run;
use crate::session::{After, interrupted, with_lab};
use crate::ui::{Ui, say, table};
use crate::up::UpOptions;
use crate::vm::account;
use black_box::UPGRADE;
use capabilities::capabilities;
use execute::execute;
use report::{Outcome, Report};
use steps::{Choice, Kind, Set, Step};

/// Which checks to run.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Selection {
    /// Run the steps of --quick, and only black-box tests whose names contain this text.
    filter: Option<String>,
    /// Run only the checks that need no lab: formatting, lints, documentation and unit tests.
    #[arg(long, conflicts_with_all = ["all", "only", "filter"])]
    quick: bool,
    /// Also run the long checks: dependencies (builds the tools), the model with more states, and a soak test.
    #[arg(long, conflicts_with_all = ["only", "filter"])]
    all: bool,
    /// Run only these steps, for example to continue an interrupted run. `--list` shows their names.
    #[arg(long, value_name = "STEP", value_delimiter = ',', conflicts_with = "filter")]
    only: Vec<String>,
    /// Storage engine of the pools of the lab. Tests that look at the files of volumes, or use nodes without a VM, need
    /// `file`.
    #[arg(long, value_enum, default_value_t)]
    engine: Engine,
    /// Continue after a failed step, also if it failed before the lab was started.
    #[arg(long)]
    keep_going: bool,
    /// List the steps without running them.
    #[arg(long)]
    list: bool,
}

impl Selection {
    fn choice(&self) -> Choice<'_> {
        match &self.filter {
            Some(filter) => Choice::Filter(filter),
            None if !self.only.is_empty() => Choice::Only(&self.only),
            None if self.quick => Choice::Set(Set::Quick),
            None if self.all => Choice::Set(Set::All),
            None => Choice::Set(Set::Normal),
        }
    }
}

/// Runs the selected steps, and prints a table of their results.
pub async fn verify(ui: &Ui, selection: &Selection) -> Result<ExitCode> {
    let all = steps::all(&capabilities()?);
    if selection.list {
        list(&all);
        return Ok(ExitCode::SUCCESS);
    }
    let planned = steps::select(all, selection.choice())?;
    let mut report = Report::default();
    let outcome = run(ui, &planned, selection, &mut report).await;
    report.table(&planned).iter().for_each(say);
    let unfinished = report.unfinished(&planned);
    if !unfinished.is_empty() && selection.filter.is_none() {
        say(format!("failed or not run; to run these: cargo lab test --only {}", unfinished.join(",")));
    }
    outcome?;
    ensure!(unfinished.is_empty(), "{} of {} steps have not passed", unfinished.len(), planned.len());
    say(format!("all steps passed in {:.0}s", ui.elapsed().as_secs_f64()));
    Ok(ExitCode::SUCCESS)
}

fn list(steps: &[Step]) {
    let row = |step: &Step| vec![step.name.clone(), step.set.command().to_owned(), step.description.clone()];
    let rows: Vec<Vec<String>> = steps.iter().map(row).collect();
    table(&["STEP", "RUNS WITH", "CHECKS"], &rows).iter().for_each(say);
}

/// Runs the steps without a lab, then those in a lab. Without `keep_going`, the lab is not started after a failure.
async fn run(ui: &Ui, planned: &[Step], selection: &Selection, report: &mut Report) -> Result<()> {
    let keep_going = selection.keep_going;
    let of = |kind: Option<Kind>| planned.iter().filter(move |step| step.work.lab() == kind).cloned();
    tokio::select! {
        outcome = run_without_lab(ui, of(None).collect(), keep_going, report) => outcome?,
        interrupt = interrupted() => return Err(interrupt?),
    }
    let mut outcome = Ok(());
    for kind in [
        Kind::Processes,
        Kind::Ceph,
        Kind::Pods,
        Kind::ClusterApi,
        Kind::InfraServers,
        Kind::Hosts,
        Kind::KubeVirt,
    ]
    .into_iter()
    .chain(Kubernetes::OTHERS.map(Kind::Version))
    {
        if keep_going || !report.has_failure() {
            let (name, options) = lab_for(kind, planned, selection.engine);
            let steps: Vec<Step> = of(Some(kind)).collect();
            let ended = run_in_labs(ui, &steps, (name, options), report).await;
            // Only the first error is returned.
            if let Err(error) = &ended {
                ui.line(format!("lab {name}: {error:#}"));
            }
            outcome = outcome.and(ended);
        }
    }
    outcome
}

/// Runs steps in a lab that is started for them.
async fn run_in_labs(
    ui: &Ui,
    steps: &[Step],
    (name, options): (&str, UpOptions),
    report: &mut Report,
) -> Result<()> {
    if steps.is_empty() {
        return Ok(());
    }
    let start = Instant::now();
    with_lab(ui, &Run::named(name)?, &options, After::Down, async |lab| {
        report.record("lab up", Outcome::of(true), start.elapsed());
        run_in_lab(ui, steps, report, lab).await
    })
    .await
}

/// Name and options of the lab for these steps.
fn lab_for(kind: Kind, steps: &[Step], engine: Engine) -> (&'static str, UpOptions) {
    let processes = |engine| UpOptions { guests: 2, one_namespace: true, engine, ..UpOptions::default() };
    match kind {
        Kind::Processes => ("test", processes(engine)),
        Kind::Ceph => ("test-ceph", processes(Engine::Rbd)),
        Kind::Pods => {
            let upgrades = steps.iter().any(|step| step.name == UPGRADE);
            let version = upgrades.then(|| EARLIER.to_owned());
            ("test-pods", UpOptions { deployed: true, release: true, version, ..UpOptions::default() })
        }
        Kind::ClusterApi => ("test-capi", UpOptions { cluster_api: true, ..UpOptions::default() }),
        Kind::KubeVirt => {
            ("test-kubevirt", UpOptions { vm_manager: VmManager::KubeVirt, ..UpOptions::default() })
        }
        Kind::InfraServers => {
            ("test-infra-ha", UpOptions { vms: 0, infra_servers: 2, ..UpOptions::default() })
        }
        Kind::Hosts => ("test-hosts", UpOptions { hosts: 2, ..UpOptions::default() }),
        Kind::Version(kubernetes) => ("test-kubernetes", UpOptions { kubernetes, ..UpOptions::default() }),
    }
}

async fn run_without_lab(ui: &Ui, steps: Vec<Step>, keep_going: bool, report: &mut Report) -> Result<()> {
    let start = Instant::now();
    cache::packages::ensure(ui).await?;
    // The unit tests of storage-infra start libvirtd too.
    account::ensure(ui).await?;
    report.record("packages", Outcome::of(true), start.elapsed());
    for group in steps::groups(steps) {
        let outcomes = join_all(group.iter().map(|step| timed(ui, step, None))).await;
        for (step, (outcome, took)) in group.iter().zip(outcomes) {
            report.record(&step.name, outcome, took);
        }
        if report.has_failure() && !keep_going {
            break;
        }
    }
    Ok(())
}

/// Runs the steps one after the other, so that tests that count requests or stop components are not disturbed. Continues
/// after a failure, because the lab takes longer to start than most steps. Fails after a failure, so that the logs of the
/// lab are kept.
async fn run_in_lab(ui: &Ui, steps: &[Step], report: &mut Report, lab: &Lab) -> Result<()> {
    let mut passed = true;
    for step in steps {
        let (outcome, took) = timed(ui, step, Some(lab)).await;
        passed &= outcome.passed;
        report.record(&step.name, outcome, took);
    }
    ensure!(passed, "steps in the lab failed");
    Ok(())
}

/// Runs a step, and prints its name before, and its result and time after it.
async fn timed(ui: &Ui, step: &Step, lab: Option<&Lab>) -> (Outcome, Duration) {
    let start = Instant::now();
    ui.line(format!("{}: {}", step.name, step.description));
    let outcome = execute(ui, step, lab).await;
    let took = start.elapsed();
    ui.line(format!("{}: {} ({:.1}s)", step.name, outcome.text(), took.as_secs_f64()));
    (outcome, took)
}
