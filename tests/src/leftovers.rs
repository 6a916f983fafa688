//! Leftovers of a scenario in both tiers and the storage infra.

use anyhow::{Result, bail};
use kube::ResourceExt;
use kube::api::ListParams;
use lab::LoopNode;

use crate::Scenario;
use crate::objects::gone;

impl Scenario {
    /// Waits until a node has no attachments in the management cluster and the storage infra.
    pub async fn no_attachments(&self, node: &LoopNode) -> Result<()> {
        let uuid = node.uuid.to_string();
        gone(&format!("VolumeAttachments of {}", node.name), || async {
            let list = self.attachments().list(&ListParams::default()).await?;
            let own = list.iter().filter(|one| one.spec.node_uuid.eq_ignore_ascii_case(&uuid));
            Ok(own.map(ResourceExt::name_any).collect())
        })
        .await?;
        gone(&format!("attachments of {} in the storage infra", node.name), || async {
            let list = self.infra.list_attachments(Some(uuid.parse()?), None).await?;
            Ok(list.iter().map(|one| format!("{} ({})", one.id, one.state)).collect())
        })
        .await?;
        let disks: Vec<_> = std::fs::read_dir(&node.by_id_dir).map(Iterator::collect).unwrap_or_default();
        if !disks.is_empty() {
            bail!("{} still has disks: {disks:?}", node.name);
        }
        Ok(())
    }

    /// Waits until both tiers and the storage infra hold nothing of the scenario's volumes.
    pub async fn no_leftovers(&self) -> Result<()> {
        let (claims, volumes) = {
            let created = self.created();
            (created.claims.clone(), created.volumes.clone())
        };
        gone("management claims", || async {
            let list = self.claims().list(&ListParams::default()).await?;
            Ok(list.iter().filter(|claim| self.is_own(claim)).map(ResourceExt::name_any).collect())
        })
        .await?;
        gone("management volumes", || async {
            let list = self.volumes().list(&ListParams::default()).await?;
            let of_own = |name: Option<&String>| name.is_some_and(|name| claims.contains(name));
            let own = list.iter().filter(|volume| {
                let claim = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
                of_own(claim.and_then(|claim| claim.name.as_ref()))
            });
            Ok(own.map(ResourceExt::name_any).collect())
        })
        .await?;
        gone("management snapshots", || self.own_snapshots()).await?;
        gone("snapshots in the storage infra", || async {
            let list = self.infra.list_snapshots(None, None, None).await?.items;
            let own = list.iter().filter(|snapshot| volumes.contains(&snapshot.volume));
            Ok(own.map(|snapshot| snapshot.id.to_string()).collect())
        })
        .await?;
        gone("VolumeAttachments", || async {
            let list = self.attachments().list(&ListParams::default()).await?;
            let own = list.iter().filter(|one| claims.contains(one.spec.volume_name.as_str()));
            Ok(own.map(ResourceExt::name_any).collect())
        })
        .await?;
        gone("volumes in the storage infra", || async {
            let list = self.infra.list_volumes(None, None).await?.items;
            let own = list.iter().filter(|volume| {
                volumes.contains(&volume.id)
                    || volume.labels.get("pvc").is_some_and(|claim| claims.contains(claim))
            });
            Ok(own.map(|volume| volume.id.to_string()).collect())
        })
        .await
    }
}
