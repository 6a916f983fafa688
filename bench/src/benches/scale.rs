//! Bench: many guests on one management tier: first attach of all volumes, and then the failure of a rack: its VMs are off
//! and their disks move to other VMs. VMs are simulated, and the bench writes their specs in place of gc-csi, so that
//! mgmt-csi, vm-operator-shim, storage-infra and the API server are measured.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Args;
use crds::names;
use tests::Scenario;

use crate::cost::metered;
use crate::fleet::{Fleet, FleetVm};
use crate::floor::timed;
use crate::report::Report;
use crate::usage;

/// Size of the fleet.
#[derive(Debug, Clone, Args)]
pub struct Size {
    /// Number of guest clusters; several numbers are measured one after the other, which shows how the cost grows.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 5, 20])]
    guests: Vec<usize>,
    /// VMs per guest.
    #[arg(long, default_value_t = 50)]
    vms: usize,
    /// Volumes per VM.
    #[arg(long, default_value_t = 10)]
    volumes: usize,
    /// Volumes on the VMs of the failing rack in the largest case; the other cases move the same share.
    #[arg(long, default_value_t = 500)]
    moving: usize,
}

/// Components whose memory is reported.
const COMPONENTS: [&str; 5] =
    ["mgmt-csi", "vm-operator-shim", "storage-infra", "mgmt-apiserver", "mgmt-etcd"];

/// Runs the bench.
pub async fn run(report: &Report, size: &Size) -> Result<()> {
    let (report, size) = (report.clone(), size.clone());
    tests::run(move |s| async move { measure(&s, &report, &size).await }).await
}

async fn measure(s: &Arc<Scenario>, report: &Report, size: &Size) -> Result<()> {
    let most = size.guests.iter().copied().max().unwrap_or(1);
    for guests in &size.guests {
        let case = format!("guests{guests}");
        let (mut fleet, time) = timed(Fleet::make(&s.lab, *guests, size.vms, size.volumes)).await?;
        eprintln!("{case}: {} VMs created in {time:?}", fleet.vms.len());
        let all: Vec<&FleetVm> = fleet.vms.iter().collect();
        let disks = all.len() * size.volumes;
        let ((written, attached), cost) = metered(&s.lab, disks, async {
            let written = fleet.write_specs(&all).await?;
            Ok((written, fleet.settled(&all).await?))
        })
        .await?;
        let times: Vec<Duration> =
            attached.iter().map(|((vm, _), at)| at.duration_since(written[vm])).collect();
        report.times_of(&case, "everything attached", &times, &[]);
        report.cost(&format!("{case} all"), &cost);

        let rack = (size.moving * guests / most).div_ceil(guests * size.volumes).max(1);
        let moved = evacuate(&mut fleet, rack)?;
        let (away, stays): (Vec<&FleetVm>, Vec<&FleetVm>) =
            fleet.vms.iter().partition(|vm| vm.claims.is_empty());
        for vm in &away {
            fleet.set_power(vm, true)?;
        }
        let ((written, attached), cost) = metered(&s.lab, moved.len(), async {
            // Like gc-csi after the out-of-service taint: entries are removed from the old VM and added to the new one.
            fleet.write_specs(&away).await?;
            let written = fleet.write_specs(&stays).await?;
            Ok((written, fleet.settled(&stays).await?))
        })
        .await?;
        let times: Vec<Duration> = moved
            .iter()
            .map(|(vm, claim)| {
                attached[&(vm.clone(), names::volume_entry(claim))].duration_since(written[vm])
            })
            .collect();
        report.times_of(&case, "moved", &times, &[]);
        report.cost(&case, &cost);
        for (component, process) in usage::running(&s.lab)? {
            if COMPONENTS.contains(&component.as_str()) {
                let memory = usage::resident(process)?;
                report.number(
                    &case,
                    &format!("{component} rss"),
                    "MiB",
                    memory.now as f64 / f64::from(1 << 20),
                );
            }
        }

        for vm in &away {
            fleet.set_power(vm, false)?;
        }
        fleet.detach_all().await?;
        fleet.remove().await?;
    }
    Ok(())
}

/// Moves the claims of the first `rack` VMs of each guest to its other VMs in turn; returns the new VM of each claim.
fn evacuate(fleet: &mut Fleet<'_>, rack: usize) -> Result<Vec<(String, String)>> {
    let mut moved = Vec::new();
    let mut guests: std::collections::BTreeMap<String, Vec<usize>> = Default::default();
    for (index, vm) in fleet.vms.iter().enumerate() {
        guests.entry(vm.namespace.clone()).or_default().push(index);
    }
    for vms in guests.into_values() {
        ensure!(vms.len() > rack, "a rack of {rack} VMs leaves none of {}", vms.len());
        let (away, stay) = vms.split_at(rack);
        let claims: Vec<String> =
            away.iter().flat_map(|index| std::mem::take(&mut fleet.vms[*index].claims)).collect();
        for (claim, index) in claims.into_iter().zip(stay.iter().cycle()) {
            let vm = &mut fleet.vms[*index];
            moved.push((vm.name.clone(), claim.clone()));
            vm.claims.push(claim);
        }
    }
    Ok(moved)
}
