//! Run of a test, and the cleanup of its objects in both tiers, however far the test came.

use std::collections::BTreeSet;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use infra_api::VolumeId;
use k8s_openapi::api::core::v1::{Namespace, ObjectReference, PersistentVolume};
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttributesClass};
use kube::api::{Api, ListParams};
use kube::{Resource, ResourceExt};
use tokio::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::objects::{delete, gone, set_policy};
use crate::{PATIENCE, Scenario, chart, eventually};

/// The running scenarios of this program: many at once, or one alone.
static RUNNING: RwLock<()> = RwLock::const_new(());

/// While it exists, no other scenario of this program runs.
pub struct Alone {
    _running: RwLockWriteGuard<'static, ()>,
}

/// Waits until no scenario of this program runs, and keeps others from it: for tests that stop what others use.
pub async fn alone() -> Alone {
    Alone { _running: RUNNING.write().await }
}

/// Waits until no scenario runs alone, and keeps one from it.
pub(crate) async fn beside_others() -> RwLockReadGuard<'static, ()> {
    RUNNING.read().await
}

impl Alone {
    /// Runs a test as [`run`] does, without others beside it.
    pub async fn run<Body, Running>(&self, body: Body) -> Result<()>
    where
        Body: FnOnce(Arc<Scenario>) -> Running,
        Running: Future<Output = Result<()>> + Send + 'static,
    {
        run_and_clean_up(body).await
    }
}

/// Runs a test, removes its objects and checks for leftovers, whether the test succeeded or not.
pub async fn run<Body, Running>(body: Body) -> Result<()>
where
    Body: FnOnce(Arc<Scenario>) -> Running,
    Running: Future<Output = Result<()>> + Send + 'static,
{
    let _beside_others = beside_others().await;
    run_and_clean_up(body).await
}

/// Runs a test as [`run`] does, while no other scenario of this program runs.
pub async fn run_alone<Body, Running>(body: Body) -> Result<()>
where
    Body: FnOnce(Arc<Scenario>) -> Running,
    Running: Future<Output = Result<()>> + Send + 'static,
{
    alone().await.run(body).await
}

/// The same, whether others run beside it or not: the caller decides.
pub(crate) async fn run_and_clean_up<Body, Running>(body: Body) -> Result<()>
where
    Body: FnOnce(Arc<Scenario>) -> Running,
    Running: Future<Output = Result<()>> + Send + 'static,
{
    let scenario = Arc::new(Scenario::begin().await?);
    // In its own task, so that a failed assertion does not skip the cleanup.
    let outcome = tokio::spawn(body(scenario.clone())).await;
    let cleaned = scenario.clean_up().await.context("cleanup");
    match outcome.unwrap_or_else(|panic| Err(anyhow!("{panic}"))) {
        Ok(()) => cleaned,
        Err(error) => match cleaned {
            Ok(()) => Err(error),
            Err(dirty) => Err(error.context(format!("(the cleanup failed too: {dirty:#})"))),
        },
    }
}

impl Scenario {
    /// Records every management claim of the scenario and the volume behind it.
    async fn record_claims(&self) -> Result<()> {
        let claims = self.claims().list(&ListParams::default()).await?;
        for claim in claims.into_iter().filter(|claim| self.is_own(claim)) {
            self.created().claims.insert(claim.name_any());
            if let Some(uid) = claim.uid() {
                // The name of the PersistentVolume and the ID of the volume in the storage infra.
                self.created().volumes.insert(VolumeId::new(format!("pvc-{uid}"))?);
            }
        }
        Ok(())
    }

    async fn clean_up(&self) -> Result<()> {
        let stopped = std::mem::take(&mut self.created().stopped);
        for component in stopped {
            self.start_component(&component).await?;
        }
        self.show_pools()?;
        self.remove_budgets().await?;
        self.remove_own_namespaces().await?;
        self.remove_accounts().await?;
        self.remove_role_objects().await?;
        self.record_claims().await?;
        self.remove_pods().await?;
        self.remove_guest_attachments().await?;
        self.remove_nodes().await?;
        self.set_policies_to_delete().await?;
        self.remove_guest_objects().await?;
        self.remove_management_objects().await?;
        self.remove_classes().await?;
        self.no_leftovers().await?;
        self.remove_pools().await
    }

    async fn remove_role_objects(&self) -> Result<()> {
        let objects = std::mem::take(&mut self.created().role_objects);
        for (client, object) in &objects {
            chart::delete(client, object).await?;
        }
        Ok(())
    }

    async fn remove_budgets(&self) -> Result<()> {
        let names = std::mem::take(&mut self.created().budgets);
        delete_all(&[self.budgets()], names).await
    }

    async fn remove_management_objects(&self) -> Result<()> {
        let snapshots = self.created().management_snapshots.clone();
        delete_all(&[self.snapshots()], snapshots).await?;
        let by_hand = std::mem::take(&mut self.created().management_claims);
        delete_all(&[self.claims()], by_hand.iter().cloned()).await?;
        let claims: BTreeSet<String> = self.created().claims.clone();
        self.delete_volumes(claims.iter().filter(|claim| !by_hand.contains(*claim))).await?;
        let quotas = std::mem::take(&mut self.created().quotas);
        delete_all(&[self.quotas()], quotas).await
    }

    async fn delete_volumes(&self, claims: impl Iterator<Item = &String>) -> Result<()> {
        // In pods, gc-csi has deleted the volumes of the guest's claims, and nobody else can call it.
        if self.lab.deployment().is_ok() {
            return Ok(());
        }
        for claim in claims {
            eventually(&format!("volume {claim} deleted"), PATIENCE, || async {
                Ok(self.driver.delete(claim).await.map_err(|status| format!("{status}")))
            })
            .await?;
        }
        Ok(())
    }

    async fn remove_classes(&self) -> Result<()> {
        let clients = [&self.guest, &self.management];
        let storage_classes = clients.map(|client| Api::<StorageClass>::all(client.clone()));
        let names = std::mem::take(&mut self.created().guest_classes);
        delete_all(&storage_classes[..1], names).await?;
        let names = std::mem::take(&mut self.created().management_classes);
        delete_all(&storage_classes[1..], names).await?;
        let names = std::mem::take(&mut self.created().snapshot_classes);
        delete_all(&[self.guest_snapshot_classes(), self.snapshot_classes()], names).await?;
        let names = std::mem::take(&mut self.created().attributes_classes);
        delete_all(&clients.map(|client| Api::<VolumeAttributesClass>::all(client.clone())), names).await
    }

    /// Sets the reclaim policy of every volume that would be kept to Delete.
    async fn set_policies_to_delete(&self) -> Result<()> {
        let claims = self.created().claims.clone();
        let is_management_claim =
            |claim: &ObjectReference| claim.name.as_ref().is_some_and(|name| claims.contains(name));
        set_policies(&self.volumes(), "Delete", |_, claim| claim.is_some_and(is_management_claim)).await?;
        let by_hand = |volume: &PersistentVolume| volume.labels().get("test") == Some(&self.name);
        let is_guest_claim = |claim: &ObjectReference| claim.namespace.as_ref() == Some(&self.name);
        let volumes = self.guest_volumes();
        // Static volumes are deleted without the driver, which may refuse.
        set_policies(&volumes, "Retain", |volume, _| by_hand(volume)).await?;
        set_policies(&volumes, "Delete", |volume, claim| {
            !by_hand(volume) && claim.is_some_and(is_guest_claim)
        })
        .await
    }

    async fn remove_guest_attachments(&self) -> Result<()> {
        self.k8s_attachments().clean().await?;
        if self.created().second_guest_volumes {
            self.second_guest().await?.k8s_attachments().clean().await?;
        }
        Ok(())
    }

    async fn remove_guest_objects(&self) -> Result<()> {
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
        self.remove_static_volumes(&by_hand).await?;
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

    /// Deletes the PersistentVolumes of both guests that `by_hand` selects.
    async fn remove_static_volumes(&self, by_hand: &ListParams) -> Result<()> {
        let mut clusters = vec![self.guest_volumes()];
        if self.created().second_guest_volumes {
            clusters.push(self.second_guest().await?.volumes());
        }
        for volumes in clusters {
            for volume in volumes.list(by_hand).await? {
                delete(&volumes, &volume.name_any()).await?;
            }
            gone("static volumes", || async {
                Ok(volumes.list(by_hand).await?.items.iter().map(ResourceExt::name_any).collect())
            })
            .await?;
        }
        Ok(())
    }

    /// Detaches all disks of the scenario's nodes, and removes the nodes.
    async fn remove_nodes(&self) -> Result<()> {
        let nodes = std::mem::take(&mut self.created().nodes);
        for (node, driver) in nodes {
            let entries = self.vms().get_opt(&node.name).await?.map(|vm| vm.spec.volumes);
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

/// Deletes the objects with these names from each of the APIs.
async fn delete_all<K>(apis: &[Api<K>], names: impl IntoIterator<Item = String>) -> Result<()>
where
    K: Resource + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    for name in names {
        for api in apis {
            delete(api, &name).await?;
        }
    }
    Ok(())
}

/// Sets the reclaim policy of the volumes that `selects` accepts, by themselves and their claims.
async fn set_policies(
    volumes: &Api<PersistentVolume>,
    policy: &str,
    selects: impl Fn(&PersistentVolume, Option<&ObjectReference>) -> bool,
) -> Result<()> {
    for volume in volumes.list(&ListParams::default()).await? {
        let spec = volume.spec.as_ref();
        let differs = spec.and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref()) != Some(policy);
        if differs && selects(&volume, spec.and_then(|spec| spec.claim_ref.as_ref())) {
            set_policy(volumes, &volume.name_any(), policy).await?;
        }
    }
    Ok(())
}
