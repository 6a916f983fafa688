//! Bench: time from the creation of a guest's storage.k8s.io/VolumeAttachment until it is attached, and from its deletion
//! until it is gone, on a simulated node, whose hypervisor takes no time. The floor is the storage infra's own attach
//! and detach of the same volumes. Optionally the same is measured while gc-csi reports the attaches and detaches of other
//! volumes as conditions and Events.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use infra_api::VolumeId;
use lab::LoopNode;
use tests::Scenario;
use tests::guest::handle;

use crate::cost::{ALONE, Cost, metered};
use crate::floor;
use crate::objects::{Attachments, Claims};
use crate::report::Report;
use crate::work::{Work, case};

/// The measured operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Attach.
    Attach,
    /// Detach.
    Detach,
}

/// Other volumes.
#[derive(Debug, Clone, Default, Args)]
pub struct Others {
    /// Number of volumes that are attached and detached just before, so that their conditions and Events are written during
    /// a further measurement.
    #[arg(long, value_name = "COUNT", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=100))]
    reported: u32,
    /// Numbers of disks that the VM has already; several numbers are measured one after the other.
    #[arg(long, value_name = "COUNT,...", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(..crds::MAX_VOLUMES as i64))]
    attached: Vec<u32>,
}

/// Runs the bench.
pub async fn run(report: &Report, work: &Work, others: &Others, direction: Direction) -> Result<()> {
    let (report, work, mut others) = (report.clone(), work.clone(), others.clone());
    others.attached.sort_unstable();
    tests::run(move |s| async move { measure(&s, &report, &work, &others, direction).await }).await
}

/// A volume: its name in the guest, and its ID in the storage infra.
struct Disk {
    volume: String,
    infra_volume: VolumeId,
}

struct Bench<'a> {
    s: &'a Scenario,
    node: LoopNode,
    attachments: Attachments,
    direction: Direction,
}

/// Results of one round.
#[derive(Default)]
struct Round {
    times: Vec<Duration>,
    floor: Vec<Duration>,
    cost: Cost,
}

async fn measure(
    s: &Arc<Scenario>,
    report: &Report,
    work: &Work,
    others: &Others,
    direction: Direction,
) -> Result<()> {
    let bench = Bench {
        s,
        node: s.simulated_node().await?,
        attachments: Attachments::watch(&s.guest, &s.name),
        direction,
    };
    let bursts = work.bursts(&[30]);
    let reported = others.reported as usize;
    let attached = others.attached.last().map_or(0, |most| *most as usize + 1);
    let most = bursts.iter().copied().max().unwrap_or(1).max(1).max(reported).max(attached);
    let claims = Claims::watch(&s.guest, &s.name, &s.name);
    let (volumes, _) = claims.create(most).await?;
    let mut disks = Vec::new();
    for claim in &volumes {
        let volume = s.guest_volumes().get(&claim.volume).await?;
        disks.push(Disk {
            volume: claim.volume.clone(),
            infra_volume: s.infra_volume(&handle(&volume)?).await?.id,
        });
    }
    bench.rounds(&disks, 1, work.warm_up(), false).await?;
    // One at a time, and the cost of each.
    let all = bench.rounds(&disks, 1, work.count(), false).await?;
    report.times("one", &all.times, &all.floor);
    if reported > 0 {
        // Its conditions are written when no more requests arrive.
        metered(&s.lab, 1, async { Ok(()) }).await?;
        let quiet = bench.rounds(&disks[..1], 1, work.count(), false).await?;
        bench.rounds(&disks[..reported], reported, 1, false).await?;
        let beside = bench.rounds(&disks[..1], 1, work.count(), false).await?;
        let case = format!("one beside {reported}");
        report.with_load(&case, "one quiet", "duration", &beside.times, &quiet.times);
    }
    let all = bench.rounds(&disks, 1, work.count().min(ALONE), true).await?;
    report.cost("one", &all.cost);
    for at_once in bursts {
        let all = bench.rounds(&disks, at_once, work.rounds(), true).await?;
        let case = case(at_once);
        report.times(&case, &all.times, &all.floor);
        report.cost(&case, &all.cost);
    }
    if let Some((measured, others_of_vm)) = disks.split_first() {
        bench.beside_attached(report, work, &others.attached, measured, others_of_vm).await?;
    }
    claims.delete(&volumes).await.map(drop)
}

impl Bench<'_> {
    /// Measures one volume at a time on the VM with growing numbers of other disks, and the cost of each.
    async fn beside_attached(
        &self,
        report: &Report,
        work: &Work,
        numbers: &[u32],
        measured: &Disk,
        others: &[Disk],
    ) -> Result<()> {
        let measured = std::slice::from_ref(measured);
        let mut attached = Vec::new();
        for number in numbers {
            let case = format!("one on {number}");
            let more: Vec<String> =
                others[attached.len()..*number as usize].iter().map(|disk| disk.volume.clone()).collect();
            attached.extend(self.attachments.attach(&more, &self.node.name).await?.0);
            self.rounds(measured, 1, work.warm_up(), false).await?;
            let all = self.rounds(measured, 1, work.count(), false).await?;
            report.times(&case, &all.times, &all.floor);
            report.cost(&case, &self.rounds(measured, 1, work.count().min(ALONE), true).await?.cost);
        }
        self.attachments.detach(&attached).await.map(drop)
    }

    /// Runs `rounds` rounds with `at_once` volumes each, alternating the volumes.
    async fn rounds(&self, disks: &[Disk], at_once: usize, rounds: usize, is_metered: bool) -> Result<Round> {
        let mut all = Round::default();
        for round in 0..rounds {
            let from = (round * at_once) % (disks.len() - at_once + 1);
            let one = self.round(&disks[from..from + at_once], is_metered).await?;
            all.times.extend(one.times);
            all.floor.extend(one.floor);
            all.cost.add(one.cost);
        }
        Ok(all)
    }

    async fn round(&self, disks: &[Disk], is_metered: bool) -> Result<Round> {
        let volumes: Vec<String> = disks.iter().map(|disk| disk.volume.clone()).collect();
        let (floor_attach, floor_detach) = self.infra(disks).await?;
        let attach = self.attachments.attach(&volumes, &self.node.name);
        let ((attachments, mut times), mut cost) =
            self.perhaps_metered(is_metered, volumes.len(), attach).await?;
        let detach = self.attachments.detach(&attachments);
        let (detach_times, cost_of_detach) = self.perhaps_metered(is_metered, volumes.len(), detach).await?;
        let mut floor = floor_attach;
        if self.direction == Direction::Detach {
            (times, floor, cost) = (detach_times, floor_detach, cost_of_detach);
        }
        Ok(Round { times, floor, cost })
    }

    async fn perhaps_metered<T>(
        &self,
        is_metered: bool,
        operations: usize,
        work: impl Future<Output = Result<T>>,
    ) -> Result<(T, Cost)> {
        match is_metered {
            true => metered(&self.s.lab, operations, work).await,
            false => Ok((work.await?, Cost::default())),
        }
    }

    /// Attaches and detaches with the storage infra only.
    async fn infra(&self, disks: &[Disk]) -> Result<(Vec<Duration>, Vec<Duration>)> {
        let volumes: Vec<VolumeId> = disks.iter().map(|disk| disk.infra_volume.clone()).collect();
        let (attachments, attached) = floor::attach(&self.s.infra, self.node.uuid, &volumes).await?;
        Ok((attached, floor::detach(&self.s.infra, &attachments).await?))
    }
}
