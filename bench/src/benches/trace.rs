//! Bench: `kubectl nestor trace` beside many volumes. They are only objects in both API servers: Nestor's programs are stopped, and
//! half of the volumes are shown as attached. The floor is the same trace beside the smallest number of volumes.

use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use tests::Scenario;
use tests::program::binary;
use tokio::process::Command;

use crate::floor::timed;
use crate::report::Report;
use crate::synthetic::SyntheticVolumes;
use crate::work::Work;

/// Programs that would react to the objects.
const STOPPED: [&str; 3] = ["g1-gc-csi", "vm-operator-shim", "mgmt-csi"];

/// Numbers of volumes.
#[derive(Debug, Clone, Args)]
pub struct Volumes {
    /// Numbers of volumes; the smallest one is the floor of the others.
    #[arg(long, value_delimiter = ',', default_values_t = [10, 10_000], value_parser = at_least_two)]
    volumes: Vec<usize>,
}

/// One attached volume, and one that is not.
fn at_least_two(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|count| *count >= 2).ok_or_else(|| "must be a number from 2".to_owned())
}

/// Runs the bench.
pub async fn run(report: &Report, work: &Work, volumes: &Volumes) -> Result<()> {
    let (report, work, mut sizes) = (report.clone(), work.clone(), volumes.volumes.clone());
    sizes.sort_unstable();
    tests::run(move |s| async move { with_objects(&s, &report, &work, &sizes).await }).await
}

async fn with_objects(s: &Arc<Scenario>, report: &Report, work: &Work, sizes: &[usize]) -> Result<()> {
    // The scenario starts them again.
    for program in STOPPED {
        s.stop_component(program).await?;
    }
    let mut volumes = SyntheticVolumes::begin(s).await?;
    let outcome = measure(s, &mut volumes, report, work, sizes).await;
    let removed = volumes.remove().await;
    outcome.and(removed)
}

async fn measure(
    s: &Scenario,
    volumes: &mut SyntheticVolumes<'_>,
    report: &Report,
    work: &Work,
    sizes: &[usize],
) -> Result<()> {
    let plugin = Plugin::new(s, &volumes.namespace)?;
    let (mut both_floor, mut management_floor) = (Vec::new(), Vec::new());
    for size in sizes {
        volumes.fill(*size).await?;
        let case = size.to_string();
        // The volumes with even numbers are attached.
        let both = plugin.times(work, size / 2, |at| plugin.both(volumes.guest_claim(2 * at + 1))).await?;
        report.times_of(&case, "not attached, both clusters", &both, &both_floor);
        let management = plugin.times(work, size / 2, |at| plugin.management(volumes.claim(2 * at))).await?;
        report.times_of(&case, "attached, one cluster", &management, &management_floor);
        if both_floor.is_empty() {
            (both_floor, management_floor) = (both, management);
        }
    }
    Ok(())
}

/// The plugin with the administrators' kubeconfigs.
struct Plugin {
    program: PathBuf,
    guest: Vec<String>,
    management: Vec<String>,
}

impl Plugin {
    fn new(s: &Scenario, namespace: &str) -> Result<Self> {
        let state = s.lab.state();
        let guest = &state.guests.get("g1").context("the lab has no guest g1")?.cluster.kubeconfig;
        let management = &state.management.as_ref().context("the lab has no management cluster")?.kubeconfig;
        let flag = |name: &str, value: &dyn std::fmt::Display| format!("--{name}={value}");
        Ok(Self {
            program: binary(&s.lab, "kubectl-nestor"),
            guest: vec![flag("guest-kubeconfig", &guest.display()), flag("namespace", &s.name)],
            management: vec![
                flag("management-kubeconfig", &management.display()),
                flag("management-namespace", &namespace),
            ],
        })
    }

    /// The durations of traces of different volumes of `count`.
    async fn times<Tracing>(
        &self,
        work: &Work,
        count: usize,
        trace: impl Fn(usize) -> Tracing,
    ) -> Result<Vec<Duration>>
    where
        Tracing: Future<Output = Result<()>>,
    {
        let total = work.warm_up() + work.count();
        let mut times = Vec::new();
        for number in 0..total {
            // Spread over all of them.
            let ((), time) = timed(trace(number * count / total)).await?;
            times.push(time);
        }
        Ok(times.split_off(work.warm_up()))
    }

    /// Traces a claim of the guest with both clusters.
    async fn both(&self, claim: String) -> Result<()> {
        self.trace(&claim, &[&self.guest[..], &self.management].concat()).await
    }

    /// Traces a claim of the management cluster with that cluster only.
    async fn management(&self, claim: String) -> Result<()> {
        self.trace(&claim, &self.management).await
    }

    async fn trace(&self, claim: &str, clusters: &[String]) -> Result<()> {
        let mut command = Command::new(&self.program);
        command.args(["trace", &format!("pvc/{claim}")]).args(clusters);
        // Without the configuration of the user who runs the bench.
        command.env("XDG_CONFIG_HOME", "/nonexistent").env_remove("KUBECONFIG");
        let output = command.stdin(Stdio::null()).kill_on_drop(true).output().await?;
        let text = String::from_utf8_lossy(&output.stdout);
        let is_healthy = output.status.success() && text.contains("healthy");
        ensure!(is_healthy, "{}: {text}{}", output.status, String::from_utf8_lossy(&output.stderr));
        Ok(())
    }
}
