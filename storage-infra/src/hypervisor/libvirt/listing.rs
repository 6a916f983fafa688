//! Domain listing: power states and attached disks of all domains of a daemon.

use std::collections::{HashMap, HashSet};

use uuid::Uuid;
use virt::domain::Domain;
use virt::error::ErrorNumber;
use virt::sys;

use super::session::{Session, is};
use super::xml::LiveDomain;
use crate::hypervisor::{AttachedDisk, HypervisorError, NodeFacts, Power, Result};

/// A listed domain with its XML.
pub(super) struct Listed {
    pub(super) node: Uuid,
    pub(super) name: String,
    pub(super) live: LiveDomain,
}

impl Listed {
    /// Its disks that are files or images.
    fn disks(&self) -> impl Iterator<Item = AttachedDisk> {
        let disks = self.live.disks.iter().filter(|disk| !disk.layers.is_empty());
        disks.map(|disk| disk.attached_to(self.node, &self.live))
    }
}

impl Session {
    /// Reads the facts about these domains: one call for all that run, and one for each of the others.
    pub(super) fn describe_all(&self, nodes: &[Uuid]) -> Result<HashMap<Uuid, NodeFacts>> {
        let running = self
            .connection
            .list_all_domains(sys::VIR_CONNECT_LIST_DOMAINS_RUNNING)
            .map_err(|e| self.error("list the running domains", &e))?;
        let running: HashSet<Uuid> = running.iter().filter_map(|domain| domain.uuid().ok()).collect();
        let mut found = HashMap::new();
        for node in nodes {
            let facts = match running.contains(node) {
                true => self.facts(Power::Running { executing: true }, None),
                // A domain that cannot be read does not affect the others.
                false => match self.snapshot(*node) {
                    Ok(now) => self.facts(now.power, None),
                    Err(HypervisorError::Unreachable(why)) => return Err(HypervisorError::Unreachable(why)),
                    Err(_) => continue,
                },
            };
            found.insert(*node, facts);
        }
        Ok(found)
    }

    /// Lists the active domains.
    pub(super) fn running(&self) -> Result<HashSet<Uuid>> {
        let domains = self
            .connection
            .list_all_domains(sys::VIR_CONNECT_LIST_DOMAINS_ACTIVE)
            .map_err(|e| self.error("list the active domains", &e))?;
        Ok(domains.iter().filter_map(|domain| domain.uuid().ok()).collect())
    }

    /// Lists the files and images that active domains have attached as disks, from their live XML.
    pub(super) fn attached_disks(&self) -> Result<Vec<AttachedDisk>> {
        let active = self.listed(sys::VIR_CONNECT_LIST_DOMAINS_ACTIVE, 0, |_| true)?;
        Ok(active.iter().flat_map(Listed::disks).collect())
    }

    /// Lists the files and images that domains get as disks when they start, from their persistent definitions.
    pub(super) fn defined_disks(&self) -> Result<Vec<AttachedDisk>> {
        let (persistent, inactive) = (sys::VIR_CONNECT_LIST_DOMAINS_PERSISTENT, sys::VIR_DOMAIN_XML_INACTIVE);
        let defined = self.listed(persistent, inactive, |_| true)?;
        Ok(defined.iter().flat_map(Listed::disks).collect())
    }

    /// Lists the domains that match the flags and the filter, with the XML that these flags ask for.
    pub(super) fn listed(&self, flags: u32, xml: u32, matches: fn(&Domain) -> bool) -> Result<Vec<Listed>> {
        let domains =
            self.connection.list_all_domains(flags).map_err(|e| self.error("list the domains", &e))?;
        let mut found = Vec::new();
        for domain in domains.iter().filter(|domain| matches(domain)) {
            let failed = |e| self.error("read a domain", &e);
            let (node, name) = (domain.uuid().map_err(failed)?, domain.name().map_err(failed)?);
            let text = match domain.xml_desc(xml) {
                Ok(text) => text,
                // It stopped meanwhile.
                Err(error) if is(&error, ErrorNumber::NoDomain) => continue,
                Err(error) => return Err(self.error(&format!("read the domain {name}"), &error)),
            };
            let live = LiveDomain::parse(&text).map_err(|why| {
                HypervisorError::Uncertain(format!("the XML of domain {name} cannot be read: {why}"))
            })?;
            found.push(Listed { node, name, live });
        }
        Ok(found)
    }
}
