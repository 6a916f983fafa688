//! Crash injection: components that die at a chosen fail point and are started again.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tonic::{Code, Status};

use crate::{PATIENCE, Scenario, eventually};

/// Poll interval for a dead process.
const PACE: Duration = Duration::from_millis(20);

/// Parts of the names of writes by background loops, which belong to no operation.
pub const BACKGROUND: [&str; 3] = ["csistoragecapacities", "leases", "storagepools"];

/// One passing of a fail point at which a component dies.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct CrashPoint {
    /// The component of the lab.
    pub component: &'static str,
    /// Name of the fail point.
    pub point: String,
    /// Which passing of the fail point, from 1.
    pub count: usize,
}

impl fmt::Display for CrashPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { component, point, count } = self;
        match count {
            1 => write!(f, "{component} at {point}"),
            _ => write!(f, "{component} at {point} ({count})"),
        }
    }
}

/// Makes components of the lab crash, and starts them again.
pub struct CrashInjector<'a> {
    s: &'a Scenario,
    components: &'static [&'static str],
    /// Sidecars whose driver died since they were started; they exit some time later.
    stale: BTreeSet<String>,
}

impl<'a> CrashInjector<'a> {
    /// Prepares crashes of these components.
    pub fn new(s: &'a Scenario, components: &'static [&'static str]) -> Result<Self> {
        for component in components {
            let folder = s.lab.fail_points(component);
            std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        }
        Ok(Self { s, components, stale: BTreeSet::new() })
    }

    fn file(&self, component: &str, name: &str) -> PathBuf {
        self.s.lab.fail_points(component).join(name)
    }

    /// Runs `work` and returns the fail points that were passed meanwhile.
    pub async fn trace<T>(&self, work: impl Future<Output = Result<T>>) -> Result<(T, Vec<CrashPoint>)> {
        for component in self.components {
            std::fs::write(self.file(component, "passed"), "")?;
        }
        let outcome = work.await;
        let mut crash_points = Vec::new();
        for component in self.components.iter().copied() {
            let file = self.file(component, "passed");
            let passed = std::fs::read_to_string(&file)?;
            std::fs::remove_file(&file)?;
            let mut counts = BTreeMap::new();
            for point in passed.lines() {
                let count = counts.entry(point).or_default();
                *count += 1;
                crash_points.push(CrashPoint { component, point: point.to_owned(), count: *count });
            }
        }
        Ok((outcome?, crash_points))
    }

    /// Restarts a sidecar if its driver was restarted since, so that it is connected to the current one.
    pub async fn refresh_sidecar(&mut self, sidecar: &'static str) -> Result<()> {
        if self.stale.remove(sidecar) { self.s.lab.restart(sidecar).await } else { Ok(()) }
    }

    /// Runs `work` with an armed fail point. If the component dies, it is started again, then the required sidecar, and the
    /// work continues. Returns whether the component died.
    pub async fn crash_during<T>(
        &mut self,
        crash_point: &CrashPoint,
        sidecar: Option<&'static str>,
        work: impl Future<Output = Result<T>>,
    ) -> Result<(T, bool)> {
        let armed = self.file(crash_point.component, "armed");
        std::fs::write(&armed, format!("{} {}", crash_point.point, crash_point.count))?;
        let mut work = std::pin::pin!(work);
        let mut restarting = std::pin::pin!(self.restart_after_crash(crash_point, sidecar));
        tokio::select! {
            outcome = &mut work => match std::fs::remove_file(&armed) {
                Ok(()) => Ok((outcome?, false)),
                // It is dying right now.
                Err(_) => {
                    restarting.await?;
                    Ok((outcome?, true))
                }
            },
            restarted = &mut restarting => {
                restarted?;
                Ok((work.await?, true))
            }
        }
    }

    /// Waits until the component has died, and starts it again.
    async fn restart_after_crash(
        &mut self,
        crash_point: &CrashPoint,
        sidecar: Option<&'static str>,
    ) -> Result<()> {
        let armed = self.file(crash_point.component, "armed");
        while armed.exists() || self.s.lab.pid(crash_point.component).is_some() {
            tokio::time::sleep(PACE).await;
        }
        let lab = &self.s.lab;
        lab.start_alone(crash_point.component).await?;
        self.stale.extend(lab.sidecars(crash_point.component)?);
        match sidecar {
            Some(name) => self.refresh_sidecar(name).await,
            None => Ok(()),
        }
    }

    /// Disarms all fail points and starts all components and sidecars.
    pub async fn finish(self) -> Result<()> {
        for component in self.components {
            for name in ["armed", "passed"] {
                let _ = std::fs::remove_file(self.file(component, name));
            }
            self.s.lab.start(component).await?;
        }
        for sidecar in &self.stale {
            self.s.lab.restart(sidecar).await?;
        }
        Ok(())
    }
}

/// Calls a driver like a sidecar: repeats the call while the status code means that the operation may still be running,
/// fails on a final code.
pub async fn call_until_final<T, F, R>(what: &str, call: F) -> Result<T>
where
    F: Fn() -> R,
    R: Future<Output = Result<T, Status>>,
{
    eventually(what, PATIENCE, || async {
        match call().await {
            Ok(answer) => Ok(Ok(answer)),
            Err(status) if may_still_run(&status) => Ok(Err(status.to_string())),
            Err(status) => bail!("{what}: final status: {status}"),
        }
    })
    .await
}

fn may_still_run(status: &Status) -> bool {
    use std::error::Error;
    // A status with a source comes from the connection, not from the driver.
    status.source().is_some()
        || matches!(
            status.code(),
            Code::Unavailable | Code::Aborted | Code::Cancelled | Code::DeadlineExceeded
        )
}
