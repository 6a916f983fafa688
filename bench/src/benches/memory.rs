//! Bench: memory of each process with increasing numbers of volumes: current and peak, and, for our own processes, after
//! a restart.

use std::sync::Arc;

use anyhow::{Context, Result};
use tests::Scenario;

use crate::objects::Claims;
use crate::report::Report;
use crate::usage;

/// Components of Nestor.
const OURS: [&str; 4] = ["g1-gc-csi", "mgmt-csi", "vm-operator-shim", "storage-infra"];

/// Runs the bench.
pub async fn run(report: &Report, volumes: &[u32]) -> Result<()> {
    let report = report.clone();
    let mut sizes: Vec<usize> = volumes.iter().map(|volumes| *volumes as usize).collect();
    sizes.sort_unstable();
    tests::run(move |s| async move { measure(&s, &report, &sizes).await }).await
}

async fn measure(s: &Arc<Scenario>, report: &Report, sizes: &[usize]) -> Result<()> {
    let claims = Claims::watch(&s.guest, &s.name, &s.name);
    let node = s.simulated_node().await?;
    let plugin = s.lab.spawn_node_plugin(&node).await?;
    let mut made = Vec::new();
    for size in sizes {
        claims.fill(&mut made, *size).await?;
        let case = format!("{size} volumes");
        for (component, process) in usage::running(&s.lab)? {
            let memory = usage::resident(process)?;
            report.number(&case, &format!("{component} rss"), "MiB", mib(memory.now));
            report.number(&case, &format!("{component} rss peak"), "MiB", mib(memory.peak));
        }
        for component in OURS {
            s.stop_component(component).await?;
            s.start_component(component).await?;
            let process =
                s.lab.run().process(component).with_context(|| format!("{component} is not running"))?;
            let fresh = usage::resident(process)?;
            report.number(&case, &format!("{component} rss after a restart"), "MiB", mib(fresh.now));
        }
    }
    s.lab.remove_node_plugin(&plugin).await?;
    claims.empty(&made).await
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
