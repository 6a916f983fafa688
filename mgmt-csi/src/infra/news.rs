//! Follows the infra's stream of events, so that nobody has to ask it now and then.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use infra_api::{Event, EventKind};
use tokio_util::sync::CancellationToken;

use super::{StorageInfra, Trouble};

/// The first and the longest pause before the stream is opened again.
const PAUSES: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(4));

/// What there is to know anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum News<'a> {
    /// Anything can have changed: read it all. The first news, and that after each gap.
    Everything,
    /// This has changed.
    One(&'a Event),
}

/// Tells of every change until `stop`. Whoever reads on being told misses nothing: the stream is open by then.
pub async fn follow(infra: Arc<dyn StorageInfra>, tell: impl Fn(News<'_>), stop: CancellationToken) {
    let mut pause = PAUSES.0;
    loop {
        let ended = tokio::select! {
            () = stop.cancelled() => return,
            ended = read(&*infra, &tell, &mut pause) => ended,
        };
        match ended {
            Ok(()) => tracing::debug!("the storage infra ended its stream of events; opening it again"),
            // Said once; `/readyz` goes on saying that the infra is away.
            Err(trouble) if pause == PAUSES.0 => {
                tracing::warn!("no events from the storage infra: {trouble}; trying again");
            }
            Err(trouble) => tracing::debug!("no events from the storage infra: {trouble}"),
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
    tell: &impl Fn(News<'_>),
    pause: &mut Duration,
) -> Result<(), Trouble> {
    let mut events = infra.events().await?;
    *pause = PAUSES.0;
    tell(News::Everything);
    while let Some(event) = events.next().await {
        match event? {
            Event { kind: EventKind::Resync, .. } => tell(News::Everything),
            event => tell(News::One(&event)),
        }
    }
    Ok(())
}
