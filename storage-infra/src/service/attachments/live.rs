//! Attached disks: size, limits and presence.

use std::sync::Arc;

use uuid::Uuid;

use super::{AttachmentContext, describe};
use crate::catalog::AttachmentRow;
use crate::hypervisor::{Disk, Hypervisor, HypervisorError, Power};
use crate::service::{Result, Service};

impl Service {
    /// Resizes an attached disk in its VM.
    pub(in crate::service) async fn resize_attached(&self, row: &AttachmentRow, bytes: u64) -> Result<()> {
        let Some((hypervisor, parts, disk)) = self.reach(row).await? else { return Ok(()) };
        disk_update_result(hypervisor.resize(parts.row.node, &disk, bytes).await, &parts)
    }

    /// Applies the I/O limits of an attached disk in its VM.
    pub(in crate::service) async fn throttle_attached(&self, row: &AttachmentRow) -> Result<()> {
        let Some((hypervisor, parts, disk)) = self.reach(row).await? else { return Ok(()) };
        disk_update_result(hypervisor.throttle(parts.row.node, &disk).await, &parts)
    }

    async fn reach(
        &self,
        row: &AttachmentRow,
    ) -> Result<Option<(Arc<dyn Hypervisor>, AttachmentContext, Disk)>> {
        let key = row.id.clone();
        let parts = self
            .0
            .catalog
            .read(move |tx| -> Result<_> {
                tx.attachment(&key)?.map(|row| AttachmentContext::of(tx, row)).transpose()
            })
            .await?;
        let Some(parts) = parts else { return Ok(None) };
        let disk = parts.disk(self.engine_of(&parts.pool).source(&parts.volume.id));
        Ok(Some((self.hypervisor(&parts.node.spec.hypervisor)?, parts, disk)))
    }

    /// Attachments of a node in state attached whose disks its running VM does not have, and the node's name.
    pub(in crate::service) async fn missing_disks(
        &self,
        node: Uuid,
        rows: Vec<AttachmentRow>,
    ) -> Result<(String, Vec<AttachmentRow>)> {
        let row = self.node_row(node).await?;
        let parts = self
            .0
            .catalog
            .read(move |tx| -> Result<Vec<AttachmentContext>> {
                rows.into_iter().map(|row| AttachmentContext::of(tx, row)).collect()
            })
            .await?;
        let disks: Vec<Disk> =
            parts.iter().map(|p| p.disk(self.engine_of(&p.pool).source(&p.volume.id))).collect();
        let presence = self.hypervisor(&row.spec.hypervisor)?.presence(node, &disks).await?;
        if !matches!(presence.facts.power, Power::Running { .. }) {
            return Ok((row.spec.name, Vec::new()));
        }
        let gone = |parts: &AttachmentContext| !presence.disks.contains(&parts.volume.disk_uuid);
        Ok((row.spec.name, parts.into_iter().filter(gone).map(|parts| parts.row).collect()))
    }
}

/// Result of an update of an attached disk. An absent disk is not an error: it gets the current values when it is
/// attached.
fn disk_update_result(result: Result<(), HypervisorError>, parts: &AttachmentContext) -> Result<()> {
    match result {
        Ok(()) | Err(HypervisorError::NotRunning(_) | HypervisorError::Refused(_)) => Ok(()),
        Err(error) => Err(describe(error, parts)),
    }
}
