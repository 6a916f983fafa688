//! What fails meanwhile: parts die, or stand still for a while.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use fastrand::Rng;
use tests::Scenario;

/// Parts that may die or stand still at any moment.
const PARTS: [&str; 5] = ["g1-gc-csi", "g2-gc-csi", "mgmt-csi", "vm-operator-shim", "storage-infra"];

/// The faults of one run.
pub struct Faults {
    scenario: Arc<Scenario>,
    random: std::sync::Mutex<Rng>,
}

#[derive(Debug, Clone, Copy)]
enum Fault {
    /// Dies, and is started again at once.
    Dies,
    /// Dies, and is away for so many seconds.
    IsAway(u64),
    /// Stands still for so many seconds.
    StandsStill(u64),
}

impl Faults {
    pub fn new(scenario: &Arc<Scenario>, seed: u64) -> Self {
        Self { scenario: scenario.clone(), random: Rng::with_seed(seed).into() }
    }

    fn draw(&self) -> Result<(Duration, &'static str, Fault)> {
        let mut random = self.random.lock().map_err(|_| anyhow::anyhow!("poisoned"))?;
        let pause = Duration::from_millis(random.u64(500..6000));
        let part = PARTS[random.usize(..PARTS.len())];
        let fault = match random.u8(..4) {
            0 | 1 => Fault::Dies,
            2 => Fault::IsAway(random.u64(1..6)),
            _ => Fault::StandsStill(random.u64(1..8)),
        };
        Ok((pause, part, fault))
    }

    /// Lets parts fail until then, with all of them back at the end. Gives the number of faults.
    pub async fn until(self: Arc<Self>, until: Instant) -> Result<usize> {
        let s = &self.scenario;
        let mut faults = 0;
        loop {
            let (pause, part, fault) = self.draw()?;
            tokio::time::sleep(pause).await;
            if Instant::now() >= until {
                return Ok(faults);
            }
            faults += 1;
            let why = || format!("{part} {fault:?}");
            match fault {
                Fault::Dies => {
                    s.kill_part(part).await.with_context(why)?;
                    s.start_part(part).await.with_context(why)?;
                }
                Fault::IsAway(seconds) => {
                    s.kill_part(part).await.with_context(why)?;
                    tokio::time::sleep(Duration::from_secs(seconds)).await;
                    s.start_part(part).await.with_context(why)?;
                }
                Fault::StandsStill(seconds) => {
                    let frozen = s.freeze_part(part).with_context(why)?;
                    tokio::time::sleep(Duration::from_secs(seconds)).await;
                    drop(frozen);
                }
            }
        }
    }
}
