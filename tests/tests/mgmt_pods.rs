//! Volumes for pods of the management cluster: the real controller, storage infra and node plugin, with this host as node. No
//! kubelet of the management cluster runs in the lab, so the test makes kubelet's and csi-attacher's calls.

use std::collections::HashMap;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use crds::names::{CONTEXT_BLANK_ATTESTATION, CONTEXT_DISK_UUID};
use csi::proto::node_client::NodeClient;
use csi::proto::volume_capability::access_mode::Mode;
use csi::proto::volume_capability::{AccessMode, AccessType, MountVolume};
use csi::proto::{
    CapacityRange, ControllerExpandVolumeRequest, ControllerPublishVolumeRequest, NodeExpandVolumeRequest,
    NodeGetInfoRequest, NodeGetVolumeStatsRequest, NodePublishVolumeRequest, NodeStageVolumeRequest,
    NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest, VolumeCapability,
};
use lab::HostNode;
use tests::driver::{Driver, block, mount, new_volume, times_out};

use tests::{MIB, PATIENCE, Scenario, bytes, eventually, run};
use tonic::transport::Channel;
use tonic::{Code, Status};

/// Longer than the storage infra waits for a disk that is in use.
const BRIEFLY: Duration = Duration::from_secs(10);

/// mkfs.xfs refuses less.
const SMALLEST_XFS: i64 = 304 * MIB;

type PublishContext = HashMap<String, String>;

/// kubelet and csi-attacher, for the volumes of pods on this host.
struct Host {
    plugin: NodeClient<Channel>,
    controller: Driver,
    /// Node ID, as kubelet records it in its CSINode.
    id: String,
    /// Folder of the pods' targets and staging paths.
    dir: PathBuf,
}

impl Host {
    async fn of(s: &Scenario, node: &HostNode) -> Result<Self> {
        let mut plugin = NodeClient::new(csi::client::connect(&node.plugin.socket).await?);
        let info = plugin.node_get_info(NodeGetInfoRequest {}).await?.into_inner();
        ensure!(info.node_id.starts_with(&node.uuid.to_string()), "{info:?}");
        ensure!(info.accessible_topology.is_none(), "the controller has no topology: {info:?}");
        let controller = Driver::connect(&s.lab.mgmt_socket()?).await?;
        Ok(Self { plugin, controller, id: info.node_id, dir: node.plugin.kubelet_dir.clone() })
    }

    async fn attach(&self, volume: &str, capability: VolumeCapability) -> Result<PublishContext, Status> {
        let request = ControllerPublishVolumeRequest {
            volume_id: volume.to_owned(),
            node_id: self.id.clone(),
            volume_capability: Some(capability),
            ..Default::default()
        };
        Ok(self.controller.calls().controller_publish_volume(request).await?.into_inner().publish_context)
    }

    async fn detach(&self, volume: &str) -> Result<(), Status> {
        self.controller.unpublish(volume, &self.id).await
    }

    fn staging(&self, volume: &str) -> PathBuf {
        self.dir.join(format!("{volume}-staging"))
    }

    fn target(&self, volume: &str) -> PathBuf {
        self.dir.join(format!("{volume}-target"))
    }

    async fn mount(
        &mut self,
        volume: &str,
        context: &PublishContext,
        capability: VolumeCapability,
    ) -> Result<(), Status> {
        let staging = self.staging(volume).display().to_string();
        let stage = NodeStageVolumeRequest {
            volume_id: volume.to_owned(),
            publish_context: context.clone(),
            staging_target_path: staging.clone(),
            volume_capability: Some(capability.clone()),
            ..Default::default()
        };
        self.plugin.node_stage_volume(stage).await?;
        let publish = NodePublishVolumeRequest {
            volume_id: volume.to_owned(),
            publish_context: context.clone(),
            staging_target_path: staging,
            target_path: self.target(volume).display().to_string(),
            volume_capability: Some(capability),
            ..Default::default()
        };
        self.plugin.node_publish_volume(publish).await.map(drop)
    }

    async fn unmount(&mut self, volume: &str) -> Result<(), Status> {
        let target_path = self.target(volume).display().to_string();
        let unpublish = NodeUnpublishVolumeRequest { volume_id: volume.to_owned(), target_path };
        self.plugin.node_unpublish_volume(unpublish).await?;
        let staging_target_path = self.staging(volume).display().to_string();
        let unstage = NodeUnstageVolumeRequest { volume_id: volume.to_owned(), staging_target_path };
        self.plugin.node_unstage_volume(unstage).await.map(drop)
    }

    /// Bytes of the volume at its target, which is healthy.
    async fn size(&mut self, volume: &str) -> Result<i64> {
        let request = NodeGetVolumeStatsRequest {
            volume_id: volume.to_owned(),
            volume_path: self.target(volume).display().to_string(),
            ..Default::default()
        };
        let stats = self.plugin.node_get_volume_stats(request).await?.into_inner();
        ensure!(!stats.volume_condition.context("no condition")?.abnormal, "the volume is not healthy");
        Ok(stats.usage.first().context("no usage")?.total)
    }

    /// csi-resizer's call, and whether kubelet must expand the filesystem.
    async fn expand(&self, volume: &str, bytes: i64) -> Result<bool, Status> {
        let request = ControllerExpandVolumeRequest {
            volume_id: volume.to_owned(),
            capacity_range: Some(CapacityRange { required_bytes: bytes, limit_bytes: 0 }),
            volume_capability: Some(mount(Mode::SingleNodeWriter)),
            ..Default::default()
        };
        let expanded = self.controller.calls().controller_expand_volume(request).await?.into_inner();
        Ok(expanded.node_expansion_required)
    }

    async fn expand_filesystem(&mut self, volume: &str, bytes: i64) -> Result<(), Status> {
        let request = NodeExpandVolumeRequest {
            volume_id: volume.to_owned(),
            volume_path: self.target(volume).display().to_string(),
            capacity_range: Some(CapacityRange { required_bytes: bytes, limit_bytes: 0 }),
            staging_target_path: self.staging(volume).display().to_string(),
            ..Default::default()
        };
        self.plugin.node_expand_volume(request).await.map(drop)
    }
}

/// XFS, which root may expand without the capability CAP_SYS_RESOURCE that ext4 needs.
fn xfs(mode: Mode) -> VolumeCapability {
    let mount = MountVolume { fs_type: "xfs".to_owned(), ..MountVolume::default() };
    VolumeCapability {
        access_mode: Some(AccessMode { mode: mode.into() }),
        access_type: Some(AccessType::Mount(mount)),
    }
}

/// A new volume with its claim, and its ID in the storage infra, which is the handle of the management PersistentVolume.
async fn volume(s: &Scenario) -> Result<(String, String)> {
    volume_of(s, 4 * MIB).await
}

async fn volume_of(s: &Scenario, bytes: i64) -> Result<(String, String)> {
    let claim = s.driver.create(new_volume(&s.csi_name(), bytes, "nestor")).await?.volume_id;
    let handle = s.infra_volume(&claim).await?.id.to_string();
    Ok((claim, handle))
}

#[tokio::test]
async fn a_pod_of_the_management_cluster_uses_a_volume_and_a_vm_never_at_the_same_time() -> Result<()> {
    run(|s| async move {
        let s = &s;
        s.lab
            .with_host_node(|node| async move {
                let mut host = Host::of(s, &node).await?;
                refuses_what_is_not_there(s, &host).await?;
                keeps_a_filesystem(s, &mut host).await.context("a filesystem")?;
                gives_a_block_device(s, &mut host).await.context("a block device")?;
                has_one_writer(s, &mut host).await.context("one writer")?;
                survives_crashes(s, &mut host).await.context("crashes")
            })
            .await
    })
    .await
}

async fn refuses_what_is_not_there(s: &Scenario, host: &Host) -> Result<()> {
    let writer = || mount(Mode::SingleNodeWriter);
    let missing = host.attach("no-such-volume", writer()).await.err().context("attached no volume")?;
    ensure!(missing.code() == Code::NotFound, "{missing}");
    host.detach("no-such-volume").await?;
    let (_, volume) = volume(s).await?;
    for node in ["vm-1", &format!("{}/other", uuid::Uuid::new_v4())] {
        let refused = host.controller.publish(&volume, node).await.err().context("attached to no host")?;
        ensure!(refused.code() == Code::NotFound && refused.message().contains(node), "{refused}");
        host.controller.unpublish(&volume, node).await?;
    }
    let vm = s.node().await?;
    let of_vm = host.controller.publish(&volume, &format!("{}/{}", vm.uuid, vm.name)).await;
    let refused = of_vm.err().context("attached to a VM as if it were a host")?;
    ensure!(refused.code() == Code::FailedPrecondition, "{refused}");
    Ok(())
}

async fn keeps_a_filesystem(s: &Scenario, host: &mut Host) -> Result<()> {
    let (_, volume) = volume_of(s, SMALLEST_XFS).await?;
    let writer = || xfs(Mode::SingleNodeWriter);
    let first = host.attach(&volume, writer()).await?;
    ensure!(first.contains_key(CONTEXT_BLANK_ATTESTATION), "a new disk is attested blank");
    assert_eq!(host.attach(&volume, writer()).await?, first, "a repeated attach");
    let other = host.attach(&volume, xfs(Mode::MultiNodeReaderOnly)).await.err();
    assert_eq!(other.map(|refused| refused.code()), Some(Code::AlreadyExists));
    host.mount(&volume, &first, writer()).await?;
    host.mount(&volume, &first, writer()).await.context("repeated calls")?;
    let file = host.target(&volume).join("kept");
    std::fs::write(&file, "data")?;
    let before = host.size(&volume).await?;
    let bigger = SMALLEST_XFS + 64 * MIB;
    ensure!(host.expand(&volume, bigger).await?, "kubelet must expand the mounted filesystem");
    host.expand_filesystem(&volume, bigger).await?;
    ensure!(host.size(&volume).await? > before, "the filesystem was not expanded");
    let detach = || host.controller.unpublish_within(&volume, &host.id, BRIEFLY);
    times_out("the detach of a mounted disk", &[], detach).await?;

    host.unmount(&volume).await?;
    host.unmount(&volume).await.context("repeated calls")?;
    eventually("the disk is detached", PATIENCE, || async {
        Ok(host.detach(&volume).await.map_err(|error| error.to_string()))
    })
    .await?;
    host.detach(&volume).await?;
    ensure!(!host.expand(&volume, 2 * bigger).await?, "no host has the volume");
    let second = host.attach(&volume, writer()).await?;
    assert_eq!(second.get(CONTEXT_BLANK_ATTESTATION), None, "it was written");
    host.mount(&volume, &second, writer()).await?;
    ensure!(std::fs::read_to_string(&file)? == "data");
    ensure!(host.size(&volume).await? > bigger, "the filesystem has the size of the disk");
    host.unmount(&volume).await?;
    Ok(host.detach(&volume).await?)
}

async fn gives_a_block_device(s: &Scenario, host: &mut Host) -> Result<()> {
    let (claim, volume) = volume(s).await?;
    let raw = || block(Mode::SingleNodeWriter);
    let context = host.attach(&volume, raw()).await?;
    host.mount(&volume, &context, raw()).await?;
    let target = host.target(&volume);
    ensure!(std::fs::metadata(&target)?.file_type().is_block_device(), "no device at {}", target.display());
    bytes::write(&target, b"data")?;
    ensure!(host.size(&volume).await? >= 4 * MIB);
    host.unmount(&volume).await?;
    host.detach(&volume).await?;
    let file = s.file_of(&s.infra_volume(&claim).await?).await?;
    ensure!(bytes::read(&file, 4)? == b"data");
    Ok(())
}

async fn has_one_writer(s: &Scenario, host: &mut Host) -> Result<()> {
    let (claim, volume) = volume(s).await?;
    let (vm, writer) = (s.node().await?, || mount(Mode::SingleNodeWriter));
    let context = host.attach(&volume, writer()).await?;
    host.mount(&volume, &context, writer()).await?;
    let refused = s.driver.refusal(&claim, &vm.name, &writer()).await?;
    ensure!(refused.code() == Code::Unavailable && refused.message().contains("VolumeInUse"), "{refused}");
    s.driver.unpublish(&claim, &vm.name).await?;
    std::fs::write(host.target(&volume).join("from-the-pod"), "")?;
    host.unmount(&volume).await?;
    host.detach(&volume).await?;

    s.driver.publish(&claim, &vm.name).await?;
    let refused = host.attach(&volume, writer()).await.err().context("attached to a VM and to a host")?;
    ensure!(refused.code() == Code::FailedPrecondition, "{refused}");
    host.detach(&volume).await.context("a detach from the host does not concern the VM")?;
    let disk = context.get(CONTEXT_DISK_UUID).context("no disk")?;
    ensure!(bytes::device(&vm, disk).exists(), "the VM has the disk");
    s.driver.unpublish(&claim, &vm.name).await?;
    s.no_attachments(&vm).await
}

/// Each component is killed while a pod has the volume, and works on from there.
async fn survives_crashes(s: &Scenario, host: &mut Host) -> Result<()> {
    let (_, volume) = volume(s).await?;
    let writer = || mount(Mode::SingleNodeWriter);
    let context = host.attach(&volume, writer()).await?;
    host.mount(&volume, &context, writer()).await?;
    for component in ["storage-infra", "mgmt-csi", "mgmt-csi-node"] {
        s.lab.kill(component).await?;
        s.lab.start(component).await?;
        check_written(&host.target(&volume), component)?;
    }
    let again = eventually("the repeated attach", PATIENCE, || async {
        Ok(host.attach(&volume, writer()).await.map_err(|error| error.to_string()))
    })
    .await?;
    assert_eq!(again, context);
    eventually("the node plugin answers", PATIENCE, || async {
        let answer = host.plugin.clone().node_get_info(NodeGetInfoRequest {}).await;
        Ok(answer.map_err(|error| error.to_string()))
    })
    .await?;
    host.mount(&volume, &context, writer()).await?;
    host.unmount(&volume).await?;
    Ok(host.detach(&volume).await?)
}

fn check_written(target: &Path, name: &str) -> Result<()> {
    std::fs::write(target.join(name), name)?;
    ensure!(std::fs::read_to_string(target.join(name))? == name);
    Ok(())
}
