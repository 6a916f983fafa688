//! mgmt-csi-node on the management cluster's node, whose kubelet it registers itself with.

use std::path::Path;

use anyhow::Result;
use k8s_openapi::api::storage::v1::CSINode;
use kube::Api;

use super::PATIENCE;
use super::node::{NODE, inside};
use crate::drivers;
use crate::host_node::PLUGIN;
use crate::infra;
use crate::kubeconfig;
use crate::ready::Ready;
use crate::run::Run;
use crate::state::Cluster;
use crate::wait::eventually;

/// Starts the plugin; the storage infra must run. Returns when kubelet has it.
pub(crate) async fn start(run: &Run, cluster: &Cluster) -> Result<()> {
    let state = run.state()?;
    let socket = state.sockets.join(format!("{PLUGIN}.sock"));
    let argv = argv(run, &state.binaries, &socket);
    run.launch(PLUGIN, inside(run, &state.tools, argv, Ready::Socket(socket))).await?;
    let nodes: Api<CSINode> = Api::all(kubeconfig::client(&cluster.kubeconfig).await?);
    eventually("kubelet of the management cluster has mgmt-csi-node", PATIENCE, || async {
        let drivers = nodes.get_opt(NODE).await?.map(|node| node.spec.drivers).unwrap_or_default();
        let has = drivers.iter().any(|driver| driver.name == crds::names::MANAGEMENT_DRIVER);
        Ok(if has { Ok(()) } else { Err("CSINode does not list it".to_owned()) })
    })
    .await
}

/// The paths are those of the node, where the lab's folder is too.
fn argv(run: &Run, binaries: &Path, socket: &Path) -> Vec<String> {
    vec![
        binaries.join(PLUGIN).display().to_string(),
        format!("--endpoint={}", drivers::endpoint(socket)),
        format!("--node-name={NODE}"),
        format!("--host-links-dir={}", infra::host_links(run).display()),
        format!("--state-dir={}", run.path("node").display()),
    ]
}
