//! Free TCP ports on the loopback address.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail};
use uuid::Uuid;

/// Below the kernel's usual ephemeral range (32768 and up), so that no outgoing connection takes one in between.
const RANGE: std::ops::Range<u16> = 20_000..32_000;

/// Ports that this process has allocated: a component binds its port later, and again after each restart.
static ALLOCATED: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());

/// The port at the end of a URL.
pub fn of_url(url: &str) -> Result<u16> {
    let port = url.trim_end_matches('/').rsplit(':').next().and_then(|port| port.parse().ok());
    port.with_context(|| format!("no port in {url}"))
}

/// Allocates `count` different free ports that this process has not allocated before. They are drawn at random, so that
/// two labs that start at the same time do not get the same ones.
pub fn free(count: usize) -> Result<Vec<u16>> {
    let mut allocated = ALLOCATED.lock().unwrap_or_else(PoisonError::into_inner);
    let mut held = Vec::new();
    let mut ports = Vec::new();
    for _ in 0..10_000 {
        if ports.len() == count {
            return Ok(ports);
        }
        let (random, _) = Uuid::new_v4().as_u64_pair();
        let port = RANGE.start + (random % RANGE.len() as u64) as u16;
        if !allocated.contains(&port)
            && let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, port))
        {
            allocated.insert(port);
            held.push(listener);
            ports.push(port);
        }
    }
    bail!("no {count} free TCP ports on 127.0.0.1 between {} and {}", RANGE.start, RANGE.end)
}

#[cfg(test)]
mod tests {
    use super::of_url;

    #[test]
    fn the_port_of_a_url_is_found() {
        assert_eq!(of_url("https://127.0.0.1:8443").unwrap(), 8443);
        assert_eq!(of_url("http://127.0.0.1:2379/").unwrap(), 2379);
        assert!(of_url("https://example.com").is_err());
    }
}
