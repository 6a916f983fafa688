//! Sizes of a volume in each tier.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::api::PostParams;
use kube_kit::quantity;
use serde_json::json;

use crate::guest::handle;
use crate::{PATIENCE, Scenario, eventually, unique};

/// The `storage` entry of a resource list, in bytes; 0 if there is none.
pub(crate) fn bytes(sizes: Option<&BTreeMap<String, Quantity>>) -> u64 {
    sizes.and_then(|all| quantity::value(all.get("storage")?)).unwrap_or_default()
}

/// The requested size of a claim, in bytes.
pub fn requested(claim: &PersistentVolumeClaim) -> u64 {
    let resources = claim.spec.as_ref().and_then(|spec| spec.resources.as_ref());
    bytes(resources.and_then(|resources| resources.requests.as_ref()))
}

impl Scenario {
    /// The size of a guest claim in each tier in bytes, read from the top down: guest claim, guest volume, management
    /// claim, storage infra.
    pub async fn sizes(&self, claim: &str) -> Result<[u64; 4]> {
        let claim = self.guest_claims().get(claim).await?;
        let of_claim = bytes(claim.status.as_ref().and_then(|status| status.capacity.as_ref()));
        let volume = claim.spec.and_then(|spec| spec.volume_name).context("the claim has no volume")?;
        let volume = self.guest_volumes().get(&volume).await?;
        let of_volume = bytes(volume.spec.as_ref().and_then(|spec| spec.capacity.as_ref()));
        let handle = handle(&volume)?;
        let claim = self.claims().get(&handle).await?.status;
        let claim = bytes(claim.as_ref().and_then(|status| status.capacity.as_ref()));
        Ok([of_claim, of_volume, claim, self.volume_bytes(&handle).await?])
    }

    /// Waits until the guest volume, management claim and storage infra have `size` MiB. Meanwhile no tier may report a
    /// larger size than the tier below it.
    pub async fn expanded(&self, claim: &str, size: u64) -> Result<()> {
        eventually(&format!("guest claim {claim} of {size} MiB in every tier"), PATIENCE, || async {
            let sizes = self.sizes(claim).await?;
            // Sizes are read from the top down and only increase, so a larger size above is a real violation.
            ensure!(sizes.is_sorted(), "guest claim, guest volume, management claim, infra: {sizes:?}");
            let done = sizes[1..].iter().all(|one| *one == size << 20);
            Ok(if done { Ok(()) } else { Err(format!("{sizes:?}; {:?}", self.events(claim).await?)) })
        })
        .await
    }

    /// Waits until the management cluster rejects a claim of a class with this size: the API server's admission sees a
    /// new quota a moment after the quota's status.
    pub async fn limited(&self, class: &str, storage: &str) -> Result<()> {
        let claim: PersistentVolumeClaim = serde_json::from_value(json!({
            "metadata": {"name": unique(&self.name)},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": class,
                "resources": {"requests": {"storage": storage}},
            },
        }))?;
        let dry_run = PostParams { dry_run: true, ..PostParams::default() };
        eventually(&format!("a claim of class {class} for {storage} is rejected"), PATIENCE, || async {
            match self.claims().create(&dry_run, &claim).await {
                Ok(_) => Ok(Err("it would be created".to_owned())),
                Err(kube::Error::Api(status)) if status.code == 403 => Ok(Ok(())),
                Err(error) => Err(error.into()),
            }
        })
        .await
    }

    /// Waits until the management cluster's csi-resizer has started to expand a management claim to `size` MiB.
    pub async fn expansion_started(&self, claim: &str, size: u64) -> Result<()> {
        eventually(&format!("{claim} is being expanded to {size} MiB"), PATIENCE, || async {
            let status = self.claims().get(claim).await?.status.unwrap_or_default();
            let started = bytes(status.allocated_resources.as_ref()) == size << 20;
            Ok(if started { Ok(()) } else { Err(format!("{status:?}")) })
        })
        .await
    }
}
