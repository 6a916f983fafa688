//! This host as a node of the management cluster, for a while: storage-infra attaches volumes to it, mgmt-csi serves
//! ControllerPublishVolume, and mgmt-csi-node runs. There is no kubelet: tests call its CSI socket.
//!
//! Not in every lab, because the programs of an earlier version do not have these flags.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use uuid::Uuid;

use crate::drivers;
use crate::infra;
use crate::lab::Lab;
use crate::loop_nodes::NodePlugin;
use crate::ports;
use crate::state::Component;
use crate::wait::eventually;

/// Name of the Node.
const NODE: &str = "this-host";
/// Component name of the plugin.
pub(crate) const PLUGIN: &str = "mgmt-csi-node";
/// How long the removal of the node may take after its disks were detached.
const PATIENCE: Duration = Duration::from_secs(60);

/// This host with its node plugin.
#[derive(Debug, Clone)]
pub struct HostNode {
    /// UUID of the node in the storage infra.
    pub uuid: Uuid,
    /// Directory in which storage-infra shows the disks.
    pub links: PathBuf,
    /// mgmt-csi-node.
    pub plugin: NodePlugin,
}

impl Lab {
    /// Runs `work` while volumes can be attached to this host. Always restores the usual flags.
    pub async fn with_host_node<T, F>(&self, work: impl FnOnce(HostNode) -> F) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        let links = infra::host_links(self.run());
        let flag = format!("--hypervisor={}", infra::host_hypervisor(self.run()));
        let mut changed = BTreeMap::new();
        for (name, flag) in [("storage-infra", flag), ("mgmt-csi", drivers::NODE_SERVICE.to_owned())] {
            let mut component = self.component(name)?;
            component.argv.push(flag);
            changed.insert(name.to_owned(), component);
        }
        let with_plugin = async {
            let node = self.spawn_host_plugin(links).await?;
            let outcome = work(node.clone()).await;
            let removed = self.remove_host_node(&node).await;
            outcome.and_then(|value| removed.map(|()| value))
        };
        self.with_components(changed, with_plugin).await
    }

    async fn spawn_host_plugin(&self, links: PathBuf) -> Result<HostNode> {
        let file = links.join("node");
        let uuid =
            std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let plugin = NodePlugin {
            component: PLUGIN.to_owned(),
            socket: self.state().sockets.join(format!("{PLUGIN}.sock")),
            kubelet_dir: self.run().path("kubelets").join(NODE),
        };
        std::fs::create_dir_all(&plugin.kubelet_dir)
            .with_context(|| format!("cannot make {}", plugin.kubelet_dir.display()))?;
        let words = vec![
            self.state().binaries.join(PLUGIN).display().to_string(),
            format!("--endpoint={}", drivers::endpoint(&plugin.socket)),
            format!("--node-name={NODE}"),
            format!("--host-links-dir={}", links.display()),
            format!("--kubelet-dir={}", plugin.kubelet_dir.display()),
            format!("--state-dir={}", plugin.kubelet_dir.display()),
            "--registration-socket=none".to_owned(),
        ];
        let component: Component = drivers::component(words, ports::free(1)?[0], Some(&plugin.socket));
        self.run().launch(PLUGIN, component).await?;
        Ok(HostNode { uuid: uuid.trim().parse().context("not a UUID")?, links, plugin })
    }

    /// Stops the plugin and removes the node. Its disks must be detached.
    async fn remove_host_node(&self, node: &HostNode) -> Result<()> {
        self.remove_node_plugin(&node.plugin).await?;
        let infra = self.infra()?;
        eventually("the host is no node of the storage infra", PATIENCE, || async {
            Ok(infra.delete_node(node.uuid).await.map_err(|error| error.to_string()))
        })
        .await
    }
}
