//! What is plugged into all domains of a daemon, whoever plugged it.

use virt::error::ErrorNumber;
use virt::sys;

use super::xml::LiveDomain;
use super::{Session, is};
use crate::hypervisor::{HypervisorError, Plugged, Result};

impl Session {
    /// The files that active domains have as disks, by their live XML.
    pub(super) fn plugged(&self) -> Result<Vec<Plugged>> {
        let domains = self
            .connection
            .list_all_domains(sys::VIR_CONNECT_LIST_DOMAINS_ACTIVE)
            .map_err(|e| self.error("list the domains", &e))?;
        let mut found = Vec::new();
        for domain in domains {
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
            found.extend(live.disks.into_iter().filter_map(|disk| {
                let path = disk.file?.into();
                Some(Plugged { node, name: name.clone(), path, read_only: disk.read_only })
            }));
        }
        Ok(found)
    }
}
