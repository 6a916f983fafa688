//! What each part asked of the management API, from its audit log.

use std::collections::BTreeMap;

use anyhow::Result;
use lab::Lab;
use lab::audit::Mark;

/// Count by component, verb and resource.
pub(crate) type Tally = BTreeMap<(String, String, String), usize>;

/// Programs whose requests are the cost of an operation. The bench's own are not among them.
const COMPONENTS: [&str; 5] =
    ["gc-csi", "mgmt-csi", "vm-operator-shim", "csi-provisioner", "kube-controller-manager"];

/// Requests since a mark. Watches are left out: they are shared and renewed by time, not by operation.
pub(crate) fn since(lab: &Lab, mark: Mark) -> Result<Tally> {
    let mut tally = Tally::new();
    for entry in lab.audit()?.since(mark)? {
        let component = COMPONENTS.into_iter().find(|name| entry.user_agent.starts_with(name));
        let Some(component) = component.filter(|_| entry.verb != "watch") else { continue };
        if entry.resource == "leases" {
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
