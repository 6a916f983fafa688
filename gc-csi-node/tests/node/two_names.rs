//! One disk under two names of the driver: each has a staging path of its own, as kubelet gives it.

use std::path::PathBuf;

use csi::proto::node_client::NodeClient;
use csi::proto::volume_capability::access_mode::Mode;
use csi::proto::{NodePublishVolumeRequest, NodeStageVolumeRequest, NodeUnstageVolumeRequest};
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::machine::{Disk, Machine, filesystem};

const NAMES: [&str; 2] = ["guest.csi.nestor.dev", "old.example.com"];

/// A machine with a disk that kubelet uses under both names.
struct Twice {
    machine: Machine,
    disk: Disk,
    faces: [NodeClient<Channel>; 2],
    mode: Mode,
}

impl Twice {
    async fn new(mode: Mode) -> Self {
        let mut machine = Machine::new();
        let old = machine.path("kubelet/plugins/old.sock");
        let endpoint = format!("--legacy-endpoint=unix://{}", old.display());
        let name = format!("--legacy-driver-name={}", NAMES[1]);
        machine.start_driver_with(None, &[&name, &endpoint]).await;
        let disk = machine.disk(32);
        let faces = [machine.node().await, NodeClient::new(machine.connect(&old).await)];
        Self { machine, disk, faces, mode }
    }

    /// Where kubelet stages the volume of a driver of this name.
    fn staging(&self, name: usize) -> PathBuf {
        let below = format!("kubelet/plugins/kubernetes.io/csi/{}/{}", NAMES[name], self.disk.id);
        let folder = self.machine.path(&below);
        std::fs::create_dir_all(&folder).unwrap();
        folder.join("globalmount")
    }

    async fn stage(&self, name: usize) -> Result<(), Status> {
        let request = NodeStageVolumeRequest {
            staging_target_path: self.staging(name).display().to_string(),
            ..self.machine.stage_request(&self.disk, filesystem("ext4", self.mode))
        };
        self.faces[name].clone().node_stage_volume(request).await.map(drop)
    }

    async fn publish(&self, name: usize, pod: &str) -> Result<PathBuf, Status> {
        let stage = self.machine.stage_request(&self.disk, filesystem("ext4", self.mode));
        let target = self.machine.target(&self.disk, pod);
        let request = NodePublishVolumeRequest {
            volume_id: stage.volume_id,
            publish_context: stage.publish_context,
            volume_capability: stage.volume_capability,
            staging_target_path: self.staging(name).display().to_string(),
            target_path: target.display().to_string(),
            ..NodePublishVolumeRequest::default()
        };
        self.faces[name].clone().node_publish_volume(request).await.map(|_| target)
    }

    async fn unstage(&self, name: usize) -> Result<(), Status> {
        let request = NodeUnstageVolumeRequest {
            volume_id: self.disk.id.clone(),
            staging_target_path: self.staging(name).display().to_string(),
        };
        self.faces[name].clone().node_unstage_volume(request).await.map(drop)
    }
}

#[tokio::test]
async fn a_disk_under_two_names_leaves_each_without_waiting_for_the_other() {
    let twice = Twice::new(Mode::SingleNodeMultiWriter).await;
    for name in [0, 1] {
        twice.stage(name).await.unwrap();
    }
    twice.publish(0, "own").await.unwrap();
    let target = twice.publish(1, "old").await.unwrap();
    twice.machine.unpublish(&twice.disk, "own").await.unwrap();
    // The disk stays for the pod of the other name.
    for _ in 0..2 {
        twice.unstage(0).await.unwrap();
    }
    assert!(twice.machine.mounted(&twice.staging(0)).is_none());
    std::fs::write(target.join("file"), "kept").unwrap();
    // The last one waits for its pods, as ever.
    let refused = twice.unstage(1).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(refused.message().contains(&target.display().to_string()), "{refused}");
    twice.machine.unpublish(&twice.disk, "old").await.unwrap();
    twice.unstage(1).await.unwrap();

    twice.stage(0).await.unwrap();
    let target = twice.publish(0, "own").await.unwrap();
    assert_eq!(std::fs::read_to_string(target.join("file")).unwrap(), "kept");
}

#[tokio::test]
async fn the_staging_of_another_name_is_no_second_pod_of_a_single_writer() {
    let twice = Twice::new(Mode::SingleNodeSingleWriter).await;
    for name in [0, 1] {
        twice.stage(name).await.unwrap();
    }
    let target = twice.publish(0, "own").await.unwrap();
    let refused = twice.publish(1, "old").await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(refused.message().contains(&target.display().to_string()), "{refused}");
}
