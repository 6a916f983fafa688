//! Waiting for conditions, never for time.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

const PACE: Duration = Duration::from_millis(50);

/// Looks until `condition` gives something; `None` when the deadline came first.
pub async fn until<T>(deadline: Duration, mut condition: impl FnMut() -> Option<T>) -> Option<T> {
    let start = Instant::now();
    loop {
        if let Some(found) = condition() {
            return Some(found);
        }
        if start.elapsed() > deadline {
            return None;
        }
        tokio::time::sleep(PACE).await;
    }
}

/// Asks until `condition` gives `Ok(Ok(value))`. `Ok(Err(reason))` is "not yet", and the last reason is told when the
/// deadline passes; `Err` ends the wait.
pub async fn eventually<T, F, R>(what: &str, deadline: Duration, mut condition: F) -> Result<T>
where
    F: FnMut() -> R,
    R: Future<Output = Result<Result<T, String>>>,
{
    let start = Instant::now();
    let mut pace = PACE;
    loop {
        let reason = match condition().await? {
            Ok(value) => return Ok(value),
            Err(reason) => reason,
        };
        if start.elapsed() > deadline {
            bail!("{what}: not within {deadline:?}; last seen: {reason}");
        }
        tokio::time::sleep(pace).await;
        pace = (pace * 3 / 2).min(Duration::from_millis(500));
    }
}
