//! Fault injection: components that crash or are paused.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use fastrand::Rng;
use tests::Scenario;

/// Components that may crash or be paused at any time.
const COMPONENTS: [&str; 5] = ["g1-gc-csi", "g2-gc-csi", "mgmt-csi", "vm-operator-shim", "storage-infra"];

/// The faults of a run.
pub struct Faults {
    scenario: Arc<Scenario>,
    random: std::sync::Mutex<Rng>,
}

#[derive(Debug, Clone, Copy)]
enum Fault {
    /// Killed and restarted at once.
    Crash,
    /// Killed and restarted after this number of seconds.
    Outage(u64),
    /// Paused (SIGSTOP) for this number of seconds.
    Pause(u64),
}

impl Faults {
    pub fn new(scenario: &Arc<Scenario>, seed: u64) -> Self {
        Self { scenario: scenario.clone(), random: Rng::with_seed(seed).into() }
    }

    fn draw(&self) -> Result<(Duration, &'static str, Fault)> {
        let mut random = self.random.lock().map_err(|_| anyhow::anyhow!("poisoned"))?;
        let pause = Duration::from_millis(random.u64(500..6000));
        let component = COMPONENTS[random.usize(..COMPONENTS.len())];
        let fault = match random.u8(..4) {
            0 | 1 => Fault::Crash,
            2 => Fault::Outage(random.u64(1..6)),
            _ => Fault::Pause(random.u64(1..8)),
        };
        Ok((pause, component, fault))
    }

    /// Injects faults until `until`, with all components running at the end. Returns the number of faults.
    pub async fn until(self: Arc<Self>, until: Instant) -> Result<usize> {
        let s = &self.scenario;
        let mut faults = 0;
        loop {
            let (pause, component, fault) = self.draw()?;
            tokio::time::sleep(pause).await;
            if Instant::now() >= until {
                return Ok(faults);
            }
            faults += 1;
            let why = || format!("{component} {fault:?}");
            match fault {
                Fault::Crash => {
                    s.kill_component(component).await.with_context(why)?;
                    s.start_component(component).await.with_context(why)?;
                }
                Fault::Outage(seconds) => {
                    s.kill_component(component).await.with_context(why)?;
                    tokio::time::sleep(Duration::from_secs(seconds)).await;
                    s.start_component(component).await.with_context(why)?;
                }
                Fault::Pause(seconds) => {
                    let frozen = s.pause_component(component).with_context(why)?;
                    tokio::time::sleep(Duration::from_secs(seconds)).await;
                    drop(frozen);
                }
            }
        }
    }
}
