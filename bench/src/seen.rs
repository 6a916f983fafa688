//! The moments at which objects were seen to be as wanted, and to be gone, by a watch.

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

/// What takes longer than this is a failure, not a measurement.
pub(crate) const LONGEST: Duration = Duration::from_secs(1800);

type Moments = HashMap<String, Instant>;

/// A watch over objects, and what it saw of each.
pub(crate) struct Seen {
    reached: watch::Receiver<Moments>,
    gone: watch::Receiver<Moments>,
    watching: JoinHandle<()>,
}

impl Drop for Seen {
    fn drop(&mut self) {
        self.watching.abort();
    }
}

impl Seen {
    /// Watches objects for the moment at which each is first as `wanted`.
    pub(crate) fn watch<K>(
        api: Api<K>,
        config: watcher::Config,
        wanted: impl Fn(&K) -> bool + Send + Sync + 'static,
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
                // It tries again by itself.
                let Ok(event) = event else { continue };
                match event {
                    Event::Init => listed.clear(),
                    Event::InitApply(object) | Event::Apply(object) => {
                        listed.insert(object.name_any());
                        there.insert(object.name_any());
                        if wanted(&object) {
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

    /// Waits until all of these are as wanted; tells when each was.
    pub(crate) async fn reached(&self, names: &[String]) -> Result<Vec<Instant>> {
        all(&self.reached, names).await.context("not all became as wanted")
    }

    /// Waits until all of these are gone; tells when each was.
    pub(crate) async fn gone(&self, names: &[String]) -> Result<Vec<Instant>> {
        all(&self.gone, names).await.context("not all were gone")
    }
}

async fn all(moments: &watch::Receiver<Moments>, names: &[String]) -> Result<Vec<Instant>> {
    let mut moments = moments.clone();
    let waiting = moments
        .wait_for(|seen| seen.len() >= names.len() && names.iter().all(|name| seen.contains_key(name)));
    let seen = tokio::time::timeout(LONGEST, waiting)
        .await
        .with_context(|| format!("{} objects, within {LONGEST:?}", names.len()))?
        .context("the watch ended")?;
    Ok(names.iter().map(|name| seen[name]).collect())
}
