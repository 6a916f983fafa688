//! CPU partitioning: the guests' control planes and the management cluster run on separate processors, as in production,
//! so that they do not slow each other down.

use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use lab::Lab;
use lab::process::Process;

use crate::usage;

/// Runs `work` with the processors divided: half of them for the management cluster with its drivers and the storage
/// infra, the others for the guests. Components that are started meanwhile can use all processors.
pub async fn split_cpus<T>(lab: &Lab, work: impl Future<Output = Result<T>>) -> Result<T> {
    let status = std::fs::read_to_string("/proc/self/status").context("cannot read /proc/self/status")?;
    let all = allowed(&status).context("/proc/self/status has no Cpus_allowed_list")?;
    ensure!(all.len() > 1, "there is only one processor, which cannot be divided");
    let (management, guests) = all.split_at(all.len() / 2);
    let outcome = match move_components(lab, management, guests) {
        Ok(()) => work.await,
        Err(error) => Err(error),
    };
    // Also after an error, so that the next measurement uses all processors.
    let restored = move_components(lab, &all, &all);
    outcome.and_then(|outcome| restored.map(|()| outcome))
}

/// The processors that a process may use, from its status: `0-3,8`.
fn allowed(status: &str) -> Option<Vec<usize>> {
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?.trim();
    let ranges = list.split(',').map(|range| {
        let (from, to) = range.split_once('-').unwrap_or((range, range));
        Some(from.parse::<usize>().ok()?..=to.parse().ok()?)
    });
    Some(ranges.collect::<Option<Vec<_>>>()?.into_iter().flatten().collect())
}

fn move_components(lab: &Lab, management: &[usize], guests: &[usize]) -> Result<()> {
    for (component, process) in usage::running(lab)? {
        move_to(&component, process, if is_guests(lab, &component) { guests } else { management })?;
    }
    Ok(())
}

/// Whether a component belongs to a guest: its name begins with the guest's.
fn is_guests(lab: &Lab, component: &str) -> bool {
    let mut guests = lab.state().guests.keys();
    guests.any(|guest| component.strip_prefix(guest.as_str()).is_some_and(|rest| rest.starts_with('-')))
}

/// Moves a process with all its threads.
fn move_to(component: &str, process: Process, processors: &[usize]) -> Result<()> {
    let (list, pid) =
        (processors.iter().map(usize::to_string).collect::<Vec<_>>().join(","), process.pid.to_string());
    let command = ["--all-tasks", "--cpu-list", "--pid", &list, &pid];
    let output = Command::new("taskset").args(command).output().context("cannot run taskset")?;
    if !output.status.success() && process.alive() {
        bail!(
            "taskset {}: {component}: {}",
            command.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists_of_the_kernel_are_parsed() {
        assert_eq!(allowed("Name:\tbench\nCpus_allowed_list:\t0-2,8\n"), Some(vec![0, 1, 2, 8]));
        assert_eq!(allowed("Cpus_allowed_list:\tall\n"), None);
    }
}
