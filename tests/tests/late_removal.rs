//! Late removals: a detach by a paused replica of the guest's driver does not detach a disk that was attached again
//! meanwhile.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use crds::names;
use kube::ResourceExt;
use kube::api::{DeleteParams, PostParams};
use serde_json::json;
use tests::guest::static_volume;
use tests::program::Controller;
use tests::{PATIENCE, Scenario, eventually, run, unique};
use tonic::{Code, Status};

/// Timeout of the replica's calls, including pauses.
const LONG: Duration = Duration::from_secs(120);

#[tokio::test]
async fn a_late_detach_of_a_paused_replica_does_not_affect_the_next_attach() -> Result<()> {
    run(|s| async move {
        let (node, replica) = (s.simulated_node().await?, Controller::start(&s, &[]).await?);
        let handle = s.bound_claim("data").await?;
        let volume = s.bound("data").await?.1.name_any();
        // Kubernetes gives both attachments the same name, whatever the replica's watches have.
        let first = s.k8s_attachments().attach_as_kubernetes(&volume, &handle, &node.name).await?;
        s.attached(&first).await?;

        let paused = replica.process.pause()?;
        let (driver, claim, vm) = (replica.driver.clone(), handle.clone(), node.name.clone());
        let late = tokio::spawn(async move { driver.unpublish_within(&claim, &vm, LONG).await });
        s.k8s_detach(&first).await?;
        let second = s.k8s_attachments().attach_as_kubernetes(&volume, &handle, &node.name).await?;
        let disk = s.attached(&second).await?;
        let before = s.attachment(&node.name, &handle).await?.context("no VolumeAttachment")?.metadata.uid;
        drop(paused);

        let answer = late.await?;
        disk_is_unchanged(&s, &node.name, &handle, &disk, before.as_ref()).await?;
        // The replica's own repair may use the same disk, because its watches are stale.
        let refusal = refused(&replica, &handle, &node.name, answer).await?;
        disk_is_unchanged(&s, &node.name, &handle, &disk, before.as_ref()).await?;
        assert_eq!(refusal.code(), Code::FailedPrecondition, "{refusal}");
        assert!(refusal.message().contains(&second), "{refusal}");
        s.k8s_detach(&second).await?;
        replica.stop().await
    })
    .await
}

#[tokio::test]
async fn a_paused_repair_does_not_remove_an_entry_that_a_later_attach_uses() -> Result<()> {
    run(|s| async move {
        let folder = tempfile::tempdir()?;
        // Another cluster ID, so that the lab's replica does not repair its objects.
        let (id, patient) = (unique(&s.name), ["--repair-grace=1h"]);
        let repairing = ["--repair-grace=1s"];
        let repairing = Controller::start_with_fail_points(&s, &id, &repairing, folder.path()).await?;
        let former = Controller::start_as(&s, &id, &patient).await?;
        let node = s.node().await?;
        s.assign_vm(&node.name, &id).await?;
        s.lab.join_guest(&node).await?;
        let handle = s.management_claim(&[(names::LABEL_CLUSTER_ID, &id)], json!({})).await?;
        let volume = static_volume(&unique(&s.name), &s.name, &handle, &json!({}))?;
        let volume = s.guest_volumes().create(&PostParams::default(), &volume).await?;

        // The guest has no VolumeAttachment for this disk.
        let point = "kube.management.patch.virtualmachines.before";
        std::fs::write(folder.path().join("freeze"), point)?;
        let disk = former.driver.publish(&handle, &node.name).await?;
        let before = s.attachment(&node.name, &handle).await?.context("no VolumeAttachment")?.metadata.uid;
        let paused = repairing.process.wait_until_paused().await?;
        // Now it has one, and another replica answers: the disk is attached.
        let attachment =
            s.k8s_attachments().attach_by("nobody.example", &volume.name_any(), &node.name).await?;
        let serving = Controller::start_as(&s, &id, &patient).await?;
        assert_eq!(serving.driver.publish(&handle, &node.name).await?, disk);
        drop(paused);
        eventually("the repair is complete", PATIENCE, || async {
            let log = repairing.process.log();
            Ok(if log.contains("a VolumeAttachment requests the disk again: its entry stays") {
                Ok(())
            } else {
                Err(log)
            })
        })
        .await?;
        disk_is_unchanged(&s, &node.name, &handle, &disk, before.as_ref()).await?;
        s.guest_attachments().delete(&attachment, &DeleteParams::default()).await?;
        serving.driver.unpublish(&handle, &node.name).await?;
        for controller in [repairing, former, serving] {
            controller.stop().await?;
        }
        Ok(())
    })
    .await
}

/// Repeats a detach, like csi-attacher, until it is refused with a final code.
async fn refused(
    replica: &Controller,
    handle: &str,
    node: &str,
    first: Result<(), Status>,
) -> Result<Status> {
    let first = Mutex::new(Some(first));
    eventually("a late detach is refused", PATIENCE, || async {
        let before = first.lock().unwrap_or_else(PoisonError::into_inner).take();
        let answer = match before {
            Some(answer) => answer,
            None => replica.driver.unpublish(handle, node).await,
        };
        let refusal = answer.err().context("a detach succeeded for a disk that the guest has attached")?;
        Ok(if refusal.code() == Code::Aborted { Err(refusal.to_string()) } else { Ok(refusal) })
    })
    .await
}

/// Checks that the VM has the disk, with the same VolumeAttachment as before.
async fn disk_is_unchanged(
    s: &Scenario,
    name: &str,
    handle: &str,
    disk: &str,
    before: Option<&String>,
) -> Result<()> {
    let vm = s.vms().get(name).await?;
    let entry = names::volume_entry(handle);
    assert!(
        vm.spec.volumes.iter().any(|one| one.name == entry),
        "the entry was removed: {:?}",
        vm.spec.volumes
    );
    let now = s.attachment(name, handle).await?.context("no VolumeAttachment")?;
    assert_eq!((now.metadata.uid.as_ref(), now.metadata.deletion_timestamp), (before, None));
    let shown = s.disk(name, handle).await?.context("no disk")?;
    assert!(shown.attached && shown.disk_uuid.as_deref() == Some(disk), "{shown:?}");
    Ok(())
}
