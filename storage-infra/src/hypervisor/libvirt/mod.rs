//! libvirt hypervisor: virtual machines of a libvirt daemon, on this host or another, by URI.
//!
//! An attach may complete after its caller gave up, and a detach may report success while the disk is still attached.
//! So the live XML decides; it is read after a step that waits for the domain's job lock. A missing response from
//! libvirt is never taken as information about the domain.

mod connections;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod keyring;
mod listing;
mod mirror;
mod paused;
mod session;
mod virsh;
mod xml;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use process_kit::keyed_lock::KeyedLock;
use tokio::sync::Semaphore;
use uuid::Uuid;

use super::{
    AttachedDisk, Changed, DetachOutcome, Disk, DiskSource, Hypervisor, HypervisorError, MirroredDisk,
    NodeFacts, PausedVm, Power, Presence, Result,
};
use connections::Connections;
use session::{Detach, Session, Snapshot, max_disks};

/// Kind of this hypervisor in the server's flags.
pub const LIBVIRT: &str = "libvirt";

/// How long a detach waits for the guest to release the disk before it reports the disk as still attached.
const DETACH_TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout of one detach request. libvirt never responds while the QEMU process itself hangs.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(20);
/// Interval between detach requests to the guest.
const REQUEST_INTERVAL: Duration = Duration::from_secs(8);
/// Maximum number of concurrent calls, not counting power-off and the health check.
const MAX_CONCURRENT_CALLS: usize = 32;

/// A libvirt daemon.
pub struct Libvirt {
    uri: String,
    connections: Connections,
    /// Limits concurrent calls.
    calls: Arc<Semaphore>,
    /// Serializes health checks: a check that hangs must not pile up others, since checks are periodic.
    checks: Arc<tokio::sync::Mutex<()>>,
    // Choosing a free slot and attaching a disk to it are two steps. A hanging request must end before the next starts,
    // or it would apply to the state after it.
    changes: KeyedLock<Uuid>,
    // A hanging read must end before the next starts, or each would occupy a thread and a connection.
    reads: KeyedLock<Uuid>,
}

impl Libvirt {
    /// The daemon at this URI. Connects on first use.
    pub fn new(uri: impl Into<String>) -> Self {
        let uri = uri.into();
        Self {
            connections: Connections::new(&uri),
            uri,
            calls: Arc::new(Semaphore::new(MAX_CONCURRENT_CALLS)),
            checks: Arc::default(),
            changes: KeyedLock::default(),
            reads: KeyedLock::default(),
        }
    }

    /// Runs blocking calls on a connection. Their number is limited, so that hanging calls cannot occupy every thread.
    async fn with<T, F>(&self, work: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&Session) -> Result<T> + Send + 'static,
    {
        let guard = self.calls.clone().acquire_owned().await;
        self.connections
            .run(move |session| {
                let _guard = guard;
                work(session)
            })
            .await
    }

    /// Reads a domain's live state, and the UUID of its host.
    async fn snapshot(&self, node: Uuid) -> Result<(Snapshot, Option<Uuid>)> {
        let guard = self.reads.lock(node).await;
        self.with(move |session| {
            let _guard = guard;
            Ok((session.snapshot(node)?, session.host))
        })
        .await
    }

    /// Requests the detach of a disk, and ends a copy of it first.
    async fn request_detach(&self, node: Uuid, disk: &Disk) -> Result<Detach> {
        let state = self.try_detach(node, disk).await?;
        if state != Detach::Copied {
            return Ok(state);
        }
        self.end_copy(node, disk.uuid).await?;
        self.try_detach(node, disk).await
    }

    async fn try_detach(&self, node: Uuid, disk: &Disk) -> Result<Detach> {
        let guard = self.changes.lock(node).await;
        let disk = disk.clone();
        self.with(move |session| {
            let _guard = guard;
            session.request_detach(node, &disk)
        })
        .await
    }

    /// Ends the copy of a disk, if one is running.
    async fn end_copy(&self, node: Uuid, disk: Uuid) -> Result<()> {
        let _guard = self.changes.lock(node).await;
        self.abort_copy(node, disk).await
    }
}

#[async_trait]
impl Hypervisor for Libvirt {
    fn kind(&self) -> &'static str {
        LIBVIRT
    }

    async fn check(&self) -> Result<()> {
        let guard = self.checks.clone().lock_owned().await;
        let check = move |session: &Session| {
            let _guard = guard;
            session.connection.lib_version().map_err(|e| session.error("read the version", &e)).map(drop)
        };
        self.connections.run(check).await
    }

    async fn describe(&self, node: Uuid) -> Result<NodeFacts> {
        let (now, host) = self.snapshot(node).await?;
        Ok(NodeFacts { power: now.power, max_disks: max_disks(&now), host })
    }

    async fn find(&self, node: Uuid) -> Result<Power> {
        Ok(self.describe(node).await?.power)
    }

    async fn describe_all(&self, nodes: &[Uuid]) -> Result<HashMap<Uuid, NodeFacts>> {
        let nodes = nodes.to_vec();
        self.with(move |session| session.describe_all(&nodes)).await
    }

    async fn running(&self) -> Result<HashSet<Uuid>> {
        self.with(Session::running).await
    }

    async fn follow_events(&self, changed: &(dyn Fn(Changed) + Send + Sync)) -> Result<()> {
        virsh::events(&self.uri, changed).await
    }

    async fn presence(&self, node: Uuid, disks: &[Disk]) -> Result<Presence> {
        let (now, host) = self.snapshot(node).await?;
        let found = |disk: &Disk| {
            let found = now.live.find_disk(disk)?;
            Some((disk.uuid, found.attached_to(node, &now.live)))
        };
        let disks = disks.iter().filter_map(found).collect();
        let facts = NodeFacts { power: now.power, max_disks: max_disks(&now), host };
        Ok(Presence { facts, disks })
    }

    async fn attached_disks(&self) -> Result<Vec<AttachedDisk>> {
        self.with(Session::attached_disks).await
    }

    async fn defined_disks(&self) -> Result<Vec<AttachedDisk>> {
        self.with(Session::defined_disks).await
    }

    async fn undefine(&self, node: Uuid, disk: &Disk) -> Result<()> {
        let _guard = self.changes.lock(node).await;
        let disk = disk.clone();
        self.with(move |session| session.undefine(node, &disk)).await
    }

    async fn attach(&self, node: Uuid, disk: &Disk) -> Result<AttachedDisk> {
        let _guard = self.changes.lock(node).await;
        let disk = disk.clone();
        self.with(move |session| session.attach(node, &disk)).await
    }

    async fn detach(&self, node: Uuid, disk: &Disk) -> Result<DetachOutcome> {
        let uuid = disk.uuid;
        let (start, mut paused) = (Instant::now(), false);
        loop {
            match tokio::time::timeout(REQUEST_TIMEOUT, self.request_detach(node, disk)).await {
                Ok(state) => match state? {
                    Detach::Gone => return Ok(DetachOutcome::Detached),
                    Detach::Requested | Detach::Copied => {}
                },
                Err(_) => {
                    return Ok(DetachOutcome::StillAttached(format!(
                        "libvirt at {} has not completed the request to detach the disk {uuid} from domain {node} after {} s; \
                         its QEMU process may hang",
                        self.uri,
                        REQUEST_TIMEOUT.as_secs()
                    )));
                }
            }
            let requested = Instant::now();
            let mut pause = Duration::from_millis(20);
            while requested.elapsed() < REQUEST_INTERVAL {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(Duration::from_millis(500));
                let (now, _) = self.snapshot(node).await?;
                if now.live.find(uuid).is_none() {
                    return Ok(DetachOutcome::Detached);
                }
                paused = matches!(now.power, Power::Running { executing: false });
            }
            if start.elapsed() > DETACH_TIMEOUT {
                return Ok(DetachOutcome::StillAttached(format!(
                    "domain {node} has not released the disk {uuid} after {} s; {}",
                    start.elapsed().as_secs(),
                    if paused { "it is paused" } else { "its guest may hang or lack ACPI support" }
                )));
            }
        }
    }

    async fn resize(&self, node: Uuid, disk: &Disk, bytes: u64) -> Result<()> {
        let uuid = disk.uuid;
        self.with(move |session| session.resize(node, uuid, bytes)).await
    }

    async fn throttle(&self, node: Uuid, disk: &Disk) -> Result<()> {
        let (now, _) = self.snapshot(node).await?;
        if !now.is_running() {
            return Err(HypervisorError::NotRunning(format!("the domain {node} is {}", now.power.state())));
        }
        let Some(found) = now.live.find(disk.uuid) else {
            return Err(HypervisorError::Refused(format!(
                "the domain {node} does not have the disk {}",
                disk.uuid
            )));
        };
        virsh::throttle(&self.uri, node, &found.target, &disk.qos).await
    }

    async fn paused_vms(&self) -> Result<Vec<PausedVm>> {
        let paused = self.with(Session::paused_for_errors).await?;
        let mut vms = Vec::new();
        for one in paused {
            let errors = virsh::disk_errors(&self.uri, one.node).await?;
            vms.push(one.into_paused_vm(&errors));
        }
        Ok(vms)
    }

    async fn resume(&self, node: Uuid) -> Result<()> {
        self.with(move |session| session.resume(node)).await
    }

    async fn pause(&self, node: Uuid) -> Result<()> {
        let _guard = self.changes.lock(node).await;
        self.with(move |session| session.pause(node)).await
    }

    async fn unpause(&self, node: Uuid) -> Result<()> {
        let _guard = self.changes.lock(node).await;
        self.with(move |session| session.unpause(node)).await
    }

    fn can_mirror(&self) -> bool {
        true
    }

    async fn mirrored(&self, node: Uuid, disk: &Disk) -> Result<MirroredDisk> {
        self.read_copy(node, disk.uuid).await
    }

    async fn start_mirror(&self, node: Uuid, disk: &Disk, to: &DiskSource, rate: Option<u64>) -> Result<()> {
        let _guard = self.changes.lock(node).await;
        self.start_copy(node, disk, to, rate).await
    }

    async fn set_mirror_rate(&self, node: Uuid, disk: &Disk, rate: Option<u64>) -> Result<()> {
        self.set_copy_rate(node, disk.uuid, rate).await
    }

    async fn pivot(&self, node: Uuid, disk: &Disk) -> Result<()> {
        let _guard = self.changes.lock(node).await;
        self.pivot_copy(node, disk.uuid).await
    }

    async fn cancel_mirror(&self, node: Uuid, disk: &Disk) -> Result<()> {
        self.end_copy(node, disk.uuid).await
    }

    async fn power_off(&self, node: Uuid) -> Result<()> {
        // Not limited like other calls: it must run even while others hang, since no other node can get the disks
        // before.
        self.connections.run(move |session| session.power_off(node)).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_long_call_has_its_own_connection_and_idle_connections_are_reused() {
        // libvirt's test driver, in this process.
        let libvirt = Libvirt::new("test:///default");
        let idle = || libvirt.connections.idle();
        let (release, released) = std::sync::mpsc::channel();
        let long =
            libvirt.with(move |_| released.recv().map_err(|e| HypervisorError::Refused(e.to_string())));
        let short = async {
            libvirt.check().await.unwrap();
            libvirt.check().await.unwrap();
            assert_eq!(idle(), 1);
            release.send(()).unwrap();
        };
        let (long, ()) = tokio::join!(long, short);
        long.unwrap();
        assert_eq!(idle(), 2);
        let lost = libvirt.with(|_| Err::<(), _>(HypervisorError::Unreachable("gone".into())));
        lost.await.unwrap_err();
        assert_eq!(idle(), 1);
    }
    #[tokio::test]
    async fn hanging_calls_block_neither_the_health_check_nor_power_off() {
        let libvirt = Libvirt::new("test:///default");
        let _hung = libvirt.calls.clone().acquire_many_owned(MAX_CONCURRENT_CALLS as u32).await.unwrap();
        let ordinary = libvirt.describe(Uuid::new_v4());
        tokio::time::timeout(Duration::from_millis(10), ordinary).await.unwrap_err();
        libvirt.check().await.unwrap();
        libvirt.power_off(Uuid::new_v4()).await.unwrap();
    }

    #[tokio::test]
    async fn a_health_check_waits_for_the_previous_one_without_a_thread() {
        let libvirt = Libvirt::new("test:///default");
        let hung = libvirt.checks.clone().lock_owned().await;
        tokio::time::timeout(Duration::from_millis(10), libvirt.check()).await.unwrap_err();
        drop(hung);
        libvirt.check().await.unwrap();
    }
}
