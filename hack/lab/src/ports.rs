//! Free TCP ports on the loopback address.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::{Mutex, PoisonError};

use anyhow::{Result, bail};
use uuid::Uuid;

/// Below the kernel's usual ephemeral range (32768 and up), so that no outgoing connection takes one in between.
const RANGE: std::ops::Range<u16> = 20_000..32_000;

/// What this process has given: a part binds its port some time after it was drawn, and again whenever it starts.
static GIVEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());

/// `count` ports that could be bound just now, all different, and given to nobody else in this process. Drawn at random,
/// so that two labs that come up at the same time do not draw the same ones.
pub fn free(count: usize) -> Result<Vec<u16>> {
    let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
    let mut held = Vec::new();
    let mut ports = Vec::new();
    for _ in 0..10_000 {
        if ports.len() == count {
            return Ok(ports);
        }
        let (random, _) = Uuid::new_v4().as_u64_pair();
        let port = RANGE.start + (random % RANGE.len() as u64) as u16;
        if !given.contains(&port)
            && let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, port))
        {
            given.insert(port);
            held.push(listener);
            ports.push(port);
        }
    }
    bail!("no {count} free TCP ports on 127.0.0.1 between {} and {}", RANGE.start, RANGE.end)
}
