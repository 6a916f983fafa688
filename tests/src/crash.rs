//! Processes that die at chosen points of their work, and are started again.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tonic::{Code, Status};

use crate::{PATIENCE, Scenario, eventually};

/// How often a dead process is looked for.
const PACE: Duration = Duration::from_millis(20);

/// Where a process dies.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The part of the lab.
    pub part: &'static str,
    /// The point.
    pub point: String,
    /// At which passing of it, from 1.
    pub count: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { part, point, count } = self;
        match count {
            1 => write!(f, "{part} at {point}"),
            _ => write!(f, "{part} at {point} ({count})"),
        }
    }
}

/// Lets parts of the lab die, and starts those again that did.
pub struct Crashes<'a> {
    s: &'a Scenario,
    parts: &'static [&'static str],
    /// Sidecars whose driver died since they were started: they end some time later.
    stale: BTreeSet<String>,
}

impl<'a> Crashes<'a> {
    /// Of these parts.
    pub fn of(s: &'a Scenario, parts: &'static [&'static str]) -> Result<Self> {
        for part in parts {
            let folder = s.lab.fail_points(part);
            std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        }
        Ok(Self { s, parts, stale: BTreeSet::new() })
    }

    fn file(&self, part: &str, name: &str) -> PathBuf {
        self.s.lab.fail_points(part).join(name)
    }

    /// Does something, and tells which points were passed meanwhile.
    pub async fn passed<T>(&self, work: impl Future<Output = Result<T>>) -> Result<(T, Vec<Place>)> {
        for part in self.parts {
            std::fs::write(self.file(part, "passed"), "")?;
        }
        let outcome = work.await;
        let mut places = Vec::new();
        for part in self.parts.iter().copied() {
            let file = self.file(part, "passed");
            let passed = std::fs::read_to_string(&file)?;
            std::fs::remove_file(&file)?;
            let mut counts = BTreeMap::new();
            for point in passed.lines() {
                let count = counts.entry(point).or_default();
                *count += 1;
                places.push(Place { part, point: point.to_owned(), count: *count });
            }
        }
        Ok((outcome?, places))
    }

    /// Makes sure that a sidecar has found the driver that runs now.
    pub async fn needs(&mut self, sidecar: &'static str) -> Result<()> {
        if self.stale.remove(sidecar) { self.s.lab.restart(sidecar).await } else { Ok(()) }
    }

    /// Does something while a process is to die at this place. Where it does, it is started again, and after it the
    /// sidecar that is needed, and the work goes on. Tells whether it died.
    pub async fn meanwhile<T>(
        &mut self,
        place: &Place,
        sidecar: Option<&'static str>,
        work: impl Future<Output = Result<T>>,
    ) -> Result<(T, bool)> {
        let armed = self.file(place.part, "armed");
        std::fs::write(&armed, format!("{} {}", place.point, place.count))?;
        let mut work = std::pin::pin!(work);
        let mut reviving = std::pin::pin!(self.revive(place, sidecar));
        tokio::select! {
            outcome = &mut work => match std::fs::remove_file(&armed) {
                Ok(()) => Ok((outcome?, false)),
                // It is just dying.
                Err(_) => {
                    reviving.await?;
                    Ok((outcome?, true))
                }
            },
            revived = &mut reviving => {
                revived?;
                Ok((work.await?, true))
            }
        }
    }

    /// Waits until the process has died there, and starts it again.
    async fn revive(&mut self, place: &Place, sidecar: Option<&'static str>) -> Result<()> {
        let armed = self.file(place.part, "armed");
        while armed.exists() || self.s.lab.pid(place.part).is_some() {
            tokio::time::sleep(PACE).await;
        }
        let lab = &self.s.lab;
        lab.start_alone(place.part).await?;
        self.stale.extend(lab.sidecars(place.part)?);
        match sidecar {
            Some(name) => self.needs(name).await,
            None => Ok(()),
        }
    }

    /// Nobody is to die any more, and everybody runs.
    pub async fn end(self) -> Result<()> {
        for part in self.parts {
            for name in ["armed", "passed"] {
                let _ = std::fs::remove_file(self.file(part, name));
            }
            self.s.lab.start(part).await?;
        }
        for sidecar in &self.stale {
            self.s.lab.restart(sidecar).await?;
        }
        Ok(())
    }
}

/// Calls a driver as a sidecar does: again, for as long as the answer may mean that it is still at it, and not when it
/// is final.
pub async fn insist<T, F, R>(what: &str, call: F) -> Result<T>
where
    F: Fn() -> R,
    R: Future<Output = Result<T, Status>>,
{
    eventually(what, PATIENCE, || async {
        match call().await {
            Ok(answer) => Ok(Ok(answer)),
            Err(status) if may_go_on(&status) => Ok(Err(status.to_string())),
            Err(status) => bail!("{what}: a final answer: {status}"),
        }
    })
    .await
}

fn may_go_on(status: &Status) -> bool {
    use std::error::Error;
    // What has a source came from the connection, not from the driver.
    status.source().is_some()
        || matches!(
            status.code(),
            Code::Unavailable | Code::Aborted | Code::Cancelled | Code::DeadlineExceeded
        )
}
