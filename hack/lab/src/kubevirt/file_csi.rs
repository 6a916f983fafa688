//! The CSI driver of the management cluster: its volumes are files of this host. It is another one than Nestor's, as most clusters
//! with KubeVirt have.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::node::NODE;
use crate::cache::KubeVirt;
use crate::cluster;
use crate::drivers;
use crate::infra;
use crate::ready::Ready;
use crate::run::Run;
use crate::state::{Cluster, Component};

const MANIFESTS: &str = include_str!("../../manifests/file-csi.yaml");
/// Name of the component.
const NAME: &str = "file-csi";

/// The file of a volume, which has the name of its PersistentVolume.
pub(crate) fn file(run: &Run, volume: &str) -> PathBuf {
    run.path("pools").join(NAME).join("volumes").join(volume)
}

/// Starts the driver on the node, and its sidecars.
pub(super) async fn start(run: &Run, cluster: &Cluster, built: &KubeVirt) -> Result<()> {
    cluster::apply_manifests(cluster, "manifests/file-csi.yaml", MANIFESTS).await?;
    let (socket, folder) = (run.socket_dir().join("file-csi.sock"), infra::mount_pool(run, NAME).await?);
    run.launch(NAME, driver(run, built, &socket, folder)).await?;
    drivers::start_other_driver(run, &run.state()?, NAME, socket).await
}

fn driver(run: &Run, built: &KubeVirt, socket: &Path, folder: PathBuf) -> Component {
    // An @ in the path: see the registration of gc-csi-node.
    let registration = run.socket_dir().join("plugins").join("nestor@file.csi.lab-reg.sock");
    let node = run.path("node");
    let flags: [(&str, PathBuf); 5] = [
        ("endpoint", socket.to_owned()),
        ("registration", registration),
        ("folder", folder),
        ("node", NODE.into()),
        ("node-pid", node.join("pid")),
    ];
    let mut argv = vec![built.file_csi.display().to_string()];
    argv.extend(flags.map(|(flag, value)| format!("--{flag}={}", value.display())));
    Component {
        argv,
        env: Default::default(),
        ready: Ready::Socket(socket.to_owned()),
        http: None,
        grace: 5,
        driver: None,
    }
}
