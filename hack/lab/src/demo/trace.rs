//! Tracer: follows one volume through guest, management cluster, and what is below it.

use std::fmt;
use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::VolumeAttachment as GuestAttachment;
use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt};

use super::kubevirt::KubeVirt;
use super::libvirt::Libvirt;
use crate::lab::Lab;
use crate::wait::eventually;

const PATIENCE: Duration = Duration::from_secs(300);

/// Reads both clusters, the hypervisor and the storage.
pub(super) struct Tracer {
    guest: Client,
    management: Client,
    namespace: String,
    below: Below,
}

/// What runs the VMs and keeps the volumes.
enum Below {
    Libvirt(Box<Libvirt>),
    KubeVirt(Box<KubeVirt>),
}

/// The objects behind a guest claim, from top to bottom.
pub(super) struct Chain {
    /// Name of the management claim.
    management_claim: String,
    /// The volume's ID in the storage.
    id: String,
    lines: Vec<String>,
}

/// A kind of object in one tier, and the names found.
pub(super) struct Leftovers {
    name: &'static str,
    pub(super) found: Vec<String>,
}

impl Leftovers {
    pub(super) fn new(name: &'static str, found: impl IntoIterator<Item = String>) -> Self {
        Self { name, found: found.into_iter().collect() }
    }
}

impl fmt::Display for Leftovers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let found = if self.found.is_empty() { "none".to_owned() } else { self.found.join(", ") };
        write!(f, "{}: {found}", self.name)
    }
}

impl Chain {
    /// One line per object.
    pub(super) fn lines(&self) -> &[String] {
        &self.lines
    }
}

impl Tracer {
    pub(super) async fn new(lab: &Lab, guest: &Client) -> Result<Self> {
        let (management, namespace) = (lab.management().await?, lab.guest_namespace("g1")?);
        let below = match lab.has_kubevirt() {
            true => Below::KubeVirt(Box::new(KubeVirt::new(lab, &management, &namespace))),
            false => Below::Libvirt(Box::new(Libvirt::new(lab, &management, &namespace).await?)),
        };
        Ok(Self { guest: guest.clone(), management, namespace, below })
    }

    /// Waits until a guest claim is bound, and follows it down to the storage.
    pub(super) async fn chain(&self, namespace: &str, claim: &str) -> Result<Chain> {
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(self.guest.clone(), namespace);
        let volume = bound(&claims, "guest", claim).await?;
        let management_claim = handle(&Api::all(self.guest.clone()), "guest", &volume).await?;
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(self.management.clone(), &self.namespace);
        let management_volume = bound(&claims, "management", &management_claim).await?;
        let id = self::handle(&Api::all(self.management.clone()), "management", &management_volume).await?;
        let stored = match &self.below {
            Below::Libvirt(libvirt) => libvirt.describe(&id).await?,
            Below::KubeVirt(kubevirt) => kubevirt.describe(&id)?,
        };
        let lines = vec![
            format!("guest       PersistentVolumeClaim {namespace}/{claim}"),
            format!("guest       PersistentVolume {volume}"),
            format!("management  PersistentVolumeClaim {}/{management_claim}", self.namespace),
            format!("management  PersistentVolume {management_volume}"),
            stored,
        ];
        Ok(Chain { management_claim, id, lines })
    }

    /// Checks that a volume is attached to one VM and to no other. Returns one line per object.
    pub(super) async fn attachment(&self, chain: &Chain, vm: &str, device: &str) -> Result<Vec<String>> {
        let claim = &chain.management_claim;
        let mut lines = match &self.below {
            Below::Libvirt(libvirt) => libvirt.attachment(claim, &chain.id, vm).await?,
            Below::KubeVirt(kubevirt) => kubevirt.attachment(claim, vm).await?,
        };
        lines.push(format!("in {vm}     {device} on /data"));
        Ok(lines)
    }

    /// Lists every object on every tier that may be left of a volume.
    pub(super) async fn leftovers(&self, chain: &Chain) -> Result<Vec<Leftovers>> {
        let claims: Api<PersistentVolumeClaim> = Api::all(self.guest.clone());
        let volumes: Api<PersistentVolume> = Api::all(self.guest.clone());
        let guest_attachments: Api<GuestAttachment> = Api::all(self.guest.clone());
        let management_claims: Api<PersistentVolumeClaim> = Api::all(self.management.clone());
        let management_volumes: Api<PersistentVolume> = Api::all(self.management.clone());
        let mut left = vec![
            Leftovers::new("guest       PersistentVolumeClaims", names(&claims).await?),
            Leftovers::new("guest       PersistentVolumes", names(&volumes).await?),
            Leftovers::new("guest       storage.k8s.io/VolumeAttachments", names(&guest_attachments).await?),
            Leftovers::new("management  PersistentVolumeClaims", names(&management_claims).await?),
            Leftovers::new("management  PersistentVolumes", names(&management_volumes).await?),
        ];
        left.extend(match &self.below {
            Below::Libvirt(libvirt) => libvirt.leftovers(&chain.id).await?,
            Below::KubeVirt(kubevirt) => kubevirt.leftovers(&chain.management_claim, &chain.id).await?,
        });
        Ok(left)
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
