//! Start of a lab whose VMs KubeVirt makes.

use anyhow::{Context, Result, ensure};

use super::{Built, Plan, UpOptions, join_nodes, start_guest, wait_for_drivers};
use crate::cache::KubeVirt;
use crate::ceph::Engine;
use crate::cluster;
use crate::drivers;
use crate::host::Host;
use crate::infra;
use crate::kubevirt::{self, Node, VmManager};
use crate::run::Run;
use crate::state::VmRecord;
use crate::ui::Ui;
use crate::vm;
use crate::vm::network::{Forwarded, Machine};

/// Classes of the management cluster that guests may use: those of its other CSI driver, and Nestor's.
const CLASSES: [&str; 4] = ["nestor", "nestor-retain", "nestor-shareable", "nestor-infra"];
const MANAGEMENT_CLASSES: &str = include_str!("../../manifests/kubevirt-management.yaml");
const GUEST_CLASSES: &str = include_str!("../../manifests/kubevirt-guest.yaml");

impl UpOptions {
    /// A lab with KubeVirt has one of each component, and pools of files: a host attaches nothing else.
    pub(super) fn check(&self) -> Result<()> {
        let has_more = self.deployed
            || self.cluster_api
            || self.replicas != 1
            || self.infra_servers != 1
            || self.hosts != 1
            || self.engine != Engine::default();
        ensure!(
            self.vm_manager == VmManager::Libvirt || !has_more,
            "a lab with --vm-manager kubevirt has one storage-infra with pools of files, and one of each controller: leave out \
             --deployed, --cluster-api, --replicas, --infra-servers, --hosts and --engine"
        );
        Ok(())
    }
}

/// Starts the clusters, KubeVirt in the management cluster, the VMs, the storage infra, and the drivers.
pub(super) async fn start(ui: &Ui, run: &Run, built: &Built, kubevirt: &KubeVirt, plan: &Plan) -> Result<()> {
    let node = Node::plan()?;
    connect(run, &node, plan).await?;
    let is_emulated = vm::accelerator(&built.image).await != "kvm";
    let management = async {
        let step = ui.step("management control plane");
        plan.management.start(run, &built.tools).await?;
        cluster::apply_snapshot_api(&plan.management.cluster, &built.snapshot_definitions).await?;
        cluster::apply_cluster_api(&plan.management.cluster).await?;
        cluster::prepare_management_for_pods(&plan.management.cluster).await?;
        let classes = "manifests/kubevirt-management.yaml";
        cluster::apply_manifests(&plan.management.cluster, classes, MANAGEMENT_CLASSES).await?;
        step.done();
        kubevirt::start(ui, run, kubevirt, &node, &plan.management, is_emulated).await
    };
    futures::try_join!(
        management,
        start_infra(ui, run, built),
        futures::future::try_join_all(plan.guests.iter().map(|guest| start_guest(ui, run, built, guest))),
    )?;
    for planned in &plan.guests {
        let guest = planned.record(run)?;
        cluster::create_namespace(&plan.management.cluster, &guest.namespace).await?;
        let vms = plan.vms.iter().filter(|(_, machine)| machine.guest == guest.cluster.name);
        kubevirt::boot(run, &guest, &planned.plane, vms).await?;
    }
    start_drivers(ui, run, plan).await?;
    join_nodes(ui, run, plan).await?;
    wait_for_drivers(run, plan).await
}

async fn start_infra(ui: &Ui, run: &Run, built: &Built) -> Result<()> {
    let step = ui.step("storage infra");
    let pools = infra::mount_pools(run, &[Host::default()]).await?;
    infra::start(run, &built.binaries, Engine::File, pools, 1).await?;
    step.done();
    Ok(())
}

/// Starts mgmt-csi, and gc-csi of each guest with the rights of its account on the VMs.
async fn start_drivers(ui: &Ui, run: &Run, plan: &Plan) -> Result<()> {
    let step = ui.step("drivers and sidecars");
    let state = run.state()?;
    drivers::start_snapshot_controllers(run, &state).await?;
    drivers::start_management_for_pods(run, &state).await?;
    kubevirt::start_host_plugin(run, &plan.management.cluster).await?;
    for (name, guest) in &state.guests {
        cluster::apply_manifests(&guest.cluster, "manifests/kubevirt-guest.yaml", GUEST_CLASSES).await?;
        cluster::prepare_guest_with_classes(&plan.management.cluster, guest, &CLASSES).await?;
        cluster::prepare_guest_kubevirt(&plan.management.cluster, guest).await?;
        drivers::start_guest(run, &state, name, 1).await?;
    }
    step.done();
    Ok(())
}

/// Connects the node with the API server of the management cluster, VMs with that of their guest, and the host with kubelets.
async fn connect(run: &Run, node: &Node, plan: &Plan) -> Result<()> {
    vm::network::create(run, Host::default()).await?;
    vm::network::add_host_address(run).await?;
    let state = run.state()?;
    let machine = |(name, vm): &(String, VmRecord)| {
        let guest = state.guests.get(&vm.guest).context("no guest")?;
        let (namespace, name) = (guest.namespace.clone(), name.clone());
        Ok(Machine { namespace, name, port: vm.kubelet_port })
    };
    let forwarded = Forwarded {
        to_host: vec![plan.management.api_port()],
        to_vms: node.ports().to_vec(),
        to_host_from_pods: plan.guests.iter().map(|guest| guest.plane.api_port()).collect(),
        to_kubevirt: plan.vms.iter().map(machine).collect::<Result<_>>()?,
        ..Forwarded::default()
    };
    vm::network::start(run, &forwarded).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lab_with_kubevirt_has_one_of_each_component() {
        let kubevirt = UpOptions { vm_manager: VmManager::KubeVirt, ..UpOptions::default() };
        assert!(kubevirt.check().is_ok());
        assert!(UpOptions { deployed: true, ..UpOptions::default() }.check().is_ok());
        for options in [
            UpOptions { deployed: true, ..kubevirt.clone() },
            UpOptions { infra_servers: 2, ..kubevirt.clone() },
            UpOptions { engine: Engine::Rbd, ..kubevirt.clone() },
        ] {
            assert!(options.check().unwrap_err().to_string().contains("leave out --deployed"));
        }
    }
}
