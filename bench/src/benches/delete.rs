//! Bench: time from a guest claim's deletion until its volume is deleted. The floor is the same in the management cluster.

use std::sync::Arc;

use anyhow::Result;
use tests::Scenario;

use crate::cost::{Cost, metered};
use crate::objects::Tiers;
use crate::report::Report;
use crate::work::{Work, case};

/// Runs the bench.
pub async fn run(report: &Report, work: &Work) -> Result<()> {
    let (report, work) = (report.clone(), work.clone());
    tests::run(move |s| async move { measure(&s, &report, &work).await }).await
}

async fn measure(s: &Arc<Scenario>, report: &Report, work: &Work) -> Result<()> {
    let Tiers { above, below } = Tiers::warm(s, work.warm_up()).await?;

    let (mut times, mut floor, mut cost) = (Vec::new(), Vec::new(), Cost::default());
    let (claims_above, _) = above.create(work.count()).await?;
    let (claims_below, _) = below.create(work.count()).await?;
    for (one_above, one_below) in claims_above.chunks(1).zip(claims_below.chunks(1)) {
        floor.extend(below.delete(one_below).await?);
        let (time, one) = metered(&s.lab, 1, above.delete(one_above)).await?;
        times.extend(time);
        cost.add(one);
    }
    report.times("one", &times, &floor);
    report.cost("one", &cost);

    for burst in work.bursts(&[100]) {
        let (mut times, mut floor, mut cost) = (Vec::new(), Vec::new(), Cost::default());
        for _ in 0..work.rounds() {
            let (claims, _) = below.create(burst).await?;
            floor.extend(below.delete(&claims).await?);
            let (claims, _) = above.create(burst).await?;
            let (time, one) = metered(&s.lab, burst, above.delete(&claims)).await?;
            times.extend(time);
            cost.add(one);
        }
        report.times(&case(burst), &times, &floor);
        report.cost(&case(burst), &cost);
    }
    Ok(())
}
