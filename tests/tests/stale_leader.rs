//! A new leader acts only on what the API server shows now: it has stood by with a watch that is behind.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use crds::names;
use lab::audit::{Entry, Mark};
use serde_json::{Value, json};
use tests::link::Link;
use tests::program::{Running, binary};
use tests::{PATIENCE, Scenario, alone, eventually, run};

const SHIM: &str = "vm-operator-shim";

#[tokio::test]
async fn a_new_leader_whose_watches_are_behind_takes_no_disk_away_and_plugs_none() -> Result<()> {
    let _alone = alone().await;
    run(|s| async move {
        let node = s.node().await?;
        let (kept, given_up, after) = (s.volume().await?, s.volume().await?, s.volume().await?);
        let disk = s.driver.publish(&kept, &node.name).await?;
        let before = s.attachment(&node.name, &kept).await?.context("no VolumeAttachment")?.metadata.uid;
        s.stop_part(SHIM).await?;
        let management = s.lab.state().management.as_ref().context("the lab has no management cluster")?;
        let leader = shim(&s, &management.kubeconfig_of(SHIM)).await?;
        leads(&leader).await?;
        let (link, folder) = (Link::to(&management.server).await?, tempfile::tempdir()?);
        let linked: PathBuf = folder.path().join("kubeconfig");
        link.kubeconfig(&management.kubeconfig_of(SHIM), &linked)?;
        let standby = shim(&s, &linked).await?;

        // The last that the standby sees: one disk is to go and one is to come, and nothing was done about either yet.
        let frozen = leader.freeze()?;
        s.remove_entries(&node.name, |one| *one == entry(&kept)).await?;
        s.add_entry(&node.name, entry(&given_up)).await?;
        link.is_quiet().await?;
        link.lose_watches();
        s.remove_entries(&node.name, |one| *one == entry(&given_up)).await?;
        s.add_entry(&node.name, entry(&kept)).await?;
        link.has_lost_watches().await?;
        let mark = s.lab.audit()?.mark()?;
        leads(&standby).await?;
        begins(&s, mark).await?;
        link.cut();
        link.open().await?;
        // The standby has looked at this very machine once this is answered.
        s.driver.publish(&after, &node.name).await?;

        let written = writes(&s, mark)?;
        let touched = |claim: &str| {
            let name = names::volume_attachment(&node.name, claim);
            written.iter().filter(|one| one.name == name).cloned().collect::<Vec<_>>()
        };
        assert_eq!(touched(&kept), [], "the disk was pulled from under the pod");
        assert_eq!(touched(&given_up), [], "a disk was plugged that nobody asks for");
        let now = s.attachment(&node.name, &kept).await?.context("no VolumeAttachment")?;
        assert_eq!(now.metadata.uid, before);
        assert_eq!(s.driver.publish(&kept, &node.name).await?, disk);
        for volume in [&kept, &after] {
            s.driver.unpublish(volume, &node.name).await?;
        }
        let ended = standby.stop().await?;
        anyhow::ensure!(ended.success(), "the standby ended with {ended}");
        drop((frozen, leader));
        s.start_part(SHIM).await
    })
    .await
}

fn entry(claim: &str) -> Value {
    json!({"name": names::volume_entry(claim), "persistentVolumeClaim": {"claimName": claim}})
}

/// A replica of the shim, which takes the Lease over within seconds.
async fn shim(s: &Scenario, kubeconfig: &Path) -> Result<Running> {
    let kubeconfig = format!("--kubeconfig={}", kubeconfig.display());
    let words = [
        &*kubeconfig,
        "--lease-namespace=nestor-system",
        "--lease-duration=5",
        "--lease-renew-deadline=4",
        "--lease-retry-period=1",
    ];
    let running = Running::start(&binary(&s.lab, SHIM), &words).await?;
    running.ready().await?;
    Ok(running)
}

async fn leads(replica: &Running) -> Result<()> {
    eventually("the replica leads", PATIENCE, || async {
        let (_, metrics) = replica.get("/metrics").await?;
        let leads = metrics.lines().any(|line| line == "nestor_vm_operator_shim_leader 1");
        Ok(if leads { Ok(()) } else { Err(replica.log()) })
    })
    .await
}

/// Waits until the new leader asks for, or does, something about VMs or their disks.
async fn begins(s: &Scenario, mark: Mark) -> Result<()> {
    eventually("the new leader begins", PATIENCE, || async {
        let all = s.lab.audit()?.since(mark)?;
        let mut of_shim = all.iter().filter(|one| one.user_agent.starts_with(SHIM));
        let begun = of_shim.any(|one| one.verb != "watch" && one.resource != "leases");
        Ok(if begun { Ok(()) } else { Err(format!("{} requests", all.len())) })
    })
    .await
}

/// What the shim wrote about VolumeAttachments.
fn writes(s: &Scenario, mark: Mark) -> Result<Vec<Entry>> {
    let mut all = s.lab.audit()?.since(mark)?;
    all.retain(|one| {
        one.user_agent.starts_with(SHIM) && one.is_write() && one.resource == "volumeattachments"
    });
    Ok(all)
}
