//! Bench: one guest's attaches and detaches while another VM's spec repeatedly lists many claims and none. The floor is
//! the same work without the other VM.

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
use crate::objects::{Attachments, Claim, Claims};
use crate::report::Report;
use crate::usage;

/// Components whose memory is reported.
const COMPONENTS: [&str; 2] = ["mgmt-csi", "vm-operator-shim"];
/// Pause of the measured guest between two attaches.
const PAUSE: Duration = Duration::from_millis(200);
/// Interval between writes of the other VM's spec.
const WRITE_INTERVAL: Duration = Duration::from_secs(2);

/// The load by the other VM.
#[derive(Debug, Clone, Args)]
pub struct Load {
    /// Number of missing claims in its spec.
    #[arg(long, default_value_t = 128)]
    absent: usize,
    /// Number of existing claims in its spec, in addition.
    #[arg(long, default_value_t = 0)]
    existing: usize,
    /// Use the namespace of the measured VM for the other VM.
    #[arg(long)]
    same_namespace: bool,
    /// Duration in seconds of the load, and of the quiet phase before it.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
}

/// Runs the bench.
pub async fn run(report: &Report, load: &Load) -> Result<()> {
    let (report, load) = (report.clone(), load.clone());
    tests::run(move |s| async move { measure(&s, &report, &load).await }).await
}

/// The other VM, and the claims in its spec.
struct NoisyVm {
    namespace: String,
    name: String,
    claims: Vec<String>,
}

/// What to remove after the bench.
enum Cleanup<'a> {
    Fleet(Fleet<'a>),
    Claims(Box<Claims>, Vec<Claim>),
}

async fn measure(s: &Arc<Scenario>, report: &Report, load: &Load) -> Result<()> {
    let quiet: LoopNode = s.simulated_node().await?;
    let claims = Claims::watch(&s.guest, &s.name, &s.name);
    let (made, _) = claims.create(1).await?;
    let volumes = [made[0].volume.clone()];
    let (noisy, cleanup) = noisy(s, load).await?;
    let attachments = Attachments::watch(&s.guest, &s.name);
    let work = async |time: Duration| {
        let (start, mut attach, mut detach) = (Instant::now(), Vec::new(), Vec::new());
        while start.elapsed() < time {
            let (created, times) = attachments.attach(&volumes, &quiet.name).await?;
            attach.extend(times);
            detach.extend(attachments.detach(&created).await?);
            tokio::time::sleep(PAUSE).await;
        }
        anyhow::Ok([("attach", attach), ("detach", detach)])
    };
    work(Duration::from_secs(3)).await?;
    let time = Duration::from_secs(load.seconds);
    let baseline = work(time).await?;
    let before = resident(s)?;
    let mark = s.lab.audit()?.mark()?;
    let writes = AtomicUsize::new(0);
    let loaded = tokio::select! {
        loaded = work(time) => loaded?,
        failed = flood(s, &noisy, &writes) => failed.map(|never| match never {})?,
    };
    set(s, &noisy, &[]).await?;
    let during = resident(s)?;
    settle(s, &noisy).await?;
    let case = case(load);
    for ((metric, times), (_, floor)) in loaded.iter().zip(&baseline) {
        report.with_load(&case, "quiet", metric, times, floor);
    }
    report.number(&case, "spec of the other VM", "writes", writes.into_inner() as f64);
    let requests = s.lab.audit()?.since(mark)?;
    for (resource, name) in [("volumeattachments", "VolumeAttachments"), ("events", "events")] {
        let made = requests.iter().filter(|one| {
            let by_us = COMPONENTS.iter().any(|component| one.user_agent.starts_with(component));
            one.verb == "create" && one.resource == resource && by_us
        });
        report.number(&case, name, "created", made.count() as f64);
    }
    let lists = requests.iter().filter(|one| {
        one.verb == "watch" && COMPONENTS.iter().any(|component| one.user_agent.starts_with(component))
    });
    report.number(&case, "watches", "started", lists.count() as f64);
    tokio::time::sleep(Duration::from_secs(10)).await;
    for (at, resident) in [("before", before), ("during", during), ("10 s after", self::resident(s)?)] {
        for (component, bytes) in resident {
            report.number(&case, &format!("{component} {at}"), "MiB", bytes as f64 / f64::from(1 << 20));
        }
    }
    match cleanup {
        Cleanup::Fleet(fleet) => fleet.remove().await?,
        Cleanup::Claims(claims, made) => drop(claims.delete(&made).await?),
    }
    claims.delete(&made).await.map(drop)
}

fn case(load: &Load) -> String {
    let namespace = if load.same_namespace { ", same namespace" } else { "" };
    format!("{} absent, {} existing{namespace}", load.absent, load.existing)
}

/// Creates the other VM.
async fn noisy<'a>(s: &'a Scenario, load: &Load) -> Result<(NoisyVm, Cleanup<'a>)> {
    let absent = (0..load.absent).map(|_| unique("absent"));
    if load.same_namespace {
        let node = s.simulated_node().await?;
        let claims = Claims::watch(&s.management, &s.namespace, &s.name);
        let (made, _) = claims.create(load.existing).await?;
        let claims_named = made.iter().map(|claim| claim.name.clone()).chain(absent).collect();
        let noisy = NoisyVm { namespace: s.namespace.clone(), name: node.name, claims: claims_named };
        return Ok((noisy, Cleanup::Claims(Box::new(claims), made)));
    }
    let fleet = Fleet::make(&s.lab, 1, 1, load.existing).await?;
    let vm = fleet.vms.first().context("a fleet without vms")?;
    let noisy = NoisyVm {
        namespace: vm.namespace.clone(),
        name: vm.name.clone(),
        claims: vm.claims.iter().cloned().chain(absent).collect(),
    };
    Ok((noisy, Cleanup::Fleet(fleet)))
}

/// Repeatedly fills and empties the other VM's spec, and counts the writes.
async fn flood(s: &Scenario, noisy: &NoisyVm, writes: &AtomicUsize) -> Result<Infallible> {
    loop {
        for claims in [&noisy.claims[..], &[]] {
            set(s, noisy, claims).await?;
            writes.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(WRITE_INTERVAL).await;
        }
    }
}

async fn set(s: &Scenario, noisy: &NoisyVm, claims: &[String]) -> Result<()> {
    let entries: Vec<_> = claims
        .iter()
        .map(|claim| json!({"name": names::volume_entry(claim), "persistentVolumeClaim": {"claimName": claim}}))
        .collect();
    let vms = lab::virtual_machines::api_in(&s.management, &noisy.namespace);
    let patch = Patch::Merge(json!({"spec": {"volumes": entries}}));
    vms.patch(&noisy.name, &PatchParams::default(), &patch).await?;
    Ok(())
}

/// Waits until the other VM has no disks.
async fn settle(s: &Scenario, noisy: &NoisyVm) -> Result<()> {
    let vms = lab::virtual_machines::api_in(&s.management, &noisy.namespace);
    tests::eventually("the other VM has no disk", tests::PATIENCE, || async {
        let left = vms.get(&noisy.name).await?.status.unwrap_or_default().volumes;
        Ok(if left.is_empty() { Ok(()) } else { Err(format!("{} left", left.len())) })
    })
    .await
}

/// Resident memory of the components, in bytes.
fn resident(s: &Scenario) -> Result<Vec<(String, u64)>> {
    let mut all = usage::running(&s.lab)?;
    all.retain(|(component, _)| COMPONENTS.contains(&component.as_str()));
    all.into_iter().map(|(component, process)| Ok((component, usage::resident(process)?.now))).collect()
}
