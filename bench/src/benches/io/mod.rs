//! Bench: the data path. fio in a VM reads and writes a volume, and a disk of the same storage that is hot-plugged by hand
//! into the same VM. A case's cost is the time per operation, and the latency that fio saw.

mod by_hand;
mod fio;

use std::sync::Arc;

use anyhow::{Context, Result};
use clap::Args;
use tests::pods::{self, PodScenario, Script, Volume, block};

use crate::report::Report;
use crate::work::Work;
use by_hand::{ByHand, Driver};
use fio::{CASES, Case, Sample};

/// Size of both disks.
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
        let other = ByHand::like(pods.scenario(), vm, &volume, driver).await?;
        let bench = Bench { pods, volume: &volume, tools: &tools, other: &other, seconds: options.seconds };
        let measured = bench.rounds(work).await;
        other.detach().await?;
        measured?.report(report, &driver.case(options.drivers.len()));
    }
    tools.detach().await?;
    pods.remove(&holder).await
}

struct Bench<'a> {
    pods: &'a PodScenario,
    volume: &'a Volume,
    tools: &'a ByHand<'a>,
    other: &'a ByHand<'a>,
    seconds: u32,
}

/// Samples of the volume and of the disk by hand, by case.
#[derive(Default)]
struct Measured {
    samples: Vec<(&'static Case, [Vec<Sample>; 2])>,
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
            let of = |disk: usize, what: fn(&Sample) -> std::time::Duration| -> Vec<_> {
                samples[disk].iter().map(what).collect()
            };
            report.times(&name, &of(0, |one| one.duration), &of(1, |one| one.duration));
            report.times_of(&name, "latency", &of(0, |one| one.latency), &of(1, |one| one.latency));
        }
    }
}

impl Bench<'_> {
    async fn rounds(&self, work: &Work) -> Result<Measured> {
        let disks = [self.volume.disk.as_str(), &self.other.serial];
        self.script("fill", &fio::fill(disks)).await?;
        let mut measured = Measured::default();
        for round in 0..work.count() {
            // Alternating, so that other load on the host affects both equally.
            let order = [round % 2, 1 - round % 2];
            let output = self.script("fio", &fio::measure(disks, order, self.seconds)).await?;
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
