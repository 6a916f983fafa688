//! What operations cost besides time: requests to both API servers, by their audit logs; bytes; processor time.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Result;
use lab::Lab;
use lab::audit::{Audit, Entry, Mark};
use tests::{PATIENCE, eventually};

use crate::parts::{self, Used};

/// For how long nothing new must be seen. What is shown on claims comes a second after what it tells of.
const CALM: Duration = Duration::from_millis(1500);
/// How often something is done by itself to see what it costs. Each time is long for the calm around it.
pub(crate) const ALONE: usize = 10;
/// Programs whose requests are the cost of an operation. The bench's own are not among them.
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

/// One kind of request.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Kind {
    pub(crate) cluster: &'static str,
    pub(crate) component: &'static str,
    pub(crate) verb: String,
    pub(crate) resource: String,
}

/// What some operations cost.
#[derive(Debug, Clone, Default)]
pub(crate) struct Cost {
    pub(crate) operations: usize,
    pub(crate) requests: BTreeMap<Kind, usize>,
    /// How many of each component's were refused: conflicts, too many requests, or wrong.
    pub(crate) refused: BTreeMap<&'static str, usize>,
    pub(crate) used: BTreeMap<String, Used>,
    /// Which part of all processors' time went by in work, of whomever.
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
        for (part, used) in other.used {
            let sum = self.used.entry(part).or_default();
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

/// Does so many operations and tells what they cost, with what comes of them afterwards.
pub(crate) async fn metered<T>(
    lab: &Lab,
    operations: usize,
    work: impl Future<Output = Result<T>>,
) -> Result<(T, Cost)> {
    let meter = Meter::start(lab).await?;
    let outcome = work.await?;
    Ok((outcome, meter.stop(operations).await?))
}

/// A measurement that is under way.
pub(crate) struct Meter<'a> {
    lab: &'a Lab,
    marks: Vec<(&'static str, Audit, Mark)>,
    used: BTreeMap<String, Used>,
    busy: (u64, u64),
}

impl<'a> Meter<'a> {
    /// Begins once the parts have nothing left to do from before.
    pub(crate) async fn start(lab: &'a Lab) -> Result<Self> {
        let logs = [("management", lab.audit()?), ("guest", lab.guest_audit(GUEST)?)];
        let marks = || -> Result<Vec<_>> {
            logs.iter().map(|(cluster, log)| Ok((*cluster, log.clone(), log.mark()?))).collect()
        };
        settled(&marks()?).await?;
        Ok(Self { lab, marks: marks()?, used: parts::used(lab).await?, busy: parts::machine()? })
    }

    /// Ends once no more requests come: a call can end before what it caused is all in the log.
    pub(crate) async fn stop(self, operations: usize) -> Result<Cost> {
        // Before the wait, in which nothing of this is done.
        let (at_work, all) = parts::machine()?;
        let (requests, refused) = settled(&self.marks).await?;
        let used = parts::used(self.lab).await?.into_iter().map(|(part, used)| {
            let before = self.used.get(&part).copied().unwrap_or_default();
            (part, used - before)
        });
        let busy = (at_work - self.busy.0) as f64 / (all - self.busy.1).max(1) as f64;
        Ok(Cost { operations, requests, refused, used: used.collect(), busy })
    }

    /// What is in the logs now, without waiting for more.
    pub(crate) fn so_far(&self) -> Result<BTreeMap<Kind, usize>> {
        Ok(seen(&self.marks)?.0)
    }
}

type Seen = (BTreeMap<Kind, usize>, BTreeMap<&'static str, usize>);

async fn settled(marks: &[(&'static str, Audit, Mark)]) -> Result<Seen> {
    let (mut before, mut since) = (None, Instant::now());
    eventually("no more requests to the API servers", PATIENCE, || {
        let outcome = seen(marks).map(|seen| {
            if before.as_ref() != Some(&seen) {
                (before, since) = (Some(seen.clone()), Instant::now());
            }
            if since.elapsed() >= CALM { Ok(seen) } else { Err(format!("{seen:?}")) }
        });
        async move { outcome }
    })
    .await
}

fn seen(marks: &[(&'static str, Audit, Mark)]) -> Result<Seen> {
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

/// None for what belongs to no operation. Watches are shared and renewed by time, and so are leases; discovery is done
/// at starts.
fn kind(cluster: &'static str, entry: Entry) -> Option<Kind> {
    let component = COMPONENTS.into_iter().find(|name| entry.user_agent.starts_with(name))?;
    if entry.verb == "watch" || entry.resource == "leases" || entry.resource.is_empty() {
        return None;
    }
    // It has much else to do.
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
