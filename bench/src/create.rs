//! A guest claim from its creation until it is bound. The floor is the same claim made in the management
//! cluster, which is what gc-csi makes for it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::{StreamExt, future, pin_mut};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Client, ResourceExt};
use serde_json::json;
use tests::{PATIENCE, Scenario, eventually, unique};
use tokio::task::JoinHandle;

use crate::report::Report;
use crate::requests;

/// A claim that takes longer than this is a failure, not a measurement.
const LONGEST: Duration = Duration::from_secs(300);

/// Runs the bench.
pub async fn run(report: &mut Report, count: usize, burst: usize) -> Result<()> {
    let mut filled = std::mem::replace(report, Report::new("create"));
    let (sender, receiver) = tokio::sync::oneshot::channel();
    tests::run(move |s| async move {
        measure(&s, &mut filled, count, burst).await?;
        let _ = sender.send(filled);
        Ok(())
    })
    .await?;
    *report = receiver.await.context("the bench ended without results")?;
    Ok(())
}

async fn measure(s: &Arc<Scenario>, report: &mut Report, count: usize, burst: usize) -> Result<()> {
    let above = Claims::watch(s.guest.clone(), &s.name, &s.name);
    let below = Claims::watch(s.management.clone(), &s.namespace, &s.name);
    above.batch(1).await?;
    below.batch(1).await?;

    // In turns, so that whatever else the machine does weighs on both alike.
    let (mut times, mut floor) = (Vec::new(), Vec::new());
    let mut tally = requests::Tally::new();
    for _ in 0..count {
        floor.extend(below.batch(1).await?);
        let mark = requests::mark(&s.lab).await?;
        times.extend(above.batch(1).await?);
        for (key, number) in requests::since(&s.lab, mark).await? {
            *tally.entry(key).or_default() += number;
        }
    }
    report.requests("one", tally, count);
    report.times("one", &times, &floor);
    above.clear().await?;
    below.clear().await?;

    let case = format!("burst{burst}");
    let floor = below.batch(burst).await?;
    below.clear().await?;
    let mark = requests::mark(&s.lab).await?;
    let times = above.batch(burst).await?;
    report.requests(&case, requests::since(&s.lab, mark).await?, burst);
    report.times(&case, &times, &floor);
    above.clear().await?;
    Ok(())
}

/// Claims in one namespace, with the moment at which each was seen bound.
struct Claims {
    api: Api<PersistentVolumeClaim>,
    label: String,
    bound: tokio::sync::watch::Receiver<HashMap<String, Instant>>,
    watching: JoinHandle<()>,
}

impl Claims {
    fn watch(client: Client, namespace: &str, label: &str) -> Self {
        let api: Api<PersistentVolumeClaim> = Api::namespaced(client, namespace);
        let (sender, bound) = tokio::sync::watch::channel(HashMap::new());
        let config = watcher::Config::default().labels(&format!("bench={label}"));
        let stream = watcher(api.clone(), config).default_backoff().applied_objects();
        let watching = tokio::spawn(async move {
            pin_mut!(stream);
            while let Some(event) = stream.next().await {
                let Ok(claim) = event else { continue };
                let phase = claim.status.as_ref().and_then(|status| status.phase.as_deref());
                if phase == Some("Bound") {
                    let now = Instant::now();
                    sender.send_modify(|bound| {
                        bound.entry(claim.name_any()).or_insert(now);
                    });
                }
            }
        });
        Self { api, label: label.to_owned(), bound, watching }
    }

    /// Makes so many claims at once; gives how long each took to be bound.
    async fn batch(&self, count: usize) -> Result<Vec<Duration>> {
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
            anyhow::Ok((claim.name_any(), start))
        });
        let made = future::try_join_all(made).await?;
        let mut bound = self.bound.clone();
        let waiting = bound.wait_for(|bound| made.iter().all(|(name, _)| bound.contains_key(name)));
        let bound = tokio::time::timeout(LONGEST, waiting)
            .await
            .with_context(|| format!("not all of {count} claims were bound within {LONGEST:?}"))?
            .context("the watch ended")?;
        Ok(made.iter().map(|(name, start)| bound[name].duration_since(*start)).collect())
    }

    /// Deletes all claims and waits until they are gone.
    async fn clear(&self) -> Result<()> {
        let own = ListParams::default().labels(&format!("bench={}", self.label));
        self.api.delete_collection(&DeleteParams::default(), &own).await?;
        eventually("the claims of the bench gone", PATIENCE, || async {
            let left = self.api.list_metadata(&own).await?.items.len();
            Ok(if left == 0 { Ok(()) } else { Err(format!("{left} left")) })
        })
        .await
    }
}

impl Drop for Claims {
    fn drop(&mut self) {
        self.watching.abort();
    }
}
