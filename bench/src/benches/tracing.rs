//! Bench: create, attach and detach while Nestor's programs export no spans, those of a fraction of the operations, or of all.
//! The floor is the same without tracing, in the same run. The collector runs on the same host.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use lab::LoopNode;
use tests::Scenario;
use tests::collector::{Collector, Target, with_traces};

use crate::cost::{Cost, metered};
use crate::objects::{Attachments, Claim, Claims};
use crate::report::Report;
use crate::work::Work;

/// The fractions of operations that are traced; None without tracing, which comes first.
const CASES: [(&str, Option<f64>); 3] = [("off", None), ("ratio 0.1", Some(0.1)), ("ratio 1", Some(1.0))];
/// Components whose CPU time is added up.
const OURS: [&str; 4] = ["g1-gc-csi", "mgmt-csi", "vm-operator-shim", "storage-infra"];

/// Runs the bench.
pub async fn run(report: &Report, work: &Work) -> Result<()> {
    let (report, work) = (report.clone(), work.clone());
    tests::run(move |s| async move { measure(&s, &report, &work).await }).await
}

async fn measure(s: &Arc<Scenario>, report: &Report, work: &Work) -> Result<()> {
    let (node, collector) = (s.simulated_node().await?, Collector::start().await?);
    let mut floor = Measured::default();
    for (case, ratio) in CASES {
        let target = ratio.map(|ratio| Target { ratio: Some(ratio), ..collector.target() });
        let (work, node) = (work.clone(), node.clone());
        // The programs are restarted in each case, also without tracing.
        let bench = move |s: Arc<Scenario>| async move { operations(&s, &work, &node).await };
        let measured = with_traces(s, target.as_ref(), bench).await?;
        measured.add_to(report, case, &floor);
        if ratio.is_none() {
            floor = measured;
        }
    }
    collector.stop().await
}

/// Durations and cost of the operations of a case.
#[derive(Debug, Default)]
struct Measured {
    create: Vec<Duration>,
    attach: Vec<Duration>,
    detach: Vec<Duration>,
    cost_of_create: Cost,
    cost_of_attach: Cost,
}

impl Measured {
    fn add_to(&self, report: &Report, case: &str, floor: &Self) {
        report.times_of(case, "create", &self.create, &floor.create);
        report.times_of(case, "attach", &self.attach, &floor.attach);
        report.times_of(case, "detach", &self.detach, &floor.detach);
        for (what, cost) in [("create", &self.cost_of_create), ("attach, detach", &self.cost_of_attach)] {
            let ours = cost.used.iter().filter(|(component, _)| OURS.contains(&component.as_str()));
            let cpu: Duration = ours.map(|(_, used)| used.cpu).sum();
            let per_operation = cpu.as_secs_f64() * 1000.0 / cost.operations.max(1) as f64;
            report.number(case, &format!("Nestor cpu, {what}"), "ms/op", per_operation);
            report.cost(&format!("{case} {what}"), cost);
        }
    }
}

/// Measures the operations one at a time.
async fn operations(s: &Scenario, work: &Work, node: &LoopNode) -> Result<Measured> {
    let claims = Claims::watch(&s.guest, &s.name, &s.name);
    let attachments = Attachments::watch(&s.guest, &s.name);
    let (made, _) = create(&claims, work.warm_up()).await?;
    attach(&attachments, &made, node, work.warm_up()).await?;
    claims.delete(&made).await?;

    let count = work.count();
    let ((made, created), cost_of_create) = metered(&s.lab, count, create(&claims, count)).await?;
    let pairs = attach(&attachments, &made, node, count);
    let ((attached, detached), cost_of_attach) = metered(&s.lab, count, pairs).await?;
    claims.empty(&made).await?;
    Ok(Measured { create: created, attach: attached, detach: detached, cost_of_create, cost_of_attach })
}

/// Creates claims one after the other.
async fn create(claims: &Claims, count: usize) -> Result<(Vec<Claim>, Vec<Duration>)> {
    let (mut made, mut times) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let (claim, time) = claims.create(1).await?;
        made.extend(claim);
        times.extend(time);
    }
    Ok((made, times))
}

/// Attaches and detaches the volumes in turn.
async fn attach(
    attachments: &Attachments,
    made: &[Claim],
    node: &LoopNode,
    count: usize,
) -> Result<(Vec<Duration>, Vec<Duration>)> {
    let (mut attached, mut detached) = (Vec::new(), Vec::new());
    for claim in made.iter().cycle().take(count) {
        let (created, time) = attachments.attach(std::slice::from_ref(&claim.volume), &node.name).await?;
        attached.extend(time);
        detached.extend(attachments.detach(&created).await?);
    }
    Ok((attached, detached))
}
