//! ControllerPublishVolume and ControllerUnpublishVolume, from the call to the answer, on a machine that this
//! host plays. The floor is the infra's own attach and detach of the same volumes to the same machine.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::future::{self, BoxFuture};
use infra_api::{Access, AttachmentId, AttachmentSpec, VolumeId};
use lab::LoopNode;
use tests::{Scenario, unique};

use crate::report::Report;
use crate::requests;

/// How long the infra may take for one disk.
const LONGEST: Duration = Duration::from_secs(60);

/// Which way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Plug.
    Attach,
    /// Unplug.
    Detach,
}

/// Runs the bench.
pub async fn run(report: &mut Report, direction: Direction, count: usize, burst: usize) -> Result<()> {
    let name = if direction == Direction::Attach { "attach" } else { "detach" };
    let mut filled = std::mem::replace(report, Report::new(name));
    let (sender, receiver) = tokio::sync::oneshot::channel();
    tests::run(move |s| async move {
        measure(&s, &mut filled, direction, count, burst).await?;
        let _ = sender.send(filled);
        Ok(())
    })
    .await?;
    *report = receiver.await.context("the bench ended without results")?;
    Ok(())
}

/// One volume and the machine it goes to.
#[derive(Clone)]
struct Disk {
    s: Arc<Scenario>,
    node: Arc<LoopNode>,
    handle: String,
    volume: VolumeId,
    attachment: AttachmentId,
}

async fn measure(
    s: &Arc<Scenario>,
    report: &mut Report,
    direction: Direction,
    count: usize,
    burst: usize,
) -> Result<()> {
    let node = Arc::new(s.node().await?);
    let disks = future::try_join_all((0..burst.max(1)).map(|_| disk(s, &node))).await?;
    // Everything once before, so that nothing is done for the first time.
    nestor(direction, &disks[..1]).await?;
    infra(direction, &disks[..1]).await?;

    let (mut times, mut floor) = (Vec::new(), Vec::new());
    let mut tally = requests::Tally::new();
    for round in 0..count {
        let one = std::slice::from_ref(&disks[round % disks.len()]);
        let (time, asked) = nestor(direction, one).await?;
        times.extend(time);
        for (key, number) in asked {
            *tally.entry(key).or_default() += number;
        }
        floor.extend(infra(direction, one).await?);
    }
    report.requests("one", tally, count);
    report.times("one", &times, &floor);

    let case = format!("burst{burst}");
    let floor = infra(direction, &disks).await?;
    let (times, tally) = nestor(direction, &disks).await?;
    report.requests(&case, tally, burst);
    report.times(&case, &times, &floor);
    Ok(())
}

async fn disk(s: &Arc<Scenario>, node: &Arc<LoopNode>) -> Result<Disk> {
    let handle = s.volume().await?;
    let volume = s.infra_volume(&handle).await?.id;
    let attachment = AttachmentId::new(unique("bench"))?;
    Ok(Disk { s: s.clone(), node: node.clone(), handle, volume, attachment })
}

/// Through both tiers; also what that cost the management API.
async fn nestor(direction: Direction, disks: &[Disk]) -> Result<(Vec<Duration>, requests::Tally)> {
    let lab = &disks.first().context("no disks")?.s.lab;
    let publish = |disk: Disk| -> BoxFuture<'static, Result<()>> {
        Box::pin(async move { Ok(disk.s.driver.publish(&disk.handle, &disk.node.name).await.map(drop)?) })
    };
    let unpublish = |disk: Disk| -> BoxFuture<'static, Result<()>> {
        Box::pin(async move { Ok(disk.s.driver.unpublish(&disk.handle, &disk.node.name).await?) })
    };
    match direction {
        Direction::Attach => {
            let start = requests::mark(lab).await?;
            let times = timed(disks, publish).await?;
            let tally = requests::since(lab, start).await?;
            timed(disks, unpublish).await?;
            Ok((times, tally))
        }
        Direction::Detach => {
            timed(disks, publish).await?;
            let start = requests::mark(lab).await?;
            let times = timed(disks, unpublish).await?;
            Ok((times, requests::since(lab, start).await?))
        }
    }
}

/// By the infra alone.
async fn infra(direction: Direction, disks: &[Disk]) -> Result<Vec<Duration>> {
    let attached = timed(disks, |disk| async move {
        let spec = AttachmentSpec {
            volume: disk.volume.clone(),
            node: disk.node.uuid,
            read_only: false,
            access: Access::SingleNode,
        };
        Ok(disk.s.infra.attach(&disk.attachment, &spec, LONGEST).await.map(drop)?)
    })
    .await?;
    let detached =
        timed(disks, |disk| async move { Ok(disk.s.infra.detach(&disk.attachment, LONGEST).await?) }).await?;
    Ok(if direction == Direction::Attach { attached } else { detached })
}

/// Does the same with all disks at once; gives how long each took.
async fn timed<F, R>(disks: &[Disk], act: F) -> Result<Vec<Duration>>
where
    F: Fn(Disk) -> R,
    R: Future<Output = Result<()>> + Send + 'static,
{
    let tasks = disks.iter().map(|disk| {
        let work = act(disk.clone());
        tokio::spawn(async move {
            let start = Instant::now();
            work.await.map(|()| start.elapsed())
        })
    });
    let tasks: Vec<_> = tasks.collect();
    future::join_all(tasks).await.into_iter().map(|task| task?).collect()
}
