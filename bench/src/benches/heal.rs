//! How long what could not be carried out waits on when its cause is over: claims that a quota of the management cluster
//! kept from being made, and disks of a machine that hung. What begins once a second meets its end at different times
//! of the pauses between tries.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use futures::FutureExt;
use futures::future::BoxFuture;
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
        let making = (0..work.count()).map(|_| claims.make(1).boxed()).collect();
        let made = spread(making, lasts).await?;
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
    let volumes: Vec<String> = made.iter().map(|claim| claim.volume.clone()).collect();
    node.hang()?;
    let ((given, times), cost) = metered(&s.lab, work.count(), async {
        let giving = volumes.chunks(1).map(|one| orders.give(one, &node.name).boxed()).collect();
        let given = spread(giving, lasts).await;
        // Also where that failed: the machine's disks are taken from it in the end.
        node.go_on()?;
        let over = Instant::now();
        let given: Vec<_> = given?.into_iter().map(|order| order.since(over)).collect();
        let times = orders.attached(&given).await?;
        Ok((given, times))
    })
    .await?;
    report.times("attach", &times, &[]);
    report.cost("attach", &cost);
    orders.detach(&given).await?;
    claims.delete(&made).await.map(drop)
}

/// Does one after the other, and ends when what keeps them from being carried out has lasted so long.
async fn spread<T>(begin: Vec<BoxFuture<'_, Result<Vec<T>>>>, lasts: Duration) -> Result<Vec<T>> {
    let (since, mut begun) = (Instant::now(), Vec::new());
    for one in begin {
        begun.extend(one.await?);
        tokio::time::sleep(APART).await;
    }
    tokio::time::sleep(lasts.saturating_sub(since.elapsed())).await;
    Ok(begun)
}
