//! Event subscription of the storage infra: one stream for all components, reopened when it breaks.

use std::sync::Arc;
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use futures::StreamExt;
use infra_api::{Event, EventKind};
use tokio_util::sync::CancellationToken;

use super::error::Indeterminate;
use super::storage_infra::StorageInfra;

/// First and maximum delay before the stream is reopened; jitter at most doubles them.
const DELAYS: (Duration, Duration) = (Duration::from_millis(125), Duration::from_secs(2));

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
    let (mut delays, mut is_reported) = (delays(), false);
    loop {
        let mut has_opened = false;
        let ended = tokio::select! {
            () = stop.cancelled() => return,
            ended = read(&*infra, &handler, &mut has_opened) => ended,
        };
        if has_opened {
            (delays, is_reported) = (self::delays(), false);
        }
        match ended {
            Ok(()) => tracing::debug!("the storage infra closed its event stream; reopening it"),
            // Logged once; `/readyz` shows that the storage infra is unreachable.
            Err(error) if !is_reported => {
                tracing::warn!("no events from the storage infra: {error}; retrying");
                is_reported = true;
            }
            Err(error) => tracing::debug!("no events from the storage infra: {error}"),
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(delays.next().unwrap_or(DELAYS.1)) => {}
        }
    }
}

fn delays() -> impl Iterator<Item = Duration> {
    ExponentialBuilder::new()
        .with_min_delay(DELAYS.0)
        .with_max_delay(DELAYS.1)
        .without_max_times()
        .with_jitter()
        .build()
}

async fn read(
    infra: &dyn StorageInfra,
    handler: &impl Fn(InfraEvent<'_>),
    has_opened: &mut bool,
) -> Result<(), Indeterminate> {
    let mut events = infra.events().await?;
    *has_opened = true;
    handler(InfraEvent::Resync);
    while let Some(event) = events.next().await {
        match event? {
            Event { kind: EventKind::Resync, .. } => handler(InfraEvent::Resync),
            event => handler(InfraEvent::Object(&event)),
        }
    }
    Ok(())
}
