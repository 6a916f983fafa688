//! libvirt hypervisor: virtual machines of a libvirt daemon, on this host or another, by URI.
//!
//! An attach may complete after its caller gave up, and a detach may report success while the disk is still attached.
//! So the live XML decides; it is read after a step that waits for the domain's job lock. A missing response from
//! libvirt is never taken as information about the domain.

mod connections;
mod listing;
mod paused;
mod virsh;
mod xml;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use process_kit::keyed_lock::KeyedLock;
use tokio::sync::Semaphore;
use uuid::Uuid;
use virt::connect::Connect;
use virt::domain::{
    Domain, DomainShutoffReason, DomainShutoffReasonEnum, DomainState, DomainStateEnum, DomainStateReason,
    DomainStateReasonEnum,
};
use virt::error::{Error, ErrorDomain, ErrorNumber};
use virt::sys;

use super::{
    AttachedDisk, DetachOutcome, Disk, Hypervisor, HypervisorError, NodeFacts, PausedVm, Power, Presence,
    Result,
};
use connections::Connections;
use xml::{AttachError, LiveDomain};

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
/// A disk name that no domain has: a request for it waits for the domain's job lock and changes nothing.
const NO_DISK: &str = "nestor-no-such-disk";

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

/// A domain's live state at one point in time.
struct Snapshot {
    power: Power,
    live: LiveDomain,
}

impl Snapshot {
    /// The snapshot of an inactive domain, which has no disks in its live state.
    fn inactive(power: Power) -> Self {
        Self { power, live: LiveDomain::default() }
    }

    fn is_running(&self) -> bool {
        matches!(self.power, Power::Running { .. })
    }
}

/// Power state of an inactive domain, from whether libvirt has a managed save image and why the domain stopped. `None`
/// if it migrated to another host. libvirt forgets the reason when the daemon restarts.
fn inactive_power(managed: bool, reason: &DomainStateReasonEnum) -> Option<Power> {
    let DomainStateReasonEnum::Known(DomainStateReason::Shutoff(DomainShutoffReasonEnum::Known(reason))) =
        reason
    else {
        return Some(if managed { Power::Saved { managed } } else { Power::Off { shut_down: false } });
    };
    match reason {
        _ if managed => Some(Power::Saved { managed }),
        DomainShutoffReason::Saved => Some(Power::Saved { managed }),
        DomainShutoffReason::Migrated => None,
        DomainShutoffReason::Shutdown | DomainShutoffReason::Destroyed => {
            Some(Power::Off { shut_down: true })
        }
        // "Failed" includes a failed restore from saved memory that still exists.
        DomainShutoffReason::Unknown
        | DomainShutoffReason::Crashed
        | DomainShutoffReason::Failed
        | DomainShutoffReason::FromSnapshot
        | DomainShutoffReason::Daemon => Some(Power::Off { shut_down: false }),
    }
}

/// Unknown unless the domain runs: only then was its XML read.
fn max_disks(now: &Snapshot) -> Option<u32> {
    now.is_running().then(|| now.live.max_disks())
}

/// Whether an error means that the request did not reach the daemon or its response was lost.
fn lost(connection: &Connect, error: &Error) -> bool {
    error.code().is_any(vec![ErrorNumber::NoConnect, ErrorNumber::InvalidConn, ErrorNumber::Rpc])
        || error.domain().is(ErrorDomain::Rpc)
        || !connection.is_alive().unwrap_or(false)
}

fn is(error: &Error, number: ErrorNumber) -> bool {
    error.code().is(number)
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

    /// Requests the detach of a disk. True if the domain does not have it any more.
    async fn request_detach(&self, node: Uuid, disk: Uuid) -> Result<bool> {
        let guard = self.changes.lock(node).await;
        self.with(move |session| {
            let _guard = guard;
            session.request_detach(node, disk)
        })
        .await
    }
}

/// A connection in use by one call.
struct Session {
    connection: Connect,
    uri: String,
    host: Option<Uuid>,
}

impl Session {
    fn error(&self, action: &str, error: &Error) -> HypervisorError {
        let text = format!("libvirt at {}: cannot {action}: {}", self.uri, error.message());
        if lost(&self.connection, error) {
            HypervisorError::Unreachable(text)
        } else {
            HypervisorError::Uncertain(text)
        }
    }

    /// Looks a domain up; `None` if libvirt has none with this UUID.
    fn domain(&self, node: Uuid) -> Result<Option<Domain>> {
        match self.connection.lookup_domain_by_uuid(node) {
            Ok(domain) => Ok(Some(domain)),
            Err(error) if is(&error, ErrorNumber::NoDomain) => Ok(None),
            Err(error) => Err(self.error(&format!("look up the domain {node}"), &error)),
        }
    }

    fn snapshot(&self, node: Uuid) -> Result<Snapshot> {
        let inactive = Snapshot::inactive;
        let Some(domain) = self.domain(node)? else { return Ok(inactive(Power::Gone)) };
        let active = |what| match domain.is_active() {
            Ok(active) => Ok(Some(active)),
            Err(error) if is(&error, ErrorNumber::NoDomain) => Ok(None),
            Err(error) => Err(self.error(what, &error)),
        };
        match active("read whether the domain runs")? {
            None => return Ok(inactive(Power::Gone)),
            Some(false) => return self.inactive_power(node, &domain),
            Some(true) => {}
        }
        let executing = matches!(domain.state(), Ok((DomainStateEnum::Known(DomainState::Running), _)));
        let text = match domain.xml_desc(0) {
            Ok(text) => text,
            Err(error) if is(&error, ErrorNumber::NoDomain) => return Ok(inactive(Power::Gone)),
            Err(error) => return Err(self.error(&format!("read the domain {node}"), &error)),
        };
        // If the domain stopped meanwhile, the XML is its configuration and not its live state.
        match active("read whether the domain still runs")? {
            None => Ok(inactive(Power::Gone)),
            Some(false) => self.inactive_power(node, &domain),
            Some(true) => {
                let live = LiveDomain::parse(&text).map_err(|why| {
                    HypervisorError::Uncertain(format!("the XML of domain {node} cannot be read: {why}"))
                })?;
                Ok(Snapshot { power: Power::Running { executing }, live })
            }
        }
    }

    /// Snapshot of an inactive domain. One that was saved or has migrated resumes with the disks it had, so they stay
    /// in use.
    fn inactive_power(&self, node: Uuid, domain: &Domain) -> Result<Snapshot> {
        match (domain.has_managed_save(0), domain.state()) {
            (Ok(managed), Ok((_, reason))) => match inactive_power(managed, &reason) {
                Some(power) => Ok(Snapshot::inactive(power)),
                None => Err(HypervisorError::Uncertain(format!(
                    "libvirt at {}: the domain {node} has migrated to another host with its disks; register the node with the \
                     hypervisor that runs it now",
                    self.uri
                ))),
            },
            (Err(error), _) | (_, Err(error)) if is(&error, ErrorNumber::NoDomain) => {
                Ok(Snapshot::inactive(Power::Gone))
            }
            (Err(error), _) | (_, Err(error)) => {
                Err(self.error(&format!("read why the domain {node} stopped"), &error))
            }
        }
    }

    fn facts(&self, power: Power, max_disks: Option<u32>) -> NodeFacts {
        NodeFacts { power, max_disks, host: self.host }
    }

    fn power_off(&self, node: Uuid) -> Result<()> {
        let Some(domain) = self.domain(node)? else { return Ok(()) };
        let what = format!("power off the domain {node}");
        let ignore_inactive = |error: Error| match error.code() {
            code if code.is_any(vec![ErrorNumber::NoDomain, ErrorNumber::OperationInvalid]) => Ok(()),
            _ => Err(self.error(&what, &error)),
        };
        if domain.is_active().map_err(|e| self.error(&what, &e))? {
            domain.destroy().or_else(ignore_inactive)?;
        }
        if domain.has_managed_save(0).unwrap_or(false) {
            domain.managed_save_remove(0).or_else(ignore_inactive)?;
        }
        match self.snapshot(node)?.power {
            Power::Running { .. } => Err(HypervisorError::Uncertain(format!(
                "libvirt at {}: the domain {node} was powered off and runs again; disable whatever restarts it",
                self.uri
            ))),
            // It may have saved its memory to a file; callers that free its disks check that.
            Power::Off { .. } | Power::Saved { .. } | Power::Gone => Ok(()),
        }
    }

    /// A snapshot that is later than every change that libvirt started before this call: an attach whose caller is gone
    /// may still be running and holds the domain's job lock.
    fn snapshot_after_jobs(&self, node: Uuid) -> Result<Snapshot> {
        if let Some(domain) = self.domain(node)?
            && domain.is_active().map_err(|e| self.error("read whether the domain runs", &e))?
        {
            match domain.block_resize(NO_DISK, 1 << 20, sys::VIR_DOMAIN_BLOCK_RESIZE_BYTES) {
                Ok(()) => {}
                Err(error) if is(&error, ErrorNumber::OperationTimeout) || lost(&self.connection, &error) => {
                    return Err(self.error(&format!("wait for a running job of the domain {node}"), &error));
                }
                // "No such disk": the lock was acquired, which is all this request is for.
                Err(_) => {}
            }
        }
        self.snapshot(node)
    }

    fn attach(&self, node: Uuid, disk: &Disk) -> Result<()> {
        let before = self.snapshot(node)?;
        if before.live.find(disk.uuid).is_some() {
            return Ok(());
        }
        let not_running = |power: Power| {
            let state = power.state();
            HypervisorError::NotRunning(format!("libvirt at {}: the domain {node} is {state}", self.uri))
        };
        if !before.is_running() {
            return Err(not_running(before.power));
        }
        let text = before.live.disk_xml(disk).map_err(|why| match why {
            AttachError::NoFreeSlot(why) => HypervisorError::Full(format!("domain {node}: {why}")),
            AttachError::Unsupported(why) => HypervisorError::Refused(format!("domain {node}: {why}")),
        })?;
        let Some(domain) = self.domain(node)? else { return Err(not_running(Power::Gone)) };
        let outcome = domain.attach_device_flags(&text, sys::VIR_DOMAIN_AFFECT_LIVE);
        if let Err(error) = &outcome
            && lost(&self.connection, error)
        {
            return Err(self.error(&format!("attach the disk {} to domain {node}", disk.uuid), error));
        }
        let after = self.snapshot_after_jobs(node)?;
        if !after.is_running() {
            // It may have been saved with the disk attached.
            return Err(HypervisorError::Uncertain(not_running(after.power).to_string()));
        }
        match (after.live.find(disk.uuid), outcome) {
            (Some(_), _) => Ok(()),
            (None, Ok(())) => Err(HypervisorError::Refused(format!(
                "libvirt at {} reported that it attached the disk {} to domain {node}, and the domain does not have it",
                self.uri, disk.uuid
            ))),
            (None, Err(error)) => Err(HypervisorError::Refused(format!(
                "libvirt at {} refused to attach the disk {} to domain {node}: {}",
                self.uri,
                disk.uuid,
                error.message()
            ))),
        }
    }

    /// Requests the detach of a disk. True if the domain does not have it any more.
    fn request_detach(&self, node: Uuid, disk: Uuid) -> Result<bool> {
        let now = self.snapshot_after_jobs(node)?;
        let Some(found) = now.live.find(disk) else { return Ok(true) };
        let Some(domain) = self.domain(node)? else { return Ok(true) };
        match domain.detach_device_flags(&found.xml, sys::VIR_DOMAIN_AFFECT_LIVE) {
            Ok(()) => {}
            Err(error) if lost(&self.connection, &error) => {
                return Err(self.error(&format!("detach the disk {disk} from domain {node}"), &error));
            }
            // The disk is being detached or is gone: the live XML decides.
            Err(error) => tracing::debug!(%node, %disk, error = error.message(), "detach request failed"),
        }
        Ok(self.snapshot(node)?.live.find(disk).is_none())
    }

    fn resize(&self, node: Uuid, disk: Uuid, bytes: u64) -> Result<()> {
        let now = self.snapshot(node)?;
        if !now.is_running() {
            return Err(HypervisorError::NotRunning(format!("the domain {node} is {}", now.power.state())));
        }
        let (Some(found), Some(domain)) = (now.live.find(disk), self.domain(node)?) else {
            return Err(HypervisorError::Refused(format!("the domain {node} does not have the disk {disk}")));
        };
        domain
            .block_resize(&found.target, bytes, sys::VIR_DOMAIN_BLOCK_RESIZE_BYTES)
            .map_err(|e| self.error(&format!("resize the disk {disk} of domain {node}"), &e))
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

    async fn describe_all(&self, nodes: &[Uuid]) -> Result<HashMap<Uuid, NodeFacts>> {
        let nodes = nodes.to_vec();
        self.with(move |session| session.describe_all(&nodes)).await
    }

    async fn presence(&self, node: Uuid, disks: &[Disk]) -> Result<Presence> {
        let (now, host) = self.snapshot(node).await?;
        let disks =
            disks.iter().map(|disk| disk.uuid).filter(|uuid| now.live.find(*uuid).is_some()).collect();
        let facts = NodeFacts { power: now.power, max_disks: max_disks(&now), host };
        Ok(Presence { facts, disks })
    }

    async fn attached_disks(&self) -> Result<Vec<AttachedDisk>> {
        self.with(Session::attached_disks).await
    }

    async fn attach(&self, node: Uuid, disk: &Disk) -> Result<()> {
        let _guard = self.changes.lock(node).await;
        let disk = disk.clone();
        self.with(move |session| session.attach(node, &disk)).await
    }

    async fn detach(&self, node: Uuid, disk: &Disk) -> Result<DetachOutcome> {
        let uuid = disk.uuid;
        let (start, mut paused) = (Instant::now(), false);
        loop {
            match tokio::time::timeout(REQUEST_TIMEOUT, self.request_detach(node, uuid)).await {
                Ok(gone) => {
                    if gone? {
                        return Ok(DetachOutcome::Detached);
                    }
                }
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
