//! How fast a volume may be: noted, then told to every machine that has it, and only then answered.

use infra_api::{Change, EventKind, Problem, ProblemCode, Qos, Volume, VolumeId, What};

use super::snapshots::ready_volume;
use super::{Failure, Result, Service};

/// The highest limit that QEMU takes.
const MOST: u64 = 1_000_000_000_000_000;

/// A limit of 0 is none; one that no machine could be given is refused.
pub(super) fn checked(qos: Qos) -> Result<Qos> {
    let limit = |name: &str, value: Option<u64>| match value {
        Some(0) => Ok(None),
        Some(value) if value > MOST => Err(Failure::new(
            ProblemCode::Invalid,
            format!("{name} {value} is more than the {MOST} that can be limited to"),
        )),
        value => Ok(value),
    };
    Ok(Qos {
        iops: limit("iops", qos.iops)?,
        bytes_per_second: limit("bytesPerSecond", qos.bytes_per_second)?,
    })
}

impl Service {
    /// Limits how fast a volume may be, live where it is attached.
    pub async fn put_qos(&self, id: VolumeId, qos: Qos) -> Result<Volume> {
        let qos = checked(qos)?;
        let service = self.clone();
        self.unbroken(async move {
            let _lock = service.0.locks.lock(id.as_str()).await;
            let name = id.clone();
            let changed = service
                .0
                .catalog
                .run(move |tx| -> Result<_> {
                    let row = ready_volume(tx, &name)?;
                    let changed = row.qos != qos;
                    if changed {
                        tx.begin_qos(&name, &qos)?;
                    }
                    Ok(changed)
                })
                .await?;
            if changed {
                service.emit(EventKind::Volume, &id, Change::Updated);
                service.note_soon(&id);
            }
            service.finish_qos(&id).await?;
            service.volume(&id).await
        })
        .await
    }

    /// Tells every machine that has a volume how fast that may be, where that is still due.
    pub(super) async fn finish_qos(&self, id: &VolumeId) -> Result<()> {
        let name = id.clone();
        let attachments = self
            .0
            .catalog
            .read(move |tx| -> Result<_> {
                let due = tx.volume(&name)?.is_some_and(|row| row.qos_due);
                due.then(|| Ok(tx.attachments(None, Some(&name))?)).transpose()
            })
            .await?;
        let Some(attachments) = attachments else { return Ok(()) };
        for attachment in &attachments {
            self.throttle_plugged(attachment).await.map_err(|failure| {
                let detail = format!(
                    "the limits of volume {id} are noted, and not kept by every machine yet; repeat: {}",
                    failure.0.detail
                );
                Problem::new(failure.code(), detail).about(What::Volume, id)
            })?;
        }
        let name = id.clone();
        self.0.catalog.run(move |tx| -> Result<_> { Ok(tx.finish_qos(&name)?) }).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_limit_is_none_or_zero_and_what_no_machine_takes_is_refused() {
        let none = checked(Qos { iops: Some(0), bytes_per_second: None }).unwrap();
        assert!(none.is_unlimited());
        let most = Qos { iops: Some(MOST), bytes_per_second: Some(1) };
        assert_eq!(checked(most).unwrap(), most);
        let more = Qos { iops: Some(MOST + 1), bytes_per_second: None };
        assert_eq!(checked(more).unwrap_err().code(), ProblemCode::Invalid);
    }
}
