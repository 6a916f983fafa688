//! Attempts with crafted filesystem images: what a guest wrote to its disk must not harm the VM that mounts it.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use crds::names::{CONTEXT_BLANK_ATTESTATION, CONTEXT_DISK_UUID};
use csi::proto::node_client::NodeClient;
use csi::proto::volume_capability::access_mode::Mode;
use csi::proto::volume_capability::{AccessMode, AccessType, MountVolume};
use csi::proto::{NodeStageVolumeRequest, NodeUnstageVolumeRequest, VolumeCapability};
use lab::LoopNode;
use tests::bytes::{device, noise};
use tests::driver::new_volume;
use tests::{MIB, PATIENCE, Scenario};
use tokio::time::timeout;
use tonic::transport::Channel;

use super::attempt::Outcome::Refused;
use super::attempt::{Attempt, By, Seen, everywhere};

/// Bytes of a volume: xfs needs 300 MiB.
const SIZE: i64 = 320 * MIB;

/// A crafted image.
#[derive(Clone, Copy)]
pub(super) struct Image {
    filesystem: &'static str,
    /// Writes it to a device.
    craft: fn(&Path) -> Result<()>,
}

fn attempt(name: &'static str, filesystem: &'static str, craft: fn(&Path) -> Result<()>) -> Attempt<Image> {
    Attempt { name, act: Image { filesystem, craft }, expected: everywhere(Refused(By::GcCsiNode)) }
}

pub(super) fn attempts() -> Vec<Attempt<Image>> {
    vec![
        attempt("mount an ext4 with a crafted superblock", "ext4", |device| {
            make("mkfs.ext4", &["-q", "-F"], device)?;
            // s_log_block_size, s_blocks_per_group and what is between.
            write_at(device, 1024 + 24, &[0xff; 16])
        }),
        attempt("mount an ext4 that is larger than its disk", "ext4", |device| {
            make("mkfs.ext4", &["-q", "-F"], device)?;
            make("debugfs", &["-w", "-R", "ssv blocks_count 99999999"], device)
        }),
        attempt("mount an ext4 without a root directory", "ext4", |device| {
            make("mkfs.ext4", &["-q", "-F"], device)?;
            make("debugfs", &["-w", "-R", "clri <2>"], device)
        }),
        attempt("mount an xfs with a crafted superblock", "xfs", |device| {
            make("mkfs.xfs", &["-q", "-f"], device)?;
            // sb_agblocks and sb_agcount.
            write_at(device, 84, &[0xff; 8])
        }),
        attempt("mount an xfs as ext4", "ext4", |device| make("mkfs.xfs", &["-q", "-f"], device)),
        attempt("have a disk of noise formatted", "ext4", |device| write_at(device, 0, &noise(5, 1 << 20))),
    ]
}

fn make(program: &str, options: &[&str], device: &Path) -> Result<()> {
    let output = Command::new(program).args(options).arg(device).output()?;
    ensure!(output.status.success(), "{program}: {output:?}");
    Ok(())
}

fn write_at(device: &Path, offset: u64, bytes: &[u8]) -> Result<()> {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::options().write(true).open(device)?;
    file.write_all_at(bytes, offset)?;
    Ok(file.sync_all()?)
}

fn capability(filesystem: &str) -> VolumeCapability {
    let mount = MountVolume { fs_type: filesystem.to_owned(), ..Default::default() };
    VolumeCapability {
        access_mode: Some(AccessMode { mode: Mode::SingleNodeWriter.into() }),
        access_type: Some(AccessType::Mount(mount)),
    }
}

/// A node plugin and where it mounts.
pub(super) struct Plugin<'a> {
    s: &'a Scenario,
    node: &'a LoopNode,
    client: NodeClient<Channel>,
    staging: std::path::PathBuf,
}

impl<'a> Plugin<'a> {
    pub(super) fn new(
        s: &'a Scenario,
        node: &'a LoopNode,
        client: NodeClient<Channel>,
        staging: std::path::PathBuf,
    ) -> Self {
        Self { s, node, client, staging }
    }

    /// Stages a disk with a crafted image.
    pub(super) async fn make(&mut self, attempt: &Attempt<Image>) -> Result<()> {
        let (volume, mut context) = self.attached().await?;
        let disk = context.get(CONTEXT_DISK_UUID).context("no disk")?;
        (attempt.act.craft)(&device(self.node, disk)).context("crafting the image")?;
        // As for every attachment after the first.
        context.remove(CONTEXT_BLANK_ATTESTATION);
        let staged = timeout(PATIENCE, self.stage(&volume, attempt.act.filesystem, context)).await;
        let mounted = self.is_mounted()?;
        self.unstage(&volume).await?;
        self.s.driver.unpublish(&volume, &self.node.name).await?;
        let seen = match staged.context("the node plugin does not answer")? {
            Err(status) => Seen::Refused(By::GcCsiNode, status.message().to_owned()),
            Ok(()) => Seen::Permitted,
        };
        ensure!(!mounted, "the image is mounted: {seen}");
        attempt.expected[0].check(&seen)
    }

    /// Stages and unstages a new volume.
    pub(super) async fn still_works(&mut self) -> Result<()> {
        let (volume, context) = self.attached().await?;
        self.stage(&volume, "ext4", context).await?;
        ensure!(self.is_mounted()?, "a new volume is not mounted");
        self.unstage(&volume).await?;
        self.s.driver.unpublish(&volume, &self.node.name).await?;
        Ok(())
    }

    async fn attached(&self) -> Result<(String, HashMap<String, String>)> {
        let request = new_volume(&self.s.csi_name(), SIZE, "nestor");
        let volume = self.s.driver.create(request).await?.volume_id;
        let context = self.s.driver.publish_context(&volume, &self.node.name).await?;
        Ok((volume, context))
    }

    async fn stage(
        &mut self,
        volume: &str,
        filesystem: &str,
        context: HashMap<String, String>,
    ) -> Result<(), tonic::Status> {
        let request = NodeStageVolumeRequest {
            volume_id: volume.to_owned(),
            publish_context: context,
            staging_target_path: self.staging.display().to_string(),
            volume_capability: Some(capability(filesystem)),
            ..Default::default()
        };
        self.client.node_stage_volume(request).await.map(drop)
    }

    async fn unstage(&mut self, volume: &str) -> Result<()> {
        let request = NodeUnstageVolumeRequest {
            volume_id: volume.to_owned(),
            staging_target_path: self.staging.display().to_string(),
        };
        self.client.node_unstage_volume(request).await?;
        Ok(())
    }

    fn is_mounted(&self) -> Result<bool> {
        let path = format!(" {} ", self.staging.display());
        Ok(std::fs::read_to_string("/proc/self/mountinfo")?.contains(&path))
    }
}
