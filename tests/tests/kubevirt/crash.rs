//! gc-csi dies before and after each of its writes when it attaches and detaches a disk of a VM of KubeVirt, and is started again.
//! The call must complete, and the VM has the disk once or not at all. All other operations are the same with a VM Operator.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tests::crash::{BACKGROUND, CrashInjector, CrashPoint, call_until_final};
use tests::{Scenario, run_alone};

use super::{Clusters, Disk};

const COMPONENTS: &[&str] = &["g1-gc-csi"];

/// A disk and the VM that it is attached to.
struct Subject<'a> {
    s: &'a Scenario,
    clusters: &'a Clusters,
    disk: &'a Disk,
    vm: String,
}

impl Subject<'_> {
    async fn attach(&self) -> Result<()> {
        let serial = call_until_final("attach", || self.s.driver.publish(&self.disk.name, &self.vm)).await?;
        ensure!(self.disks().await? == [json!(serial)], "the VM does not have the disk {serial} once");
        let status = self.clusters.status(&self.vm, &self.disk.name).await?.unwrap_or_default();
        ensure!(status["phase"] == "Ready", "{status}");
        let holder = self.disk.holder(self.clusters).await?.unwrap_or_default();
        ensure!(holder["vm"] == json!(self.vm), "{holder}");
        Ok(())
    }

    async fn detach(&self) -> Result<()> {
        call_until_final("detach", || self.s.driver.unpublish(&self.disk.name, &self.vm)).await?;
        ensure!(self.disks().await?.is_empty(), "the VM has the disk after its detach");
        let status = self.clusters.status(&self.vm, &self.disk.name).await?;
        ensure!(status.is_none(), "{status:?}");
        ensure!(self.disk.holder(self.clusters).await?.is_none(), "the claim names a VM after the detach");
        Ok(())
    }

    /// The serials of the disks of this name in the VM's template.
    async fn disks(&self) -> Result<Vec<Value>> {
        let machine = self.clusters.kubevirt("VirtualMachine").get(&self.vm).await?;
        let disks =
            machine.data["spec"]["template"]["spec"]["domain"]["devices"]["disks"].as_array().cloned();
        let ours = disks.context("no disks")?.into_iter().filter(|disk| disk["name"] == self.disk.name);
        Ok(ours.map(|disk| disk["serial"].clone()).collect())
    }
}

#[tokio::test]
async fn an_attach_and_a_detach_complete_wherever_gc_csi_dies() -> Result<()> {
    run_alone(|s| async move {
        let clusters = Clusters::open().await?;
        let [vm, _] = clusters.two_nodes().await?;
        let disk = Disk::create(&clusters).await?;
        let mut crashes = CrashInjector::new(&s, COMPONENTS)?;
        let subject = Subject { s: &s, clusters: &clusters, disk: &disk, vm };
        let outcome = matrix(&subject, &mut crashes).await;
        outcome.and(crashes.finish().await)?;
        disk.remove(&clusters).await
    })
    .await
}

async fn matrix(subject: &Subject<'_>, crashes: &mut CrashInjector<'_>) -> Result<()> {
    let ((), attach) = crashes.trace(subject.attach()).await?;
    let ((), detach) = crashes.trace(subject.detach()).await?;
    let is_own = |point: &&CrashPoint| !BACKGROUND.iter().any(|other| point.point.contains(other));
    let (attach, detach): (Vec<_>, Vec<_>) =
        (attach.iter().filter(is_own).collect(), detach.iter().filter(is_own).collect());
    // The record on the claim and the template of the VM, each before and after.
    ensure!(attach.len() >= 4 && detach.len() >= 4, "{attach:?}, {detach:?}");
    for point in attach {
        let ((), died) =
            crashes.crash_during(point, None, subject.attach()).await.context(point.to_string())?;
        ensure!(died, "{point} was not passed in an attach");
        subject.detach().await?;
    }
    for point in detach {
        subject.attach().await?;
        let ((), died) =
            crashes.crash_during(point, None, subject.detach()).await.context(point.to_string())?;
        ensure!(died, "{point} was not passed in a detach");
    }
    Ok(())
}
