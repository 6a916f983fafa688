//! Resource usage of the lab's components: memory, CPU time, and bytes sent to and received from API servers.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use lab::Lab;
use lab::process::Process;

/// Clock ticks per second in /proc, which is fixed in the kernel's user-space API.
const TICKS: u64 = 100;
/// Components of Nestor, which count the bytes of their requests.
const OURS: [&str; 3] = ["g1-gc-csi", "mgmt-csi", "vm-operator-shim"];

/// Usage of one process so far.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Used {
    pub(crate) cpu: Duration,
    pub(crate) sent: u64,
    pub(crate) received: u64,
}

impl std::ops::Sub for Used {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            cpu: self.cpu.saturating_sub(before.cpu),
            sent: self.sent.saturating_sub(before.sent),
            received: self.received.saturating_sub(before.received),
        }
    }
}

/// Resident memory of a process in bytes: current and peak.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Resident {
    pub(crate) now: u64,
    pub(crate) peak: u64,
}

/// The running processes of the lab, by component.
pub(crate) fn running(lab: &Lab) -> Result<Vec<(String, Process)>> {
    let components = lab.run().state()?.components.into_keys();
    Ok(components
        .filter_map(|component| {
            let process = lab.run().process(&component)?;
            process.alive().then_some((component, process))
        })
        .collect())
}

/// Usage of each component so far.
pub(crate) async fn used(lab: &Lab) -> Result<BTreeMap<String, Used>> {
    let mut all = BTreeMap::new();
    for (component, process) in running(lab)? {
        // It may have exited meanwhile.
        let Ok(stat) = std::fs::read_to_string(format!("/proc/{}/stat", process.pid)) else { continue };
        let mut used = Used { cpu: cpu(&stat).unwrap_or_default(), ..Used::default() };
        if OURS.contains(&component.as_str()) {
            let metrics = lab.metrics(&component).await?;
            (used.sent, used.received) = (bytes(&metrics, "sent"), bytes(&metrics, "received"));
        }
        all.insert(component, used);
    }
    Ok(all)
}

/// Resident memory of a component's process.
pub(crate) fn resident(process: Process) -> Result<Resident> {
    let path = format!("/proc/{}/status", process.pid);
    let status = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let field = |name: &str| kib(&status, name).with_context(|| format!("{path} has no {name}"));
    Ok(Resident { now: 1024 * field("VmRSS:")?, peak: 1024 * field("VmHWM:")? })
}

/// CPU time that a process has used.
pub(crate) fn cpu_of(pid: u32) -> Result<Duration> {
    let path = format!("/proc/{pid}/stat");
    let stat = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    cpu(&stat).with_context(|| format!("{path} has no CPU times"))
}

/// CPU time of all processors of the host so far: busy and total, in ticks.
pub(crate) fn host_cpu() -> Result<(u64, u64)> {
    let stat = std::fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
    let first = stat.lines().next().context("/proc/stat is empty")?;
    let times: Vec<u64> = first.split_whitespace().skip(1).map_while(|word| word.parse().ok()).collect();
    // user, nice, system, idle, iowait, irq, softirq, steal; guest time is part of user time.
    let all: u64 = times.iter().take(8).sum();
    let idle: u64 = times.iter().skip(3).take(2).sum();
    Ok((all - idle, all))
}

/// User and system time in a stat line. The command name may contain spaces and parentheses.
fn cpu(stat: &str) -> Option<Duration> {
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks: u64 = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    Some(Duration::from_millis(ticks * 1000 / TICKS))
}

/// A field of /proc/PID/status in kB, which means KiB there.
fn kib(status: &str, field: &str) -> Option<u64> {
    let line = status.lines().find(|line| line.starts_with(field))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

/// Bytes in one direction, of all API servers.
fn bytes(metrics: &str, direction: &str) -> u64 {
    let direction = format!("direction=\"{direction}\"");
    // The metric name has the program's prefix.
    let lines = metrics.lines().filter(|line| line.contains("_kube_client_bytes_total{"));
    let ours = lines.filter(|line| line.contains(&direction));
    ours.filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_files_and_metrics_are_parsed() {
        let stat = "42 (a) b (c) S 1 42 42 0 -1 4194560 1 2 3 4 150 60 7 8 20 0 1 0 777 9";
        assert_eq!(cpu(stat), Some(Duration::from_millis(2100)));
        assert_eq!(kib("VmHWM:\t  100 kB\nVmRSS:\t    64 kB\n", "VmRSS:"), Some(64));
        let metrics = "nestor_gc_csi_kube_client_bytes_total{cluster=\"guest\",direction=\"sent\"} 5\n\
            nestor_gc_csi_kube_client_bytes_total{cluster=\"management\",direction=\"sent\"} 7\n\
            nestor_gc_csi_kube_client_bytes_total{cluster=\"management\",direction=\"received\"} 100\n";
        assert_eq!((bytes(metrics, "sent"), bytes(metrics, "received")), (12, 100));
    }
}
