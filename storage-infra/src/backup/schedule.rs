//! Scheduled backups of a running server. A failure is logged and counted, and never stops the server.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use jiff::Timestamp;
use tokio_util::sync::CancellationToken;

use super::file::{Backup, name_at, origin, write};
use super::retention;
use crate::engine::file::private_dir;
use crate::metrics::BackupMetrics;

/// Maximum wait after a failed backup.
const RETRY: Duration = Duration::from_secs(60);

/// When to back up, and how many backups to keep.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// Directory of the backups.
    pub dir: PathBuf,
    /// Time between two backups.
    pub interval: Duration,
    /// Number of backups to keep.
    pub keep: usize,
}

impl Schedule {
    /// Wait until the first backup: the previous server may have made one recently.
    fn first_wait(&self, last: Option<Timestamp>, now: Timestamp) -> Duration {
        // A time in the future shows that the clock was set back.
        let age = last.and_then(|last| Duration::try_from(now.duration_since(last)).ok());
        age.map_or(Duration::ZERO, |age| self.interval.saturating_sub(age))
    }

    fn retry(&self) -> Duration {
        self.interval.min(RETRY)
    }
}

/// Backs up the catalog by schedule until stopped.
pub async fn run(data_dir: PathBuf, schedule: Schedule, metrics: BackupMetrics, stop: CancellationToken) {
    metrics.schedule(schedule.interval);
    let last = {
        let (data_dir, dir) = (data_dir.clone(), schedule.dir.clone());
        blocking(&stop, move || Ok(last(&data_dir, &dir))).await
    };
    let last = last.and_then(Result::ok).flatten();
    metrics.last_success(last);
    let mut wait = schedule.first_wait(last, Timestamp::now());
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(wait) => {}
        }
        let (data_dir, of) = (data_dir.clone(), schedule.clone());
        let Some(done) = blocking(&stop, move || back_up(&data_dir, &of)).await else { return };
        wait = report(&schedule, &metrics, done);
    }
}

/// Runs work that may block for long. `None` if the server stops meanwhile: the backup filesystem may hang.
async fn blocking<T: Send + 'static>(
    stop: &CancellationToken,
    work: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
) -> Option<anyhow::Result<T>> {
    tokio::select! {
        () = stop.cancelled() => None,
        done = tokio::task::spawn_blocking(work) => {
            Some(done.unwrap_or_else(|error| Err(anyhow::anyhow!("the backup was aborted: {error}"))))
        }
    }
}

/// Time of the newest backup by its name.
fn last(data_dir: &Path, dir: &Path) -> Option<Timestamp> {
    let origin = origin(data_dir, Timestamp::now(), true).ok()?;
    retention::list(dir, &origin).ok()?.last().map(|found| found.time)
}

/// A backup, how long it took, and how many old ones were removed.
type Done = (Backup, Duration, anyhow::Result<usize>);

fn back_up(data_dir: &Path, schedule: &Schedule) -> anyhow::Result<Done> {
    let (start, now) = (Instant::now(), Timestamp::now());
    let dir = &schedule.dir;
    private_dir(dir).with_context(|| format!("--backup-dir: cannot create {}", dir.display()))?;
    let origin = origin(data_dir, now, true)?;
    retention::remove_partial(dir, &origin).with_context(|| {
        format!("--backup-dir: cannot remove an incomplete backup from {}", dir.display())
    })?;
    let made = write(data_dir, &dir.join(name_at(&retention::prefix(&origin), now)), now, true)?;
    let took = start.elapsed();
    let removed = retention::apply(dir, &made, schedule.keep);
    Ok((made, took, removed))
}

/// Logs and counts the outcome of a backup. Returns the wait until the next one.
fn report(schedule: &Schedule, metrics: &BackupMetrics, done: anyhow::Result<Done>) -> Duration {
    match done {
        Ok((made, took, removed)) => {
            let (file, volumes) = (made.file.display(), made.summary.volumes);
            tracing::info!(%file, bytes = made.bytes, volumes, "backed up the catalog");
            metrics.succeeded(Timestamp::now(), took, made.bytes);
            if let Err(error) = removed {
                let dir = schedule.dir.display();
                tracing::error!(error = format!("{error:#}"), "cannot remove old backups from {dir}");
                metrics.failed();
            }
            schedule.interval
        }
        Err(error) => {
            tracing::error!(
                error = format!("{error:#}"),
                "the backup of the catalog failed; the server continues and retries"
            );
            metrics.failed();
            schedule.retry()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_backup_is_due_an_interval_after_the_last_one() {
        let schedule = Schedule { dir: "/b".into(), interval: Duration::from_secs(3600), keep: 2 };
        let at = |second| Timestamp::from_second(second).unwrap();
        let wait = |last: Option<i64>| schedule.first_wait(last.map(at), at(100_000)).as_secs();
        assert_eq!((wait(None), wait(Some(0)), wait(Some(99_000)), wait(Some(200_000))), (0, 0, 2600, 0));
        assert_eq!(schedule.retry(), RETRY);
    }
}
