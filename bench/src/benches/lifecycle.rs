//! Bench: lifecycle of a volume: claim created and bound, attached, detached, claim deleted and volume deleted. The floor
//! is the same one tier below: a claim of the management cluster, and the storage infra's own attach and detach. The
//! cost should stay constant with more VMs and volumes.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use futures::{StreamExt, TryStreamExt, stream};
use infra_api::VolumeId;
use lab::LoopNode;
use tests::{Scenario, unique};
use uuid::Uuid;

use crate::cost::{Cost, metered};
use crate::fleet::{AT_ONCE, ZONE};
use crate::floor::{self, timed};
use crate::objects::{Attachments, BATCH, Claims};
use crate::report::Report;
use crate::work::{Work, case};

/// Other objects that exist during the measurement, or existed before.
#[derive(Debug, Clone, Args)]
pub struct OtherObjects {
    /// Number of other volumes; several numbers are measured one after the other.
    #[arg(long, value_delimiter = ',', default_values_t = [0])]
    other_volumes: Vec<usize>,
    /// Number of other VMs of the guest, without other volumes; several numbers are measured one after the other.
    #[arg(long, value_delimiter = ',')]
    other_vms: Vec<usize>,
    /// Number of claims that were created and deleted before; several numbers are measured one after the other.
    #[arg(long, value_delimiter = ',')]
    before: Vec<usize>,
}

/// Runs the bench.
pub async fn run(report: &Report, work: &Work, others_present: &OtherObjects) -> Result<()> {
    let (report, work, mut others_present) = (report.clone(), work.clone(), others_present.clone());
    others_present.other_volumes.sort_unstable();
    others_present.before.sort_unstable();
    others_present.other_vms.sort_unstable();
    tests::run(move |s| async move { measure(&s, &report, &work, &others_present).await }).await
}

struct Lifecycles<'a> {
    s: &'a Scenario,
    node: LoopNode,
    guest_claims: Claims,
    management_claims: Claims,
    attachments: Attachments,
}

impl Lifecycles<'_> {
    /// Runs `count` lifecycles concurrently through both tiers; returns the times of the attaches.
    async fn guest(&self, count: usize) -> Result<Vec<Duration>> {
        let (claims, _) = self.guest_claims.create(count).await?;
        let volumes: Vec<String> = claims.iter().map(|claim| claim.volume.clone()).collect();
        let (attachments, times) = self.attachments.attach(&volumes, &self.node.name).await?;
        self.attachments.detach(&attachments).await?;
        self.guest_claims.delete(&claims).await?;
        Ok(times)
    }

    /// The same in the management cluster and the storage infra.
    async fn management(&self, count: usize) -> Result<Vec<Duration>> {
        let (claims, _) = self.management_claims.create(count).await?;
        // The volume's name is also its ID in the storage infra.
        let volumes: Vec<VolumeId> =
            claims.iter().map(|claim| Ok(VolumeId::new(claim.volume.clone())?)).collect::<Result<_>>()?;
        let (attachments, times) = floor::attach(&self.s.infra, self.node.uuid, &volumes).await?;
        floor::detach(&self.s.infra, &attachments).await?;
        self.management_claims.delete(&claims).await?;
        Ok(times)
    }

    /// Measures after growing numbers of claims have come and gone.
    async fn measure_after(&self, report: &Report, work: &Work, numbers: &[usize]) -> Result<()> {
        let mut gone = 0;
        for number in numbers {
            while gone < *number {
                let (claims, _) = self.guest_claims.create(BATCH.min(number - gone)).await?;
                self.guest_claims.delete(&claims).await?;
                gone += claims.len();
                eprintln!("{gone} of {number} claims came and went");
            }
            self.measure(report, work, &format!(" after {number}")).await?;
        }
        Ok(())
    }

    async fn measure(&self, report: &Report, work: &Work, circumstances: &str) -> Result<()> {
        let mut cases = vec![("one".to_owned(), 1, work.count())];
        cases.extend(work.bursts(&[10]).into_iter().map(|burst| (case(burst), burst, work.rounds())));
        for (case, at_once, rounds) in cases {
            let case = case + circumstances;
            let (mut times, mut floor, mut cost) = (Vec::new(), Vec::new(), Cost::default());
            let (mut attaches, mut attach_floor) = (Vec::new(), Vec::new());
            for _ in 0..rounds {
                let (attached, time) = timed(self.management(at_once)).await?;
                attach_floor.extend(attached);
                floor.push(time);
                let ((attached, time), one) =
                    metered(&self.s.lab, at_once, timed(self.guest(at_once))).await?;
                attaches.extend(attached);
                times.push(time);
                cost.add(one);
            }
            report.times(&case, &times, &floor);
            report.times_of(&case, "of it: attach", &attaches, &attach_floor);
            report.cost(&case, &cost);
            let requests = cost.of("gc-csi", "management") as f64 / cost.operations as f64;
            report.number(&case, "gc-csi to management", "requests/lifecycle", requests);
        }
        Ok(())
    }
}

async fn measure(
    s: &Arc<Scenario>,
    report: &Report,
    work: &Work,
    others_present: &OtherObjects,
) -> Result<()> {
    let lifecycles = Lifecycles {
        s,
        node: s.simulated_node().await?,
        guest_claims: Claims::watch(&s.guest, &s.name, &s.name),
        management_claims: Claims::watch(&s.management, &s.namespace, &s.name),
        attachments: Attachments::watch(&s.guest, &s.name),
    };
    for _ in 0..work.warm_up() {
        lifecycles.guest(1).await?;
        lifecycles.management(1).await?;
    }
    lifecycles.measure_after(report, work, &others_present.before).await?;
    let mut vms = Vec::new();
    for others in &others_present.other_vms {
        add_vms(s, &mut vms, *others).await?;
        lifecycles.measure(report, work, &beside(*others, " VMs")).await?;
    }
    stream::iter(&vms)
        .map(anyhow::Ok)
        .try_for_each_concurrent(AT_ONCE, |name| {
            lab::virtual_machines::delete(&s.management, &s.namespace, name)
        })
        .await?;
    let mut made = Vec::new();
    for others in &others_present.other_volumes {
        lifecycles.guest_claims.fill(&mut made, *others).await?;
        lifecycles.measure(report, work, &beside(*others, "")).await?;
    }
    lifecycles.guest_claims.empty(&made).await
}

fn beside(others: usize, what: &str) -> String {
    if others > 0 { format!(" beside {others}{what}") } else { String::new() }
}

/// Creates VirtualMachines of the guest until there are `count`.
async fn add_vms(s: &Scenario, vms: &mut Vec<String>, count: usize) -> Result<()> {
    let new: Vec<String> = (vms.len()..count).map(|_| unique("vm")).collect();
    stream::iter(&new)
        .map(anyhow::Ok)
        .try_for_each_concurrent(AT_ONCE, |name| async move {
            let uuid = Uuid::new_v4().to_string();
            lab::infra::simulate(s.lab.state().infra.as_ref().context("no storage infra")?, &uuid)?;
            lab::virtual_machines::create(&s.management, &s.namespace, &s.cluster_id, name, &uuid, Some(ZONE))
                .await
        })
        .await?;
    vms.extend(new);
    Ok(())
}
