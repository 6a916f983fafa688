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
    /// Inode number and filesystem of the file; `None` while the kernel releases it.
    pub(super) identity: Option<(u64, String)>,
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
    /// `None` if the device has no backing file.
    fn backed(self) -> Option<Device> {
        let identity = self.inode.zip(self.filesystem);
        if identity.is_none() && self.file.is_none() {
            return None;
        }
        Some(Device {
            name: self.name,
            file: self.file,
            read_only: self.read_only.unwrap_or(false),
            autoclear: identity.is_none() || self.autoclear.unwrap_or(true),
            identity,
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
    let run = async {
        let output = Command::new("losetup").args(arguments).output().await.map_err(|e| {
            HypervisorError::Unreachable(format!("cannot run losetup (package util-linux): {e}"))
        })?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let text = String::from_utf8_lossy(&output.stderr);
        Err(HypervisorError::Uncertain(format!("losetup failed ({}): {}", output.status, text.trim())))
    };
    fail_point::effect_async(point, HypervisorError::Uncertain, run).await
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
    fn a_device_that_is_released_is_listed_until_it_has_no_file() {
        let list = r#"{"loopdevices": [
            {"name": "/dev/loop0", "back-ino": 7, "back-maj:min": "254:0", "ro": true, "autoclear": false},
            {"name": "/dev/loop1", "back-file": "/v", "back-ino": null, "back-maj:min": null, "ro": false,
             "autoclear": false},
            {"name": "/dev/loop2", "back-ino": null, "back-maj:min": null, "ro": false, "autoclear": false}]}"#;
        let found = parse(list).unwrap().into_iter().map(|one| (one.identity, one.read_only, one.autoclear));
        let expected = [(Some((7, "254:0".to_owned())), true, false), (None, false, true)];
        assert_eq!(found.collect::<Vec<_>>(), expected);
    }
}
