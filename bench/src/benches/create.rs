//! Bench: time from a guest claim's creation until it is bound. The floor is the same claim in the management cluster,
//! like the one that gc-csi creates for it.

use std::sync::Arc;

use anyhow::Result;
use tests::Scenario;

use crate::cost::{ALONE, Cost, metered};
use crate::instant::{self, Backend};
use crate::objects::Tiers;
use crate::report::Report;
use crate::work::{Work, case};

/// Runs the bench.
pub async fn run(report: &Report, work: &Work, backend: Backend) -> Result<()> {
    let (report, work) = (report.clone(), work.clone());
    tests::run(move |s| async move {
        match backend {
            Backend::Infra => measure(&s, &report, &work).await,
            Backend::Instant => instant::in_place_of_the_infra(&s.lab, measure(&s, &report, &work)).await,
        }
    })
    .await
}

async fn measure(s: &Arc<Scenario>, report: &Report, work: &Work) -> Result<()> {
    let Tiers { guest, management } = Tiers::warm(s, work.warm_up()).await?;

    // Alternating, so that other load on the host affects both equally.
    let (mut times, mut floor, mut cost) = (Vec::new(), Vec::new(), Cost::default());
    let (mut guest_claims, mut management_claims) = (Vec::new(), Vec::new());
    for _ in 0..work.count() {
        let (claims, time) = management.create(1).await?;
        management_claims.extend(claims);
        floor.extend(time);
        let (claims, time) = guest.create(1).await?;
        guest_claims.extend(claims);
        times.extend(time);
    }
    report.times("one", &times, &floor);
    for _ in 0..work.count().min(ALONE) {
        let ((claims, _), one) = metered(&s.lab, 1, guest.create(1)).await?;
        guest_claims.extend(claims);
        cost.add(one);
    }
    report.cost("one", &cost);
    guest.delete(&guest_claims).await?;
    management.delete(&management_claims).await?;

    for burst in work.bursts(&[100]) {
        let (mut times, mut floor, mut cost) = (Vec::new(), Vec::new(), Cost::default());
        for _ in 0..work.rounds() {
            let (claims, time) = management.create(burst).await?;
            floor.extend(time);
            management.delete(&claims).await?;
            let ((claims, time), one) = metered(&s.lab, burst, guest.create(burst)).await?;
            times.extend(time);
            cost.add(one);
            guest.delete(&claims).await?;
        }
        report.times(&case(burst), &times, &floor);
        report.cost(&case(burst), &cost);
    }
    Ok(())
}
