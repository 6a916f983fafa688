//! Nodes that are lost without a person: gc-csi taints a Node only if its VM is proven off, takes only its own taint back, and
//! the pods run elsewhere with their data.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use crds::names::{ANNOTATION_OUT_OF_SERVICE, ANNOTATION_PROVEN_OFF, TAINT_PROVEN_OFF};
use kube::ResourceExt;
use lab::vm::virsh;
use rustix::process::Signal;
use tests::hypervisor::BareDomain;
use tests::nodes::{has_taints, set_ready, taints};
use tests::program::Controller;
use tests::{PATIENCE, Scenario, eventually, run_alone};

use super::{on_bare_domains, start_record_writer, with_bare_domains, with_vms_that_are_restored};

/// Component of the lab: the first guest's gc-csi.
const GC_CSI: &str = "g1-gc-csi";

/// Waits until the management cluster records that a VM is proven off, or that it is not.
async fn is_proven_off(s: &Scenario, vm: &str, expected: bool) -> Result<()> {
    let what = format!("VirtualMachine {vm} is proven off: {expected}");
    eventually(&what, PATIENCE, || s.is_proven_off(vm, expected)).await
}

async fn has_power_state(s: &Scenario, vm: &str, expected: &str) -> Result<()> {
    eventually(&format!("VirtualMachine {vm} is {expected}"), PATIENCE, || async {
        let status = s.vms().get(vm).await?.status.unwrap_or_default();
        Ok(if status.power_state.as_deref() == Some(expected) { Ok(()) } else { Err(format!("{status:?}")) })
    })
    .await
}

/// Attaches a new volume to a domain whose Node has no kubelet.
async fn join_with_volume(s: &Scenario, domain: &BareDomain) -> Result<String> {
    s.lab.join_guest(&domain.node).await?;
    let handle = s.volume().await?;
    s.driver.publish(&handle, &domain.node.name).await?;
    Ok(handle)
}

// ---- domains without a boot disk ----

#[tokio::test]
async fn a_node_is_tainted_only_when_its_vm_is_proven_off_and_not_if_it_is_paused_or_saved() -> Result<()> {
    with_bare_domains(|s, domains| async move {
        let [paused, saved] = &*domains;
        for domain in [paused, saved] {
            join_with_volume(&s, domain).await?;
        }
        let [first, second] = [&paused.node.name, &saved.node.name];
        paused.virsh(&s, "suspend").await?;
        saved.virsh(&s, "managedsave").await?;
        has_power_state(&s, second, "Suspended").await?;
        for node in [first, second] {
            set_ready(&s.guest, node, "False").await?;
            s.wait_for_reason_of("Node", node, "NodeNotProvenOff", &["has not proven"]).await?;
            is_proven_off(&s, node, false).await?;
            ensure!(taints(&s.guest, node).await?.is_empty(), "{node} is tainted without a proof");
        }

        // Without its saved memory, the VM is off.
        virsh(s.lab.run(), ["managedsave-remove", second]).await?;
        has_taints(&s.guest, second, &[TAINT_PROVEN_OFF]).await?;
        s.wait_for_reason_of("Node", second, "OutOfServiceTaintAdded", &["has proven", second]).await?;
        paused.signal(&s, Signal::KILL)?;
        has_taints(&s.guest, first, &[TAINT_PROVEN_OFF]).await?;
        for vm in [first, second] {
            let annotations = s.vms().get(vm).await?.annotations().clone();
            ensure!(!annotations.contains_key(ANNOTATION_OUT_OF_SERVICE), "fencing is requested for {vm}");
        }

        // A VM that runs loses the taint before its Node is ready: pods that make it ready may not tolerate it.
        paused.virsh(&s, "start").await?;
        has_taints(&s.guest, first, &[]).await?;
        s.wait_for_reason_of("Node", first, "OutOfServiceTaintRemoved", &["runs again"]).await?;
        is_proven_off(&s, first, false).await?;
        ensure!(taints(&s.guest, second).await? == [TAINT_PROVEN_OFF], "the VM that is off lost its taint");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn with_the_policy_never_no_node_is_tainted() -> Result<()> {
    let never_then_proven = |s: Arc<Scenario>, domains: Arc<[BareDomain; 2]>| async move {
        let [domain, _] = &*domains;
        join_with_volume(&s, domain).await?;
        let node = &domain.node.name;
        s.stop_component(GC_CSI).await?;
        let never = Controller::start(&s, &["--out-of-service-taint=never"]).await?;
        domain.signal(&s, Signal::KILL)?;
        is_proven_off(&s, node, true).await?;
        set_ready(&s.guest, node, "False").await?;
        has_decided_again(&s, || metrics(&never), node).await?;
        ensure!(taints(&s.guest, node).await?.is_empty(), "tainted although the policy is never");
        never.stop().await?;

        // The same Node with the default policy. This controller has not seen the proof renewed before.
        let proven = Controller::start(&s, &[]).await?;
        has_taints(&s.guest, node, &[TAINT_PROVEN_OFF]).await?;
        domain.virsh(&s, "start").await?;
        has_taints(&s.guest, node, &[]).await?;
        proven.stop().await
    };
    run_alone(|s| on_bare_domains(s, never_then_proven)).await
}

#[tokio::test]
async fn the_taint_of_a_person_stays_when_the_vm_is_proven_off_and_when_it_returns() -> Result<()> {
    with_bare_domains(|s, domains| async move {
        let names = domains.each_ref().map(|domain| domain.node.name.as_str());
        for domain in domains.iter() {
            join_with_volume(&s, domain).await?;
        }
        let [of_a_person, of_gc_csi] = names;
        s.set_out_of_service_taint(of_a_person, true).await?;
        for (domain, node) in domains.iter().zip(names) {
            domain.signal(&s, Signal::KILL)?;
            is_proven_off(&s, node, true).await?;
            set_ready(&s.guest, node, "False").await?;
        }
        has_taints(&s.guest, of_gc_csi, &[TAINT_PROVEN_OFF]).await?;
        has_decided_again(&s, || s.lab.metrics(GC_CSI), of_a_person).await?;
        ensure!(
            taints(&s.guest, of_a_person).await? == ["nodeshutdown"],
            "the taint of a person was changed"
        );

        for (domain, node) in domains.iter().zip(names) {
            domain.virsh(&s, "start").await?;
            is_proven_off(&s, node, false).await?;
            set_ready(&s.guest, node, "True").await?;
        }
        has_taints(&s.guest, of_gc_csi, &[]).await?;
        ensure!(
            taints(&s.guest, of_a_person).await? == ["nodeshutdown"],
            "the taint of a person was removed"
        );
        s.set_out_of_service_taint(of_a_person, false).await
    })
    .await
}

/// Waits until a controller has decided about its Nodes after the proof of a VM was renewed.
async fn has_decided_again<Read>(s: &Scenario, metrics: impl Fn() -> Read, vm: &str) -> Result<()>
where
    Read: Future<Output = Result<String>>,
{
    let proof = async || anyhow::Ok(s.vms().get(vm).await?.annotations().get(ANNOTATION_PROVEN_OFF).cloned());
    let before = proof().await?;
    eventually("the proof is renewed", PATIENCE, || async {
        let now = proof().await?;
        Ok(if now != before { Ok(()) } else { Err(format!("{now:?}")) })
    })
    .await?;
    // Because of this renewal, or of the next.
    let begun = decisions(&metrics().await?)?;
    eventually("the controller decides", PATIENCE, || async {
        let count = decisions(&metrics().await?)?;
        Ok(if count > begun { Ok(()) } else { Err(format!("{count} decisions")) })
    })
    .await
}

async fn metrics(controller: &Controller) -> Result<String> {
    Ok(controller.process.get("/metrics").await?.1)
}

/// How many decisions about taints a controller has begun.
fn decisions(metrics: &str) -> Result<u64> {
    let name = "nestor_gc_csi_work_queue_wait_seconds_count{controller=\"lost-nodes\"} ";
    let count = metrics.lines().find_map(|line| line.strip_prefix(name));
    Ok(count.with_context(|| format!("no metric {name}"))?.parse()?)
}

// ---- libvirt VMs ----

#[tokio::test]
async fn a_pod_of_a_killed_vm_runs_elsewhere_without_a_person() -> Result<()> {
    with_vms_that_are_restored(|pods| async move {
        let (s, pod) = (pods.scenario(), start_record_writer(&pods).await?);
        let vm = s.lab.vm(&pod.lost)?;
        vm.crash().await?;
        let node = pods.ready_on("web", Some(&pod.lost)).await?;
        ensure!(node == pod.other, "the pod is on {node}");
        ensure!(taints(&s.guest, &pod.lost).await? == [TAINT_PROVEN_OFF], "the taint is not gc-csi's");
        s.wait_for_reason_of("Node", &pod.lost, "OutOfServiceTaintAdded", &[&pod.lost]).await?;
        let annotations = s.vms().get(&pod.lost).await?.annotations().clone();
        ensure!(
            !annotations.contains_key(ANNOTATION_OUT_OF_SERVICE),
            "fencing was requested: {annotations:?}"
        );

        vm.power_on().await?;
        has_taints(&s.guest, &pod.lost, &[]).await?;
        vm.wait_for_node(&s.guest).await?;
        s.wait_for_reason_of("Node", &pod.lost, "OutOfServiceTaintRemoved", &[&pod.lost]).await?;
        // It is schedulable: pods run on it.
        pod.no_record_is_lost(&pods).await
    })
    .await
}
