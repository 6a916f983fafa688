//! Objects in the guest cluster.

use anyhow::{Context, Result};
use crds::names;
use k8s_openapi::api::core::v1::{Event, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttachment};
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use serde_json::json;

use crate::{PATIENCE, Scenario, eventually};

impl Scenario {
    /// Claims in the scenario's namespace of the guest.
    pub fn guest_claims(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.guest.clone(), &self.name)
    }

    /// Volumes of the guest.
    pub fn guest_volumes(&self) -> Api<PersistentVolume> {
        Api::all(self.guest.clone())
    }

    /// The built-in attachments of the guest, which csi-attacher carries out.
    pub fn guest_attachments(&self) -> Api<VolumeAttachment> {
        Api::all(self.guest.clone())
    }

    /// Makes a StorageClass of the scenario's own in the guest, with these parameters.
    pub async fn guest_class(&self, reclaim_policy: &str, parameters: &[(&str, &str)]) -> Result<String> {
        let name = self.new_guest_class();
        let parameters: std::collections::BTreeMap<_, _> = parameters.iter().copied().collect();
        let class: StorageClass = serde_json::from_value(json!({
            "metadata": {"name": name},
            "provisioner": names::GUEST_DRIVER,
            "parameters": parameters,
            "reclaimPolicy": reclaim_policy,
        }))?;
        Api::all(self.guest.clone()).create(&PostParams::default(), &class).await?;
        Ok(name)
    }

    /// Makes a claim in the guest.
    pub async fn claim(&self, name: &str, class: &str, size: &str) -> Result<PersistentVolumeClaim> {
        let claim = serde_json::from_value(json!({
            "metadata": {"name": name},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "storageClassName": class,
                "resources": {"requests": {"storage": size}},
            },
        }))?;
        Ok(self.guest_claims().create(&PostParams::default(), &claim).await?)
    }

    /// Waits until a guest claim is bound, and gives it with its volume.
    pub async fn bound(&self, name: &str) -> Result<(PersistentVolumeClaim, PersistentVolume)> {
        let claims = self.guest_claims();
        let claim = eventually(&format!("guest claim {name} bound"), PATIENCE, || async {
            let claim = claims.get(name).await?;
            let phase = claim.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_default();
            if phase == "Bound" {
                return Ok(Ok(claim));
            }
            Ok(Err(format!("{phase}; events: {:?}", self.events(name).await?)))
        })
        .await?;
        let volume = claim.spec.as_ref().and_then(|spec| spec.volume_name.clone());
        let volume = self.guest_volumes().get(&volume.context("a bound claim names no volume")?).await?;
        Ok((claim, volume))
    }

    /// A bound claim of the default class, and its handle.
    pub async fn bound_claim(&self, name: &str) -> Result<String> {
        self.claim(name, "nestor", "4Mi").await?;
        let (_, volume) = self.bound(name).await?;
        handle(&volume)
    }

    /// What was said about a guest claim: reason and text.
    pub async fn events(&self, claim: &str) -> Result<Vec<(String, String)>> {
        let events: Api<Event> = Api::namespaced(self.guest.clone(), &self.name);
        let about = format!("involvedObject.kind=PersistentVolumeClaim,involvedObject.name={claim}");
        let list = events.list(&ListParams::default().fields(&about)).await?;
        Ok(list
            .into_iter()
            .map(|event| (event.reason.unwrap_or_default(), event.message.unwrap_or_default()))
            .collect())
    }

    /// Waits for an event on a guest claim whose text has all of these.
    pub async fn told(&self, claim: &str, texts: &[&str]) -> Result<(String, String)> {
        eventually(&format!("an event on guest claim {claim} with {texts:?}"), PATIENCE, || async {
            let events = self.events(claim).await?;
            let found = events.iter().find(|(_, text)| texts.iter().all(|part| text.contains(part)));
            Ok(found.cloned().ok_or_else(|| format!("{events:?}")))
        })
        .await
    }

    /// Asks csi-attacher to attach a guest volume to a node, as the attach-detach controller would.
    pub async fn order_attach(&self, volume: &str, node: &str) -> Result<String> {
        let name = crate::unique("csi");
        let order: VolumeAttachment = serde_json::from_value(json!({
            "metadata": {"name": name, "labels": {"test": self.name}},
            "spec": {
                "attacher": names::GUEST_DRIVER,
                "nodeName": node,
                "source": {"persistentVolumeName": volume},
            },
        }))?;
        self.guest_attachments().create(&PostParams::default(), &order).await?;
        Ok(name)
    }

    /// Waits until csi-attacher says that an attachment is there; gives the disk's UUID.
    pub async fn attached(&self, order: &str) -> Result<String> {
        let orders = self.guest_attachments();
        eventually(&format!("storage.k8s.io/VolumeAttachment {order} attached"), PATIENCE, || async {
            let status = orders.get(order).await?.status.unwrap_or_default();
            let disk =
                status.attachment_metadata.as_ref().and_then(|data| data.get(names::CONTEXT_DISK_UUID));
            Ok(match disk {
                Some(disk) if status.attached => Ok(disk.clone()),
                _ => Err(format!("{status:?}")),
            })
        })
        .await
    }

    /// Takes an order back, and waits until csi-attacher has carried that out.
    pub async fn order_detach(&self, order: &str) -> Result<()> {
        let orders = self.guest_attachments();
        orders.delete(order, &DeleteParams::default()).await?;
        eventually(&format!("storage.k8s.io/VolumeAttachment {order} gone"), PATIENCE, || async {
            let left = orders.get_opt(order).await?;
            Ok(left.map_or(Ok(()), |order| Err(format!("{:?}", order.status))))
        })
        .await
    }
}

/// The handle of a guest volume, which is the management claim's name.
pub fn handle(volume: &PersistentVolume) -> Result<String> {
    let csi = volume.spec.as_ref().and_then(|spec| spec.csi.as_ref()).context("not a CSI volume")?;
    anyhow::ensure!(csi.driver == names::GUEST_DRIVER, "a volume of driver {}", csi.driver);
    Ok(csi.volume_handle.clone())
}
