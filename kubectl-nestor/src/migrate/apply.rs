//! Takes the steps of a migration.

use std::time::Duration;

use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::ResourceExt;
use kube::api::{
    Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams, Preconditions, PropagationPolicy,
};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::Migration;
use super::decide::{OWN_POLICY, Step, Volume, handle};
use crate::clusters::{Cluster, Tier};
use crate::error::Error;

/// Time limit for the end of a DataVolume.
const PATIENCE: Duration = Duration::from_secs(60);
/// Interval between two reads of it.
const INTERVAL: Duration = Duration::from_millis(500);

impl Migration<'_> {
    /// Takes a step.
    pub(super) async fn apply(&self, volume: &Volume, step: &Step) -> Result<(), Error> {
        match step {
            Step::Retain(tier) => self.retain(volume, *tier).await,
            Step::Restore(tier, policy) => self.restore(volume, *tier, policy).await,
            Step::Claim(_, patch) => self.patch_claim(volume, patch).await,
            Step::ShowDisk(name, patch) => self.show_disk(name, patch).await,
            Step::Orphan => self.orphan(volume).await,
            Step::Create(data_volume) => self.create(data_volume).await,
        }
    }

    fn of_tier<'v>(&self, volume: &'v Volume, tier: Tier) -> (&Cluster, &'v PersistentVolume) {
        match (tier, &volume.management_volume) {
            (Tier::Management, Some(own)) => (self.management, own),
            _ => (self.guest, &volume.guest_volume),
        }
    }

    /// The own policy is recorded in the same request, so that it is not lost.
    async fn retain(&self, volume: &Volume, tier: Tier) -> Result<(), Error> {
        let (cluster, own) = self.of_tier(volume, tier);
        let spec = own.spec.as_ref();
        let policy = spec.and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref());
        let recorded = own.annotations().get(OWN_POLICY).map(String::as_str);
        let patch = json!({
            "metadata": {
                "resourceVersion": own.metadata.resource_version,
                "annotations": {OWN_POLICY: recorded.or(policy).unwrap_or("Delete")},
            },
            "spec": {"persistentVolumeReclaimPolicy": "Retain"},
        });
        patch_volume(cluster, own, &patch).await
    }

    async fn restore(&self, volume: &Volume, tier: Tier, policy: &str) -> Result<(), Error> {
        let (cluster, own) = self.of_tier(volume, tier);
        let patch = json!({
            "metadata": {
                "resourceVersion": own.metadata.resource_version, "annotations": {OWN_POLICY: null},
            },
            "spec": {"persistentVolumeReclaimPolicy": policy},
        });
        patch_volume(cluster, own, &patch).await
    }

    async fn patch_claim(&self, volume: &Volume, patch: &Value) -> Result<(), Error> {
        let name = handle(&volume.guest_volume);
        let claims = self.management.claims_of(&self.identity.namespace);
        let patched = claims.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await;
        let what = || format!("management PersistentVolumeClaim {name}");
        patched.map(drop).map_err(|error| Error::change("change", what(), &error))
    }

    async fn show_disk(&self, name: &str, patch: &Value) -> Result<(), Error> {
        let attachments: Api<VolumeAttachment> = self.guest.all();
        let patched = attachments.patch_status(name, &PatchParams::default(), &Patch::Merge(patch)).await;
        let what = || format!("VolumeAttachment {name}");
        patched.map(drop).map_err(|error| Error::change("change", what(), &error))
    }

    /// Deletes the DataVolume alone, and waits until it is gone: the garbage collector then has removed it from the claim's owners.
    async fn orphan(&self, volume: &Volume) -> Result<(), Error> {
        let Some(data_volume) = &volume.data_volume else { return Ok(()) };
        let (api, name) = (self.data_volumes(), data_volume.name_any());
        let alone = DeleteParams {
            propagation_policy: Some(PropagationPolicy::Orphan),
            preconditions: Some(Preconditions { uid: data_volume.uid(), resource_version: None }),
            ..DeleteParams::default()
        };
        match api.delete(&name, &alone).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.is_not_found() => {}
            Err(error) => return Err(Error::change("delete", format!("DataVolume {name}"), &error)),
        }
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = api.get_opt(&name).await;
            let left = left.map_err(|error| Error::change("read", format!("DataVolume {name}"), &error))?;
            let Some(left) = left.filter(|left| left.uid() == data_volume.uid()) else { return Ok(()) };
            if Instant::now() > deadline {
                return Err(Error::Refused(format!(
                    "DataVolume {name} is being deleted, but its finalizers {:?} hold it: see why, and run the command again",
                    left.finalizers()
                )));
            }
            sleep(INTERVAL).await;
        }
    }

    async fn create(&self, data_volume: &Value) -> Result<(), Error> {
        let object: DynamicObject =
            serde_json::from_value(data_volume.clone()).map_err(|error| Error::Encode(error.to_string()))?;
        let created = self.data_volumes().create(&PostParams::default(), &object).await;
        let what = || format!("DataVolume {}", object.name_any());
        created.map(drop).map_err(|error| Error::change("create", what(), &error))
    }
}

async fn patch_volume(cluster: &Cluster, volume: &PersistentVolume, patch: &Value) -> Result<(), Error> {
    let (api, name): (Api<PersistentVolume>, _) = (cluster.all(), volume.name_any());
    let patched = api.patch(&name, &PatchParams::default(), &Patch::Merge(patch)).await;
    let what = || format!("PersistentVolume {name} of the {} cluster", cluster.tier.name());
    patched.map(drop).map_err(|error| Error::change("change", what(), &error))
}
