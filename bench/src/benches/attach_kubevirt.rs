//! The bench of attaches, in a lab with KubeVirt: time from the creation of a guest's storage.k8s.io/VolumeAttachment until it is
//! attached. The floor is KubeVirt's own work: the same PATCH of the VirtualMachine, made by hand, until its instance shows the volumes
//! as Ready.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use kube::ResourceExt;
use kube::api::{Api, DynamicObject, Patch, PatchParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::runtime::wait::await_condition;
use serde_json::{Value, json};
use tests::Scenario;
use tests::guest::handle;
use uuid::Uuid;

use crate::cost::{Cost, metered};
use crate::objects::{Attachments, Claims};
use crate::report::Report;
use crate::work::{Work, case};

/// Lists of a VM's template: its volumes and its disks.
const VOLUMES: &str = "/spec/template/spec/volumes";
const DISKS: &str = "/spec/template/spec/domain/devices/disks";

/// Runs the bench.
pub async fn run(report: &Report, work: &Work) -> Result<()> {
    let (report, work) = (report.clone(), work.clone());
    tests::run(move |s| async move { measure(&s, &report, &work).await }).await
}

/// A volume of the guest, and the management claim behind it.
struct Disk {
    volume: String,
    claim: String,
}

struct Bench<'a> {
    s: &'a Scenario,
    vm: String,
    attachments: Attachments,
}

async fn measure(s: &Arc<Scenario>, report: &Report, work: &Work) -> Result<()> {
    let vm = s.lab.vms().first().cloned().context("the lab has no VMs")?;
    let bench = Bench { s, vm, attachments: Attachments::watch(&s.guest, &s.name) };
    let bursts = work.bursts(&[10]);
    let claims = Claims::watch(&s.guest, &s.name, &s.name);
    let (volumes, _) = claims.create(bursts.iter().copied().max().unwrap_or(1).max(1)).await?;
    let mut disks = Vec::new();
    for claim in &volumes {
        let volume = s.guest_volumes().get(&claim.volume).await?;
        disks.push(Disk { volume: claim.volume.clone(), claim: handle(&volume)? });
    }
    bench.rounds(&disks[..1], work.warm_up()).await?;
    let cases = [("one".to_owned(), 1, work.count())];
    let cases = cases.into_iter().chain(bursts.iter().map(|&size| (case(size), size, work.rounds())));
    for (case, at_once, rounds) in cases {
        let all = bench.rounds(&disks[..at_once], rounds).await?;
        report.times(&case, &all.times, &all.floor);
        report.number(&case, "PATCHes of the VM", "requests", patches(&all.cost) / rounds as f64);
    }
    claims.delete(&volumes).await.map(drop)
}

/// The PATCHes of VirtualMachines by gc-csi.
fn patches(cost: &Cost) -> f64 {
    let of_vms = cost.requests.iter().filter(|(kind, _)| {
        kind.component == "gc-csi" && kind.verb == "patch" && kind.resource == "virtualmachines"
    });
    of_vms.map(|(_, count)| *count as f64).sum()
}

/// Results of some rounds.
#[derive(Default)]
struct Rounds {
    times: Vec<Duration>,
    floor: Vec<Duration>,
    cost: Cost,
}

impl Bench<'_> {
    /// Attaches and detaches all disks at once, by hand and by gc-csi in turn.
    async fn rounds(&self, disks: &[Disk], rounds: usize) -> Result<Rounds> {
        let mut all = Rounds::default();
        let volumes: Vec<String> = disks.iter().map(|disk| disk.volume.clone()).collect();
        for _ in 0..rounds {
            all.floor.push(self.by_hand(disks).await?);
            let attach = self.attachments.attach(&volumes, &self.vm);
            let ((attachments, times), cost) = metered(&self.s.lab, disks.len(), attach).await?;
            self.attachments.detach(&attachments).await?;
            all.times.extend(times);
            all.cost.add(cost);
        }
        Ok(all)
    }

    fn api(&self, kind: &str) -> Api<DynamicObject> {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("kubevirt.io", "v1", kind));
        Api::namespaced_with(self.s.management.clone(), &self.s.namespace, &resource)
    }

    /// Adds volumes to the VM's template, and removes them; returns the time until all are ready.
    async fn by_hand(&self, disks: &[Disk]) -> Result<Duration> {
        let add =
            |list: &str, value: Value| json!({"op": "add", "path": format!("{list}/-"), "value": value});
        let volume = |disk: &Disk| {
            let source = json!({"claimName": disk.claim, "hotpluggable": true});
            add(VOLUMES, json!({"name": disk.claim, "persistentVolumeClaim": source}))
        };
        let device = |disk: &Disk| {
            let serial = Uuid::new_v4().to_string();
            add(DISKS, json!({"name": disk.claim, "serial": serial, "disk": {"bus": "scsi"}}))
        };
        let patch: Vec<Value> = disks.iter().map(volume).chain(disks.iter().map(device)).collect();
        let names: Vec<&str> = disks.iter().map(|disk| disk.claim.as_str()).collect();
        let instances = self.api("VirtualMachineInstance");
        let is_ready = |one: Option<&DynamicObject>| one.is_some_and(|one| are_ready(one, &names));
        let start = Instant::now();
        let ready = await_condition(instances.clone(), &self.vm, is_ready);
        tokio::try_join!(async { anyhow::Ok(ready.await?) }, self.patch(patch)).context("attach by hand")?;
        let time = start.elapsed();
        self.patch(self.removals(&names).await?).await?;
        let is_gone = |one: Option<&DynamicObject>| one.is_some_and(|one| !has_any(one, &names));
        await_condition(instances, &self.vm, is_gone).await?;
        Ok(time)
    }

    async fn patch(&self, operations: Vec<Value>) -> Result<()> {
        let patch: json_patch::Patch = serde_json::from_value(json!(operations))?;
        let patch = Patch::Json::<()>(patch);
        self.api("VirtualMachine").patch(&self.vm, &PatchParams::default(), &patch).await?;
        Ok(())
    }

    /// Operations that remove the entries of these names, the last first.
    async fn removals(&self, names: &[&str]) -> Result<Vec<Value>> {
        let vm = self.api("VirtualMachine").get(&self.vm).await?;
        let mut operations = Vec::new();
        for list in [VOLUMES, DISKS] {
            let entries = vm.data.pointer(list).and_then(Value::as_array).cloned().unwrap_or_default();
            for (at, entry) in entries.iter().enumerate().rev() {
                if entry["name"].as_str().is_some_and(|name| names.contains(&name)) {
                    operations.push(json!({"op": "remove", "path": format!("{list}/{at}")}));
                }
            }
        }
        anyhow::ensure!(!operations.is_empty(), "{} has none of {names:?}", vm.name_any());
        Ok(operations)
    }
}

fn statuses(instance: &DynamicObject) -> impl Iterator<Item = &Value> {
    instance.data["status"]["volumeStatus"].as_array().into_iter().flatten()
}

fn are_ready(instance: &DynamicObject, names: &[&str]) -> bool {
    names.iter().all(|name| statuses(instance).any(|one| one["name"] == *name && one["phase"] == "Ready"))
}

fn has_any(instance: &DynamicObject, names: &[&str]) -> bool {
    let volumes = instance.data["spec"]["volumes"].as_array().into_iter().flatten();
    statuses(instance).chain(volumes).any(|one| names.iter().any(|name| one["name"] == *name))
}
