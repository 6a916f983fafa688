//! Attach and detach through both tiers, down to the device, with loop nodes.

use std::time::Duration;

use anyhow::{Context, Result};
use crds::{VolumeAttachment, names};
use kube::ResourceExt;
use kube::api::{DeleteParams, Patch, PatchParams};
use lab::LoopNode;
use serde_json::json;
use tests::{PATIENCE, Scenario, eventually, run, unique};
use tonic::Code;

/// Type of the condition on a guest claim.
const CONDITION: &str = "nestor.dev/Attached";

#[tokio::test]
async fn an_attach_ends_with_a_device_and_a_status_in_both_tiers() -> Result<()> {
    run(|s| async move {
        let node = s.node().await?;
        let handle = s.bound_claim("data").await?;
        let disk = s.driver.publish(&handle, &node.name).await?;

        let attachment = s.attachment(&node.name, &handle).await?.context("no VolumeAttachment")?;
        assert_eq!(attachment.name_any(), names::volume_attachment(&(&node.name).into(), &(&handle).into()));
        let status = attachment.status.context("the VolumeAttachment has no status")?;
        assert!(status.attached && status.error.is_none(), "{status:?}");
        assert_eq!(status.disk_uuid.as_ref(), Some(&disk));
        let shown = s.disk(&node.name, &handle).await?.context("the VM's status does not have the disk")?;
        assert!(shown.attached && shown.error.is_none(), "{shown:?}");
        assert_eq!(shown.disk_uuid.as_ref(), Some(&disk));
        assert_eq!(s.infra_volume(&handle).await?.disk_uuid.to_string(), disk);
        assert!(device(&node, &disk)?, "the node has no device for the disk");
        condition(&s, "data", "True", &node.name).await?;
        s.wait_for_event("data", &["attached to VirtualMachine", &node.name]).await?;

        assert_eq!(
            s.driver.publish(&handle, &node.name).await?,
            disk,
            "a repeated attach returns the same disk"
        );
        s.driver.unpublish(&handle, &node.name).await?;
        assert!(s.disk(&node.name, &handle).await?.is_none());
        assert!(s.attachment(&node.name, &handle).await?.is_none());
        assert!(!device(&node, &disk)?);
        s.no_attachments(&node).await?;
        condition(&s, "data", "False", "").await?;
        s.driver.unpublish(&handle, &node.name).await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn csi_attacher_attaches_and_detaches_for_the_attach_detach_controller() -> Result<()> {
    run(|s| async move {
        let node = s.node().await?;
        let handle = s.bound_claim("data").await?;
        let (_, volume) = s.bound("data").await?;
        s.lab.join_guest(&node).await?;
        let attachment = s.k8s_attach(&volume.name_any(), &node.name).await?;
        let disk = s.attached(&attachment).await?;
        assert!(device(&node, &disk)?);
        assert!(s.disk(&node.name, &handle).await?.is_some_and(|disk| disk.attached));
        s.k8s_detach(&attachment).await?;
        s.no_attachments(&node).await
    })
    .await
}

#[tokio::test]
async fn many_volumes_are_attached_to_one_vm_and_detached_at_once() -> Result<()> {
    run(|s| async move {
        let node = s.node().await?;
        let mut handles = Vec::new();
        for _ in 0..8 {
            handles.push(s.volume().await?);
        }
        for _ in 0..2 {
            concurrently(&handles, |handle| {
                let (s, node) = (s.clone(), node.name.clone());
                async move { Ok(s.driver.publish(&handle, &node).await.map(drop)?) }
            })
            .await?;
            concurrently(&handles, |handle| {
                let (s, node) = (s.clone(), node.name.clone());
                async move { Ok(s.driver.unpublish(&handle, &node).await?) }
            })
            .await?;
        }
        s.no_attachments(&node).await
    })
    .await
}

#[tokio::test]
async fn an_attach_of_a_missing_volume_or_vm_is_not_found_and_a_detach_succeeds() -> Result<()> {
    run(|s| async move {
        let node = s.node().await?;
        let handle = s.volume().await?;
        let absent = unique("absent");
        let refused = s.driver.publish(&handle, &absent).await.unwrap_err();
        assert_eq!(refused.code(), Code::NotFound, "{refused}");
        assert!(refused.message().contains(&format!("VirtualMachine {absent}")), "{refused}");
        let refused = s.driver.publish(&absent, &node.name).await.unwrap_err();
        assert_eq!(refused.code(), Code::NotFound, "{refused}");
        assert!(refused.message().contains(&absent), "{refused}");
        s.driver.unpublish(&handle, &absent).await?;
        s.driver.unpublish(&absent, &node.name).await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_failure_of_the_infra_is_reported_on_every_tier_and_recovers_without_help() -> Result<()> {
    run(|s| async move {
        let node = s.node().await?;
        let handle = s.bound_claim("data").await?;
        let uuid = node.uuid.to_string().parse()?;
        // No hypervisor has the VM any more, so mgmt-csi cannot register it again.
        std::fs::remove_dir(&node.by_id_dir)?;
        s.infra.delete_node(uuid).await?;

        let refused = s.driver.publish(&handle, &node.name).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable, "retryable: {refused}");
        let text = node.uuid.to_string();
        assert!(refused.message().contains(&text), "{refused}");
        let attachment = s.attachment(&node.name, &handle).await?.context("no VolumeAttachment")?;
        let status = attachment.status.unwrap_or_default();
        assert!(!status.attached);
        let error = status.error.context("the VolumeAttachment has no error")?;
        assert_eq!(error.reason, "NodeNotFound");
        assert!(error.message.contains(&text), "{error:?}");
        let shown = s.disk(&node.name, &handle).await?.and_then(|disk| disk.error);
        assert!(shown.as_ref().is_some_and(|error| error.contains(&text)), "{shown:?}");
        s.wait_for_event("data", &["VirtualMachine", &node.name, &text]).await?;
        condition(&s, "data", "False", &text).await?;

        s.wait_for_management_event_of("VirtualMachine", &node.name, &["not registered"]).await?;
        std::fs::create_dir(&node.by_id_dir)?;
        let disk = eventually("the attach after the cause is removed", PATIENCE, || async {
            Ok(s.driver.publish(&handle, &node.name).await.map_err(|status| status.to_string()))
        })
        .await?;
        assert!(device(&node, &disk)?);
        let attachment = s.attachment(&node.name, &handle).await?.context("no VolumeAttachment")?;
        assert!(attachment.status.is_some_and(|status| status.attached && status.error.is_none()));
        condition(&s, "data", "True", &node.name).await
    })
    .await
}

#[tokio::test]
async fn a_detach_succeeds_without_the_management_claim() -> Result<()> {
    run(|s| async move {
        let (node, handle) = (s.node().await?, s.volume().await?);
        s.driver.publish(&handle, &node.name).await?;
        s.claims().delete(&handle, &DeleteParams::default()).await?;
        // By force, because the claim waits for the detach otherwise.
        let force = Patch::Merge(json!({"metadata": {"finalizers": null}}));
        s.claims().patch(&handle, &PatchParams::default(), &force).await?;
        eventually("the management claim is deleted", PATIENCE, || async {
            Ok(s.claims().get_opt(&handle).await?.map_or(Ok(()), |_| Err("it exists".to_owned())))
        })
        .await?;
        s.driver.unpublish(&handle, &node.name).await?;
        s.no_attachments(&node).await?;
        s.no_leftovers().await
    })
    .await
}

#[tokio::test]
async fn a_detach_succeeds_without_the_volume_attachment() -> Result<()> {
    run(|s| async move {
        let (node, handle) = (s.node().await?, s.volume().await?);
        s.driver.publish(&handle, &node.name).await?;
        let attachment = names::volume_attachment(&(&node.name).into(), &(&handle).into());
        s.attachments().delete(&attachment, &DeleteParams::default()).await?;
        s.driver.unpublish(&handle, &node.name).await?;
        s.no_attachments(&node).await
    })
    .await
}

#[tokio::test]
async fn a_deleted_vm_has_no_disks() -> Result<()> {
    run(|s| async move {
        let (node, handle) = (s.node().await?, s.volume().await?);
        let disk = s.driver.publish(&handle, &node.name).await?;
        s.vms().delete(&node.name, &DeleteParams::default()).await?;
        eventually("the VM is deleted", PATIENCE, || async {
            Ok(s.vms().get_opt(&node.name).await?.map_or(Ok(()), |_| Err("it exists".to_owned())))
        })
        .await?;
        s.driver.unpublish(&handle, &node.name).await?;
        // Its VolumeAttachment is deleted with it, but its finalizer remains until storage-infra has detached the disk.
        s.no_attachments(&node).await?;
        assert!(!device(&node, &disk)?);
        let other = s.node().await?;
        s.driver.publish(&handle, &other.name).await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_single_writer_volume_is_refused_to_a_second_vm_with_the_name_of_the_first() -> Result<()> {
    run(|s| async move {
        let (first, second, handle) = (s.node().await?, s.node().await?, s.volume().await?);
        s.driver.publish(&handle, &first.name).await?;
        let refused = s.driver.publish(&handle, &second.name).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        assert!(refused.message().contains(&first.name), "{refused}");
        let refused = s.driver.delete(&handle).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        assert!(refused.message().contains(&first.name), "{refused}");

        // An entry written without gc-csi is refused by the storage infra.
        let entry = json!({"name": handle, "persistentVolumeClaim": {"claimName": handle}});
        s.add_entry(&second.name, entry).await?;
        let error = eventually("the second VolumeAttachment's error", PATIENCE, || async {
            let attachment = s.attachment(&second.name, &handle).await?;
            let status = attachment.and_then(|attachment| attachment.status).unwrap_or_default();
            assert!(!status.attached);
            Ok(status.error.ok_or_else(|| "no error".to_owned()))
        })
        .await?;
        assert_eq!(error.reason, "VolumeInUse");
        assert!(error.message.contains(&first.name), "{error:?}");
        assert!(std::fs::read_dir(&second.by_id_dir).map_or(true, |mut disks| disks.next().is_none()));

        // After the detach from the first VM, the second one gets the disk.
        s.driver.unpublish(&handle, &first.name).await?;
        let disk = eventually("the second VM's disk", PATIENCE, || async {
            let disk = s.disk(&second.name, &handle).await?;
            Ok(disk.filter(|disk| disk.attached).and_then(|disk| disk.disk_uuid).ok_or("not yet".to_owned()))
        })
        .await?;
        assert!(device(&second, &disk)?);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn entries_of_other_writers_in_a_vms_spec_are_never_lost() -> Result<()> {
    run(|s| async move {
        let node = s.node().await?;
        let mut handles = Vec::new();
        for _ in 0..6 {
            handles.push(s.volume().await?);
        }
        let foreign: Vec<String> = (0..20).map(|number| format!("foreign-{number}")).collect();
        let (other, vm, names) = (s.clone(), node.name.clone(), foreign.clone());
        let writing = tokio::spawn(async move {
            for name in names {
                // A volume type that Nestor does not support, with fields that it does not know.
                let entry = json!({"name": name, "cdrom": {"image": name, "connected": true}});
                other.add_entry(&vm, entry).await?;
            }
            anyhow::Ok(())
        });
        while !writing.is_finished() {
            concurrently(&handles, |handle| {
                let (s, node) = (s.clone(), node.name.clone());
                // The other writer may cause more conflicts than a call retries.
                async move {
                    eventually(&format!("{handle} on {node}"), PATIENCE, || async {
                        let answer = s.driver.publish(&handle, &node).await;
                        Ok(answer.map(drop).map_err(|status| status.to_string()))
                    })
                    .await
                }
            })
            .await?;
            concurrently(&handles, |handle| {
                let (s, node) = (s.clone(), node.name.clone());
                async move {
                    eventually(&format!("{handle} off {node}"), PATIENCE, || async {
                        Ok(s.driver.unpublish(&handle, &node).await.map_err(|status| status.to_string()))
                    })
                    .await
                }
            })
            .await?;
        }
        writing.await??;
        let vm = s.raw_vms().get(&node.name).await?;
        let entries = vm.data["spec"]["volumes"].as_array().cloned().unwrap_or_default();
        for name in &foreign {
            let entry = entries.iter().find(|entry| entry["name"] == json!(name));
            assert_eq!(entry.map(|entry| &entry["cdrom"]["image"]), Some(&json!(name)), "{entries:?}");
        }
        assert_eq!(entries.len(), foreign.len());
        Ok(())
    })
    .await
}

#[tokio::test]
async fn the_spec_of_a_volume_attachment_is_immutable() -> Result<()> {
    run(|s| async move {
        let (node, handle) = (s.node().await?, s.volume().await?);
        s.driver.publish(&handle, &node.name).await?;
        let attachment = names::volume_attachment(&(&node.name).into(), &(&handle).into());
        let patch = kube::api::Patch::Merge(json!({"spec": {"volumeName": "another"}}));
        let refused = s.attachments().patch(&attachment, &Default::default(), &patch).await.unwrap_err();
        assert!(refused.to_string().contains("immutable"), "{refused}");
        let attachment: VolumeAttachment = s.attachments().get(&attachment).await?;
        assert_eq!(attachment.spec.volume_name.as_str(), handle);
        Ok(())
    })
    .await
}

/// Whether the node has a block device for the disk.
fn device(node: &LoopNode, disk: &str) -> Result<bool> {
    use std::os::unix::fs::FileTypeExt;
    let [link, ..] = names::disk_by_id(disk);
    match std::fs::metadata(node.by_id_dir.join(link)) {
        Ok(found) => Ok(found.file_type().is_block_device()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Waits for the condition of a guest claim.
async fn condition(s: &Scenario, claim: &str, status: &str, text: &str) -> Result<()> {
    eventually(&format!("condition {CONDITION}={status} of {claim}"), PATIENCE, || async {
        let conditions = s.guest_claims().get(claim).await?.status.and_then(|status| status.conditions);
        let found = conditions.unwrap_or_default().into_iter().find(|one| one.type_ == CONDITION);
        Ok(match found {
            Some(one) if one.status == status && one.message.as_deref().unwrap_or("").contains(text) => {
                Ok(())
            }
            other => Err(format!("{other:?}")),
        })
    })
    .await
}

/// Runs `act` for all volumes concurrently.
async fn concurrently<F, R>(handles: &[String], act: F) -> Result<()>
where
    F: Fn(String) -> R,
    R: Future<Output = Result<()>> + Send + 'static,
{
    let tasks: Vec<_> = handles.iter().map(|handle| tokio::spawn(act(handle.clone()))).collect();
    for task in tasks {
        tokio::time::timeout(Duration::from_secs(120), task).await???;
    }
    Ok(())
}
