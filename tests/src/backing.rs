//! What is below the management cluster: the storage infra, or in a lab with KubeVirt also the files of its other CSI driver.

use std::path::PathBuf;

use anyhow::{Context, Result};
use crds::names::{ANNOTATION_ATTACHED_TO, MANAGEMENT_DRIVER};
use k8s_openapi::api::core::v1::PersistentVolume;
use kube::ResourceExt;
use kube::api::{Api, DynamicObject, ListParams};
use kube::core::{ApiResource, GroupVersionKind};
use serde_json::Value;
use uuid::Uuid;

use crate::Scenario;

/// What has the data of a volume.
pub(crate) struct Backing {
    /// The file with its data.
    pub(crate) file: PathBuf,
    /// UUID of its disk.
    pub(crate) disk: String,
}

impl Scenario {
    /// What has the data of a management claim's volume.
    pub(crate) async fn backing(&self, claim: &str) -> Result<Backing> {
        let management = self.management_volume(claim).await?;
        let name = management.name_any();
        if driver(&management) != Some(MANAGEMENT_DRIVER) {
            return Ok(Backing { file: self.lab.file_csi_volume(&name), disk: kubevirt_serial(&name) });
        }
        let volume = self.infra_volume(claim).await?;
        let disk = match self.lab.has_kubevirt() {
            true => kubevirt_serial(&name),
            false => volume.disk_uuid.to_string(),
        };
        Ok(Backing { file: self.file_of(&volume).await?, disk })
    }

    /// The size of a management claim's volume in bytes, as what is below the management cluster has it.
    pub async fn volume_bytes(&self, claim: &str) -> Result<u64> {
        match self.lab.has_kubevirt() {
            true => Ok(std::fs::metadata(self.backing(claim).await?.file)?.len()),
            false => Ok(self.infra_volume(claim).await?.capacity_bytes),
        }
    }

    /// Volumes of VMs of KubeVirt that are this management claim, in the template of the VirtualMachine or in its instance, and the
    /// record that a VM may have the disk.
    pub(crate) async fn kubevirt_entries(&self, claim: &str) -> Result<Vec<String>> {
        let mut left = Vec::new();
        for (kind, volumes) in [
            ("VirtualMachine", "/spec/template/spec/volumes"),
            ("VirtualMachineInstance", "/status/volumeStatus"),
        ] {
            let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("kubevirt.io", "v1", kind));
            let api: Api<DynamicObject> =
                Api::namespaced_with(self.management.clone(), &self.namespace, &resource);
            for object in api.list(&ListParams::default()).await? {
                let entries = object.data.pointer(volumes).and_then(Value::as_array);
                let name = |entry: &&Value| {
                    entry["persistentVolumeClaim"]["claimName"] == claim
                        || entry["persistentVolumeClaimInfo"]["claimName"] == claim
                };
                if entries.into_iter().flatten().any(|entry| name(&entry)) {
                    left.push(format!("a volume of {kind} {}", object.name_any()));
                }
            }
        }
        let record = self.claims().get_opt(claim).await?;
        let record = record.and_then(|claim| claim.annotations().get(ANNOTATION_ATTACHED_TO).cloned());
        left.extend(record.map(|record| format!("record {record}")));
        Ok(left)
    }

    async fn management_volume(&self, claim: &str) -> Result<PersistentVolume> {
        let spec = self.claims().get(claim).await?.spec;
        let name = spec.and_then(|spec| spec.volume_name).context("the management claim has no volume")?;
        Ok(self.volumes().get(&name).await?)
    }
}

/// The CSI driver of a PersistentVolume.
fn driver(volume: &PersistentVolume) -> Option<&str> {
    Some(&volume.spec.as_ref()?.csi.as_ref()?.driver)
}

/// The serial that gc-csi gives the disk of a PersistentVolume on VMs of KubeVirt.
fn kubevirt_serial(volume: &str) -> String {
    const SERIALS: Uuid = Uuid::from_u128(0x1bd8_9c1e_6c53_4f0e_9a3b_d2f7_40c6_8e15);
    Uuid::new_v5(&SERIALS, volume.as_bytes()).to_string()
}
