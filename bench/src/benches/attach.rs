//! An order to attach (`storage.k8s.io/VolumeAttachment` in the guest) from its creation until it is carried out, and from
//! its deletion until it is gone, on a simulated machine, which takes no time. The floor is the infra's own attach and
//! detach of the same volumes to the same machine.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use infra_api::VolumeId;
use lab::LoopNode;
use tests::Scenario;
use tests::guest::handle;

use crate::cost::{Cost, Meter};
use crate::floor;
use crate::objects::{Claims, Orders};
use crate::report::Report;
use crate::work::{Work, case};

/// Which way is reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Plug.
    Attach,
    /// Unplug.
    Detach,
}

/// Runs the bench.
pub async fn run(report: &Report, work: &Work, direction: Direction) -> Result<()> {
    let (report, work) = (report.clone(), work.clone());
    tests::run(move |s| async move { measure(&s, &report, &work, direction).await }).await
}

/// A volume by its name in the guest and in the infra.
struct Disk {
    volume: String,
    below: VolumeId,
}

struct Bench<'a> {
    s: &'a Scenario,
    node: LoopNode,
    orders: Orders,
    direction: Direction,
}

/// What one round took.
#[derive(Default)]
struct Round {
    times: Vec<Duration>,
    floor: Vec<Duration>,
    cost: Cost,
}

async fn measure(s: &Arc<Scenario>, report: &Report, work: &Work, direction: Direction) -> Result<()> {
    let bench =
        Bench { s, node: s.simulated_node().await?, orders: Orders::watch(&s.guest, &s.name), direction };
    let bursts = work.bursts(&[30]);
    let most = bursts.iter().copied().max().unwrap_or(1).max(1);
    let claims = Claims::watch(&s.guest, &s.name, &s.name);
    let (volumes, _) = claims.create(most).await?;
    let mut disks = Vec::new();
    for claim in &volumes {
        let volume = s.guest_volumes().get(&claim.volume).await?;
        disks.push(Disk { volume: claim.volume.clone(), below: s.infra_volume(&handle(&volume)?).await?.id });
    }
    for _ in 0..work.warm_up() {
        bench.round(&disks[..1]).await?;
    }
    let mut cases = vec![("one".to_owned(), 1, work.count())];
    cases.extend(bursts.into_iter().map(|burst| (case(burst), burst, work.rounds())));
    for (case, at_once, rounds) in cases {
        let mut all = Round::default();
        for round in 0..rounds {
            // Each volume in its turn, as far as they go.
            let from = (round * at_once) % (disks.len() - at_once + 1);
            let one = bench.round(&disks[from..from + at_once]).await?;
            all.times.extend(one.times);
            all.floor.extend(one.floor);
            all.cost.add(one.cost);
        }
        report.times(&case, &all.times, &all.floor);
        report.cost(&case, &all.cost);
    }
    claims.delete(&volumes).await.map(drop)
}

impl Bench<'_> {
    async fn round(&self, disks: &[Disk]) -> Result<Round> {
        let volumes: Vec<String> = disks.iter().map(|disk| disk.volume.clone()).collect();
        let (attached, detached) = self.infra(disks).await?;
        let mut meter = Meter::start(&self.s.lab).await?;
        let (orders, mut times) = self.orders.attach(&volumes, &self.node.name).await?;
        let mut cost = meter.stop(volumes.len()).await?;
        meter = Meter::start(&self.s.lab).await?;
        let unplugged = self.orders.detach(&orders).await?;
        let cost_of_detach = meter.stop(volumes.len()).await?;
        let mut floor = attached;
        if self.direction == Direction::Detach {
            (times, floor, cost) = (unplugged, detached, cost_of_detach);
        }
        Ok(Round { times, floor, cost })
    }

    /// By the infra alone: attached, and detached again.
    async fn infra(&self, disks: &[Disk]) -> Result<(Vec<Duration>, Vec<Duration>)> {
        let volumes: Vec<VolumeId> = disks.iter().map(|disk| disk.below.clone()).collect();
        let (attachments, attached) = floor::attach(&self.s.infra, self.node.uuid, &volumes).await?;
        Ok((attached, floor::detach(&self.s.infra, &attachments).await?))
    }
}
