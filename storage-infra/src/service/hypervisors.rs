//! The configured hypervisors by name, with what is shared between their callers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex as SyncMutex, PoisonError};
use std::time::{Duration, Instant};

use futures::future::{BoxFuture, join_all};
use infra_api::{ObjectKind, Problem, ProblemCode};
use tokio::sync::{Mutex, Notify};
use tokio_util::sync::CancellationToken;

use super::core::now;
use super::problems::Result;
use super::ticker::Ticker;
use crate::fail_points;
use crate::hypervisor::{AttachedDisk, Changed, Hypervisor};
use crate::lease::Lease;

/// Last list of attached disks, with the time at which the query started.
type DiskListing = Mutex<Option<(Instant, Arc<Vec<AttachedDisk>>)>>;

/// Time for a hypervisor to answer a health check.
const CHECK_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause before events are followed again.
const RECONNECT: Duration = Duration::from_secs(2);

/// Whether a hypervisor responds.
#[derive(Debug, Clone)]
pub(super) struct Health {
    /// Why it does not respond.
    pub(super) message: Option<String>,
    /// Since when that is so, as far as it was observed, RFC 3339.
    pub(super) since: String,
}

impl Health {
    pub(super) fn is_reachable(&self) -> bool {
        self.message.is_none()
    }
}

/// The configured hypervisors.
pub(super) struct Hypervisors(BTreeMap<String, Configured>);

struct Configured {
    hypervisor: Arc<dyn Hypervisor>,
    health: SyncMutex<Option<Health>>,
    /// Notified when a domain may have come, of whatever hypervisor.
    domains: Notify,
    listing: DiskListing,
    /// Triggers the search for unexpected disks.
    search: Notify,
}

impl Hypervisors {
    pub(super) fn new(hypervisors: BTreeMap<String, Arc<dyn Hypervisor>>, lease: &Lease) -> Self {
        let configured = |(name, one)| {
            let hypervisor = fail_points::hypervisor(one, lease.clone());
            let (listing, search) = (DiskListing::default(), Notify::default());
            let (health, domains) = (SyncMutex::default(), Notify::default());
            (name, Configured { hypervisor, health, domains, listing, search })
        };
        Self(hypervisors.into_iter().map(configured).collect())
    }

    /// Checks whether a hypervisor responds, and since when.
    pub(super) async fn check(&self, name: &str) -> Result<Health> {
        let own = self.get(name)?;
        let message = match tokio::time::timeout(CHECK_TIMEOUT, own.check()).await {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some(format!("no answer within {CHECK_TIMEOUT:?}")),
        };
        let now = Health { message, since: now() };
        let Some(one) = self.0.get(name) else { return Ok(now) };
        let mut last = one.health.lock().unwrap_or_else(PoisonError::into_inner);
        let since = last.as_ref().filter(|last| last.is_reachable() == now.is_reachable());
        let since = since.map_or(now.since.clone(), |last| last.since.clone());
        Ok(last.insert(Health { since, ..now }).clone())
    }

    /// Waits until a domain may have started on a hypervisor.
    pub(super) async fn domains_changed(&self, name: &str) {
        match self.0.get(name) {
            Some(one) => one.domains.notified().await,
            None => std::future::pending().await,
        }
    }

    /// Follows the events of all hypervisors until stopped. An event of one concerns all: a VM that leaves one has come to
    /// another.
    pub(super) async fn run_events(&self, stop: &CancellationToken) {
        let notify = |name: &str, what: Changed| {
            self.search_now(name);
            if what == Changed::Vm {
                self.0.values().for_each(|one| one.domains.notify_one());
            }
        };
        let notify = &notify;
        let follow = |name| async move {
            let Ok(own) = self.get(name) else { return };
            let notify = move |what| notify(name, what);
            let mut ticker = Ticker::every(RECONNECT, stop.clone());
            while ticker.tick().await {
                let ended = tokio::select! { () = stop.cancelled() => return, ended = own.follow_events(&notify) => ended };
                if let Err(error) = ended {
                    tracing::debug!(hypervisor = name, %error, "cannot follow the events; its VMs are polled");
                }
            }
        };
        self.for_each(stop, follow).await;
    }

    /// A hypervisor. Fails if it is not configured.
    pub(super) fn get(&self, name: &str) -> Result<Arc<dyn Hypervisor>> {
        self.0.get(name).map(|one| one.hypervisor.clone()).ok_or_else(|| {
            Problem::new(
                ProblemCode::Unavailable,
                format!(
                    "the hypervisor {name} is not configured on this server, which has: {}",
                    self.names_text()
                ),
            )
            .about(ObjectKind::Hypervisor, name)
            .into()
        })
    }

    pub(super) fn contains(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// All hypervisors with their names.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&String, &Arc<dyn Hypervisor>)> {
        self.0.iter().map(|(name, one)| (name, &one.hypervisor))
    }

    /// The names, for messages.
    pub(super) fn names_text(&self) -> String {
        let names: Vec<&str> = self.0.keys().map(String::as_str).collect();
        if names.is_empty() { "none (see --hypervisor)".into() } else { names.join(", ") }
    }

    /// All disks attached on a hypervisor, queried from now on. Concurrent callers share one query.
    pub(super) async fn attached_disks(&self, name: &str) -> Result<Arc<Vec<AttachedDisk>>, String> {
        let started = Instant::now();
        let own = self.get(name).map_err(|failure| failure.to_string())?;
        let listing = &self.0.get(name).ok_or("the hypervisor is not configured")?.listing;
        let mut latest = listing.lock().await;
        if let Some((when, all)) = latest.as_ref()
            && *when >= started
        {
            return Ok(all.clone());
        }
        let when = Instant::now();
        let all = Arc::new(own.attached_disks().await.map_err(|error| error.to_string())?);
        *latest = Some((when, all.clone()));
        Ok(all)
    }

    /// Triggers a search for unexpected disks at once.
    pub(super) fn search_now(&self, name: &str) {
        if let Some(one) = self.0.get(name) {
            one.search.notify_one();
        }
    }

    /// Waits until a search for unexpected disks is triggered.
    pub(super) async fn search_is_triggered(&self, name: &str) {
        match self.0.get(name) {
            Some(one) => one.search.notified().await,
            None => std::future::pending().await,
        }
    }

    /// Runs a loop for each hypervisor until stopped, because one may stall.
    pub(super) async fn for_each<'a, F>(&'a self, stop: &CancellationToken, run: impl Fn(&'a str) -> F)
    where
        F: Future<Output = ()>,
    {
        let all = join_all(self.0.keys().map(String::as_str).map(run));
        // A server without hypervisors has no loops, but is not finished.
        tokio::join!(all, stop.cancelled());
    }

    /// Polls each hypervisor periodically until stopped.
    pub(super) async fn poll<'a>(
        &'a self,
        period: Duration,
        stop: &CancellationToken,
        poll: impl Fn(&'a str) -> BoxFuture<'a, Result<()>>,
    ) {
        let poll = &poll;
        let keep = |name| async move {
            let mut ticker = Ticker::every(period, stop.clone());
            while ticker.tick().await {
                let polled =
                    tokio::select! { () = stop.cancelled() => return, polled = poll(name) => polled };
                if let Err(failure) = polled {
                    tracing::debug!(hypervisor = name, %failure, "cannot poll the hypervisor");
                }
            }
        };
        self.for_each(stop, keep).await;
    }
}
