//! The program `losetup`, and the loop devices that it lists.

use std::ffi::OsStr;
use std::path::PathBuf;

use serde::Deserialize;
use tokio::process::Command;

use super::{HypervisorError, Result};

/// A loop device that is backed by a file.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Device {
    pub(super) name: PathBuf,
    pub(super) file: Option<PathBuf>,
    pub(super) inode: u64,
    pub(super) filesystem: String,
    pub(super) read_only: bool,
    pub(super) autoclear: bool,
}

/// A device as listed by `losetup`. Fields are null if the device disappeared meanwhile.
#[derive(Deserialize)]
struct Listed {
    name: PathBuf,
    #[serde(rename = "back-file")]
    file: Option<PathBuf>,
    #[serde(rename = "back-ino")]
    inode: Option<u64>,
    #[serde(rename = "back-maj:min")]
    filesystem: Option<String>,
    #[serde(rename = "ro")]
    read_only: Option<bool>,
    autoclear: Option<bool>,
}

impl Listed {
    /// `None` if the device has no backing file: the kernel has released it.
    fn backed(self) -> Option<Device> {
        Some(Device {
            name: self.name,
            file: self.file,
            inode: self.inode?,
            filesystem: self.filesystem?,
            read_only: self.read_only.unwrap_or(false),
            // If unknown, the device is being removed.
            autoclear: self.autoclear.unwrap_or(true),
        })
    }
}

#[derive(Deserialize)]
struct Devices {
    loopdevices: Vec<Listed>,
}

/// Runs it and returns its output. `effect` names a change, for its fail points.
pub(super) async fn losetup(effect: Option<&str>, arguments: &[&OsStr]) -> Result<String> {
    let point = || effect.map(|effect| format!("hypervisor.losetup.{effect}"));
    let run = Command::new("losetup").args(arguments).output();
    let output = fail_point::around_async(point, run)
        .await
        .map_err(|e| HypervisorError::Unreachable(format!("cannot run losetup (package util-linux): {e}")))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    Err(HypervisorError::Uncertain(format!("losetup failed ({}): {}", output.status, text.trim())))
}

/// Lists all loop devices in use, as the kernel reports them.
pub(super) async fn devices() -> Result<Vec<Device>> {
    let columns = "NAME,BACK-FILE,BACK-INO,BACK-MAJ:MIN,RO,AUTOCLEAR";
    let list = ["--list", "--json", "--output", columns].map(AsRef::as_ref);
    let text = losetup(None, &list).await?;
    if text.trim().is_empty() {
        return Ok(Vec::new());
    }
    parse(&text).map_err(|e| HypervisorError::Uncertain(format!("cannot parse the output of losetup: {e}")))
}

fn parse(list: &str) -> serde_json::Result<Vec<Device>> {
    let list: Devices = serde_json::from_str(list)?;
    Ok(list.loopdevices.into_iter().filter_map(Listed::backed).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_disappears_during_listing_is_omitted() {
        let list = r#"{"loopdevices": [
            {"name": "/dev/loop0", "back-ino": 7, "back-maj:min": "254:0", "ro": true, "autoclear": false},
            {"name": "/dev/loop1", "back-ino": null, "back-maj:min": null, "ro": false, "autoclear": false}]}"#;
        let devices = parse(list).unwrap();
        assert_eq!(devices.len(), 1);
        assert_eq!((devices[0].inode, devices[0].read_only, devices[0].autoclear), (7, true, false));
    }
}
