//! Objects in the guest cluster.

use anyhow::{Context, Result};
use crds::names;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttachment};
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::{K8sAttachments, PATIENCE, Scenario, eventually};

impl Scenario {
    /// Claims in the scenario's namespace of the guest.
    pub fn guest_claims(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.guest.clone(), &self.name)
    }

    /// Volumes of the guest.
    pub fn guest_volumes(&self) -> Api<PersistentVolume> {
        Api::all(self.guest.clone())
    }

    /// The guest's storage.k8s.io/VolumeAttachments.
    pub fn guest_attachments(&self) -> Api<VolumeAttachment> {
        Api::all(self.guest.clone())
    }

    /// Creates a StorageClass for the scenario in the guest, with these parameters.
    pub async fn guest_class(&self, reclaim_policy: &str, parameters: &[(&str, &str)]) -> Result<String> {
        self.guest_class_of(names::GUEST_DRIVER, reclaim_policy, parameters).await
    }

    /// Creates a management class with these parameters, and a guest class for it, both with policy Delete; returns both.
    pub async fn classes(&self, parameters: &[(&str, &str)]) -> Result<(String, String)> {
        let management_class = self.management_class(parameters).await?;
        let parameters = [(names::PARAMETER_MANAGEMENT_CLASS, management_class.as_str())];
        let guest_class = self.guest_class("Delete", &parameters).await?;
        Ok((management_class, guest_class))
    }

    /// Creates a StorageClass of another provisioner.
    pub async fn guest_class_of(
        &self,
        provisioner: &str,
        reclaim_policy: &str,
        parameters: &[(&str, &str)],
    ) -> Result<String> {
        let more = json!({"provisioner": provisioner, "reclaimPolicy": reclaim_policy});
        self.guest_class_with(parameters, more).await
    }

    /// Creates a StorageClass for the scenario in the guest: policy Delete and allowVolumeExpansion, unless `more`
    /// overrides it.
    pub async fn guest_class_with(&self, parameters: &[(&str, &str)], more: Value) -> Result<String> {
        let name = self.new_guest_class();
        let parameters: std::collections::BTreeMap<_, _> = parameters.iter().copied().collect();
        let mut class = json!({
            "metadata": {"name": name},
            "provisioner": names::GUEST_DRIVER,
            "parameters": parameters,
            "reclaimPolicy": "Delete",
            "allowVolumeExpansion": true,
        });
        json_patch::merge(&mut class, &more);
        let class: StorageClass = serde_json::from_value(class)?;
        Api::all(self.guest.clone()).create(&PostParams::default(), &class).await?;
        Ok(name)
    }

    /// Creates a claim in the guest.
    pub async fn claim(&self, name: &str, class: &str, size: &str) -> Result<PersistentVolumeClaim> {
        self.claim_with(name, class, size, json!({})).await
    }

    /// Creates a claim in the guest; `more` is merged into its spec.
    pub async fn claim_with(
        &self,
        name: &str,
        class: &str,
        size: &str,
        more: Value,
    ) -> Result<PersistentVolumeClaim> {
        let mut spec = json!({
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": class,
            "resources": {"requests": {"storage": size}},
        });
        json_patch::merge(&mut spec, &more);
        let claim = serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec}))?;
        Ok(self.guest_claims().create(&PostParams::default(), &claim).await?)
    }

    /// Changes the requested size of a claim.
    pub async fn request(&self, claim: &str, size: &str) -> Result<PersistentVolumeClaim> {
        let patch = json!({"spec": {"resources": {"requests": {"storage": size}}}});
        Ok(self.guest_claims().patch(claim, &PatchParams::default(), &Patch::Merge(patch)).await?)
    }

    /// Waits until a guest claim has this capacity.
    pub async fn has_capacity(&self, claim: &str, size: &str) -> Result<()> {
        let claims = self.guest_claims();
        eventually(&format!("guest claim {claim} of {size}"), PATIENCE, || async {
            let status = claims.get(claim).await?.status.unwrap_or_default();
            let capacity =
                status.capacity.as_ref().and_then(|all| all.get("storage")).map(|size| size.0.clone());
            Ok(match capacity.as_deref() == Some(size) {
                true => Ok(()),
                false => Err(format!("{capacity:?}; events: {:?}", self.events(claim).await?)),
            })
        })
        .await
    }

    /// Creates a PersistentVolume that references a management claim, and a bound claim of the same name. `more` is
    /// merged into the volume's spec from [`static_volume`].
    pub async fn static_claim(&self, name: &str, handle: &str, more: Value) -> Result<PersistentVolume> {
        let volume = static_volume(&crate::unique(&self.name), &self.name, handle, &more)?;
        let volume = self.guest_volumes().create(&PostParams::default(), &volume).await?;
        let spec = volume.spec.clone().unwrap_or_default();
        let size = spec.capacity.and_then(|all| all.get("storage").cloned()).context("no capacity")?;
        let bind = json!({
            "volumeName": volume.metadata.name, "accessModes": spec.access_modes, "volumeMode": spec.volume_mode,
        });
        self.claim_with(name, "", &size.0, bind).await?;
        Ok(self.bound(name).await?.1)
    }

    /// Waits until a guest claim is bound; returns it with its volume.
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

    /// Creates a bound claim of the default class; returns its handle.
    pub async fn bound_claim(&self, name: &str) -> Result<String> {
        self.claim(name, "nestor", "4Mi").await?;
        let (_, volume) = self.bound(name).await?;
        handle(&volume)
    }

    /// The scenario's storage.k8s.io/VolumeAttachments in the guest.
    pub fn k8s_attachments(&self) -> K8sAttachments {
        K8sAttachments::new(&self.guest, &self.name)
    }

    /// Creates a storage.k8s.io/VolumeAttachment, as the attach-detach controller would.
    pub async fn k8s_attach(&self, volume: &str, node: &str) -> Result<String> {
        self.k8s_attachments().attach(volume, node).await
    }

    /// Waits until csi-attacher has attached the volume; returns the disk UUID.
    pub async fn attached(&self, attachment: &str) -> Result<String> {
        self.k8s_attachments().attached(attachment).await
    }

    /// Deletes a storage.k8s.io/VolumeAttachment and waits until csi-attacher has detached the volume.
    pub async fn k8s_detach(&self, attachment: &str) -> Result<()> {
        self.k8s_attachments().detach(attachment).await
    }
}

/// A static guest PersistentVolume for a management claim: filesystem, 4 MiB, ReadWriteOnce, Retain, unless `more`
/// overrides its spec.
pub fn static_volume(name: &str, test: &str, handle: &str, more: &Value) -> Result<PersistentVolume> {
    let mut spec = json!({
        "capacity": {"storage": "4Mi"},
        "accessModes": ["ReadWriteOnce"],
        "volumeMode": "Filesystem",
        "storageClassName": "",
        "persistentVolumeReclaimPolicy": "Retain",
        "csi": {"driver": names::GUEST_DRIVER, "volumeHandle": handle},
    });
    json_patch::merge(&mut spec, more);
    Ok(serde_json::from_value(json!({"metadata": {"name": name, "labels": {"test": test}}, "spec": spec}))?)
}

/// The volume handle of a guest volume, which is the name of its management claim.
pub fn handle(volume: &PersistentVolume) -> Result<String> {
    let csi = volume.spec.as_ref().and_then(|spec| spec.csi.as_ref()).context("not a CSI volume")?;
    anyhow::ensure!(csi.driver == names::GUEST_DRIVER, "a volume of driver {}", csi.driver);
    Ok(csi.volume_handle.clone())
}
