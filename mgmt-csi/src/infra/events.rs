//! Event subscription of the storage infra: one stream for all components, reopened when it breaks.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use infra_api::{Event, EventKind};
use tokio_util::sync::CancellationToken;

use super::{Indeterminate, StorageInfra};

/// First and maximum delay before the stream is reopened.
const PAUSES: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(4));

/// What changed in the storage infra.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InfraEvent<'a> {
    /// Anything may have changed: list everything. Sent first, and after each gap in the stream.
    Resync,
    /// One object changed.
    Object(&'a Event),
}

/// Calls `handler` for every change until `stop`. The stream is open before the first call, so a handler that lists on it misses
/// no change.
pub async fn subscribe(
    infra: Arc<dyn StorageInfra>,
    handler: impl Fn(InfraEvent<'_>),
    stop: CancellationToken,
) {
    let mut pause = PAUSES.0;
    loop {
        let ended = tokio::select! {
            () = stop.cancelled() => return,
            ended = read(&*infra, &handler, &mut pause) => ended,
        };
        match ended {
            Ok(()) => tracing::debug!("the storage infra closed its event stream; reopening it"),
            // Logged once; `/readyz` shows that the storage infra is unreachable.
            Err(error) if pause == PAUSES.0 => {
                tracing::warn!("no events from the storage infra: {error}; retrying");
            }
            Err(error) => tracing::debug!("no events from the storage infra: {error}"),
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(pause.mul_f64(0.5 + fastrand::f64() / 2.0)) => {}
        }
        pause = (2 * pause).min(PAUSES.1);
    }
}

async fn read(
    infra: &dyn StorageInfra,
    handler: &impl Fn(InfraEvent<'_>),
    pause: &mut Duration,
) -> Result<(), Indeterminate> {
    let mut events = infra.events().await?;
    *pause = PAUSES.0;
    handler(InfraEvent::Resync);
    while let Some(event) = events.next().await {
        match event? {
            Event { kind: EventKind::Resync, .. } => handler(InfraEvent::Resync),
            event => handler(InfraEvent::Object(&event)),
        }
    }
    Ok(())
}
