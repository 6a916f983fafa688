//! What each part asked of the management API, from its audit log.

use std::collections::BTreeMap;

use anyhow::Result;
use lab::Lab;
use lab::audit::Mark;
use tests::{PATIENCE, eventually};

/// Count by component, verb and resource.
pub(crate) type Tally = BTreeMap<(String, String, String), usize>;

/// How many looks in a row must show nothing new.
const CALM: u32 = 4;

/// Programs whose requests are the cost of an operation. The bench's own are not among them.
const COMPONENTS: [&str; 5] =
    ["gc-csi", "mgmt-csi", "vm-operator-shim", "csi-provisioner", "kube-controller-manager"];

/// A mark in the log, set once the parts have nothing left to do from before.
pub(crate) async fn mark(lab: &Lab) -> Result<Mark> {
    let now = lab.audit()?.mark()?;
    since(lab, now).await?;
    lab.audit()?.mark()
}

/// Requests since a mark, once no more come: a call can end before what it caused is all in the log.
pub(crate) async fn since(lab: &Lab, mark: Mark) -> Result<Tally> {
    let (mut before, mut calm) = (None, 0);
    eventually("no more requests to the management API", PATIENCE, || {
        let seen = seen(lab, mark);
        let outcome = seen.map(|tally| {
            calm = if before.as_ref() == Some(&tally) { calm + 1 } else { 0 };
            before = Some(tally.clone());
            if calm >= CALM { Ok(tally) } else { Err(format!("{tally:?}")) }
        });
        async move { outcome }
    })
    .await
}

/// Requests in the log now. Watches are left out: they are shared and renewed by time, not by operation.
fn seen(lab: &Lab, mark: Mark) -> Result<Tally> {
    let mut tally = Tally::new();
    for entry in lab.audit()?.since(mark)? {
        let component = COMPONENTS.into_iter().find(|name| entry.user_agent.starts_with(name));
        let Some(component) = component.filter(|_| entry.verb != "watch") else { continue };
        // Neither leases nor discovery belong to an operation.
        if entry.resource == "leases" || entry.resource.is_empty() {
            continue;
        }
        let resource = match entry.subresource.as_str() {
            "" => entry.resource,
            sub => format!("{}/{sub}", entry.resource),
        };
        *tally.entry((component.to_owned(), entry.verb, resource)).or_default() += 1;
    }
    Ok(tally)
}
