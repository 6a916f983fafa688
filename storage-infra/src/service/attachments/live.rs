//! Disks that are plugged: their size, their speed, and whether they are still there.

use std::sync::Arc;

use uuid::Uuid;

use super::{Parts, describe};
use crate::catalog::AttachmentRow;
use crate::hypervisor::{Disk, Hypervisor, HypervisorError, Power};
use crate::service::{Result, Service};

impl Service {
    /// Tells a virtual machine that its disk has grown.
    pub(in crate::service) async fn resize_plugged(&self, row: &AttachmentRow, bytes: u64) -> Result<()> {
        let Some((hypervisor, parts, disk)) = self.reach(row).await? else { return Ok(()) };
        told(hypervisor.resize(parts.row.node, &disk, bytes).await, &parts)
    }

    /// Makes a virtual machine keep to its disk's limits.
    pub(in crate::service) async fn throttle_plugged(&self, row: &AttachmentRow) -> Result<()> {
        let Some((hypervisor, parts, disk)) = self.reach(row).await? else { return Ok(()) };
        told(hypervisor.throttle(parts.row.node, &disk).await, &parts)
    }

    async fn reach(&self, row: &AttachmentRow) -> Result<Option<(Arc<dyn Hypervisor>, Parts, Disk)>> {
        let key = row.id.clone();
        let parts = self
            .0
            .catalog
            .read(move |tx| -> Result<_> { tx.attachment(&key)?.map(|row| Parts::of(tx, row)).transpose() })
            .await?;
        let Some(parts) = parts else { return Ok(None) };
        let disk = parts.disk(self.engine_of(&parts.pool).source(&parts.volume.id));
        Ok(Some((self.hypervisor(&parts.node.spec.hypervisor)?, parts, disk)))
    }

    /// The attachments of a node that the catalog calls attached and whose disks its running machine does not have,
    /// and the node's name.
    pub(in crate::service) async fn missing(
        &self,
        node: Uuid,
        rows: Vec<AttachmentRow>,
    ) -> Result<(String, Vec<AttachmentRow>)> {
        let row = self.node_row(node).await?;
        let parts = self
            .0
            .catalog
            .read(move |tx| -> Result<Vec<Parts>> {
                rows.into_iter().map(|row| Parts::of(tx, row)).collect()
            })
            .await?;
        let disks: Vec<Disk> =
            parts.iter().map(|p| p.disk(self.engine_of(&p.pool).source(&p.volume.id))).collect();
        let presence = self.hypervisor(&row.spec.hypervisor)?.presence(node, &disks).await?;
        if !matches!(presence.facts.power, Power::Running { .. }) {
            return Ok((row.spec.name, Vec::new()));
        }
        let gone = |parts: &Parts| !presence.disks.contains(&parts.volume.disk_uuid);
        Ok((row.spec.name, parts.into_iter().filter(gone).map(|parts| parts.row).collect()))
    }
}

/// How telling a virtual machine about its disk ended. Fine where the disk turns out not to be plugged: whoever plugs
/// it next sees how it is.
fn told(result: Result<(), HypervisorError>, parts: &Parts) -> Result<()> {
    match result {
        Ok(()) | Err(HypervisorError::NotRunning(_) | HypervisorError::Refused(_)) => Ok(()),
        Err(error) => Err(describe(error, parts)),
    }
}
