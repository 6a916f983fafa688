//! Bench: time from the start of each of our processes until it is ready, with existing volumes, and from the return of a
//! killed API server until all of them are ready again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use lab::Lab;
use tests::Scenario;

use crate::objects::Claims;
use crate::observed::LONGEST;
use crate::report::Report;
use crate::work::Work;

/// Components of Nestor.
const OURS: [&str; 4] = ["storage-infra", "mgmt-csi", "vm-operator-shim", "g1-gc-csi"];
/// Components that watch the management cluster.
const WATCHING: [&str; 3] = ["mgmt-csi", "vm-operator-shim", "g1-gc-csi"];
/// The management cluster's API server.
const SERVER: &str = "mgmt-apiserver";
/// Poll interval.
const PACE: Duration = Duration::from_millis(2);

/// Runs the bench.
pub async fn run(report: &Report, work: &Work, volumes: usize) -> Result<()> {
    let (report, work) = (report.clone(), work.clone());
    tests::run(move |s| async move { measure(&s, &report, &work, volumes).await }).await
}

async fn measure(s: &Arc<Scenario>, report: &Report, work: &Work, volumes: usize) -> Result<()> {
    let claims = Claims::watch(&s.guest, &s.name, &s.name);
    let mut made = Vec::new();
    claims.fill(&mut made, volumes).await?;
    let case = format!("{volumes} volumes");
    for component in OURS {
        let mut times = Vec::new();
        for _ in 0..work.count() {
            s.kill_component(component).await?;
            let start = Instant::now();
            let (started, ready) = tokio::join!(s.lab.start_alone(component), ready(&s.lab, component));
            started?;
            times.push(ready?.duration_since(start));
            // Restarted with its sidecars, which exited with it.
            s.lab.restart(component).await?;
        }
        report.times_of(&case, &format!("{component} started"), &times, &[]);
    }
    let mut times = Vec::new();
    for _ in 0..work.rounds() {
        s.kill_component(SERVER).await?;
        for component in WATCHING {
            until(|| async { Ok(!s.lab.is_ready(component).await?) }).await?;
        }
        s.start_component(SERVER).await?;
        let start = Instant::now();
        for component in WATCHING {
            ready(&s.lab, component).await?;
        }
        times.push(start.elapsed());
    }
    report.times_of(&case, "watches are back", &times, &[]);
    claims.empty(&made).await
}

/// The time at which a component is first observed to be ready.
async fn ready(lab: &Lab, component: &str) -> Result<Instant> {
    until(|| lab.is_ready(component)).await.with_context(|| format!("{component} is not ready"))
}

async fn until<R: Future<Output = Result<bool>>>(mut condition: impl FnMut() -> R) -> Result<Instant> {
    let polling = async {
        while !condition().await? {
            tokio::time::sleep(PACE).await;
        }
        Ok(Instant::now())
    };
    tokio::time::timeout(LONGEST, polling).await?
}
