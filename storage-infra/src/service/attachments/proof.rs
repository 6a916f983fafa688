//! The proof that a disk is free, after its hypervisor said that it is unplugged: an attachment is forgotten by nothing less.

use std::time::{Duration, Instant};

use infra_api::NodeState;

use super::{Parts, describe};
use crate::engine::image_lock::{Holder, holder};
use crate::engine::{DiskSource, EngineError};
use crate::hypervisor::libvirt::LIBVIRT;
use crate::hypervisor::{Disk, Power, Unplugged};
use crate::service::{Result, Service};

/// How long QEMU may take to close the image of a disk that has left.
const CLOSING: Duration = Duration::from_secs(3);
/// How long the pool's filesystem may take to say who has the image.
const ANSWER: Duration = Duration::from_secs(5);

impl Service {
    /// Whether a disk that its hypervisor calls unplugged is free. libvirt may have lost a QEMU that runs on, and call its
    /// VM off; or the VM is saved, or ran elsewhere.
    pub(super) async fn prove_unplugged(&self, parts: &Parts, disk: &Disk) -> Result<Unplugged> {
        let hypervisor = self.hypervisor(&parts.node.spec.hypervisor)?;
        if hypervisor.kind() != LIBVIRT {
            return Ok(Unplugged::Gone);
        }
        let seen = hypervisor
            .presence(parts.row.node, std::slice::from_ref(disk))
            .await
            .map_err(|error| describe(error, parts))?;
        if seen.disks.contains(&disk.uuid) {
            let why = format!("the VM {} has the disk {} again", parts.node.spec.name, disk.uuid);
            return Ok(Unplugged::StillThere(why));
        }
        match self.prove_off(&parts.node, &seen.facts).await? {
            Unplugged::Gone => self.prove_closed(parts, disk, seen.facts.power).await,
            still_there => Ok(still_there),
        }
    }

    /// Whether no QEMU has the disk's image open. Others that share the volume have it by right.
    async fn prove_closed(&self, parts: &Parts, disk: &Disk, power: Power) -> Result<Unplugged> {
        let volume = parts.volume.id.clone();
        let rows =
            self.0.catalog.read(move |tx| -> Result<_> { Ok(tx.attachments(None, Some(&volume))?) }).await?;
        if rows.iter().any(|row| row.id != parts.row.id) {
            return Ok(Unplugged::Gone);
        }
        let asked = self.still_open(parts, disk).await;
        let name = &parts.node.spec.name;
        Ok(match asked {
            Ok(None) => Unplugged::Gone,
            Ok(Some(holder)) => Unplugged::StillThere(format!(
                "the VM {name} is {} without the disk {}, as its hypervisor says, but {holder} has it: is that a QEMU that \
                 libvirt lost? End it, once it is certain that it is not needed",
                power.state(),
                disk.uuid
            )),
            // A QEMU that runs has said itself that it has let go of the disk.
            Err(_) if power.state() == NodeState::Running => Unplugged::Gone,
            Err(why) => Unplugged::StillThere(format!(
                "the VM {name} is {}, but it cannot be told whether a process has the disk {} still: {why}",
                power.state(),
                disk.uuid
            )),
        })
    }

    /// Who has the image of a disk that has left, after a while.
    async fn still_open(&self, parts: &Parts, disk: &Disk) -> Result<Option<Holder>, String> {
        let (start, mut pause) = (Instant::now(), Duration::from_millis(5));
        loop {
            match self.locked_by(parts, disk).await? {
                Some(found) if start.elapsed() > CLOSING => return Ok(Some(found)),
                Some(_) => tokio::time::sleep(pause).await,
                None => return Ok(None),
            }
            pause = (pause * 2).min(Duration::from_millis(200));
        }
    }

    async fn locked_by(&self, parts: &Parts, disk: &Disk) -> Result<Option<Holder>, String> {
        let DiskSource::File(path) = disk.source.clone();
        let ask = move |engine: &dyn crate::engine::Engine| {
            // Where the pool is not there, neither is the image.
            engine.inspect()?;
            let what = || format!("ask who has {}", path.display());
            holder(&path).map_err(|source| EngineError::Io { what: what(), source })
        };
        let asking = self.engine::<_, EngineError, _>(self.engine_of(&parts.pool), ask);
        let found = match tokio::time::timeout(ANSWER, asking).await {
            Ok(found) => found.map_err(|error| error.to_string())?,
            Err(_) => return Err(format!("{} does not answer within {ANSWER:?}", parts.pool.spec.path)),
        };
        // A loop device of this host is no VM's.
        Ok(found.filter(|holder| matches!(holder, Holder::Locked(_))))
    }
}
