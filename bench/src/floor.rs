//! Floor of the attach benches: the storage infra's own attach and detach, without any cluster.

use std::future::Future;
use std::time::{Duration, Instant};

use anyhow::Result;
use futures::future;
use infra_api::{Access, AttachmentId, AttachmentSpec, Client, VolumeId};
use tests::unique;
use uuid::Uuid;

/// Timeout of the storage infra for one disk.
const LONGEST: Duration = Duration::from_secs(60);

/// Attaches volumes to a node concurrently; returns the attachments and the times.
pub(crate) async fn attach(
    infra: &Client,
    node: Uuid,
    volumes: &[VolumeId],
) -> Result<(Vec<AttachmentId>, Vec<Duration>)> {
    let done = volumes.iter().map(|volume| {
        timed(async move {
            let id = AttachmentId::new(unique("bench"))?;
            let spec =
                AttachmentSpec { volume: volume.clone(), node, read_only: false, access: Access::SingleNode };
            infra.attach(&id, &spec, LONGEST).await?;
            Ok(id)
        })
    });
    Ok(future::try_join_all(done).await?.into_iter().unzip())
}

/// Detaches volumes concurrently; returns the times.
pub(crate) async fn detach(infra: &Client, attachments: &[AttachmentId]) -> Result<Vec<Duration>> {
    let done = attachments.iter().map(|id| timed(async move { Ok(infra.detach(id, LONGEST).await?) }));
    Ok(future::try_join_all(done).await?.into_iter().map(|((), time)| time).collect())
}

/// Runs `work` and returns its duration.
pub(crate) async fn timed<T>(work: impl Future<Output = Result<T>>) -> Result<(T, Duration)> {
    let start = Instant::now();
    let outcome = work.await?;
    Ok((outcome, start.elapsed()))
}
