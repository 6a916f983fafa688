//! I/O limits of volumes: written to the catalog, then applied in every VM that has the volume, and then answered.

use std::sync::Arc;

use infra_api::{MAX_QOS, ObjectKind, Problem, ProblemCode, Qos, Volume, VolumeId};

use super::VolumeChanges;
use crate::catalog::Tx;
use crate::scope::Scope;
use crate::service::lookups::ready_volume;
use crate::service::problems::{Failure, Result};

/// Validates limits; 0 means unlimited.
pub(super) fn validated(qos: Qos) -> Result<Qos> {
    let limit = |name: &str, value: Option<u64>| match value {
        Some(0) => Ok(None),
        Some(value) if value > MAX_QOS => Err(Failure::new(
            ProblemCode::Invalid,
            format!("{name} {value} exceeds the maximum of {MAX_QOS}"),
        )),
        value => Ok(value),
    };
    Ok(Qos {
        iops: limit("iops", qos.iops)?,
        bytes_per_second: limit("bytesPerSecond", qos.bytes_per_second)?,
    })
}

impl VolumeChanges {
    /// Sets a volume's I/O limits, live if it is attached.
    pub async fn set_qos(self: &Arc<Self>, id: VolumeId, qos: Qos) -> Result<Volume> {
        let qos = validated(qos)?;
        let changes = self.clone();
        self.core
            .run_to_completion(async move {
                let _lock = changes.core.lock_volume(&id).await;
                let name = id.clone();
                let set = move |tx: &Tx<'_>| -> Result<_> {
                    let row = ready_volume(tx, &name)?;
                    let changed = row.qos != qos;
                    if changed {
                        tx.begin_qos(&name, &qos)?;
                    }
                    Ok(changed)
                };
                changes.change_row(&id, set).await?;
                changes.finish_qos(&id).await?;
                changes.volumes.get(&Scope::All, &id).await
            })
            .await
    }

    /// Applies a volume's limits in every VM that has it, if that is due.
    pub(in crate::service) async fn finish_qos(&self, id: &VolumeId) -> Result<()> {
        let name = id.clone();
        let attachments = self
            .core
            .catalog()
            .read(move |tx| -> Result<_> {
                let due = tx.volume(&name)?.is_some_and(|row| row.qos_due);
                due.then(|| Ok(tx.attachments(None, Some(&name))?)).transpose()
            })
            .await?;
        let Some(attachments) = attachments else { return Ok(()) };
        for attachment in &attachments {
            self.disks.throttle(attachment).await.map_err(|failure| {
                let detail = format!(
                    "the limits of volume {id} are saved but not yet applied in every VM; retry: {}",
                    failure.0.detail
                );
                Problem::new(failure.code(), detail).about(ObjectKind::Volume, id)
            })?;
        }
        let name = id.clone();
        self.core.catalog().run(move |tx| -> Result<_> { Ok(tx.finish_qos(&name)?) }).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_means_unlimited_and_limits_above_the_maximum_are_refused() {
        let none = validated(Qos { iops: Some(0), bytes_per_second: None }).unwrap();
        assert!(none.is_unlimited());
        let most = Qos { iops: Some(MAX_QOS), bytes_per_second: Some(1) };
        assert_eq!(validated(most).unwrap(), most);
        let more = Qos { iops: Some(MAX_QOS + 1), bytes_per_second: None };
        assert_eq!(validated(more).unwrap_err().code(), ProblemCode::Invalid);
    }
}
