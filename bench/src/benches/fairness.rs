//! What one guest's attaches and detaches take while another VM does its worst: its spec names many claims, and none, in
//! turn. The floor is the same work with nothing else to do.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use crds::names;
use kube::api::{Patch, PatchParams};
use lab::LoopNode;
use serde_json::json;
use tests::{Scenario, unique};

use crate::fleet::Fleet;
use crate::objects::{Claim, Claims, Orders};
use crate::parts;
use crate::report::Report;
use crate::stats::Stats;

/// Whose memory is told.
const PARTS: [&str; 2] = ["mgmt-csi", "vm-operator-shim"];
/// How long the quiet guest rests between two attaches.
const REST: Duration = Duration::from_millis(200);
/// How often the other VM's spec is written.
const TURN: Duration = Duration::from_secs(2);

/// What the other VM does.
#[derive(Debug, Clone, Args)]
pub struct Worst {
    /// How many claims that do not exist its spec names.
    #[arg(long, default_value_t = 128)]
    absent: usize,
    /// How many claims that exist its spec names besides.
    #[arg(long, default_value_t = 0)]
    existing: usize,
    /// It is in the same namespace of the management cluster as the VM that is measured.
    #[arg(long)]
    same_namespace: bool,
    /// For how long, and for how long everything is quiet before.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
}

/// Runs the bench.
pub async fn run(report: &Report, worst: &Worst) -> Result<()> {
    let (report, worst) = (report.clone(), worst.clone());
    tests::run(move |s| async move { measure(&s, &report, &worst).await }).await
}

/// The other VM: where it is, and the claims that its spec names.
struct Loud {
    namespace: String,
    name: String,
    claims: Vec<String>,
}

/// What has to be removed afterwards.
enum Kept<'a> {
    Fleet(Fleet<'a>),
    Claims(Claims, Vec<Claim>),
}

async fn measure(s: &Arc<Scenario>, report: &Report, worst: &Worst) -> Result<()> {
    let quiet: LoopNode = s.simulated_node().await?;
    let claims = Claims::watch(&s.guest, &s.name, &s.name);
    let (made, _) = claims.create(1).await?;
    let volumes = [made[0].volume.clone()];
    let (loud, kept) = loud(s, worst).await?;
    let orders = Orders::watch(&s.guest, &s.name);
    let work = async |time: Duration| {
        let (begun, mut attach, mut detach) = (Instant::now(), Vec::new(), Vec::new());
        while begun.elapsed() < time {
            let (given, times) = orders.attach(&volumes, &quiet.name).await?;
            attach.extend(times);
            detach.extend(orders.detach(&given).await?);
            tokio::time::sleep(REST).await;
        }
        anyhow::Ok([("attach", attach), ("detach", detach)])
    };
    work(Duration::from_secs(3)).await?;
    let time = Duration::from_secs(worst.seconds);
    let alone = work(time).await?;
    let before = resident(s)?;
    let mark = s.lab.audit()?.mark()?;
    let writes = AtomicUsize::new(0);
    let beside = tokio::select! {
        beside = work(time) => beside?,
        failed = flood(s, &loud, &writes) => failed.map(|never| match never {})?,
    };
    set(s, &loud, &[]).await?;
    let during = resident(s)?;
    settle(s, &loud).await?;
    let case = case(worst);
    for ((metric, times), (_, floor)) in beside.iter().zip(&alone) {
        report.times_of("quiet", metric, floor, &[]);
        report.times_of(&case, metric, times, floor);
        if let (Some(beside), Some(alone)) = (p99(times), p99(floor)) {
            report.number(&case, &format!("{metric} p99"), "times that alone", beside / alone);
        }
    }
    report.number(&case, "spec of the other VM", "writes", writes.into_inner() as f64);
    let asked = s.lab.audit()?.since(mark)?;
    for (resource, name) in [("volumeattachments", "VolumeAttachments"), ("events", "events")] {
        let made = asked.iter().filter(|one| {
            let by_us = PARTS.iter().any(|part| one.user_agent.starts_with(part));
            one.verb == "create" && one.resource == resource && by_us
        });
        report.number(&case, name, "created", made.count() as f64);
    }
    let lists = asked
        .iter()
        .filter(|one| one.verb == "watch" && PARTS.iter().any(|part| one.user_agent.starts_with(part)));
    report.number(&case, "watches", "begun", lists.count() as f64);
    tokio::time::sleep(Duration::from_secs(10)).await;
    for (at, resident) in [("before", before), ("during", during), ("10 s after", self::resident(s)?)] {
        for (part, bytes) in resident {
            report.number(&case, &format!("{part} {at}"), "MiB", bytes as f64 / f64::from(1 << 20));
        }
    }
    match kept {
        Kept::Fleet(fleet) => fleet.remove().await?,
        Kept::Claims(claims, made) => drop(claims.delete(&made).await?),
    }
    claims.delete(&made).await.map(drop)
}

fn case(worst: &Worst) -> String {
    let place = if worst.same_namespace { ", same namespace" } else { "" };
    format!("{} absent, {} existing{place}", worst.absent, worst.existing)
}

fn p99(times: &[Duration]) -> Option<f64> {
    Stats::of(times.iter().map(Duration::as_secs_f64).collect()).map(|stats| stats.p99)
}

/// Makes the other VM.
async fn loud<'a>(s: &'a Scenario, worst: &Worst) -> Result<(Loud, Kept<'a>)> {
    let absent = (0..worst.absent).map(|_| unique("absent"));
    if worst.same_namespace {
        let node = s.simulated_node().await?;
        let claims = Claims::watch(&s.management, &s.namespace, &s.name);
        let (made, _) = claims.create(worst.existing).await?;
        let claims_named = made.iter().map(|claim| claim.name.clone()).chain(absent).collect();
        let loud = Loud { namespace: s.namespace.clone(), name: node.name, claims: claims_named };
        return Ok((loud, Kept::Claims(claims, made)));
    }
    let fleet = Fleet::make(&s.lab, 1, 1, worst.existing).await?;
    let machine = fleet.machines.first().context("a fleet without machines")?;
    let loud = Loud {
        namespace: machine.namespace.clone(),
        name: machine.name.clone(),
        claims: machine.claims.iter().cloned().chain(absent).collect(),
    };
    Ok((loud, Kept::Fleet(fleet)))
}

/// Sets and empties the other VM's spec again and again; counts how often.
async fn flood(s: &Scenario, loud: &Loud, writes: &AtomicUsize) -> Result<Infallible> {
    loop {
        for claims in [&loud.claims[..], &[]] {
            set(s, loud, claims).await?;
            writes.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(TURN).await;
        }
    }
}

async fn set(s: &Scenario, loud: &Loud, claims: &[String]) -> Result<()> {
    let entries: Vec<_> = claims
        .iter()
        .map(|claim| json!({"name": names::volume_entry(claim), "persistentVolumeClaim": {"claimName": claim}}))
        .collect();
    let machines = lab::machines::api_in(&s.management, &loud.namespace);
    let patch = Patch::Merge(json!({"spec": {"volumes": entries}}));
    machines.patch(&loud.name, &PatchParams::default(), &patch).await?;
    Ok(())
}

/// Waits until the other VM has no disk.
async fn settle(s: &Scenario, loud: &Loud) -> Result<()> {
    let machines = lab::machines::api_in(&s.management, &loud.namespace);
    tests::eventually("the other VM has no disk", tests::PATIENCE, || async {
        let left = machines.get(&loud.name).await?.status.unwrap_or_default().volumes;
        Ok(if left.is_empty() { Ok(()) } else { Err(format!("{} left", left.len())) })
    })
    .await
}

/// Resident memory of the parts, in bytes.
fn resident(s: &Scenario) -> Result<Vec<(String, u64)>> {
    let mut all = parts::running(&s.lab)?;
    all.retain(|(part, _)| PARTS.contains(&part.as_str()));
    all.into_iter().map(|(part, process)| Ok((part, parts::resident(process)?.now))).collect()
}
