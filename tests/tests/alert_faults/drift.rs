//! Drift between the tiers: what is removed or added behind the back of a program, and repaired by it or not.

use std::collections::HashMap;
use std::os::unix::fs::symlink;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use infra_api::{Access, AttachmentId, AttachmentSpec, AttachmentState};
use kube::ResourceExt;
use kube::api::DeleteParams;
use lab::LoopNode;
use lab::process::{command, run};
use tests::bytes::device;
use tests::driver::new_volume;
use tests::{MIB, PATIENCE, eventually, unique};

use super::faults::Watch;
use crate::alerts::site::Site;

/// More than the rules tolerate.
const MANY: usize = 7;

/// A gc-csi has the policy to delete its guest's claims with the Cluster object, which does not exist, and the volumes of
/// these claims are gone.
pub(super) async fn orphans(site: &Site, alerts: &Watch<'_>) -> Result<()> {
    let namespace = site.s.own_namespace().await?;
    let guest = site.s.tenant(&namespace).await?;
    let policy = format!("--cluster-object={}", guest.name);
    let flags = ["--on-guest-deletion=Delete", &policy, "--repair-grace=1s"];
    let gc_csi = guest.start(&site.s, &flags).await?;
    let address = gc_csi.process.address();
    site.prometheus.add_target("gc-csi-controller", &address, &[("guest", &guest.name)])?;
    // The growth is the difference to an earlier number, which must have been scraped.
    let earlier = format!("nestor_gc_csi_orphaned_claims{{guest=\"{}\"}} offset 15s", guest.name);
    site.prometheus.has(&earlier).await?;
    let claims = try_join_all((0..MANY).map(|_| async {
        let name = unique(&site.s.name);
        let mut request = new_volume(&name, 4 * MIB, "nestor");
        // The name of a guest volume that never appears.
        request.parameters.extend(HashMap::from([("csi.storage.k8s.io/pv/name".to_owned(), name)]));
        anyhow::Ok(gc_csi.driver.create(request).await?.volume_id)
    }))
    .await?;
    alerts.fire().await?;
    let cluster = namespace.cluster(&guest.name, &[]).await?.uid().context("no UID")?;
    for claim in &claims {
        namespace.owned(claim, &cluster, true).await?;
        gc_csi.driver.delete(claim).await?;
    }
    let none = format!("nestor_gc_csi_orphaned_claims{{guest=\"{}\"}} == 0", guest.name);
    site.prometheus.has(&none).await?;
    namespace.delete_cluster(&guest.name, &DeleteParams::background()).await?;
    site.prometheus.remove_target("gc-csi-controller", &address)?;
    gc_csi.stop().await
}

/// Somebody removes the entries of a VM that the guest needs.
pub(super) async fn entries_are_removed(site: &Site, alerts: &Watch<'_>) -> Result<()> {
    let s = &site.s;
    let node = s.node().await?;
    s.lab.join_guest(&node).await?;
    let attachments = try_join_all((0..MANY).map(|number| {
        let (name, node) = (format!("entry-{number}"), &node.name);
        async move {
            s.bound_claim(&name).await?;
            let attachment = s.k8s_attach(&s.bound(&name).await?.1.name_any(), node).await?;
            s.attached(&attachment).await?;
            anyhow::Ok(attachment)
        }
    }))
    .await?;
    s.remove_entries(&node.name, |_| true).await?;
    alerts.fire().await?;
    try_join_all(attachments.iter().map(|attachment| s.k8s_detach(attachment))).await.map(drop)
}

/// Somebody removes an attachment of the storage infra that the management cluster needs.
pub(super) async fn attachments_are_removed(site: &Site, alerts: &Watch<'_>) -> Result<()> {
    let s = &site.s;
    let (node, handle) = (s.node().await?, s.volume().await?);
    s.driver.publish(&handle, &node.name).await?;
    alerts
        .fire_while(|| async {
            let id = attached(site, &node).await?;
            s.infra.detach(&id, PATIENCE).await?;
            attached(site, &node).await.map(drop)
        })
        .await?;
    s.driver.unpublish(&handle, &node.name).await?;
    Ok(())
}

/// Waits until the storage infra has an attached disk of a node; returns its attachment.
async fn attached(site: &Site, node: &LoopNode) -> Result<AttachmentId> {
    eventually(&format!("a disk of {}", node.name), PATIENCE, || async {
        let all = site.s.infra.list_attachments(Some(node.uuid), None).await?;
        let found = all.iter().find(|one| one.state == AttachmentState::Attached);
        Ok(found.map(|one| one.id.clone()).ok_or_else(|| format!("{all:?}")))
    })
    .await
}

/// Somebody attaches a disk with a request to storage-infra.
pub(super) async fn an_attachment_dangles(site: &Site, alerts: &Watch<'_>) -> Result<()> {
    let s = &site.s;
    let (node, handle) = (s.node().await?, s.volume().await?);
    let (id, volume) = (AttachmentId::new(unique("somebody"))?, s.infra_volume(&handle).await?.id);
    let spec = AttachmentSpec { volume, node: node.uuid, read_only: false, access: Access::SingleNode };
    s.infra.attach(&id, &spec, PATIENCE).await?;
    alerts.fire().await?;
    Ok(s.infra.detach(&id, PATIENCE).await?)
}

/// Disks are gone from a running VM.
pub(super) async fn disks_are_lost(site: &Site, alerts: &Watch<'_>) -> Result<()> {
    let s = &site.s;
    let node = s.node().await?;
    let attached = try_join_all((0..MANY).map(|_| async {
        let handle = s.volume().await?;
        let disk = s.driver.publish(&handle, &node.name).await?;
        anyhow::Ok((handle, device(&node, &disk)))
    }))
    .await?;
    for (_, disk) in &attached {
        detach_device(disk).await?;
    }
    alerts.fire().await?;
    for (handle, disk) in &attached {
        ensure!(disk.exists(), "the disk of {handle} is not attached again");
        s.driver.unpublish(handle, &node.name).await?;
    }
    Ok(())
}

/// Detaches a loop device without storage-infra.
async fn detach_device(link: &Path) -> Result<()> {
    let device = std::fs::canonicalize(link)?;
    std::fs::remove_file(link)?;
    run(command("losetup", ["--detach"]).arg(device)).await.map(drop)
}

/// Somebody attaches a volume's file to a VM, without storage-infra and with another serial.
pub(super) async fn a_disk_is_unexpected(site: &Site, alerts: &Watch<'_>) -> Result<()> {
    let s = &site.s;
    let (node, handle) = (s.node().await?, s.volume().await?);
    let file = s.file_of(&s.infra_volume(&handle).await?).await?;
    let device = run(command("losetup", ["--find", "--show"]).arg(&file)).await?;
    std::fs::create_dir_all(&node.by_id_dir)?;
    let link = node.by_id_dir.join("wwn-0x0123456789abcdef");
    symlink(device.trim(), &link)?;
    alerts.fire().await?;
    detach_device(&link).await
}
