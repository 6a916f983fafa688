//! VMs register themselves: the storage infra's nodes follow the VirtualMachines of the management cluster, and the status of
//! VirtualMachines follows their hypervisors.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use infra_api::{Node, NodeState};
use k8s_openapi::api::core::v1::Event;
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use lab::virtual_machines;
use serde_json::{Value, json};
use tests::hypervisor::{BareDomain, HaltedNode};
use tests::own_namespace::OwnNamespace;
use tests::{PATIENCE, Scenario, eventually, run, run_alone, unique};
use uuid::Uuid;

/// Waits for the node of a VM.
async fn registered(s: &Scenario, uuid: Uuid) -> Result<Node> {
    eventually(&format!("node {uuid} is registered"), PATIENCE, || async {
        Ok(s.infra.get_node(uuid).await?.ok_or_else(|| "it is not".to_owned()))
    })
    .await
}

/// Waits until the node of a VM is removed.
async fn removed(s: &Scenario, uuid: Uuid) -> Result<()> {
    eventually(&format!("node {uuid} is removed"), PATIENCE, || async {
        Ok(s.infra.get_node(uuid).await?.map_or(Ok(()), |node| Err(format!("{node:?}"))))
    })
    .await
}

/// Waits until the status of a VM has this power state.
async fn has_power_state(s: &Scenario, vm: &str, power: &str) -> Result<()> {
    eventually(&format!("{vm} is {power}"), PATIENCE, || async {
        let found = s.vms().get(vm).await?.status.and_then(|status| status.power_state);
        Ok(if found.as_deref() == Some(power) { Ok(()) } else { Err(format!("{found:?}")) })
    })
    .await
}

/// Waits until a gauge of mgmt-csi has this value.
async fn gauge(s: &Scenario, name: &str, value: &str) -> Result<()> {
    let line = format!("nestor_mgmt_csi_{name} {value}");
    eventually(&line, PATIENCE, || async {
        let metrics = s.lab.metrics("mgmt-csi").await?;
        Ok(if metrics.lines().any(|found| found == line) { Ok(()) } else { Err(name.to_owned()) })
    })
    .await
}

/// A VM in a namespace of the scenario, whose object is written step by step.
struct NewVm {
    name: String,
    uuid: Uuid,
    namespace: OwnNamespace,
}

impl NewVm {
    /// Creates the object of a VM that the loop hypervisor has, without a status.
    async fn create(s: &Scenario, namespace: &OwnNamespace) -> Result<Self> {
        let (name, uuid) = (unique("vm"), Uuid::new_v4());
        let root = &s.lab.state().infra.as_ref().context("no storage infra")?.loop_root;
        std::fs::create_dir_all(root.join(uuid.to_string()))?;
        let vm = Self { name, uuid, namespace: namespace.clone() };
        let object = json!({
            "apiVersion": format!("{}/{}", crds::VIRTUAL_MACHINE_GROUP, crds::VIRTUAL_MACHINE_VERSIONS[0]),
            "kind": "VirtualMachine", "metadata": {"name": vm.name}, "spec": {},
        });
        vm.api().create(&Default::default(), &serde_json::from_value(object)?).await?;
        Ok(vm)
    }

    fn api(&self) -> Api<crds::VirtualMachine> {
        virtual_machines::api_in(self.namespace.client(), &self.namespace.name)
    }

    async fn write_status(&self, status: Value) -> Result<()> {
        let patch = Patch::Merge(json!({"status": status}));
        Ok(self.api().patch_status(&self.name, &PatchParams::default(), &patch).await.map(drop)?)
    }

    async fn has_event(&self, reason: &str) -> Result<()> {
        let events: Api<Event> = Api::namespaced(self.namespace.client().clone(), &self.namespace.name);
        eventually(&format!("event {reason} on {}", self.name), PATIENCE, || async {
            let all = events.list(&Default::default()).await?;
            let is_it = |event: &Event| {
                event.reason.as_deref() == Some(reason)
                    && event.involved_object.name.as_deref() == Some(&self.name)
            };
            Ok(if all.iter().any(is_it) { Ok(()) } else { Err(format!("{} others", all.items.len())) })
        })
        .await
    }

    async fn delete(&self) -> Result<()> {
        Ok(self.api().delete(&self.name, &DeleteParams::default()).await.map(drop)?)
    }
}

#[tokio::test]
async fn two_vms_become_four_and_two_again_without_hands() -> Result<()> {
    run_alone(|s| async move {
        let mut domains = vec![BareDomain::start(&s).await?, BareDomain::start(&s).await?];
        let outcome = grow_and_shrink(&s, &mut domains).await;
        for domain in &domains {
            domain.remove(&s).await?;
        }
        outcome
    })
    .await
}

async fn grow_and_shrink(s: &Scenario, domains: &mut Vec<BareDomain>) -> Result<()> {
    for _ in 0..2 {
        let (name, uuid) = BareDomain::define(s).await?;
        let created = Instant::now();
        domains.push(BareDomain { node: s.domain_node(&name, uuid).await? });
        println!(
            "object created, registered and running by its status: {:.2} s",
            created.elapsed().as_secs_f64()
        );
    }
    let mut volumes = Vec::new();
    for domain in domains.iter() {
        let node = registered(s, domain.node.uuid).await?;
        ensure!((node.hypervisor.as_str(), node.state) == ("libvirt", NodeState::Running), "{node:?}");
        let (volume, name) = (s.volume().await?, &domain.node.name);
        let disk = s.driver.publish(&volume, name).await?;
        ensure!(domain.has(s, &disk).await?, "{name} has no disk {disk}");
        volumes.push((volume, disk));
    }
    // Two leave with their disks attached.
    for domain in &domains[..2] {
        s.vms().delete(&domain.node.name, &DeleteParams::default()).await?;
    }
    for (domain, (volume, disk)) in domains.iter().zip(&volumes).take(2) {
        removed(s, domain.node.uuid).await?;
        ensure!(!domain.has(s, disk).await?, "{} still has {disk}", domain.node.name);
        s.driver.unpublish(volume, &domain.node.name).await?;
    }
    // Their volumes go to those that stay.
    for (domain, (volume, _)) in domains[2..].iter().zip(&volumes) {
        s.driver.publish(volume, &domain.node.name).await?;
        ensure!(s.infra.list_attachments(Some(domain.node.uuid), None).await?.len() == 2);
    }
    Ok(())
}

#[tokio::test]
async fn a_vm_waits_for_its_uuid_and_is_registered_within_a_second_of_it() -> Result<()> {
    run_alone(|s| async move {
        let namespace = s.own_namespace().await?;
        let vm = NewVm::create(&s, &namespace).await?;
        vm.write_status(json!({"instanceUUID": "not a UUID"})).await?;
        ensure!(s.infra.get_node(vm.uuid).await?.is_none());
        vm.write_status(json!({"instanceUUID": vm.uuid})).await?;
        let written = Instant::now();
        let node = registered(&s, vm.uuid).await?;
        let took = written.elapsed();
        println!("UUID written, node registered: {:.3} s", took.as_secs_f64());
        ensure!(took < Duration::from_secs(1), "registered after {took:?}");
        ensure!(node.name == vm.name && node.hypervisor == "loop", "{node:?}");
        eventually("the status is written", PATIENCE, || async {
            let status = vm.api().get(&vm.name).await?.status.unwrap_or_default();
            let is_written = status.power_state.as_deref() == Some("PoweredOn")
                && status.bios_uuid == Some(vm.uuid.to_string());
            Ok(if is_written { Ok(()) } else { Err(format!("{status:?}")) })
        })
        .await?;
        vm.delete().await?;
        removed(&s, vm.uuid).await
    })
    .await
}

#[tokio::test]
async fn of_two_vms_with_one_uuid_the_older_is_registered() -> Result<()> {
    run(|s| async move {
        let namespace = s.own_namespace().await?;
        let older = NewVm::create(&s, &namespace).await?;
        older.write_status(json!({"instanceUUID": older.uuid})).await?;
        registered(&s, older.uuid).await?;
        // The creation time has a resolution of a second.
        let age = |vm: &NewVm| {
            let (api, name) = (vm.api(), vm.name.clone());
            async move { Ok::<_, anyhow::Error>(api.get(&name).await?.metadata.creation_timestamp) }
        };
        let newer = eventually("a VM that is a second younger", PATIENCE, || async {
            let newer = NewVm::create(&s, &namespace).await?;
            Ok(if age(&newer).await? > age(&older).await? { Ok(newer) } else { Err("same age".to_owned()) })
        })
        .await?;
        newer.write_status(json!({"instanceUUID": older.uuid})).await?;
        newer.has_event("DuplicateUuid").await?;
        let node = registered(&s, older.uuid).await?;
        ensure!(node.name == older.name, "{node:?}");
        older.delete().await?;
        eventually("the younger VM has the node", PATIENCE, || async {
            let node = registered(&s, older.uuid).await?;
            Ok(if node.name == newer.name { Ok(()) } else { Err(format!("{node:?}")) })
        })
        .await?;
        newer.delete().await?;
        removed(&s, older.uuid).await
    })
    .await
}

#[tokio::test]
async fn the_power_state_of_a_vm_is_that_of_its_hypervisor() -> Result<()> {
    run(|s| async move {
        let node = s.node().await?;
        let zone = s.vms().get(&node.name).await?.status.and_then(|status| status.zone);
        ensure!(zone.as_deref() == Some(&node.zone), "{zone:?} instead of {}", node.zone);
        let off = HaltedNode::off(&node)?;
        let stopped = Instant::now();
        has_power_state(&s, &node.name, "PoweredOff").await?;
        println!("off, and PoweredOff by its status: {:.2} s", stopped.elapsed().as_secs_f64());
        drop(off);
        has_power_state(&s, &node.name, "PoweredOn").await
    })
    .await
}

#[tokio::test]
async fn the_node_of_a_deleted_vm_stays_until_its_disks_are_proven_free() -> Result<()> {
    run_alone(|s| async move {
        let (node, handle) = (s.node().await?, s.volume().await?);
        s.driver.publish(&handle, &node.name).await?;
        let hung = HaltedNode::paused(&node)?;
        s.vms().delete(&node.name, &DeleteParams::default()).await?;
        gauge(&s, "kept_nodes", "1").await?;
        let texts = ["not known to be free"];
        s.wait_for_management_reason_of("VirtualMachine", &node.name, "NodeKept", &texts).await?;
        let kept = registered(&s, node.uuid).await?;
        ensure!(s.infra.list_attachments(Some(node.uuid), None).await?.len() == 1, "{kept:?}");
        hung.power_off()?;
        removed(&s, node.uuid).await?;
        gauge(&s, "kept_nodes", "0").await?;
        s.driver.unpublish(&handle, &node.name).await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn changes_while_the_storage_infra_or_mgmt_csi_is_down_are_made_up_for() -> Result<()> {
    run_alone(|s| async move {
        let namespace = s.own_namespace().await?;
        for component in ["storage-infra", "mgmt-csi"] {
            let deleted = NewVm::create(&s, &namespace).await?;
            deleted.write_status(json!({"instanceUUID": deleted.uuid})).await?;
            registered(&s, deleted.uuid).await?;
            let created = NewVm::create(&s, &namespace).await?;
            s.kill_component(component).await?;
            deleted.delete().await?;
            created.write_status(json!({"instanceUUID": created.uuid})).await?;
            s.start_component(component).await?;
            registered(&s, created.uuid).await?;
            removed(&s, deleted.uuid).await?;
            // What an administrator removes comes back.
            s.infra.delete_node(created.uuid).await?;
            registered(&s, created.uuid).await?;
            created.delete().await?;
            removed(&s, created.uuid).await?;
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn nodes_that_an_administrator_registered_are_left_alone() -> Result<()> {
    run_alone(|s| async move {
        let (uuid, name) = (Uuid::new_v4(), unique("by-hand"));
        let spec =
            infra_api::NodeSpec { name, hypervisor: "loop".into(), zone: None, labels: Default::default() };
        s.infra.put_node(uuid, &spec).await?;
        // A comparison of everything.
        s.kill_component("mgmt-csi").await?;
        s.start_component("mgmt-csi").await?;
        let node = s.node().await?;
        ensure!(s.infra.get_node(uuid).await?.is_some(), "it was removed");
        ensure!(s.infra.get_node(node.uuid).await?.is_some());
        Ok(s.infra.delete_node(uuid).await?)
    })
    .await
}
