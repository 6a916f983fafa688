//! The guests' control planes and the management cluster's on processors of their own, as where they run in production, so
//! that what one of them does takes nothing from the other.

use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use lab::Lab;
use lab::process::Process;

use crate::parts;

/// Does the work with the processors divided: half of them for the management cluster with its drivers and the infra, the
/// others for the guests.
pub async fn apart<T>(lab: &Lab, work: impl Future<Output = Result<T>>) -> Result<T> {
    let all = std::thread::available_parallelism().context("cannot count the processors")?.get();
    ensure!(all > 1, "this machine has one processor, which cannot be divided");
    let half = all / 2;
    give(lab, &processors(0, half), &processors(half, all))?;
    let outcome = work.await;
    let everything = processors(0, all);
    give(lab, &everything, &everything)?;
    outcome
}

/// From one up to another, as `taskset` wants them.
fn processors(from: usize, to: usize) -> String {
    format!("{from}-{}", to - 1)
}

fn give(lab: &Lab, management: &str, guests: &str) -> Result<()> {
    for (part, process) in parts::running(lab)? {
        move_to(&part, process, if is_guests(lab, &part) { guests } else { management })?;
    }
    Ok(())
}

/// Parts of a guest are called by its name first.
fn is_guests(lab: &Lab, part: &str) -> bool {
    let mut guests = lab.state().guests.keys();
    guests.any(|guest| part.strip_prefix(guest.as_str()).is_some_and(|rest| rest.starts_with('-')))
}

/// With all its threads.
fn move_to(part: &str, process: Process, processors: &str) -> Result<()> {
    let pid = process.pid.to_string();
    let command = ["--all-tasks", "--cpu-list", "--pid", processors, &pid];
    let output = Command::new("taskset").args(command).output().context("cannot run taskset")?;
    if !output.status.success() && process.alive() {
        bail!("taskset {}: {part}: {}", command.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_named_from_one_up_to_another() {
        assert_eq!((processors(0, 1), processors(1, 4)), ("0-0".to_owned(), "1-3".to_owned()));
    }
}
