//! Hypervisor `libvirt`: real virtual machines, on this host or another, by URI.
//!
//! Rules learned from how libvirt behaves: an attach may complete after its caller gave up; a detach may say success
//! while the disk is still there. So the live XML decides, read after a step that waits for the domain's own job
//! lock; and no answer from libvirt never counts as an answer about the domain.

mod connections;
mod listing;
mod stalled;
mod virsh;
mod xml;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
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
    Disk, Hypervisor, HypervisorError, NodeFacts, Plugged, Power, Presence, Result, Stalled, Unplugged,
};
use connections::{Connections, Turns};
use xml::{LiveDomain, NoPlace};

/// The kind, as in the server's flags.
pub const LIBVIRT: &str = "libvirt";

/// How long an unplug waits for the guest to let a disk go before it reports that it is still there.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long libvirt may take to answer such a request. It never does while the QEMU process itself stands still.
const ANSWER: Duration = Duration::from_secs(20);
/// How often the guest is asked again meanwhile.
const ASK_AGAIN: Duration = Duration::from_secs(8);
/// How many calls run at once, besides those that switch a machine off, and the check.
const AT_ONCE: usize = 32;
/// A disk that no domain has, to wait for a domain's job lock without changing anything.
const NO_DISK: &str = "nestor-no-such-disk";

/// A libvirt daemon.
pub struct Libvirt {
    uri: String,
    connections: Connections,
    /// Who may call now.
    calls: Arc<Semaphore>,
    /// A check that hangs must have ended before another is begun: whether the daemon answers is asked for again and again.
    checks: Arc<tokio::sync::Mutex<()>>,
    // Choosing a free place and plugging into it are two steps; and a request that hangs must have ended before another
    // is made, lest it is carried out on what came after it.
    changes: Turns,
    // A look that hangs must have ended before another is begun, or each would keep a thread and a connection.
    looks: Turns,
}

/// A domain's live state at one moment.
struct Snapshot {
    power: Power,
    live: LiveDomain,
}

impl Snapshot {
    /// Of a domain that does not run, so has no disks in its live state.
    fn bare(power: Power) -> Self {
        Self { power, live: LiveDomain::default() }
    }

    fn is_running(&self) -> bool {
        matches!(self.power, Power::Running { .. })
    }
}

/// How a domain is that does not run, by whether libvirt keeps its saved memory and by why it stopped. None where it went
/// to another host. libvirt forgets the reason when it is started anew.
fn at_rest(kept: bool, reason: &DomainStateReasonEnum) -> Option<Power> {
    let DomainStateReasonEnum::Known(DomainStateReason::Shutoff(DomainShutoffReasonEnum::Known(reason))) =
        reason
    else {
        return Some(if kept { Power::Saved { kept } } else { Power::Off { ended: false } });
    };
    match reason {
        _ if kept => Some(Power::Saved { kept }),
        DomainShutoffReason::Saved => Some(Power::Saved { kept }),
        DomainShutoffReason::Migrated => None,
        DomainShutoffReason::Shutdown | DomainShutoffReason::Destroyed => Some(Power::Off { ended: true }),
        // One that failed may have failed to go on from its saved memory, which is still there.
        DomainShutoffReason::Unknown
        | DomainShutoffReason::Crashed
        | DomainShutoffReason::Failed
        | DomainShutoffReason::FromSnapshot
        | DomainShutoffReason::Daemon => Some(Power::Off { ended: false }),
    }
}

/// Only a running domain's XML was read.
fn max_disks(now: &Snapshot) -> Option<u32> {
    now.is_running().then(|| now.live.max_disks())
}

/// Whether an error means that the daemon was not asked, or that its answer was lost.
fn lost(connection: &Connect, error: &Error) -> bool {
    error.code().is_any(vec![ErrorNumber::NoConnect, ErrorNumber::InvalidConn, ErrorNumber::Rpc])
        || error.domain().is(ErrorDomain::Rpc)
        || !connection.is_alive().unwrap_or(false)
}

fn is(error: &Error, number: ErrorNumber) -> bool {
    error.code().is(number)
}

impl Libvirt {
    /// The daemon at this URI. Connects when it is first needed.
    pub fn new(uri: impl Into<String>) -> Self {
        let uri = uri.into();
        Self {
            connections: Connections::new(&uri),
            uri,
            calls: Arc::new(Semaphore::new(AT_ONCE)),
            checks: Arc::default(),
            changes: Turns::default(),
            looks: Turns::default(),
        }
    }

    /// Runs blocking calls, at most so many at once: those that hang must not take every thread there is.
    async fn with<T, F>(&self, work: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&Session) -> Result<T> + Send + 'static,
    {
        let turn = self.calls.clone().acquire_owned().await;
        self.connections
            .run(move |session| {
                let _turn = turn;
                work(session)
            })
            .await
    }

    /// A domain's live state, and the host that says so.
    async fn snapshot(&self, node: Uuid) -> Result<(Snapshot, Option<Uuid>)> {
        let turn = self.looks.wait(node).await;
        self.with(move |session| {
            let _turn = turn;
            Ok((session.snapshot(node)?, session.host))
        })
        .await
    }

    /// Asks a domain to let a disk go. True when it does not have it any more.
    async fn ask_to_go(&self, node: Uuid, disk: Uuid) -> Result<bool> {
        let turn = self.changes.wait(node).await;
        self.with(move |session| {
            let _turn = turn;
            session.ask_to_go(node, disk)
        })
        .await
    }
}

/// One connection in use.
struct Session {
    connection: Connect,
    uri: String,
    host: Option<Uuid>,
}

impl Session {
    fn error(&self, what: &str, error: &Error) -> HypervisorError {
        let text = format!("libvirt at {}: cannot {what}: {}", self.uri, error.message());
        if lost(&self.connection, error) {
            HypervisorError::Unreachable(text)
        } else {
            HypervisorError::Uncertain(text)
        }
    }

    /// The domain, or `None` where libvirt answers that it has none of this UUID.
    fn domain(&self, node: Uuid) -> Result<Option<Domain>> {
        match self.connection.lookup_domain_by_uuid(node) {
            Ok(domain) => Ok(Some(domain)),
            Err(error) if is(&error, ErrorNumber::NoDomain) => Ok(None),
            Err(error) => Err(self.error(&format!("look the domain {node} up"), &error)),
        }
    }

    fn snapshot(&self, node: Uuid) -> Result<Snapshot> {
        let bare = Snapshot::bare;
        let Some(domain) = self.domain(node)? else { return Ok(bare(Power::Gone)) };
        let active = |what| match domain.is_active() {
            Ok(active) => Ok(Some(active)),
            Err(error) if is(&error, ErrorNumber::NoDomain) => Ok(None),
            Err(error) => Err(self.error(what, &error)),
        };
        match active("read whether the domain runs")? {
            None => return Ok(bare(Power::Gone)),
            Some(false) => return self.at_rest(node, &domain),
            Some(true) => {}
        }
        let executing = matches!(domain.state(), Ok((DomainStateEnum::Known(DomainState::Running), _)));
        let text = match domain.xml_desc(0) {
            Ok(text) => text,
            Err(error) if is(&error, ErrorNumber::NoDomain) => return Ok(bare(Power::Gone)),
            Err(error) => return Err(self.error(&format!("read the domain {node}"), &error)),
        };
        // The XML of a domain that went off meanwhile is its configuration, not what lives.
        match active("read whether the domain still runs")? {
            None => Ok(bare(Power::Gone)),
            Some(false) => self.at_rest(node, &domain),
            Some(true) => {
                let live = LiveDomain::parse(&text).map_err(|why| {
                    HypervisorError::Uncertain(format!("the XML of domain {node} cannot be read: {why}"))
                })?;
                Ok(Snapshot { power: Power::Running { executing }, live })
            }
        }
    }

    /// A domain that does not run. One that was saved, or went to another host, will go on with the disks that it had, and
    /// so has them still.
    fn at_rest(&self, node: Uuid, domain: &Domain) -> Result<Snapshot> {
        match (domain.has_managed_save(0), domain.state()) {
            (Ok(kept), Ok((_, reason))) => match at_rest(kept, &reason) {
                Some(power) => Ok(Snapshot::bare(power)),
                None => Err(HypervisorError::Uncertain(format!(
                    "libvirt at {}: the domain {node} has gone to another host with its disks: register the node with the \
                     hypervisor that it is on now",
                    self.uri
                ))),
            },
            (Err(error), _) | (_, Err(error)) if is(&error, ErrorNumber::NoDomain) => {
                Ok(Snapshot::bare(Power::Gone))
            }
            (Err(error), _) | (_, Err(error)) => {
                Err(self.error(&format!("read how the domain {node} ended"), &error))
            }
        }
    }

    fn facts(&self, power: Power, max_disks: Option<u32>) -> NodeFacts {
        NodeFacts { power, max_disks, host: self.host }
    }

    fn power_off(&self, node: Uuid) -> Result<()> {
        let Some(domain) = self.domain(node)? else { return Ok(()) };
        let what = format!("switch the domain {node} off");
        let fine = |error: Error| match error.code() {
            code if code.is_any(vec![ErrorNumber::NoDomain, ErrorNumber::OperationInvalid]) => Ok(()),
            _ => Err(self.error(&what, &error)),
        };
        if domain.is_active().map_err(|e| self.error(&what, &e))? {
            domain.destroy().or_else(fine)?;
        }
        if domain.has_managed_save(0).unwrap_or(false) {
            domain.managed_save_remove(0).or_else(fine)?;
        }
        match self.snapshot(node)?.power {
            Power::Running { .. } => Err(HypervisorError::Uncertain(format!(
                "libvirt at {}: the domain {node} was switched off and runs again; is somebody starting it?",
                self.uri
            ))),
            // What it saved to a file may still be used; whoever wants its disks looks at that.
            Power::Off { .. } | Power::Saved { .. } | Power::Gone => Ok(()),
        }
    }

    /// A snapshot that is certainly later than every change which libvirt began before this call: an attach whose
    /// caller is gone may still be running, and holds the domain's job lock while it does.
    fn settled(&self, node: Uuid) -> Result<Snapshot> {
        if let Some(domain) = self.domain(node)?
            && domain.is_active().map_err(|e| self.error("read whether the domain runs", &e))?
        {
            match domain.block_resize(NO_DISK, 1 << 20, sys::VIR_DOMAIN_BLOCK_RESIZE_BYTES) {
                Ok(()) => {}
                Err(error) if is(&error, ErrorNumber::OperationTimeout) || lost(&self.connection, &error) => {
                    return Err(self.error(&format!("wait for the domain {node}, which is busy"), &error));
                }
                // "No such disk": the lock was had, and that is all this was for.
                Err(_) => {}
            }
        }
        self.snapshot(node)
    }

    fn plug(&self, node: Uuid, disk: &Disk) -> Result<()> {
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
            NoPlace::Full(why) => HypervisorError::Full(format!("domain {node}: {why}")),
            NoPlace::Unfit(why) => HypervisorError::Refused(format!("domain {node}: {why}")),
        })?;
        let Some(domain) = self.domain(node)? else { return Err(not_running(Power::Gone)) };
        let outcome = domain.attach_device_flags(&text, sys::VIR_DOMAIN_AFFECT_LIVE);
        if let Err(error) = &outcome
            && lost(&self.connection, error)
        {
            return Err(self.error(&format!("plug the disk {} into domain {node}", disk.uuid), error));
        }
        let after = self.settled(node)?;
        if !after.is_running() {
            // It may have been saved with the disk.
            return Err(HypervisorError::Uncertain(not_running(after.power).to_string()));
        }
        match (after.live.find(disk.uuid), outcome) {
            (Some(_), _) => Ok(()),
            (None, Ok(())) => Err(HypervisorError::Refused(format!(
                "libvirt at {} said that it plugged the disk {} into domain {node}, and the domain does not have it",
                self.uri, disk.uuid
            ))),
            (None, Err(error)) => Err(HypervisorError::Refused(format!(
                "libvirt at {} refused to plug the disk {} into domain {node}: {}",
                self.uri,
                disk.uuid,
                error.message()
            ))),
        }
    }

    /// Asks the domain to let the disk go. True when it does not have it any more.
    fn ask_to_go(&self, node: Uuid, disk: Uuid) -> Result<bool> {
        let now = self.settled(node)?;
        let Some(found) = now.live.find(disk) else { return Ok(true) };
        let Some(domain) = self.domain(node)? else { return Ok(true) };
        match domain.detach_device_flags(&found.xml, sys::VIR_DOMAIN_AFFECT_LIVE) {
            Ok(()) => {}
            Err(error) if lost(&self.connection, &error) => {
                return Err(self.error(&format!("unplug the disk {disk} from domain {node}"), &error));
            }
            // Already on its way out, or out: the live XML will tell.
            Err(error) => tracing::debug!(%node, %disk, error = error.message(), "detach"),
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
        let turn = self.checks.clone().lock_owned().await;
        let check = move |session: &Session| {
            let _turn = turn;
            session.connection.lib_version().map_err(|e| session.error("read the version", &e)).map(drop)
        };
        self.connections.run(check).await
    }

    async fn describe(&self, node: Uuid) -> Result<NodeFacts> {
        let (now, host) = self.snapshot(node).await?;
        Ok(NodeFacts { power: now.power, max_disks: max_disks(&now), host })
    }

    async fn survey(&self, nodes: &[Uuid]) -> Result<HashMap<Uuid, NodeFacts>> {
        let nodes = nodes.to_vec();
        self.with(move |session| session.survey(&nodes)).await
    }

    async fn presence(&self, node: Uuid, disks: &[Disk]) -> Result<Presence> {
        let (now, host) = self.snapshot(node).await?;
        let disks =
            disks.iter().map(|disk| disk.uuid).filter(|uuid| now.live.find(*uuid).is_some()).collect();
        let facts = NodeFacts { power: now.power, max_disks: max_disks(&now), host };
        Ok(Presence { facts, disks })
    }

    async fn plugged(&self) -> Result<Vec<Plugged>> {
        self.with(Session::plugged).await
    }

    async fn plug(&self, node: Uuid, disk: &Disk) -> Result<()> {
        let _turn = self.changes.wait(node).await;
        let disk = disk.clone();
        self.with(move |session| session.plug(node, &disk)).await
    }

    async fn unplug(&self, node: Uuid, disk: &Disk) -> Result<Unplugged> {
        let uuid = disk.uuid;
        let (start, mut paused) = (Instant::now(), false);
        loop {
            match tokio::time::timeout(ANSWER, self.ask_to_go(node, uuid)).await {
                Ok(gone) => {
                    if gone? {
                        return Ok(Unplugged::Gone);
                    }
                }
                Err(_) => {
                    return Ok(Unplugged::StillThere(format!(
                        "libvirt at {} was asked to take the disk {uuid} from domain {node}, and that has not ended after \
                         {} s: is its QEMU process hung?",
                        self.uri,
                        ANSWER.as_secs()
                    )));
                }
            }
            let asked = Instant::now();
            let mut pause = Duration::from_millis(20);
            while asked.elapsed() < ASK_AGAIN {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(Duration::from_millis(500));
                let (now, _) = self.snapshot(node).await?;
                if now.live.find(uuid).is_none() {
                    return Ok(Unplugged::Gone);
                }
                paused = matches!(now.power, Power::Running { executing: false });
            }
            if start.elapsed() > PATIENCE {
                return Ok(Unplugged::StillThere(format!(
                    "domain {node} was asked to release the disk {uuid} and has it still after {} s; {}",
                    start.elapsed().as_secs(),
                    if paused { "the machine is paused" } else { "is the machine hung, or without ACPI?" }
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

    async fn stalled(&self) -> Result<Vec<Stalled>> {
        let paused = self.with(Session::paused_for_errors).await?;
        let mut stalled = Vec::new();
        for one in paused {
            let errors = virsh::disk_errors(&self.uri, one.node).await?;
            stalled.push(one.stalled(&errors));
        }
        Ok(stalled)
    }

    async fn resume(&self, node: Uuid) -> Result<()> {
        self.with(move |session| session.resume(node)).await
    }

    async fn power_off(&self, node: Uuid) -> Result<()> {
        // Whatever hangs: nobody else may have the disks before.
        self.connections.run(move |session| session.power_off(node)).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_call_that_takes_long_has_a_connection_to_itself_and_what_is_idle_is_used_again() {
        // Libvirt's own driver for tests, in this process.
        let libvirt = Libvirt::new("test:///default");
        let idle = || libvirt.connections.idle();
        let (go_on, may_go_on) = std::sync::mpsc::channel();
        let long =
            libvirt.with(move |_| may_go_on.recv().map_err(|e| HypervisorError::Refused(e.to_string())));
        let short = async {
            libvirt.check().await.unwrap();
            libvirt.check().await.unwrap();
            assert_eq!(idle(), 1);
            go_on.send(()).unwrap();
        };
        let (long, ()) = tokio::join!(long, short);
        long.unwrap();
        assert_eq!(idle(), 2);
        let lost = libvirt.with(|_| Err::<(), _>(HypervisorError::Unreachable("gone".into())));
        lost.await.unwrap_err();
        assert_eq!(idle(), 1);
    }
    #[tokio::test]
    async fn calls_that_hang_keep_neither_a_check_nor_a_machine_from_being_switched_off() {
        let libvirt = Libvirt::new("test:///default");
        let _hung = libvirt.calls.clone().acquire_many_owned(AT_ONCE as u32).await.unwrap();
        let ordinary = libvirt.describe(Uuid::new_v4());
        tokio::time::timeout(Duration::from_millis(10), ordinary).await.unwrap_err();
        libvirt.check().await.unwrap();
        libvirt.power_off(Uuid::new_v4()).await.unwrap();
    }

    #[tokio::test]
    async fn a_check_waits_for_the_last_one_without_a_thread() {
        let libvirt = Libvirt::new("test:///default");
        let hung = libvirt.checks.clone().lock_owned().await;
        tokio::time::timeout(Duration::from_millis(10), libvirt.check()).await.unwrap_err();
        drop(hung);
        libvirt.check().await.unwrap();
    }
}
