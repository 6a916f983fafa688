//! Domains that libvirt paused because a disk could not be written, and how they go on.

use uuid::Uuid;
use virt::domain::{
    Domain, DomainPausedReason, DomainPausedReasonEnum, DomainStateReason, DomainStateReasonEnum,
};
use virt::error::ErrorNumber;
use virt::sys;

use super::virsh::DiskError;
use super::xml::LiveDomain;
use super::{Session, is};
use crate::hypervisor::{HypervisorError, Result, Stalled};

/// A domain that is paused since a disk failed; which one, its XML does not say.
pub(super) struct Paused {
    pub(super) node: Uuid,
    name: String,
    live: LiveDomain,
}

impl Paused {
    /// The same with what failed.
    pub(super) fn stalled(self, errors: &[DiskError]) -> Stalled {
        let mut stalled =
            Stalled { node: self.node, name: self.name, out_of_space: Vec::new(), failed: Vec::new() };
        for error in errors {
            let disk = self.live.disks.iter().find(|disk| disk.target == error.target);
            match disk.and_then(|disk| disk.uuid).filter(|_| error.is_out_of_space) {
                Some(uuid) => stalled.out_of_space.push(uuid),
                None => stalled.failed.push(error.target.clone()),
            }
        }
        stalled
    }
}

/// Whether a domain is paused since a disk failed, and for nothing else.
fn is_paused_for_errors(domain: &Domain) -> bool {
    let failed = DomainStateReason::Paused(DomainPausedReasonEnum::Known(DomainPausedReason::IOError));
    matches!(domain.state(), Ok((_, DomainStateReasonEnum::Known(reason))) if reason == failed)
}

impl Session {
    /// The domains that are paused since a disk failed.
    pub(super) fn paused_for_errors(&self) -> Result<Vec<Paused>> {
        let domains = self
            .connection
            .list_all_domains(sys::VIR_CONNECT_LIST_DOMAINS_PAUSED)
            .map_err(|e| self.error("list the domains that are paused", &e))?;
        let mut found = Vec::new();
        for domain in domains.iter().filter(|domain| is_paused_for_errors(domain)) {
            let failed = |e| self.error("read a domain", &e);
            let (node, name) = (domain.uuid().map_err(failed)?, domain.name().map_err(failed)?);
            let text = match domain.xml_desc(0) {
                Ok(text) => text,
                // It ended meanwhile.
                Err(error) if is(&error, ErrorNumber::NoDomain) => continue,
                Err(error) => return Err(self.error(&format!("read the domain {name}"), &error)),
            };
            let live = LiveDomain::parse(&text).map_err(|why| {
                HypervisorError::Uncertain(format!("the XML of domain {name} cannot be read: {why}"))
            })?;
            found.push(Paused { node, name, live });
        }
        Ok(found)
    }

    /// Lets a domain go on that is paused since a disk failed: QEMU makes the same request again.
    pub(super) fn resume(&self, node: Uuid) -> Result<()> {
        let Some(domain) = self.domain(node)?.filter(is_paused_for_errors) else { return Ok(()) };
        domain.resume().map_err(|e| self.error(&format!("resume the domain {node}"), &e)).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_found_no_space_is_told_from_what_failed_otherwise_and_from_disks_of_others() {
        let ours = Uuid::from_u128(7);
        let xml = format!(
            "<domain type='qemu'><name>x</name><devices>\
             <disk type='file' device='disk'><source file='/root.raw'/><target dev='sda' bus='scsi'/></disk>\
             <disk type='file' device='disk'><target dev='sdb' bus='scsi'/><serial>{ours}</serial></disk>\
             </devices></domain>"
        );
        let of = |errors: &[(&str, bool)]| {
            let live = LiveDomain::parse(&xml).unwrap();
            let errors: Vec<DiskError> = errors
                .iter()
                .map(|(target, is_out_of_space)| DiskError {
                    target: (*target).to_owned(),
                    is_out_of_space: *is_out_of_space,
                })
                .collect();
            let found = Paused { node: Uuid::nil(), name: "x".into(), live }.stalled(&errors);
            (found.out_of_space, found.failed)
        };
        assert_eq!(of(&[("sdb", true)]), (vec![ours], vec![]));
        assert_eq!(of(&[("sdb", false), ("sda", true)]), (vec![], vec!["sdb".to_owned(), "sda".to_owned()]));
    }
}
