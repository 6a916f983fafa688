//! Topology of the node: its zone, from a flag or from the zone label of the guest Node, which the controller plugin
//! copies from the VirtualMachine.

use std::time::Duration;

use crds::names::LABEL_ZONE;
use csi::{Status, proto};
use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client};
use kube_kit::client::chain;
use node_kit::Topology;
use tokio::time::Instant;

/// Interval at which a call polls for a missing label. Polling needs no permission to watch Nodes, and the call is rare.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Validates the flag's value as a label value.
pub(crate) fn parse_zone(value: &str) -> Result<String, String> {
    let is_edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    let is_label = value.len() <= 63
        && is_edge(value.chars().next())
        && is_edge(value.chars().last())
        && value.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
    if is_label {
        Ok(value.to_owned())
    } else {
        Err("a zone consists of 1 to 63 letters, digits, '-', '_' or '.', and starts and ends with a letter or digit"
            .to_owned())
    }
}

/// Source of the node's zone.
#[derive(Clone)]
pub(crate) enum ZoneSource {
    /// The driver reports no zone.
    None,
    /// Flag --zone.
    Flag(String),
    /// Label of the guest Node.
    NodeLabel(Client),
}

impl std::fmt::Debug for ZoneSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::None => f.write_str("None"),
            Self::Flag(zone) => f.debug_tuple("Flag").field(zone).finish(),
            Self::NodeLabel(_) => f.write_str("NodeLabel"),
        }
    }
}

#[tonic::async_trait]
impl Topology for ZoneSource {
    fn is_reported(&self) -> bool {
        !matches!(self, Self::None)
    }

    /// Waits for a missing label of the Node until `until`.
    async fn of_node(&self, node: &str, until: Instant) -> Result<Option<proto::Topology>, Status> {
        let zone = match self {
            Self::None => return Ok(None),
            Self::Flag(zone) => zone.clone(),
            Self::NodeLabel(client) => {
                let wait = wait_for_label(Api::all(client.clone()), node, until);
                match tokio::time::timeout_at(until, wait).await {
                    Ok(zone) => zone?,
                    Err(_) => {
                        return Err(unavailable(
                            node,
                            "the API server of the guest cluster does not respond",
                        ));
                    }
                }
            }
        };
        Ok(Some(proto::Topology { segments: [(LABEL_ZONE.to_owned(), zone)].into() }))
    }
}

async fn wait_for_label(nodes: Api<Node>, node: &str, until: Instant) -> Result<String, Status> {
    loop {
        let reason = match nodes.get(node).await {
            Ok(found) => match found.metadata.labels.and_then(|mut labels| labels.remove(LABEL_ZONE)) {
                Some(zone) if !zone.is_empty() => return Ok(zone),
                _ => format!(
                    "it has no label {LABEL_ZONE} yet; the controller plugin (gc-csi) sets it to the zone of the VM. VMs of KubeVirt have \
                     none: label the Node, or set topology.enabled to false in the values of nestor-guest"
                ),
            },
            Err(kube::Error::Api(refused)) => refused.message,
            Err(error) => chain(&error),
        };
        let again = Instant::now() + POLL_INTERVAL;
        if again >= until {
            return Err(unavailable(node, &reason));
        }
        tokio::time::sleep_until(again).await;
    }
}

fn unavailable(node: &str, reason: &str) -> Status {
    Status::unavailable(format!("the zone of guest Node {node} is unknown: {reason}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zone_is_a_label_value() {
        for zone in ["z", "eu-west-1a", "rack_7.row-2", &"a".repeat(63)] {
            assert_eq!(parse_zone(zone).as_deref(), Ok(zone));
        }
        for bad in ["", "-a", "a-", "a b", "ü", &"a".repeat(64)] {
            assert!(parse_zone(bad).is_err(), "{bad}");
        }
    }
}
