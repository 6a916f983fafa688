//! Bench: the data path. fio in a VM reads and writes a volume, and two disks of the same storage that are hot-plugged by hand
//! into the same VM. A case's cost is the time per operation, and the latency that fio saw. The ratio of the two disks by hand
//! shows what noise does to a ratio.

mod by_hand;
mod fio;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use tests::pods::{self, PodScenario, Script, block};

use crate::report::Report;
use crate::work::Work;
use by_hand::{ByHand, Driver};
use fio::{CASES, Case, Sample};

/// Size of each disk.
const SIZE: &str = "320Mi";

/// How long and against what it measures.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Seconds of each measurement.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=600))]
    seconds: u32,
    /// Attributes of `<driver>` of the disk that is attached by hand, as in cache=none,io=native. Repeatable.
    #[arg(
        long = "by-hand",
        value_name = "NAME=VALUE,...",
        default_value = "cache=none,io=threads,discard=unmap"
    )]
    drivers: Vec<Driver>,
}

/// Runs the bench.
pub async fn run(report: &Report, work: &Work, options: &Options) -> Result<()> {
    let (report, work, options) = (report.clone(), work.clone(), options.clone());
    pods::run_alone(move |pods| async move { measure(&pods, &report, &work, &options).await }).await
}

async fn measure(pods: &Arc<PodScenario>, report: &Report, work: &Work, options: &Options) -> Result<()> {
    let vm = &pods.first_node;
    let volume = pods.claim("data", &block()).await?;
    let holder =
        Script::new("holder", vm, "trap exit TERM; sleep 100000 & wait").device(&volume, "/dev/data");
    let holder = pods.start(holder).await?;
    pods.running(&holder).await?;
    let tools = ByHand::with_fio(pods.scenario(), vm).await?;
    for driver in &options.drivers {
        let by_hand = || ByHand::like(pods.scenario(), vm, &volume, driver);
        let others = [by_hand().await?, by_hand().await?];
        let disks = [&volume.disk, &others[0].serial, &others[1].serial].map(String::as_str);
        let bench = Bench { pods, tools: &tools, disks, seconds: options.seconds };
        let measured = bench.rounds(work).await;
        for other in &others {
            other.detach().await?;
        }
        measured?.report(report, &driver.case(options.drivers.len()));
    }
    tools.detach().await?;
    pods.remove(&holder).await
}

/// The measured disks: the volume, and two by hand.
const DISKS: usize = 3;

struct Bench<'a> {
    pods: &'a PodScenario,
    tools: &'a ByHand<'a>,
    /// Their serials.
    disks: [&'a str; DISKS],
    seconds: u32,
}

/// Samples of each disk, by case.
#[derive(Default)]
struct Measured {
    samples: Vec<(&'static Case, [Vec<Sample>; DISKS])>,
}

impl Measured {
    fn add(&mut self, case: &'static Case, disk: usize, sample: Sample) {
        let at = self.samples.iter().position(|(known, _)| known.name == case.name).unwrap_or_else(|| {
            self.samples.push((case, Default::default()));
            self.samples.len() - 1
        });
        self.samples[at].1[disk].push(sample);
    }

    fn report(&self, report: &Report, suffix: &str) {
        for (case, samples) in &self.samples {
            let name = format!("{}{suffix}", case.name);
            report_metric(report, &name, "duration", of_each(samples, |one| one.duration));
            report_metric(report, &name, "latency", of_each(samples, |one| one.latency));
        }
    }
}

fn of_each(samples: &[Vec<Sample>; DISKS], value: fn(&Sample) -> Duration) -> [Vec<Duration>; DISKS] {
    samples.each_ref().map(|samples| samples.iter().map(value).collect())
}

fn report_metric(report: &Report, case: &str, metric: &str, [volume, first, second]: [Vec<Duration>; DISKS]) {
    report.times_of(case, metric, &volume, &first);
    let ratios = |of: &[Duration]| paired(of, &first);
    report.numbers(case, &format!("{metric}, volume and disk by hand"), "ratio", ratios(&volume));
    report.numbers(case, &format!("{metric}, two disks by hand"), "ratio", ratios(&second));
}

/// Ratios of samples of the same round: other load on the host affects both alike.
fn paired(of: &[Duration], to: &[Duration]) -> Vec<f64> {
    of.iter().zip(to).map(|(of, to)| of.as_secs_f64() / to.as_secs_f64()).collect()
}

impl Bench<'_> {
    async fn rounds(&self, work: &Work) -> Result<Measured> {
        self.script("fill", &fio::fill(&self.disks)).await?;
        let mut measured = Measured::default();
        for round in 0..work.count() {
            // In each order: none of the disks is always the first one.
            let order: [usize; DISKS] = std::array::from_fn(|at| (round + at) % DISKS);
            let output = self.script("fio", &fio::measure(&self.disks, &order, self.seconds)).await?;
            let mut lines = output.lines();
            for case in &CASES {
                for disk in order {
                    let line = lines.next().with_context(|| format!("fio printed only {output:?}"))?;
                    measured.add(case, disk, case.sample(line)?);
                }
            }
        }
        Ok(measured)
    }

    /// Runs a script with fio on the VM.
    async fn script(&self, name: &str, script: &str) -> Result<String> {
        let script = fio::with_tools(&self.tools.serial, script);
        self.pods.run(Script::on_vm(name, &self.pods.first_node, &script)).await
    }
}
