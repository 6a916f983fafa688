//! Hypervisor hosts of a lab, and the pools that they reach.
//!
//! All hosts are this machine. Each has a libvirtd with folders, mounts and a network of its own, so that a VM is on one of them,
//! and a pool that a host does not reach does not exist there.

use std::path::PathBuf;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::infra::{LIBVIRT, ZONES};
use crate::run::Run;

/// Key of the label that says whether one host or several reach a pool: `local` or `shared`. Pools of labs with one host do
/// not have it.
pub const REACH: &str = "lab.nestor.dev/reach";

/// A host of a lab, by its number. The first one has the plain names of a lab with one host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Host(u8);

/// A pool of a lab.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pool {
    /// Its name.
    pub(crate) name: &'static str,
    /// The hosts that reach it; none stands for all.
    pub(crate) hosts: Vec<Host>,
}

impl Host {
    /// All hosts that a lab can have.
    pub const ALL: [Self; 2] = [Self(0), Self(1)];

    /// The hosts of a lab with this number of them.
    pub(crate) fn of_lab(count: u8) -> &'static [Self] {
        &Self::ALL[..usize::from(count).clamp(1, Self::ALL.len())]
    }

    fn letter(self) -> &'static str {
        ["a", "b"][usize::from(self.0)]
    }

    /// Its name in a lab with several hosts: `host-a` or `host-b`.
    pub fn name(self) -> String {
        format!("host-{}", self.letter())
    }

    /// Its name as a hypervisor of the storage infra.
    pub(crate) fn hypervisor(self, hosts: &[Self]) -> String {
        if hosts.len() > 1 { self.name() } else { LIBVIRT.to_owned() }
    }

    /// The zone of its VMs.
    pub fn zone(self) -> &'static str {
        ZONES[usize::from(self.0)]
    }

    /// The name of something of which each host has one.
    pub(crate) fn own(self, name: &str) -> String {
        if self == Self::default() { name.to_owned() } else { format!("{name}-{}", self.letter()) }
    }

    /// The component name of its libvirtd.
    pub fn libvirtd(self) -> String {
        self.own("libvirtd")
    }

    /// Folder of its sockets.
    pub(crate) fn socket_dir(self, run: &Run) -> PathBuf {
        let shared = run.socket_dir();
        if self == Self::default() { shared } else { shared.join(self.name()) }
    }

    /// The host of a VM: the first one for domains that are not VMs of the lab.
    pub(crate) fn of_vm(run: &Run, vm: &str) -> Result<Self> {
        Ok(run.state()?.vms.get(vm).map(|record| record.host).unwrap_or_default())
    }

    /// The host with this name.
    pub(crate) fn named(name: &str, hosts: &[Self]) -> Result<Self> {
        let names = || hosts.iter().map(|host| host.name()).collect::<Vec<_>>().join(", ");
        let found = hosts.iter().find(|host| host.name() == name).copied();
        found.with_context(|| format!("the lab has no host {name:?}, only {}", names()))
    }
}

impl Pool {
    /// The pools of a lab: two that every host reaches, or one local to each of several hosts and one that they share.
    pub(crate) fn of_lab(hosts: &[Host]) -> Vec<Self> {
        let [first, second] = *hosts else {
            return crate::infra::POOLS.map(|name| Self { name, hosts: Vec::new() }).to_vec();
        };
        let local = |name, host| Self { name, hosts: vec![host] };
        let shared = Self { name: "shared", hosts: vec![first, second] };
        vec![local("local-a", first), local("local-b", second), shared]
    }

    /// Whether a host reaches it.
    pub(crate) fn is_reached_by(&self, host: Host) -> bool {
        self.hosts.is_empty() || self.hosts.contains(&host)
    }

    /// The value of its label [`REACH`].
    pub(crate) fn reach(&self) -> Option<&'static str> {
        match self.hosts.len() {
            0 => None,
            1 => Some("local"),
            _ => Some("shared"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(hosts: &[Host], reached_by: Host) -> Vec<&'static str> {
        let pools = Pool::of_lab(hosts).into_iter();
        pools.filter(|pool| pool.is_reached_by(reached_by)).map(|pool| pool.name).collect()
    }

    #[test]
    fn each_host_reaches_its_local_pool_and_the_shared_one() {
        let both = Host::of_lab(2);
        assert_eq!(names(both, both[0]), ["local-a", "shared"]);
        assert_eq!(names(both, both[1]), ["local-b", "shared"]);
        let one = Host::of_lab(1);
        assert_eq!(names(one, one[0]), ["pool-a", "pool-b"]);
        let reach = Pool::of_lab(both).iter().map(Pool::reach).collect::<Vec<_>>();
        assert_eq!(reach, [Some("local"), Some("local"), Some("shared")]);
        assert!(Pool::of_lab(one).iter().all(|pool| pool.reach().is_none()));
    }

    #[test]
    fn only_a_lab_with_several_hosts_has_names_for_them() {
        // The state of a lab of an earlier version has no number.
        for count in [0, 1] {
            let one = Host::of_lab(count);
            assert_eq!(
                (one.len(), one[0].hypervisor(one), one[0].libvirtd()),
                (1, "libvirt".into(), "libvirtd".into())
            );
        }
        let both = Host::of_lab(2);
        let shown = both.iter().map(|host| (host.hypervisor(both), host.libvirtd(), host.zone()));
        assert_eq!(
            shown.collect::<Vec<_>>(),
            [
                ("host-a".into(), "libvirtd".into(), "zone-a"),
                ("host-b".into(), "libvirtd-b".into(), "zone-b")
            ]
        );
        assert_eq!(Host::named("host-b", both).unwrap(), both[1]);
        let unknown = Host::named("host-c", both).unwrap_err().to_string();
        assert!(unknown.contains("only host-a, host-b"), "{unknown}");
    }
}
