//! Objects in the management cluster and in the storage infra.

use std::path::PathBuf;

use anyhow::{Context, Result};
use crds::{VirtualMachine, VirtualMachineVolumeStatus, VolumeAttachment, names};
use infra_api::{Volume, VolumeId};
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolume, PersistentVolumeClaim, ResourceQuota};
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttributesClass};
use kube::api::{Api, ApiResource, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt};
use lab::cluster::MANAGEMENT_NAMESPACE;
use serde_json::{Value, json};

use crate::objects::set_policy;
use crate::{PATIENCE, Scenario, eventually};

/// Name of the ConfigMap with the guests of VMs.
pub const VM_GUESTS: &str = "nestor-vm-guests";

impl Scenario {
    /// Claims in the guest's namespace of the management cluster.
    pub fn claims(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.management.clone(), &self.namespace)
    }

    /// Volumes of the management cluster.
    pub fn volumes(&self) -> Api<PersistentVolume> {
        Api::all(self.management.clone())
    }

    /// The guest's VirtualMachines.
    pub fn vms(&self) -> Api<VirtualMachine> {
        Api::namespaced_with(self.management.clone(), &self.namespace, &vm_resource())
    }

    /// The guest's VirtualMachines with all fields, known or not.
    pub fn raw_vms(&self) -> Api<DynamicObject> {
        Api::namespaced_with(self.management.clone(), &self.namespace, &vm_resource())
    }

    /// VolumeAttachments (nestor.dev) in the guest's namespace.
    pub fn attachments(&self) -> Api<VolumeAttachment> {
        Api::namespaced(self.management.clone(), &self.namespace)
    }

    /// Quotas of the guest's namespace.
    pub fn quotas(&self) -> Api<ResourceQuota> {
        Api::namespaced(self.management.clone(), &self.namespace)
    }

    /// Creates a StorageClass for the scenario in the management cluster, with these parameters.
    pub async fn management_class(&self, parameters: &[(&str, &str)]) -> Result<String> {
        let name = self.new_management_class();
        let parameters: std::collections::BTreeMap<_, _> = parameters.iter().copied().collect();
        let class: StorageClass = serde_json::from_value(json!({
            "metadata": {"name": name},
            "provisioner": names::MANAGEMENT_DRIVER,
            "parameters": parameters,
            "reclaimPolicy": "Delete",
            "allowVolumeExpansion": true,
        }))?;
        Api::all(self.management.clone()).create(&PostParams::default(), &class).await?;
        Ok(name)
    }

    /// Creates a claim in the guest's namespace of the management cluster, as the platform team would, and waits until it
    /// is bound. It has these labels and 4 MiB; `more` is merged into its spec.
    pub async fn management_claim(&self, labels: &[(&str, &str)], more: Value) -> Result<String> {
        let name = self.new_management_claim();
        let labels: std::collections::BTreeMap<_, _> = labels.iter().copied().collect();
        let mut spec = json!({
            "accessModes": ["ReadWriteOnce"], "storageClassName": "nestor",
            "resources": {"requests": {"storage": "4Mi"}},
        });
        json_patch::merge(&mut spec, &more);
        let claim =
            serde_json::from_value(json!({"metadata": {"name": name, "labels": labels}, "spec": spec}))?;
        self.claims().create(&PostParams::default(), &claim).await?;
        is_bound(&self.claims(), &name).await?;
        let shares: serde_json::Map<String, Value> = labels
            .iter()
            .filter(|(key, _)| key.starts_with(names::LABEL_SHARE_PREFIX))
            .map(|(key, mode)| ((*key).to_owned(), json!(mode)))
            .collect();
        if !shares.is_empty() {
            self.label_volume(&name, &Value::Object(shares)).await?;
        }
        Ok(name)
    }

    /// Creates a PersistentVolume for a volume that exists in the storage infra, and its claim in the guest's namespace of the
    /// management cluster, as the platform team would. The guest owns both. The cleanup deletes them and the volume.
    pub async fn claim_of_volume(&self, volume: &Volume) -> Result<String> {
        self.claim_of(&volume.id, volume.capacity_bytes, &json!({})).await
    }

    /// The same for a volume that need not exist yet, with these annotations on its PersistentVolume, which has the name of
    /// the claim.
    pub async fn claim_of(&self, volume: &VolumeId, bytes: u64, annotations: &Value) -> Result<String> {
        let name = self.new_management_claim();
        let labels = json!({names::LABEL_CLUSTER_ID: self.cluster_id});
        let storage = bytes.to_string();
        let mut all = json!({"pv.kubernetes.io/provisioned-by": names::MANAGEMENT_DRIVER});
        json_patch::merge(&mut all, annotations);
        let pv = json!({
            "metadata": {"name": name, "labels": labels, "annotations": all},
            "spec": {
                "capacity": {"storage": storage}, "accessModes": ["ReadWriteOnce"],
                "persistentVolumeReclaimPolicy": "Delete", "storageClassName": "",
                "claimRef": {"namespace": self.namespace, "name": name},
                "csi": {"driver": names::MANAGEMENT_DRIVER, "volumeHandle": volume},
            },
        });
        let claim = json!({
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeName": name,
                "resources": {"requests": {"storage": storage}},
            },
        });
        self.volumes().create(&PostParams::default(), &serde_json::from_value(pv)?).await?;
        self.claims().create(&PostParams::default(), &serde_json::from_value(claim)?).await?;
        is_bound(&self.claims(), &name).await?;
        Ok(name)
    }

    /// Sets, or removes by null, labels of a management claim and of its PersistentVolume, as the platform team does to share
    /// the volume.
    pub async fn label_volume(&self, claim: &str, labels: &Value) -> Result<()> {
        let volume = self.claims().get(claim).await?.spec.and_then(|spec| spec.volume_name);
        let volume = volume.context("the management claim has no volume")?;
        let (params, patch) = (PatchParams::default(), json!({"metadata": {"labels": labels}}));
        self.volumes().patch(&volume, &params, &Patch::Merge(&patch)).await?;
        self.claims().patch(claim, &params, &Patch::Merge(&patch)).await?;
        Ok(())
    }

    /// Creates a VolumeAttributesClass with the same name in both tiers; the management one has these parameters.
    pub async fn attributes_class(&self, parameters: &[(&str, &str)]) -> Result<String> {
        let name = self.guest_attributes_class().await?;
        let parameters: std::collections::BTreeMap<_, _> = parameters.iter().copied().collect();
        create_attributes_class(&self.management, &name, names::MANAGEMENT_DRIVER, json!(parameters)).await?;
        Ok(name)
    }

    /// Creates a VolumeAttributesClass in the guest that refers to a management class that does not exist.
    pub async fn guest_attributes_class(&self) -> Result<String> {
        let name = self.new_attributes_class();
        let parameters = json!({names::PARAMETER_MANAGEMENT_ATTRIBUTES_CLASS: name});
        create_attributes_class(&self.guest, &name, names::GUEST_DRIVER, parameters).await?;
        Ok(name)
    }

    /// Changes the reclaim policy of the PersistentVolume behind a management claim; returns its name.
    pub async fn set_reclaim_policy(&self, claim: &str, policy: &str) -> Result<String> {
        let volume = self.claims().get(claim).await?.spec.and_then(|spec| spec.volume_name);
        let volume = volume.context("the management claim has no volume")?;
        set_policy(&self.volumes(), &volume, policy).await?;
        Ok(volume)
    }

    /// Sets a quota on a management class for the guest, and waits until it is counted.
    pub async fn quota(&self, class: &str, storage: &str) -> Result<()> {
        let name = self.new_quota(class);
        let resource = format!("{class}.storageclass.storage.k8s.io/requests.storage");
        let quota = json!({
            "apiVersion": "v1", "kind": "ResourceQuota",
            "metadata": {"name": name},
            "spec": {"hard": {&resource: storage}},
        });
        let quotas = self.quotas();
        quotas.patch(&name, &PatchParams::apply("test").force(), &Patch::Apply(&quota)).await?;
        eventually(&format!("quota {name} counts {storage}"), PATIENCE, || async {
            let status = quotas.get(&name).await?.status.unwrap_or_default();
            let counts = |map: &Option<std::collections::BTreeMap<String, _>>| {
                map.as_ref().is_some_and(|map| map.contains_key(&resource))
            };
            let hard = status.hard.as_ref().and_then(|hard| hard.get(&resource)).map(|hard| hard.0.clone());
            let ready = hard.as_deref() == Some(storage) && counts(&status.used);
            Ok(if ready { Ok(()) } else { Err(format!("{status:?}")) })
        })
        .await
    }

    /// The storage infra's volume behind a bound management claim.
    pub async fn infra_volume(&self, claim: &str) -> Result<Volume> {
        let claim = self.claims().get(claim).await?;
        let name =
            claim.spec.and_then(|spec| spec.volume_name).context("the management claim has no volume")?;
        let volume = self.volumes().get(&name).await?;
        let csi =
            volume.spec.and_then(|spec| spec.csi).context("the management volume is not a CSI volume")?;
        anyhow::ensure!(csi.driver == names::MANAGEMENT_DRIVER, "the driver is {}", csi.driver);
        let volume = self.infra.get_volume(&VolumeId::new(csi.volume_handle)?).await?;
        volume.context("the infra has no such volume")
    }

    /// The file of a volume of the storage infra.
    pub async fn file_of(&self, volume: &Volume) -> Result<PathBuf> {
        let pool = self.infra.get_pool(&volume.pool).await?.context("the volume's pool does not exist")?;
        Ok(PathBuf::from(pool.path).join(format!("{}.raw", volume.id)))
    }

    /// The status of a claim's disk in a VirtualMachine, also while it is being detached.
    pub async fn disk(&self, vm: &str, claim: &str) -> Result<Option<VirtualMachineVolumeStatus>> {
        let entry = names::volume_entry(claim);
        let vm = self.vms().get(vm).await?;
        let disks = vm.status.map(|status| status.volumes).unwrap_or_default();
        Ok(disks.into_iter().find(|disk| names::entry_candidates(&disk.name).any(|shown| shown == entry)))
    }

    /// The VolumeAttachment (nestor.dev) of a claim and a VM.
    pub async fn attachment(&self, vm: &str, claim: &str) -> Result<Option<VolumeAttachment>> {
        let uuid = self.node_uuid(vm).await?;
        let list = self.attachments().list(&ListParams::default()).await?;
        Ok(list.into_iter().find(|one| {
            one.spec.volume_name.as_str() == claim && one.spec.node_uuid.eq_ignore_ascii_case(&uuid)
        }))
    }

    /// Waits until the VolumeAttachment of a claim and a VM reports this reason for a refused attach, in the error and in the
    /// condition; returns the message.
    pub async fn attach_refused(&self, vm: &str, claim: &str, reason: &str) -> Result<String> {
        eventually(&format!("{claim} on {vm} fails with {reason}"), PATIENCE, || async {
            let status = self.attachment(vm, claim).await?.and_then(|one| one.status).unwrap_or_default();
            let condition = status.conditions.iter().any(|one| one.status == "False" && one.reason == reason);
            Ok(match status.error {
                Some(error) if error.reason == reason && condition && !status.attached => Ok(error.message),
                other => Err(format!("{other:?}")),
            })
        })
        .await
    }

    /// Waits until the VolumeAttachment of a claim and a VM reports a failed detach; returns the message.
    pub async fn detach_failed(&self, vm: &str, claim: &str) -> Result<String> {
        eventually(&format!("the detach of {claim} from {vm} fails"), PATIENCE, || async {
            let status = self.attachment(vm, claim).await?.and_then(|one| one.status).unwrap_or_default();
            let is_failed = status.error.as_ref().is_some_and(|error| error.reason == "DetachFailed");
            let message = status.error.map(|error| error.message).unwrap_or_default();
            Ok(if is_failed { Ok(message) } else { Err(message) })
        })
        .await
    }

    /// UUID of a VM.
    pub async fn node_uuid(&self, vm: &str) -> Result<String> {
        let vm = self.vms().get(vm).await?;
        let uuid = vm.status.as_ref().and_then(crds::node_uuid);
        uuid.context("the VirtualMachine has no UUID")
    }

    /// Annotates a VirtualMachine, like a client that does not touch its disks.
    pub async fn annotate_vm(&self, vm: &str, annotation: &str) -> Result<()> {
        let patch = json!({"metadata": {"annotations": {annotation: "true"}}});
        self.raw_vms().patch(vm, &PatchParams::default(), &Patch::Merge(patch)).await?;
        Ok(())
    }

    /// Assigns a VirtualMachine to the guest with this cluster ID, as the platform team would: by its label, and by the removal
    /// of its record.
    pub async fn assign_vm(&self, vm: &str, cluster_id: &str) -> Result<()> {
        let params = PatchParams::default();
        let label = json!({"metadata": {"labels": {names::LABEL_CLUSTER_ID: cluster_id}}});
        let uid = self.vms().patch(vm, &params, &Patch::Merge(label)).await?.uid().context("no UID")?;
        let records = self.vm_guests();
        eventually(&format!("VM {vm} is recorded as a node of {cluster_id}"), PATIENCE, || async {
            let record = records.get(VM_GUESTS).await?.data.unwrap_or_default().remove(&uid);
            if record.as_deref().is_some_and(|guest| guest != cluster_id) {
                let removal = Patch::Merge(json!({"data": {&uid: null}}));
                records.patch(VM_GUESTS, &params, &removal).await?;
            }
            Ok(if record.as_deref() == Some(cluster_id) { Ok(()) } else { Err(format!("{record:?}")) })
        })
        .await
    }

    /// ConfigMaps in mgmt-csi's namespace, of which [`VM_GUESTS`] records the guests of VMs.
    pub fn vm_guests(&self) -> Api<ConfigMap> {
        Api::namespaced(self.management.clone(), MANAGEMENT_NAMESPACE)
    }

    /// Appends an entry to a VirtualMachine's spec.volumes, like a client other than gc-csi.
    pub async fn add_entry(&self, name: &str, entry: Value) -> Result<()> {
        let vms = self.raw_vms();
        eventually("an entry added by another writer", PATIENCE, || async {
            let mut vm = vms.get(name).await?;
            let volumes = &mut vm.data["spec"]["volumes"];
            if volumes.is_null() {
                *volumes = json!([]);
            }
            volumes.as_array_mut().context("spec.volumes is not a list")?.push(entry.clone());
            // With the resourceVersion that was read, so that no entries are overwritten.
            match vms.replace(name, &PostParams::default(), &vm).await {
                Ok(_) => Ok(Ok(())),
                Err(kube::Error::Api(status)) if status.code == 409 => Ok(Err(status.message)),
                Err(error) => Err(error.into()),
            }
        })
        .await
    }

    /// Removes the entries selected by `selects` from a VirtualMachine's spec.volumes, like a client other than gc-csi.
    pub async fn remove_entries(&self, name: &str, selects: impl Fn(&Value) -> bool) -> Result<()> {
        let vms = self.raw_vms();
        eventually("entries removed by another writer", PATIENCE, || async {
            let Some(mut vm) = vms.get_opt(name).await? else { return Ok(Ok(())) };
            if let Some(volumes) = vm.data["spec"]["volumes"].as_array_mut() {
                volumes.retain(|entry| !selects(entry));
            }
            match vms.replace(name, &PostParams::default(), &vm).await {
                Ok(_) => Ok(Ok(())),
                Err(kube::Error::Api(status)) if status.code == 409 => Ok(Err(status.message)),
                Err(error) => Err(error.into()),
            }
        })
        .await
    }
}

fn vm_resource() -> ApiResource {
    crds::virtual_machine_resource(crds::VIRTUAL_MACHINE_VERSIONS[0])
}

async fn create_attributes_class(client: &Client, name: &str, driver: &str, parameters: Value) -> Result<()> {
    let class: VolumeAttributesClass = serde_json::from_value(json!({
        "metadata": {"name": name}, "driverName": driver, "parameters": parameters,
    }))?;
    Api::all(client.clone()).create(&PostParams::default(), &class).await?;
    Ok(())
}

/// Waits until a claim is bound.
pub async fn is_bound(claims: &Api<PersistentVolumeClaim>, name: &str) -> Result<()> {
    eventually(&format!("claim {name} is bound"), PATIENCE, || async {
        let status = claims.get(name).await?.status.unwrap_or_default();
        Ok(if status.phase.as_deref() == Some("Bound") { Ok(()) } else { Err(format!("{status:?}")) })
    })
    .await
}
