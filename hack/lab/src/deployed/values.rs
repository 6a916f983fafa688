//! Values of the charts for a lab's clusters.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{INFRA_SECRET, NAMESPACE, TOKEN_SECRET, cluster};
use crate::cluster::SERVER_ADDRESS_FROM_VM;
use crate::state::{Guest, State};

/// An upgrade runs two. More would only compete for the CPUs of emulated VMs.
const REPLICAS: u32 = 1;

/// Removes the values that a chart's schema does not know: an earlier version refuses those of a later one.
pub(super) fn retain_known(values: &mut Value, schema: &Value) {
    retain_known_in(values, schema, schema);
}

fn retain_known_in(values: &mut Value, part: &Value, schema: &Value) {
    let part = resolved(part, schema);
    match values {
        Value::Object(fields) => {
            if part["additionalProperties"] == false {
                fields.retain(|name, _| !part["properties"][name].is_null());
            }
            for (name, value) in fields {
                retain_known_in(value, &part["properties"][name.as_str()], schema);
            }
        }
        Value::Array(items) => {
            items.iter_mut().for_each(|item| retain_known_in(item, &part["items"], schema));
        }
        _ => {}
    }
}

fn resolved<'a>(part: &'a Value, schema: &'a Value) -> &'a Value {
    match part["$ref"].as_str().and_then(|path| path.strip_prefix("#/definitions/")) {
        Some(name) => &schema["definitions"][name],
        None => part,
    }
}

/// Values of nestor-management.
pub(super) fn management(state: &State) -> Result<Value> {
    let infra = state.infra.as_ref().context("no storage infra")?;
    let guests: Vec<Value> = state
        .guests
        .values()
        .map(|guest| {
            json!({
                "name": guest.account(), "namespace": guest.namespace, "clusterId": guest.cluster_id,
                "cluster": guest.cluster.name, "createNamespace": true, "createToken": true,
            })
        })
        .collect();
    Ok(json!({
        "infra": {"url": from_vm(&infra.url)?, "secret": INFRA_SECRET},
        "shim": {"enabled": true, "replicas": REPLICAS},
        "snapshotController": {"enabled": true, "replicas": REPLICAS},
        "mgmtCsi": {"replicas": REPLICAS, "repairGrace": "30s", "repairInterval": "5s"},
        "guests": guests,
    }))
}

/// Values of nestor-guest.
pub(super) fn guest(state: &State, guest: &Guest) -> Result<Value> {
    let server = from_vm(&cluster(state)?.server)?;
    Ok(json!({
        "clusterId": guest.cluster_id,
        "management": {
            "namespace": guest.namespace,
            "token": {"secret": TOKEN_SECRET, "server": server},
            "capacityNamespace": NAMESPACE,
        },
        "controller": {"replicas": REPLICAS},
        "snapshotController": {"enabled": true, "replicas": REPLICAS},
    }))
}

/// A URL on this host's loopback as VMs reach it.
fn from_vm(url: &str) -> Result<String> {
    let (scheme, rest) = url.split_once("127.0.0.1").with_context(|| format!("{url} is not on 127.0.0.1"))?;
    Ok(format!("{scheme}{SERVER_ADDRESS_FROM_VM}{rest}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_earlier_chart_gets_only_the_values_that_its_schema_knows() {
        let object = |properties: Value| json!({"additionalProperties": false, "properties": properties});
        let mut schema = object(json!({
            "guests": {"items": object(json!({"name": {}}))},
            "labels": {"additionalProperties": {}},
            "replicas": {"$ref": "#/definitions/counts"},
        }));
        schema["definitions"] = json!({"counts": object(json!({"first": {}}))});
        let mut values = json!({
            "guests": [{"name": "one", "clusterId": "1"}], "admission": {"enabled": true},
            "labels": {"any": "x"}, "replicas": {"first": 1, "second": 2},
        });
        retain_known(&mut values, &schema);
        let known = json!({"guests": [{"name": "one"}], "labels": {"any": "x"}, "replicas": {"first": 1}});
        assert_eq!(values, known);
    }

    #[test]
    fn this_trees_chart_knows_all_values() {
        let cluster = json!({"name": "g1", "server": "", "kubeconfig": "", "ca": "", "audit_log": ""});
        let guest = json!({
            "cluster": cluster, "namespace": "n", "cluster_id": "1", "controller_socket": "",
        });
        let infra = json!({
            "url": "https://127.0.0.1:8443", "pki": "", "pools": {}, "loop_root": "", "simulated_root": "",
            "libvirt_uri": "", "mgmt_socket": "",
        });
        let state = State {
            infra: serde_json::from_value(infra).unwrap(),
            guests: [("g1".to_owned(), serde_json::from_value(guest).unwrap())].into(),
            ..State::default()
        };
        let folder = crate::run::repository().join("charts/nestor-management");
        let schema = std::fs::read_to_string(folder.join("values.schema.json")).unwrap();
        let values = management(&state).unwrap();
        let mut known = values.clone();
        retain_known(&mut known, &serde_json::from_str(&schema).unwrap());
        assert_eq!(known, values);
    }

    #[test]
    fn urls_of_the_host_are_those_of_its_address_in_a_vm() {
        assert_eq!(super::from_vm("https://127.0.0.1:8443").unwrap(), "https://10.0.2.2:8443");
        assert!(super::from_vm("https://infra.example").is_err());
    }
}
