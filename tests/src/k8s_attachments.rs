//! storage.k8s.io/VolumeAttachments of a guest, as its attach-detach controller creates them for csi-attacher.

use anyhow::Result;
use crds::names;
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::Client;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::objects::{delete, gone};
use crate::{PATIENCE, eventually, unique};

/// The storage.k8s.io/VolumeAttachments of one test in one guest.
pub struct K8sAttachments {
    api: Api<VolumeAttachment>,
    test: String,
}

impl K8sAttachments {
    /// Those of a test, which are labelled with its name.
    pub fn new(client: &Client, test: &str) -> Self {
        Self { api: Api::all(client.clone()), test: test.to_owned() }
    }

    /// Creates an attachment of a volume to a node; returns its name.
    pub async fn attach(&self, volume: &str, node: &str) -> Result<String> {
        self.attach_by(names::GUEST_DRIVER, volume, node).await
    }

    /// Creates an attachment of a volume of a driver to a node.
    pub async fn attach_by(&self, driver: &str, volume: &str, node: &str) -> Result<String> {
        self.create(unique("csi"), driver, volume, node).await
    }

    /// Creates an attachment with the name that Kubernetes would give it (`getAttachmentName` in
    /// `pkg/volume/csi/csi_attacher.go`).
    pub async fn attach_as_kubernetes(&self, volume: &str, handle: &str, node: &str) -> Result<String> {
        let mut hasher = Sha256::new();
        for field in [handle, names::GUEST_DRIVER, node] {
            hasher.update(field);
        }
        self.create(format!("csi-{:x}", hasher.finalize()), names::GUEST_DRIVER, volume, node).await
    }

    async fn create(&self, name: String, driver: &str, volume: &str, node: &str) -> Result<String> {
        let attachment: VolumeAttachment = serde_json::from_value(json!({
            "metadata": {"name": name, "labels": {"test": self.test}},
            "spec": {
                "attacher": driver,
                "nodeName": node,
                "source": {"persistentVolumeName": volume},
            },
        }))?;
        self.api.create(&PostParams::default(), &attachment).await?;
        Ok(name)
    }

    /// Waits until an attachment is attached; returns the disk UUID.
    pub async fn attached(&self, attachment: &str) -> Result<String> {
        eventually(&format!("storage.k8s.io/VolumeAttachment {attachment} attached"), PATIENCE, || async {
            let status = self.api.get(attachment).await?.status.unwrap_or_default();
            let disk =
                status.attachment_metadata.as_ref().and_then(|data| data.get(names::CONTEXT_DISK_UUID));
            Ok(match disk {
                Some(disk) if status.attached => Ok(disk.clone()),
                _ => Err(format!("{status:?}")),
            })
        })
        .await
    }

    /// Waits until an attachment fails with a message that contains all of `texts`; returns the message.
    pub async fn refused(&self, attachment: &str, texts: &[&str]) -> Result<String> {
        let what = format!("storage.k8s.io/VolumeAttachment {attachment} refused with {texts:?}");
        eventually(&what, PATIENCE, || async {
            let status = self.api.get(attachment).await?.status.unwrap_or_default();
            anyhow::ensure!(!status.attached, "storage.k8s.io/VolumeAttachment {attachment} is attached");
            let message = status.attach_error.as_ref().and_then(|error| error.message.clone());
            let found = message.filter(|message| texts.iter().all(|text| message.contains(text)));
            Ok(found.ok_or_else(|| format!("{status:?}")))
        })
        .await
    }

    /// Deletes an attachment and waits until it is gone.
    pub async fn detach(&self, attachment: &str) -> Result<()> {
        self.request_detach(attachment).await?;
        self.detached(attachment).await
    }

    /// Deletes an attachment, and does not wait for the detach.
    pub async fn request_detach(&self, attachment: &str) -> Result<()> {
        Ok(self.api.delete(attachment, &DeleteParams::default()).await.map(drop)?)
    }

    /// Waits until a deleted attachment is gone.
    pub async fn detached(&self, attachment: &str) -> Result<()> {
        eventually(&format!("storage.k8s.io/VolumeAttachment {attachment} deleted"), PATIENCE, || async {
            let left = self.api.get_opt(attachment).await?;
            Ok(left.map_or(Ok(()), |left| Err(format!("{:?}", left.status))))
        })
        .await
    }

    /// Deletes all attachments of the test.
    pub(crate) async fn clean(&self) -> Result<()> {
        let own = ListParams::default().labels(&format!("test={}", self.test));
        let names = || async {
            let list = self.api.list(&own).await?;
            Ok(list.items.into_iter().filter_map(|attachment| attachment.metadata.name).collect::<Vec<_>>())
        };
        for attachment in names().await? {
            delete(&self.api, &attachment).await?;
        }
        gone("storage.k8s.io/VolumeAttachments of the guest", names).await
    }
}
