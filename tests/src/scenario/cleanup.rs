//! Cleanup of a scenario's objects in both tiers, however far it came.

use std::collections::BTreeSet;

use anyhow::Result;
use infra_api::VolumeId;
use k8s_openapi::api::core::v1::{Namespace, ObjectReference, PersistentVolume};
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttributesClass};
use kube::ResourceExt;
use kube::api::{Api, ListParams};

use super::{Scenario, delete, gone, set_policy};
use crate::{PATIENCE, eventually};

impl Scenario {
    /// Records every management claim of the scenario and the volume behind it.
    async fn take_stock(&self) -> Result<()> {
        let claims = self.claims().list(&ListParams::default()).await?;
        for claim in claims.into_iter().filter(|claim| self.is_own(claim)) {
            self.made().claims.insert(claim.name_any());
            if let Some(uid) = claim.uid() {
                // The name of the PersistentVolume and the ID of the volume in the storage infra.
                self.made().volumes.insert(VolumeId::new(format!("pvc-{uid}"))?);
            }
        }
        Ok(())
    }

    pub(super) async fn clean_up(&self) -> Result<()> {
        let stopped = std::mem::take(&mut self.made().stopped);
        for component in stopped {
            self.start_component(&component).await?;
        }
        self.show_pools()?;
        self.clean_places().await?;
        self.take_stock().await?;
        self.clean_pods().await?;
        self.clean_orders().await?;
        self.clean_nodes().await?;
        self.release().await?;
        self.clean_guest().await?;
        let snapshots = self.made().management_snapshots.clone();
        for snapshot in snapshots {
            delete(&self.snapshots(), &snapshot).await?;
        }
        let by_hand = std::mem::take(&mut self.made().management_claims);
        for claim in &by_hand {
            delete(&self.claims(), claim).await?;
        }
        let claims: BTreeSet<String> = self.made().claims.clone();
        for claim in claims.iter().filter(|claim| !by_hand.contains(claim)) {
            eventually(&format!("volume {claim} deleted"), PATIENCE, || async {
                Ok(self.driver.delete(claim).await.map_err(|status| format!("{status}")))
            })
            .await?;
        }
        let quotas = std::mem::take(&mut self.made().quotas);
        for quota in quotas {
            delete(&self.quotas(), &quota).await?;
        }
        let classes = std::mem::take(&mut self.made().guest_classes);
        for class in classes {
            delete(&Api::<StorageClass>::all(self.guest.clone()), &class).await?;
        }
        let classes = std::mem::take(&mut self.made().management_classes);
        for class in classes {
            delete(&Api::<StorageClass>::all(self.management.clone()), &class).await?;
        }
        let classes = std::mem::take(&mut self.made().snapshot_classes);
        for class in classes {
            delete(&self.guest_snapshot_classes(), &class).await?;
            delete(&self.snapshot_classes(), &class).await?;
        }
        let classes = std::mem::take(&mut self.made().attributes_classes);
        for class in classes {
            delete(&Api::<VolumeAttributesClass>::all(self.guest.clone()), &class).await?;
            delete(&Api::<VolumeAttributesClass>::all(self.management.clone()), &class).await?;
        }
        self.no_leftovers().await?;
        self.clean_pools().await
    }

    /// Sets the reclaim policy of every volume that would be kept to Delete.
    async fn release(&self) -> Result<()> {
        let claims = self.made().claims.clone();
        let is_below =
            |claim: &ObjectReference| claim.name.as_ref().is_some_and(|name| claims.contains(name));
        set_policies(&self.volumes(), "Delete", |_, claim| claim.is_some_and(is_below)).await?;
        let by_hand = |volume: &PersistentVolume| volume.labels().get("test") == Some(&self.name);
        let is_above = |claim: &ObjectReference| claim.namespace.as_ref() == Some(&self.name);
        let volumes = self.guest_volumes();
        // Static volumes are deleted without the driver, which may refuse.
        set_policies(&volumes, "Retain", |volume, _| by_hand(volume)).await?;
        set_policies(&volumes, "Delete", |volume, claim| !by_hand(volume) && claim.is_some_and(is_above))
            .await
    }

    async fn clean_orders(&self) -> Result<()> {
        self.k8s_attachments().clean().await?;
        if self.made().second_guest_volumes {
            self.second_guest().await?.k8s_attachments().clean().await?;
        }
        Ok(())
    }

    async fn clean_guest(&self) -> Result<()> {
        let (snapshots, contents, claims) =
            (self.guest_snapshots(), self.guest_contents(), self.guest_claims());
        let by_hand = ListParams::default().labels(&format!("test={}", self.name));
        for snapshot in snapshots.list(&ListParams::default()).await? {
            delete(&snapshots, &snapshot.name_any()).await?;
        }
        for content in contents.list(&by_hand).await? {
            delete(&contents, &content.name_any()).await?;
        }
        // A snapshot is kept while a pending claim restores it, and a claim while a snapshot of it is taken.
        for claim in claims.list(&ListParams::default()).await? {
            delete(&claims, &claim.name_any()).await?;
        }
        gone("snapshots of the guest", || async {
            let mut left = snapshots.list(&ListParams::default()).await?.items;
            left.extend(contents.list(&by_hand).await?);
            Ok(left.iter().map(ResourceExt::name_any).collect())
        })
        .await?;
        let mut clusters = vec![self.guest_volumes()];
        if self.made().second_guest_volumes {
            clusters.push(self.second_guest().await?.volumes());
        }
        for volumes in clusters {
            for volume in volumes.list(&by_hand).await? {
                delete(&volumes, &volume.name_any()).await?;
            }
            gone("static volumes", || async {
                Ok(volumes.list(&by_hand).await?.items.iter().map(ResourceExt::name_any).collect())
            })
            .await?;
        }
        gone("volumes of the guest", || async {
            let volumes = self.guest_volumes().list(&ListParams::default()).await?;
            let own = volumes.iter().filter(|volume| {
                let claim = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
                claim.and_then(|claim| claim.namespace.as_ref()) == Some(&self.name)
            });
            Ok(own.map(ResourceExt::name_any).collect())
        })
        .await?;
        delete(&Api::<Namespace>::all(self.guest.clone()), &self.name).await
    }
    /// Detaches all disks of the scenario's nodes, and removes the nodes.
    /// Detaches whatever the scenario's machines still have, and removes them.
    async fn clean_nodes(&self) -> Result<()> {
        let nodes = std::mem::take(&mut self.made().nodes);
        for (node, driver) in nodes {
            let entries = self.machines().get_opt(&node.name).await?.map(|vm| vm.spec.volumes);
            for claim in entries.unwrap_or_default().into_iter().filter_map(|e| e.persistent_volume_claim) {
                let claim = String::from(claim.claim_name);
                eventually(&format!("{claim} detached from {}", node.name), PATIENCE, || async {
                    Ok(driver.unpublish(&claim, &node.name).await.map_err(|status| format!("{status}")))
                })
                .await?;
            }
            self.no_attachments(&node).await?;
            self.lab.remove_loop_node(&node.name).await?;
        }
        Ok(())
    }
}

/// Sets the reclaim policy of the volumes that `whose` selects by themselves and their claims.
async fn set_policies(
    volumes: &Api<PersistentVolume>,
    policy: &str,
    whose: impl Fn(&PersistentVolume, Option<&ObjectReference>) -> bool,
) -> Result<()> {
    for volume in volumes.list(&ListParams::default()).await? {
        let spec = volume.spec.as_ref();
        let differs = spec.and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref()) != Some(policy);
        if differs && whose(&volume, spec.and_then(|spec| spec.claim_ref.as_ref())) {
            set_policy(volumes, &volume.name_any(), policy).await?;
        }
    }
    Ok(())
}
