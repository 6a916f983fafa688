//! A volume's whole life: claim made and bound, attached, detached, claim deleted and volume gone. The floor is the same
//! one tier further down: a claim of the management cluster, and the infra's own attach and detach. With more and more
//! other machines and volumes beside it, what it costs is to stay the same.

use std::sync::Arc;

use anyhow::Result;
use clap::Args;
use futures::{StreamExt, TryStreamExt, stream};
use infra_api::VolumeId;
use lab::LoopNode;
use tests::{Scenario, unique};
use uuid::Uuid;

use crate::cost::{Cost, metered};
use crate::fleet::{AT_ONCE, ZONE};
use crate::floor::{self, timed};
use crate::objects::{Claims, Orders};
use crate::report::Report;
use crate::work::{Work, case};

/// What there is meanwhile.
#[derive(Debug, Clone, Args)]
pub struct Beside {
    /// How many other volumes there are meanwhile; several numbers are measured one after the other.
    #[arg(long, value_delimiter = ',', default_values_t = [0])]
    besides: Vec<usize>,
    /// How many other machines the guest has meanwhile, while there are no other volumes; several numbers are measured one
    /// after the other.
    #[arg(long, value_delimiter = ',')]
    machines: Vec<usize>,
}

/// Runs the bench.
pub async fn run(report: &Report, work: &Work, beside: &Beside) -> Result<()> {
    let (report, work, mut beside) = (report.clone(), work.clone(), beside.clone());
    beside.besides.sort_unstable();
    beside.machines.sort_unstable();
    tests::run(move |s| async move { measure(&s, &report, &work, &beside).await }).await
}

struct Lives<'a> {
    s: &'a Scenario,
    node: LoopNode,
    above: Claims,
    below: Claims,
    orders: Orders,
}

impl Lives<'_> {
    /// So many lives at once, through both tiers.
    async fn guest(&self, count: usize) -> Result<()> {
        let (claims, _) = self.above.create(count).await?;
        let volumes: Vec<String> = claims.iter().map(|claim| claim.volume.clone()).collect();
        let (orders, _) = self.orders.attach(&volumes, &self.node.name).await?;
        self.orders.detach(&orders).await?;
        self.above.delete(&claims).await.map(drop)
    }

    /// The same in the management cluster and the infra.
    async fn management(&self, count: usize) -> Result<()> {
        let (claims, _) = self.below.create(count).await?;
        // The infra knows a volume by the name that csi-provisioner gives it.
        let volumes: Vec<VolumeId> =
            claims.iter().map(|claim| Ok(VolumeId::new(claim.volume.clone())?)).collect::<Result<_>>()?;
        let (attachments, _) = floor::attach(&self.s.infra, self.node.uuid, &volumes).await?;
        floor::detach(&self.s.infra, &attachments).await?;
        self.below.delete(&claims).await.map(drop)
    }

    async fn measure(&self, report: &Report, work: &Work, others: usize, what: &str) -> Result<()> {
        let mut cases = vec![("one".to_owned(), 1, work.count())];
        cases.extend(work.bursts(&[10]).into_iter().map(|burst| (case(burst), burst, work.rounds())));
        for (mut case, at_once, times) in cases {
            if others > 0 {
                case = format!("{case} beside {others}{what}");
            }
            let (mut whole, mut below, mut cost) = (Vec::new(), Vec::new(), Cost::default());
            for _ in 0..times {
                below.push(timed(self.management(at_once)).await?.1);
                let (((), time), one) = metered(&self.s.lab, at_once, timed(self.guest(at_once))).await?;
                whole.push(time);
                cost.add(one);
            }
            report.times(&case, &whole, &below);
            report.cost(&case, &cost);
            let requests = cost.of("gc-csi", "management") as f64 / cost.operations as f64;
            report.number(&case, "gc-csi to management", "requests/life", requests);
        }
        Ok(())
    }
}

async fn measure(s: &Arc<Scenario>, report: &Report, work: &Work, beside: &Beside) -> Result<()> {
    let lives = Lives {
        s,
        node: s.simulated_node().await?,
        above: Claims::watch(&s.guest, &s.name, &s.name),
        below: Claims::watch(&s.management, &s.namespace, &s.name),
        orders: Orders::watch(&s.guest, &s.name),
    };
    for _ in 0..work.warm_up() {
        lives.guest(1).await?;
        lives.management(1).await?;
    }
    let mut machines = Vec::new();
    for others in &beside.machines {
        add_machines(s, &mut machines, *others).await?;
        lives.measure(report, work, *others, " machines").await?;
    }
    stream::iter(&machines)
        .map(anyhow::Ok)
        .try_for_each_concurrent(AT_ONCE, |name| lab::machines::delete(&s.management, &s.namespace, name))
        .await?;
    let mut made = Vec::new();
    for others in &beside.besides {
        lives.above.fill(&mut made, *others).await?;
        lives.measure(report, work, *others, "").await?;
    }
    lives.above.empty(&made).await
}

/// Makes machines of the guest until there are so many.
async fn add_machines(s: &Scenario, machines: &mut Vec<String>, count: usize) -> Result<()> {
    let new: Vec<String> = (machines.len()..count).map(|_| unique("machine")).collect();
    stream::iter(&new)
        .map(anyhow::Ok)
        .try_for_each_concurrent(AT_ONCE, |name| async move {
            let uuid = Uuid::new_v4().to_string();
            lab::machines::create(&s.management, &s.namespace, name, &uuid, ZONE).await
        })
        .await?;
    machines.extend(new);
    Ok(())
}
