//! Ports of a cluster: consecutive, and the same after each restart of a daemon.

use std::net::{Ipv6Addr, TcpListener};
use std::ops::Range;

use anyhow::{Result, bail};
use uuid::Uuid;

use crate::{Daemon, OSDS};

/// Ports from which an OSD takes four. It leaves out those of its earlier life.
const OF_AN_OSD: u16 = 16;
const OF_ANOTHER: u16 = 4;
/// Ports of a cluster.
const ALL: u16 = 2 * OF_ANOTHER + OSDS.len() as u16 * OF_AN_OSD;
/// Below the kernel's usual ephemeral range, so that no outgoing connection takes one in between.
const CHOICE: Range<u16> = 20_000..32_000;

/// The first of as many free ports as a cluster needs, drawn at random, so that two clusters that start at the same time
/// do not get the same ones.
pub(crate) fn first_free() -> Result<u16> {
    TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).map_err(|error| {
        anyhow::anyhow!("cannot listen on [::1], where the Ceph cluster listens: {error}")
    })?;
    for _ in 0..1000 {
        let (random, _) = Uuid::new_v4().as_u64_pair();
        let first = CHOICE.start + (random % u64::from(CHOICE.end - CHOICE.start - ALL)) as u16;
        let held: Vec<_> =
            all(first).map_while(|port| TcpListener::bind((Ipv6Addr::LOCALHOST, port)).ok()).collect();
        if held.len() == usize::from(ALL) {
            return Ok(first);
        }
    }
    bail!("no {ALL} consecutive free TCP ports on [::1] between {} and {}", CHOICE.start, CHOICE.end)
}

/// All ports of a cluster.
pub(crate) fn all(first: u16) -> Range<u16> {
    first..first + ALL
}

/// Ports of a daemon.
pub(crate) fn of(first: u16, daemon: Daemon) -> Range<u16> {
    match daemon {
        Daemon::Monitor => first..first + OF_ANOTHER,
        Daemon::Manager => first + OF_ANOTHER..first + 2 * OF_ANOTHER,
        Daemon::Osd(id) => {
            let start = first + 2 * OF_ANOTHER + u16::from(id) * OF_AN_OSD;
            start..start + OF_AN_OSD
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn daemons_share_no_port_and_have_all_of_them() {
        let ports: Vec<u16> = Daemon::all().flat_map(|daemon| of(20_000, daemon)).collect();
        assert_eq!(ports, all(20_000).collect::<Vec<_>>());
    }

    #[test]
    fn free_ports_can_be_listened_on() {
        let first = first_free().unwrap();
        let listeners: Result<Vec<_>, _> =
            all(first).map(|port| TcpListener::bind((Ipv6Addr::LOCALHOST, port))).collect();
        assert_eq!(listeners.unwrap().len(), usize::from(ALL));
    }
}
