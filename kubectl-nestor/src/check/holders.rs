//! Claims in VMs of KubeVirt: the API server holds guests to the record of which VM may have a claim, but not the platform team.

use crds::names::{ANNOTATION_ATTACHED_TO, LABEL_CLUSTER_ID};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::api::{Api, DynamicObject, ListParams};
use kube::{Client, ResourceExt};
use kube_kit::client::chain;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::finding::Finding;
use crate::clusters::{Cluster, Tier};
use crate::error::Error;
use crate::gather::read::is_answer;
use crate::vm_api::{kubevirt_resource, served};

const WHAT: &str = "claims in VMs of KubeVirt";

/// Maximum number of VMs to name.
const NAMED: usize = 5;

/// A VM or an instance, and the claims that it names.
#[derive(Debug, Clone)]
struct Machine {
    namespace: String,
    name: String,
    claims: Vec<String>,
}

/// Compares the VMs and instances with the records of the claims. None without KubeVirt.
pub async fn check(cluster: &Cluster) -> Result<Option<Finding>, Error> {
    if !served(cluster).await?.kubevirt {
        return Ok(None);
    }
    match read(&cluster.client).await {
        Ok((machines, claims)) => Ok(Some(judge(cluster.tier, &machines, &claims))),
        Err(error) if is_answer(&error) => {
            Ok(Some(Finding::skipped(cluster.tier, WHAT).because(chain(&error))))
        }
        Err(error) => Err(Error::request(cluster.tier.name(), "VirtualMachines of KubeVirt", &error)),
    }
}

async fn read(client: &Client) -> kube::Result<(Vec<Machine>, Vec<PersistentVolumeClaim>)> {
    let of = |kind: &str| Api::<DynamicObject>::all_with(client.clone(), &kubevirt_resource(kind));
    let machines = all(of("VirtualMachine"), None).await?;
    let instances = all(of("VirtualMachineInstance"), None).await?;
    let templates = machines.iter().map(|one| machine(one, &one.data["spec"]["template"]["spec"]));
    let machines = templates.chain(instances.iter().map(|one| machine(one, &one.data["spec"]))).collect();
    Ok((machines, all(Api::all(client.clone()), Some(LABEL_CLUSTER_ID)).await?))
}

async fn all<K: Clone + std::fmt::Debug + DeserializeOwned>(
    api: Api<K>,
    labels: Option<&str>,
) -> kube::Result<Vec<K>> {
    let parameters = ListParams { label_selector: labels.map(str::to_owned), ..ListParams::default() };
    Ok(api.list(&parameters).await?.items)
}

fn machine(object: &DynamicObject, spec: &Value) -> Machine {
    let claim = |volume: &Value| {
        let source = volume["persistentVolumeClaim"]["claimName"].as_str();
        source.or_else(|| volume["dataVolume"]["name"].as_str()).map(str::to_owned)
    };
    Machine {
        namespace: object.namespace().unwrap_or_default(),
        name: object.name_any(),
        claims: spec["volumes"].as_array().into_iter().flatten().filter_map(claim).collect(),
    }
}

/// Name of the VM that may have a claim; empty if there is none.
fn holder(claim: &PersistentVolumeClaim) -> String {
    let record = claim.annotations().get(ANNOTATION_ATTACHED_TO);
    let record = record.and_then(|text| serde_json::from_str::<Value>(text).ok()).unwrap_or_default();
    record["vm"].as_str().unwrap_or_default().to_owned()
}

/// Whether several VMs may have a claim without a record.
fn is_shareable(claim: &PersistentVolumeClaim) -> bool {
    claim.spec.as_ref().is_some_and(|spec| {
        crds::kubevirt::is_shareable(
            spec.access_modes.as_deref().unwrap_or_default(),
            spec.volume_mode.as_deref(),
        )
    })
}

fn judge(tier: Tier, machines: &[Machine], claims: &[PersistentVolumeClaim]) -> Finding {
    let mut found: Vec<String> = machines.iter().flat_map(|machine| differing(machine, claims)).collect();
    // A VM and its instance usually name the same claims.
    found.sort();
    found.dedup();
    if found.is_empty() {
        return Finding::ok(tier, WHAT);
    }
    let more = if found.len() > NAMED { "; …" } else { "" };
    let named = found.iter().take(NAMED).cloned().collect::<Vec<_>>().join("; ");
    Finding::error(tier, WHAT)
        .because(format!("{named}{more}: two VMs may write to one volume"))
        .next(
            "stop one of the VMs, or remove the volume from its template; if the record is wrong, correct it when no other VM has the \
             volume (docs/decisions/kubevirt-holders.md)",
        )
}

/// The claims of guests that a VM names although their record names another VM, or none.
fn differing(machine: &Machine, claims: &[PersistentVolumeClaim]) -> Vec<String> {
    let is_here = |claim: &&PersistentVolumeClaim| {
        claim.namespace().is_some_and(|namespace| namespace == machine.namespace)
            && machine.claims.contains(&claim.name_any())
    };
    let is_differing = |claim: &&PersistentVolumeClaim| {
        let holder = holder(claim);
        holder != machine.name && !(holder.is_empty() && is_shareable(claim))
    };
    let others = claims.iter().filter(is_here).filter(is_differing);
    others
        .map(|claim| {
            let (claim, holder) = (claim.name_any(), holder(claim));
            let holder = if holder.is_empty() { "none".to_owned() } else { holder };
            format!("{}/{} has claim {claim}, which records {holder}", machine.namespace, machine.name)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::finding::Level;
    use super::*;

    fn vm(name: &str, claims: &[&str]) -> Machine {
        let claims = claims.iter().map(|&claim| claim.to_owned()).collect();
        Machine { namespace: "n".to_owned(), name: name.to_owned(), claims }
    }

    fn claim(name: &str, vm: Option<&str>) -> PersistentVolumeClaim {
        let record = vm.map(|vm| json!({"take": "1", "uid": "u", "vm": vm}).to_string());
        let annotations = json!({ANNOTATION_ATTACHED_TO: record});
        let annotations = if record.is_some() { annotations } else { json!({}) };
        let metadata = json!({"name": name, "namespace": "n", "annotations": annotations});
        serde_json::from_value(json!({"metadata": metadata})).unwrap()
    }

    #[test]
    fn a_vm_has_only_claims_that_record_it() {
        let claims = [claim("a", Some("vm-1")), claim("b", None)];
        let level = |machines: &[Machine]| judge(Tier::Management, machines, &claims).level;
        assert_eq!(
            level(&[vm("vm-1", &["a", "root"]), vm("vm-1", &["a"]), vm("vm-2", &["root"])]),
            Level::Ok
        );
        let finding = judge(Tier::Management, &[vm("vm-1", &["a"]), vm("vm-2", &["a", "b"])], &claims);
        assert_eq!(finding.level, Level::Error);
        let why = finding.why.unwrap();
        assert!(why.contains("n/vm-2 has claim a, which records vm-1"), "{why}");
        assert!(why.contains("n/vm-2 has claim b, which records none"), "{why}");
        let modes = |modes: &[&str], mode: &str| json!({"accessModes": modes, "volumeMode": mode});
        for (spec, record, expected) in [
            (modes(&["ReadWriteMany"], "Block"), None, Level::Ok),
            (modes(&["ReadWriteMany"], "Block"), Some("vm-1"), Level::Error),
            (modes(&["ReadWriteMany"], "Filesystem"), None, Level::Error),
            (modes(&["ReadWriteOnce"], "Block"), None, Level::Error),
        ] {
            let spec = serde_json::from_value(spec).unwrap();
            let shared = PersistentVolumeClaim { spec: Some(spec), ..claim("s", record) };
            let found = judge(Tier::Management, &[vm("vm-1", &["s"]), vm("vm-2", &["s"])], &[shared]);
            assert_eq!(found.level, expected, "{record:?}: {:?}", found.why);
        }
        let elsewhere = Machine { namespace: "m".to_owned(), ..vm("vm-2", &["a"]) };
        assert_eq!(level(&[elsewhere]), Level::Ok);
    }

    #[test]
    fn the_claims_of_a_vm_are_those_of_its_volumes() {
        let object = json!({"apiVersion": "kubevirt.io/v1", "kind": "X", "metadata": {"name": "vm", "namespace": "n"}});
        let object: DynamicObject = serde_json::from_value(object).unwrap();
        let spec = json!({"volumes": [
            {"name": "root", "containerDisk": {"image": "i"}}, {"name": "x", "persistentVolumeClaim": {"claimName": "a"}},
            {"name": "y", "dataVolume": {"name": "b"}},
        ]});
        assert_eq!(machine(&object, &spec).claims, ["a", "b"]);
    }
}
