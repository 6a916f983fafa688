//! Free TCP ports on the loopback address.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::{Mutex, PoisonError};

use anyhow::{Result, bail};
use uuid::Uuid;

/// Below the kernel's usual ephemeral range (32768 and up), so that no outgoing connection takes one in between.
const RANGE: std::ops::Range<u16> = 20_000..32_000;

/// Ports that this process has allocated: a component binds its port later, and again after each restart.
static ALLOCATED: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());

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
