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
        let Some((hypervisor, context, disk)) = self.reach(row).await? else { return Ok(()) };
        disk_update_result(hypervisor.resize(context.row.node, &disk, bytes).await, &context)
    }

    /// Applies the I/O limits of an attached disk in its VM.
    pub(in crate::service) async fn throttle_attached(&self, row: &AttachmentRow) -> Result<()> {
        let Some((hypervisor, context, disk)) = self.reach(row).await? else { return Ok(()) };
        disk_update_result(hypervisor.throttle(context.row.node, &disk).await, &context)
    }

    async fn reach(
        &self,
        row: &AttachmentRow,
    ) -> Result<Option<(Arc<dyn Hypervisor>, AttachmentContext, Disk)>> {
        let key = row.id.clone();
        let context = self
            .0
            .catalog
            .read(move |tx| -> Result<_> {
                tx.attachment(&key)?.map(|row| AttachmentContext::of(tx, row)).transpose()
            })
            .await?;
        let Some(context) = context else { return Ok(None) };
        let disk = context.disk(self.engine_of(&context.pool).source(&context.volume.id));
        Ok(Some((self.hypervisor(&context.node.spec.hypervisor)?, context, disk)))
    }

    /// Attachments of a node in state attached whose disks its running VM does not have, and the node's name.
    pub(in crate::service) async fn missing_disks(
        &self,
        node: Uuid,
        rows: Vec<AttachmentRow>,
    ) -> Result<(String, Vec<AttachmentRow>)> {
        let row = self.node_row(node).await?;
        let contexts = self
            .0
            .catalog
            .read(move |tx| -> Result<Vec<AttachmentContext>> {
                rows.into_iter().map(|row| AttachmentContext::of(tx, row)).collect()
            })
            .await?;
        let disks: Vec<Disk> =
            contexts.iter().map(|one| one.disk(self.engine_of(&one.pool).source(&one.volume.id))).collect();
        let presence = self.hypervisor(&row.spec.hypervisor)?.presence(node, &disks).await?;
        if !matches!(presence.facts.power, Power::Running { .. }) {
            return Ok((row.spec.name, Vec::new()));
        }
        let gone = |context: &AttachmentContext| !presence.disks.contains(&context.volume.disk_uuid);
        Ok((row.spec.name, contexts.into_iter().filter(gone).map(|context| context.row).collect()))
    }
}

/// Result of an update of an attached disk. An absent disk is not an error: it gets the current values when it is
/// attached.
fn disk_update_result(result: Result<(), HypervisorError>, context: &AttachmentContext) -> Result<()> {
    match result {
        Ok(()) | Err(HypervisorError::NotRunning(_) | HypervisorError::Refused(_)) => Ok(()),
        Err(error) => Err(describe(error, context)),
    }
}
