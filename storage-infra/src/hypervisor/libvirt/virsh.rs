//! `virsh` calls, for libvirt functions that the Rust binding lacks: throttling an attached disk (`blkdeviotune`) and
//! reading which disks failed (`domblkerror`), and events (`event`).
//!
//! Updating the device, which the binding supports, cannot replace `blkdeviotune`: libvirt 9.0 rejects it with "cannot
//! modify field 'blkdeviotune total_bytes_sec' of the disk".

use std::process::Stdio;

use infra_api::Qos;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;
use uuid::Uuid;

use crate::hypervisor::{Changed, HypervisorError, Result};

/// How long one `virsh event` runs.
const EVENTS_SECONDS: &str = "300";

/// Arguments of `virsh blkdeviotune`. Both limits are always passed: 0 removes a limit.
fn throttle_arguments(uri: &str, node: Uuid, target: &str, qos: &Qos) -> Vec<String> {
    let mut all: Vec<String> =
        ["--quiet", "--connect", uri, "blkdeviotune", "--live"].map(str::to_owned).into();
    all.extend(["--domain".into(), node.to_string(), "--device".into(), target.to_owned()]);
    all.extend(["--total-iops-sec".into(), qos.iops.unwrap_or(0).to_string()]);
    all.extend(["--total-bytes-sec".into(), qos.bytes_per_second.unwrap_or(0).to_string()]);
    all
}

/// Runs `virsh` and returns its output.
pub(super) async fn virsh(uri: &str, action: &str, arguments: &[String]) -> Result<String> {
    let output = Command::new("virsh")
        .args(arguments)
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .map_err(|e| {
            HypervisorError::Unreachable(format!("cannot run virsh (package libvirt-clients): {e}"))
        })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    Err(HypervisorError::Uncertain(format!("libvirt at {uri}: cannot {action}: {}", text.trim())))
}

/// What a line of `virsh event` is about, such as `event 'lifecycle' for domain 'vm': Resumed Unpaused`.
fn changed_by(line: &str) -> Option<Changed> {
    let (event, _) = line.trim().strip_prefix("event '")?.split_once('\'')?;
    match event {
        "lifecycle" => Some(Changed::Vm),
        "block-job" | "block-job-2" | "disk-change" => Some(Changed::Disk),
        _ => None,
    }
}

/// Calls back at the lines that `virsh event` prints. Returns when virsh ends, which it does after a while, because it may not
/// notice that the daemon was restarted.
pub(super) async fn events(uri: &str, changed: &(dyn Fn(Changed) + Send + Sync)) -> Result<()> {
    let lost = |why: String| {
        HypervisorError::Unreachable(format!(
            "libvirt at {uri}: cannot follow the events of its domains: {why}"
        ))
    };
    let mut child = Command::new("virsh")
        .args(["--quiet", "--keepalive-interval", "5", "--keepalive-count", "3", "--connect", uri])
        .args(["event", "--all", "--loop", "--timeout", EVENTS_SECONDS])
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| lost(format!("cannot run virsh (package libvirt-clients): {error}")))?;
    let output = child.stdout.take().ok_or_else(|| lost("virsh has no output".to_owned()))?;
    let mut lines = BufReader::new(output).lines();
    while let Some(line) = lines.next_line().await.map_err(|error| lost(error.to_string()))? {
        if let Some(what) = changed_by(&line) {
            tracing::debug!(uri, line, "an event of libvirt");
            changed(what);
        }
    }
    child.wait().await.map(drop).map_err(|error| lost(error.to_string()))
}

/// Applies QoS limits to an attached disk, by its libvirt target name.
pub(super) async fn throttle(uri: &str, node: Uuid, target: &str, qos: &Qos) -> Result<()> {
    let action = format!("set the limits of the disk {target} of domain {node}");
    virsh(uri, &action, &throttle_arguments(uri, node, target, qos)).await.map(drop)
}

/// A disk of a domain whose last request failed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct DiskError {
    /// libvirt target name.
    pub(super) target: String,
    /// Whether it ran out of space.
    pub(super) is_out_of_space: bool,
}

/// Lists the disks of a domain whose last request failed.
pub(super) async fn disk_errors(uri: &str, node: Uuid) -> Result<Vec<DiskError>> {
    let mut arguments: Vec<String> =
        ["--quiet", "--connect", uri, "domblkerror", "--domain"].map(str::to_owned).into();
    arguments.push(node.to_string());
    let output = virsh(uri, &format!("read which disks of domain {node} failed"), &arguments).await?;
    Ok(parse_disk_errors(&output))
}

/// Parses one line per failed disk, such as `sdb: no space`; any other line means that none failed.
fn parse_disk_errors(output: &str) -> Vec<DiskError> {
    let error = |line: &str| {
        let (target, error) = line.trim().split_once(": ")?;
        Some(DiskError { target: target.to_owned(), is_out_of_space: error == "no space" })
    };
    output.lines().filter_map(error).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_limit_is_removed() {
        let node = Uuid::nil();
        let text =
            throttle_arguments("qemu:///system", node, "sdb", &Qos { iops: Some(5), bytes_per_second: None })
                .join(" ");
        assert_eq!(
            text,
            format!(
                "--quiet --connect qemu:///system blkdeviotune --live --domain {node} --device sdb \
                 --total-iops-sec 5 --total-bytes-sec 0"
            )
        );
    }

    #[test]
    fn events_of_vms_and_of_block_jobs_are_told_from_others() {
        let event = |name: &str| changed_by(&format!("event '{name}' for domain 'vm': text"));
        assert_eq!((event("lifecycle"), event("block-job-2")), (Some(Changed::Vm), Some(Changed::Disk)));
        assert_eq!((event("balloon-change"), changed_by("events received: 3")), (None, None));
    }

    #[test]
    fn out_of_space_is_distinguished_from_other_disk_errors() {
        let error = |target: &str, is_out_of_space| DiskError { target: target.to_owned(), is_out_of_space };
        let output = "sda: unspecified error\nsdb: no space\n\n";
        assert_eq!(parse_disk_errors(output), [error("sda", false), error("sdb", true)]);
        assert_eq!(parse_disk_errors("No errors found\n"), []);
    }
}
