//! Tracer: follows one volume through guest, management cluster, hypervisor and storage infra.

use std::fmt;
use std::time::Duration;

use anyhow::{Context, Result};
use crds::{VirtualMachine, VolumeAttachment};
use infra_api::VolumeId;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::VolumeAttachment as GuestAttachment;
use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt};

use crate::lab::Lab;
use crate::virtual_machines;
use crate::wait::eventually;

const PATIENCE: Duration = Duration::from_secs(300);

/// Reads both clusters, the hypervisor and the storage infra.
pub(super) struct Tracer {
    lab: Lab,
    guest: Client,
    management: Client,
    vms: Api<VirtualMachine>,
    infra: infra_api::Client,
    namespace: String,
}

/// The objects behind a guest claim, from top to bottom.
pub(super) struct Chain {
    claim: String,
    volume: String,
    management_claim: String,
    management_volume: String,
    infra: infra_api::Volume,
}

/// A kind of object in one tier, and the names found.
pub(super) struct Leftovers {
    name: &'static str,
    pub(super) found: Vec<String>,
}

impl fmt::Display for Leftovers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let found = if self.found.is_empty() { "none".to_owned() } else { self.found.join(", ") };
        write!(f, "{}: {found}", self.name)
    }
}

impl Chain {
    /// One line per object.
    pub(super) fn lines(&self) -> Vec<String> {
        let Self { claim, volume, management_claim, management_volume, infra } = self;
        vec![
            format!("guest       PersistentVolumeClaim {claim}"),
            format!("guest       PersistentVolume {volume}"),
            format!("management  PersistentVolumeClaim {management_claim}"),
            format!("management  PersistentVolume {management_volume}"),
            format!(
                "infra       volume {}: {} MiB in {}, disk UUID {}",
                infra.id,
                infra.capacity_bytes >> 20,
                infra.pool,
                infra.disk_uuid
            ),
        ]
    }
}

impl Tracer {
    pub(super) async fn new(lab: &Lab, guest: &Client) -> Result<Self> {
        let (management, namespace) = (lab.management().await?, lab.guest_namespace("g1")?);
        Ok(Self {
            lab: lab.clone(),
            guest: guest.clone(),
            vms: virtual_machines::api(&management, &namespace).await?,
            management,
            infra: lab.infra()?,
            namespace,
        })
    }

    /// Waits until a guest claim is bound, and follows it down to the storage infra's volume.
    pub(super) async fn chain(&self, namespace: &str, claim: &str) -> Result<Chain> {
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(self.guest.clone(), namespace);
        let volume = bound(&claims, "guest", claim).await?;
        let handle = handle(&Api::all(self.guest.clone()), "guest", &volume).await?;
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(self.management.clone(), &self.namespace);
        let management_volume = bound(&claims, "management", &handle).await?;
        let id = self::handle(&Api::all(self.management.clone()), "management", &management_volume).await?;
        let infra = self.infra.get_volume(&VolumeId::new(id.clone())?).await?;
        Ok(Chain {
            claim: format!("{namespace}/{claim}"),
            volume,
            management_claim: format!("{}/{handle}", self.namespace),
            management_volume,
            infra: infra.with_context(|| format!("the storage infra has no volume {id}"))?,
        })
    }

    /// Checks that a volume is attached to one VM and to no other. Returns one line per object.
    pub(super) async fn attachment(&self, chain: &Chain, vm_name: &str, device: &str) -> Result<Vec<String>> {
        let claim = self.claim_name(chain);
        let disk = chain.infra.disk_uuid.to_string();
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
        let attachments = self.attachments(claim).await?;
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
            format!("in {vm_name}     {device} on /data"),
        ])
    }

    /// Lists every object on every tier that may be left of a volume.
    pub(super) async fn leftovers(&self, chain: &Chain) -> Result<Vec<Leftovers>> {
        let claims: Api<PersistentVolumeClaim> = Api::all(self.guest.clone());
        let volumes: Api<PersistentVolume> = Api::all(self.guest.clone());
        let guest_attachments: Api<GuestAttachment> = Api::all(self.guest.clone());
        let management_claims: Api<PersistentVolumeClaim> = Api::all(self.management.clone());
        let management_volumes: Api<PersistentVolume> = Api::all(self.management.clone());
        let attachments: Api<VolumeAttachment> = Api::all(self.management.clone());
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
        let infra_volumes = self.infra.list_volumes(None, None).await?.items;
        let infra_attachments = self.infra.list_attachments(None, None).await?;
        Ok(vec![
            Leftovers { name: "guest       PersistentVolumeClaims", found: names(&claims).await? },
            Leftovers { name: "guest       PersistentVolumes", found: names(&volumes).await? },
            Leftovers {
                name: "guest       storage.k8s.io/VolumeAttachments",
                found: names(&guest_attachments).await?,
            },
            Leftovers { name: "management  PersistentVolumeClaims", found: names(&management_claims).await? },
            Leftovers { name: "management  PersistentVolumes", found: names(&management_volumes).await? },
            Leftovers { name: "management  VolumeAttachments", found: names(&attachments).await? },
            Leftovers { name: "management  VirtualMachine volumes", found: entries },
            Leftovers { name: "hypervisor  hot-plugged disks", found: disks },
            Leftovers {
                name: "infra       volumes",
                found: infra_volumes.iter().map(|one| one.id.to_string()).collect(),
            },
            Leftovers {
                name: "infra       attachments",
                found: infra_attachments.iter().map(|one| one.id.to_string()).collect(),
            },
            Leftovers { name: "infra       files in pools", found: self.files(chain).await? },
        ])
    }

    /// The files or images of the volume in all pools.
    async fn files(&self, chain: &Chain) -> Result<Vec<String>> {
        let mut found = self.lab.stored().await?;
        found.retain(|name| name.contains(chain.infra.id.as_str()));
        Ok(found)
    }

    /// The attached VolumeAttachments of a management claim, as `namespace/name`.
    async fn attachments(&self, claim: &str) -> Result<Vec<String>> {
        let api: Api<VolumeAttachment> = Api::namespaced(self.management.clone(), &self.namespace);
        let listed = api.list(&ListParams::default()).await?;
        let own = listed.iter().filter(|attachment| attachment.spec.volume_name.as_str() == claim);
        let attached =
            own.filter(|attachment| attachment.status.as_ref().is_some_and(|status| status.attached));
        Ok(attached.map(|attachment| format!("{}/{}", self.namespace, attachment.name_any())).collect())
    }

    fn claim_name<'a>(&self, chain: &'a Chain) -> &'a str {
        chain.management_claim.rsplit('/').next().unwrap_or(&chain.management_claim)
    }
}

async fn bound(api: &Api<PersistentVolumeClaim>, tier: &str, name: &str) -> Result<String> {
    eventually(&format!("{tier} PersistentVolumeClaim {name} is bound"), PATIENCE, || async {
        let Some(claim) = api.get_opt(name).await? else { return Ok(Err("it does not exist".to_owned())) };
        let phase = claim.status.and_then(|status| status.phase).unwrap_or_default();
        let volume = claim.spec.and_then(|spec| spec.volume_name).filter(|_| phase == "Bound");
        Ok(volume.ok_or_else(|| format!("it is {phase}")))
    })
    .await
}

/// The CSI volume handle of a PersistentVolume.
async fn handle(api: &Api<PersistentVolume>, tier: &str, name: &str) -> Result<String> {
    let volume = api.get(name).await.with_context(|| format!("{tier} PersistentVolume {name}"))?;
    let source = volume.spec.and_then(|spec| spec.csi);
    Ok(source.with_context(|| format!("{tier} PersistentVolume {name} has no CSI source"))?.volume_handle)
}

async fn names<K>(api: &Api<K>) -> Result<Vec<String>>
where
    K: kube::Resource + Clone + fmt::Debug + serde::de::DeserializeOwned,
{
    Ok(api.list(&ListParams::default()).await?.iter().map(ResourceExt::name_any).collect())
}
