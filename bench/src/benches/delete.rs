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
    let Tiers { guest, management } = Tiers::warm(s, work.warm_up()).await?;

    let (mut times, mut floor, mut cost) = (Vec::new(), Vec::new(), Cost::default());
    let (guest_claims, _) = guest.create(work.count()).await?;
    let (management_claims, _) = management.create(work.count()).await?;
    for (guest_claim, management_claim) in guest_claims.chunks(1).zip(management_claims.chunks(1)) {
        floor.extend(management.delete(management_claim).await?);
        let (time, one) = metered(&s.lab, 1, guest.delete(guest_claim)).await?;
        times.extend(time);
        cost.add(one);
    }
    report.times("one", &times, &floor);
    report.cost("one", &cost);

    for burst in work.bursts(&[100]) {
        let (mut times, mut floor, mut cost) = (Vec::new(), Vec::new(), Cost::default());
        for _ in 0..work.rounds() {
            let (claims, _) = management.create(burst).await?;
            floor.extend(management.delete(&claims).await?);
            let (claims, _) = guest.create(burst).await?;
            let (time, one) = metered(&s.lab, burst, guest.delete(&claims)).await?;
            times.extend(time);
            cost.add(one);
        }
        report.times(&case(burst), &times, &floor);
        report.cost(&case(burst), &cost);
    }
    Ok(())
}
