//! Disks of VMs that may still run: nothing irreversible is done while a VM is running or saved.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use kube::api::{DeleteParams, ListParams};
use lab::vm::virsh;
use rustix::process::{Pid, Signal, kill_process};
use tests::driver;
use tests::hypervisor::BareDomain;
use tests::{PATIENCE, Scenario, eventually, run_alone};
use tonic::Code;

/// Timeout of a call that cannot detach a disk.
const SHORT: Duration = Duration::from_secs(3);

/// Runs a test with a domain without a boot disk, and removes it afterwards.
async fn with_bare_domain<Body, Running>(body: Body) -> Result<()>
where
    Body: FnOnce(Arc<Scenario>, Arc<BareDomain>) -> Running + Send + 'static,
    Running: Future<Output = Result<()>> + Send + 'static,
{
    // Each test restarts libvirtd.
    run_alone(|s| async move {
        let vm = Arc::new(BareDomain::start(&s).await?);
        let process = vm.process(&s)?;
        let outcome = tokio::spawn(body(s.clone(), vm.clone())).await;
        let removed = vm.remove(&s).await;
        // In case libvirt has lost the domain.
        let _ = kill_process(process, Signal::KILL);
        outcome.unwrap_or_else(|panic| Err(anyhow!("{panic}"))).and(removed)
    })
    .await
}

/// Kills libvirtd and starts it again. Domains keep running.
async fn restart_libvirtd(s: &Scenario, between: impl FnOnce() -> Result<()>) -> Result<()> {
    s.kill_component("libvirtd").await?;
    between()?;
    s.start_component("libvirtd").await?;
    eventually("libvirtd responds", PATIENCE, || async {
        Ok(virsh(s.lab.run(), ["version"]).await.map(drop).map_err(|error| format!("{error:#}")))
    })
    .await
}

/// Checks that a detach times out, and that the VolumeAttachment reports this reason.
async fn is_stuck(s: &Scenario, handle: &str, node: &str) -> Result<()> {
    let detach = || s.driver.unpublish_within(handle, node, SHORT);
    driver::times_out("a detach", &["out-of-service"], detach).await?;
    eventually("the VolumeAttachment reports the failed detach", PATIENCE, || async {
        let all = s.attachments().list(&ListParams::default()).await?;
        let errors = all.iter().filter_map(|one| one.status.as_ref()?.error.as_ref());
        let errors: Vec<&str> = errors.map(|error| error.message.as_str()).collect();
        Ok(if errors.iter().any(|text| text.contains("does not release it")) {
            Ok(())
        } else {
            Err(format!("{errors:?}"))
        })
    })
    .await
}

async fn is_detached(s: &Scenario, handle: &str, node: &str) -> Result<()> {
    eventually("the disk is detached", PATIENCE, || async {
        Ok(s.driver.unpublish(handle, node).await.map_err(|status| status.to_string()))
    })
    .await
}

#[tokio::test]
async fn a_saved_vm_keeps_its_disk_and_a_disk_of_a_restored_vm_is_detached() -> Result<()> {
    with_bare_domain(|s, vm| async move {
        let (there, handle, node) = (s.node().await?, s.bound_claim("data").await?, vm.node.name.clone());
        let disk = s.driver.publish(&handle, &node).await?;
        let file = s.lab.run().path("libvirt").join(format!("{node}.saved"));
        virsh(s.lab.run(), ["save", &node, file.to_str().context("a path that is not UTF-8")?]).await?;
        is_stuck(&s, &handle, &node).await?;
        s.wait_for_management_reason_of("VirtualMachine", &node, "Saved", &[]).await?;
        // After a restart libvirt has no record of the save; storage-infra has.
        restart_libvirtd(&s, || Ok(())).await?;
        is_stuck(&s, &handle, &node).await?;
        let refused = s.driver.publish(&handle, &there.name).await.unwrap_err();
        ensure!(refused.code() == Code::FailedPrecondition && refused.message().contains(&node), "{refused}");

        // An administrator discards the saved state, and restores it nevertheless.
        s.infra.discard_saved_state(vm.node.uuid).await?;
        is_detached(&s, &handle, &node).await?;
        virsh(s.lab.run(), ["restore", file.to_str().context("a path that is not UTF-8")?]).await?;
        s.wait_for_event("data", &["without an attachment"]).await?;
        eventually("the disk is detached again", PATIENCE, || async {
            Ok(if vm.has(&s, &disk).await? { Err("it is attached".to_owned()) } else { Ok(()) })
        })
        .await?;
        eventually("an attach elsewhere", PATIENCE, || async {
            Ok(s.driver.publish(&handle, &there.name).await.map_err(|status| status.to_string()))
        })
        .await?;
        s.driver.unpublish(&handle, &there.name).await?;
        s.guest_claims().delete("data", &DeleteParams::default()).await?;
        Ok(std::fs::remove_file(file)?)
    })
    .await
}

#[tokio::test]
async fn a_vm_whose_qemu_libvirt_has_lost_is_not_considered_off() -> Result<()> {
    with_bare_domain(|s, vm| async move {
        let (there, handle, node) = (s.node().await?, s.volume().await?, vm.node.name.clone());
        s.driver.publish(&handle, &node).await?;
        let process: Pid = vm.process(&s)?;
        let status = s.lab.run().path("libvirt").join("run/qemu");
        let lose = || {
            for kind in ["xml", "pid"] {
                std::fs::remove_file(status.join(format!("{node}.{kind}")))?;
            }
            Ok(())
        };
        restart_libvirtd(&s, lose).await?;
        ensure!(vm.virsh(&s, "domstate").await?.trim() == "shut off", "libvirt has not lost the domain");
        is_stuck(&s, &handle, &node).await?;
        let refused = s.driver.publish(&handle, &there.name).await.unwrap_err();
        ensure!(refused.code() == Code::FailedPrecondition && refused.message().contains(&node), "{refused}");
        kill_process(process, Signal::KILL)?;
        is_detached(&s, &handle, &node).await?;
        s.driver.publish(&handle, &there.name).await?;
        Ok(())
    })
    .await
}
