//! Many VMs with a volume each, so that many objects are reconciled.

use anyhow::Result;
use crds::names;
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, Patch, PatchParams};
use lab::LoopNode;
use serde_json::json;
use tests::{PATIENCE, Scenario, eventually};

/// Enough for more failed reconciles than the rules tolerate, within a few retries of each.
const COUNT: usize = 12;

pub(super) struct Fleet {
    /// Each VM, and the handle of its volume.
    pub members: Vec<(LoopNode, String)>,
}

impl Fleet {
    /// Creates the VMs, their guest Nodes and the volumes.
    pub(super) async fn new(s: &Scenario) -> Result<Self> {
        let members = (0..COUNT).map(|_| async { tokio::try_join!(s.simulated_node(), s.volume()) });
        Ok(Self { members: try_join_all(members).await? })
    }

    /// Adds the entry of its volume to each VM.
    pub(super) async fn add_entries(&self, s: &Scenario) -> Result<()> {
        let all = self.members.iter().map(|(node, claim)| {
            let entry =
                json!({"name": names::volume_entry(claim), "persistentVolumeClaim": {"claimName": claim}});
            s.add_entry(&node.name, entry)
        });
        try_join_all(all).await.map(drop)
    }

    /// Removes the entries.
    pub(super) async fn remove_entries(&self, s: &Scenario) -> Result<()> {
        let all = self.members.iter().map(|(node, _)| s.remove_entries(&node.name, |_| true));
        try_join_all(all).await.map(drop)
    }

    /// Waits until the status of each VM shows its volume, or not.
    pub(super) async fn are_attached(&self, s: &Scenario, expected: bool) -> Result<()> {
        for (node, claim) in &self.members {
            eventually(&format!("{claim} is attached to {}: {expected}", node.name), PATIENCE, || async {
                let disk = s.disk(&node.name, claim).await?;
                let is_done = match &disk {
                    Some(disk) => expected && disk.attached,
                    None => !expected,
                };
                Ok(if is_done { Ok(()) } else { Err(format!("{disk:?}")) })
            })
            .await?;
        }
        Ok(())
    }

    /// Removes the zone labels of the guest Nodes, which gc-csi adds.
    pub(super) async fn remove_zones(&self, s: &Scenario) -> Result<()> {
        let nodes: Api<Node> = Api::all(s.guest.clone());
        let without = Patch::Merge(json!({"metadata": {"labels": {names::LABEL_ZONE: null}}}));
        let (nodes, without, parameters) = (&nodes, &without, &PatchParams::default());
        let all = self.members.iter().map(|(node, _)| nodes.patch(&node.name, parameters, without));
        Ok(try_join_all(all).await.map(drop)?)
    }
}
