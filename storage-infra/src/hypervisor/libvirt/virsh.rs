//! The calls of libvirt that its Rust binding does not have: limiting the speed of a plugged disk, and which disks of a
//! domain failed.
//!
//! For the former, updating the device, which the binding has, is no way: libvirt (9.0) refuses it with "cannot modify field
//! 'blkdeviotune total_bytes_sec' of the disk".

use infra_api::Qos;
use tokio::process::Command;
use uuid::Uuid;

use crate::hypervisor::{HypervisorError, Result};

/// The arguments of `virsh`. Both limits are always given: 0 takes a limit away.
fn arguments(uri: &str, node: Uuid, target: &str, qos: &Qos) -> Vec<String> {
    let mut all: Vec<String> =
        ["--quiet", "--connect", uri, "blkdeviotune", "--live"].map(str::to_owned).into();
    all.extend(["--domain".into(), node.to_string(), "--device".into(), target.to_owned()]);
    all.extend(["--total-iops-sec".into(), qos.iops.unwrap_or(0).to_string()]);
    all.extend(["--total-bytes-sec".into(), qos.bytes_per_second.unwrap_or(0).to_string()]);
    all
}

/// Runs `virsh`, and gives what it prints.
async fn virsh(uri: &str, what: &str, arguments: &[String]) -> Result<String> {
    let output = Command::new("virsh")
        .args(arguments)
        .env("LC_ALL", "C")
        .stdin(std::process::Stdio::null())
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
    Err(HypervisorError::Uncertain(format!("libvirt at {uri}: cannot {what}: {}", text.trim())))
}

/// Limits a plugged disk, by its name at libvirt.
pub(super) async fn throttle(uri: &str, node: Uuid, target: &str, qos: &Qos) -> Result<()> {
    let what = format!("limit the disk {target} of domain {node}");
    virsh(uri, &what, &arguments(uri, node, target, qos)).await.map(drop)
}

/// A disk on which a domain's last request failed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct DiskError {
    /// Its name at libvirt.
    pub(super) target: String,
    /// Whether it found no space.
    pub(super) is_out_of_space: bool,
}

/// The disks of a domain on which the last request failed.
pub(super) async fn disk_errors(uri: &str, node: Uuid) -> Result<Vec<DiskError>> {
    let mut arguments: Vec<String> =
        ["--quiet", "--connect", uri, "domblkerror", "--domain"].map(str::to_owned).into();
    arguments.push(node.to_string());
    let said = virsh(uri, &format!("read which disks of domain {node} failed"), &arguments).await?;
    Ok(read_disk_errors(&said))
}

/// One line for each disk that failed, as in `sdb: no space`; or that there is none.
fn read_disk_errors(said: &str) -> Vec<DiskError> {
    let error = |line: &str| {
        let (target, error) = line.trim().split_once(": ")?;
        Some(DiskError { target: target.to_owned(), is_out_of_space: error == "no space" })
    };
    said.lines().filter_map(error).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_that_is_absent_is_taken_away() {
        let node = Uuid::nil();
        let text = arguments("qemu:///system", node, "sdb", &Qos { iops: Some(5), bytes_per_second: None })
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
    fn a_disk_that_found_no_space_is_told_from_one_that_failed_otherwise() {
        let error = |target: &str, is_out_of_space| DiskError { target: target.to_owned(), is_out_of_space };
        let said = "sda: unspecified error\nsdb: no space\n\n";
        assert_eq!(read_disk_errors(said), [error("sda", false), error("sdb", true)]);
        assert_eq!(read_disk_errors("No errors found\n"), []);
    }
}
