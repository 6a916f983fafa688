//! Bench: bursts of claims of increasing size, from the first claim's creation until the last is bound, and until the
//! last volume is deleted. The floor is the same in the management cluster only.

use std::sync::Arc;

use anyhow::Result;
use tests::Scenario;

use crate::floor::timed;
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
    for burst in work.bursts(&[1, 10, 30, 100, 300, 1000]) {
        let (mut bound, mut bound_management) = (Vec::new(), Vec::new());
        let (mut gone, mut gone_management) = (Vec::new(), Vec::new());
        for _ in 0..work.rounds() {
            let ((claims, _), time) = timed(management.create(burst)).await?;
            bound_management.push(time);
            gone_management.push(timed(management.delete(&claims)).await?.1);
            let ((claims, _), time) = timed(guest.create(burst)).await?;
            bound.push(time);
            gone.push(timed(guest.delete(&claims)).await?.1);
        }
        report.times_of(&case(burst), "all bound", &bound, &bound_management);
        report.times_of(&case(burst), "all gone", &gone, &gone_management);
    }
    Ok(())
}
