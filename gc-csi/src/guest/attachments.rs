//! Guest VolumeAttachments (`storage.k8s.io`): names, and attachments under another driver name.

use kube::Api;
use kube::api::ListParams;
use kube_kit::client::chain;
use kube_kit::informer::Key;
use kube_kit::partial::{CsiSource, VolumeAttachment};
use sha2::{Digest, Sha256};

use super::Guest;

/// The name that Kubernetes gives the VolumeAttachment of a volume on a node (`getAttachmentName` in
/// `pkg/volume/csi/csi_attacher.go`).
pub(crate) fn attachment_name(handle: &str, driver: &str, node: &str) -> String {
    let mut hasher = Sha256::new();
    for part in [handle, driver, node] {
        hasher.update(part);
    }
    format!("csi-{:x}", hasher.finalize())
}

impl Guest {
    /// Whether a VolumeAttachment requests this volume on this node under another of our driver names than `driver`.
    /// Read from the API server, because the disk is detached otherwise.
    pub(crate) async fn is_attached_under_another_name(
        &self,
        handle: &str,
        node: &str,
        driver: &str,
    ) -> Result<bool, String> {
        if self.drivers.len() < 2 {
            return Ok(false);
        }
        let api: Api<VolumeAttachment> = Api::all(self.client.clone());
        let list = api.list(&ListParams::default()).await;
        let list =
            list.map_err(|error| format!("failed to list the guest's VolumeAttachments: {}", chain(&error)))?;
        let is_live =
            |one: &&VolumeAttachment| one.node_name == node && one.metadata.deletion_timestamp.is_none();
        let is_volume = |csi: &CsiSource| {
            csi.volume_handle == handle && csi.driver != driver && self.drivers.contains(&csi.driver)
        };
        Ok(list
            .items
            .iter()
            .filter(is_live)
            .any(|one| self.source_of(one).is_some_and(|csi| is_volume(&csi))))
    }

    /// The CSI source of a VolumeAttachment of our drivers.
    fn source_of(&self, attachment: &VolumeAttachment) -> Option<CsiSource> {
        let source = &attachment.source;
        let named = || self.volumes.get(&Key::cluster(source.persistent_volume_name.clone()?));
        source.inline.clone().or_else(|| named()?.spec.csi.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_attachment_name_is_that_of_kubernetes() {
        // printf %s%s%s volume driver node | sha256sum
        assert_eq!(
            attachment_name("volume", "driver", "node"),
            "csi-d94279ecba6bb1a4dae95e5f896a0d7b6b60fb3af97abf98fb0c1bb2a80030a5"
        );
    }
}
