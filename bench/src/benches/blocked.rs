//! Bench: effect of a hanging VM on others. Attaches to a healthy VM are measured while many disks wait for a VM whose
//! hypervisor does not respond. The floor is the same work without the hanging VM.

use std::sync::Arc;

use anyhow::Result;
use tests::Scenario;

use crate::objects::{Attachments, Claims};
use crate::report::Report;
use crate::stats::Stats;
use crate::work::Work;

/// Runs the bench.
pub async fn run(report: &Report, work: &Work, waiting: usize) -> Result<()> {
    let (report, work) = (report.clone(), work.clone());
    tests::run(move |s| async move { measure(&s, &report, &work, waiting).await }).await
}

async fn measure(s: &Arc<Scenario>, report: &Report, work: &Work, waiting: usize) -> Result<()> {
    let (well, hanging) = (s.simulated_node().await?, s.simulated_node().await?);
    let claims = Claims::watch(&s.guest, &s.name, &s.name);
    let attachments = Attachments::watch(&s.guest, &s.name);
    let (made, _) = claims.create(waiting + 1).await?;
    let volumes: Vec<String> = made.iter().map(|claim| claim.volume.clone()).collect();
    let (one, stuck) = volumes.split_at(1);
    // Claims are created meanwhile too, because they do not depend on VMs.
    let rounds = async |count: usize| {
        let (mut attach, mut detach, mut create) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..count {
            let (created, time) = attachments.attach(one, &well.name).await?;
            attach.extend(time);
            detach.extend(attachments.detach(&created).await?);
            let (made, time) = claims.create(1).await?;
            create.extend(time);
            claims.delete(&made).await?;
        }
        anyhow::Ok([("attach", attach), ("detach", detach), ("create", create)])
    };
    rounds(work.warm_up()).await?;
    let alone = rounds(work.count()).await?;
    hanging.block_calls()?;
    let created = attachments.start(stuck, &hanging.name).await?;
    let beside = rounds(work.count()).await;
    hanging.unblock_calls()?;
    attachments.attached(&created).await?;
    attachments.detach(&created).await?;
    for ((metric, times), (_, floor)) in beside?.iter().zip(&alone) {
        report.times_of("blocked", metric, times, floor);
        let p90 = |times: &[std::time::Duration]| {
            Stats::of(times.iter().map(std::time::Duration::as_secs_f64).collect()).map(|stats| stats.p90)
        };
        if let (Some(beside), Some(alone)) = (p90(times), p90(floor)) {
            report.number("blocked", &format!("{metric} p90"), "times the floor", beside / alone);
        }
    }
    claims.delete(&made).await.map(drop)
}
