//! A volume below the management cluster, where libvirt runs the VMs: its VolumeAttachment, its disk, and its place in the
//! storage infra.

use anyhow::{Context, Result};
use crds::{VirtualMachine, VolumeAttachment};
use infra_api::{Volume, VolumeId};
use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt};

use super::trace::Leftovers;
use crate::lab::Lab;
use crate::virtual_machines;

pub(super) struct Libvirt {
    lab: Lab,
    vms: Api<VirtualMachine>,
    attachments: Api<VolumeAttachment>,
    all_attachments: Api<VolumeAttachment>,
    infra: infra_api::Client,
    namespace: String,
}

impl Libvirt {
    pub(super) async fn new(lab: &Lab, management: &Client, namespace: &str) -> Result<Self> {
        Ok(Self {
            lab: lab.clone(),
            vms: virtual_machines::api(management, namespace).await?,
            attachments: Api::namespaced(management.clone(), namespace),
            all_attachments: Api::all(management.clone()),
            infra: lab.infra()?,
            namespace: namespace.to_owned(),
        })
    }

    async fn volume(&self, id: &str) -> Result<Volume> {
        let volume = self.infra.get_volume(&VolumeId::new(id.to_owned())?).await?;
        volume.with_context(|| format!("the storage infra has no volume {id}"))
    }

    /// Describes the volume with this ID.
    pub(super) async fn describe(&self, id: &str) -> Result<String> {
        let Volume { id, capacity_bytes, pool, disk_uuid, .. } = self.volume(id).await?;
        Ok(format!("infra       volume {id}: {} MiB in {pool}, disk UUID {disk_uuid}", capacity_bytes >> 20))
    }

    /// Checks that a volume is attached to one VM and to no other. Returns one line per object.
    pub(super) async fn attachment(&self, claim: &str, id: &str, vm_name: &str) -> Result<Vec<String>> {
        let disk = self.volume(id).await?.disk_uuid.to_string();
        let object = self.vms.get(vm_name).await.with_context(|| format!("VirtualMachine {vm_name}"))?;
        let entry = object.spec.volumes.iter().find(|entry| {
            entry.persistent_volume_claim.as_ref().is_some_and(|source| source.claim_name.as_str() == claim)
        });
        let entry = entry
            .with_context(|| format!("VirtualMachine {vm_name} has no entry in spec.volumes for {claim}"))?;
        let status = object.status.unwrap_or_default();
        let observed = status.volumes.iter().find(|volume| volume.name == entry.name);
        let observed = observed
            .with_context(|| format!("VirtualMachine {vm_name} has no status of volume {}", entry.name))?;
        anyhow::ensure!(observed.attached, "VirtualMachine {vm_name} reports that {claim} is not attached");
        anyhow::ensure!(
            observed.disk_uuid.as_deref() == Some(&disk),
            "VirtualMachine {vm_name} reports disk UUID {:?}, the storage infra {disk}",
            observed.disk_uuid
        );
        let attachments = self.attachments_of(claim).await?;
        let [attachment] = &attachments[..] else {
            anyhow::bail!("{claim} has {} VolumeAttachments, expected one", attachments.len());
        };
        for vm in self.lab.vms() {
            let attached = self.lab.libvirt_disks(&vm).await?.contains(&disk);
            anyhow::ensure!(
                attached == (vm == vm_name),
                "disk {disk} is {} {vm}",
                if attached { "in" } else { "not in" }
            );
        }
        Ok(vec![
            format!("management  VirtualMachine {vm_name}, spec.volumes entry {}", entry.name),
            format!("management  VolumeAttachment {attachment}, attached"),
            format!("hypervisor  only {vm_name} has the disk with serial {disk}"),
        ])
    }

    /// Lists everything that may be left of a volume.
    pub(super) async fn leftovers(&self, id: &str) -> Result<Vec<Leftovers>> {
        let attachments = self.all_attachments.list(&ListParams::default()).await?;
        let mut entries = Vec::new();
        for vm in self.vms.list(&ListParams::default()).await? {
            let status = vm.status.clone().unwrap_or_default();
            let names = vm.spec.volumes.iter().map(|volume| &volume.name);
            let names = names.chain(status.volumes.iter().map(|volume| &volume.name));
            entries.extend(names.map(|name| format!("{} of {}", name, vm.name_any())));
        }
        let mut disks = Vec::new();
        for vm in self.lab.vms() {
            let serials = self.lab.libvirt_disks(&vm).await?;
            disks.extend(serials.into_iter().map(|serial| format!("{serial} in {vm}")));
        }
        let volumes = self.infra.list_volumes(None, None).await?.items;
        let attached = self.infra.list_attachments(None, None).await?;
        let mut files = self.lab.stored().await?;
        files.retain(|name| name.contains(id));
        Ok(vec![
            Leftovers::new("management  VolumeAttachments", attachments.iter().map(ResourceExt::name_any)),
            Leftovers::new("management  VirtualMachine volumes", entries),
            Leftovers::new("hypervisor  hot-plugged disks", disks),
            Leftovers::new("infra       volumes", volumes.iter().map(|one| one.id.to_string())),
            Leftovers::new("infra       attachments", attached.iter().map(|one| one.id.to_string())),
            Leftovers::new("infra       files in pools", files),
        ])
    }

    /// The attached VolumeAttachments of a management claim, as `namespace/name`.
    async fn attachments_of(&self, claim: &str) -> Result<Vec<String>> {
        let listed = self.attachments.list(&ListParams::default()).await?;
        let own = listed.iter().filter(|attachment| attachment.spec.volume_name.as_str() == claim);
        let attached =
            own.filter(|attachment| attachment.status.as_ref().is_some_and(|status| status.attached));
        Ok(attached.map(|attachment| format!("{}/{}", self.namespace, attachment.name_any())).collect())
    }
}
