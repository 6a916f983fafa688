//! Formatting of disks: only if the storage infra attests that they are blank.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use crds::names::{CONTEXT_BLANK_ATTESTATION, CONTEXT_DISK_UUID, CONTEXT_FORMAT_TOKEN};
use csi::proto::node_client::NodeClient;
use csi::proto::volume_capability::access_mode::Mode;
use csi::proto::{NodeStageVolumeRequest, NodeUnstageVolumeRequest};
use tests::driver::{mount, new_volume};
use tests::{MIB, bytes, run};
use tonic::transport::Channel;
use tonic::{Code, Status};

/// Large enough that the first MiB of the ext4 filesystem has only metadata, of which there are backups.
const SIZE: i64 = 4096 * MIB;

type PublishContext = HashMap<String, String>;

fn attestation(context: &PublishContext) -> Option<String> {
    context.get(CONTEXT_BLANK_ATTESTATION).cloned()
}

fn token(context: &PublishContext) -> Option<String> {
    context.get(CONTEXT_FORMAT_TOKEN).cloned()
}

#[tokio::test]
async fn a_new_disk_is_attested_blank_in_all_tiers_until_the_first_write() -> Result<()> {
    run(|s| async move {
        let (volume, node) = (s.volume().await?, s.node().await?);
        let first = s.driver.publish_context(&volume, &node.name).await?;
        let blank = attestation(&first).context("the new disk is not attested blank")?;
        let secret = token(&first).context("there is no format token")?;
        let attachment = s.attachment(&node.name, &volume).await?.and_then(|one| one.status);
        let attachment = attachment.context("no status")?;
        let disk_status = s.disk(&node.name, &volume).await?.context("the VM has no such disk")?;
        for (blank_there, secret_there) in [
            (attachment.blank_attestation, attachment.format_token),
            (disk_status.blank_attestation, disk_status.format_token),
        ] {
            assert_eq!((blank_there, secret_there), (Some(blank.clone()), Some(secret.clone())));
        }
        assert_eq!(s.driver.publish_context(&volume, &node.name).await?, first, "a repeated attach");

        let disk = first.get(CONTEXT_DISK_UUID).context("no disk")?;
        bytes::write(&bytes::device(&node, disk), b"data")?;
        s.driver.unpublish(&volume, &node.name).await?;
        let second = s.driver.publish_context(&volume, &node.name).await?;
        assert_eq!((attestation(&second), token(&second)), (None, Some(secret)));
        s.driver.unpublish(&volume, &node.name).await?;
        s.no_attachments(&node).await
    })
    .await
}

async fn stage(
    plugin: &mut NodeClient<Channel>,
    volume: &str,
    staging: &Path,
    context: PublishContext,
) -> Result<(), Status> {
    let request = NodeStageVolumeRequest {
        volume_id: volume.to_owned(),
        publish_context: context,
        staging_target_path: staging.display().to_string(),
        volume_capability: Some(mount(Mode::SingleNodeWriter)),
        ..Default::default()
    };
    plugin.node_stage_volume(request).await.map(drop)
}

/// The message with which a stage is refused that finds a backup superblock.
fn refusal(staged: Result<(), Status>) -> Result<String> {
    let status = staged.err().context("the disk was formatted")?;
    ensure!(status.code() == Code::FailedPrecondition, "{status}");
    ensure!(status.message().contains("ext4 backup superblock"), "{status}");
    Ok(status.message().to_owned())
}

/// Runs the repair command of a refusal on a copy of the volume; returns the content of the file `kept`.
fn repaired(file: &Path, refusal: &str) -> Result<String> {
    let copy = tempfile::NamedTempFile::new()?;
    let copying = Command::new("cp").arg("--sparse=always").args([file, copy.path()]).status()?;
    ensure!(copying.success(), "cp: {copying}");
    let command = refusal.split('`').nth(1).context("the refusal has no command")?;
    let options = command.strip_prefix("e2fsck ").and_then(|rest| rest.strip_suffix(" COPY"));
    let options = options.with_context(|| format!("not e2fsck: {command}"))?;
    let check = Command::new("e2fsck").arg("-fy").args(options.split(' ')).arg(copy.path()).output()?;
    ensure!(check.status.code().is_some_and(|code| code < 4), "{check:?}");
    let shown = Command::new("debugfs").args(["-R", "cat /kept"]).arg(copy.path()).output()?;
    Ok(String::from_utf8(shown.stdout)?)
}

#[tokio::test]
async fn a_volume_with_a_lost_superblock_is_not_formatted() -> Result<()> {
    run(|s| async move {
        let request = new_volume(&s.csi_name(), SIZE, "nestor");
        let (volume, node) = (s.driver.create(request).await?.volume_id, s.node().await?);
        let running = s.lab.spawn_node_plugin(&node).await?;
        let mut plugin = NodeClient::new(csi::client::connect(&running.socket).await?);
        let staging = running.kubelet_dir.join("staging");
        let context = s.driver.publish_context(&volume, &node.name).await?;
        stage(&mut plugin, &volume, &staging, context.clone()).await?;
        std::fs::write(staging.join("kept"), "data")?;
        let unstage = NodeUnstageVolumeRequest {
            volume_id: volume.clone(),
            staging_target_path: staging.display().to_string(),
        };
        plugin.node_unstage_volume(unstage).await?;

        // Written through the device, so that the page cache is consistent; tested in the same and in the next attachment.
        let device = bytes::device(&node, context.get(CONTEXT_DISK_UUID).context("no disk")?);
        bytes::write(&device, &vec![0; 1 << 20])?;
        refusal(stage(&mut plugin, &volume, &staging, context).await)?;
        s.driver.unpublish(&volume, &node.name).await?;
        let next = s.driver.publish_context(&volume, &node.name).await?;
        assert_eq!(attestation(&next), None);
        let message = refusal(stage(&mut plugin, &volume, &staging, next).await)?;
        s.driver.unpublish(&volume, &node.name).await?;
        s.no_attachments(&node).await?;

        let file = s.file_of(&s.infra_volume(&volume).await?).await?;
        assert_eq!(repaired(&file, &message)?, "data");
        s.lab.remove_node_plugin(&running).await
    })
    .await
}
