//! Bench: delay of retries after a failure ends: claims that a quota of the management cluster rejected, and disks of a
//! VM that hung. The operations start one second apart, so that the end of the failure meets different phases of their
//! backoff.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use futures::FutureExt;
use futures::future::BoxFuture;
use tests::Scenario;

use crate::cost::metered;
use crate::objects::{Attachments, Claims};
use crate::report::Report;
use crate::work::Work;

/// Interval between the first attempts.
const APART: Duration = Duration::from_secs(1);

/// Runs the bench.
pub async fn run(report: &Report, work: &Work, seconds: u64) -> Result<()> {
    let (report, work, duration) = (report.clone(), work.clone(), Duration::from_secs(seconds));
    tests::run(move |s| async move { measure(&s, &report, &work, duration).await }).await
}

async fn measure(s: &Arc<Scenario>, report: &Report, work: &Work, duration: Duration) -> Result<()> {
    let claims = Claims::watch(&s.guest, &s.name, &s.name);
    s.quota("nestor", "0").await?;
    let ((made, times), cost) = metered(&s.lab, work.count(), async {
        let making = (0..work.count()).map(|_| claims.make(1).boxed()).collect();
        let made = spread(making, duration).await?;
        s.quota("nestor", "1Ti").await?;
        let over = Instant::now();
        let made: Vec<_> = made.into_iter().map(|claim| claim.since(over)).collect();
        let times = claims.bound(&made).await?;
        Ok((made, times))
    })
    .await?;
    report.times("claim", &times, &[]);
    report.cost("claim", &cost);

    let (node, attachments) = (s.simulated_node().await?, Attachments::watch(&s.guest, &s.name));
    let volumes: Vec<String> = made.iter().map(|claim| claim.volume.clone()).collect();
    node.block_calls()?;
    let ((created, times), cost) = metered(&s.lab, work.count(), async {
        let giving = volumes.chunks(1).map(|one| attachments.start(one, &node.name).boxed()).collect();
        let created = spread(giving, duration).await;
        // Also after an error, so that the cleanup can detach the disks.
        node.unblock_calls()?;
        let over = Instant::now();
        let created: Vec<_> = created?.into_iter().map(|attachment| attachment.since(over)).collect();
        let times = attachments.attached(&created).await?;
        Ok((created, times))
    })
    .await?;
    report.times("attach", &times, &[]);
    report.cost("attach", &cost);
    attachments.detach(&created).await?;
    claims.delete(&made).await.map(drop)
}

/// Starts the operations one after the other, and returns when the failure has lasted for `duration`.
async fn spread<T>(begin: Vec<BoxFuture<'_, Result<Vec<T>>>>, duration: Duration) -> Result<Vec<T>> {
    let (since, mut begun) = (Instant::now(), Vec::new());
    for one in begin {
        begun.extend(one.await?);
        tokio::time::sleep(APART).await;
    }
    tokio::time::sleep(duration.saturating_sub(since.elapsed())).await;
    Ok(begun)
}
