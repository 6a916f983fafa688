//! Bench: requests and CPU time while idle, with existing and attached volumes.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use tests::Scenario;

use crate::cost::Meter;
use crate::objects::{Attachments, Claims};
use crate::report::Report;

/// Number of attached volumes.
const ATTACHED: usize = 100;

/// Runs the bench.
pub async fn run(report: &Report, volumes: &[u32], seconds: u64) -> Result<()> {
    let report = report.clone();
    let mut sizes: Vec<usize> = volumes.iter().map(|volumes| *volumes as usize).collect();
    sizes.sort_unstable();
    tests::run(move |s| async move { measure(&s, &report, &sizes, Duration::from_secs(seconds)).await }).await
}

async fn measure(s: &Arc<Scenario>, report: &Report, sizes: &[usize], time: Duration) -> Result<()> {
    let claims = Claims::watch(&s.guest, &s.name, &s.name);
    let attachments = Attachments::watch(&s.guest, &s.name);
    let node = s.simulated_node().await?;
    let (mut made, mut created) = (Vec::new(), Vec::new());
    for size in sizes {
        claims.fill(&mut made, *size).await?;
        let volumes: Vec<String> =
            made.iter().take(ATTACHED).skip(created.len()).map(|claim| claim.volume.clone()).collect();
        created.extend(attachments.attach(&volumes, &node.name).await?.0);
        let meter = Meter::start(&s.lab).await?;
        // This interval is measured.
        tokio::time::sleep(time).await;
        let requests = meter.so_far()?;
        let cost = meter.stop(1).await?;
        let case = format!("{size} volumes");
        let all: usize = requests.values().sum();
        report.number(&case, "requests beyond leases", "per minute", all as f64 * 60.0 / time.as_secs_f64());
        for (kind, count) in requests {
            let name = format!("{} {} {} ({})", kind.component, kind.verb, kind.resource, kind.cluster);
            report.number(&case, &name, "total", count as f64);
        }
        for (component, used) in &cost.used {
            let share = 100.0 * used.cpu.as_secs_f64() / time.as_secs_f64();
            report.number(&case, &format!("{component} cpu"), "% of a core", share);
        }
    }
    attachments.detach(&created).await?;
    claims.empty(&made).await
}
