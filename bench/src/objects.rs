//! Claims and attachments that a bench creates and removes in bulk, with the times until Nestor has processed them.

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

use crate::observed::Observed;

/// Batch size of large numbers of claims.
pub(crate) const BATCH: usize = 250;

/// Claims in one namespace, and their volumes.
pub(crate) struct Claims {
    api: Api<PersistentVolumeClaim>,
    label: String,
    class: String,
    claims: Observed,
    volumes: Observed,
}

/// A created claim.
#[derive(Debug, Clone)]
pub(crate) struct Claim {
    pub(crate) name: String,
    /// The name of its volume, as csi-provisioner sets it.
    pub(crate) volume: String,
    start: Instant,
}

impl Claim {
    /// The same claim with another start time.
    pub(crate) fn since(self, start: Instant) -> Self {
        Self { start, ..self }
    }
}

fn elapsed(starts: impl Iterator<Item = Instant>, ends: Vec<Instant>) -> Vec<Duration> {
    starts.zip(ends).map(|(start, end)| end.duration_since(start)).collect()
}

impl Claims {
    /// Watches claims with the bench's label, of the class of the lab.
    pub(crate) fn watch(client: &Client, namespace: &str, label: &str) -> Self {
        Self::of_class(client, namespace, label, "nestor")
    }

    /// Watches claims with the bench's label; new ones have this class.
    pub(crate) fn of_class(client: &Client, namespace: &str, label: &str, class: &str) -> Self {
        let api: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), namespace);
        let own = Config::default().labels(&format!("bench={label}"));
        let claims = Observed::watch(api.clone(), own, |claim: &PersistentVolumeClaim| {
            claim.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Bound")
        });
        let volumes =
            Observed::watch(Api::<PersistentVolume>::all(client.clone()), Config::default(), |_| true);
        Self { api, label: label.to_owned(), class: class.to_owned(), claims, volumes }
    }

    /// Creates `count` claims concurrently.
    pub(crate) async fn make(&self, count: usize) -> Result<Vec<Claim>> {
        let made = (0..count).map(|_| async {
            let claim = serde_json::from_value(json!({
                "metadata": {"name": unique("bench"), "labels": {"bench": self.label}},
                "spec": {
                    "accessModes": ["ReadWriteOnce"], "storageClassName": self.class,
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

    /// Waits until all claims are bound; returns the time of each since its creation.
    pub(crate) async fn bound(&self, claims: &[Claim]) -> Result<Vec<Duration>> {
        let names: Vec<String> = claims.iter().map(|claim| claim.name.clone()).collect();
        let ends = self.claims.reached(&names).await.context("claims bound")?;
        Ok(elapsed(claims.iter().map(|claim| claim.start), ends))
    }

    /// Creates `count` claims and waits until all are bound.
    pub(crate) async fn create(&self, count: usize) -> Result<(Vec<Claim>, Vec<Duration>)> {
        let claims = self.make(count).await?;
        let times = self.bound(&claims).await?;
        Ok((claims, times))
    }

    /// Creates claims until there are `size`.
    pub(crate) async fn fill(&self, made: &mut Vec<Claim>, size: usize) -> Result<()> {
        while made.len() < size {
            let (more, _) = self.create(BATCH.min(size - made.len())).await?;
            made.extend(more);
            eprintln!("{} of {size} volumes", made.len());
        }
        Ok(())
    }

    /// Deletes claims in batches.
    pub(crate) async fn empty(&self, made: &[Claim]) -> Result<()> {
        for batch in made.chunks(BATCH) {
            self.delete(batch).await?;
        }
        Ok(())
    }

    /// Deletes claims concurrently and waits until their volumes are deleted; returns the times.
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

/// The claims of a scenario in the guest, and the bench's own claims in the management cluster.
pub(crate) struct Tiers {
    pub(crate) guest: Claims,
    pub(crate) management: Claims,
}

impl Tiers {
    /// Watches both, and creates and deletes claims of each `times` times, so that one-time work is not measured.
    pub(crate) async fn warm(s: &Scenario, times: usize) -> Result<Self> {
        let guest = Claims::watch(&s.guest, &s.name, &s.name);
        let management = Claims::watch(&s.management, &s.namespace, &s.name);
        for _ in 0..times {
            for claims in [&guest, &management] {
                claims.delete(&claims.create(1).await?.0).await?;
            }
        }
        Ok(Self { guest, management })
    }
}

/// storage.k8s.io/VolumeAttachments, processed by csi-attacher.
pub(crate) struct Attachments {
    api: Api<VolumeAttachment>,
    label: String,
    observed: Observed,
}

/// A created attachment.
#[derive(Debug, Clone)]
pub(crate) struct Attachment {
    name: String,
    start: Instant,
}

impl Attachment {
    /// The same attachment with another start time.
    pub(crate) fn since(self, start: Instant) -> Self {
        Self { start, ..self }
    }
}

impl Attachments {
    /// Watches the attachments of a test; the scenario deletes them when it ends.
    pub(crate) fn watch(client: &Client, label: &str) -> Self {
        let api: Api<VolumeAttachment> = Api::all(client.clone());
        let own = Config::default().labels(&format!("test={label}"));
        let observed = Observed::watch(api.clone(), own, |attachment: &VolumeAttachment| {
            attachment.status.as_ref().is_some_and(|status| status.attached)
        });
        Self { api, label: label.to_owned(), observed }
    }

    /// Creates attachments of volumes to a node concurrently.
    pub(crate) async fn start(&self, volumes: &[String], node: &str) -> Result<Vec<Attachment>> {
        let created = volumes.iter().map(|volume| async move {
            let name = unique("csi");
            let attachment: VolumeAttachment = serde_json::from_value(json!({
                "metadata": {"name": name, "labels": {"test": self.label}},
                "spec": {
                    "attacher": names::GUEST_DRIVER, "nodeName": node,
                    "source": {"persistentVolumeName": volume},
                },
            }))?;
            let start = Instant::now();
            self.api.create(&PostParams::default(), &attachment).await?;
            anyhow::Ok(Attachment { name, start })
        });
        future::try_join_all(created).await
    }

    /// Waits until all are attached; returns the times.
    pub(crate) async fn attached(&self, attachments: &[Attachment]) -> Result<Vec<Duration>> {
        let names: Vec<String> = attachments.iter().map(|attachment| attachment.name.clone()).collect();
        let ends = self.observed.reached(&names).await.context("volumes attached")?;
        Ok(elapsed(attachments.iter().map(|attachment| attachment.start), ends))
    }

    /// Attaches volumes concurrently and waits for all.
    pub(crate) async fn attach(
        &self,
        volumes: &[String],
        node: &str,
    ) -> Result<(Vec<Attachment>, Vec<Duration>)> {
        let attachments = self.start(volumes, node).await?;
        let times = self.attached(&attachments).await?;
        Ok((attachments, times))
    }

    /// Deletes attachments concurrently and waits until all are gone; returns the times.
    pub(crate) async fn detach(&self, attachments: &[Attachment]) -> Result<Vec<Duration>> {
        let taken = attachments.iter().map(|attachment| async {
            let start = Instant::now();
            self.api.delete(&attachment.name, &DeleteParams::default()).await?;
            anyhow::Ok(start)
        });
        let starts = future::try_join_all(taken).await?;
        let names: Vec<String> = attachments.iter().map(|attachment| attachment.name.clone()).collect();
        let ends = self.observed.gone(&names).await.context("volumes detached")?;
        Ok(elapsed(starts.into_iter(), ends))
    }
}
