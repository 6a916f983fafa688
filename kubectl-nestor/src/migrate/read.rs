//! Reads the objects of a volume of kubevirt-csi.

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::ResourceExt;
use kube::api::{Api, ApiResource, DynamicObject};
use kube::core::GroupVersionKind;
use serde_json::Value;

use super::decide::{Direction, Plugged, Volume, handle};
use super::{KUBEVIRT_CSI, Migration};
use crate::clusters::Cluster;
use crate::error::Error;
use crate::lists::read::list;
use crate::vm_api::{self, kubevirt_resource};

/// API group of DataVolumes.
const CDI: &str = "cdi.kubevirt.io";
/// Name of the Deployment of kubevirt-csi's controller, in its manifests.
const KUBEVIRT_CSI_CONTROLLER: &str = "kubevirt-csi-controller";
/// Name of the Deployment of gc-csi, in the chart.
const GC_CSI_CONTROLLER: &str = "gc-csi-controller";

impl Migration<'_> {
    /// Names of the PersistentVolumes: those that are named, or all of kubevirt-csi.
    pub(super) async fn names(&self, named: &[String]) -> Result<Vec<String>, Error> {
        if !named.is_empty() {
            return Ok(named.to_vec());
        }
        let all: Vec<PersistentVolume> =
            list(self.guest, self.guest.all(), "PersistentVolumes", None).await?;
        Ok(all.iter().filter(|one| is_kubevirt_csi(one)).map(ResourceExt::name_any).collect())
    }

    /// The objects of a volume as they are now.
    pub(super) async fn volume(&self, name: &str) -> Result<Volume, Error> {
        let found = get(self.guest, self.guest.all::<PersistentVolume>(), name).await?;
        let guest_volume = found.filter(is_kubevirt_csi).ok_or_else(|| {
            let hint = format!(" in the guest cluster, or is not of the driver {KUBEVIRT_CSI}");
            Error::NoSubject(format!("PersistentVolume {name}"), hint)
        })?;
        let handle = handle(&guest_volume).to_owned();
        let claims: Api<PersistentVolumeClaim> = self.management.claims_of(&self.identity.namespace);
        let claim = get(self.management, claims, &handle).await?;
        let bound = claim.as_ref().and_then(|claim| claim.spec.as_ref()?.volume_name.clone());
        let management_volume = match bound.filter(|bound| !bound.is_empty()) {
            Some(bound) => get(self.management, self.management.all(), &bound).await?,
            None => None,
        };
        let attachments: Vec<VolumeAttachment> =
            list(self.guest, self.guest.all(), "VolumeAttachments", None).await?;
        let is_own = |one: &VolumeAttachment| one.spec.source.persistent_volume_name.as_deref() == Some(name);
        Ok(Volume {
            attachments: attachments.into_iter().filter(is_own).collect(),
            data_volume: self.data_volume(&handle).await?,
            plugged: self.plugged(&handle).await?,
            guest_volume,
            claim,
            management_volume,
        })
    }

    /// The DataVolume with this name. Without CDI there are none.
    async fn data_volume(&self, name: &str) -> Result<Option<DynamicObject>, Error> {
        match vm_api::groups(self.management).await?.iter().any(|group| group == CDI) {
            true => get(self.management, self.data_volumes(), name).await,
            false => Ok(None),
        }
    }

    /// DataVolumes of the guest's namespace.
    pub(super) fn data_volumes(&self) -> Api<DynamicObject> {
        let kind = GroupVersionKind::gvk(CDI, "v1beta1", "DataVolume");
        self.objects(&ApiResource::from_gvk(&kind))
    }

    fn objects(&self, resource: &ApiResource) -> Api<DynamicObject> {
        Api::namespaced_with(self.management.client.clone(), &self.identity.namespace, resource)
    }

    /// The VMs that have a claim, by their templates and instances.
    async fn plugged(&self, claim: &str) -> Result<Vec<Plugged>, Error> {
        let kinds = ["VirtualMachine", "VirtualMachineInstance"].map(kubevirt_resource);
        let machines = list(self.management, self.objects(&kinds[0]), "VirtualMachines", None).await?;
        let instances =
            list(self.management, self.objects(&kinds[1]), "VirtualMachineInstances", None).await?;
        Ok(plugged(&machines, &instances, claim))
    }

    /// Neither driver may act on volumes that change hands.
    pub(super) async fn refuse_while_drivers_run(&self) -> Result<(), Error> {
        let infra: Api<Deployment> =
            Api::namespaced(self.management.client.clone(), &self.identity.namespace);
        let infra = list(self.management, infra, "Deployments", None).await?;
        let guest: Vec<Deployment> = list(self.guest, self.guest.all(), "Deployments", None).await?;
        match infra.iter().chain(&guest).find_map(|one| reason_to_wait(one, self.direction)) {
            Some(why) => Err(Error::Refused(why)),
            None => Ok(()),
        }
    }
}

/// Why a Deployment keeps volumes from being migrated.
fn reason_to_wait(deployment: &Deployment, direction: Direction) -> Option<String> {
    let spec = deployment.spec.as_ref()?;
    if spec.replicas == Some(0) {
        return None;
    }
    let key = format!("{}/{}", deployment.namespace().unwrap_or_default(), deployment.name_any());
    let stop = |why: &str| {
        Some(format!(
            "Deployment {key} runs, {why}: scale it to 0 with `kubectl scale --replicas=0`, wait until its pods are gone, and run the \
             command again"
        ))
    };
    match (deployment.name_any().as_str(), direction) {
        (KUBEVIRT_CSI_CONTROLLER, _) => stop("and would attach and detach volumes that change hands"),
        (GC_CSI_CONTROLLER, Direction::Back) => stop("and would remove what it no longer knows"),
        (GC_CSI_CONTROLLER, Direction::Forth) if !serves_kubevirt_csi(deployment) => stop(&format!(
            "and does not serve the driver {KUBEVIRT_CSI}, so it would detach its volumes; set legacyDriverName: {KUBEVIRT_CSI} in \
             the values of nestor-guest"
        )),
        _ => None,
    }
}

fn serves_kubevirt_csi(deployment: &Deployment) -> bool {
    let spec = deployment.spec.as_ref().and_then(|spec| spec.template.spec.as_ref());
    let containers =
        spec.into_iter().flat_map(|spec| spec.containers.iter().chain(spec.init_containers.iter().flatten()));
    let mut args = containers.flat_map(|one| one.args.iter().flatten());
    let flag = format!("--legacy-driver-name={KUBEVIRT_CSI}");
    args.any(|arg| *arg == flag)
}

fn is_kubevirt_csi(volume: &PersistentVolume) -> bool {
    let csi = volume.spec.as_ref().and_then(|spec| spec.csi.as_ref());
    csi.is_some_and(|csi| csi.driver == KUBEVIRT_CSI)
}

async fn get<K>(cluster: &Cluster, api: Api<K>, name: &str) -> Result<Option<K>, Error>
where
    K: Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    let found = api.get_opt(name).await;
    found.map_err(|error| Error::request(cluster.tier.name(), name.to_owned(), &error))
}

/// The VMs that have a claim. An instance can outlive its VM.
fn plugged(machines: &[DynamicObject], instances: &[DynamicObject], claim: &str) -> Vec<Plugged> {
    let in_template = |one: &DynamicObject| volume_of(&one.data["spec"]["template"]["spec"], claim);
    let mut all: Vec<Plugged> = Vec::new();
    for machine in machines {
        let instance = instances.iter().find(|one| one.name_any() == machine.name_any());
        let running = instance.and_then(|one| volume_of(&one.data["spec"], claim));
        let Some((entry, serial)) = running.or_else(|| in_template(machine)) else { continue };
        all.push(Plugged {
            vm: machine.name_any(),
            uid: machine.uid().unwrap_or_default(),
            guest: machine.labels().get(crds::names::LABEL_CLUSTER_ID).cloned(),
            in_template: in_template(machine).is_some(),
            entry,
            serial,
        });
    }
    let orphans = instances.iter().filter(|one| machines.iter().all(|vm| vm.name_any() != one.name_any()));
    all.extend(orphans.filter_map(|one| {
        let (entry, serial) = volume_of(&one.data["spec"], claim)?;
        Some(Plugged { vm: one.name_any(), entry, serial, ..Plugged::default() })
    }));
    all
}

/// Name of a claim's volume in a spec of an instance, and the serial of its disk.
fn volume_of(spec: &Value, claim: &str) -> Option<(String, Option<String>)> {
    let items = |list: &Value| list.as_array().cloned().unwrap_or_default();
    let is_of = |one: &Value| {
        one["persistentVolumeClaim"]["claimName"] == claim || one["dataVolume"]["name"] == claim
    };
    let volume = items(&spec["volumes"]).into_iter().find(is_of)?;
    let name = volume["name"].as_str()?.to_owned();
    let disks = items(&spec["domain"]["devices"]["disks"]);
    let disk = disks.iter().find(|disk| disk["name"] == name.as_str());
    Some((name, disk.and_then(|disk| disk["serial"].as_str()).map(str::to_owned)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(name: &str, data: &Value) -> DynamicObject {
        let mut object = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "X", "metadata": {"name": name, "uid": format!("uid-{name}")},
        });
        json_patch::merge(&mut object, data);
        serde_json::from_value(object).unwrap()
    }

    fn spec(claim: &str) -> Value {
        json!({
            "volumes": [{"name": "root"}, {"name": claim, "dataVolume": {"name": claim, "hotpluggable": true}}],
            "domain": {"devices": {"disks": [{"name": claim, "serial": "s"}]}},
        })
    }

    #[test]
    fn a_volume_is_found_in_templates_and_in_instances() {
        let machine = object("vm-1", &json!({"spec": {"template": {"spec": spec("pvc-1")}}}));
        let empty = object("vm-2", &json!({"spec": {"template": {"spec": {}}}}));
        let instance = |name: &str| object(name, &json!({"spec": spec("pvc-1")}));
        let found =
            |instances: &[DynamicObject]| plugged(&[machine.clone(), empty.clone()], instances, "pvc-1");
        let own = &found(&[instance("vm-1")])[0];
        assert_eq!((own.vm.as_str(), own.in_template, own.serial.as_deref()), ("vm-1", true, Some("s")));
        let two = found(&[instance("vm-2"), instance("gone")]);
        let named: Vec<(&str, bool)> = two.iter().map(|one| (one.vm.as_str(), one.in_template)).collect();
        assert_eq!(named, [("vm-1", true), ("vm-2", false), ("gone", false)]);
        assert!(plugged(&[machine], &[], "pvc-2").is_empty());
    }

    #[test]
    fn volumes_do_not_change_hands_while_a_driver_may_act_on_them() {
        let deployment = |name: &str, replicas: i32, args: &[&str]| -> Deployment {
            serde_json::from_value(json!({
                "metadata": {"name": name, "namespace": "n"},
                "spec": {
                    "replicas": replicas, "selector": {},
                    "template": {"spec": {"containers": [{"name": "c", "args": args}]}},
                },
            }))
            .unwrap()
        };
        let why = |one: &Deployment, direction| reason_to_wait(one, direction).unwrap_or_default();
        let old = deployment(KUBEVIRT_CSI_CONTROLLER, 1, &[]);
        for direction in [Direction::Forth, Direction::Back] {
            assert!(why(&old, direction).contains("n/kubevirt-csi-controller"));
            let stopped = deployment(KUBEVIRT_CSI_CONTROLLER, 0, &[]);
            assert_eq!(reason_to_wait(&stopped, direction), None);
            assert_eq!(reason_to_wait(&deployment("other", 1, &[]), direction), None);
        }
        let plain = deployment(GC_CSI_CONTROLLER, 2, &[]);
        assert!(why(&plain, Direction::Forth).contains("legacyDriverName"));
        let serving = deployment(GC_CSI_CONTROLLER, 2, &["--legacy-driver-name=csi.kubevirt.io"]);
        assert_eq!(reason_to_wait(&serving, Direction::Forth), None);
        assert!(why(&serving, Direction::Back).contains("scale it to 0"));
    }
}
