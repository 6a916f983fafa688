//! Orders of a guest's attach-detach controller, `storage.k8s.io/VolumeAttachment`, which csi-attacher carries out.

use anyhow::Result;
use crds::names;
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::Client;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::scenario::{delete, gone};
use crate::{PATIENCE, eventually, unique};

/// The orders of one test in one guest.
pub struct Orders {
    api: Api<VolumeAttachment>,
    test: String,
}

impl Orders {
    pub(crate) fn new(client: &Client, test: &str) -> Self {
        Self { api: Api::all(client.clone()), test: test.to_owned() }
    }

    /// Orders a volume to be attached to a node; gives the order's name.
    pub async fn attach(&self, volume: &str, node: &str) -> Result<String> {
        self.attach_by(names::GUEST_DRIVER, volume, node).await
    }

    /// Orders a volume of a driver to be attached to a node.
    pub async fn attach_by(&self, driver: &str, volume: &str, node: &str) -> Result<String> {
        self.create(unique("csi"), driver, volume, node).await
    }

    /// Orders a volume of this handle to be attached to a node, by the name that Kubernetes gives the order
    /// (`getAttachmentName` in `pkg/volume/csi/csi_attacher.go`).
    pub async fn attach_as_kubernetes(&self, volume: &str, handle: &str, node: &str) -> Result<String> {
        let mut hasher = Sha256::new();
        for part in [handle, names::GUEST_DRIVER, node] {
            hasher.update(part);
        }
        self.create(format!("csi-{:x}", hasher.finalize()), names::GUEST_DRIVER, volume, node).await
    }

    async fn create(&self, name: String, driver: &str, volume: &str, node: &str) -> Result<String> {
        let order: VolumeAttachment = serde_json::from_value(json!({
            "metadata": {"name": name, "labels": {"test": self.test}},
            "spec": {
                "attacher": driver,
                "nodeName": node,
                "source": {"persistentVolumeName": volume},
            },
        }))?;
        self.api.create(&PostParams::default(), &order).await?;
        Ok(name)
    }

    /// Waits until an order is carried out; gives the disk's UUID.
    pub async fn attached(&self, order: &str) -> Result<String> {
        eventually(&format!("storage.k8s.io/VolumeAttachment {order} attached"), PATIENCE, || async {
            let status = self.api.get(order).await?.status.unwrap_or_default();
            let disk =
                status.attachment_metadata.as_ref().and_then(|data| data.get(names::CONTEXT_DISK_UUID));
            Ok(match disk {
                Some(disk) if status.attached => Ok(disk.clone()),
                _ => Err(format!("{status:?}")),
            })
        })
        .await
    }

    /// Waits until an order is refused in words that have all of `texts`; gives them.
    pub async fn refused(&self, order: &str, texts: &[&str]) -> Result<String> {
        let what = format!("storage.k8s.io/VolumeAttachment {order} refused with {texts:?}");
        eventually(&what, PATIENCE, || async {
            let status = self.api.get(order).await?.status.unwrap_or_default();
            anyhow::ensure!(!status.attached, "storage.k8s.io/VolumeAttachment {order} was carried out");
            let told = status.attach_error.as_ref().and_then(|error| error.message.clone());
            let found = told.filter(|told| texts.iter().all(|text| told.contains(text)));
            Ok(found.ok_or_else(|| format!("{status:?}")))
        })
        .await
    }

    /// Takes an order back, and waits until csi-attacher has carried that out.
    pub async fn detach(&self, order: &str) -> Result<()> {
        self.api.delete(order, &DeleteParams::default()).await?;
        eventually(&format!("storage.k8s.io/VolumeAttachment {order} gone"), PATIENCE, || async {
            let left = self.api.get_opt(order).await?;
            Ok(left.map_or(Ok(()), |order| Err(format!("{:?}", order.status))))
        })
        .await
    }

    /// Takes back all orders of the test.
    pub(crate) async fn clean(&self) -> Result<()> {
        let own = ListParams::default().labels(&format!("test={}", self.test));
        let names = || async {
            let list = self.api.list(&own).await?;
            Ok(list.items.into_iter().filter_map(|order| order.metadata.name).collect::<Vec<_>>())
        };
        for order in names().await? {
            delete(&self.api, &order).await?;
        }
        gone("storage.k8s.io/VolumeAttachments of the guest", names).await
    }
}
