//! Copies of attached disks into other files: libvirt's block copy, by `virsh`, because the Rust binding lacks it. The live XML
//! tells which file a disk has open, and which copy is running.

use std::io::Write;

use uuid::Uuid;

use super::Libvirt;
use super::virsh::virsh;
use super::xml::{AttachError, LiveDisk, mirror_xml};
use crate::hypervisor::{Disk, DiskSource, HypervisorError, Mirror, MirroredDisk, Result};

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// Arguments of `virsh blockjob` with these options.
fn job_arguments(uri: &str, node: Uuid, target: &str, options: &[&str]) -> Vec<String> {
    let node = node.to_string();
    let disk = ["--quiet", "--connect", uri, "blockjob", "--domain", &node, "--path", target];
    words(&[&disk, options].concat())
}

/// Arguments of `virsh blockcopy` into the file that this XML file describes. A persistent domain needs `--transient-job`: the
/// copy does not outlive QEMU.
fn copy_arguments(uri: &str, node: Uuid, target: &str, xml: &str, rate: Option<u64>) -> Vec<String> {
    let node = node.to_string();
    let mut all = words(&["--quiet", "--connect", uri, "blockcopy", "--domain", &node, "--path", target]);
    all.extend(words(&["--xml", xml, "--reuse-external", "--transient-job"]));
    if let Some(rate) = rate {
        all.extend(["--bandwidth".to_owned(), rate.to_string(), "--bytes".to_owned()]);
    }
    all
}

/// Parses `cur=` and `end=` of `virsh blockjob --info --raw`. `None` until QEMU knows how much there is to copy.
fn parse_progress(output: &str) -> Option<(u64, u64)> {
    let value = |name: &str| {
        let line = output.lines().find_map(|line| line.trim().strip_prefix(name)?.strip_prefix('='))?;
        line.trim().parse::<u64>().ok()
    };
    Some((value("cur")?, value("end").filter(|end| *end > 0)?))
}

impl Libvirt {
    /// The disk of a running domain.
    async fn copied_disk(&self, node: Uuid, disk: Uuid) -> Result<LiveDisk> {
        let (now, _) = self.snapshot(node).await?;
        if !now.is_running() {
            return Err(HypervisorError::NotRunning(format!("the domain {node} is {}", now.power.state())));
        }
        let missing = || HypervisorError::Refused(format!("the domain {node} does not have the disk {disk}"));
        now.live.find(disk).cloned().ok_or_else(missing)
    }

    /// Reads what a disk has open, and the copy that is running.
    pub(super) async fn read_copy(&self, node: Uuid, disk: Uuid) -> Result<MirroredDisk> {
        let (now, _) = self.snapshot(node).await?;
        let Some(found) = now.live.find(disk) else {
            return Ok(MirroredDisk { power: now.power, source: None, mirror: None });
        };
        let progress = match &found.mirror {
            Some(_) => self.progress(node, &found.target).await,
            None => None,
        };
        let mirror = found.mirror.clone().map(|(to, ready)| Mirror { to, ready, progress });
        Ok(MirroredDisk { power: now.power, source: found.location().cloned(), mirror })
    }

    /// The progress of a copy. It may have ended meanwhile.
    async fn progress(&self, node: Uuid, target: &str) -> Option<(u64, u64)> {
        let arguments = job_arguments(&self.uri, node, target, &["--info", "--raw", "--bytes"]);
        let output = virsh(&self.uri, "read the progress of a copy", &arguments).await.ok()?;
        parse_progress(&output)
    }

    /// Starts a copy into a file that exists.
    pub(super) async fn start_copy(
        &self,
        node: Uuid,
        disk: &Disk,
        to: &DiskSource,
        rate: Option<u64>,
    ) -> Result<()> {
        let found = self.copied_disk(node, disk.uuid).await?;
        let text = mirror_xml(to, &disk.options).map_err(|why| match why {
            AttachError::NoFreeSlot(why) | AttachError::Unsupported(why) => HypervisorError::Refused(why),
        })?;
        let failed = |error| HypervisorError::Refused(format!("cannot write the XML of a copy: {error}"));
        let mut xml = tempfile::NamedTempFile::new().map_err(failed)?;
        xml.write_all(text.as_bytes()).map_err(failed)?;
        let path = xml.path().display().to_string();
        let arguments = copy_arguments(&self.uri, node, &found.target, &path, rate);
        let action = format!("copy the disk {} of domain {node}", found.target);
        virsh(&self.uri, &action, &arguments).await.map(drop)
    }

    /// Changes the rate of a copy; 0 is no limit.
    pub(super) async fn set_copy_rate(&self, node: Uuid, disk: Uuid, rate: Option<u64>) -> Result<()> {
        let rate = rate.unwrap_or(0).to_string();
        self.change_copy(node, disk, &["--bandwidth", &rate, "--bytes"]).await
    }

    /// Ends a copy that is ready: the disk has the other file open from then on.
    pub(super) async fn pivot_copy(&self, node: Uuid, disk: Uuid) -> Result<()> {
        self.change_copy(node, disk, &["--pivot"]).await
    }

    /// Ends a copy, if one is running: the disk keeps its file.
    pub(super) async fn abort_copy(&self, node: Uuid, disk: Uuid) -> Result<()> {
        let (now, _) = self.snapshot(node).await?;
        match now.live.find(disk) {
            Some(found) if found.mirror.is_some() => self.change_copy(node, disk, &["--abort"]).await,
            _ => Ok(()),
        }
    }

    async fn change_copy(&self, node: Uuid, disk: Uuid, options: &[&str]) -> Result<()> {
        let found = self.copied_disk(node, disk).await?;
        let action = format!("change the copy of the disk {} of domain {node}", found.target);
        let arguments = job_arguments(&self.uri, node, &found.target, options);
        virsh(&self.uri, &action, &arguments).await.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_limited_only_if_it_has_a_rate_and_its_progress_is_read() {
        let arguments = |rate| copy_arguments("u", Uuid::nil(), "sda", "/x", rate).join(" ");
        assert!(arguments(None).ends_with("--path sda --xml /x --reuse-external --transient-job"));
        assert!(arguments(Some(7)).ends_with(" --bandwidth 7 --bytes"));
        let output = " type=Block Copy\n bandwidth=0\n cur=3\n end=9\n";
        assert_eq!(parse_progress(output), Some((3, 9)));
        for unknown in ["", "No current block job for sda\n", " cur=0\n end=0\n"] {
            assert_eq!(parse_progress(unknown), None, "{unknown}");
        }
    }
}
