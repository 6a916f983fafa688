//! `vms`: the guest's VirtualMachines and the number of their disks.

use crds::{VirtualMachine, names};
use kube::ResourceExt;
use serde::Serialize;

use super::{List, Row, or_dash, read, show};
use crate::cli::Format;
use crate::clusters::Clusters;
use crate::error::Error;

const HEAD: [&str; 8] = ["VM", "POWER", "REQUESTED", "ATTACHED", "FAILED", "ZONE", "UUID", "GUEST"];

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Machine {
    name: String,
    power_state: Option<String>,
    requested: usize,
    attached: usize,
    failed: usize,
    zone: Option<String>,
    uuid: Option<String>,
    cluster_id: Option<String>,
}

impl Row for Machine {
    fn cells(&self) -> Vec<String> {
        vec![
            self.name.clone(),
            or_dash(self.power_state.clone()),
            self.requested.to_string(),
            self.attached.to_string(),
            self.failed.to_string(),
            or_dash(self.zone.clone()),
            or_dash(self.uuid.clone()),
            or_dash(self.cluster_id.clone()),
        ]
    }
}

/// Lists the VMs of the guest's management namespace.
pub async fn run(clusters: &Clusters, output: Format) -> Result<bool, Error> {
    let machines = read::machines(clusters.management_for("vms")?).await?;
    let rows: Vec<Machine> = machines.iter().map(machine).collect();
    show(output, &List { head: &HEAD, narrow: 6, unseen: Vec::new() }, &rows).map(|()| true)
}

fn machine(vm: &VirtualMachine) -> Machine {
    let status = vm.status.clone().unwrap_or_default();
    Machine {
        name: vm.name_any(),
        requested: vm.spec.volumes.iter().filter(|entry| entry.persistent_volume_claim.is_some()).count(),
        attached: status.volumes.iter().filter(|disk| disk.attached).count(),
        failed: status.volumes.iter().filter(|disk| disk.error.is_some()).count(),
        uuid: crds::node_uuid(&status),
        power_state: status.power_state,
        zone: status.zone,
        cluster_id: vm.labels().get(names::LABEL_CLUSTER_ID).cloned(),
    }
}
