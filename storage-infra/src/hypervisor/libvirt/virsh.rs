//! The one call of libvirt that its Rust binding does not have: limiting the speed of a plugged disk.
//!
//! Updating the device, which the binding has, is no way: libvirt (9.0) refuses it with "cannot modify field
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

/// Limits a plugged disk, by its name at libvirt.
pub(super) async fn throttle(uri: &str, node: Uuid, target: &str, qos: &Qos) -> Result<()> {
    let output = Command::new("virsh")
        .args(arguments(uri, node, target, qos))
        .env("LC_ALL", "C")
        .stdin(std::process::Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .map_err(|e| {
            HypervisorError::Unreachable(format!("cannot run virsh (package libvirt-clients): {e}"))
        })?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    Err(HypervisorError::Uncertain(format!(
        "libvirt at {uri}: cannot limit the disk {target} of domain {node}: {}",
        text.trim()
    )))
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
}
