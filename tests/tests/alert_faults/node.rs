//! Faults on a node, whose plugin is called like by kubelet.

use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use crds::names::CONTEXT_DISK_UUID;
use csi::proto::node_client::NodeClient;
use csi::proto::volume_capability::access_mode::Mode;
use csi::proto::{NodeStageVolumeRequest, NodeUnstageVolumeRequest};
use lab::process::{command, run};
use tests::MIB;
use tests::bytes::device;
use tests::driver::{mount, new_volume};
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use super::faults::Watch;
use crate::alerts::site::Site;

const SIZE: i64 = 32 * MIB;
/// Deadline of a call that waits for a disk in vain.
const SHORT: Duration = Duration::from_secs(2);
const LONG: Duration = Duration::from_secs(60);

/// A volume, and the path at which it is staged.
struct Staged<'a> {
    site: &'a Site,
    plugin: NodeClient<Channel>,
    volume: String,
    path: String,
}

impl<'a> Staged<'a> {
    async fn new(site: &'a Site, name: &str) -> Result<Self> {
        let request = new_volume(&site.s.csi_name(), SIZE, "nestor");
        let volume = site.s.driver.create(request).await?.volume_id;
        let plugin = NodeClient::new(csi::client::connect(&site.plugin.socket).await?);
        let folder = site.plugin.kubelet_dir.join(name);
        std::fs::create_dir_all(&folder)?;
        Ok(Self { site, plugin, volume, path: folder.join("staging").display().to_string() })
    }

    async fn attach(&self) -> Result<HashMap<String, String>> {
        Ok(self.site.s.driver.publish_context(&self.volume, &self.site.node.name).await?)
    }

    async fn stage(&self, context: &HashMap<String, String>, deadline: Duration) -> Result<(), Status> {
        let mut request = Request::new(NodeStageVolumeRequest {
            volume_id: self.volume.clone(),
            publish_context: context.clone(),
            staging_target_path: self.path.clone(),
            volume_capability: Some(mount(Mode::SingleNodeWriter)),
            ..Default::default()
        });
        request.set_timeout(deadline);
        self.plugin.clone().node_stage_volume(request).await.map(drop)
    }

    async fn unstage(&self) -> Result<(), Status> {
        let (volume_id, staging_target_path) = (self.volume.clone(), self.path.clone());
        let request = NodeUnstageVolumeRequest { volume_id, staging_target_path };
        self.plugin.clone().node_unstage_volume(request).await.map(drop)
    }

    async fn detach(&self) -> Result<()> {
        Ok(self.site.s.driver.unpublish(&self.volume, &self.site.node.name).await?)
    }
}

fn disk_of(context: &HashMap<String, String>) -> Result<&str> {
    Ok(context.get(CONTEXT_DISK_UUID).context("the publish context has no disk")?)
}

/// kubelet stages a volume whose disk was detached meanwhile.
pub(super) async fn misses_a_disk(site: &Site, alerts: &Watch<'_>) -> Result<()> {
    let staged = Staged::new(site, "missing").await?;
    let context = staged.attach().await?;
    staged.detach().await?;
    alerts
        .fire_while(|| async {
            let missing = staged.stage(&context, SHORT).await;
            ensure!(missing.is_err(), "it staged a disk that is detached");
            Ok(())
        })
        .await?;
    let context = staged.attach().await?;
    staged.stage(&context, LONG).await?;
    staged.unstage().await?;
    staged.detach().await
}

/// The end of a disk with a filesystem disappears.
pub(super) async fn loses_data(site: &Site, alerts: &Watch<'_>) -> Result<()> {
    let staged = Staged::new(site, "cut").await?;
    let context = staged.attach().await?;
    staged.stage(&context, LONG).await?;
    staged.unstage().await?;
    let file = site.s.file_of(&site.s.infra_volume(&staged.volume).await?).await?;
    let disk = device(&site.node, disk_of(&context)?);
    let (whole, half) = (std::fs::read(&file)?, SIZE / 2);
    resize(&file, &disk, half).await?;
    alerts
        .fire_while(|| async {
            let lost = staged.stage(&context, LONG).await.expect_err("it staged half of a filesystem");
            ensure!(lost.code() == Code::DataLoss, "{lost}");
            Ok(())
        })
        .await?;
    let end = &whole[usize::try_from(half)?..];
    std::fs::File::options().write(true).open(&file)?.write_all_at(end, u64::try_from(half)?)?;
    resize(&file, &disk, SIZE).await?;
    staged.stage(&context, LONG).await?;
    staged.unstage().await?;
    staged.detach().await
}

/// Changes the size of a volume's file and of its loop device.
async fn resize(file: &Path, disk: &Path, bytes: i64) -> Result<()> {
    std::fs::File::options().write(true).open(file)?.set_len(u64::try_from(bytes)?)?;
    run(command("losetup", ["--set-capacity"]).arg(std::fs::canonicalize(disk)?)).await.map(drop)
}
