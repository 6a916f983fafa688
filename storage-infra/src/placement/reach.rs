//! Which hosts reach a pool, and what follows for its zones. Pure. Placement, capacity, attach admission and moves ask here.

use std::collections::BTreeSet;
use std::sync::Arc;

use infra_api::{Labels, PoolSpec, ZONE_LABEL};

/// A configured host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Host {
    /// Name of the hypervisor.
    pub name: String,
    /// The libvirt URI, or the directory of the hypervisor.
    pub location: String,
    /// Zone of its VMs.
    pub zone: Option<String>,
    /// Its labels.
    pub labels: Labels,
}

impl Host {
    /// Whether the host has all of these labels. Its zone is a label too.
    fn has(&self, labels: &Labels) -> bool {
        let value = |key: &str| match key {
            ZONE_LABEL => self.zone.as_ref().or(self.labels.get(key)),
            _ => self.labels.get(key),
        };
        labels.iter().all(|(key, wanted)| value(key) == Some(wanted))
    }

    fn reaches(&self, pool: &PoolSpec) -> bool {
        let hosts = &pool.hosts;
        let is_labelled = || !hosts.labels.is_empty() && self.has(&hosts.labels);
        hosts.is_all() || hosts.names.contains(&self.name) || is_labelled()
    }
}

/// The configured hosts. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Hosts(Arc<Vec<Host>>);

impl Hosts {
    /// These hosts.
    pub fn new(hosts: Vec<Host>) -> Self {
        Self(Arc::new(hosts))
    }

    /// All hosts.
    pub fn iter(&self) -> impl Iterator<Item = &Host> {
        self.0.iter()
    }

    /// The zone of a host.
    pub fn zone(&self, host: &str) -> Option<String> {
        self.iter().find(|one| one.name == host)?.zone.clone()
    }

    /// The hosts that reach a pool.
    pub fn reaching<'a>(&'a self, pool: &'a PoolSpec) -> impl Iterator<Item = &'a Host> {
        self.iter().filter(|host| host.reaches(pool))
    }

    /// Whether a host reaches a pool. One that is not configured reaches only pools that every host reaches.
    pub fn reaches(&self, host: &str, pool: &PoolSpec) -> bool {
        pool.hosts.is_all() || self.reaching(pool).any(|one| one.name == host)
    }

    /// Whether the pool can be used: it is reached by every host, or by one that is configured.
    pub fn any_reaches(&self, pool: &PoolSpec) -> bool {
        pool.hosts.is_all() || self.reaching(pool).next().is_some()
    }

    /// The names of the hosts that reach a pool, for messages.
    pub fn names_text(&self, pool: &PoolSpec) -> String {
        let names: Vec<&str> = self.reaching(pool).map(|host| host.name.as_str()).collect();
        if names.is_empty() { "no configured host".to_owned() } else { names.join(", ") }
    }

    /// The zones that can reach a pool; `None` if every zone can. The zone label of the pool is one; if only some hosts reach
    /// the pool, the zones are theirs. A host without a zone counts for the zone of the label.
    pub fn zones(&self, pool: &PoolSpec) -> Option<BTreeSet<String>> {
        let label = pool.labels.get(ZONE_LABEL);
        if pool.hosts.is_all() {
            return label.map(|zone| BTreeSet::from([zone.clone()]));
        }
        let zones = self.reaching(pool).filter_map(|host| host.zone.as_ref().or(label));
        Some(zones.filter(|zone| label.is_none_or(|label| label == *zone)).cloned().collect())
    }
}

#[cfg(test)]
mod tests {
    use infra_api::{EngineKind, OnFull, PoolHosts};

    use super::*;

    fn host(name: &str, zone: Option<&str>, labels: &[(&str, &str)]) -> Host {
        let labels = labels.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
        Host { name: name.into(), location: String::new(), zone: zone.map(str::to_owned), labels }
    }

    fn hosts() -> Hosts {
        Hosts::new(vec![
            host("a", Some("z1"), &[("nfs", "yes"), ("rack", "1")]),
            host("b", Some("z2"), &[("nfs", "yes"), ("rack", "2")]),
            host("c", None, &[]),
        ])
    }

    fn pool(names: &[&str], labels: &[(&str, &str)], zone: Option<&str>) -> PoolSpec {
        PoolSpec {
            engine: EngineKind::File,
            path: "/p".into(),
            labels: zone.map(|zone| (ZONE_LABEL.to_owned(), zone.to_owned())).into_iter().collect(),
            cordoned: false,
            on_full: OnFull::Pause,
            hosts: PoolHosts {
                names: names.iter().map(|name| (*name).to_owned()).collect(),
                labels: labels.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect(),
            },
        }
    }

    fn reaching(pool: &PoolSpec) -> String {
        hosts().names_text(pool)
    }

    #[test]
    fn a_pool_is_reached_by_named_hosts_by_labelled_hosts_or_by_all() {
        assert_eq!(reaching(&pool(&[], &[], None)), "a, b, c");
        assert_eq!(reaching(&pool(&["b"], &[], None)), "b");
        assert_eq!(reaching(&pool(&[], &[("nfs", "yes")], None)), "a, b");
        assert_eq!(reaching(&pool(&[], &[("nfs", "yes"), ("rack", "2")], None)), "b");
        assert_eq!(reaching(&pool(&["c"], &[("rack", "1")], None)), "a, c");
        assert_eq!(reaching(&pool(&[], &[(ZONE_LABEL, "z2")], None)), "b");
        assert_eq!(reaching(&pool(&["gone"], &[], None)), "no configured host");
        assert!(!hosts().any_reaches(&pool(&["gone"], &[], None)));
    }

    #[test]
    fn a_host_that_is_not_configured_reaches_only_what_every_host_reaches() {
        assert!(hosts().reaches("other", &pool(&[], &[], None)));
        assert!(!hosts().reaches("other", &pool(&["a"], &[], None)));
        // It is named, but nothing is known of it.
        assert!(!hosts().reaches("other", &pool(&["other"], &[], None)));
    }

    #[test]
    fn the_zones_are_those_of_the_label_or_of_the_hosts() {
        let zones = |pool: PoolSpec| hosts().zones(&pool).map(|zones| zones.into_iter().collect::<Vec<_>>());
        assert_eq!(zones(pool(&[], &[], None)), None);
        assert_eq!(zones(pool(&[], &[], Some("z9"))), Some(vec!["z9".into()]));
        assert_eq!(zones(pool(&["a"], &[], None)), Some(vec!["z1".into()]));
        assert_eq!(zones(pool(&[], &[("nfs", "yes")], None)), Some(vec!["z1".into(), "z2".into()]));
        assert_eq!(zones(pool(&[], &[("nfs", "yes")], Some("z1"))), Some(vec!["z1".into()]));
        // The zone of the host is unknown.
        assert_eq!(zones(pool(&["c"], &[], None)), Some(vec![]));
        assert_eq!(zones(pool(&["c"], &[], Some("z1"))), Some(vec!["z1".into()]));
        // The label and the host contradict each other.
        assert_eq!(zones(pool(&["a"], &[], Some("z2"))), Some(vec![]));
    }
}
