//! Repair: objects that were edited, lost or left over in each tier are repaired, reported or left to an operator.

mod orphans;

use anyhow::{Context, Result, bail};
use crds::names;
use infra_api::{Access, AttachmentId, AttachmentSpec};
use kube::ResourceExt;
use kube::api::PostParams;
use serde_json::{Value, json};
use tests::guest::static_volume;
use tests::program::Controller;
use tests::{PATIENCE, Scenario, eventually, run, unique};

/// Repair grace of the tests' own controllers.
const GRACE: &str = "--repair-grace=2s";

// ---- entries of VMs ----

#[tokio::test]
async fn an_entry_without_a_guest_attachment_is_removed_after_the_grace_and_others_stay() -> Result<()> {
    run(|s| async move {
        let (id, controller) = own_controller(&s, &[]).await?;
        let (node, no_node) = (s.node().await?, s.node().await?);
        for vm in [&node, &no_node] {
            s.assign_vm(&vm.name, &id).await?;
        }
        s.lab.join_guest(&node).await?;
        let own = [(names::LABEL_CLUSTER_ID, id.as_str())];
        let claim = |labels: Vec<(&'static str, String)>| {
            let s = s.clone();
            async move {
                let labels: Vec<(&str, &str)> = labels.iter().map(|(k, v)| (*k, v.as_str())).collect();
                s.management_claim(&labels, json!({})).await
            }
        };
        let own_label = || vec![(names::LABEL_CLUSTER_ID, own[0].1.to_owned())];
        let (stale, attached_entry) = (claim(own_label()).await?, claim(own_label()).await?);
        let (elsewhere, foreign_entry) = (claim(own_label()).await?, claim(Vec::new()).await?);
        let volume = static_volume(&unique(&s.name), &s.name, &attached_entry, &json!({}))?;
        let volume = s.guest_volumes().create(&PostParams::default(), &volume).await?;
        s.k8s_attach(&volume.name_any(), &node.name).await?;
        controller.driver.publish(&attached_entry, &node.name).await?;
        controller.driver.publish(&elsewhere, &no_node.name).await?;
        s.add_entry(&node.name, entry(&foreign_entry)).await?;
        // Attached last, so that its grace ends after that of the others.
        controller.driver.publish(&stale, &node.name).await?;

        has_entries(&s, &node.name, &[&attached_entry, &foreign_entry]).await?;
        let (reason, _) = s.wait_for_event_of("Node", &node.name, &[&stale, "spec.volumes"]).await?;
        assert_eq!(reason, "StaleEntryRemoved");
        eventually("the disk is detached", PATIENCE, || async {
            let disk = s.disk(&node.name, &stale).await?;
            Ok(disk.map_or(Ok(()), |disk| Err(format!("{disk:?}"))))
        })
        .await?;
        has_metric(&controller, "repairs_total{kind=\"stale_entry\"} 1").await?;
        has_entries(&s, &no_node.name, &[&elsewhere]).await?;
        for vm in [&node, &no_node] {
            s.remove_entries(&vm.name, |_| true).await?;
        }
        controller.stop().await
    })
    .await
}

#[tokio::test]
async fn a_lost_entry_with_a_guest_attachment_is_restored() -> Result<()> {
    run(|s| async move {
        let node = s.node().await?;
        let handle = s.bound_claim("data").await?;
        s.lab.join_guest(&node).await?;
        let attachment = s.k8s_attach(&s.bound("data").await?.1.name_any(), &node.name).await?;
        let disk = s.attached(&attachment).await?;
        s.remove_entries(&node.name, |entry| entry["name"] == json!(handle)).await?;
        // Another test's controller sees this guest too, and reports that it cannot restore the entry.
        let (reason, _) = s
            .wait_for_event("data", &["had no entry", &handle, &attachment, "the entry was restored"])
            .await?;
        assert_eq!(reason, "LostEntryRestored");
        is_attached(&s, &node.name, &handle, &disk).await?;
        let metrics = s.lab.metrics("g1-gc-csi").await?;
        let repairs = value(&metrics, "nestor_gc_csi_repairs_total{kind=\"lost_entry\"}")?;
        assert!(repairs >= 1, "{metrics}");
        s.k8s_detach(&attachment).await?;
        has_entries(&s, &node.name, &[]).await
    })
    .await
}

#[tokio::test]
async fn an_entry_is_restored_although_another_vm_has_one_and_only_one_vm_gets_the_disk() -> Result<()> {
    run(|s| async move {
        let (node, other) = (s.node().await?, s.node().await?);
        let handle = s.bound_claim("data").await?;
        s.lab.join_guest(&node).await?;
        let attachment = s.k8s_attach(&s.bound("data").await?.1.name_any(), &node.name).await?;
        let disk = s.attached(&attachment).await?;
        s.add_entry(&other.name, entry(&handle)).await?;
        // The other VM waits for the disk.
        eventually(&format!("{handle} refused to {}", other.name), PATIENCE, || async {
            let attachment =
                s.attachment(&other.name, &handle).await?.and_then(|attachment| attachment.status);
            let is_refused = attachment.as_ref().is_some_and(|status| status.error.is_some());
            Ok(if is_refused { Ok(()) } else { Err(format!("{attachment:?}")) })
        })
        .await?;
        s.remove_entries(&node.name, |entry| entry["name"] == json!(handle)).await?;
        assert_eq!(
            s.wait_for_event("data", &["had no entry", &handle, "the entry was restored"]).await?.0,
            "LostEntryRestored"
        );
        // The disk was detached for a moment, so either VM may have it; a second writer is refused.
        let holder =
            eventually(&format!("{handle} is attached to one VM and refused to the other"), PATIENCE, || {
                holder(&s, &handle, [&node, &other])
            })
            .await?;
        is_attached(&s, &holder, &handle, &disk).await?;
        if holder == other.name {
            s.wait_for_event("data", &["VirtualMachine", &node.name, "VolumeInUse"]).await?;
        }
        // After an operator has removed the other entry, the disk is attached again.
        s.remove_entries(&other.name, |entry| entry["name"] == json!(handle)).await?;
        is_attached(&s, &node.name, &handle, &disk).await?;
        s.k8s_detach(&attachment).await
    })
    .await
}

/// The one of two VMs with an entry for a volume that has its disk, when the other is refused.
async fn holder(s: &Scenario, handle: &str, vms: [&lab::LoopNode; 2]) -> Result<Result<String, String>> {
    let volume = s.infra_volume(handle).await?.id;
    let plugged = s.infra.list_attachments(None, Some(&volume)).await?;
    let [one] = &plugged[..] else { return Ok(Err(format!("{plugged:?}"))) };
    let has_it = |vm: &&lab::LoopNode| one.node.to_string() == vm.uuid.to_string();
    let (holder, waiting): (Vec<_>, Vec<_>) = vms.into_iter().partition(has_it);
    let ([holder], [waiting]) = (&holder[..], &waiting[..]) else { bail!("{one:?} is of neither VM") };
    let status = async |vm: &lab::LoopNode| -> Result<_> {
        Ok(s.attachment(&vm.name, handle).await?.and_then(|one| one.status).unwrap_or_default())
    };
    let (attached, refused) = (status(holder).await?, status(waiting).await?);
    let is_refused = refused.error.as_ref().is_some_and(|error| error.reason == "VolumeInUse");
    Ok(if attached.attached && is_refused {
        Ok(holder.name.clone())
    } else {
        Err(format!("{attached:?}, {refused:?}"))
    })
}

// ---- attachments of the storage infra ----

#[tokio::test]
async fn a_disk_that_the_infra_lost_is_attached_again() -> Result<()> {
    run(|s| async move {
        let (node, handle) = (s.node().await?, s.volume().await?);
        let disk = s.driver.publish(&handle, &node.name).await?;
        let before = s.infra.list_attachments(Some(node.uuid.to_string().parse()?), None).await?;
        let lost = before.first().context("the storage infra has no attachment")?;
        s.infra.detach(&lost.id, PATIENCE).await?;
        let reason = s.wait_for_management_event(&handle, &["lost the attachment"]).await?;
        assert_eq!(reason, "AttachmentLost");
        eventually("the disk is attached again", PATIENCE, || async {
            let now = s.infra.list_attachments(Some(lost.node), None).await?;
            let is_there = now.iter().any(|one| one.state == infra_api::AttachmentState::Attached);
            Ok(if is_there { Ok(()) } else { Err(format!("{now:?}")) })
        })
        .await?;
        is_attached(&s, &node.name, &handle, &disk).await?;
        let metrics = s.lab.metrics("mgmt-csi").await?;
        let repairs = value(&metrics, "nestor_mgmt_csi_repairs_total{kind=\"lost_attachment\"}")?;
        assert!(repairs >= 1, "{metrics}");
        s.driver.unpublish(&handle, &node.name).await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_dangling_attachment_is_detached_unless_it_may_be_in_use() -> Result<()> {
    run(|s| async move {
        let node = s.node().await?;
        let (left, requested, by_hand) = (s.volume().await?, s.volume().await?, s.volume().await?);
        // Left over if a VolumeAttachment is deleted without its finalizer.
        let leftover = |name: &str| format!("{}.{name}.{}", s.namespace, uuid::Uuid::new_v4());
        let dangling = attach_in_infra(&s, &leftover(&unique("gone")), &left, &node).await?;
        let again = attach_in_infra(&s, &leftover(&unique("gone")), &requested, &node).await?;
        // Added before the grace ends.
        s.add_entry(&node.name, entry(&requested)).await?;
        let foreign = attach_in_infra(&s, &unique("somebody"), &by_hand, &node).await?;

        let reason = s.wait_for_management_event(&left, &["no VolumeAttachment", "detached"]).await?;
        assert_eq!(reason, "DanglingAttachmentRemoved");
        assert_eq!(
            s.wait_for_management_event(&requested, &["left alone", "AttachmentRecreated"]).await?,
            "DanglingAttachment"
        );
        assert_eq!(
            s.wait_for_management_event(&by_hand, &["left alone", "NotManaged"]).await?,
            "DanglingAttachment"
        );
        let there = s.infra.list_attachments(Some(node.uuid.to_string().parse()?), None).await?;
        let there: Vec<&AttachmentId> = there.iter().map(|one| &one.id).collect();
        assert!(!there.contains(&&dangling), "{there:?}");
        assert!(there.contains(&&again) && there.contains(&&foreign), "{there:?}");
        let metrics = s.lab.metrics("mgmt-csi").await?;
        assert!(
            value(&metrics, "nestor_mgmt_csi_repairs_total{kind=\"dangling_attachment\"}")? >= 1,
            "{metrics}"
        );
        assert!(value(&metrics, "nestor_mgmt_csi_dangling_attachments")? >= 2, "{metrics}");

        // After a manual detach, the VolumeAttachment is served.
        s.infra.detach(&again, PATIENCE).await?;
        s.infra.detach(&foreign, PATIENCE).await?;
        let disk = s.infra_volume(&requested).await?.disk_uuid.to_string();
        is_attached(&s, &node.name, &requested, &disk).await
    })
    .await
}

// ---- helpers ----

/// Starts a controller with its own cluster ID and a short grace.
async fn own_controller(s: &Scenario, flags: &[&str]) -> Result<(String, Controller)> {
    let id = unique(&s.name);
    let controller = Controller::start_as(s, &id, &[&[GRACE], flags].concat()).await?;
    Ok((id, controller))
}

fn entry(claim: &str) -> Value {
    json!({"name": claim, "persistentVolumeClaim": {"claimName": claim}})
}

/// Waits until a VM has exactly these entries.
async fn has_entries(s: &Scenario, vm: &str, expected: &[&String]) -> Result<()> {
    let mut expected: Vec<String> = expected.iter().map(|name| (*name).clone()).collect();
    expected.sort_unstable();
    eventually(&format!("{vm} has entries {expected:?}"), PATIENCE, || async {
        let volumes = s.vms().get(vm).await?.spec.volumes;
        let mut names: Vec<String> = volumes.into_iter().map(|entry| entry.name).collect();
        names.sort_unstable();
        Ok(if names == expected { Ok(()) } else { Err(format!("{names:?}")) })
    })
    .await
}

/// Waits until a VM has the disk, in the VolumeAttachment's and the VM's status.
async fn is_attached(s: &Scenario, vm: &str, handle: &str, disk: &str) -> Result<()> {
    eventually(&format!("{handle} attached to {vm}"), PATIENCE, || async {
        let shown = s.disk(vm, handle).await?;
        let attachment = s.attachment(vm, handle).await?.and_then(|one| one.status);
        let matches = shown.as_ref().is_some_and(|shown| shown.attached)
            && attachment.as_ref().is_some_and(|status| status.attached)
            && shown.as_ref().and_then(|shown| shown.disk_uuid.as_deref()) == Some(disk);
        Ok(if matches { Ok(()) } else { Err(format!("{shown:?}, {attachment:?}")) })
    })
    .await
}

/// Attaches the volume of a management claim to a node with a request to storage-infra only.
async fn attach_in_infra(s: &Scenario, id: &str, claim: &str, node: &lab::LoopNode) -> Result<AttachmentId> {
    let id = AttachmentId::new(id)?;
    let volume = s.infra_volume(claim).await?.id;
    let node = node.uuid.to_string().parse()?;
    let spec = AttachmentSpec { volume, node, read_only: false, access: Access::SingleNode };
    s.infra.attach(&id, &spec, PATIENCE).await?;
    Ok(id)
}

/// Waits for a line in a controller's metrics.
async fn has_metric(controller: &Controller, line: &str) -> Result<()> {
    let line = format!("nestor_gc_csi_{line}");
    eventually(&format!("the metric {line}"), PATIENCE, || async {
        let (_, metrics) = controller.process.get("/metrics").await?;
        Ok(metrics.lines().any(|one| one == line).then_some(()).ok_or(metrics))
    })
    .await
}

fn value(metrics: &str, name: &str) -> Result<u64> {
    let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    Ok(line.with_context(|| format!("no metric {name}"))?.parse()?)
}
