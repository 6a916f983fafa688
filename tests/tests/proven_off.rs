//! Nothing irreversible is done to a volume while a virtual machine may have it, running or saved.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use k8s_openapi::api::core::v1::Event;
use kube::Api;
use kube::api::{DeleteParams, ListParams};
use lab::vm::virsh;
use rustix::process::{Pid, Signal, kill_process};
use tests::driver;
use tests::hypervisor::Bare;
use tests::{PATIENCE, Scenario, alone, eventually, run};
use tonic::Code;

/// A call that finds a disk stuck is given so long to find out.
const SHORT: Duration = Duration::from_secs(3);

/// Runs a test with a domain that has nothing to boot, and removes it, however that ends.
async fn with_bare_domain<Body, Running>(body: Body) -> Result<()>
where
    Body: FnOnce(Arc<Scenario>, Arc<Bare>) -> Running + Send + 'static,
    Running: Future<Output = Result<()>> + Send + 'static,
{
    // Each starts libvirtd anew.
    let _alone = alone().await;
    run(|s| async move {
        let vm = Arc::new(Bare::start(&s).await?);
        let process = vm.process(&s)?;
        let outcome = tokio::spawn(body(s.clone(), vm.clone())).await;
        let removed = vm.remove(&s).await;
        // Where libvirt has lost it.
        let _ = kill_process(process, Signal::KILL);
        outcome.unwrap_or_else(|panic| Err(anyhow!("{panic}"))).and(removed)
    })
    .await
}

/// Ends libvirtd and starts it again. Domains run on.
async fn restart_libvirtd(s: &Scenario, between: impl FnOnce() -> Result<()>) -> Result<()> {
    s.kill_part("libvirtd").await?;
    between()?;
    s.start_part("libvirtd").await?;
    eventually("libvirtd answers", PATIENCE, || async {
        Ok(virsh(s.lab.run(), ["version"]).await.map(drop).map_err(|error| format!("{error:#}")))
    })
    .await
}

/// Detaches a disk that does not leave, and fails unless it is said why.
async fn is_stuck(s: &Scenario, handle: &str, node: &str, why: &str) -> Result<()> {
    let detach = || s.driver.unpublish_within(handle, node, SHORT);
    driver::late("a detach", &["out-of-service"], detach).await?;
    eventually(&format!("the VolumeAttachment says {why:?}"), PATIENCE, || async {
        let all = s.attachments().list(&ListParams::default()).await?;
        let told = all.iter().filter_map(|one| one.status.as_ref()?.error.as_ref());
        let told: Vec<&str> = told.map(|error| error.message.as_str()).collect();
        Ok(if told.iter().any(|text| text.contains(why)) { Ok(()) } else { Err(format!("{told:?}")) })
    })
    .await
}

async fn leaves(s: &Scenario, handle: &str, node: &str) -> Result<()> {
    eventually("the disk leaves", PATIENCE, || async {
        Ok(s.driver.unpublish(handle, node).await.map_err(|status| status.to_string()))
    })
    .await
}

/// Waits for an event on a VirtualMachine with this reason.
async fn is_told(s: &Scenario, vm: &str, reason: &str) -> Result<()> {
    let events: Api<Event> = Api::namespaced(s.management.clone(), &s.namespace);
    let about = format!("involvedObject.kind=VirtualMachine,involvedObject.name={vm}");
    eventually(&format!("the event {reason} on VirtualMachine {vm}"), PATIENCE, || async {
        let list = events.list(&ListParams::default().fields(&about)).await?;
        let reasons: Vec<_> = list.into_iter().filter_map(|event| event.reason).collect();
        Ok(if reasons.iter().any(|one| one == reason) { Ok(()) } else { Err(format!("{reasons:?}")) })
    })
    .await
}

#[tokio::test]
async fn a_vm_that_is_saved_to_a_file_keeps_its_disk_and_what_it_takes_back_later_is_taken_from_it()
-> Result<()> {
    with_bare_domain(|s, vm| async move {
        let (there, handle, node) = (s.node().await?, s.bound_claim("data").await?, vm.node.name.clone());
        let disk = s.driver.publish(&handle, &node).await?;
        let file = s.lab.run().path("libvirt").join(format!("{node}.saved"));
        virsh(s.lab.run(), ["save", &node, file.to_str().context("a path that is not UTF-8")?]).await?;
        is_stuck(&s, &handle, &node, "is saved").await?;
        is_told(&s, &node, "Saved").await?;
        // libvirt forgets it; the storage infra does not.
        restart_libvirtd(&s, || Ok(())).await?;
        is_stuck(&s, &handle, &node, "is saved").await?;
        let refused = s.driver.publish(&handle, &there.name).await.unwrap_err();
        ensure!(refused.code() == Code::FailedPrecondition && refused.message().contains(&node), "{refused}");

        // A person says that the saved state is not used any more, and uses it all the same.
        s.infra.discard_saved_state(vm.node.uuid).await?;
        leaves(&s, &handle, &node).await?;
        virsh(s.lab.run(), ["restore", file.to_str().context("a path that is not UTF-8")?]).await?;
        s.told("data", &["without an attachment", &node]).await?;
        eventually("the disk is unplugged", PATIENCE, || async {
            Ok(if vm.has(&s, &disk).await? { Err("it is there".to_owned()) } else { Ok(()) })
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
async fn a_vm_whose_qemu_libvirt_has_lost_is_not_taken_for_off() -> Result<()> {
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
        ensure!(vm.virsh(&s, "domstate").await?.trim() == "shut off", "libvirt has not lost it");
        is_stuck(&s, &handle, &node, "image lock").await?;
        let refused = s.driver.publish(&handle, &there.name).await.unwrap_err();
        ensure!(refused.code() == Code::FailedPrecondition && refused.message().contains(&node), "{refused}");
        kill_process(process, Signal::KILL)?;
        leaves(&s, &handle, &node).await?;
        s.driver.publish(&handle, &there.name).await?;
        Ok(())
    })
    .await
}
