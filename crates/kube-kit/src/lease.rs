//! Leader election among the replicas of a controller with a `coordination.k8s.io/v1` Lease, like client-go's: the holder
//! renews the Lease; another replica takes it if it sees no renewal for the lease duration.
//!
//! Clocks of different nodes are never compared. A candidate measures with its own monotonic clock how long the Lease has
//! been unchanged. The holder counts from before its last renewal request, so it stops before another can start, provided
//! both clocks run at about the same speed. The API server serializes the writes: each update contains the resource version
//! that it replaces.

mod args;
mod decide;

use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::PostParams;
use kube::runtime::watcher;
use kube::{Api, Client, Resource};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::time::{Instant, sleep_until, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::client::chain;
use crate::events::Events;
use crate::health::Health;
use crate::informer::{Informer, Key};
use crate::labels;
use crate::resource_version::is_newer;
use args::Timings;
use decide::{Step, claimed, holder, next, released};

pub use args::LeaseArgs;

/// Error of a request that timed out.
const TIMED_OUT: &str = "the API server did not respond in time";

/// Leader election: runs a task in one replica at a time, or in this process if the election is disabled.
pub struct Election {
    metrics: Metrics,
    candidate: Option<Candidate>,
}

/// Configuration of a replica that takes part.
struct Candidate {
    client: Client,
    lease: Key,
    identity: String,
    component: &'static str,
    timings: Timings,
}

#[derive(Debug, Clone, Default)]
struct Metrics {
    leader: Gauge,
    terms: Counter,
}

impl std::fmt::Debug for Election {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Election").finish_non_exhaustive()
    }
}

impl Election {
    /// Registers the metrics. The election is disabled if the Lease has no namespace.
    fn new(
        component: &'static str,
        client: &Client,
        namespace: Option<String>,
        timings: Timings,
        registry: &mut Registry,
    ) -> Self {
        let metrics = Metrics::default();
        registry.register(
            "leader",
            "1 while this replica is the leader and runs the reconcilers, else 0",
            metrics.leader.clone(),
        );
        registry.register(
            "leader_terms",
            "Number of times this replica became the leader",
            metrics.terms.clone(),
        );
        let candidate = namespace.map(|namespace| Candidate {
            client: client.clone(),
            lease: Key::new(namespace, component),
            identity: identity(),
            component,
            timings,
        });
        Self { metrics, candidate }
    }

    /// Runs `term` whenever this replica is the leader, until `term` ends, which it must soon after `stop` is cancelled; then
    /// releases the Lease. If the Lease is lost, `term` is dropped immediately. Adds a check for the watch of the Lease to
    /// `ready`. Before each term, all informers with a check in `ready` that have completed their first list are relisted,
    /// because their stores may have been stale during standby.
    pub async fn lead<Term: Future<Output = ()>>(
        self,
        ready: &Health,
        stop: &CancellationToken,
        term: impl Fn() -> Term,
    ) {
        let Self { metrics, candidate } = self;
        match candidate {
            Some(candidate) => {
                let term = || async {
                    ready.informers().relist_all().await;
                    term().await;
                };
                candidate.start(metrics, ready, stop).lead(stop, term).await;
            }
            None => {
                metrics.started();
                term().await;
                metrics.ended();
            }
        }
    }
}

impl Metrics {
    fn started(&self) {
        self.leader.set(1);
        self.terms.inc();
    }

    fn ended(&self) {
        self.leader.set(0);
    }
}

impl Candidate {
    fn start(self, metrics: Metrics, ready: &Health, stop: &CancellationToken) -> Elector {
        let Self { client, lease, identity, component, timings } = self;
        let check = ready.check("lease", "not started yet");
        let watch =
            Informer::builder(format!("Lease {lease}"), Api::namespaced(client.clone(), &lease.namespace))
                .config(watcher::Config::default().fields(&format!("metadata.name={}", lease.name)))
                .start(check, stop.clone());
        Elector {
            api: Api::namespaced(client.clone(), &lease.namespace),
            events: Events::new(client, component),
            component,
            watch,
            lease,
            identity,
            timings,
            metrics,
            known: None,
            unchanged_since: Instant::now(),
        }
    }
}

/// A replica that takes part.
struct Elector {
    /// The program.
    component: &'static str,
    api: Api<Lease>,
    events: Events,
    watch: Informer<Lease>,
    lease: Key,
    identity: String,
    timings: Timings,
    metrics: Metrics,
    /// Newest known Lease, from the watch or a response.
    known: Option<Arc<Lease>>,
    /// Since when its spec has been unchanged, by the clock of this process.
    unchanged_since: Instant,
}

/// Why a write failed.
enum Refusal {
    /// Another replica changed or deleted the Lease.
    Changed,
    /// The request failed or timed out.
    Failed(String),
}

impl Elector {
    async fn lead<Term: Future<Output = ()>>(mut self, stop: &CancellationToken, term: impl Fn() -> Term) {
        tokio::select! {
            () = stop.cancelled() => return,
            () = self.watch.synced() => {}
        }
        while let Some(until) = self.acquire(stop).await {
            tracing::info!(lease = %self.lease, identity = self.identity, "leading");
            self.metrics.started();
            self.record_event("became leader");
            let until = Mutex::new(until);
            let lost = tokio::select! {
                // Check before every poll of the term whether the Lease is still held.
                biased;
                reason = self.renew(&until) => Some(reason),
                () = while_held(&until, term()) => None,
            };
            self.metrics.ended();
            let Some(reason) = lost else { return self.release().await };
            tracing::warn!(lease = %self.lease, "stopped leading: {reason}");
            self.record_event("stopped leading");
        }
    }

    /// Waits until this replica holds the Lease, and returns until when it surely does. Returns None if `stop` is cancelled first.
    async fn acquire(&mut self, stop: &CancellationToken) -> Option<Instant> {
        while !stop.is_cancelled() {
            let seen = self.watch.get(&self.lease);
            let was_seen = seen.is_some();
            match seen {
                Some(seen) => self.observe(Some(seen)),
                None if self.known.is_none() => {}
                // The Lease was deleted, or the watch lags.
                None => {
                    if let Err(reason) = self.read(Instant::now() + self.timings.attempt()).await {
                        self.pause(&reason, stop).await;
                        continue;
                    }
                }
            }
            let now = Instant::now();
            match next(self.spec(), self.unchanged_since, self.timings.duration, now) {
                Step::Wait(until) => {
                    let known = self.known.clone();
                    let changed = |seen: Option<&Arc<Lease>>| {
                        seen.map_or(was_seen, |seen| is_newer(&**seen, known.as_deref())).then_some(())
                    };
                    tokio::select! {
                        () = stop.cancelled() => return None,
                        _ = self.watch.wait_for(&self.lease, until, changed) => {}
                    }
                }
                Step::Take => {
                    let spec = claimed(self.spec(), &self.identity, &self.timings);
                    match self.write(spec, now + self.timings.attempt()).await {
                        Ok(()) => return Some(now + self.timings.renew_deadline),
                        Err(Refusal::Failed(reason)) => self.pause(&reason, stop).await,
                        Err(Refusal::Changed) => {
                            let read = self.read(Instant::now() + self.timings.attempt()).await;
                            if let Err(reason) = read {
                                self.pause(&reason, stop).await;
                            }
                        }
                    }
                }
            }
        }
        None
    }

    /// Waits before a retry.
    async fn pause(&self, reason: &str, stop: &CancellationToken) {
        tracing::warn!(lease = %self.lease, "failed to acquire the Lease: {reason}; retrying");
        let pause = self.timings.retry_period.mul_f64(1.0 + fastrand::f64() / 5.0);
        // The caller continues in both cases.
        let _ = tokio::time::timeout(pause, stop.cancelled()).await;
    }

    /// Renews the Lease; returns the reason when it is lost. Updates `until`, the time until which it is held.
    async fn renew(&mut self, until: &Mutex<Instant>) -> String {
        let mut at = Instant::now() + self.timings.retry_period;
        loop {
            let end = *until.lock().unwrap_or_else(PoisonError::into_inner);
            if Instant::now() >= end {
                return format!("the Lease was not renewed for {:?}", self.timings.renew_deadline);
            }
            if let Some(other) = self.taken(at.min(end)).await {
                return format!("the Lease is now held by {other}");
            }
            let sent = Instant::now();
            if sent < at {
                continue;
            }
            at = sent + self.timings.retry_period;
            let spec = claimed(self.spec(), &self.identity, &self.timings);
            let answer_by = end.min(sent + self.timings.attempt());
            let refusal = match self.write(spec, answer_by).await {
                Ok(()) => {
                    *until.lock().unwrap_or_else(PoisonError::into_inner) =
                        sent + self.timings.renew_deadline;
                    continue;
                }
                Err(Refusal::Changed) => self.read(answer_by).await,
                Err(Refusal::Failed(reason)) => Err(reason),
            };
            match refusal {
                // This replica holds a version that it did not know: renew immediately.
                Ok(()) if holder(self.spec()) == Some(&*self.identity) => at = sent,
                Ok(()) => {
                    let other = holder(self.spec()).unwrap_or("no replica");
                    return format!("the Lease is now held by {other}");
                }
                Err(reason) => {
                    tracing::warn!(lease = %self.lease, "failed to renew the Lease: {reason}; retrying");
                }
            }
        }
    }

    /// Waits until the watch shows another holder, and returns its identity; None at `at`.
    async fn taken(&self, at: Instant) -> Option<String> {
        let by_another = |seen: Option<&Arc<Lease>>| {
            let seen = seen.filter(|seen| is_newer(&***seen, self.known.as_deref()))?;
            let other = holder(seen.spec.as_ref()).filter(|holder| *holder != self.identity)?;
            Some(other.to_owned())
        };
        let other = self.watch.wait_for(&self.lease, at, by_another).await;
        if other.is_none() {
            // On shutdown, the watch ends before the term.
            sleep_until(at).await;
        }
        other
    }

    /// Releases the Lease, so that another replica need not wait.
    async fn release(&mut self) {
        let spec = released(self.spec());
        match self.write(spec, Instant::now() + self.timings.attempt()).await {
            Ok(()) => tracing::info!(lease = %self.lease, "released the Lease"),
            Err(Refusal::Changed) => {}
            Err(Refusal::Failed(reason)) => {
                tracing::warn!(lease = %self.lease, "failed to release the Lease: {reason}");
            }
        }
    }

    /// Updates the known Lease, or creates it.
    async fn write(&mut self, spec: LeaseSpec, deadline: Instant) -> Result<(), Refusal> {
        let lease = match self.known.as_deref() {
            Some(known) => Lease { spec: Some(spec), ..known.clone() },
            None => Lease {
                metadata: ObjectMeta {
                    name: Some(self.lease.name.clone()),
                    labels: Some(labels::managed_by(self.component)),
                    ..ObjectMeta::default()
                },
                spec: Some(spec),
            },
        };
        let parameters = PostParams::default();
        let written = async {
            match self.known {
                Some(_) => self.api.replace(&self.lease.name, &parameters, &lease).await,
                None => self.api.create(&parameters, &lease).await,
            }
        };
        match timeout_at(deadline, written).await {
            Ok(Ok(lease)) => {
                self.observe(Some(Arc::new(lease)));
                Ok(())
            }
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => Err(Refusal::Changed),
            Ok(Err(error)) => Err(Refusal::Failed(chain(&error))),
            Err(_) => Err(Refusal::Failed(TIMED_OUT.to_owned())),
        }
    }

    /// Reads the Lease from the API server.
    async fn read(&mut self, deadline: Instant) -> Result<(), String> {
        match timeout_at(deadline, self.api.get_opt(&self.lease.name)).await {
            Ok(Ok(lease)) => {
                self.observe(lease.map(Arc::new));
                Ok(())
            }
            Ok(Err(error)) => Err(chain(&error)),
            Err(_) => Err(TIMED_OUT.to_owned()),
        }
    }

    /// Stores a state of the Lease, unless a newer one is known.
    fn observe(&mut self, seen: Option<Arc<Lease>>) {
        if let (Some(seen), Some(known)) = (&seen, &self.known)
            && !is_newer(&**seen, Some(&**known))
        {
            return;
        }
        if seen.as_ref().and_then(|seen| seen.spec.as_ref()) != self.spec() {
            self.unchanged_since = Instant::now();
        }
        self.known = seen;
    }

    fn spec(&self) -> Option<&LeaseSpec> {
        self.known.as_ref()?.spec.as_ref()
    }

    fn record_event(&self, what: &str) {
        let about = ObjectReference {
            api_version: Some(Lease::api_version(&()).into_owned()),
            kind: Some(Lease::kind(&()).into_owned()),
            name: Some(self.lease.name.clone()),
            namespace: Some(self.lease.namespace.clone()),
            uid: self.known.as_ref().and_then(|lease| lease.metadata.uid.clone()),
            ..ObjectReference::default()
        };
        self.events.normal(about, "Elect", "LeaderElection", format!("{} {what}", self.identity));
    }
}

/// Polls `work` only before `until`. After a suspension of the process, work may resume before timers fire.
async fn while_held<Work: Future>(until: &Mutex<Instant>, work: Work) -> Work::Output {
    let mut work = pin!(work);
    std::future::poll_fn(|context| {
        if Instant::now() < *until.lock().unwrap_or_else(PoisonError::into_inner) {
            work.as_mut().poll(context)
        } else {
            Poll::Pending
        }
    })
    .await
}

/// Host name, for operators, and a random suffix.
fn identity() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}_{:016x}", host.trim(), fastrand::u64(..))
}
