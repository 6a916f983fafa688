//! Nodes without a domain, which tests add to a running lab: loop nodes, which this host plays, and simulated nodes.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use uuid::Uuid;

use crate::lab::Lab;
use crate::state::{Component, LoopNodeRecord};
use crate::wait::eventually;
use crate::{drivers, infra, ports, virtual_machines, vm};

/// How long the removal of a node without disks may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// A VM without a domain: this host plays it (loop devices, shown as links), or it is simulated.
#[derive(Debug, Clone)]
pub struct LoopNode {
    /// Name of the `VirtualMachine` and of the node.
    pub name: String,
    /// The VM's UUID.
    pub uuid: Uuid,
    /// The guest it belongs to.
    pub guest: String,
    /// The zone it is in.
    pub zone: String,
    /// Its `/dev/disk/by-id`.
    pub by_id_dir: PathBuf,
}

/// A node plugin (`gc-csi-node`) on this host.
#[derive(Debug, Clone)]
pub struct NodePlugin {
    /// Its component name.
    pub component: String,
    /// Its CSI socket.
    pub socket: PathBuf,
    /// Folder that it uses in place of kubelet's.
    pub kubelet_dir: PathBuf,
}

impl Lab {
    /// Adds a loop node to guest `g1`.
    pub async fn add_loop_node(&self, name: &str) -> Result<LoopNode> {
        self.add_loop_node_to("g1", name).await
    }

    /// Adds a loop node to a guest.
    pub async fn add_loop_node_to(&self, guest: &str, name: &str) -> Result<LoopNode> {
        self.add_loop_node_in(infra::ZONES[0], guest, name).await
    }

    /// Adds a loop node to a guest, in a zone: a `VirtualMachine`, which mgmt-csi registers with the storage infra.
    pub async fn add_loop_node_in(&self, zone: &str, guest: &str, name: &str) -> Result<LoopNode> {
        self.add_node(infra::LOOP, zone, guest, name).await
    }

    /// Adds a simulated node to a guest: attaching takes no time and no device. See [`LoopNode::block_calls`].
    pub async fn add_simulated_node(&self, guest: &str, name: &str) -> Result<LoopNode> {
        self.add_node(infra::SIMULATED, infra::ZONES[0], guest, name).await
    }

    /// Adds the object of a VM to a guest that libvirt has as a domain.
    pub async fn add_domain_node(&self, guest: &str, name: &str, uuid: Uuid) -> Result<LoopNode> {
        let node = self.new_node(infra::LOOP, infra::ZONES[0], guest, name, uuid)?;
        self.register(&node).await?;
        Ok(node)
    }

    async fn add_node(&self, hypervisor: &str, zone: &str, guest: &str, name: &str) -> Result<LoopNode> {
        let node = self.new_node(hypervisor, zone, guest, name, Uuid::new_v4())?;
        // The hypervisor has a VM with this UUID.
        std::fs::create_dir_all(&node.by_id_dir)
            .with_context(|| format!("cannot make {}", node.by_id_dir.display()))?;
        self.register(&node).await?;
        Ok(node)
    }

    fn new_node(
        &self,
        hypervisor: &str,
        zone: &str,
        guest: &str,
        name: &str,
        uuid: Uuid,
    ) -> Result<LoopNode> {
        let record = LoopNodeRecord { guest: guest.to_owned(), uuid: uuid.to_string() };
        self.run().update(|state| state.loop_nodes.insert(name.to_owned(), record))?;
        let infra_record = self.infra_record()?;
        let root = match hypervisor {
            infra::SIMULATED => &infra_record.simulated_root,
            _ => &infra_record.loop_root,
        };
        Ok(LoopNode {
            name: name.to_owned(),
            uuid,
            guest: guest.to_owned(),
            zone: zone.to_owned(),
            by_id_dir: root.join(uuid.to_string()),
        })
    }

    /// Creates the object of a VM, and waits until mgmt-csi has registered it.
    async fn register(&self, LoopNode { name, uuid, guest, zone, .. }: &LoopNode) -> Result<()> {
        let (client, namespace) = (self.management().await?, self.guest_namespace(guest)?);
        let cluster_id = self.cluster_id(guest)?;
        virtual_machines::create(&client, &namespace, &cluster_id, name, &uuid.to_string(), Some(zone))
            .await?;
        virtual_machines::wait_until_registered(&client, &namespace, name).await
    }

    /// Creates Node and CSINode objects of a loop node in its guest, so that csi-attacher attaches to it.
    pub async fn join_guest(&self, node: &LoopNode) -> Result<()> {
        let client = self.guest(&node.guest).await?;
        vm::join_without_kubelet(&client, &node.name).await
    }

    /// Removes a loop node. Its disks must be detached.
    pub async fn remove_loop_node(&self, name: &str) -> Result<()> {
        let record =
            self.run().state()?.loop_nodes.remove(name).with_context(|| format!("no loop node {name:?}"))?;
        vm::leave_guest(&self.guest(&record.guest).await?, name).await?;
        virtual_machines::delete(&self.management().await?, &self.guest_namespace(&record.guest)?, name)
            .await?;
        let uuid = record.uuid.parse().context("bad UUID in the state")?;
        let infra = self.infra()?;
        eventually(&format!("mgmt-csi removes node {name}"), PATIENCE, || async {
            let node = infra.get_node(uuid).await?;
            Ok(node.map_or(Ok(()), |node| Err(format!("{node:?}"))))
        })
        .await?;
        self.run().update(|state| state.loop_nodes.remove(name)).map(drop)
    }

    /// Runs gc-csi's node plugin on this host for a loop node.
    pub async fn spawn_node_plugin(&self, node: &LoopNode) -> Result<NodePlugin> {
        let component = format!("{}-plugin", node.name);
        let short: String = node.uuid.simple().to_string().chars().take(12).collect();
        let plugin = NodePlugin {
            socket: self.state().sockets.join(format!("node-{short}.sock")),
            kubelet_dir: self.run().path("kubelets").join(&node.name),
            component,
        };
        std::fs::create_dir_all(&plugin.kubelet_dir)
            .with_context(|| format!("cannot make {}", plugin.kubelet_dir.display()))?;
        let words = vec![
            self.state().binaries.join("gc-csi-node").display().to_string(),
            format!("--endpoint={}", drivers::endpoint(&plugin.socket)),
            format!("--node-name={}", node.name),
            format!("--zone={}", node.zone),
            format!("--kubelet-dir={}", plugin.kubelet_dir.display()),
            format!("--state-dir={}", plugin.kubelet_dir.display()),
            "--registration-socket=none".to_owned(),
            format!("--by-id-dir={}", node.by_id_dir.display()),
        ];
        let component: Component = drivers::component(words, ports::free(1)?[0], Some(&plugin.socket));
        self.run().launch(&plugin.component, component).await?;
        Ok(plugin)
    }

    /// Stops a node plugin and removes its record.
    pub async fn remove_node_plugin(&self, plugin: &NodePlugin) -> Result<()> {
        self.run().stop(&plugin.component).await?;
        self.run().forget(&plugin.component)
    }
}

impl LoopNode {
    /// Blocks all hypervisor calls for a simulated node until [`Self::unblock_calls`].
    pub fn block_calls(&self) -> Result<()> {
        std::fs::create_dir_all(&self.by_id_dir)
            .and_then(|()| std::fs::write(self.by_id_dir.join("hang"), ""))
            .with_context(|| format!("cannot block calls for {}", self.name))
    }

    /// Unblocks the hypervisor calls for a simulated node.
    pub fn unblock_calls(&self) -> Result<()> {
        let hang = self.by_id_dir.join("hang");
        std::fs::remove_file(&hang).with_context(|| format!("cannot remove {}", hang.display()))
    }
}
