//! Many guests on one management tier: everything is attached for the first time, and then a rack fails: its machines are
//! off, and their disks move to others. Machines are simulated, and what gc-csi would write, the bench writes: what is
//! measured is mgmt-csi, the VM Operator's stand-in, the infra and the API server.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Args;
use crds::names;
use tests::Scenario;

use crate::cost::metered;
use crate::fleet::{Fleet, Machine};
use crate::floor::timed;
use crate::parts;
use crate::report::Report;

/// How large it is.
#[derive(Debug, Clone, Args)]
pub struct Size {
    /// Guest clusters; several numbers are measured one after the other, which shows how cost grows.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 5, 20])]
    guests: Vec<usize>,
    /// Machines of each guest.
    #[arg(long, default_value_t = 50)]
    machines: usize,
    /// Volumes of each machine.
    #[arg(long, default_value_t = 10)]
    volumes: usize,
    /// Volumes on the machines of the rack that fails, in the largest case; others move as large a part of all.
    #[arg(long, default_value_t = 500)]
    moving: usize,
}

/// The processes whose memory is told.
const PARTS: [&str; 5] = ["mgmt-csi", "vm-operator-shim", "storage-infra", "mgmt-apiserver", "mgmt-etcd"];

/// Runs the bench.
pub async fn run(report: &Report, size: &Size) -> Result<()> {
    let (report, size) = (report.clone(), size.clone());
    tests::run(move |s| async move { measure(&s, &report, &size).await }).await
}

async fn measure(s: &Arc<Scenario>, report: &Report, size: &Size) -> Result<()> {
    let most = size.guests.iter().copied().max().unwrap_or(1);
    for guests in &size.guests {
        let case = format!("guests{guests}");
        let (mut fleet, time) = timed(Fleet::make(&s.lab, *guests, size.machines, size.volumes)).await?;
        eprintln!("{case}: {} machines made in {time:?}", fleet.machines.len());
        let all: Vec<&Machine> = fleet.machines.iter().collect();
        let disks = all.len() * size.volumes;
        let ((orders, plugged), cost) = metered(&s.lab, disks, async {
            let orders = fleet.order(&all).await?;
            Ok((orders, fleet.settled(&all).await?))
        })
        .await?;
        let times: Vec<Duration> =
            plugged.iter().map(|((machine, _), at)| at.duration_since(orders[machine])).collect();
        report.times_of(&case, "everything attached", &times, &[]);
        report.cost(&format!("{case} all"), &cost);

        let rack = (size.moving * guests / most).div_ceil(guests * size.volumes).max(1);
        let moved = evacuate(&mut fleet, rack)?;
        let (away, stays): (Vec<&Machine>, Vec<&Machine>) =
            fleet.machines.iter().partition(|machine| machine.claims.is_empty());
        for machine in &away {
            fleet.switch(machine, true)?;
        }
        let ((orders, plugged), cost) = metered(&s.lab, moved.len(), async {
            // As gc-csi does after the out-of-service taint: out of the old machine, into the new one.
            fleet.order(&away).await?;
            let orders = fleet.order(&stays).await?;
            Ok((orders, fleet.settled(&stays).await?))
        })
        .await?;
        let times: Vec<Duration> = moved
            .iter()
            .map(|(machine, claim)| {
                plugged[&(machine.clone(), names::volume_entry(claim))].duration_since(orders[machine])
            })
            .collect();
        report.times_of(&case, "moved", &times, &[]);
        report.cost(&case, &cost);
        for (part, process) in parts::running(&s.lab)? {
            if PARTS.contains(&part.as_str()) {
                let memory = parts::resident(process)?;
                report.number(&case, &format!("{part} rss"), "MiB", memory.now as f64 / f64::from(1 << 20));
            }
        }

        for machine in &away {
            fleet.switch(machine, false)?;
        }
        let claims: Vec<Vec<String>> =
            fleet.machines.iter_mut().map(|machine| std::mem::take(&mut machine.claims)).collect();
        let all: Vec<&Machine> = fleet.machines.iter().collect();
        fleet.order(&all).await?;
        fleet.settled(&all).await?;
        for (machine, claims) in fleet.machines.iter_mut().zip(claims) {
            machine.claims = claims;
        }
        fleet.remove().await?;
    }
    Ok(())
}

/// Gives the claims of the first so many machines of each guest to its other machines, in turn; tells where each went.
fn evacuate(fleet: &mut Fleet<'_>, rack: usize) -> Result<Vec<(String, String)>> {
    let mut moved = Vec::new();
    let mut guests: std::collections::BTreeMap<String, Vec<usize>> = Default::default();
    for (index, machine) in fleet.machines.iter().enumerate() {
        guests.entry(machine.namespace.clone()).or_default().push(index);
    }
    for machines in guests.into_values() {
        ensure!(machines.len() > rack, "a rack of {rack} machines leaves none of {}", machines.len());
        let (away, stay) = machines.split_at(rack);
        let claims: Vec<String> =
            away.iter().flat_map(|index| std::mem::take(&mut fleet.machines[*index].claims)).collect();
        for (claim, index) in claims.into_iter().zip(stay.iter().cycle()) {
            let machine = &mut fleet.machines[*index];
            moved.push((machine.name.clone(), claim.clone()));
            machine.claims.push(claim);
        }
    }
    Ok(moved)
}
