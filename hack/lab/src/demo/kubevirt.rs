//! A volume below the management cluster, where KubeVirt runs the VMs: the VM that may have it, the hot-plugged disk, and the
//! file of the CSI driver.

use anyhow::{Context, Result, ensure};
use crds::names::ANNOTATION_ATTACHED_TO;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, ListParams};
use kube::{Client, ResourceExt};
use serde_json::Value;

use super::trace::Leftovers;
use crate::lab::Lab;

pub(super) struct KubeVirt {
    lab: Lab,
    instances: Api<DynamicObject>,
    claims: Api<PersistentVolumeClaim>,
}

impl KubeVirt {
    pub(super) fn new(lab: &Lab, management: &Client, namespace: &str) -> Self {
        let kind = GroupVersionKind::gvk("kubevirt.io", "v1", "VirtualMachineInstance");
        let resource = ApiResource::from_gvk_with_plural(&kind, "virtualmachineinstances");
        Self {
            lab: lab.clone(),
            instances: Api::namespaced_with(management.clone(), namespace, &resource),
            claims: Api::namespaced(management.clone(), namespace),
        }
    }

    /// Describes the volume with this ID.
    pub(super) fn describe(&self, id: &str) -> Result<String> {
        let file = self.lab.file_csi_volume(id);
        let bytes = file.metadata().with_context(|| format!("the volume {id} has no file"))?.len();
        Ok(format!("CSI driver  volume {id}: a file of {} MiB", bytes >> 20))
    }

    /// Checks that a volume is plugged into one VM and into no other, and that only this VM may have it. Returns one line per
    /// object.
    pub(super) async fn attachment(&self, claim: &str, vm: &str) -> Result<Vec<String>> {
        let holder = self.claims.get(claim).await?.annotations().get(ANNOTATION_ATTACHED_TO).cloned();
        let holder = holder.with_context(|| format!("the claim {claim} names no VM that may have it"))?;
        let named: Value = serde_json::from_str(&holder)?;
        ensure!(named["vm"] == vm, "the claim {claim} names another VM than {vm}: {holder}");
        for instance in self.instances.list(&ListParams::default()).await? {
            let phase = phase_of(&instance, claim);
            let expected = (instance.name_any() == vm).then_some("Ready");
            ensure!(phase.as_deref() == expected, "{claim} is {phase:?} in {}", instance.name_any());
        }
        Ok(vec![
            format!("management  PersistentVolumeClaim {claim}, {ANNOTATION_ATTACHED_TO} names {vm}"),
            format!(
                "management  VirtualMachineInstance {vm}, volumeStatus of {claim} is Ready, in no other VM"
            ),
        ])
    }

    /// Lists everything that may be left of a volume.
    pub(super) async fn leftovers(&self, claim: &str, id: &str) -> Result<Vec<Leftovers>> {
        let instances = self.instances.list(&ListParams::default()).await?;
        let plugged = instances.iter().filter(|instance| phase_of(instance, claim).is_some());
        let file = Some(id.to_owned()).filter(|id| self.lab.file_csi_volume(id).exists());
        Ok(vec![
            Leftovers::new("management  VMs with the disk", plugged.map(ResourceExt::name_any)),
            Leftovers::new("CSI driver  files", file),
        ])
    }
}

/// The phase of the volume that is this claim in an instance.
fn phase_of(instance: &DynamicObject, claim: &str) -> Option<String> {
    let volumes = instance.data["status"]["volumeStatus"].as_array()?;
    let of_claim = |volume: &&Value| volume["persistentVolumeClaimInfo"]["claimName"] == claim;
    let phase = volumes.iter().find(of_claim)?["phase"].as_str();
    Some(phase.unwrap_or_default().to_owned())
}
