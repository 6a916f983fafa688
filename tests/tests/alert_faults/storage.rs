//! Faults around storage-infra: of its backups, a hypervisor and VMs.

use anyhow::{Context, Result, ensure};
use infra_api::{Access, AttachmentId, AttachmentSpec, Labels, NodeSpec};
use lab::vm::virsh;
use tests::hypervisor::HaltedNode;
use tests::{PATIENCE, eventually, unique};
use uuid::Uuid;

use super::faults::Watch;
use crate::alerts::site::Site;

const LIBVIRT: &str = "libvirtd";

/// A file is where the folder of the backups was.
pub(super) async fn cannot_be_backed_up(site: &Site, alerts: &Watch<'_>) -> Result<()> {
    let backups = site.s.lab.dir().join("infra/backups");
    let away = backups.with_extension("away");
    std::fs::rename(&backups, &away).with_context(|| format!("cannot rename {}", backups.display()))?;
    std::fs::write(&backups, "")?;
    let fired = alerts.fire().await;
    std::fs::remove_file(&backups)?;
    std::fs::rename(&away, &backups)?;
    fired
}

/// libvirtd is killed, and a disk of one of its VMs is requested; its VMs continue to run.
pub(super) async fn loses_a_hypervisor(site: &Site, alerts: &Watch<'_>) -> Result<()> {
    let s = &site.s;
    let (node, name) = (Uuid::new_v4(), unique(&s.name));
    let spec =
        NodeSpec { name, hypervisor: lab::infra::LIBVIRT.to_owned(), zone: None, labels: Labels::default() };
    s.infra.put_node(node, &spec).await?;
    let volume = s.infra_volume(&s.volume().await?).await?.id;
    let (id, access) = (AttachmentId::new(unique("requested"))?, Access::SingleNode);
    let spec = AttachmentSpec { volume, node, read_only: false, access };
    s.kill_component(LIBVIRT).await?;
    alerts
        .fire_while(|| async {
            let refused = s.infra.attach(&id, &spec, PATIENCE).await;
            ensure!(refused.is_err(), "a disk was attached without libvirt");
            Ok(())
        })
        .await?;
    s.start_component(LIBVIRT).await?;
    eventually("libvirt responds", PATIENCE, || async {
        Ok(virsh(s.lab.run(), ["version"]).await.map(drop).map_err(|error| format!("{error:#}")))
    })
    .await?;
    s.infra.detach(&id, PATIENCE).await?;
    Ok(s.infra.delete_node(node).await?)
}

/// A VM hangs, and its node is out of service.
pub(super) async fn fences(site: &Site, alerts: &Watch<'_>) -> Result<()> {
    let s = &site.s;
    let (node, handle) = (s.node().await?, s.volume().await?);
    s.lab.join_guest(&node).await?;
    s.driver.publish(&handle, &node.name).await?;
    let hung = HaltedNode::paused(&node)?;
    s.set_out_of_service_taint(&node.name, true).await?;
    eventually("a forced detach", PATIENCE, || async {
        Ok(s.driver.unpublish(&handle, &node.name).await.map_err(|status| status.to_string()))
    })
    .await?;
    alerts.fire().await?;
    drop(hung);
    s.set_out_of_service_taint(&node.name, false).await
}
