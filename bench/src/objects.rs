//! Objects that a bench makes and removes, many at once, and how long it takes until the system has done its part.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use crds::names;
use futures::future;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::api::{Api, DeleteParams, PostParams};
use kube::runtime::watcher::Config;
use kube::{Client, ResourceExt};
use serde_json::json;
use tests::{Scenario, unique};

use crate::seen::Seen;

/// How many claims are made, or deleted, at once where there are to be very many.
const BATCH: usize = 250;

/// Claims in one namespace, and their volumes.
pub(crate) struct Claims {
    api: Api<PersistentVolumeClaim>,
    label: String,
    claims: Seen,
    volumes: Seen,
}

/// A claim that was made.
#[derive(Debug, Clone)]
pub(crate) struct Claim {
    pub(crate) name: String,
    /// The name of its volume, which csi-provisioner gives.
    pub(crate) volume: String,
    start: Instant,
}

impl Claim {
    /// The same, as if it had been made then.
    pub(crate) fn since(self, start: Instant) -> Self {
        Self { start, ..self }
    }
}

fn elapsed(starts: impl Iterator<Item = Instant>, ends: Vec<Instant>) -> Vec<Duration> {
    starts.zip(ends).map(|(start, end)| end.duration_since(start)).collect()
}

impl Claims {
    /// Watches claims that have a label of the bench's own.
    pub(crate) fn watch(client: &Client, namespace: &str, label: &str) -> Self {
        let api: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), namespace);
        let own = Config::default().labels(&format!("bench={label}"));
        let claims = Seen::watch(api.clone(), own, |claim: &PersistentVolumeClaim| {
            claim.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Bound")
        });
        let volumes = Seen::watch(Api::<PersistentVolume>::all(client.clone()), Config::default(), |_| true);
        Self { api, label: label.to_owned(), claims, volumes }
    }

    /// Makes so many claims at once.
    pub(crate) async fn make(&self, count: usize) -> Result<Vec<Claim>> {
        let made = (0..count).map(|_| async {
            let claim = serde_json::from_value(json!({
                "metadata": {"name": unique("bench"), "labels": {"bench": self.label}},
                "spec": {
                    "accessModes": ["ReadWriteOnce"], "storageClassName": "nestor",
                    "resources": {"requests": {"storage": "1Mi"}},
                },
            }))?;
            let start = Instant::now();
            let claim = self.api.create(&PostParams::default(), &claim).await?;
            let volume = format!("pvc-{}", claim.uid().context("a claim has no UID")?);
            anyhow::Ok(Claim { name: claim.name_any(), volume, start })
        });
        future::try_join_all(made).await
    }

    /// Waits until all are bound; tells how long each took from its making.
    pub(crate) async fn bound(&self, claims: &[Claim]) -> Result<Vec<Duration>> {
        let names: Vec<String> = claims.iter().map(|claim| claim.name.clone()).collect();
        let ends = self.claims.reached(&names).await.context("claims bound")?;
        Ok(elapsed(claims.iter().map(|claim| claim.start), ends))
    }

    /// Makes so many claims and waits until all are bound.
    pub(crate) async fn create(&self, count: usize) -> Result<(Vec<Claim>, Vec<Duration>)> {
        let claims = self.make(count).await?;
        let times = self.bound(&claims).await?;
        Ok((claims, times))
    }

    /// Makes claims until there are so many.
    pub(crate) async fn fill(&self, made: &mut Vec<Claim>, size: usize) -> Result<()> {
        while made.len() < size {
            let (more, _) = self.create(BATCH.min(size - made.len())).await?;
            made.extend(more);
            eprintln!("{} of {size} volumes", made.len());
        }
        Ok(())
    }

    /// Deletes them again.
    pub(crate) async fn empty(&self, made: &[Claim]) -> Result<()> {
        for batch in made.chunks(BATCH) {
            self.delete(batch).await?;
        }
        Ok(())
    }

    /// Deletes claims at once and waits until their volumes are gone; tells how long each took.
    pub(crate) async fn delete(&self, claims: &[Claim]) -> Result<Vec<Duration>> {
        let deletions = claims.iter().map(|claim| async {
            let start = Instant::now();
            self.api.delete(&claim.name, &DeleteParams::default()).await?;
            anyhow::Ok(start)
        });
        let starts = future::try_join_all(deletions).await?;
        let volumes: Vec<String> = claims.iter().map(|claim| claim.volume.clone()).collect();
        let ends = self.volumes.gone(&volumes).await.context("volumes gone")?;
        Ok(elapsed(starts.into_iter(), ends))
    }
}

/// The claims of a scenario in the guest, and those that a bench makes itself in the management cluster.
pub(crate) struct Tiers {
    pub(crate) above: Claims,
    pub(crate) below: Claims,
}

impl Tiers {
    /// Watches both, and makes and deletes a claim of each so many times, so that nothing is measured that is done for
    /// the first time.
    pub(crate) async fn warm(s: &Scenario, times: usize) -> Result<Self> {
        let above = Claims::watch(&s.guest, &s.name, &s.name);
        let below = Claims::watch(&s.management, &s.namespace, &s.name);
        for _ in 0..times {
            for claims in [&above, &below] {
                claims.delete(&claims.create(1).await?.0).await?;
            }
        }
        Ok(Self { above, below })
    }
}

/// Orders to attach (`storage.k8s.io/VolumeAttachment`), which csi-attacher carries out.
pub(crate) struct Orders {
    api: Api<VolumeAttachment>,
    label: String,
    seen: Seen,
}

/// An order that was given.
#[derive(Debug, Clone)]
pub(crate) struct Order {
    name: String,
    start: Instant,
}

impl Order {
    /// The same, as if it had been given then.
    pub(crate) fn since(self, start: Instant) -> Self {
        Self { start, ..self }
    }
}

impl Orders {
    /// Watches orders of a test; they are taken back when it ends.
    pub(crate) fn watch(client: &Client, label: &str) -> Self {
        let api: Api<VolumeAttachment> = Api::all(client.clone());
        let own = Config::default().labels(&format!("test={label}"));
        let seen = Seen::watch(api.clone(), own, |order: &VolumeAttachment| {
            order.status.as_ref().is_some_and(|status| status.attached)
        });
        Self { api, label: label.to_owned(), seen }
    }

    /// Gives orders at once: volumes to a node.
    pub(crate) async fn give(&self, volumes: &[String], node: &str) -> Result<Vec<Order>> {
        let given = volumes.iter().map(|volume| async move {
            let name = unique("csi");
            let order: VolumeAttachment = serde_json::from_value(json!({
                "metadata": {"name": name, "labels": {"test": self.label}},
                "spec": {
                    "attacher": names::GUEST_DRIVER, "nodeName": node,
                    "source": {"persistentVolumeName": volume},
                },
            }))?;
            let start = Instant::now();
            self.api.create(&PostParams::default(), &order).await?;
            anyhow::Ok(Order { name, start })
        });
        future::try_join_all(given).await
    }

    /// Waits until all are carried out; tells how long each took.
    pub(crate) async fn attached(&self, orders: &[Order]) -> Result<Vec<Duration>> {
        let names: Vec<String> = orders.iter().map(|order| order.name.clone()).collect();
        let ends = self.seen.reached(&names).await.context("volumes attached")?;
        Ok(elapsed(orders.iter().map(|order| order.start), ends))
    }

    /// Attaches volumes at once and waits for all.
    pub(crate) async fn attach(&self, volumes: &[String], node: &str) -> Result<(Vec<Order>, Vec<Duration>)> {
        let orders = self.give(volumes, node).await?;
        let times = self.attached(&orders).await?;
        Ok((orders, times))
    }

    /// Takes orders back at once and waits until all are gone; tells how long each took.
    pub(crate) async fn detach(&self, orders: &[Order]) -> Result<Vec<Duration>> {
        let taken = orders.iter().map(|order| async {
            let start = Instant::now();
            self.api.delete(&order.name, &DeleteParams::default()).await?;
            anyhow::Ok(start)
        });
        let starts = future::try_join_all(taken).await?;
        let names: Vec<String> = orders.iter().map(|order| order.name.clone()).collect();
        let ends = self.seen.gone(&names).await.context("volumes detached")?;
        Ok(elapsed(starts.into_iter(), ends))
    }
}
