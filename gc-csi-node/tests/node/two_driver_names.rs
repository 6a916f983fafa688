//! One disk under two driver names: kubelet gives each its own staging path.

use std::path::PathBuf;

use csi::proto::node_client::NodeClient;
use csi::proto::volume_capability::access_mode::Mode;
use csi::proto::{NodePublishVolumeRequest, NodeStageVolumeRequest, NodeUnstageVolumeRequest};
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::test_node::{Disk, TestNode, filesystem};

const NAMES: [&str; 2] = ["guest.csi.nestor.dev", "old.example.com"];

/// A node with a disk that kubelet uses under both driver names.
struct TwoNames {
    node: TestNode,
    disk: Disk,
    clients: [NodeClient<Channel>; 2],
    mode: Mode,
}

impl TwoNames {
    async fn new(mode: Mode) -> Self {
        let mut node = TestNode::new();
        let old = node.path("kubelet/plugins/old.sock");
        let endpoint = format!("--legacy-endpoint=unix://{}", old.display());
        let name = format!("--legacy-driver-name={}", NAMES[1]);
        node.start_driver_with(None, &[&name, &endpoint]).await;
        let disk = node.disk(32);
        let clients = [node.client(), NodeClient::new(node.connect(&old).await)];
        Self { node, disk, clients, mode }
    }

    /// Staging path under this driver name.
    fn staging(&self, name: usize) -> PathBuf {
        let below = format!("kubelet/plugins/kubernetes.io/csi/{}/{}", NAMES[name], self.disk.id);
        let dir = self.node.path(&below);
        std::fs::create_dir_all(&dir).unwrap();
        dir.join("globalmount")
    }

    async fn stage(&self, name: usize) -> Result<(), Status> {
        let request = NodeStageVolumeRequest {
            staging_target_path: self.staging(name).display().to_string(),
            ..self.node.stage_request(&self.disk, filesystem("ext4", self.mode))
        };
        self.clients[name].clone().node_stage_volume(request).await.map(drop)
    }

    async fn publish(&self, name: usize, pod: &str) -> Result<PathBuf, Status> {
        let stage = self.node.stage_request(&self.disk, filesystem("ext4", self.mode));
        let target = self.node.target(&self.disk, pod);
        let request = NodePublishVolumeRequest {
            volume_id: stage.volume_id,
            publish_context: stage.publish_context,
            volume_capability: stage.volume_capability,
            staging_target_path: self.staging(name).display().to_string(),
            target_path: target.display().to_string(),
            ..NodePublishVolumeRequest::default()
        };
        self.clients[name].clone().node_publish_volume(request).await.map(|_| target)
    }

    async fn unstage(&self, name: usize) -> Result<(), Status> {
        let request = NodeUnstageVolumeRequest {
            volume_id: self.disk.id.clone(),
            staging_target_path: self.staging(name).display().to_string(),
        };
        self.clients[name].clone().node_unstage_volume(request).await.map(drop)
    }
}

#[tokio::test]
async fn a_disk_under_two_driver_names_is_unstaged_from_each_independently() {
    let two_names = TwoNames::new(Mode::SingleNodeMultiWriter).await;
    for name in [0, 1] {
        two_names.stage(name).await.unwrap();
    }
    two_names.publish(0, "own").await.unwrap();
    let target = two_names.publish(1, "old").await.unwrap();
    two_names.node.unpublish(&two_names.disk, "own").await.unwrap();
    // The disk is still used by the pod under the other name.
    for _ in 0..2 {
        two_names.unstage(0).await.unwrap();
    }
    assert!(two_names.node.mounted(&two_names.staging(0)).is_none());
    std::fs::write(target.join("file"), "kept").unwrap();
    // The last staging path waits for its pods as usual.
    let refused = two_names.unstage(1).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(refused.message().contains(&target.display().to_string()), "{refused}");
    two_names.node.unpublish(&two_names.disk, "old").await.unwrap();
    two_names.unstage(1).await.unwrap();

    two_names.stage(0).await.unwrap();
    let target = two_names.publish(0, "own").await.unwrap();
    assert_eq!(std::fs::read_to_string(target.join("file")).unwrap(), "kept");
}

#[tokio::test]
async fn a_staging_path_of_another_driver_name_is_not_a_second_pod_of_a_single_writer() {
    let two_names = TwoNames::new(Mode::SingleNodeSingleWriter).await;
    for name in [0, 1] {
        two_names.stage(name).await.unwrap();
    }
    let target = two_names.publish(0, "own").await.unwrap();
    let refused = two_names.publish(1, "old").await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(refused.message().contains(&target.display().to_string()), "{refused}");
}
