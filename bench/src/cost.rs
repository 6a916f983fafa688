//! Cost of operations: requests to both API servers from their audit logs, bytes, and CPU time.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Result;
use lab::Lab;
use lab::audit::{Audit, Entry, Mark};
use tests::{PATIENCE, eventually};

use crate::usage::{self, Used};

/// How long no new requests may arrive before a measurement ends. Conditions on claims are written a second late.
const CALM: Duration = Duration::from_millis(1500);
/// Number of repetitions to measure the cost of single operations. Each takes long because of the calm around it.
pub(crate) const ALONE: usize = 10;
/// Programs whose requests count as cost. The bench itself is not among them.
const COMPONENTS: [&str; 9] = [
    "gc-csi",
    "mgmt-csi",
    "vm-operator-shim",
    "csi-provisioner",
    "csi-attacher",
    "csi-resizer",
    "csi-snapshotter",
    "snapshot-controller",
    "kube-controller-manager",
];
/// The guest whose requests are counted.
const GUEST: &str = "g1";

/// A kind of request.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Kind {
    pub(crate) cluster: &'static str,
    pub(crate) component: &'static str,
    pub(crate) verb: String,
    pub(crate) resource: String,
}

/// Cost of some operations.
#[derive(Debug, Clone, Default)]
pub(crate) struct Cost {
    pub(crate) operations: usize,
    pub(crate) requests: BTreeMap<Kind, usize>,
    /// Refused requests per component: conflicts, rate limiting, invalid requests, server errors.
    pub(crate) refused: BTreeMap<&'static str, usize>,
    pub(crate) used: BTreeMap<String, Used>,
    /// Share of the CPU time of the whole host that was used.
    pub(crate) busy: f64,
}

impl Cost {
    /// Adds the cost of other operations of the same kind.
    pub(crate) fn add(&mut self, other: Self) {
        let operations = self.operations + other.operations;
        let share = |cost: f64, of: usize| cost * of as f64 / operations.max(1) as f64;
        self.busy = share(self.busy, self.operations) + share(other.busy, other.operations);
        self.operations = operations;
        for (kind, count) in other.requests {
            *self.requests.entry(kind).or_default() += count;
        }
        for (component, count) in other.refused {
            *self.refused.entry(component).or_default() += count;
        }
        for (component, used) in other.used {
            let sum = self.used.entry(component).or_default();
            sum.cpu += used.cpu;
            sum.sent += used.sent;
            sum.received += used.received;
        }
    }

    /// Requests of a component to a cluster.
    pub(crate) fn of(&self, component: &str, cluster: &str) -> usize {
        let kinds =
            self.requests.iter().filter(|(kind, _)| kind.component == component && kind.cluster == cluster);
        kinds.map(|(_, count)| count).sum()
    }
}

/// Runs `operations` operations and returns their cost, including delayed requests.
pub(crate) async fn metered<T>(
    lab: &Lab,
    operations: usize,
    work: impl Future<Output = Result<T>>,
) -> Result<(T, Cost)> {
    let meter = Meter::start(lab).await?;
    let outcome = work.await?;
    Ok((outcome, meter.stop(operations).await?))
}

/// A measurement in progress.
pub(crate) struct Meter<'a> {
    lab: &'a Lab,
    marks: Vec<(&'static str, Audit, Mark)>,
    used: BTreeMap<String, Used>,
    busy: (u64, u64),
}

impl<'a> Meter<'a> {
    /// Starts when no requests of earlier work are in flight.
    pub(crate) async fn start(lab: &'a Lab) -> Result<Self> {
        let logs = [("management", lab.audit()?), ("guest", lab.guest_audit(GUEST)?)];
        let marks = || -> Result<Vec<_>> {
            logs.iter().map(|(cluster, log)| Ok((*cluster, log.clone(), log.mark()?))).collect()
        };
        settled(&marks()?).await?;
        Ok(Self { lab, marks: marks()?, used: usage::used(lab).await?, busy: usage::host_cpu()? })
    }

    /// Ends when no more requests arrive: a call can end before all its requests are in the log.
    pub(crate) async fn stop(self, operations: usize) -> Result<Cost> {
        // Read before the wait, which is not part of the measurement.
        let (at_work, all) = usage::host_cpu()?;
        let (requests, refused) = settled(&self.marks).await?;
        let used = usage::used(self.lab).await?.into_iter().map(|(component, used)| {
            let before = self.used.get(&component).copied().unwrap_or_default();
            (component, used - before)
        });
        let busy = (at_work - self.busy.0) as f64 / (all - self.busy.1).max(1) as f64;
        Ok(Cost { operations, requests, refused, used: used.collect(), busy })
    }

    /// The requests in the logs so far.
    pub(crate) fn so_far(&self) -> Result<BTreeMap<Kind, usize>> {
        Ok(observed(&self.marks)?.0)
    }
}

type Observed = (BTreeMap<Kind, usize>, BTreeMap<&'static str, usize>);

async fn settled(marks: &[(&'static str, Audit, Mark)]) -> Result<Observed> {
    let (mut before, mut since) = (None, Instant::now());
    eventually("no more requests to the API servers", PATIENCE, || {
        let outcome = observed(marks).map(|requests| {
            if before.as_ref() != Some(&requests) {
                (before, since) = (Some(requests.clone()), Instant::now());
            }
            if since.elapsed() >= CALM { Ok(requests) } else { Err(format!("{requests:?}")) }
        });
        async move { outcome }
    })
    .await
}

fn observed(marks: &[(&'static str, Audit, Mark)]) -> Result<Observed> {
    let (mut requests, mut refused) = (BTreeMap::new(), BTreeMap::new());
    for (cluster, log, mark) in marks {
        for entry in log.since(*mark)? {
            let code = entry.code;
            let Some(kind) = kind(cluster, entry) else { continue };
            if matches!(code, 409 | 422 | 429) || code >= 500 {
                *refused.entry(kind.component).or_default() += 1;
            }
            *requests.entry(kind).or_default() += 1;
        }
    }
    Ok((requests, refused))
}

/// The kind of a request; `None` if it belongs to no operation: watches and leases are renewed periodically, discovery
/// happens at startup.
fn kind(cluster: &'static str, entry: Entry) -> Option<Kind> {
    let component = COMPONENTS.into_iter().find(|name| entry.user_agent.starts_with(name))?;
    if entry.verb == "watch" || entry.resource == "leases" || entry.resource.is_empty() {
        return None;
    }
    // It has many other tasks.
    let is_about_volumes =
        entry.resource.starts_with("persistentvolume") || entry.resource == "volumeattachments";
    if component == "kube-controller-manager" && !is_about_volumes {
        return None;
    }
    let resource = match entry.subresource.as_str() {
        "" => entry.resource,
        sub => format!("{}/{sub}", entry.resource),
    };
    Some(Kind { cluster, component, verb: entry.verb, resource })
}
