//! Partial Node.

use k8s_openapi::api::core::v1::{self, Taint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::{Deserialize, Deserializer};

use super::metadata;

/// A Node.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Node {
    /// Metadata without managed fields.
    pub metadata: ObjectMeta,
    /// `spec.taints`.
    pub taints: Vec<Taint>,
    /// Status of the condition `Ready`: `True`, `False` or `Unknown`. None: it has no such condition.
    pub ready: Option<String>,
    /// `status.nodeInfo.systemUUID`, if it is not empty.
    pub system_uuid: Option<String>,
}

super::resource!(Node, v1::Node);

#[derive(Deserialize)]
struct Whole {
    #[serde(default, deserialize_with = "metadata::read")]
    metadata: ObjectMeta,
    spec: Option<Spec>,
    status: Option<Status>,
}

#[derive(Deserialize)]
struct Spec {
    taints: Option<Vec<Taint>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    conditions: Option<Vec<Condition>>,
    node_info: Option<Info>,
}

#[derive(Deserialize)]
struct Condition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
}

#[derive(Deserialize)]
struct Info {
    #[serde(rename = "systemUUID")]
    system_uuid: Option<String>,
}

impl Status {
    fn ready(&mut self) -> Option<String> {
        let conditions = self.conditions.take().unwrap_or_default();
        conditions.into_iter().find(|one| one.kind == "Ready").map(|one| one.status)
    }

    fn system_uuid(&mut self) -> Option<String> {
        self.node_info.take()?.system_uuid.filter(|uuid| !uuid.is_empty())
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Whole { metadata, spec, mut status } = Whole::deserialize(deserializer)?;
        Ok(Self {
            metadata,
            taints: spec.and_then(|spec| spec.taints).unwrap_or_default(),
            ready: status.as_mut().and_then(Status::ready),
            system_uuid: status.as_mut().and_then(Status::system_uuid),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_node_has_its_taints_its_readiness_and_the_uuid_of_its_vm() {
        let node: Node = serde_json::from_value(json!({
            "metadata": {"name": "n"},
            "spec": {"taints": [{"key": "k", "effect": "NoExecute"}]},
            "status": {
                "conditions": [{"type": "DiskPressure", "status": "False"}, {"type": "Ready", "status": "Unknown"}],
                "nodeInfo": {"systemUUID": "u", "kernelVersion": "6"},
            },
        }))
        .unwrap();
        assert_eq!((node.taints.len(), node.ready.as_deref()), (1, Some("Unknown")));
        assert_eq!(node.system_uuid.as_deref(), Some("u"));
        let empty = json!({"metadata": {"name": "n"}, "status": {"nodeInfo": {"systemUUID": ""}}});
        let empty: Node = serde_json::from_value(empty).unwrap();
        assert_eq!((empty.ready, empty.system_uuid), (None, None));
    }
}
