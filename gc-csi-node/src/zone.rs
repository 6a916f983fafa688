//! In which zone the machine is, for the scheduler: by flag, or by the label of the machine's Node,
//! which the controller sets from the VirtualMachine.

use std::time::Duration;

use crds::names::LABEL_ZONE;
use csi::{Status, proto};
use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client};
use kube_kit::client::chain;
use tokio::time::Instant;

/// How often the label is looked for while a call waits for it. Not a watch, which a Node's own identity
/// may not have; and the call is rare.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Takes a flag's value that can be a label's.
pub(crate) fn parse(value: &str) -> Result<String, String> {
    let is_edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    let is_label = value.len() <= 63
        && is_edge(value.chars().next())
        && is_edge(value.chars().last())
        && value.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
    if is_label {
        Ok(value.to_owned())
    } else {
        Err("a zone has 1 to 63 letters, digits, '-', '_' or '.', starting and ending with a letter or digit"
            .to_owned())
    }
}

/// Where the zone is known from.
#[derive(Clone)]
pub(crate) enum Zone {
    /// There are no zones.
    None,
    /// The flag says.
    Given(String),
    /// The label of the machine's Node says.
    OfNode(Client),
}

impl std::fmt::Debug for Zone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::None => f.write_str("None"),
            Self::Given(zone) => f.debug_tuple("Given").field(zone).finish(),
            Self::OfNode(_) => f.write_str("OfNode"),
        }
    }
}

impl Zone {
    /// Where the machine called `node` is; a label that is missing is waited for until `until`.
    pub(crate) async fn topology(
        &self,
        node: &str,
        until: Instant,
    ) -> Result<Option<proto::Topology>, Status> {
        let zone = match self {
            Self::None => return Ok(None),
            Self::Given(zone) => zone.clone(),
            Self::OfNode(client) => {
                let wait = wait_for_label(Api::all(client.clone()), node, until);
                match tokio::time::timeout_at(until, wait).await {
                    Ok(zone) => zone?,
                    Err(_) => return Err(unavailable(node, "the guest cluster's API does not answer")),
                }
            }
        };
        Ok(Some(proto::Topology { segments: [(LABEL_ZONE.to_owned(), zone)].into() }))
    }
}

async fn wait_for_label(nodes: Api<Node>, node: &str, until: Instant) -> Result<String, Status> {
    loop {
        let why = match nodes.get(node).await {
            Ok(found) => match found.metadata.labels.and_then(|mut labels| labels.remove(LABEL_ZONE)) {
                Some(zone) if !zone.is_empty() => return Ok(zone),
                _ => format!("it has no label {LABEL_ZONE} yet, which gc-csi's controller sets"),
            },
            Err(kube::Error::Api(refused)) => refused.message,
            Err(error) => chain(&error),
        };
        let again = Instant::now() + LOOK_AGAIN;
        if again >= until {
            return Err(unavailable(node, &why));
        }
        tokio::time::sleep_until(again).await;
    }
}

fn unavailable(node: &str, why: &str) -> Status {
    Status::unavailable(format!("the zone of Node {node} of the guest cluster is not known: {why}"))
}
