//! How much memory each process of the lab has, now and at most so far.

use anyhow::{Context, Result};
use lab::Lab;

use crate::report::Report;

/// Runs the bench.
pub fn run(report: &mut Report) -> Result<()> {
    let lab = Lab::from_env()?;
    let run = lab.run();
    for part in run.state()?.parts.into_keys() {
        let Some(process) = run.process(&part).filter(lab::process::Process::alive) else { continue };
        let path = format!("/proc/{}/status", process.pid);
        let status = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        for (metric, field) in [("rss", "VmRSS:"), ("rss_peak", "VmHWM:")] {
            if let Some(kib) = kib(&status, field) {
                report.number(&part, metric, "MiB", kib / 1024.0);
            }
        }
    }
    Ok(())
}

/// A field of /proc/PID/status that is given in kB, which there means KiB.
fn kib(status: &str, field: &str) -> Option<f64> {
    let line = status.lines().find(|line| line.starts_with(field))?;
    line.split_whitespace().nth(1)?.parse().ok()
}
