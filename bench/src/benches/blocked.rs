//! Bench: effect of hanging VMs on others. Attaches to a healthy VM are measured while many disks wait for VMs whose
//! hypervisor does not respond. The floor is the same work without the hanging VMs.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use clap::builder::RangedU64ValueParser;
use lab::LoopNode;
use tests::Scenario;

use crate::fleet::Fleet;
use crate::objects::{Attachment, Attachments, Claim, Claims};
use crate::report::Report;
use crate::work::Work;

/// The waiting disks.
#[derive(Debug, Clone, Args)]
pub struct Load {
    /// Number of disks that wait for each hanging VM.
    #[arg(long, default_value_t = 100, value_parser = RangedU64ValueParser::<usize>::new().range(1..=crds::MAX_VOLUMES as u64))]
    waiting: usize,
    /// Number of hanging VMs of another guest, whose gc-csi the bench simulates. [default: one VM of the measured guest]
    #[arg(long, value_parser = RangedU64ValueParser::<usize>::new().range(1..=100))]
    vms: Option<usize>,
}

/// Hanging VMs, and the volumes whose disks wait for them.
enum Hanging<'a> {
    /// A VM of the measured guest: csi-attacher and gc-csi wait for it too.
    SameGuest { node: LoopNode, claims: Vec<Claim>, attachments: Vec<Attachment> },
    /// VMs of another guest.
    OtherGuest(Fleet<'a>),
}

impl<'a> Hanging<'a> {
    /// Creates the VMs and the volumes. Nothing hangs yet.
    async fn create(s: &'a Scenario, load: &Load, claims: &Claims) -> Result<Self> {
        match load.vms {
            Some(vms) => Ok(Self::OtherGuest(Fleet::make(&s.lab, 1, vms, load.waiting).await?)),
            None => {
                let node = s.simulated_node().await?;
                let (claims, _) = claims.create(load.waiting).await?;
                Ok(Self::SameGuest { node, claims, attachments: Vec::new() })
            }
        }
    }

    /// Blocks the VMs, and requests all disks.
    async fn block(&mut self, api: &Attachments) -> Result<()> {
        match self {
            Self::SameGuest { node, claims, attachments } => {
                node.block_calls()?;
                let volumes: Vec<String> = claims.iter().map(|claim| claim.volume.clone()).collect();
                *attachments = api.start(&volumes, &node.name).await?;
                Ok(())
            }
            Self::OtherGuest(fleet) => {
                let vms: Vec<_> = fleet.vms.iter().collect();
                vms.iter().try_for_each(|vm| fleet.set_blocked(vm, true))?;
                fleet.write_specs(&vms).await?;
                fleet.requested().await
            }
        }
    }

    /// Unblocks the VMs, waits until all disks are attached, and detaches them.
    async fn unblock(&mut self, api: &Attachments) -> Result<()> {
        match self {
            Self::SameGuest { node, attachments, .. } => {
                node.unblock_calls()?;
                api.attached(attachments).await?;
                api.detach(attachments).await.map(drop)
            }
            Self::OtherGuest(fleet) => {
                let vms: Vec<_> = fleet.vms.iter().collect();
                vms.iter().try_for_each(|vm| fleet.set_blocked(vm, false))?;
                fleet.settled(&vms).await?;
                fleet.detach_all().await
            }
        }
    }

    /// Removes the VMs and the volumes.
    async fn remove(self, api: &Claims) -> Result<()> {
        match self {
            Self::SameGuest { claims, .. } => api.delete(&claims).await.map(drop),
            Self::OtherGuest(fleet) => fleet.remove().await,
        }
    }
}

/// The measured work: attaches and detaches of one volume, and claims, which do not depend on VMs.
struct Measured {
    claims: Claims,
    attachments: Attachments,
    node: LoopNode,
    claim: Claim,
}

impl Measured {
    async fn create(s: &Scenario) -> Result<Self> {
        let node = s.simulated_node().await?;
        let claims = Claims::watch(&s.guest, &s.name, &s.name);
        let attachments = Attachments::watch(&s.guest, &s.name);
        let (mut created, _) = claims.create(1).await?;
        Ok(Self { claims, attachments, node, claim: created.remove(0) })
    }

    /// Durations of each operation, `count` times.
    async fn repeat(&self, count: usize) -> Result<[(&'static str, Vec<Duration>); 3]> {
        let volumes = [self.claim.volume.clone()];
        let (mut attach, mut detach, mut create) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..count {
            let (created, times) = self.attachments.attach(&volumes, &self.node.name).await?;
            attach.extend(times);
            detach.extend(self.attachments.detach(&created).await?);
            let (created, times) = self.claims.create(1).await?;
            create.extend(times);
            self.claims.delete(&created).await?;
        }
        Ok([("attach", attach), ("detach", detach), ("create", create)])
    }
}

/// Runs the bench.
pub async fn run(report: &Report, work: &Work, load: &Load) -> Result<()> {
    let (report, work, load) = (report.clone(), work.clone(), load.clone());
    tests::run(move |s| async move { measure(&s, &report, &work, &load).await }).await
}

async fn measure(s: &Arc<Scenario>, report: &Report, work: &Work, load: &Load) -> Result<()> {
    let measured = Measured::create(s).await?;
    let mut hanging = Hanging::create(s, load, &measured.claims).await?;
    measured.repeat(work.warm_up()).await?;
    let baseline = measured.repeat(work.count()).await?;
    hanging.block(&measured.attachments).await?;
    let loaded = measured.repeat(work.count()).await;
    hanging.unblock(&measured.attachments).await?;
    report.number("blocked", "waiting disks", "count", (load.waiting * load.vms.unwrap_or(1)) as f64);
    for ((metric, times), (_, floor)) in loaded?.iter().zip(&baseline) {
        report.with_load("blocked", "alone", metric, times, floor);
    }
    hanging.remove(&measured.claims).await?;
    measured.claims.delete(&[measured.claim]).await.map(drop)
}
