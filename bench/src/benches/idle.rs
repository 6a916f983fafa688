//! Bench: requests and CPU time while idle, with existing and attached volumes; or CPU time of a storage-infra of its own,
//! without clusters.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use futures::{StreamExt, TryStreamExt, stream};
use infra_api::{Access, AttachmentId, AttachmentSpec, Labels, NodeSpec, VolumeId};
use libvirt_kit::Libvirtd;
use tests::Scenario;
use tokio::time::{Instant, MissedTickBehavior, interval};
use uuid::Uuid;

use crate::cost::Meter;
use crate::objects::{Attachments, Claims};
use crate::report::Report;
use crate::standalone::{StorageInfra, TIMEOUT};

/// Number of attached volumes.
const ATTACHED: usize = 100;
/// Volumes that are attached to each VM without a system.
const DISKS_OF_VM: u32 = 40;
/// Concurrent requests that create the volumes of a storage-infra without clusters.
const AT_ONCE: usize = 32;
/// Interval of mgmt-csi's probes.
const PROBE_INTERVAL: Duration = Duration::from_secs(10);
/// Usual interval of a scraper of metrics.
const SCRAPE_INTERVAL: Duration = Duration::from_secs(15);
/// Time after which a server without requests is idle.
const CALM: Duration = Duration::from_secs(10);

/// Runs the bench.
pub async fn run(report: &Report, volumes: &[u32], seconds: u64) -> Result<()> {
    let report = report.clone();
    let mut sizes: Vec<usize> = volumes.iter().map(|volumes| *volumes as usize).collect();
    sizes.sort_unstable();
    tests::run(move |s| async move { measure(&s, &report, &sizes, Duration::from_secs(seconds)).await }).await
}

async fn measure(s: &Arc<Scenario>, report: &Report, sizes: &[usize], time: Duration) -> Result<()> {
    let claims = Claims::watch(&s.guest, &s.name, &s.name);
    let attachments = Attachments::watch(&s.guest, &s.name);
    let node = s.simulated_node().await?;
    let (mut made, mut created) = (Vec::new(), Vec::new());
    for size in sizes {
        claims.fill(&mut made, *size).await?;
        let volumes: Vec<String> =
            made.iter().take(ATTACHED).skip(created.len()).map(|claim| claim.volume.clone()).collect();
        created.extend(attachments.attach(&volumes, &node.name).await?.0);
        let meter = Meter::start(&s.lab).await?;
        // This interval is measured.
        tokio::time::sleep(time).await;
        let requests = meter.so_far()?;
        let cost = meter.stop(1).await?;
        let case = format!("{size} volumes");
        let all: usize = requests.values().sum();
        report.number(&case, "requests beyond leases", "per minute", all as f64 * 60.0 / time.as_secs_f64());
        for (kind, count) in requests {
            let name = format!("{} {} {} ({})", kind.component, kind.verb, kind.resource, kind.cluster);
            report.number(&case, &name, "total", count as f64);
        }
        for (component, used) in &cost.used {
            let share = 100.0 * used.cpu.as_secs_f64() / time.as_secs_f64();
            report.number(&case, &format!("{component} cpu"), "% of a core", share);
        }
    }
    attachments.detach(&created).await?;
    claims.empty(&made).await
}

/// Runs the bench with a storage-infra of its own, without clusters. Meanwhile it is probed as by mgmt-csi, and its
/// metrics are scraped.
pub async fn run_alone(report: &Report, volumes: &[u32], seconds: u64) -> Result<()> {
    let mut sizes: Vec<usize> = volumes.iter().map(|volumes| *volumes as usize).collect();
    sizes.sort_unstable();
    let (server, mut created) = (StorageInfra::start().await?, 0);
    for size in sizes {
        fill_from(&server, created, size).await?;
        created = size;
        probe(&server, CALM).await?;
        let (cpu, listings) = (server.cpu()?, server.listings().await?);
        let start = Instant::now();
        probe(&server, Duration::from_secs(seconds)).await?;
        let time = start.elapsed().as_secs_f64();
        let case = format!("{size} volumes");
        let used = (server.cpu()? - cpu).as_secs_f64();
        report.number(&case, "storage-infra cpu", "% of a core", 100.0 * used / time);
        let listed = server.listings().await? - listings;
        report.number(&case, "listings of the pool", "per minute", listed * 60.0 / time);
    }
    Ok(())
}

/// Runs the bench with a storage-infra of its own, and volumes that are attached to VMs without a system in a libvirtd of its own.
/// Beside it, the same without attached volumes.
pub async fn run_attached(report: &Report, attached: u32, seconds: u64) -> Result<()> {
    let mut libvirtd = Libvirtd::start();
    let vms: Vec<Uuid> = (0..attached.div_ceil(DISKS_OF_VM)).map(|_| libvirtd.domain()).collect();
    let server = StorageInfra::start_with(|_| format!("libvirt=libvirt:{}", libvirtd.uri())).await?;
    for vm in &vms {
        let (name, hypervisor) = (vm.to_string(), "libvirt".to_owned());
        server
            .client
            .put_node(*vm, &NodeSpec { name, hypervisor, zone: None, labels: Labels::new() })
            .await?;
    }
    fill(&server, attached as usize).await?;
    for count in [0, attached] {
        let new = stream::iter(0..count).map(anyhow::Ok);
        let vms = &vms;
        let attach = |number: u32| attach(&server, number, vms[(number / DISKS_OF_VM) as usize]);
        new.try_for_each_concurrent(AT_ONCE, attach).await?;
        probe(&server, CALM).await?;
        let (cpu, start) = (server.cpu()?, Instant::now());
        probe(&server, Duration::from_secs(seconds)).await?;
        let used = (server.cpu()? - cpu).as_secs_f64();
        let share = 100.0 * used / start.elapsed().as_secs_f64();
        report.number(&format!("{count} attached"), "storage-infra cpu", "% of a core", share);
    }
    Ok(())
}

async fn attach(server: &StorageInfra, number: u32, node: Uuid) -> Result<()> {
    let id = AttachmentId::new(format!("idle-{number}"))?;
    let volume = VolumeId::new(format!("idle-{number}"))?;
    let spec = AttachmentSpec { volume, node, read_only: false, access: Access::SingleNode };
    server.client.attach(&id, &spec, TIMEOUT).await?;
    Ok(())
}

/// Creates volumes until there are `size`.
pub(super) async fn fill(server: &StorageInfra, size: usize) -> Result<()> {
    fill_from(server, 0, size).await
}

async fn fill_from(server: &StorageInfra, existing: usize, size: usize) -> Result<()> {
    let new = stream::iter(existing..size).map(anyhow::Ok);
    new.try_for_each_concurrent(
        AT_ONCE,
        |number| async move { server.create(&format!("idle-{number}")).await },
    )
    .await
}

/// Probes and scrapes a server for some time.
async fn probe(server: &StorageInfra, time: Duration) -> Result<()> {
    let end = tokio::time::sleep(time);
    tokio::pin!(end);
    let [mut probes, mut scrapes] = [PROBE_INTERVAL, SCRAPE_INTERVAL].map(|period| {
        let mut ticks = interval(period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks
    });
    loop {
        tokio::select! {
            () = &mut end => return Ok(()),
            _ = probes.tick() => drop(server.client.health().await?),
            _ = scrapes.tick() => drop(server.metrics().await?),
        }
    }
}
