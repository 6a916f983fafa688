//! Paused domains: domains that libvirt paused after an I/O error, and pausing and resuming on request.

use uuid::Uuid;
use virt::domain::{
    Domain, DomainPausedReason, DomainPausedReasonEnum, DomainStateReason, DomainStateReasonEnum,
};
use virt::sys;

use super::Session;
use super::listing::Listed;
use super::virsh::DiskError;
use crate::hypervisor::{HypervisorError, PausedVm, Result};

impl Listed {
    /// The paused virtual machine, with its failed disks.
    pub(super) fn into_paused_vm(self, errors: &[DiskError]) -> PausedVm {
        let mut vm =
            PausedVm { node: self.node, name: self.name, out_of_space: Vec::new(), failed: Vec::new() };
        for error in errors {
            let disk = self.live.disks.iter().find(|disk| disk.target == error.target);
            match disk.and_then(|disk| disk.uuid).filter(|_| error.is_out_of_space) {
                Some(uuid) => vm.out_of_space.push(uuid),
                None => vm.failed.push(error.target.clone()),
            }
        }
        vm
    }
}

/// Whether a domain is paused because of an I/O error and for no other reason.
fn is_paused_for_errors(domain: &Domain) -> bool {
    is_paused_because(domain, DomainPausedReason::IOError)
}

fn is_paused_because(domain: &Domain, why: DomainPausedReason) -> bool {
    let expected = DomainStateReason::Paused(DomainPausedReasonEnum::Known(why));
    matches!(domain.state(), Ok((_, DomainStateReasonEnum::Known(reason))) if reason == expected)
}

impl Session {
    /// Lists the domains that are paused after an I/O error. Their XML does not tell which disk failed.
    pub(super) fn paused_for_errors(&self) -> Result<Vec<Listed>> {
        self.listed(sys::VIR_CONNECT_LIST_DOMAINS_PAUSED, 0, is_paused_for_errors)
    }

    /// Resumes a domain that is paused after an I/O error: QEMU repeats the failed request.
    pub(super) fn resume(&self, node: Uuid) -> Result<()> {
        let Some(domain) = self.domain(node)?.filter(is_paused_for_errors) else { return Ok(()) };
        self.resume_domain(node, &domain)
    }

    /// Pauses a domain. libvirt returns after QEMU has completed or stopped all I/O.
    pub(super) fn pause(&self, node: Uuid) -> Result<()> {
        if !self.snapshot(node)?.is_running() {
            return Err(HypervisorError::NotRunning(format!("the domain {node} does not run")));
        }
        let Some(domain) = self.domain(node)? else { return Ok(()) };
        domain.suspend().map_err(|e| self.error(&format!("pause the domain {node}"), &e)).map(drop)
    }

    /// Resumes a domain that was paused on request.
    pub(super) fn unpause(&self, node: Uuid) -> Result<()> {
        let on_request = |domain: &Domain| is_paused_because(domain, DomainPausedReason::User);
        let Some(domain) = self.domain(node)?.filter(on_request) else { return Ok(()) };
        self.resume_domain(node, &domain)
    }

    fn resume_domain(&self, node: Uuid, domain: &Domain) -> Result<()> {
        domain.resume().map_err(|e| self.error(&format!("resume the domain {node}"), &e)).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::super::xml::LiveDomain;
    use super::*;

    #[test]
    fn out_of_space_is_distinguished_from_other_errors_and_foreign_disks() {
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
            let found = Listed { node: Uuid::nil(), name: "x".into(), live }.into_paused_vm(&errors);
            (found.out_of_space, found.failed)
        };
        assert_eq!(of(&[("sdb", true)]), (vec![ours], vec![]));
        assert_eq!(of(&[("sdb", false), ("sda", true)]), (vec![], vec!["sdb".to_owned(), "sda".to_owned()]));
    }
}
