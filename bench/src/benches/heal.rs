//! How long what could not be carried out waits on when its cause is over: claims that a quota of the management cluster
//! kept from being made, and disks of a machine that hung. What begins once a second meets its end at different times
//! of the pauses between tries.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use tests::Scenario;

use crate::cost::metered;
use crate::objects::{Claims, Orders};
use crate::report::Report;
use crate::work::Work;

/// How far apart the first tries are.
const APART: Duration = Duration::from_secs(1);

/// Runs the bench.
pub async fn run(report: &Report, work: &Work, seconds: u64) -> Result<()> {
    let (report, work, lasts) = (report.clone(), work.clone(), Duration::from_secs(seconds));
    tests::run(move |s| async move { measure(&s, &report, &work, lasts).await }).await
}

async fn measure(s: &Arc<Scenario>, report: &Report, work: &Work, lasts: Duration) -> Result<()> {
    let claims = Claims::watch(&s.guest, &s.name, &s.name);
    s.quota("nestor", "0").await?;
    let ((made, times), cost) = metered(&s.lab, work.count(), async {
        let (begun, mut made) = (Instant::now(), Vec::new());
        for _ in 0..work.count() {
            made.extend(claims.make(1).await?);
            tokio::time::sleep(APART).await;
        }
        tokio::time::sleep(lasts.saturating_sub(begun.elapsed())).await;
        s.quota("nestor", "1Ti").await?;
        let over = Instant::now();
        let made: Vec<_> = made.into_iter().map(|claim| claim.since(over)).collect();
        let times = claims.bound(&made).await?;
        Ok((made, times))
    })
    .await?;
    report.times("claim", &times, &[]);
    report.cost("claim", &cost);

    let (node, orders) = (s.simulated_node().await?, Orders::watch(&s.guest, &s.name));
    node.hang()?;
    let ((given, times), cost) = metered(&s.lab, work.count(), async {
        let (begun, mut given) = (Instant::now(), Vec::new());
        for claim in &made {
            given.extend(orders.give(std::slice::from_ref(&claim.volume), &node.name).await?);
            tokio::time::sleep(APART).await;
        }
        tokio::time::sleep(lasts.saturating_sub(begun.elapsed())).await;
        node.go_on()?;
        let over = Instant::now();
        let given: Vec<_> = given.into_iter().map(|order| order.since(over)).collect();
        let times = orders.attached(&given).await?;
        Ok((given, times))
    })
    .await?;
    report.times("attach", &times, &[]);
    report.cost("attach", &cost);
    orders.detach(&given).await?;
    claims.delete(&made).await.map(drop)
}
