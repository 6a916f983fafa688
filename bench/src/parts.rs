//! What the processes of the lab use: memory, processor time, and bytes on the wire to API servers.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use lab::Lab;
use lab::process::Process;

/// Ticks of the processor time that the kernel shows, per second: fixed in its interface to programs.
const TICKS: u64 = 100;
/// Our own parts, as they are named in a lab: they count the bytes of their requests.
const OURS: [&str; 3] = ["g1-gc-csi", "mgmt-csi", "vm-operator-shim"];

/// What one process has used so far.
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

/// Resident memory of a process, in bytes: now, and at most so far.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Resident {
    pub(crate) now: u64,
    pub(crate) peak: u64,
}

/// The processes of the lab that run, by part.
pub(crate) fn running(lab: &Lab) -> Result<Vec<(String, Process)>> {
    let parts = lab.run().state()?.parts.into_keys();
    Ok(parts
        .filter_map(|part| {
            let process = lab.run().process(&part)?;
            process.alive().then_some((part, process))
        })
        .collect())
}

/// What each part has used so far.
pub(crate) async fn used(lab: &Lab) -> Result<BTreeMap<String, Used>> {
    let mut all = BTreeMap::new();
    for (part, process) in running(lab)? {
        // It may have ended meanwhile.
        let Ok(stat) = std::fs::read_to_string(format!("/proc/{}/stat", process.pid)) else { continue };
        let mut used = Used { cpu: cpu(&stat).unwrap_or_default(), ..Used::default() };
        if OURS.contains(&part.as_str()) {
            let metrics = lab.metrics(&part).await?;
            (used.sent, used.received) = (bytes(&metrics, "sent"), bytes(&metrics, "received"));
        }
        all.insert(part, used);
    }
    Ok(all)
}

/// Memory of a part's process.
pub(crate) fn resident(process: Process) -> Result<Resident> {
    let path = format!("/proc/{}/status", process.pid);
    let status = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let field = |name: &str| kib(&status, name).with_context(|| format!("{path} has no {name}"));
    Ok(Resident { now: 1024 * field("VmRSS:")?, peak: 1024 * field("VmHWM:")? })
}

/// How busy all processors of this machine were so far: time at work, and time in all, in ticks.
pub(crate) fn machine() -> Result<(u64, u64)> {
    let stat = std::fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
    let first = stat.lines().next().context("/proc/stat is empty")?;
    let times: Vec<u64> = first.split_whitespace().skip(1).map_while(|word| word.parse().ok()).collect();
    // user, nice, system, idle, iowait, irq, softirq, steal; guests are in user already.
    let all: u64 = times.iter().take(8).sum();
    let idle: u64 = times.iter().skip(3).take(2).sum();
    Ok((all - idle, all))
}

/// User and system time out of a stat line. The command's name may hold spaces and brackets.
fn cpu(stat: &str) -> Option<Duration> {
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks: u64 = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    Some(Duration::from_millis(ticks * 1000 / TICKS))
}

/// A field of /proc/PID/status that is given in kB, which there means KiB.
fn kib(status: &str, field: &str) -> Option<u64> {
    let line = status.lines().find(|line| line.starts_with(field))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

/// Bytes of one direction, to and from all API servers.
fn bytes(metrics: &str, direction: &str) -> u64 {
    let direction = format!("direction=\"{direction}\"");
    // After the program's own prefix.
    let lines = metrics.lines().filter(|line| line.contains("_kube_client_bytes_total{"));
    let ours = lines.filter(|line| line.contains(&direction));
    ours.filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_and_the_metrics_show_is_read() {
        let stat = "42 (a) b (c) S 1 42 42 0 -1 4194560 1 2 3 4 150 60 7 8 20 0 1 0 777 9";
        assert_eq!(cpu(stat), Some(Duration::from_millis(2100)));
        assert_eq!(kib("VmHWM:\t  100 kB\nVmRSS:\t    64 kB\n", "VmRSS:"), Some(64));
        let metrics = "nestor_gc_csi_kube_client_bytes_total{cluster=\"guest\",direction=\"sent\"} 5\n\
            nestor_gc_csi_kube_client_bytes_total{cluster=\"management\",direction=\"sent\"} 7\n\
            nestor_gc_csi_kube_client_bytes_total{cluster=\"management\",direction=\"received\"} 100\n";
        assert_eq!((bytes(metrics, "sent"), bytes(metrics, "received")), (12, 100));
    }
}
