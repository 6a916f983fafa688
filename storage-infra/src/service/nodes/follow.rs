//! VMs are followed from host to host. A VM that runs on another hypervisor than the recorded one, and provably no longer
//! there, has moved, for example by live migration. Its attachments move with it: its disks are neither detached nor attached.

use std::sync::Arc;
use std::time::Duration;

use infra_api::{Change, EventKind, NodeSpec, VolumeId};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::Nodes;
use crate::catalog::{NodeRow, PoolRow, Tx};
use crate::hypervisor::libvirt::LIBVIRT;
use crate::placement::Hosts;
use crate::service::problems::Result;
use crate::service::reach::unreached_volumes;

/// Interval between looks for VMs that moved. Events of the hypervisors trigger a look at once.
const INTERVAL: Duration = Duration::from_secs(2);

/// What became of a node whose VM runs on another hypervisor.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Outcome {
    /// It is recorded there.
    Moved,
    /// It stays where it is recorded, because it is not proven that the VM left with its disks, or the row has changed.
    Stays,
    /// It stays, because the other host does not reach these pools of its attachments.
    Unreached(Vec<String>),
}

/// The move of a node.
struct Move {
    uuid: Uuid,
    from: String,
    to: String,
    /// Whether the VM is proven to have left with its disks.
    is_proven: bool,
}

impl Move {
    fn write(self, tx: &Tx<'_>, hosts: &Hosts) -> Result<Outcome> {
        let Self { uuid, from, to, is_proven } = self;
        let Some(before) = tx.node(uuid)?.filter(|row| row.spec.hypervisor == from) else {
            return Ok(Outcome::Stays);
        };
        if !is_proven && !tx.attachments(Some(uuid), None)?.is_empty() {
            return Ok(Outcome::Stays);
        }
        let unreached = unreached_volumes(tx, hosts, uuid, &to)?;
        if !unreached.is_empty() {
            let text = |(volume, pool): &(VolumeId, PoolRow)| format!("{volume} in the pool {}", pool.name);
            return Ok(Outcome::Unreached(unreached.iter().map(text).collect()));
        }
        tx.put_node(&NodeRow { uuid, spec: NodeSpec { hypervisor: to, ..before.spec } })?;
        Ok(Outcome::Moved)
    }
}

impl Nodes {
    /// Follows VMs until stopped, with one loop per hypervisor, because one may stall.
    pub async fn run_follow(self: Arc<Self>, stop: CancellationToken) {
        let libvirt = self.hypervisors.iter().filter(|(_, one)| one.kind() == LIBVIRT);
        if libvirt.count() < 2 {
            // There is no other place to go to.
            return stop.cancelled().await;
        }
        let events = self.hypervisors.run_events(&stop);
        let looks = self.hypervisors.for_each(&stop, |name| self.look_for_arrivals(name, &stop));
        tokio::join!(events, looks);
    }

    async fn look_for_arrivals(&self, name: &str, stop: &CancellationToken) {
        loop {
            let looked =
                tokio::select! { () = stop.cancelled() => return, looked = self.look(name) => looked };
            if let Err(failure) = looked {
                tracing::debug!(hypervisor = name, %failure, "cannot look for VMs that moved here");
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.hypervisors.domains_changed(name) => {}
                () = tokio::time::sleep(INTERVAL) => {}
            }
        }
    }

    /// Moves the nodes that are recorded elsewhere and run on this hypervisor.
    async fn look(&self, name: &str) -> Result<()> {
        let running = self.hypervisors.get(name)?.running().await?;
        let rows = self.core.catalog().read(|tx| -> Result<_> { Ok(tx.nodes()?) }).await?;
        let arrived = |row: &&NodeRow| row.spec.hypervisor != name && running.contains(&row.uuid);
        for row in rows.iter().filter(arrived) {
            if let Err(failure) = self.follow(row, name).await {
                tracing::debug!(node = %row.uuid, hypervisor = name, %failure, "cannot follow the VM");
            }
        }
        Ok(())
    }

    async fn follow(&self, row: &NodeRow, to: &str) -> Result<()> {
        if self.current(row).await != to {
            return Ok(());
        }
        let (uuid, from, to) = (row.uuid, row.spec.hypervisor.clone(), to.to_owned());
        let there = NodeSpec { hypervisor: to.clone(), ..row.spec.clone() };
        let is_proven = self.has_moved(uuid, &there, Some(row)).await?.is_some();
        let (to_write, hosts) =
            (Move { uuid, from: from.clone(), to: to.clone(), is_proven }, self.core.hosts().clone());
        let outcome = self.core.catalog().run(move |tx| to_write.write(tx, &hosts)).await?;
        let name = &row.spec.name;
        match outcome {
            Outcome::Moved => {
                self.core.catalog().save_registered().await?;
                tracing::info!(node = %uuid, name, from, to, "the VM has moved to another hypervisor");
                self.core.emit(EventKind::Node, uuid, Change::Updated);
                self.hypervisors.search_now(&to);
            }
            Outcome::Stays => {}
            Outcome::Unreached(volumes) => tracing::error!(
                node = %uuid, name, from, to, volumes = volumes.join(", "),
                "the VM runs on a host that does not reach the pools of its volumes: whatever it has there as their disks is not \
                 their data. Migrate it back, or detach these volumes"
            ),
        }
        Ok(())
    }
}
