//! The command line: verbs and their flags.

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

use crate::demo::demo;
use crate::down::down;
use crate::run::Run;
use crate::sanity::{Tier, sanity};
use crate::session::{After, interrupted, with_any_lab, with_lab};
use crate::status::status;
use crate::ui::{Ui, say};
use crate::up::{UpOptions, up};
use crate::{images, verbs, verify};

/// Brings up both clusters, virtual machines, the storage infra and the system on this machine, from source.
#[derive(Debug, Parser)]
#[command(name = "cargo lab", bin_name = "cargo lab", version)]
pub struct Cli {
    /// Which lab: labs of different names run side by side.
    #[arg(long, global = true, env = "NESTOR_LAB_NAME", default_value = "default")]
    name: String,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Brings a lab up. What is missing is built or installed first.
    Up(UpOptions),
    /// Takes a lab down, wholly, whatever state it is in.
    Down {
        /// Leave the logs.
        #[arg(long)]
        keep_logs: bool,
    },
    /// Shows every part, whether it is well, its process and where it is. Exits with 1 unless all are well.
    Status,
    /// Shows the log of a part.
    Logs {
        /// A part, or a virtual machine's `-console`, `-kubelet` or `-gc-csi-node`.
        part: String,
        /// Go on as the log grows.
        #[arg(short, long)]
        follow: bool,
    },
    /// Restarts parts, with the binaries as they are now, and the sidecars that end when their driver does.
    Restart {
        /// Parts, by the names that `cargo lab status` shows.
        #[arg(required = true)]
        parts: Vec<String>,
    },
    /// Runs kubectl against a cluster of the lab.
    Kubectl {
        /// `mgmt`, `guest` (which is g1), or a guest's name.
        cluster: String,
        /// What kubectl is given.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// A volume's whole life, shown in both clusters: made, written, moved to another machine, checked, removed.
    Demo {
        /// Leave the lab up.
        #[arg(long)]
        keep: bool,
    },
    /// Formatting, lints, unit tests, and then the black-box tests and csi-sanity over a lab of their own.
    Test(verify::Selection),
    /// Lets users of two guests do this and that while parts of the system fail, and checks what must exist, over this
    /// lab or, where it is not up, one of its own.
    Soak {
        /// How long.
        #[arg(long, default_value_t = 3)]
        minutes: u64,
        /// Does again what a run with this seed did.
        #[arg(long)]
        seed: Option<u64>,
    },
    /// Runs csi-sanity against a driver, over this lab or, where it is not up, one of its own.
    Sanity {
        /// Which driver.
        tier: Tier,
    },
    /// Builds the container images as OCI archives, without a container engine: Debian packages, and our programs.
    Images(images::Options),
    /// Writes the CustomResourceDefinitions under crds/yaml from the types.
    Generate,
    /// Runs a bench over this lab or, where it is not up, one of its own.
    Bench {
        /// Which bench.
        bench: String,
        /// What the bench is given.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
}

/// Runs one command.
pub async fn run(cli: Cli) -> Result<ExitCode> {
    let ui = Ui::default();
    let run = Run::named(&cli.name)?;
    match cli.verb {
        Verb::Up(options) => {
            tokio::select! {
                outcome = up(&ui, &run, &options) => outcome.with_context(|| unfinished(&run))?,
                interrupt = interrupted() => return Err(interrupt?.context(unfinished(&run))),
            }
            say(format!(
                "lab {} is up: `cargo lab status` shows it; NESTOR_LAB={}",
                cli.name,
                run.dir().display()
            ));
        }
        Verb::Down { keep_logs } => down(&ui, &run, keep_logs).await?,
        Verb::Status => return Ok(if status(&run).await? { ExitCode::SUCCESS } else { ExitCode::FAILURE }),
        Verb::Logs { part, follow } => return verbs::logs(&run, &part, follow).await,
        Verb::Restart { parts } => {
            let lab = crate::Lab::open(run)?;
            for part in parts {
                lab.restart(&part).await?;
                say(format!("restarted {part}"));
            }
        }
        Verb::Kubectl { cluster, args } => return verbs::kubectl(&run, &cluster, &args).await,
        Verb::Demo { keep } => {
            let after = if keep { After::Keep } else { After::Down };
            let run = Run::named("demo")?;
            with_lab(&ui, &run, &UpOptions::default(), after, async |lab| demo(&ui, lab).await).await?;
            say("the demo's claims all held");
        }
        Verb::Test(selection) => return verify::verify(&ui, &selection).await,
        Verb::Sanity { tier } => {
            let options = UpOptions { vms: 0, ..UpOptions::default() };
            let work = async |lab: &crate::Lab| sanity(&ui, lab, tier).await;
            let counts = with_any_lab(&ui, &run, "sanity", &options, work).await?;
            say(counts.to_string());
            if !counts.good() {
                return Ok(ExitCode::FAILURE);
            }
        }
        Verb::Soak { minutes, seed } => {
            let options = UpOptions { vms: 0, guests: 2, one_namespace: true, ..UpOptions::default() };
            let work = async |lab: &crate::Lab| verbs::soak(lab, minutes, seed).await;
            return with_any_lab(&ui, &run, "soak", &options, work).await;
        }
        Verb::Images(options) => images::images(&ui, &options).await?,
        Verb::Generate => verbs::generate()?,
        Verb::Bench { bench, args } => {
            // Plots are drawn from what was measured before.
            if bench == "plot" {
                return verbs::bench(None, &bench, &args).await;
            }
            let options = UpOptions { vms: 0, release: true, ..UpOptions::default() };
            let work = async |lab: &crate::Lab| verbs::bench(Some(lab), &bench, &args).await;
            return with_any_lab(&ui, &run, "bench", &options, work).await;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn unfinished(run: &Run) -> String {
    format!("the lab at {} is not up (`cargo lab down` clears what was begun)", run.dir().display())
}
