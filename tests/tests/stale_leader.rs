//! Stale leaders: a new leader whose watches lag does nothing that the current state does not call for.

use std::path::PathBuf;

use anyhow::{Context, Result};
use crds::names;
use lab::audit::{Entry, Mark};
use serde_json::{Value, json};
use tests::program::{Running, management_cluster, shim_replica};
use tests::tcp_proxy::TcpProxy;
use tests::{PATIENCE, Scenario, eventually, run_alone};

const SHIM: &str = "vm-operator-shim";

#[tokio::test]
async fn a_new_leader_with_stale_watches_detaches_and_attaches_no_disk() -> Result<()> {
    run_alone(|s| async move {
        let node = s.node().await?;
        let (kept, given_up, after) = (s.volume().await?, s.volume().await?, s.volume().await?);
        let disk = s.driver.publish(&kept, &node.name).await?;
        let before = s.attachment(&node.name, &kept).await?.context("no VolumeAttachment")?.metadata.uid;
        s.stop_component(SHIM).await?;
        let management = management_cluster(&s)?;
        let leader = shim_replica(&s, &management.kubeconfig_of(SHIM), &[]).await?;
        wait_until_leader(&leader).await?;
        let (proxy, folder) = (TcpProxy::to(&management.server).await?, tempfile::tempdir()?);
        let proxied: PathBuf = folder.path().join("kubeconfig");
        proxy.kubeconfig(&management.kubeconfig_of(SHIM), &proxied)?;
        let standby = shim_replica(&s, &proxied, &[]).await?;

        // The last state that the standby observes: one entry removed and one added, neither processed yet.
        let paused = leader.pause()?;
        s.remove_entries(&node.name, |one| *one == entry(&kept)).await?;
        s.add_entry(&node.name, entry(&given_up)).await?;
        proxy.wait_until_idle().await?;
        proxy.lose_watches();
        s.remove_entries(&node.name, |one| *one == entry(&given_up)).await?;
        s.add_entry(&node.name, entry(&kept)).await?;
        proxy.watches_lost().await?;
        let mark = s.lab.audit()?.mark()?;
        wait_until_leader(&standby).await?;
        wait_for_first_request(&s, mark).await?;
        proxy.cut();
        proxy.open().await?;
        // The standby has reconciled this VM before it answers.
        s.driver.publish(&after, &node.name).await?;

        let written = writes(&s, mark)?;
        let touched = |claim: &str| {
            let name = names::volume_attachment(&(&node.name).into(), &claim.into());
            written.iter().filter(|one| one.name == name).cloned().collect::<Vec<_>>()
        };
        assert_eq!(touched(&kept), [], "the disk was detached");
        assert_eq!(touched(&given_up), [], "a disk without an entry was attached");
        let now = s.attachment(&node.name, &kept).await?.context("no VolumeAttachment")?;
        assert_eq!(now.metadata.uid, before);
        assert_eq!(s.driver.publish(&kept, &node.name).await?, disk);
        for volume in [&kept, &after] {
            s.driver.unpublish(volume, &node.name).await?;
        }
        let status = standby.stop().await?;
        anyhow::ensure!(status.success(), "the standby exited with {status}");
        drop((paused, leader));
        s.start_component(SHIM).await
    })
    .await
}

fn entry(claim: &str) -> Value {
    json!({"name": names::volume_entry(claim), "persistentVolumeClaim": {"claimName": claim}})
}

async fn wait_until_leader(replica: &Running) -> Result<()> {
    eventually("the replica leads", PATIENCE, || async {
        let (_, metrics) = replica.get("/metrics").await?;
        let is_leader = metrics.lines().any(|line| line == "nestor_vm_operator_shim_leader 1");
        Ok(if is_leader { Ok(()) } else { Err(replica.log()) })
    })
    .await
}

/// Waits until the new leader sends requests about VMs or their disks.
async fn wait_for_first_request(s: &Scenario, mark: Mark) -> Result<()> {
    eventually("the new leader sends requests", PATIENCE, || async {
        let all = s.lab.audit()?.since(mark)?;
        let mut of_shim = all.iter().filter(|one| one.user_agent.starts_with(SHIM));
        let started = of_shim.any(|one| one.verb != "watch" && one.resource != "leases");
        Ok(if started { Ok(()) } else { Err(format!("{} requests", all.len())) })
    })
    .await
}

/// The shim's writes to VolumeAttachments.
fn writes(s: &Scenario, mark: Mark) -> Result<Vec<Entry>> {
    let mut all = s.lab.audit()?.since(mark)?;
    all.retain(|one| {
        one.user_agent.starts_with(SHIM) && one.is_write() && one.resource == "volumeattachments"
    });
    Ok(all)
}
