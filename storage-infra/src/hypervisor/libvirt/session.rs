//! Blocking calls on one connection, and what a domain's live state tells.

use base64::prelude::{BASE64_STANDARD, Engine as _};
use uuid::Uuid;
use virt::connect::Connect;
use virt::domain::{
    Domain, DomainPausedReason, DomainPausedReasonEnum, DomainShutoffReason, DomainShutoffReasonEnum,
    DomainState, DomainStateEnum, DomainStateReason, DomainStateReasonEnum,
};
use virt::error::{Error, ErrorDomain, ErrorNumber};
use virt::sys;

use super::keyring;
use super::xml::{AttachError, LiveDomain, secret_xml};
use crate::hypervisor::{
    AttachedDisk, CephClient, Difference, Disk, DiskSource, HypervisorError, NodeFacts, PauseReason, Power,
    RbdImage, RbdSource, Result,
};
use crate::lease::Lease;

/// What may be the reason of a refusal if an image is in a namespace: libvirt takes the namespace for a part of the
/// image's name, unless it knows namespaces.
fn in_namespace(source: &DiskSource) -> String {
    match source {
        DiskSource::Rbd(RbdSource { image: RbdImage { namespace: Some(namespace), .. }, .. }) => format!(
            "; the image is in the RADOS namespace {namespace}, and this libvirt may be one that cannot open images in \
             namespaces: give the pool a Ceph pool of its own instead"
        ),
        _ => String::new(),
    }
}

/// What became of a request to detach a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Detach {
    /// The domain does not have the disk.
    Gone,
    /// The guest has to release it.
    Requested,
    /// It is being copied: libvirt refuses to detach it until the copy is ended. Nothing was requested.
    Copied,
}

/// A disk name that no domain has: a request for it waits for the domain's job lock and changes nothing.
const NO_DISK: &str = "nestor-no-such-disk";

/// A domain's live state at one point in time.
pub(super) struct Snapshot {
    pub(super) power: Power,
    /// Why its CPUs stand still, if they do.
    pub(super) paused: Option<PauseReason>,
    pub(super) live: LiveDomain,
}

impl Snapshot {
    /// The snapshot of an inactive domain, which has no disks in its live state.
    fn inactive(power: Power) -> Self {
        Self { power, paused: None, live: LiveDomain::default() }
    }

    pub(super) fn is_running(&self) -> bool {
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

fn pause_reason(reason: &DomainStateReasonEnum) -> PauseReason {
    let DomainStateReasonEnum::Known(DomainStateReason::Paused(DomainPausedReasonEnum::Known(reason))) =
        reason
    else {
        return PauseReason::Other;
    };
    match reason {
        DomainPausedReason::User => PauseReason::Request,
        DomainPausedReason::IOError => PauseReason::IoError,
        _ => PauseReason::Other,
    }
}

/// Unknown unless the domain runs: only then was its XML read.
pub(super) fn max_disks(now: &Snapshot) -> Option<u32> {
    now.is_running().then(|| now.live.max_disks())
}

/// Whether an error means that the request did not reach the daemon or its response was lost.
fn lost(connection: &Connect, error: &Error) -> bool {
    error.code().is_any(vec![ErrorNumber::NoConnect, ErrorNumber::InvalidConn, ErrorNumber::Rpc])
        || error.domain().is(ErrorDomain::Rpc)
        || !connection.is_alive().unwrap_or(false)
}

pub(super) fn is(error: &Error, number: ErrorNumber) -> bool {
    error.code().is(number)
}

/// A connection in use by one call.
pub(super) struct Session {
    pub(super) connection: Connect,
    pub(super) uri: String,
    pub(super) host: Option<Uuid>,
    pub(super) lease: Lease,
}

impl Session {
    /// Fails unless the server may act now. Called last before a change is requested: reads before it may have waited long.
    pub(super) fn may_act(&self) -> Result<()> {
        Ok(self.lease.check()?)
    }

    pub(super) fn error(&self, action: &str, error: &Error) -> HypervisorError {
        let text = format!("libvirt at {}: cannot {action}: {}", self.uri, error.message());
        if lost(&self.connection, error) {
            HypervisorError::Unreachable(text)
        } else {
            HypervisorError::Uncertain(text)
        }
    }

    /// Looks a domain up; `None` if libvirt has none with this UUID.
    pub(super) fn domain(&self, node: Uuid) -> Result<Option<Domain>> {
        match self.connection.lookup_domain_by_uuid(node) {
            Ok(domain) => Ok(Some(domain)),
            Err(error) if is(&error, ErrorNumber::NoDomain) => Ok(None),
            Err(error) => Err(self.error(&format!("look up the domain {node}"), &error)),
        }
    }

    pub(super) fn snapshot(&self, node: Uuid) -> Result<Snapshot> {
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
        let state = domain.state();
        let executing = matches!(state, Ok((DomainStateEnum::Known(DomainState::Running), _)));
        let paused = state.ok().filter(|_| !executing).map(|(_, reason)| pause_reason(&reason));
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
                Ok(Snapshot { power: Power::Running { executing }, paused, live })
            }
        }
    }

    /// Snapshot of an inactive domain. One that was saved or has migrated resumes with the disks it had, so they stay
    /// in use.
    fn inactive_power(&self, node: Uuid, domain: &Domain) -> Result<Snapshot> {
        match (domain.has_managed_save(0), domain.state()) {
            (Ok(managed), Ok((_, reason))) => match inactive_power(managed, &reason) {
                Some(power) => Ok(Snapshot::inactive(power)),
                None => Err(HypervisorError::Migrated(format!(
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

    pub(super) fn facts(&self, power: Power, max_disks: Option<u32>) -> NodeFacts {
        NodeFacts { power, max_disks, host: self.host }
    }

    pub(super) fn power_off(&self, node: Uuid) -> Result<()> {
        let Some(domain) = self.domain(node)? else { return Ok(()) };
        let what = format!("power off the domain {node}");
        let ignore_inactive = |error: Error| match error.code() {
            code if code.is_any(vec![ErrorNumber::NoDomain, ErrorNumber::OperationInvalid]) => Ok(()),
            _ => Err(self.error(&what, &error)),
        };
        if domain.is_active().map_err(|e| self.error(&what, &e))? {
            self.may_act()?;
            domain.destroy().or_else(ignore_inactive)?;
        }
        if domain.has_managed_save(0).unwrap_or(false) {
            self.may_act()?;
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

    pub(super) fn attach(&self, node: Uuid, disk: &Disk) -> Result<AttachedDisk> {
        let before = self.snapshot(node)?;
        if let Some(found) = before.live.find_disk(disk) {
            return Ok(found.attached_to(node, &before.live));
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
        if let DiskSource::Rbd(source) = &disk.source {
            self.define_secret(&source.client)?;
        }
        self.may_act()?;
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
            (Some(found), _) => Ok(found.attached_to(node, &after.live)),
            (None, Ok(())) => Err(HypervisorError::Refused(format!(
                "libvirt at {} reported that it attached the disk {} to domain {node}, and the domain does not have it",
                self.uri, disk.uuid
            ))),
            (None, Err(error)) => Err(HypervisorError::Refused(format!(
                "libvirt at {} refused to attach the disk {} to domain {node}: {}{}",
                self.uri,
                disk.uuid,
                error.message(),
                in_namespace(&disk.source)
            ))),
        }
    }

    /// Gives the daemon the key of a Ceph client, which it keeps in memory only: a daemon that was restarted has
    /// forgotten it.
    fn define_secret(&self, client: &CephClient) -> Result<()> {
        let refused = |why: &str| {
            HypervisorError::Refused(format!(
                "libvirt at {}: the key of the Ceph client {} was not taken: {why}",
                self.uri, client.user
            ))
        };
        let key = keyring::key(client).map_err(HypervisorError::Refused)?;
        let key = BASE64_STANDARD.decode(key).map_err(|error| refused(&error.to_string()))?;
        let secret = self.connection.define_secret_xml(&secret_xml(client), 0);
        let defined = secret.and_then(|secret| secret.set_value(&key, 0));
        defined.map_err(|error| refused(error.message()))
    }

    /// Requests the detach of a disk.
    pub(super) fn request_detach(&self, node: Uuid, disk: &Disk) -> Result<Detach> {
        let now = self.snapshot_after_jobs(node)?;
        let Some(found) = now.live.find_disk(disk) else { return Ok(Detach::Gone) };
        let attached = found.attached_to(node, &now.live);
        let keeps = |one: &Difference| one.diverts_writes() || *one == Difference::Serial;
        if attached.differences(disk, None).iter().any(keeps) {
            return Err(HypervisorError::Altered(Box::new(attached)));
        }
        let disk = disk.uuid;
        if found.mirror.is_some() {
            return Ok(Detach::Copied);
        }
        let Some(domain) = self.domain(node)? else { return Ok(Detach::Gone) };
        self.may_act()?;
        match domain.detach_device_flags(&found.xml, sys::VIR_DOMAIN_AFFECT_LIVE) {
            Ok(()) => {}
            Err(error) if lost(&self.connection, &error) => {
                return Err(self.error(&format!("detach the disk {disk} from domain {node}"), &error));
            }
            // The disk is being detached or is gone: the live XML decides.
            Err(error) => tracing::debug!(%node, %disk, error = error.message(), "detach request failed"),
        }
        Ok(if self.snapshot(node)?.live.find(disk).is_none() { Detach::Gone } else { Detach::Requested })
    }

    /// Removes a disk from the persistent definition of a domain, if it has the UUID and the data of this one.
    pub(super) fn undefine(&self, node: Uuid, disk: &Disk) -> Result<()> {
        let Some(domain) = self.domain(node)? else { return Ok(()) };
        let failed = |e| self.error(&format!("read the definition of the domain {node}"), &e);
        let text = domain.xml_desc(sys::VIR_DOMAIN_XML_INACTIVE).map_err(failed)?;
        let defined = LiveDomain::parse(&text).map_err(|why| {
            HypervisorError::Uncertain(format!("the definition of domain {node} cannot be read: {why}"))
        })?;
        let data = [disk.source.location()];
        let Some(found) = defined.find(disk.uuid).filter(|found| found.layers == data) else { return Ok(()) };
        self.may_act()?;
        domain.detach_device_flags(&found.xml, sys::VIR_DOMAIN_AFFECT_CONFIG).map(drop).map_err(|e| {
            self.error(&format!("remove the disk {} from the definition of domain {node}", disk.uuid), &e)
        })
    }

    pub(super) fn resize(&self, node: Uuid, disk: Uuid, bytes: u64) -> Result<()> {
        let now = self.snapshot(node)?;
        if !now.is_running() {
            return Err(HypervisorError::NotRunning(format!("the domain {node} is {}", now.power.state())));
        }
        let (Some(found), Some(domain)) = (now.live.find(disk), self.domain(node)?) else {
            return Err(HypervisorError::Refused(format!("the domain {node} does not have the disk {disk}")));
        };
        self.may_act()?;
        domain
            .block_resize(&found.target, bytes, sys::VIR_DOMAIN_BLOCK_RESIZE_BYTES)
            .map_err(|e| self.error(&format!("resize the disk {disk} of domain {node}"), &e))
    }
}
