//! Waiting for conditions.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

const INTERVAL: Duration = Duration::from_millis(50);

/// Polls until `condition` returns something; `None` at the deadline.
pub async fn until<T>(deadline: Duration, mut condition: impl FnMut() -> Option<T>) -> Option<T> {
    let start = Instant::now();
    loop {
        if let Some(found) = condition() {
            return Some(found);
        }
        if start.elapsed() > deadline {
            return None;
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

/// Polls until `condition` returns `Ok(Ok(value))`. `Ok(Err(reason))` means "not yet", and the last reason is reported
/// at the deadline; `Err` ends the wait.
pub async fn eventually<T, F, R>(what: &str, deadline: Duration, mut condition: F) -> Result<T>
where
    F: FnMut() -> R,
    R: Future<Output = Result<Result<T, String>>>,
{
    let start = Instant::now();
    let mut interval = INTERVAL;
    loop {
        let reason = match condition().await? {
            Ok(value) => return Ok(value),
            Err(reason) => reason,
        };
        if start.elapsed() > deadline {
            bail!("{what}: not within {deadline:?}; last observed: {reason}");
        }
        tokio::time::sleep(interval).await;
        interval = (interval * 3 / 2).min(Duration::from_millis(500));
    }
}
