//! Volume limits of a VM: reported to the scheduler from the hypervisor, and enforced by each tier.

use anyhow::{Context, Result, ensure};
use crds::names;
use infra_api::NodeSpec;
use k8s_openapi::api::storage::v1::CSINode;
use kube::ResourceExt;
use kube::api::Api;
use lab::LoopNode;
use lab::vm::virsh;
use serde_json::json;
use tests::{Scenario, run};

#[tokio::test]
async fn a_vm_reports_the_number_of_disks_that_its_hypervisor_can_attach() -> Result<()> {
    run(|s| async move {
        let vms = s.lab.vms();
        anyhow::ensure!(!vms.is_empty(), "the lab has no virtual machine: `cargo lab up --vms 2`");
        for vm in vms {
            let known =
                s.infra.get_node(s.lab.vm(&vm)?.uuid).await?.context("the storage infra has no such node")?;
            let node = Api::<CSINode>::all(s.guest.clone()).get(&vm).await?;
            let driver = node.spec.drivers.into_iter().find(|driver| driver.name == names::GUEST_DRIVER);
            let reported = driver.and_then(|driver| driver.allocatable?.count);
            assert_eq!(reported.map(i64::from), known.max_disks.map(i64::from), "{vm}");
            assert!(reported.is_some_and(|count| count > 0), "{vm}: {reported:?}");
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_pod_beyond_the_volume_limit_of_its_node_waits_until_another_is_deleted() -> Result<()> {
    run(|s| async move {
        let node = s.node_for_pods("zone-a", Some(2)).await?;
        for claim in ["one", "two", "three"] {
            s.claim_with(claim, "nestor", "1Mi", json!({"volumeMode": "Block"})).await?;
        }
        for claim in ["one", "two", "three"] {
            s.bound(claim).await?;
        }
        for pod in ["one", "two"] {
            s.pod(pod, None, &[pod]).await?;
            assert_eq!(s.scheduled(pod).await?, node.name);
        }
        s.pod("three", None, &["three"]).await?;
        s.not_scheduled("three", &["exceed max volume count"]).await?;
        s.delete_pod("one").await?;
        assert_eq!(s.scheduled("three").await?, node.name);
        Ok(())
    })
    .await
}

/// A domain without a SCSI controller, like one without free slots. It is never started.
fn domain(vm: &LoopNode) -> String {
    format!(
        "<domain type='qemu'><name>{}</name><uuid>{}</uuid><memory unit='MiB'>32</memory>
        <os><type arch='x86_64' machine='q35'>hvm</type></os>
        <devices><emulator>/usr/bin/qemu-system-x86_64</emulator><memballoon model='none'/></devices></domain>",
        vm.name, vm.uuid
    )
}

/// Checks that an attach to a VM without free slots is refused.
async fn is_refused(s: &Scenario, vm: &LoopNode) -> Result<()> {
    let hypervisor = "libvirt".to_owned();
    let spec = NodeSpec { name: vm.name.clone(), hypervisor, zone: None, labels: Default::default() };
    let node = s.infra.put_node(vm.uuid, &spec).await?;
    ensure!(node.max_disks == Some(0), "{node:?}");
    s.lab.join_guest(vm).await?;
    s.claim("data", "nestor", "1Mi").await?;
    let (_, volume) = s.bound("data").await?;
    let attachment = s.k8s_attach(&volume.name_any(), &vm.name).await?;
    let texts = [vm.name.as_str(), "no free slot"];
    s.k8s_attachments().refused(&attachment, &texts).await?;
    s.wait_for_event("data", &texts).await?;
    s.k8s_detach(&attachment).await?;
    s.no_attachments(vm).await
}

#[tokio::test]
async fn an_attach_to_a_vm_without_free_slots_is_refused() -> Result<()> {
    run(|s| async move {
        let vm = s.node().await?;
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("domain.xml");
        std::fs::write(&file, domain(&vm))?;
        let file = file.to_str().context("a path that is not UTF-8")?;
        virsh(s.lab.run(), ["create", file, "--paused"]).await?;
        let outcome = is_refused(&s, &vm).await;
        virsh(s.lab.run(), ["destroy", &vm.name]).await?;
        outcome
    })
    .await
}
