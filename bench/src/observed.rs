//! Observations of a watch: when objects first fulfilled a condition, and when they were deleted.

use std::collections::{HashMap, HashSet};
use std::fmt::Debug;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::{StreamExt, pin_mut};
use kube::api::Api;
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt, watcher as watch_objects};
use kube::{Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Timeout of a measurement.
pub(crate) const LONGEST: Duration = Duration::from_secs(1800);

type Moments = HashMap<String, Instant>;

/// A watch of objects, with the times of their changes.
pub(crate) struct Observed {
    reached: watch::Receiver<Moments>,
    gone: watch::Receiver<Moments>,
    watching: JoinHandle<()>,
}

impl Drop for Observed {
    fn drop(&mut self) {
        self.watching.abort();
    }
}

impl Observed {
    /// Watches objects, and records when each first fulfils `condition`.
    pub(crate) fn watch<K>(
        api: Api<K>,
        config: watcher::Config,
        condition: impl Fn(&K) -> bool + Send + Sync + 'static,
    ) -> Self
    where
        K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
    {
        let (reach, reached) = watch::channel(Moments::new());
        let (lose, gone) = watch::channel(Moments::new());
        let watching = tokio::spawn(async move {
            let events = watch_objects(api, config).default_backoff();
            pin_mut!(events);
            let mut listed: HashSet<String> = HashSet::new();
            let mut there: HashSet<String> = HashSet::new();
            let set = |moments: &watch::Sender<Moments>, name: String| {
                let now = Instant::now();
                moments.send_modify(|all| {
                    all.entry(name).or_insert(now);
                });
            };
            while let Some(event) = events.next().await {
                // The watcher retries by itself.
                let Ok(event) = event else { continue };
                match event {
                    Event::Init => listed.clear(),
                    Event::InitApply(object) | Event::Apply(object) => {
                        listed.insert(object.name_any());
                        there.insert(object.name_any());
                        if condition(&object) {
                            set(&reach, object.name_any());
                        }
                    }
                    Event::InitDone => {
                        for name in there.difference(&listed) {
                            set(&lose, name.clone());
                        }
                        there.retain(|name| listed.contains(name));
                    }
                    Event::Delete(object) => {
                        there.remove(&object.name_any());
                        set(&lose, object.name_any());
                    }
                }
            }
        });
        Self { reached, gone, watching }
    }

    /// Waits until all of these objects have fulfilled the condition; returns the times.
    pub(crate) async fn reached(&self, names: &[String]) -> Result<Vec<Instant>> {
        all(&self.reached, names).await.context("not all objects fulfilled the condition")
    }

    /// Waits until all of these objects are deleted; returns the times.
    pub(crate) async fn gone(&self, names: &[String]) -> Result<Vec<Instant>> {
        all(&self.gone, names).await.context("not all objects were deleted")
    }
}

async fn all(moments: &watch::Receiver<Moments>, names: &[String]) -> Result<Vec<Instant>> {
    let mut moments = moments.clone();
    let waiting = moments
        .wait_for(|times| times.len() >= names.len() && names.iter().all(|name| times.contains_key(name)));
    let times = tokio::time::timeout(LONGEST, waiting)
        .await
        .with_context(|| format!("{} objects: not within {LONGEST:?}", names.len()))?
        .context("the watch ended")?;
    Ok(names.iter().map(|name| times[name]).collect())
}
