//! Hypervisor `libvirt`: real virtual machines, on this host or another, by URI.
//!
//! Rules learned from how libvirt behaves: an attach may complete after its caller gave up; a detach may say success
//! while the disk is still there. So the live XML decides, read after a step that waits for the domain's own job
//! lock; and no answer from libvirt never counts as an answer about the domain.

mod xml;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use infra_api::NodeState;
use uuid::Uuid;
use virt::connect::Connect;
use virt::domain::Domain;
use virt::error::{Error, ErrorDomain, ErrorNumber};
use virt::sys;

use super::{Disk, Hypervisor, HypervisorError, Presence, Result, Unplugged};
use xml::LiveDomain;

/// How long an unplug waits for the guest to let a disk go before it reports that it is still there.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often the guest is asked again meanwhile.
const ASK_AGAIN: Duration = Duration::from_secs(8);
/// A disk that no domain has, to wait for a domain's job lock without changing anything.
const NO_DISK: &str = "nestor-no-such-disk";

/// A libvirt daemon.
pub struct Libvirt {
    uri: String,
    connection: Arc<Mutex<Option<Arc<Connect>>>>,
    // Choosing a free place and plugging into it are two steps.
    nodes: Mutex<HashMap<Uuid, Arc<tokio::sync::Mutex<()>>>>,
}

/// A domain's live state at one moment.
struct Snapshot {
    state: NodeState,
    live: LiveDomain,
}

static EVENTS: Once = Once::new();

/// Runs libvirt's event loop, which sends the keep-alives that tell a dead connection from a slow one.
fn start_event_loop() {
    EVENTS.call_once(|| {
        // Errors are told by whoever gets them; libvirt would print each to the process's own output besides.
        virt::error::clear_error_callback();
        if let Err(error) = virt::event::event_register_default_impl() {
            tracing::warn!(%error, "libvirt has no event loop: dead connections are noticed late");
            return;
        }
        let run = || {
            loop {
                if let Err(error) = virt::event::event_run_default_impl() {
                    tracing::warn!(%error, "libvirt's event loop");
                }
            }
        };
        if let Err(error) = std::thread::Builder::new().name("libvirt-events".into()).spawn(run) {
            tracing::warn!(%error, "libvirt's event loop cannot be started");
        }
    });
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
        Self { uri: uri.into(), connection: Arc::default(), nodes: Mutex::default() }
    }

    /// Runs blocking calls with a connection that lives, opening one where needed.
    async fn with<T, F>(&self, work: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&Session) -> Result<T> + Send + 'static,
    {
        let (uri, slot) = (self.uri.clone(), self.connection.clone());
        let task = tokio::task::spawn_blocking(move || {
            let session = Session { connection: connect(&uri, &slot)?, uri };
            let result = work(&session);
            if let Err(HypervisorError::Unreachable(_)) = &result {
                // The next call opens a new connection.
                let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
                if slot.as_ref().is_some_and(|held| Arc::ptr_eq(held, &session.connection)) {
                    *slot = None;
                }
            }
            result
        });
        task.await
            .unwrap_or_else(|e| Err(HypervisorError::Uncertain(format!("a libvirt call broke off: {e}"))))
    }

    async fn snapshot(&self, node: Uuid) -> Result<Snapshot> {
        self.with(move |session| session.snapshot(node)).await
    }

    fn node(&self, node: Uuid) -> Arc<tokio::sync::Mutex<()>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner).entry(node).or_default().clone()
    }
}

fn connect(uri: &str, slot: &Mutex<Option<Arc<Connect>>>) -> Result<Arc<Connect>> {
    start_event_loop();
    let held = slot.lock().unwrap_or_else(PoisonError::into_inner).clone();
    if let Some(connection) = held.filter(|held| held.is_alive().unwrap_or(false)) {
        return Ok(connection);
    }
    let unreachable = |e: Error| HypervisorError::Unreachable(format!("libvirt at {uri}: {}", e.message()));
    let fresh = Arc::new(Connect::open(Some(uri)).map_err(unreachable)?);
    // Some drivers have no keep-alive; their connections are local and break by themselves.
    if let Err(error) = fresh.set_keep_alive(5, 3) {
        tracing::debug!(%error, %uri, "no keep-alive");
    }
    tracing::info!(%uri, "connected to libvirt");
    *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(fresh.clone());
    Ok(fresh)
}

/// One connection in use.
struct Session {
    connection: Arc<Connect>,
    uri: String,
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
        let bare = |state| Snapshot { state, live: LiveDomain::default() };
        let Some(domain) = self.domain(node)? else { return Ok(bare(NodeState::Gone)) };
        let active = |what| match domain.is_active() {
            Ok(active) => Ok(Some(active)),
            Err(error) if is(&error, ErrorNumber::NoDomain) => Ok(None),
            Err(error) => Err(self.error(what, &error)),
        };
        match active("read whether the domain runs")? {
            None => return Ok(bare(NodeState::Gone)),
            Some(false) => return Ok(bare(NodeState::Off)),
            Some(true) => {}
        }
        let text = match domain.xml_desc(0) {
            Ok(text) => text,
            Err(error) if is(&error, ErrorNumber::NoDomain) => return Ok(bare(NodeState::Gone)),
            Err(error) => return Err(self.error(&format!("read the domain {node}"), &error)),
        };
        // The XML of a domain that went off meanwhile is its configuration, not what lives.
        match active("read whether the domain still runs")? {
            None => Ok(bare(NodeState::Gone)),
            Some(false) => Ok(bare(NodeState::Off)),
            Some(true) => {
                let live = LiveDomain::parse(&text).map_err(|why| {
                    HypervisorError::Uncertain(format!("the XML of domain {node} cannot be read: {why}"))
                })?;
                Ok(Snapshot { state: NodeState::Running, live })
            }
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
        let not_running = |state| {
            HypervisorError::NotRunning(format!("libvirt at {}: the domain {node} is {state}", self.uri))
        };
        if before.state != NodeState::Running {
            return Err(not_running(before.state));
        }
        let text = before
            .live
            .disk_xml(disk)
            .map_err(|why| HypervisorError::Refused(format!("domain {node}: {why}")))?;
        let Some(domain) = self.domain(node)? else { return Err(not_running(NodeState::Gone)) };
        let outcome = domain.attach_device_flags(&text, sys::VIR_DOMAIN_AFFECT_LIVE);
        if let Err(error) = &outcome
            && lost(&self.connection, error)
        {
            return Err(self.error(&format!("plug the disk {} into domain {node}", disk.uuid), error));
        }
        let after = self.settled(node)?;
        if after.state != NodeState::Running {
            return Err(not_running(after.state));
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
        if now.state != NodeState::Running {
            return Err(HypervisorError::NotRunning(format!("the domain {node} is {}", now.state)));
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
        "libvirt"
    }

    async fn check(&self) -> Result<()> {
        self.with(|session| {
            session.connection.lib_version().map_err(|e| session.error("read the version", &e)).map(drop)
        })
        .await
    }

    async fn state(&self, node: Uuid) -> Result<NodeState> {
        Ok(self.snapshot(node).await?.state)
    }

    async fn presence(&self, node: Uuid, disks: &[Disk]) -> Result<Presence> {
        let now = self.snapshot(node).await?;
        let disks =
            disks.iter().map(|disk| disk.uuid).filter(|uuid| now.live.find(*uuid).is_some()).collect();
        Ok(Presence { state: now.state, disks })
    }

    async fn plug(&self, node: Uuid, disk: &Disk) -> Result<()> {
        let lock = self.node(node);
        let _guard = lock.lock().await;
        let disk = disk.clone();
        self.with(move |session| session.plug(node, &disk)).await
    }

    async fn unplug(&self, node: Uuid, disk: &Disk) -> Result<Unplugged> {
        let uuid = disk.uuid;
        let start = Instant::now();
        loop {
            if self.with(move |session| session.ask_to_go(node, uuid)).await? {
                return Ok(Unplugged::Gone);
            }
            let asked = Instant::now();
            let mut pause = Duration::from_millis(20);
            while asked.elapsed() < ASK_AGAIN {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(Duration::from_millis(500));
                if self.snapshot(node).await?.live.find(uuid).is_none() {
                    return Ok(Unplugged::Gone);
                }
            }
            if start.elapsed() > PATIENCE {
                return Ok(Unplugged::StillThere(format!(
                    "domain {node} was asked to release the disk {uuid} and has it still after {} s; \
                     is the machine paused, or without ACPI?",
                    start.elapsed().as_secs()
                )));
            }
        }
    }

    async fn resize(&self, node: Uuid, disk: &Disk, bytes: u64) -> Result<()> {
        let uuid = disk.uuid;
        self.with(move |session| session.resize(node, uuid, bytes)).await
    }
}
